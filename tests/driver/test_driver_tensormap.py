"""Tensor maps through the real cuda.bindings: what arrives in cuTensorMapEncodeTiled."""

import struct

import pytest

MAP = """
from cubin_runtime.errors import DriverError, InvalidArgumentError
from cubin_runtime.request import DType
from cubin_runtime.tensormap import TiledMap
def tiled(**changes):
    fields = dict(
        tensor="key", dtype=DType.BF16, dims=(192, 128, 4096), strides=(384, 384 * 128), box=(64, 1, 128)
    )
    return TiledMap(**{**fields, **changes})
"""


def test_everything_that_was_asked_for_arrives(run_with_stub):
    run = run_with_stub(
        MAP
        + """
encoded = tiled().encode(0x7f0000001000)
print(len(encoded), encoded.hex())
"""
    )
    (call,) = run.named("cuTensorMapEncodeTiled")
    # Numbers of cuda.h: BFLOAT16 9, SWIZZLE_128B 3, L2_256B 3.
    assert (call["dtype"], call["rank"], call["address"]) == (9, 3, 0x7F0000001000)
    assert (call["dims"], call["strides"]) == ([192, 128, 4096], [384, 384 * 128])
    assert (call["box"], call["element_strides"]) == ([64, 1, 128], [1, 1, 1])
    assert (call["interleave"], call["swizzle"], call["l2_promotion"], call["oob_fill"]) == (0, 3, 3, 0)
    size, encoded = run.stdout.split()
    assert size == "128"  # the stub packs its arguments into the map
    assert struct.unpack_from("<2IQ", bytes.fromhex(encoded)) == (9, 3, 0x7F0000001000)


@pytest.mark.parametrize(
    ("changes", "field", "number"),
    [
        ("dtype=DType.FP16", "dtype", 6),
        ("dtype=DType.E4M3", "dtype", 0),
        ("dtype=DType.INT8", "dtype", 0),
        ("swizzle=0", "swizzle", 0),
        ("swizzle=32, box=(16, 1, 1)", "swizzle", 1),
        ("swizzle=64, box=(32, 1, 1)", "swizzle", 2),
        ("l2_promotion=0", "l2_promotion", 0),
        ("l2_promotion=64", "l2_promotion", 1),
        ("l2_promotion=128", "l2_promotion", 2),
        ("oob_fill='nan'", "oob_fill", 1),
        ("element_strides=(1, 2, 8)", "element_strides", [1, 2, 8]),
        ("dims=(2**32, 1, 1)", "dims", [2**32, 1, 1]),
        ("strides=(0, 2**40 - 16)", "strides", [0, 2**40 - 16]),
        ("dims=(64,), strides=(), box=(64,)", "strides", []),
    ],
)
def test_each_option_reaches_the_driver(run_with_stub, changes, field, number):
    run = run_with_stub(MAP + f"tiled({changes}).encode(4096)")
    (call,) = run.named("cuTensorMapEncodeTiled")
    assert call[field] == number


def test_a_broken_rule_is_told_before_the_driver_is_asked(run_with_stub):
    run = run_with_stub(
        MAP
        + """
try:
    tiled(strides=(386, 384 * 128)).encode(4098)
except InvalidArgumentError as error:
    print(error)
"""
    )
    assert run.stdout.startswith(
        "key cannot be read in tiles: its address is 0x1002; expected a multiple of 16"
    )
    assert "stride 1 is 386 bytes" in run.stdout
    assert not run.calls


def test_what_the_driver_refuses_names_the_tensor(run_with_stub):
    run = run_with_stub(
        MAP
        + """
try:
    tiled().encode(4096)
except DriverError as error:
    print(error)
""",
        fail="cuTensorMapEncodeTiled=1",
    )
    assert "CUDA_ERROR_INVALID_VALUE" in run.stdout
    assert "the tensor map of key" in run.stdout
