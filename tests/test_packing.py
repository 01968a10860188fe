"""Parameter structs described as data, and the two layouts of NVIDIA's kernels."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubin_runtime.errors import TableError
from cubin_runtime.families.packing import StructLayout, fast_divisor, field_size, load_layout
from kernel_meta.tables import TABLES_DIR

FOLDER = TABLES_DIR / "fmha_trtllm_gen"


def test_fields_lie_where_the_layout_says() -> None:
    layout = StructLayout(48, {"last": (40, "float32"), "pointer": (8, "pointer"), "flag": (1, "bool")})
    packed = layout.pack({"pointer": 0x1122334455667788, "last": 1.5, "flag": True})
    assert (
        packed == b"\0\1" + bytes(6) + bytes.fromhex("8877665544332211") + bytes(24) + b"\0\0\xc0\x3f\0\0\0\0"
    )


def test_what_is_not_given_is_zero() -> None:
    layout = StructLayout(
        160, {"map": (0, "tensor_map"), "divisor": (128, "divisor"), "number": (144, "int64")}
    )
    assert layout.pack({}) == bytes(160)
    assert layout.pack({"number": -1}) == bytes(144) + b"\xff" * 8 + bytes(8)


def test_names_and_values_have_to_fit() -> None:
    layout = StructLayout(8, {"number": (0, "int32"), "scale": (4, "float32")})
    with pytest.raises(KeyError, match="no field is called other"):
        layout.pack({"number": 1, "other": 2})
    with pytest.raises(struct.error):
        layout.pack({"number": 2**31})
    with pytest.raises(OverflowError):
        layout.pack({"scale": 1e39})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("size: 8\nfields: {a: 0 int32, b: 2 int32}", "b at 2 overlaps the field before it, which ends at 4"),
        ("size: 8\nfields: {a: 6 int32}", "the fields end at 10, behind the struct's 8 bytes"),
        ("size: 8\nfields: {a: -4 int32}", "a at -4 overlaps"),
        ("size: 8\nfields: {a: 0 int33}", "a has type 'int33'; expected one of tensor_map, pointer, "),
        ("size: 8\nfields: {a: 0}", "a is '0'; expected an offset and a type"),
        ("size: 8\nfields: {a: x int32}", "invalid literal"),
        ("size: wide\nfields: {}", "size"),
        ("fields: {}", "size"),
        ("", "empty"),
    ],
)
def test_a_file_that_describes_no_struct_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(text)
    with pytest.raises(TableError, match=r"params\.yaml: .*") as caught:
        load_layout(path)
    assert message in str(caught.value)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"none\.yaml"):
        load_layout(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("release", "size", "window"),
    [
        ("0_6_13", 1280, {"mAttentionWindowSize": 1112}),
        ("0_7_4", 1408, {"mLeftSlidingWindow": 1128, "mRightSlidingWindow": 1132}),
    ],
)
def test_layouts_of_releases(release: str, size: int, window: dict[str, int]) -> None:
    layout = load_layout(FOLDER / f"params_{release}.yaml")
    assert layout.size == size
    assert {
        name: offset for name, (offset, _) in layout.fields.items() if "Window" in name and name[0] == "m"
    } == (window)
    assert [layout.fields[f"tma{x}_"] for x in "QKVO"] == [(o, "tensor_map") for o in (0, 128, 384, 512)]
    assert len(layout.pack({"mBatchSize": 3})) == size
    # Natural alignment, as a C compiler lays a struct out.
    for name, (offset, kind) in layout.fields.items():
        assert offset % {"tensor_map": 128, "divisor": 4}.get(kind, field_size(kind)) == 0, name


def test_releases_share_most_fields() -> None:
    old, new = (load_layout(FOLDER / f"params_{release}.yaml").fields for release in ("0_6_13", "0_7_4"))
    assert old.keys() - new.keys() == {"mAttentionWindowSize"}
    assert {name for name in old.keys() & new.keys() if old[name][1] != new[name][1]} == set()
    assert len(new) - len(old) == 6


@pytest.mark.parametrize(
    ("number", "packed"),
    [
        (1, "010000000000008000000000ffffffff"),
        (2, "02000000000000800000000000000000"),
        (3, "03000000abaaaaaa0000000001000000"),
        (5, "05000000cdcccccc0000000002000000"),
        (7, "07000000932449920000000002000000"),
        (24, "18000000abaaaaaa0000000004000000"),
        (128, "80000000000000800000000006000000"),
        (1000, "e8030000986e12830000000009000000"),
    ],
)
def test_recorded_divisors(number: int, packed: str) -> None:
    assert fast_divisor(number).hex() == packed


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_a_divisor_divides(number: int, dividend: int) -> None:
    divisor, multiplier, add, shift = struct.unpack("<iIIi", fast_divisor(number))
    assert (divisor, add, multiplier >> 32) == (number, 0, 0)
    quotient = dividend if number == 1 else (dividend * multiplier >> 32) >> shift
    assert quotient == dividend // number
