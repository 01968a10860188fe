"""The call itself. A repeated call is one dictionary look-up, packing, launching.

Everything that does not depend on addresses and values is checked, selected, loaded and prepared once per
*signature*: shapes, strides, dtypes, device and flags of the arguments. Two calls of one signature are valid
or invalid alike, so the second needs no checks beyond those of addresses and CPU mirrors.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable
from typing import Any, cast

import torch

from cubin_runtime import arguments as checks
from cubin_runtime.arguments import DTYPES, Call
from cubin_runtime.families import Arguments, PreparedCall, Problem, TensorLayout, family
from cubin_runtime.module import device_info, load, on_unload
from cubin_runtime.reference import ragged_attention_reference
from cubin_runtime.request import KernelRequest, MaskType
from cubin_runtime.selection import select
from cubin_runtime.settings import logger, settings
from kernel_meta.schema import KernelRow

if settings.log_level != logging.NOTSET:
    logger.setLevel(settings.log_level)

_PDL_CAPABILITY = (9, 0)
_MAX_PREPARED = 512

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

_prepared: dict[Hashable, PreparedCall] = {}
on_unload.append(_prepared.clear)


def trtllm_ragged_attention_deepseek(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    workspace_buffer: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | torch.Tensor,
    bmm2_scale: float | torch.Tensor,
    o_sf_scale: float,
    batch_size: int,
    window_left: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    enable_pdl: bool | None = None,
    is_causal: bool = True,
    return_lse: bool = False,
    attention_sinks: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    sage_attn_sfs: tuple[torch.Tensor | None, ...] = (None, None, None, None),
    num_elts_per_sage_attn_blk: tuple[int, ...] = (0, 0, 0, 0),
    backend: str = "trtllm-gen",
    q_seq_lens_cpu: torch.Tensor | None = None,
    kv_seq_lens_cpu: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
    skip_all_rows_active_check: bool = True,
) -> Result:
    """Attention over a ragged batch: every sequence's queries against its own keys and values.

    For row i of a sequence with q_len queries and kv_len keys:
    `s = bmm1_scale * q_i . k_j`, `p = softmax(s)` over the visible j, `out = bmm2_scale * sum p v_j`,
    `lse = log2(sum exp(s))`. The result lands on torch's current stream of query's device; nothing is
    synchronised, nothing but `out` and `lse` is allocated, and the call may be captured in a CUDA graph.

    query           [total_q, num_heads_q, head_dim_qk]: bfloat16, float16, float8_e4m3fn or int8
    key, value      [total_kv, num_heads_kv, head_dim_qk] and [total_kv, num_heads_kv, head_dim_v].
                    num_heads_q is a multiple of num_heads_kv. The last dimension is contiguous; other
                    strides are free, in multiples of 16 bytes
    workspace_buffer  any dtype, 16-byte aligned, contents undefined; `workspace_size` says how many bytes
    seq_lens        int32 [batch_size], number of keys of each sequence
    max_q_len, max_kv_len   upper bounds of the lengths
    bmm1_scale, bmm2_scale  float, or float32 tensor of one element that is read on the device
    o_sf_scale      for FP4 outputs, which do not exist here: ignored
    batch_size      number of sequences
    window_left     keys to the left of the diagonal that a row sees; -1 = all. Needs is_causal
    cum_seq_lens_q, cum_seq_lens_kv   int32 [batch_size + 1], first 0
    enable_pdl      let the kernel start while its predecessor in the stream finishes; None = where the
                    device can (compute capability 9.0 and up)
    is_causal       row i sees keys j <= i + kv_len - q_len
    return_lse      return (out, lse) instead of out
    attention_sinks float32 [num_heads_q]: a logit per head that joins the denominator
    skip_softmax_threshold_scale_factor   tiles whose weight is below factor / kv_len may be left out
                    (arXiv 2512.12087); None or 0 = off
    out             [total_q, num_heads_q, head_dim_v]; by default query's dtype, bfloat16 for 8-bit query
    lse             float32 [total_q, num_heads_q], any strides, BASE 2: multiply by ln 2 before merging
                    with natural-log values. Written whenever it is given
    sage_attn_sfs, num_elts_per_sage_attn_blk   float32 scales of q, k, p, v, and tokens per scale: q
                    [num_heads_q, ceil(total_q / bq) + batch_size - 1], local token t of sequence b at
                    column cum_seq_lens_q[b] // bq + b + t // bq; k alike; p None; v
                    [num_heads_kv, head_dim_v]. All sizes 0 = off
    backend         "trtllm-gen" (or "trtllm-native"), "cute-dsl", or "reference": float32 torch, also on
                    the CPU
    q_seq_lens_cpu, kv_seq_lens_cpu   int32 or int64 [batch_size] on the CPU, both or neither: checked
                    against the maxima and token counts
    use_fp16_softmax, uses_spcompress   kernel variants; None = off
    skip_all_rows_active_check   for kernels that cannot handle rows without keys. These can: a row that
                    sees no key gets out 0 and lse -inf

    Raises InvalidArgumentError (a ValueError) for an argument, UnsupportedError (a NotImplementedError)
    for a window without is_causal, NoKernelError (a LookupError) with the reasons of every kernel where
    none fits, ArtifactError (an OSError) where a cubin cannot be had, DriverError (a RuntimeError).
    """
    call = Call(
        query,
        key,
        value,
        workspace_buffer,
        seq_lens,
        max_q_len,
        max_kv_len,
        bmm1_scale,
        bmm2_scale,
        o_sf_scale,
        batch_size,
        window_left,
        cum_seq_lens_q,
        cum_seq_lens_kv,
        enable_pdl,
        is_causal,
        return_lse,
        attention_sinks,
        skip_softmax_threshold_scale_factor,
        out,
        lse,
        sage_attn_sfs,
        num_elts_per_sage_attn_blk,
        backend,
        q_seq_lens_cpu,
        kv_seq_lens_cpu,
        use_fp16_softmax,
        uses_spcompress,
        skip_all_rows_active_check,
    )
    signature = _signature(call)
    prepared = _prepared.get(signature)
    if prepared is None:
        checks.check(call)
        if call.backend == "reference":
            return _run_reference(call)
        prepared = _prepare(call)
        _remember(signature, prepared)
    elif q_seq_lens_cpu is not None or kv_seq_lens_cpu is not None:
        checks.check_mirrors(call)
    return _run(call, prepared)


# ---- every call


def _signature(call: Call) -> Hashable:
    """What decides whether a call is valid and how it is prepared; None where an argument is no tensor."""
    try:
        return (
            _layout(call.query),
            _layout(call.key),
            _layout(call.value),
            _layout(call.workspace_buffer),
            _layout(call.seq_lens),
            _layout(call.cum_seq_lens_q),
            _layout(call.cum_seq_lens_kv),
            call.max_q_len,
            call.batch_size,
            call.window_left,
            checks.mask_type(call.is_causal, call.window_left, call.max_kv_len),
            _optional_layout(call.bmm1_scale),
            _optional_layout(call.bmm2_scale),
            _optional_layout(call.attention_sinks),
            _optional_layout(call.out),
            _optional_layout(call.lse),
            call.return_lse,
            call.skip_softmax_threshold_scale_factor,
            call.num_elts_per_sage_attn_blk,
            *map(_optional_layout, call.sage_attn_sfs),
            call.backend,
            call.use_fp16_softmax,
            call.uses_spcompress,
        )
    except (AttributeError, TypeError):
        return None


def _layout(tensor: torch.Tensor) -> Hashable:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()


def _optional_layout(value: object) -> object:
    return _layout(value) if isinstance(value, torch.Tensor) else type(value)


def _run(call: Call, prepared: PreparedCall) -> Result:
    out, lse = _results(call)
    if call.query.shape[0]:
        workspace = call.workspace_buffer.data_ptr()
        checks.check_workspace_address(workspace)
        addresses = Arguments(
            call.query.data_ptr(),
            call.key.data_ptr(),
            call.value.data_ptr(),
            out.data_ptr(),
            _address(lse),
            workspace,
            call.cum_seq_lens_q.data_ptr(),
            call.cum_seq_lens_kv.data_ptr(),
            _address(call.attention_sinks),
            *_scale(call.bmm1_scale),
            *_scale(call.bmm2_scale),
        )
        if logger.isEnabledFor(logging.DEBUG):
            _log_launch(call, prepared)
        device = prepared.kernel.device
        pdl = device.capability >= _PDL_CAPABILITY if call.enable_pdl is None else call.enable_pdl
        prepared(addresses, _current_stream(device.ordinal), pdl)
    return (out, cast(torch.Tensor, lse)) if call.return_lse else out


def _results(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out and lse: the caller's, or new ones where they are wanted."""
    query, out, lse = call.query, call.out, call.lse
    if out is None:
        shape = (*query.shape[:2], call.value.shape[2])
        out = torch.empty(shape, dtype=checks.out_dtype(query.dtype), device=query.device)
    if lse is None and call.return_lse:
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    return out, lse


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _scale(scale: float | torch.Tensor) -> tuple[float, int]:
    return (0.0, scale.data_ptr()) if isinstance(scale, torch.Tensor) else (scale, 0)


