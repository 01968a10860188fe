"""`cubin-runtime explain`: which kernel a call would get, and why not another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cubin_runtime.cli.output import Json, note, print_json
from cubin_runtime.request import Architecture, DType, KernelRequest, MaskType

if TYPE_CHECKING:
    from cubin_runtime.selection import Selection

NO_KERNEL = 3


def explain(
    arch: Annotated[str | None, typer.Option(help="Device to ask for, such as sm_90a or 10.3.")] = None,
    device: Annotated[
        int | None, typer.Option(help="Device of this machine to ask for (default: 0, else sm_90a).")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Type of query, key and value: bf16, fp16, e4m3, int8.")
    ] = "bf16",
    dtype_q: Annotated[str | None, typer.Option(help="Type of query (default: --dtype).")] = None,
    dtype_k: Annotated[str | None, typer.Option(help="Type of key (default: --dtype).")] = None,
    dtype_v: Annotated[
        str | None, typer.Option(help="Type of value (default: --dtype; e4m3 for int8).")
    ] = None,
    dtype_o: Annotated[
        str | None, typer.Option(help="Type of out (default: query's; bf16 for e4m3 and int8).")
    ] = None,
    head_dims: Annotated[str, typer.Option(help="Head dims of query/key and of value.")] = "192,128",
    mask: Annotated[MaskType, typer.Option(help="Which keys a row sees.")] = MaskType.CAUSAL,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 128,
    kv_heads: Annotated[int | None, typer.Option(help="Key and value heads (default: --heads).")] = None,
    use_fp16_softmax: Annotated[
        bool, typer.Option("--use-fp16-softmax", help="Exponentials in half precision.")
    ] = False,
    uses_spcompress: Annotated[bool, typer.Option("--uses-spcompress", help="Logits pruned 2:4.")] = False,
    skips_softmax: Annotated[
        bool, typer.Option("--skips-softmax", help="Leave out negligible tiles.")
    ] = False,
    sage_blocks: Annotated[str, typer.Option(help="Tokens per scale of q,k,p,v; zeros = off.")] = "0,0,0,0",
    backend: Annotated[str, typer.Option(help="trtllm-gen or cute-dsl.")] = "trtllm-gen",
    limit: Annotated[int, typer.Option(min=0, help="Kernels that do not fit to show, nearest first.")] = 3,
    as_json: Json = False,
) -> None:
    """Say which kernel a call would get and why. Exits with 3 if there is none."""
    from cubin_runtime.selection import select

    q = DType.parse(dtype_q or dtype)
    v = DType.parse(dtype_v) if dtype_v else _value_dtype(DType.parse(dtype))
    head_dim_qk, head_dim_v = _numbers("--head-dims", head_dims, 2)
    sage = _numbers("--sage-blocks", sage_blocks, 4)
    request = KernelRequest(
        **_target(arch, device),
        backend="trtllm-gen" if backend == "trtllm-native" else backend,
        dtype_q=q,
        dtype_k=DType.parse(dtype_k or dtype),
        dtype_v=v,
        dtype_o=DType.parse(dtype_o) if dtype_o else _out_dtype(q),
        head_dim_qk=head_dim_qk,
        head_dim_v=head_dim_v,
        num_heads_q=heads,
        num_heads_kv=kv_heads or heads,
        mask_type=mask,
        use_fp16_softmax=use_fp16_softmax,
        uses_spcompress=uses_spcompress,
        skips_softmax=skips_softmax,
        sage_blocks=(sage[0], sage[1], sage[2], sage[3]),
    )
    selection = select(request)
    if as_json:
        print_json(_as_plain(selection, limit))
    else:
        print(selection.explain(limit))
    if selection.row is None:
        raise typer.Exit(NO_KERNEL)


def _target(arch: str | None, device: int | None) -> dict[str, Any]:
    """Capability and shared memory limit of the device that is asked for."""
    from cubin_runtime.errors import DriverError

    if arch is not None and device is not None:
        raise typer.BadParameter("give --arch or --device, not both")
    if arch is not None:
        return {"capability": Architecture.parse(arch).capability}
    try:
        from cubin_runtime.module import device_info

        info = device_info(device or 0)
    except (DriverError, ImportError):
        if device is not None:
            raise
        note("no device here (see `cubin-runtime doctor`); assuming sm_90a")
        return {"capability": Architecture.parse("sm_90a").capability}
    return {"capability": info.capability, "max_shared_memory": info.max_shared_memory}


def _value_dtype(dtype: DType) -> DType:
    return DType.E4M3 if dtype is DType.INT8 else dtype


def _out_dtype(query: DType) -> DType:
    return DType.BF16 if query in (DType.E4M3, DType.INT8) else query


def _numbers(option: str, text: str, count: int) -> list[int]:
    parts = text.split(",")
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) != count:
        raise typer.BadParameter(f"{option} is {text!r}; expected {count} numbers separated by commas")
    return numbers


def _as_plain(selection: Selection, limit: int) -> dict[str, Any]:
    """The trace without its text: accepted kernels, and up to `limit` of the others."""
    import msgspec

    accepted = [d for d in selection.decisions if d.accepted]
    rejected = [d for d in selection.decisions if not d.accepted][:limit]
    return {
        "request": {
            **msgspec.to_builtins(selection.request),
            "capability": str(selection.request.capability),
        },
        "kernel": selection.row.name if selection.row else None,
        "reason": selection.reason,
        "considered": len(selection.decisions),
        "decisions": [
            {"kernel": d.row.name, "accepted": d.accepted, "mismatches": d.mismatches}
            for d in (*accepted, *rejected)
        ],
    }
