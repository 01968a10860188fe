"""The call itself. A repeated call is one dictionary look-up, packing, launching.

Everything that does not depend on addresses and values is checked, selected, loaded and prepared once per
*signature*: shapes, strides, dtypes, device and flags of the arguments. Two calls of one signature are valid
or invalid alike, so the second needs no checks beyond those of addresses and CPU mirrors.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any, cast

import msgspec
import torch
from torch import Tensor

from cubin_runtime import arguments as checks
from cubin_runtime import empty_rows, torch_ops
from cubin_runtime.arguments import DTYPES, Call
from cubin_runtime.bounded import Bounded
from cubin_runtime.families import Arguments, PreparedCall, Problem, TensorLayout, family
from cubin_runtime.few_rows import few_rows
from cubin_runtime.many_keys import without_lengths
from cubin_runtime.module import device_info, load, on_unload
from cubin_runtime.recent import Recent
from cubin_runtime.reference import ragged_attention_reference
from cubin_runtime.request import SAGE_OFF, KernelRequest, MaskType
from cubin_runtime.selection import select
from cubin_runtime.settings import logger, settings
from cubin_runtime.streams import current_stream as _current_stream
from cubin_runtime.torch_ops import Result
from cubin_runtime.workspace import zero_once
from kernel_meta.schema import KernelRow

if settings.log_level != logging.NOTSET:
    logger.setLevel(settings.log_level)

_PDL_CAPABILITY = (9, 0)
_MAX_PREPARED = 512
_MAX_CHOSEN = 1024
_NUMBER = (float, int)
_NO_SCALES = (0, 0, 0, 0)
_read_by_dynamo = torch.compiler.is_dynamo_compiling

_prepared: Bounded[Hashable, PreparedCall] = Bounded(_MAX_PREPARED)
_recent: Recent[PreparedCall] = Recent(_MAX_PREPARED)
_chosen: Bounded[tuple[KernelRequest, int | None], KernelRow] = Bounded(_MAX_CHOSEN)


def _forget() -> None:
    _prepared.clear()
    _recent.clear()


on_unload.append(_forget)


def trtllm_ragged_attention_deepseek(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    workspace_buffer: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | Tensor,
    bmm2_scale: float | Tensor,
    o_sf_scale: float,
    batch_size: int,
    window_left: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    enable_pdl: bool | None = None,
    is_causal: bool = True,
    return_lse: bool = False,
    attention_sinks: Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    sage_attn_sfs: tuple[Tensor | None, ...] = (None, None, None, None),
    num_elts_per_sage_attn_blk: tuple[int, ...] = (0, 0, 0, 0),
    backend: str = "trtllm-gen",
    q_seq_lens_cpu: Tensor | None = None,
    kv_seq_lens_cpu: Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
    skip_all_rows_active_check: bool = True,
    *,
    skip_softmax_counts: Tensor | None = None,
) -> Result:
    """Attention over a ragged batch: every sequence's queries against its own keys and values.

    For row i of a sequence with q_len queries and kv_len keys:
    `s = bmm1_scale * q_i . k_j`, `p = softmax(s)` over the visible j, `out = bmm2_scale * sum p v_j`,
    `lse = log2(sum exp(s))`. The result lands on torch's current stream of query's device; nothing is
    synchronised, nothing but `out` and `lse` is allocated, and the call may be captured in a CUDA graph.

    query           [total_q, num_heads_q, head_dim_qk]: bfloat16, float16, float8_e4m3fn or int8
    key, value      [total_kv, num_heads_kv, head_dim_qk] and [total_kv, num_heads_kv, head_dim_v]: key as
                    query, value too, or float8_e4m3fn beside bfloat16 and int8. num_heads_q is a multiple
                    of num_heads_kv. The last dimension is contiguous; other strides are free, in multiples
                    of 16 bytes, but on Blackwell query and out are contiguous
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
    out             [total_q, num_heads_q, head_dim_v]; by default query's dtype, bfloat16 for 8-bit query.
                    Like lse, it shares no memory with other arguments
    lse             float32 [total_q, num_heads_q], any strides, BASE 2: multiply by ln 2 before merging
                    with natural-log values. Written whenever it is given
    sage_attn_sfs, num_elts_per_sage_attn_blk   float32 scales of q, k, p, v, and tokens per scale: q
                    [num_heads_q, ceil(total_q / bq) + batch_size - 1], local token t of sequence b at
                    column cum_seq_lens_q[b] // bq + b + t // bq; k alike; p None; v
                    [num_heads_kv, head_dim_v]. All sizes 0 = off
    backend         "trtllm-gen" (or "trtllm-native"), "cute-dsl", or "reference": float32 torch, also on
                    the CPU
    q_seq_lens_cpu, kv_seq_lens_cpu   int32 or int64 [batch_size] on the CPU, both or neither: checked
                    against the maxima and token counts. On Blackwell they also say which rows see no key
    use_fp16_softmax, uses_spcompress   kernel variants; None = off
    skip_all_rows_active_check   a row that sees no key gets out 0 and lse -inf. Blackwell's kernels cannot
                    handle such rows: there the lengths on the CPU say which they are, or with False
                    those on the device, which are read for it; True without either vouches for none
    skip_softmax_counts   int64 [2], for skip-softmax: the number of tiles that were left out is added to the
                    first, that of all tiles to the second. A tile is what is left out at once: of our
                    kernels 64 query rows (of one token each in as many heads as share a kv head, if
                    they are several) by the keys of a block; of the reference 128 by 128. It counts
                    where a row sees one of its keys

    Raises InvalidArgumentError (a ValueError) for an argument, UnsupportedError (a NotImplementedError)
    for a window without is_causal, NoKernelError (a LookupError) with the reasons of every kernel where
    none fits, ArtifactError (an OSError) where a cubin cannot be had, DriverError (a RuntimeError).
    """
    arguments = (
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
        skip_softmax_counts,
    )
    if _read_by_dynamo():
        return torch_ops.record(*arguments)
    call = Call(*arguments)
    prepared = _find(call)
    if prepared is None:
        return _first_call(call)
    if q_seq_lens_cpu is not None or kv_seq_lens_cpu is not None:
        checks.check_mirrors(call)
    return _run(call, prepared)


torch_ops.implement(trtllm_ragged_attention_deepseek)


# ---- every call


def _find(call: Call) -> PreparedCall | None:
    """What an earlier call of this signature prepared."""
    try:
        key, tensors = _shortcut(call)
        found = None if key is None else _recent.find(key, tensors)
        if found is None:
            found = _prepared.get(_signature(call))
            if found is not None and key is not None:
                _recent.remember(key, tensors, found)
        return found
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None  # an argument is no tensor, too few of them, cannot be hashed, ...: the checks say which


def _shortcut(call: Call) -> tuple[Hashable, list[Tensor]]:
    """What `_recent` goes by: a key that says which arguments are tensors, and these.

    The key is None for Sage scales, whose tensors are left to the signature.
    """
    optional = (
        call.attention_sinks,
        call.out,
        call.lse,
        call.bmm1_scale,
        call.bmm2_scale,
        call.skip_softmax_counts,
    )
    tensors = [
        call.query,
        call.key,
        call.value,
        call.workspace_buffer,
        call.seq_lens,
        call.cum_seq_lens_q,
        call.cum_seq_lens_kv,
        *[each for each in optional if isinstance(each, Tensor)],
    ]
    q, k, p, v = call.sage_attn_sfs
    if q is not None or k is not None or p is not None or v is not None:
        return None, tensors
    return (*map(type, optional), *_options(call)), tensors


def _signature(call: Call) -> Hashable:
    """What decides whether a call is valid and how it is prepared.

    The values of scales are not in it, and the CPU mirrors are checked on every call.
    """
    return (
        type(call.query),  # apart from addresses, fake tensors look like others
        _layout(call.query),
        _layout(call.key),
        _layout(call.value),
        _layout(call.workspace_buffer),
        _layout(call.seq_lens),
        _layout(call.cum_seq_lens_q),
        _layout(call.cum_seq_lens_kv),
        _layout(call.attention_sinks),
        _layout(call.out),
        _layout(call.lse),
        _layout(call.skip_softmax_counts),
        *map(_layout, call.sage_attn_sfs),
        float if isinstance(call.bmm1_scale, _NUMBER) else _layout(call.bmm1_scale),
        float if isinstance(call.bmm2_scale, _NUMBER) else _layout(call.bmm2_scale),
        *_options(call),
    )


def _options(call: Call) -> tuple[Hashable, ...]:
    """The arguments that are no tensors."""
    return (
        call.max_q_len,
        call.max_kv_len,
        call.batch_size,
        call.window_left,
        call.enable_pdl,
        call.is_causal,
        call.return_lse,
        call.skip_softmax_threshold_scale_factor,
        tuple(call.num_elts_per_sage_attn_blk),
        call.backend,
        call.use_fp16_softmax,
        call.uses_spcompress,
    )


def _layout(tensor: Tensor | None) -> Hashable:
    """All of a tensor but its address and elements. CPU tensors have -1 as their device's ordinal."""
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device())


