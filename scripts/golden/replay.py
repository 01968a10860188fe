"""A recorded call through the package: its checks in the order of NVIDIA's host code, then its launches."""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

from cubin_runtime import module
from cubin_runtime.arguments import mask_type, skips_softmax
from cubin_runtime.errors import CubinRuntimeError, InvalidArgumentError, NoKernelError
from cubin_runtime.families import Arguments, Problem, TensorLayout
from cubin_runtime.families import fmha_trtllm_gen as family
from cubin_runtime.request import Capability, DType, KernelRequest
from cubin_runtime.selection import Selection, select
from golden.driver import Driver

Inputs = dict[str, Any]

_INT32 = 2**32

_select = functools.lru_cache(maxsize=None)(select)  # files ask for the same kernels again and again


class RefusedError(CubinRuntimeError):
    """The package refuses the call: `code` as the files name the reason, and the package's own message."""

    def __init__(self, code: str, error: object) -> None:
        super().__init__(str(error))
        self.code = code


class Prepared(NamedTuple):
    """A call that has passed every check of NVIDIA's host code but those of tensor maps."""

    problem: Problem
    call: family.FmhaTrtllmGenCall


def prepare(inputs: Inputs, driver: Driver) -> Prepared:
    """Runs the checks; raises RefusedError with the first reason."""
    request = _request(inputs)
    selection = _select(request)
    # These dtypes exist, for other operands.
    for operand, dtype in (("q", DType.E2M1), ("v", DType.INT8), ("o", DType.INT8)):
        name = f"dtype_{operand}"
        if getattr(request, name) is dtype and _all_differ(selection, name):
            raise RefusedError(f"unsupported_dtype {operand}", selection.reason)
    problem = _problem(inputs, request)
    _check_workspace(inputs, problem, selection)
    try:
        row = selection.require()
    except NoKernelError as error:
        out_of_range = any(not 32 <= inputs[dim] <= 1024 for dim in ("head_dim_qk", "head_dim_v"))
        by_head_dims = out_of_range and _all_differ(selection, "head_dims")
        raise RefusedError("head_dim_range" if by_head_dims else "no_kernel", error) from None
    kernel = module.load(row, driver.ordinal(request.capability, inputs["sm_count"]))
    return Prepared(problem, family.FmhaTrtllmGenCall(problem, kernel))


def run(prepared: Prepared, inputs: Inputs) -> None:
    """Launches; raises RefusedError where a tensor map breaks a rule."""
    arguments = Arguments(
        inputs["q_ptr"],
        inputs["k_ptr"],
        inputs["v_ptr"],
        inputs["o_ptr"],
        inputs["lse_ptr"],
        inputs["workspace_ptr"],
        inputs["cum_q_ptr"],
        inputs["cum_kv_ptr"],
        inputs["sinks_ptr"],
        1.0 if inputs["bmm1_scale"] is None else inputs["bmm1_scale"],
        0,
        1.0 if inputs["bmm2_scale"] is None else inputs["bmm2_scale"],
        inputs["bmm2_scale_ptr"],
        inputs["o_sf_scale"],
        inputs["seq_lens_ptr"],
        tuple(inputs["sage_ptrs"]),
    )
    try:
        prepared.call.attend(arguments, inputs["bmm1_scale_log2_ptr"], inputs["stream"], inputs["pdl"])
    except InvalidArgumentError as error:
        raise RefusedError(_rule(str(error)), error) from None
    prepared.call.write_lse(arguments, inputs["stream"], inputs["pdl"])


def seen(inputs: Inputs) -> Inputs:
    """The arguments as NVIDIA's host code sees them."""
    changed = dict(inputs)
    for operand, strides in _packed_strides(inputs).items():
        changed[f"{operand}_stride"] = strides
    for operand in "kv":
        changed[f"{operand}_stride"] = [_as_int32(stride) for stride in inputs[f"{operand}_stride"]]
    if inputs["window_left"] != -1:
        changed["window_left"] = _as_int32(inputs["window_left"] + 1) - 1
    return changed


