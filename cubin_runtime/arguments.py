"""Checks of a call's arguments, before anything is selected, loaded or launched.

Nothing here reads device memory. Each failure is one InvalidArgumentError (a ValueError) that names the
argument, what was given and what was expected.
"""

from __future__ import annotations

import ctypes
import math
import operator

import msgspec
import torch

from cubin_runtime.errors import InvalidArgumentError, UnsupportedError, refuse
from cubin_runtime.request import SAGE_OFF, SAGE_TOKENS, DType, MaskType

BACKENDS = {
    "trtllm-gen": "trtllm-gen",
    "trtllm-native": "trtllm-gen",
    "cute-dsl": "cute-dsl",
    "reference": "reference",
}
"""What `backend` takes, and the backend that it means."""

DTYPES = {
    torch.bfloat16: DType.BF16,
    torch.float16: DType.FP16,
    torch.float8_e4m3fn: DType.E4M3,
    torch.int8: DType.INT8,
}
_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
_EIGHT_BIT = (torch.float8_e4m3fn, torch.int8)

_WORKSPACE_ALIGNMENT = 16
_INT32_MAX = 2**31 - 1


class Call(msgspec.Struct, frozen=True):
    """The arguments of `trtllm_ragged_attention_deepseek`, by their names and in their order."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    workspace_buffer: torch.Tensor
    seq_lens: torch.Tensor
    max_q_len: int
    max_kv_len: int
    bmm1_scale: float | torch.Tensor
    bmm2_scale: float | torch.Tensor
    o_sf_scale: float
    batch_size: int
    window_left: int
    cum_seq_lens_q: torch.Tensor
    cum_seq_lens_kv: torch.Tensor
    enable_pdl: bool | None
    is_causal: bool
    return_lse: bool
    attention_sinks: torch.Tensor | None
    skip_softmax_threshold_scale_factor: float | None
    out: torch.Tensor | None
    lse: torch.Tensor | None
    sage_attn_sfs: tuple[torch.Tensor | None, ...]
    num_elts_per_sage_attn_blk: tuple[int, ...]
    backend: str
    q_seq_lens_cpu: torch.Tensor | None
    kv_seq_lens_cpu: torch.Tensor | None
    use_fp16_softmax: bool | None
    uses_spcompress: bool | None
    skip_all_rows_active_check: bool
    skip_softmax_counts: torch.Tensor | None = None


def check(call: Call) -> None:
    """Raises InvalidArgumentError (UnsupportedError for a window without causal) unless the call is valid."""
    check_backend(call.backend)
    _check_operands(call)
    _check_integers(call)
    _check_flags(call)
    _check_lengths(call)
    _check_scale("bmm1_scale", call.bmm1_scale, call)
    _check_scale("bmm2_scale", call.bmm2_scale, call)
    _check_sinks(call)
    _check_skip_factor(call.skip_softmax_threshold_scale_factor)
    _check_skip_counts(call)
    _check_out(call)
    _check_lse(call)
    _check_sage(call)
    _check_workspace(call)
    check_mirrors(call)


def check_backend(backend: object) -> str:
    """The backend that the name means."""
    if not isinstance(backend, str) or backend not in BACKENDS:
        known = ", ".join(map(repr, BACKENDS))
        raise InvalidArgumentError(f"backend is {backend!r}; expected one of {known}")
    return BACKENDS[backend]


def out_dtype(query: torch.dtype) -> torch.dtype:
    """The default dtype of out: bfloat16 for 8-bit queries, else the query's."""
    return torch.bfloat16 if query in _EIGHT_BIT else query


def mask_type(is_causal: bool, window_left: int, max_kv_len: int) -> MaskType:
    """The mask that a kernel needs: a window that covers the longest row is no window."""
    if not is_causal:
        return MaskType.DENSE
    return MaskType.SLIDING if window_left != -1 and window_left < max_kv_len - 1 else MaskType.CAUSAL


def skips_softmax(factor: float | None) -> bool:
    """Whether the factor, as the float32 that a kernel gets, turns skipping on."""
    return factor is not None and ctypes.c_float(factor).value != 0


# ---- query, key, value


