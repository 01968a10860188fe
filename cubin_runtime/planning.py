"""What can be asked and prepared without tensors: which kernel, how much workspace, loading ahead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from cubin_runtime.errors import DriverError, InvalidArgumentError
from cubin_runtime.few_rows import DEFAULT_SM_COUNT
from cubin_runtime.request import (
    SAGE_OFF,
    Architecture,
    DType,
    KernelRequest,
    MaskType,
)
from cubin_runtime.selection import Selection, select
from kernel_meta.schema import KernelRow

if TYPE_CHECKING:
    from cubin_runtime.families import Problem

_DEFAULT_ARCH = "sm_90a"


def make_request(
    *,
    arch: str | None = None,
    device: int | None = None,
    dtype: str = "bf16",
    dtype_q: str | None = None,
    dtype_k: str | None = None,
    dtype_v: str | None = None,
    dtype_o: str | None = None,
    head_dims: tuple[int, int] = (192, 128),
    mask: str = "causal",
    num_heads_q: int = 128,
    num_heads_kv: int | None = None,
    use_fp16_softmax: bool = False,
    uses_spcompress: bool = False,
    skips_softmax: bool = False,
    sage_blocks: tuple[int, int, int, int] = SAGE_OFF,
    batch_size: int | None = None,
    max_q_len: int | None = None,
    total_q: int | None = None,
    total_kv: int | None = None,
    max_kv_len: int | None = None,
    backend: str = "trtllm-gen",
) -> KernelRequest:
    """A request from plain values.

    arch        device to ask for, such as "sm_90a" or "10.3"; excludes `device`
    device      device of this machine; default: 0, and where there is none, sm_90a
    dtype       of query, key and value ("bf16", "fp16", "e4m3", "int8" or torch's names), each overridden by
                dtype_q, dtype_k, dtype_v. The value of an int8 query is e4m3
    dtype_o     of out; default: query's, bf16 for 8-bit queries
    head_dims   (head_dim_qk, head_dim_v)
    mask        "dense", "causal" or "sliding"
    num_heads_kv  default: num_heads_q
    sage_blocks tokens per scale of q, k, p, v
    batch_size, max_q_len   number of sequences, and of the longest one's queries; both given, kernels for few
                query rows are considered (few_rows.few_rows)
    total_q, total_kv   queries and keys of all sequences; default: as many as can be
    max_kv_len  keys of the longest sequence or of a window; default: as many as can be. Many keys, and
                kernels for them are considered (many_keys.many_keys)

    Raises InvalidArgumentError for a value that has no meaning.
    """
    q = DType.parse(dtype_q or dtype)
    common = DType.parse(dtype)
    target = _target(arch, device)
    try:
        mask_type = MaskType(mask)
    except ValueError:
        known = ", ".join(m.value for m in MaskType)
        raise InvalidArgumentError(f"mask is {mask!r}; expected one of {known}") from None
    return KernelRequest(
        **target,
        backend="trtllm-gen" if backend == "trtllm-native" else backend,
        dtype_q=q,
        dtype_k=DType.parse(dtype_k) if dtype_k else common,
        dtype_v=DType.parse(dtype_v) if dtype_v else DType.E4M3 if common is DType.INT8 else common,
        dtype_o=DType.parse(dtype_o) if dtype_o else DType.BF16 if q.bytes == 1 else q,
        head_dim_qk=head_dims[0],
        head_dim_v=head_dims[1],
        num_heads_q=num_heads_q,
        num_heads_kv=num_heads_q if num_heads_kv is None else num_heads_kv,
        mask_type=mask_type,
        use_fp16_softmax=use_fp16_softmax,
        uses_spcompress=uses_spcompress,
        skips_softmax=skips_softmax,
        sage_blocks=sage_blocks,
        batch_size=batch_size,
        max_q_len=max_q_len,
        total_q=total_q,
        total_kv=total_kv,
        max_kv_len=max_kv_len,
    )


def _target(arch: str | None, device: int | None) -> dict[str, Any]:
    """The fields of a request that describe the device."""
    if arch is not None and device is not None:
        raise InvalidArgumentError("arch and device are both given; expected one of them")
    if arch is not None:
        return {"capability": Architecture.parse(arch).capability}
    from cubin_runtime.module import device_info

    try:
        info = device_info(device or 0)
    except DriverError:
        if device is not None:
            raise
        return {"capability": Architecture.parse(_DEFAULT_ARCH).capability}
    return {
        "capability": info.capability,
        "sm_count": info.sm_count,
        "max_shared_memory": info.max_shared_memory,
    }


def explain(request: KernelRequest | None = None, **values: object) -> Selection:
    """Which kernel a call would get, and every reason why not another. Needs no GPU.

    Takes a KernelRequest, or the values of `make_request`. The result's `row` is None on a miss; print
    `explain()` of it, or look through its `decisions`.
    """
    return select(_one_request(request, values))


def workspace_size(
    *,
    batch_size: int,
    total_q: int,
    total_kv: int,
    max_q_len: int,
    max_kv_len: int,
    return_lse: bool = False,
    request: KernelRequest | None = None,
    **values: object,
) -> int:
    """Bytes of workspace_buffer that a call needs, from its shapes alone.

    Few where it has many queries of about as many keys each; kernels that can divide keys need megabytes. So
    the size for the largest lengths need not do for smaller ones. 36 MiB do for every call of a Hopper
    kernel, with up to 132 multiprocessors.

    total_q, total_kv   tokens of the query and key tensors, padding included
    max_q_len, max_kv_len   as in the call
    request, values     as for `explain`; the request's own values of these are overridden

    Raises NoKernelError where no kernel fits.
    """
    from cubin_runtime.families import family

    request = msgspec.structs.replace(
        _one_request(request, values),
        batch_size=batch_size,
        max_q_len=max_q_len,
        total_q=total_q,
        total_kv=total_kv,
        max_kv_len=max_kv_len,
    )
    row = select(request).require()
    problem = packed_problem(
        request,
        batch_size=batch_size,
        total_q=total_q,
        total_kv=total_kv,
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
        return_lse=return_lse,
    )
    sm_count = request.sm_count or DEFAULT_SM_COUNT
    return family(row.family).workspace(problem, row, sm_count).size


def packed_problem(
    request: KernelRequest,
    *,
    batch_size: int,
    total_q: int,
    total_kv: int,
    max_q_len: int,
    max_kv_len: int,
    return_lse: bool = False,
) -> Problem:
    """The problem of a call whose tensors have these many tokens and no gaps, as far as shapes tell it."""
    from cubin_runtime.families import Problem, TensorLayout

    def packed(tokens: int, heads: int, head_dim: int, dtype: DType) -> TensorLayout:
        return TensorLayout((tokens, heads, head_dim), (heads * head_dim, head_dim, 1), dtype)

    q_heads, kv_heads = request.num_heads_q, request.num_heads_kv
    return Problem(
        request=request,
        query=packed(total_q, q_heads, request.head_dim_qk, request.dtype_q),
        key=packed(total_kv, kv_heads, request.head_dim_qk, request.dtype_k),
        value=packed(total_kv, kv_heads, request.head_dim_v, request.dtype_v),
        out=packed(total_q, q_heads, request.head_dim_v, request.dtype_o),
        lse_strides=(q_heads, 1) if return_lse else None,
        batch_size=batch_size,
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
        window_left=-1,
    )


def warmup(requests: Iterable[KernelRequest], device: int = 0) -> list[KernelRow]:
    """Fetches, verifies and loads the kernels of the requests, so that no call pays for it later.

    Returns the chosen rows, in order. Raises what the first call would raise.
    """
    from cubin_runtime.module import load

    return [load(select(request).require(), device).row for request in requests]


def _one_request(request: KernelRequest | None, values: dict[str, object]) -> KernelRequest:
    if request is None:
        return make_request(**values)  # type: ignore[arg-type]  # make_request checks what it is given
    if values:
        raise InvalidArgumentError(f"both a request and {', '.join(sorted(values))} are given")
    return request