def _raw_stream_function() -> Callable[[int], int]:
    """Handle of torch's current stream of a device. The public way builds an object, which costs more than
    everything else here together."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw or (lambda device: torch.cuda.current_stream(device).cuda_stream)


_current_stream = _raw_stream_function()


# ---- the first call of a signature


def _prepare(call: Call) -> PreparedCall:
    row = _choose(_request(call))
    problem = _problem(call)
    implementation = family(row.family)
    implementation.workspace(problem).check(call.workspace_buffer.nbytes)
    return implementation.prepare(problem, load(row, call.query.get_device()))


def _remember(signature: Hashable, prepared: PreparedCall) -> None:
    """Keeps a prepared call, in place of the oldest where there are too many."""
    if signature is None:
        return
    while len(_prepared) >= _MAX_PREPARED:
        _prepared.pop(next(iter(_prepared)), None)
    _prepared[signature] = prepared


@functools.lru_cache(maxsize=1024)
def _choose(request: KernelRequest) -> KernelRow:
    return select(request).require()


def _request(call: Call) -> KernelRequest:
    device = device_info(call.query.get_device())
    blocks: Any = tuple(call.num_elts_per_sage_attn_blk)
    return KernelRequest(
        capability=device.capability,
        max_shared_memory=device.max_shared_memory,
        backend=checks.BACKENDS[call.backend],
        dtype_q=DTYPES[call.query.dtype],
        dtype_k=DTYPES[call.key.dtype],
        dtype_v=DTYPES[call.value.dtype],
        dtype_o=DTYPES[_out_dtype(call)],
        head_dim_qk=call.query.shape[2],
        head_dim_v=call.value.shape[2],
        num_heads_q=call.query.shape[1],
        num_heads_kv=call.key.shape[1],
        mask_type=checks.mask_type(call.is_causal, call.window_left, call.max_kv_len),
        use_fp16_softmax=bool(call.use_fp16_softmax),
        uses_spcompress=bool(call.uses_spcompress),
        skips_softmax=bool(call.skip_softmax_threshold_scale_factor),
        sage_blocks=blocks,
    )


def _problem(call: Call) -> Problem:
    request = _request(call)
    out = call.out
    if out is None:
        out = torch.empty((*call.query.shape[:2], call.value.shape[2]), dtype=_out_dtype(call), device="meta")
    lse_strides = None
    if call.lse is not None:
        lse_strides = (call.lse.stride(0), call.lse.stride(1))
    elif call.return_lse:
        lse_strides = (call.query.shape[1], 1)
    return Problem(
        request=request,
        query=_tensor_layout(call.query),
        key=_tensor_layout(call.key),
        value=_tensor_layout(call.value),
        out=_tensor_layout(out),
        lse_strides=lse_strides,
        batch_size=call.batch_size,
        max_q_len=call.max_q_len,
        window_left=call.window_left if request.mask_type is MaskType.SLIDING else -1,
    )


def _out_dtype(call: Call) -> torch.dtype:
    return checks.out_dtype(call.query.dtype) if call.out is None else call.out.dtype


def _tensor_layout(tensor: torch.Tensor) -> TensorLayout:
    return TensorLayout(tuple(tensor.shape), tensor.stride(), DTYPES[tensor.dtype])


def _run_reference(call: Call) -> Result:
    out, lse = _results(call)
    ragged_attention_reference(
        call.query,
        call.key,
        call.value,
        cum_seq_lens_q=call.cum_seq_lens_q,
        cum_seq_lens_kv=call.cum_seq_lens_kv,
        bmm1_scale=call.bmm1_scale,
        bmm2_scale=call.bmm2_scale,
        is_causal=call.is_causal,
        window_left=call.window_left,
        attention_sinks=call.attention_sinks,
        skip_softmax_threshold_scale_factor=call.skip_softmax_threshold_scale_factor,
        uses_spcompress=bool(call.uses_spcompress),
        sage_attn_sfs=cast(Any, tuple(call.sage_attn_sfs)),
        num_elts_per_sage_attn_blk=cast(Any, tuple(call.num_elts_per_sage_attn_blk)),
        out=out,
        lse=lse,
    )
    return (out, cast(torch.Tensor, lse)) if call.return_lse else out


def _log_launch(call: Call, prepared: PreparedCall) -> None:
    """The call as it is about to be launched. Reads nothing from the device."""
    kernel = prepared.kernel
    described = {
        name: f"{tuple(value.shape)} {value.dtype} strides {value.stride()}"
        if isinstance(value, torch.Tensor)
        else value
        for name, value in call._asdict().items()
    }
    logger.debug(
        "launching %s (sha256 %s, from %s) on device %d: %s",
        kernel.row.name,
        kernel.artifact.sha256,
        kernel.store,
        kernel.device.ordinal,
        described,
    )
