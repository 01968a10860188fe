"""`cubin-runtime explain`: which kernel a call would get, and why not another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cubin_runtime.cli import options
from cubin_runtime.cli.output import Json, note, print_json
from cubin_runtime.request import KernelRequest, MaskType

if TYPE_CHECKING:
    from cubin_runtime.selection import Selection

NO_KERNEL = 3


def explain(
    arch: Annotated[str | None, typer.Option(help="Device to ask for, such as sm_90a or 10.3.")] = None,
    device: options.Device = None,
    dtype: options.Dtype = "bf16",
    dtype_q: options.DtypeQ = None,
    dtype_k: options.DtypeK = None,
    dtype_v: options.DtypeV = None,
    dtype_o: options.DtypeO = None,
    head_dims: options.HeadDims = "192,128",
    mask: options.Mask = MaskType.CAUSAL,
    heads: options.Heads = 128,
    kv_heads: options.KvHeads = None,
    use_fp16_softmax: options.UseFp16Softmax = False,
    uses_spcompress: options.UsesSpcompress = False,
    skips_softmax: Annotated[
        bool, typer.Option("--skips-softmax", help="Leave out negligible tiles.")
    ] = False,
    sage_blocks: Annotated[str, typer.Option(help="Tokens per scale of q,k,p,v; zeros = off.")] = "0,0,0,0",
    batch_size: Annotated[int | None, typer.Option(min=1, help="Sequences (default: many).")] = None,
    max_q_len: Annotated[
        int | None, typer.Option(min=1, help="Queries of the longest sequence (default: many).")
    ] = None,
    total_q: Annotated[
        int | None,
        typer.Option(min=1, help="Queries of all sequences (default: as many as can be)."),
    ] = None,
    total_kv: Annotated[
        int | None,
        typer.Option(min=1, help="Keys of all sequences (default: as many as can be)."),
    ] = None,
    max_kv_len: Annotated[
        int | None, typer.Option(min=1, help="Keys of the longest sequence, or of a window (default: many).")
    ] = None,
    backend: options.Backend = "trtllm-gen",
    limit: Annotated[int, typer.Option(min=0, help="Kernels that do not fit to show, nearest first.")] = 3,
    as_json: Json = False,
) -> None:
    """Say which kernel a call would get and why. Exits with 3 if there is none."""
    from cubin_runtime.planning import make_request
    from cubin_runtime.selection import select

    dims = options.numbers("--head-dims", head_dims, 2)
    blocks = options.numbers("--sage-blocks", sage_blocks, 4)
    request = make_request(
        arch=arch,
        device=device,
        dtype=dtype,
        dtype_q=dtype_q,
        dtype_k=dtype_k,
        dtype_v=dtype_v,
        dtype_o=dtype_o,
        head_dims=(dims[0], dims[1]),
        mask=mask,
        num_heads_q=heads,
        num_heads_kv=kv_heads,
        use_fp16_softmax=use_fp16_softmax,
        uses_spcompress=uses_spcompress,
        skips_softmax=skips_softmax,
        sage_blocks=(blocks[0], blocks[1], blocks[2], blocks[3]),
        batch_size=batch_size,
        max_q_len=max_q_len,
        total_q=total_q,
        total_kv=total_kv,
        max_kv_len=max_kv_len,
        backend=backend,
    )
    if arch is None and not is_for_a_device(request):
        note(f"no device here (see `cubin-runtime doctor`); assuming compute capability {request.capability}")
    selection = select(request)
    print_selection(selection, as_json, limit)
    if selection.row is None:
        raise typer.Exit(NO_KERNEL)


def is_for_a_device(request: KernelRequest) -> bool:
    """Whether the request describes a device of this machine, rather than an architecture."""
    return request.max_shared_memory is not None


def print_selection(selection: Selection, as_json: bool, limit: int = 3) -> None:
    """Prints the choice and up to `limit` kernels that do not fit."""
    if as_json:
        print_json(_as_plain(selection, limit))
    else:
        print(selection.explain(limit))


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
