"""What all verbs share in printing: JSON and tables on stdout, notes on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]

_PIPE_WIDTH = 1000  # columns: lines for other programs are never folded


def print_json(value: object) -> None:
    """Prints plain values (and enums, tuples, structs) as indented JSON."""
    import msgspec

    print(json.dumps(msgspec.to_builtins(value), indent=2))


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints aligned columns; folded to the terminal, never in a pipe."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in header:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(table)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def note(message: str) -> None:
    """Prints one line beside the data."""
    print(message, file=sys.stderr)