def _run(call: Call, prepared: PreparedCall) -> Result:
    out = _new_out(call) if call.out is None else call.out
    lse = _new_lse(call) if call.lse is None and call.return_lse else call.lse
    if prepared.problem.query.shape[0]:
        if not prepared.handles_empty_rows and _leaves_out_rows(call, out, lse):
            return (out, cast(Tensor, lse)) if call.return_lse else out
        sinks, counts = call.attention_sinks, call.skip_softmax_counts
        addresses = Arguments(
            call.query.data_ptr(),
            call.key.data_ptr(),
            call.value.data_ptr(),
            out.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            checks.workspace_address(call.workspace_buffer),
            call.cum_seq_lens_q.data_ptr(),
            call.cum_seq_lens_kv.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            *_scale(call.bmm1_scale),
            *_scale(call.bmm2_scale),
            call.o_sf_scale,
            call.seq_lens.data_ptr(),
            _NO_SCALES if prepared.problem.request.sage_blocks == SAGE_OFF else _sage(call.sage_attn_sfs),
            0 if counts is None else counts.data_ptr(),
        )
        if logger.isEnabledFor(logging.DEBUG):
            _log_launch(call, prepared)
        device = prepared.kernel.device
        pdl = device.capability >= _PDL_CAPABILITY if call.enable_pdl is None else call.enable_pdl
        stream = _current_stream(device.ordinal)
        if prepared.zeroed_bytes:
            owner = call.workspace_buffer.untyped_storage()
            zero_once(owner, addresses.workspace, prepared.zeroed_bytes, prepared.kernel.context, stream)
        prepared(addresses, stream, pdl)
    return (out, cast(Tensor, lse)) if call.return_lse else out