def _check_operands(call: Call) -> None:
    for name, tensor in (("query", call.query), ("key", call.key), ("value", call.value)):
        _require_tensor(name, tensor)
        if tensor.dtype not in DTYPES:
            refuse(name, f"has dtype {tensor.dtype}", f"one of {', '.join(map(str, DTYPES))}")
        if tensor.dim() != 3:
            refuse(name, f"has shape {tuple(tensor.shape)}", "3 dimensions [tokens, heads, head_dim]")
        _require_device(name, tensor, call.query)
        _require_contiguous_rows(name, tensor)
        if tensor.shape[0] > _INT32_MAX:
            refuse(name, f"has {tensor.shape[0]} tokens", "at most 2**31 - 1")
    if call.query.device.type != "cuda" and call.backend != "reference":
        refuse(
            "query", f"is on {call.query.device}", 'a CUDA device (backend="reference" also runs on the CPU)'
        )
    _, num_heads_q, head_dim_qk = call.query.shape
    total_kv, num_heads_kv, _ = call.key.shape
    if call.key.shape[2] != head_dim_qk:
        refuse("key", f"has head_dim {call.key.shape[2]}", f"that of query, {head_dim_qk}")
    if tuple(call.value.shape[:2]) != (total_kv, num_heads_kv):
        refuse(
            "value", f"has shape {tuple(call.value.shape)}", f"[{total_kv}, {num_heads_kv}, ...] as key has"
        )
    if num_heads_kv < 1 or num_heads_q < 1 or num_heads_q % num_heads_kv:
        refuse(
            "query",
            f"has {num_heads_q} heads for {num_heads_kv} of key and value",
            "num_heads_q to be a multiple of num_heads_kv",
        )


# ---- scalars


def _check_integers(call: Call) -> None:
    for name, least in (("max_q_len", 0), ("max_kv_len", 0), ("batch_size", 0), ("window_left", -1)):
        value = getattr(call, name)
        if isinstance(value, torch.Tensor):
            refuse(name, "is a tensor", "an int: reading it from the device would synchronise")
        try:
            number = operator.index(value)
        except TypeError:
            refuse(name, f"is {value!r}", "an int")
        if not least <= number <= _INT32_MAX:
            refuse(name, f"is {number}", f"{least} to 2**31 - 1")
    if call.window_left >= 0 and not call.is_causal and call.backend != "reference":
        raise UnsupportedError(
            f"window_left is {call.window_left} with is_causal=False; kernels have sliding windows for "
            'causal masks only (backend="reference" computes it)'
        )


def _check_flags(call: Call) -> None:
    for name in ("is_causal", "return_lse", "skip_all_rows_active_check"):
        _require_flag(name, getattr(call, name), "a bool")
    for name in ("enable_pdl", "use_fp16_softmax", "uses_spcompress"):
        if getattr(call, name) is not None:
            _require_flag(name, getattr(call, name), "a bool or None")


def _require_flag(name: str, value: object, expected: str) -> None:
    if not isinstance(value, int):
        refuse(name, f"is a {type(value).__name__}", expected)


def _check_scale(name: str, scale: object, call: Call) -> None:
    if isinstance(scale, torch.Tensor):
        if scale.dtype != torch.float32 or scale.numel() != 1:
            refuse(name, f"is a {scale.dtype} tensor of {scale.numel()} elements", "float32 with 1 element")
        _require_device(name, scale, call.query)
    elif not isinstance(scale, (int, float)):
        refuse(name, f"is a {type(scale).__name__}", "a float or a float32 tensor with 1 element")


def _check_skip_factor(factor: object) -> None:
    name = "skip_softmax_threshold_scale_factor"
    if factor is None:
        return
    if not isinstance(factor, (int, float)):
        refuse(name, f"is a {type(factor).__name__}", "None or a float")
    if not math.isfinite(factor) or factor < 0:
        refuse(name, f"is {factor}", "a finite float of at least 0")


def _check_skip_counts(call: Call) -> None:
    name, counts = "skip_softmax_counts", call.skip_softmax_counts
    if counts is None:
        return
    _require_tensor(name, counts)
    if not skips_softmax(call.skip_softmax_threshold_scale_factor):
        refuse(name, "is given without skip_softmax_threshold_scale_factor", "both, or no counts")
    if counts.dtype != torch.int64 or tuple(counts.shape) != (2,) or not counts.is_contiguous():
        given = f"is {counts.dtype} with shape {tuple(counts.shape)} and stride {counts.stride()}"
        refuse(name, given, "contiguous int64 with shape (2,)")
    _require_device(name, counts, call.query)


