"""A row's name and its identity columns determine each other."""

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubin_runtime.errors import TableError
from kernel_meta.schema import KernelRow, parse_name
from tests.rows import kernel_rows, make_row


@given(kernel_rows())
def test_name_round_trip(row: KernelRow) -> None:
    columns = parse_name(row.name)
    assert KernelRow(**columns, abi=row.abi).name == row.name  # type: ignore[arg-type]  # columns are mixed
    assert {column: getattr(row, column) for column in columns} == columns


@given(kernel_rows())
def test_name_is_a_c_identifier(row: KernelRow) -> None:
    assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", row.name)


@given(st.text(max_size=120))
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(TableError, match="is not a kernel name"):
        parse_name(text)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("_bf16_", "_fp12_"),
        ("causal", "diagonal"),
        ("persistent", "lazy"),
        ("_h192x128", "_h192"),
        ("sm90a", "90a"),
    ],
)
def test_a_name_with_one_bad_part_is_refused(old: str, new: str) -> None:
    with pytest.raises(TableError, match="is not a kernel name"):
        parse_name(make_row().name.replace(old, new, 1))


def test_entry_name_defaults_to_the_row_name() -> None:
    assert make_row().entry_name == make_row().name
    assert make_row(entry="fmhaSm100fKernel").entry_name == "fmhaSm100fKernel"


def test_unknown_columns_are_refused() -> None:
    columns = {**msgspec.to_builtins(make_row()), "tile_z": 1}
    with pytest.raises(msgspec.ValidationError, match="tile_z"):
        msgspec.convert(columns, KernelRow)


def test_bad_architecture_and_family_are_refused() -> None:
    for column, value in {"arch": "hopper", "family": "Fmha-90"}.items():
        columns = {**msgspec.to_builtins(make_row()), column: value}
        with pytest.raises(msgspec.ValidationError, match=value):
            msgspec.convert(columns, KernelRow)
