"""The rules of tiled tensor maps, without a driver; tests/driver has what reaches the driver."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubin_runtime.errors import InvalidArgumentError
from cubin_runtime.request import DType
from cubin_runtime.tensormap import TiledMap

ADDRESS = 0x7F00_0000_0000


def make(**changes) -> TiledMap:
    """Keys [tokens, heads, 192] in tiles of 64 dims of 128 tokens of one head."""
    fields = {
        "tensor": "key",
        "dtype": DType.BF16,
        "dims": (192, 128, 4096),
        "strides": (384, 49152),
        "box": (64, 1, 128),
    }
    return TiledMap(**{**fields, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dims": (192, 128, 87_382), "strides": (384, 49152)},  # elements past 2**31
        {"dims": (192, 128, 2**32)},
        {"strides": (0, 49152)},  # one extent shared by all
        {"strides": (49152, 384)},  # heads outside tokens
        {"strides": (384, 2**40 - 16)},
        {"box": (64, 1, 256)},
        {"dims": (64,), "strides": (), "box": (64,)},
        {"dims": (8, 1, 1, 1, 1), "strides": (16,) * 4, "box": (8, 1, 1, 1, 1)},
        {"dtype": DType.E4M3, "box": (128, 1, 64)},
        {"swizzle": 0, "box": (256, 1, 1)},
        {"element_strides": (1, 8, 1)},
        {"oob_fill": "nan"},
    ],
)
def test_what_is_allowed(changes):
    assert make(**changes).violations(ADDRESS) == []


@pytest.mark.parametrize(
    ("changes", "address", "expected"),
    [
        ({}, ADDRESS + 8, "address is 0x7f0000000008; expected a multiple of 16"),
        ({}, 0, "address is 0x0"),
        ({"dims": (), "strides": (), "box": ()}, ADDRESS, "rank is 0; expected 1 to 5"),
        ({"dims": (8,) * 6, "strides": (16,) * 5, "box": (8,) * 6}, ADDRESS, "rank is 6"),
        ({"strides": (384,)}, ADDRESS, "1 strides, 3 box extents and 3 element strides; expected 2, 3 and 3"),
        ({"box": (64, 1)}, ADDRESS, "2 strides, 2 box extents"),
        ({"element_strides": (1,)}, ADDRESS, "1 element strides"),
        ({"dims": (192, 0, 4096)}, ADDRESS, "extent 1 is 0; expected 1 to 2**32"),
        ({"dims": (192, 128, 2**32 + 1)}, ADDRESS, "extent 2 is 4294967297"),
        (
            {"strides": (384, 49160)},
            ADDRESS,
            "stride 2 is 49160 bytes; expected a multiple of 16 below 2**40",
        ),
        ({"strides": (384, 2**40)}, ADDRESS, "stride 2 is 1099511627776 bytes"),
        ({"strides": (384, -49152)}, ADDRESS, "stride 2 is -49152 bytes"),
        ({"box": (64, 0, 128)}, ADDRESS, "box extent 1 is 0; expected 1 to 256"),
        ({"box": (64, 1, 257)}, ADDRESS, "box extent 2 is 257"),
        ({"element_strides": (1, 1, 0)}, ADDRESS, "element stride 2 is 0; expected 1 to 8"),
        ({"element_strides": (1, 1, 9)}, ADDRESS, "element stride 2 is 9"),
        ({"box": (60, 1, 1)}, ADDRESS, "a row of the box has 120 bytes; expected a multiple of 16"),
        ({"box": (128, 1, 1)}, ADDRESS, "a row of the box has 256 bytes; expected at most its swizzle, 128"),
        ({"swizzle": 32}, ADDRESS, "at most its swizzle, 32"),
        ({"swizzle": 16}, ADDRESS, "swizzle is 16; expected one of 0, 32, 64, 128"),
        ({"l2_promotion": 32}, ADDRESS, "l2_promotion is 32; expected one of 0, 64, 128, 256"),
        ({"dtype": DType.INT8, "oob_fill": "nan"}, ADDRESS, "oob_fill is nan; expected zero for int8"),
    ],
)
def test_each_rule_alone(changes, address, expected):
    tiled = make(**changes)
    (violation,) = tiled.violations(address)
    assert expected in violation
    with pytest.raises(InvalidArgumentError, match=r"^key cannot be read in tiles: "):
        tiled.encode(address)


def test_all_broken_rules_are_told():
    broken = make(strides=(386, 49160), box=(63, 1, 300)).violations(ADDRESS + 2)
    assert len(broken) == 5


@given(
    dims=st.lists(st.integers(-1, 2**33), max_size=6).map(tuple),
    strides=st.lists(st.integers(-1, 2**41), max_size=6).map(tuple),
    box=st.lists(st.integers(-1, 300), max_size=6).map(tuple),
    address=st.integers(0, 2**48),
)
def test_any_numbers_give_sentences(dims, strides, box, address):
    violations = make(dims=dims, strides=strides, box=box).violations(address)
    assert all(isinstance(sentence, str) for sentence in violations)
    if address % 16:
        assert violations