# ---- lengths


def _check_lengths(call: Call) -> None:
    sizes = {"seq_lens": 0, "cum_seq_lens_q": 1, "cum_seq_lens_kv": 1}
    for name, extra in sizes.items():
        tensor = getattr(call, name)
        _require_tensor(name, tensor)
        expected = call.batch_size + extra
        if tensor.dtype != torch.int32:
            refuse(name, f"has dtype {tensor.dtype}", "torch.int32")
        if tuple(tensor.shape) != (expected,):
            what = "batch_size + 1" if extra else "batch_size"
            refuse(name, f"has shape {tuple(tensor.shape)}", f"({expected},), that is {what}")
        _require_device(name, tensor, call.query)
        if not tensor.is_contiguous():
            refuse(name, f"has stride {tensor.stride()}", "a contiguous tensor")


def check_mirrors(call: Call) -> None:
    """The CPU copies of the lengths; the only arguments whose values are looked at, on every call."""
    if call.q_seq_lens_cpu is None and call.kv_seq_lens_cpu is None:
        return
    pairs = (
        ("q_seq_lens_cpu", call.q_seq_lens_cpu, "max_q_len", call.max_q_len, call.query.shape[0]),
        ("kv_seq_lens_cpu", call.kv_seq_lens_cpu, "max_kv_len", call.max_kv_len, call.key.shape[0]),
    )
    for name, lengths, bound_name, bound, tokens in pairs:
        if lengths is None:
            refuse(name, "is None", "both q_seq_lens_cpu and kv_seq_lens_cpu, or neither")
        _require_tensor(name, lengths)
        if lengths.dtype not in (torch.int32, torch.int64) or lengths.device.type != "cpu":
            refuse(name, f"is {lengths.dtype} on {lengths.device}", "int32 or int64 on the CPU")
        if tuple(lengths.shape) != (call.batch_size,):
            refuse(name, f"has shape {tuple(lengths.shape)}", f"({call.batch_size},), that is batch_size")
        values = lengths.tolist()
        if values and (min(values) < 0 or max(values) > bound):
            refuse(name, f"holds {min(values)} to {max(values)}", f"0 to {bound_name}, {bound}")
        if sum(values) > tokens:
            refuse(name, f"sums to {sum(values)}", f"at most the tensor's {tokens} tokens")


# ---- optional tensors


def _check_sinks(call: Call) -> None:
    sinks = call.attention_sinks
    if sinks is None:
        return
    _require_tensor("attention_sinks", sinks)
    heads = call.query.shape[1]
    if sinks.dtype != torch.float32:
        refuse("attention_sinks", f"has dtype {sinks.dtype}", "torch.float32")
    if tuple(sinks.shape) != (heads,) or not sinks.is_contiguous():
        refuse(
            "attention_sinks",
            f"has shape {tuple(sinks.shape)} and stride {sinks.stride()}",
            f"a contiguous ({heads},), one per query head",
        )
    _require_device("attention_sinks", sinks, call.query)


def _check_out(call: Call) -> None:
    out = call.out
    if out is None:
        return
    _require_tensor("out", out)
    expected = (*call.query.shape[:2], call.value.shape[2])
    if out.dtype not in _OUT_DTYPES:
        refuse("out", f"has dtype {out.dtype}", f"one of {', '.join(map(str, _OUT_DTYPES))}")
    if out.dtype == torch.float8_e4m3fn and call.query.dtype == torch.float8_e4m3fn:
        refuse("out", "has dtype torch.float8_e4m3fn with a query of that dtype", "bfloat16 or float16")
    if tuple(out.shape) != expected:
        refuse("out", f"has shape {tuple(out.shape)}", f"{expected}")
    _require_device("out", out, call.query)
    _require_contiguous_rows("out", out)
    _require_distinct_elements("out", out)


def _check_lse(call: Call) -> None:
    lse = call.lse
    if lse is None:
        return
    _require_tensor("lse", lse)
    expected = tuple(call.query.shape[:2])
    if lse.dtype != torch.float32:
        refuse("lse", f"has dtype {lse.dtype}", "torch.float32")
    if tuple(lse.shape) != expected:
        refuse("lse", f"has shape {tuple(lse.shape)}", f"{expected}, that is [total_q, num_heads_q]")
    _require_device("lse", lse, call.query)
    _require_distinct_elements("lse", lse)


