"""Quantisation for Sage attention: query, key and value to 8 bits with their scales, in one call."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from cubin_runtime.errors import refuse
from cubin_runtime.families.sage_quantize import Addresses, Blocks, Problem, QuantizeCall
from cubin_runtime.module import device_info, on_unload
from cubin_runtime.reference import E4M3_MAX, INT8_RANGE, sage_quantize_reference
from cubin_runtime.streams import current_stream as _current_stream

HEAD_DIMS = (64, 128, 256)
BLOCK_SIZES = (1, 4, 16)
_DTYPES = (torch.bfloat16, torch.float16)
_RANGES = {torch.int8: INT8_RANGE, torch.float8_e4m3fn: E4M3_MAX}
_ALIGNMENT = 16
_MOST_TOKENS = 2**30  # rounded up to blocks, and with a column for each sequence, they still are an int32


def trtllm_sage_attention_quantize(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_block_size: int = 1,
    k_block_size: int = 16,
    qk_quant_dtype: torch.dtype = torch.int8,
    cum_seq_lens_q: Tensor | None = None,
    cum_seq_lens_kv: Tensor | None = None,
    smooth_k: bool = False,
) -> tuple[Tensor, ...]:
    """Quantises the operands of Sage attention.

    Returns (q_quant, k_quant, v_quant, q_scale, k_scale, v_scale), and with smooth_k also k_mean.
    `trtllm_ragged_attention_deepseek` takes them as query, key and value, with sage_attn_sfs = (q_scale,
    k_scale, None, v_scale) and num_elts_per_sage_attn_blk = (q_block_size, k_block_size, 0, 1).

    The results land on torch's current stream of query's device; nothing is synchronised, nothing but the
    results and a little scratch is allocated, and the call may be captured in a CUDA graph. The same input
    gives the same bits. For tensors on the CPU, `cubin_runtime.reference.sage_quantize_reference` is run.

    query           [total_q, num_heads_q, head_dim]: bfloat16 or float16, contiguous; head_dim 64, 128 or 256
    key, value      [total_kv, num_heads_kv, head_dim], of query's dtype; value may have another head_dim
    q_block_size, k_block_size   tokens that share a scale: 1, 4 or 16. No block spans two sequences
    qk_quant_dtype  int8 (the largest magnitude of a block becomes 126.9) or float8_e4m3fn (448)
    cum_seq_lens_q, cum_seq_lens_kv   int32 [batch_size + 1], first 0. None = one sequence; cum_seq_lens_q
                    alone counts for both
    smooth_k        subtract the mean of key over all tokens first: attention stays the same, the LSE does not

    q_quant, k_quant  qk_quant_dtype, in the shapes of query and key
    v_quant         float8_e4m3fn, in the shape of value
    q_scale         float32 [num_heads_q, ceil(total_q / q_block_size) + batch_size - 1]: local token t of
                    sequence b at column cum_seq_lens_q[b] // q_block_size + b + t // q_block_size; k_scale
                    alike. A scale is max(largest magnitude, 1e-3) / range, in a column without tokens, too
    v_scale         float32 [num_heads_kv, head_dim]: likewise, of each channel over all tokens, range 448
    k_mean          float32 [num_heads_kv, head_dim]

    All tokens are those of the sequences. Padding behind the last one influences nothing and becomes 0. A
    block of query or key with NaN or infinity gets the scale NaN and the numbers 0; k_mean (as if they were
    0) and v_scale leave them out, so that other sequences do not suffer. In v_quant NaN stays NaN, and
    infinity becomes 448.

    Raises InvalidArgumentError (a ValueError) for an argument, UnsupportedError (a NotImplementedError) for a
    device without these kernels, ArtifactError (an OSError) where a cubin cannot be had, DriverError (a
    RuntimeError).
    """
    if cum_seq_lens_kv is None:
        cum_seq_lens_kv = cum_seq_lens_q
    _check_operands(query, key, value)
    _check_block_size("q_block_size", q_block_size)
    _check_block_size("k_block_size", k_block_size)
    if qk_quant_dtype not in _RANGES:
        refuse("qk_quant_dtype", f"is {qk_quant_dtype!r}", f"one of {', '.join(map(str, _RANGES))}")
    if not isinstance(smooth_k, int):
        refuse("smooth_k", f"is a {type(smooth_k).__name__}", "a bool")
    sequences = _check_edges(cum_seq_lens_q, cum_seq_lens_kv, query)
    if query.device.type == "cpu":
        return sage_quantize_reference(
            query,
            key,
            value,
            q_block_size=q_block_size,
            k_block_size=k_block_size,
            qk_quant_dtype=qk_quant_dtype,
            cum_seq_lens_q=cum_seq_lens_q,
            cum_seq_lens_kv=cum_seq_lens_kv,
            smooth_k=bool(smooth_k),
        )
    problem = Problem(
        query=Blocks(query.shape[0], query.shape[1], sequences, q_block_size),
        key=Blocks(key.shape[0], key.shape[1], sequences, k_block_size),
        head_dim=query.shape[2],
        head_dim_v=value.shape[2],
        is_fp16=query.dtype == torch.float16,
        is_e4m3=qk_quant_dtype == torch.float8_e4m3fn,
        range=_RANGES[qk_quant_dtype],
        smooth_k=bool(smooth_k),
    )
    call = _prepare(problem, query.get_device())
    return _run(call, problem, query, key, value, cum_seq_lens_q, cum_seq_lens_kv)


@functools.lru_cache(maxsize=256)
def _prepare(problem: Problem, device: int) -> QuantizeCall:
    return QuantizeCall(problem, device_info(device))


on_unload.append(_prepare.cache_clear)


def _run(
    call: QuantizeCall,
    problem: Problem,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edges_q: Tensor | None,
    edges_kv: Tensor | None,
) -> tuple[Tensor, ...]:
    """Allocates the results and launches."""
    new = functools.partial(_new, device=query.device)
    qk_dtype = torch.float8_e4m3fn if problem.is_e4m3 else torch.int8
    q_quant = new(query.shape, qk_dtype)
    k_quant = new(key.shape, qk_dtype)
    v_quant = new(value.shape, torch.float8_e4m3fn)
    q_scale = new((problem.query.heads, problem.query.columns), torch.float32)
    k_scale = new((problem.key.heads, problem.key.columns), torch.float32)
    v_scale = new(value.shape[1:], torch.float32)
    k_mean = new(key.shape[1:], torch.float32) if problem.smooth_k else None
    scratch = new((call.scratch.size,), torch.uint8)
    addresses = Addresses(
        query=_aligned("query", query),
        key=_aligned("key", key),
        value=_aligned("value", value),
        q_quant=q_quant.data_ptr(),
        k_quant=k_quant.data_ptr(),
        v_quant=v_quant.data_ptr(),
        q_scale=q_scale.data_ptr(),
        k_scale=k_scale.data_ptr(),
        v_scale=v_scale.data_ptr(),
        k_mean=0 if k_mean is None else k_mean.data_ptr(),
        cum_seq_lens_q=0 if edges_q is None else edges_q.data_ptr(),
        cum_seq_lens_kv=0 if edges_kv is None else edges_kv.data_ptr(),
        scratch=scratch.data_ptr(),
    )
    call(addresses, _current_stream(call.device.ordinal), pdl=True)
    results = (q_quant, k_quant, v_quant, q_scale, k_scale, v_scale)
    return results if k_mean is None else (*results, k_mean)


def _new(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device=device)


# ---- checks


def _check_operands(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            refuse(name, f"is a {type(tensor).__name__}", "a torch.Tensor")
        if tensor.dtype not in _DTYPES:
            refuse(name, f"has dtype {tensor.dtype}", f"one of {', '.join(map(str, _DTYPES))}")
        if tensor.dtype != query.dtype:
            refuse(name, f"has dtype {tensor.dtype}", f"that of query, {query.dtype}")
        if tensor.dim() != 3:
            refuse(name, f"has shape {tuple(tensor.shape)}", "3 dimensions [tokens, heads, head_dim]")
        if tensor.shape[2] not in HEAD_DIMS:
            refuse(name, f"has head_dim {tensor.shape[2]}", f"one of {', '.join(map(str, HEAD_DIMS))}")
        if tensor.shape[1] < 1:
            refuse(name, "has 0 heads", "at least 1")
        if tensor.shape[0] > _MOST_TOKENS:
            refuse(name, f"has {tensor.shape[0]} tokens", f"at most {_MOST_TOKENS}")
        if tensor.device != query.device or tensor.device.type not in ("cuda", "cpu"):
            refuse(name, f"is on {tensor.device}", f"a CUDA device or the CPU, as query, on {query.device}")
        if not tensor.is_contiguous():
            refuse(
                name, f"has strides {tensor.stride()} for shape {tuple(tensor.shape)}", "a contiguous tensor"
            )
    if key.shape[2] != query.shape[2]:
        refuse("key", f"has head_dim {key.shape[2]}", f"that of query, {query.shape[2]}")
    if value.shape[:2] != key.shape[:2]:
        tokens, heads, _ = key.shape
        refuse("value", f"has shape {tuple(value.shape)}", f"[{tokens}, {heads}, ...] as key has")


def _check_block_size(name: str, size: object) -> None:
    if not isinstance(size, int) or size not in BLOCK_SIZES:
        refuse(name, f"is {size!r}", f"one of {', '.join(map(str, BLOCK_SIZES))}")


def _check_edges(edges_q: Tensor | None, edges_kv: Tensor | None, query: Tensor) -> int:
    """The number of sequences."""
    if edges_q is None and edges_kv is not None:
        refuse(
            "cum_seq_lens_q", "is None with cum_seq_lens_kv given", "both, neither, or cum_seq_lens_q alone"
        )
    for name, edges in (("cum_seq_lens_q", edges_q), ("cum_seq_lens_kv", edges_kv)):
        if edges is None:
            continue
        if not isinstance(edges, Tensor):
            refuse(name, f"is a {type(edges).__name__}", "None or a torch.Tensor")
        if edges.dtype != torch.int32:
            refuse(name, f"has dtype {edges.dtype}", "torch.int32")
        if edges.dim() != 1 or not edges.numel() or not edges.is_contiguous():
            given = f"has shape {tuple(edges.shape)} and stride {edges.stride()}"
            refuse(name, given, "a contiguous (batch_size + 1,)")
        if edges.device != query.device:
            refuse(name, f"is on {edges.device}", f"the device of query, {query.device}")
    if edges_q is None or edges_kv is None:
        return 1
    if edges_kv.shape != edges_q.shape:
        expected = f"that of cum_seq_lens_q, {tuple(edges_q.shape)}"
        refuse("cum_seq_lens_kv", f"has shape {tuple(edges_kv.shape)}", expected)
    return edges_q.shape[0] - 1


def _aligned(name: str, tensor: Tensor) -> int:
    """Where the tensor starts."""
    address = tensor.data_ptr()
    if address % _ALIGNMENT:
        refuse(name, f"starts at {address:#x}", f"a multiple of {_ALIGNMENT}")
    return address
