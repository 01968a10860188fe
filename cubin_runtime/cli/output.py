"""What all verbs share in printing: JSON and tables on stdout, notes on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def print_json(value: object) -> None:
    """Prints plain values (and enums, tuples, structs) as indented JSON."""
    import msgspec

    print(json.dumps(msgspec.to_builtins(value), indent=2))


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints aligned columns; folded to the terminal, never in a pipe."""
    lines = [header, *rows]
    if sys.stdout.isatty():
        _print_folded(lines)
        return
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _print_folded(lines: Sequence[Sequence[str]]) -> None:
    from rich.console import Console  # only here, as it takes longer to import than most verbs run
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in lines[0]:
        table.add_column(column, overflow="fold")
    for line in lines[1:]:
        table.add_row(*line)
    Console(highlight=False, markup=False).print(table)


def note(message: str) -> None:
    """Prints one line beside the data."""
    print(message, file=sys.stderr)