def _check_workspace(call: Call) -> None:
    workspace = call.workspace_buffer
    _require_tensor("workspace_buffer", workspace)
    _require_device("workspace_buffer", workspace, call.query)
    if not workspace.is_contiguous():
        refuse("workspace_buffer", f"has stride {workspace.stride()}", "a contiguous tensor")


def workspace_address(workspace: torch.Tensor) -> int:
    """Where the buffer starts: on a 16-byte boundary, as the kernels' scratch areas do."""
    address = workspace.data_ptr()
    if address % _WORKSPACE_ALIGNMENT or not address:
        refuse("workspace_buffer", f"starts at {address:#x}", f"a multiple of {_WORKSPACE_ALIGNMENT}")
    return address


# ---- Sage


def _check_sage(call: Call) -> None:
    """The scales' shapes: see the formula in `trtllm_ragged_attention_deepseek`."""
    for name in ("sage_attn_sfs", "num_elts_per_sage_attn_blk"):
        if not isinstance(getattr(call, name), (tuple, list)):
            refuse(name, f"is a {type(getattr(call, name)).__name__}", "a tuple of 4 (q, k, p, v)")
    blocks, scales = tuple(call.num_elts_per_sage_attn_blk), tuple(call.sage_attn_sfs)
    if len(blocks) != 4 or len(scales) != 4:
        refuse(
            "sage_attn_sfs",
            f"has {len(scales)} entries and {len(blocks)} block sizes",
            "4 and 4 (q, k, p, v)",
        )
    if blocks == SAGE_OFF:
        if any(scale is not None for scale in scales):
            refuse("num_elts_per_sage_attn_blk", "is all zero with Sage scales given", "their block sizes")
        if call.query.dtype == torch.int8:
            refuse("sage_attn_sfs", "is off for an int8 query", "its scales and block sizes")
        return
    q_block, k_block, p_block, v_block = blocks
    if q_block not in SAGE_TOKENS or k_block not in SAGE_TOKENS or (p_block, v_block) != (0, 1):
        refuse("num_elts_per_sage_attn_blk", f"is {blocks}", "(q, k, 0, 1) with q and k one of 1, 4, 16")
    if scales[2] is not None:
        refuse("sage_attn_sfs[2]", "is a tensor", "None: p has no scales (the order is q, k, p, v)")
    total_q, num_heads_q, _ = call.query.shape
    total_kv, num_heads_kv, head_dim_v = call.value.shape
    extra = max(call.batch_size - 1, 0)
    expected = {
        0: (num_heads_q, -(-total_q // q_block) + extra),
        1: (num_heads_kv, -(-total_kv // k_block) + extra),
        3: (num_heads_kv, head_dim_v),
    }
    for index, shape in expected.items():
        name = f"sage_attn_sfs[{index}]"
        scale = _require_tensor(name, scales[index])
        if scale.dtype != torch.float32 or tuple(scale.shape) != shape or not scale.is_contiguous():
            given = f"is {scale.dtype} with shape {tuple(scale.shape)} and stride {scale.stride()}"
            refuse(name, given, f"contiguous float32 with shape {shape}")
        _require_device(name, scale, call.query)


# ---- what several checks share


def _require_tensor(name: str, value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        refuse(name, f"is a {type(value).__name__}", "a torch.Tensor")
    if value.layout != torch.strided:
        refuse(name, f"has layout {value.layout}", "torch.strided")
    return value


def _require_device(name: str, tensor: torch.Tensor, query: torch.Tensor) -> None:
    if tensor.device != query.device:
        refuse(name, f"is on {tensor.device}", f"the device of query, {query.device}")


def _require_contiguous_rows(name: str, tensor: torch.Tensor) -> None:
    if tensor.stride(2) != 1 and tensor.shape[2] > 1:
        refuse(name, f"has stride {tensor.stride(2)} in its last dimension", "1")


def _require_distinct_elements(name: str, tensor: torch.Tensor) -> None:
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        refuse(name, f"has stride {tensor.stride()}", "no stride of 0: every element is written once")
