"""The tables of kernels: every `kernel_meta/<family>/table.yaml`, read and checked.

A table is `family:`, `defaults:` (columns that most rows share) and `rows:` (the columns that differ).
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import msgspec

from cubin_runtime import strict_yaml
from cubin_runtime.errors import InvalidArgumentError, TableError
from kernel_meta.schema import KernelRow

TABLES_DIR = Path(__file__).parent

# What selection looks at. Two rows that agree in all of it are indistinguishable to a request.
SELECTION_COLUMNS = (
    "arch",
    "dtype_q",
    "dtype_k",
    "dtype_v",
    "dtype_o",
    "head_dim_qk",
    "head_dim_v",
    "mask_type",
    "scheduler",
    "fp16_softmax",
    "uses_spcompress",
    "skips_softmax",
    "sage_blocks",
)


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table file as it is written, before defaults are filled in."""

    family: str
    rows: list[dict[str, Any]]
    defaults: dict[str, Any] = {}


@functools.cache
def all_rows() -> tuple[KernelRow, ...]:
    """The rows of every table in the package, read once; families in alphabetical order."""
    return tuple(row for path in sorted(TABLES_DIR.glob("*/table.yaml")) for row in load_table(path))


def find_row(name: str) -> KernelRow:
    """The row called `name`; raises InvalidArgumentError with the closest names."""
    import difflib

    rows = {row.name: row for row in all_rows()}
    if name not in rows:
        close = difflib.get_close_matches(name, rows, n=3)
        hint = f"closest: {', '.join(close)}" if close else f"{len(rows)} kernels exist"
        raise InvalidArgumentError(f"no kernel is called {name!r}; {hint}")
    return rows[name]


def load_table(path: Path) -> tuple[KernelRow, ...]:
    """The rows of one table, in file order; raises TableError naming the file and the row."""
    table = read_table(path)
    rows = tuple(_decode_row(path, table, index) for index in range(len(table.rows)))
    _refuse_ambiguous(path, rows)
    return rows


def read_table(path: Path) -> Table:
    """The table as written; raises TableError naming the file, and the line of a YAML error."""
    try:
        return msgspec.convert(strict_yaml.parse(path.read_bytes()), Table)
    except ValueError as error:  # msgspec's ValidationError is one
        raise TableError(f"{path}: {error}") from None


def _decode_row(path: Path, table: Table, index: int) -> KernelRow:
    columns = {"family": table.family, **table.defaults, **table.rows[index]}
    try:
        # Scalars arrive as the text that stands in the file; strict=False turns it into numbers.
        row = msgspec.convert(columns, KernelRow, strict=False)
    except msgspec.ValidationError as error:
        raise TableError(f"{path}: row {index + 1}: {error}") from None
    if row.family != table.family:
        raise TableError(
            f"{path}: row {index + 1}: family is {row.family!r}; expected the table's {table.family!r}"
        )
    return row


def _refuse_ambiguous(path: Path, rows: tuple[KernelRow, ...]) -> None:
    seen: dict[tuple[object, ...], int] = {}
    for number, row in enumerate(rows, start=1):
        first = seen.setdefault(tuple(getattr(row, column) for column in SELECTION_COLUMNS), number)
        if first != number:
            raise TableError(
                f"{path}: rows {first} and {number} answer the same requests ({row.name}); "
                f"expected them to differ in one of {', '.join(SELECTION_COLUMNS)}"
            )