def _leaves_out_rows(call: Call, out: Tensor, lse: Tensor | None) -> bool:
    """Whether the call has rows that the kernel cannot handle; then it is computed around them here."""
    whole = msgspec.structs.replace(call, out=out, lse=lse)
    lengths = empty_rows.known_lengths(call)
    parts = None if lengths is None else empty_rows.split(lengths, call.is_causal)
    if parts is not None and not parts.is_whole:
        empty_rows.attend(
            whole, parts, lambda smaller: trtllm_ragged_attention_deepseek(**msgspec.structs.asdict(smaller))
        )
        return True
    if call.key.shape[0]:
        return False
    empty_rows.fill(whole)
    return True


def _new_out(call: Call) -> Tensor:
    query = call.query
    shape = (*query.shape[:2], call.value.shape[2])
    return torch.empty(shape, dtype=checks.out_dtype(query.dtype), device=query.device)


def _new_lse(call: Call) -> Tensor:
    return torch.empty(call.query.shape[:2], dtype=torch.float32, device=call.query.device)


def _scale(scale: float | Tensor) -> tuple[float, int]:
    return (scale, 0) if isinstance(scale, _NUMBER) else (0.0, scale.data_ptr())


def _sage(scales: tuple[Tensor | None, ...]) -> tuple[int, int, int, int]:
    q, k, p, v = (0 if scale is None else scale.data_ptr() for scale in scales)
    return q, k, p, v


