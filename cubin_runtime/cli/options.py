"""Options that several verbs share: those that spell a request, as `make_request` takes it."""

from __future__ import annotations

from typing import Annotated

import typer

from cubin_runtime.request import MaskType

Device = Annotated[
    int | None, typer.Option(help="Device of this machine (default: 0, and sm_90a where there is none).")
]
Dtype = Annotated[str, typer.Option(help="Type of query, key and value: bf16, fp16, e4m3, int8.")]
DtypeQ = Annotated[str | None, typer.Option(help="Type of query (default: --dtype).")]
DtypeK = Annotated[str | None, typer.Option(help="Type of key (default: --dtype).")]
DtypeV = Annotated[str | None, typer.Option(help="Type of value (default: --dtype; e4m3 for int8).")]
DtypeO = Annotated[str | None, typer.Option(help="Type of out (default: query's; bf16 for e4m3 and int8).")]
HeadDims = Annotated[str, typer.Option(help="Head dims of query/key and of value.")]
Mask = Annotated[MaskType, typer.Option(help="Which keys a row sees.")]
Heads = Annotated[int, typer.Option(help="Query heads.")]
KvHeads = Annotated[int | None, typer.Option(help="Key and value heads (default: --heads).")]
UseFp16Softmax = Annotated[bool, typer.Option("--use-fp16-softmax", help="Exponentials in half precision.")]
UsesSpcompress = Annotated[bool, typer.Option("--uses-spcompress", help="Logits pruned 2:4.")]
Backend = Annotated[str, typer.Option(help="trtllm-gen or cute-dsl.")]


def numbers(option: str, text: str, count: int | None = None) -> tuple[int, ...]:
    """The whole numbers of an option, separated by commas; `count` of them where that is given."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or count not in (None, len(found)):
        expected = "numbers" if count is None else f"{count} numbers"
        raise typer.BadParameter(f"{option} is {text!r}; expected {expected} separated by commas")
    return found
