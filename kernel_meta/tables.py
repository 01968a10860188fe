"""The tables of kernels: every `kernel_meta/<family>/table.yaml`, read and checked.

A table is `family:`, `defaults:` (columns that most rows share) and `rows:` (the columns that differ). Long
tables name the columns once, under `columns:`, and have a line of words for each row; `resources.threads` is
a column of `resources`, and commas join the parts of a list. `steps.yaml` is such a file, too, about the
small kernels that a family launches beside those.
"""

from __future__ import annotations

import functools
import operator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cubin_runtime import strict_yaml
from cubin_runtime.errors import InvalidArgumentError, TableError, UnsupportedError
from cubin_runtime.request import Capability
from kernel_meta.schema import KernelRow, Step

TABLES_DIR = Path(__file__).parent

_Row = TypeVar("_Row", KernelRow, Step)

# What selection looks at. Two rows that agree in all of it are indistinguishable to a request; of those for
# few rows it looks at tile_q, too, and not at which of their schedulers they have.
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
    "e4m3_p",
    "sage_blocks",
)


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table file as it is written, before defaults are filled in."""

    family: str
    rows: list[dict[str, Any] | str]
    defaults: dict[str, Any] = {}
    columns: list[str] = []


@functools.cache
def all_rows() -> tuple[KernelRow, ...]:
    """The rows of every table in the package, read once; families in alphabetical order."""
    return tuple(row for path in sorted(TABLES_DIR.glob("*/table.yaml")) for row in load_table(path))


@functools.cache
def all_steps() -> tuple[Step, ...]:
    """The steps of every family in the package, read once."""
    return tuple(step for path in sorted(TABLES_DIR.glob("*/steps.yaml")) for step in load_steps(path))


def find_row(name: str) -> KernelRow:
    """The row called `name`; raises InvalidArgumentError with the closest names."""
    import difflib

    rows = {row.name: row for row in all_rows()}
    if name not in rows:
        close = difflib.get_close_matches(name, rows, n=3)
        hint = f"closest: {', '.join(close)}" if close else f"{len(rows)} kernels exist"
        raise InvalidArgumentError(f"no kernel is called {name!r}; {hint}")
    return rows[name]


def find_step(family: str, step: str, capability: Capability) -> Step:
    """A family's step of that name for a device; raises UnsupportedError naming those it is built for."""
    found = [each for each in all_steps() if (each.family, each.step) == (family, step)]
    for each in found:
        if each.architecture.runs_on(capability):
            return each
    built = ", ".join(each.arch for each in found) or "nothing"
    raise UnsupportedError(
        f"{family} has no kernel {step!r} for compute capability {capability}; it is built for {built}"
    )


def load_table(path: Path) -> tuple[KernelRow, ...]:
    """The rows of one table, in file order; raises TableError naming the file and the row."""
    table = read_table(path)
    rows = tuple(_decode(path, table, index, KernelRow) for index in range(len(table.rows)))
    _refuse_ambiguous(path, rows)
    return rows


def load_steps(path: Path) -> tuple[Step, ...]:
    """The steps of one family, in file order; raises TableError naming the file and the row."""
    table = read_table(path)
    return tuple(_decode(path, table, index, Step) for index in range(len(table.rows)))


def read_table(path: Path) -> Table:
    """The table as written; raises TableError naming the file, and the line of a YAML error."""
    try:
        return msgspec.convert(strict_yaml.parse(path.read_bytes()), Table)
    except ValueError as error:  # msgspec's ValidationError is one
        raise TableError(f"{path}: {error}") from None


def _decode(path: Path, table: Table, index: int, kind: type[_Row]) -> _Row:
    written = table.rows[index]
    try:
        own = _columns(written, table.columns) if isinstance(written, str) else written
        columns = {"family": table.family, **table.defaults, **own}
        if isinstance(table.defaults.get("resources"), dict) and isinstance(own.get("resources"), dict):
            columns["resources"] = {**table.defaults["resources"], **own["resources"]}
        # Scalars arrive as the text that stands in the file; strict=False turns it into numbers.
        row = msgspec.convert(columns, kind, strict=False)
    except ValueError as error:  # msgspec's ValidationError is one
        raise TableError(f"{path}: row {index + 1}: {error}") from None
    if row.family != table.family:
        raise TableError(
            f"{path}: row {index + 1}: family is {row.family!r}; expected the table's {table.family!r}"
        )
    return row


def _columns(line: str, names: list[str]) -> dict[str, Any]:
    """The columns that a line of words spells."""
    words = line.split()
    if len(words) != len(names):
        raise ValueError(f"{len(words)} words for {len(names)} columns: {line[:200]!r}")
    columns: dict[str, Any] = {}
    for name, word in zip(names, words, strict=True):
        value = word.split(",") if "," in word else word
        group, _, member = name.partition(".")
        if member:
            columns.setdefault(group, {})[member] = value
        else:
            columns[name] = value
    return columns


def _refuse_ambiguous(path: Path, rows: tuple[KernelRow, ...]) -> None:
    seen: dict[tuple[object, ...], int] = {}
    of_all = operator.attrgetter(*(column for column in SELECTION_COLUMNS if column != "scheduler"))
    for number, row in enumerate(rows, start=1):
        work = row.tile_q if row.scheduler.is_for_few_rows else row.scheduler
        first = seen.setdefault((of_all(row), work), number)
        if first != number:
            raise TableError(
                f"{path}: rows {first} and {number} answer the same requests ({row.name}); "
                f"expected them to differ in one of {', '.join(SELECTION_COLUMNS)}"
            )
