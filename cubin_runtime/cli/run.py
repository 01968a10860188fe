"""`cubin-runtime run`: one ragged batch, from the question to a checked result.

With a GPU, the batch is launched, timed and compared with the reference. Without one, everything up to the
launch is done and shown, and the reference computes a smaller batch on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer

from cubin_runtime.cli import options
from cubin_runtime.cli.explain import NO_KERNEL, is_for_a_device, print_selection
from cubin_runtime.cli.output import Json, print_json
from cubin_runtime.request import MaskType

FAILED = 1
DEFAULT_WINDOW = 1024  # keys


def run(
    q_lens: Annotated[
        str, typer.Option(help="Queries of each sequence.")
    ] = "8192,1,777,4096,2048,63,1024,191",
    kv_lens: Annotated[str | None, typer.Option(help="Keys of each sequence (default: --q-lens).")] = None,
    heads: options.Heads = 128,
    kv_heads: options.KvHeads = None,
    head_dims: options.HeadDims = "192,128",
    dtype: options.Dtype = "bf16",
    dtype_q: options.DtypeQ = None,
    dtype_k: options.DtypeK = None,
    dtype_v: options.DtypeV = None,
    dtype_o: options.DtypeO = None,
    mask: options.Mask = MaskType.CAUSAL,
    window: Annotated[
        int | None,
        typer.Option(
            min=0, help=f"Keys left of the diagonal for --mask sliding (default: {DEFAULT_WINDOW})."
        ),
    ] = None,
    lse: Annotated[bool, typer.Option("--lse", help="Ask for the log-sum-exp, too.")] = False,
    sinks: Annotated[bool, typer.Option("--sinks", help="Give every head an attention sink.")] = False,
    use_fp16_softmax: options.UseFp16Softmax = False,
    uses_spcompress: options.UsesSpcompress = False,
    skip_softmax_factor: Annotated[
        float,
        typer.Option(min=0.0, help="Leave out tiles that weigh less than factor / kv length; 0 = none."),
    ] = 0.0,
    backend: options.Backend = "trtllm-gen",
    device: options.Device = None,
    as_json: Json = False,
) -> None:
    """Run a batch and check the result; without a GPU, plan it and compute a smaller one on the CPU.

    The default is a prefill batch as DeepSeek-R1 has it. Exits with 3 if no kernel fits, and with 1 if the
    result is wrong.
    """
    from cubin_runtime.arguments import mask_type
    from cubin_runtime.cli.workload import Workload
    from cubin_runtime.planning import make_request
    from cubin_runtime.selection import select

    window_left = _window_left(mask, window)
    queries = options.numbers("--q-lens", q_lens)
    keys = options.numbers("--kv-lens", kv_lens) if kv_lens else queries
    dims = options.numbers("--head-dims", head_dims, 2)
    request = make_request(
        device=device,
        dtype=dtype,
        dtype_q=dtype_q,
        dtype_k=dtype_k,
        dtype_v=dtype_v,
        dtype_o=dtype_o,
        head_dims=(dims[0], dims[1]),
        mask=mask_type(mask is not MaskType.DENSE, window_left, max(keys)),
        num_heads_q=heads,
        num_heads_kv=kv_heads,
        use_fp16_softmax=use_fp16_softmax,
        uses_spcompress=uses_spcompress,
        skips_softmax=skip_softmax_factor > 0,
        batch_size=len(queries),
        max_q_len=max(queries),
        total_q=sum(queries),
        total_kv=sum(keys),
        max_kv_len=max(keys),
        backend=backend,
    )
    workload = Workload(
        request=request,
        q_lens=queries,
        kv_lens=keys,
        window_left=window_left,
        return_lse=lse,
        has_sinks=sinks,
        skip_softmax_factor=skip_softmax_factor,
    )
    selection = select(request)
    if selection.row is None:
        print_selection(selection, as_json)
        raise typer.Exit(NO_KERNEL)

    from cubin_runtime.cli.outcome import can_launch, compute_on_cpu, launch
    from cubin_runtime.cli.plan import make_plan

    ordinal = device or 0
    plan = make_plan(workload, selection, ordinal if is_for_a_device(request) else None)
    if not as_json:
        _print_lines(plan.lines())
    outcome = launch(workload, ordinal) if can_launch() else compute_on_cpu(workload)
    if as_json:
        print_json({"plan": plan, "outcome": outcome})
    else:
        _print_lines(outcome.lines())
    if not outcome.passed:
        raise typer.Exit(FAILED)


def _window_left(mask: MaskType, window: int | None) -> int:
    """window_left of the call; -1 = none."""
    if mask is MaskType.SLIDING:
        return DEFAULT_WINDOW if window is None else window
    if window is not None:
        raise typer.BadParameter(f"--window is {window} with --mask {mask}; expected --mask sliding with it")
    return -1


def _print_lines(lines: Iterable[tuple[str, str]]) -> None:
    for label, text in lines:
        print(f"{label:<10}{text}", flush=True)