# ---- the first call of a signature


def _first_call(call: Call) -> Result:
    if isinstance(call.query, torch_ops.TRACED):
        return torch_ops.record(*msgspec.structs.astuple(call))
    checks.check(call)
    if call.backend == "reference":
        return _run_reference(call)
    prepared = _prepare(call)
    result = _run(call, prepared)
    # Only now has it passed the checks of addresses and of the driver, too.
    _prepared[_signature(call)] = prepared
    return result


def _prepare(call: Call) -> PreparedCall:
    request = _request(call)
    row = _choose(request)
    problem = _problem(call, request)
    implementation = family(row.family)
    device = call.query.get_device()
    implementation.workspace(problem, row, device_info(device).sm_count).check(call.workspace_buffer.nbytes)
    return implementation.prepare(problem, load(row, device))


def _choose(request: KernelRequest) -> KernelRow:
    """A request's kernel. An engine has new lengths in every step; selection goes by few facts of them."""
    few = few_rows(request)
    facts = without_lengths(request), few.tile_q if few else None
    row = _chosen.get(facts)
    if row is None:
        row = _chosen[facts] = select(request).require()
    return row


def _request(call: Call) -> KernelRequest:
    device = device_info(call.query.get_device())
    blocks: Any = tuple(call.num_elts_per_sage_attn_blk)
    mask_type = checks.mask_type(call.is_causal, call.window_left, call.max_kv_len)
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
        mask_type=mask_type,
        use_fp16_softmax=bool(call.use_fp16_softmax),
        uses_spcompress=bool(call.uses_spcompress),
        skips_softmax=checks.skips_softmax(call.skip_softmax_threshold_scale_factor),
        sage_blocks=blocks,
        batch_size=call.batch_size,
        max_q_len=call.max_q_len,
        total_q=call.query.shape[0],
        total_kv=call.key.shape[0],
        max_kv_len=call.window_left + 1 if mask_type is MaskType.SLIDING else call.max_kv_len,
        sm_count=device.sm_count,
    )


def _problem(call: Call, request: KernelRequest) -> Problem:
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
        max_kv_len=call.max_kv_len,
        window_left=call.window_left,
        skip_softmax_factor=call.skip_softmax_threshold_scale_factor or 0.0,
        bmm1_scale_on_device=isinstance(call.bmm1_scale, Tensor),
    )


def _out_dtype(call: Call) -> torch.dtype:
    return checks.out_dtype(call.query.dtype) if call.out is None else call.out.dtype


def _tensor_layout(tensor: Tensor) -> TensorLayout:
    return TensorLayout(tuple(tensor.shape), tensor.stride(), DTYPES[tensor.dtype])


def _run_reference(call: Call) -> Result:
    out = call.out if call.out is not None else _new_out(call)
    lse = call.lse if call.lse is not None or not call.return_lse else _new_lse(call)
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
        skip_softmax_counts=call.skip_softmax_counts,
        uses_spcompress=bool(call.uses_spcompress),
        sage_attn_sfs=cast(Any, tuple(call.sage_attn_sfs)),
        num_elts_per_sage_attn_blk=cast(Any, tuple(call.num_elts_per_sage_attn_blk)),
        out=out,
        lse=lse,
    )
    return (out, cast(Tensor, lse)) if call.return_lse else out


def _log_launch(call: Call, prepared: PreparedCall) -> None:
    """The call as it is about to be launched. Reads nothing from the device."""
    kernel = prepared.kernel
    logger.debug(
        "launching %s (sha256 %s, from %s) on device %d: %s",
        kernel.row.name,
        kernel.artifact.sha256,
        kernel.store,
        kernel.device.ordinal,
        ", ".join(f"{name}={_described(value)}" for name, value in msgspec.structs.asdict(call).items()),
    )


def _described(value: object) -> str:
    """An argument as text; of a tensor what is known without its elements."""
    if isinstance(value, Tensor):
        return f"{value.dtype}{list(value.shape)} strides {value.stride()} on {value.device}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_described, value))})"
    return repr(value)