def faults(inputs: Inputs) -> list[str]:
    """What NVIDIA's host code gets silently wrong in a call that it launches."""
    found = []
    for operand, packed in _packed_strides(inputs).items():
        strides = inputs[f"{operand}_stride"]
        extents = (inputs["sum_q"], inputs["num_heads_q"], packed[1])
        if any(e > 1 and s != p for e, s, p in zip(extents, strides, packed, strict=True)):
            found.append(f"ignores {operand}'s strides {strides}")
    for operand in "kv":
        strides = inputs[f"{operand}_stride"]
        if any(not 0 <= stride < _INT32 // 2 for stride in strides):
            found.append(f"cuts {operand}'s strides {strides}")
    if not inputs["causal"] and inputs["window_left"] != -1:
        found.append("drops the window of a dense mask")
    if not inputs["max_q"] or not inputs["batch"]:
        found.append("launches a grid of 0")
    return found


# ---- what the package is asked


def _request(inputs: Inputs) -> KernelRequest:
    heads: Any = {name: inputs[name] for name in ("num_heads_q", "num_heads_kv")}
    capability = Capability(*divmod(inputs["sm_arch"], 10))
    try:
        KernelRequest(capability=capability, **heads)
    except InvalidArgumentError as error:
        raise RefusedError("head_ratio", error) from None
    return KernelRequest(
        capability=capability,
        **heads,
        dtype_q=_dtype(inputs, "q"),
        dtype_k=_dtype(inputs, "k"),
        dtype_v=_dtype(inputs, "v"),
        dtype_o=_dtype(inputs, "o"),
        head_dim_qk=inputs["head_dim_qk"],
        head_dim_v=inputs["head_dim_v"],
        mask_type=mask_type(inputs["causal"], inputs["window_left"], inputs["max_kv"]),
        skips_softmax=skips_softmax(inputs["skip_softmax"]),
        sage_blocks=tuple(inputs["sage_blocks"]),
    )


def _dtype(inputs: Inputs, operand: str) -> DType:
    name = inputs[f"dtype_{operand}"]
    try:
        return DType.E2M1 if name == "uint8" else DType.parse(name)  # torch keeps FP4 as bytes
    except InvalidArgumentError as error:
        raise RefusedError(f"unsupported_dtype {operand}", error) from None


def _all_differ(selection: Selection, field: str) -> bool:
    """Whether every kernel for the device has another value."""
    runnable = [d for d in selection.decisions if not {"arch", "backend"} & {m.field for m in d.mismatches}]
    return all(any(m.field == field for m in d.mismatches) for d in runnable)


def _problem(inputs: Inputs, request: KernelRequest) -> Problem:
    def layout(operand: str, tokens: int, heads: int, head_dim: int, dtype: DType) -> TensorLayout:
        return TensorLayout((tokens, heads, head_dim), tuple(inputs[f"{operand}_stride"]), dtype)

    sum_q, sum_kv = inputs["sum_q"], inputs["sum_kv"]
    return Problem(
        request=request,
        query=layout("q", sum_q, request.num_heads_q, request.head_dim_qk, request.dtype_q),
        key=layout("k", sum_kv, request.num_heads_kv, request.head_dim_qk, request.dtype_k),
        value=layout("v", sum_kv, request.num_heads_kv, request.head_dim_v, request.dtype_v),
        out=layout("o", sum_q, request.num_heads_q, request.head_dim_v, request.dtype_o),
        lse_strides=tuple(inputs["lse_stride"]) if inputs["lse_ptr"] else None,
        batch_size=inputs["batch"],
        max_q_len=inputs["max_q"],
        max_kv_len=inputs["max_kv"],
        window_left=inputs["window_left"],
        skip_softmax_factor=inputs["skip_softmax"] or 0.0,
        bmm1_scale_on_device=False,  # where it is, the recorded calls have it converted already
    )


def _check_workspace(inputs: Inputs, problem: Problem, selection: Selection) -> None:
    rows = (decision.row for decision in selection.decisions)
    row = selection.row or next(row for row in rows if row.family == family.FAMILY)
    misaligned = -inputs["workspace_ptr"] % 16
    try:
        family.workspace(problem, row, inputs["sm_count"]).check(inputs["workspace_size"] - misaligned)
    except InvalidArgumentError as error:
        raise RefusedError("workspace_overflow", error) from None


def _rule(message: str) -> str:
    """The broken rule of a tensor map, and whose it is, as the files name them."""
    tensor = message.partition(" ")[0]
    if re.search(r"extent \d+ is 0;", message):
        return f"tma_dim_zero {tensor}"
    return f"tma_addr_align {tensor}" if "its address is" in message else f"another rule for {tensor}"


def _packed_strides(inputs: Inputs) -> dict[str, list[int]]:
    """The strides that query and out are taken to have."""
    heads, head_dim_qk, head_dim_v = inputs["num_heads_q"], inputs["head_dim_qk"], inputs["head_dim_v"]
    return {"q": [heads * head_dim_qk, head_dim_qk, 1], "o": [heads * head_dim_v, head_dim_v, 1]}


def _as_int32(number: int) -> int:
    return (number + _INT32 // 2) % _INT32 - _INT32 // 2
