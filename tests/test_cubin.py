"""Reading cubins: real ones of several compilers, damaged ones, and rows that they do or do not match."""

import contextlib
import re
import shutil
import subprocess
import time
from io import BytesIO
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from hypothesis import given, settings
from hypothesis import strategies as st

from cubin_runtime.cubin import Parameter, check_row, inspect
from cubin_runtime.errors import CubinFormatError
from cubin_runtime.request import Architecture, DType, MaskType
from kernel_meta.schema import KernelRow, Resources, Scheduler

CUBINS = Path(__file__).parent / "driver" / "cubins"


def read(name: str) -> bytes:
    return (CUBINS / f"{name}.cubin").read_bytes()


HOPPER = read("facts_13.0_sm_90a")
_TABLES = int.from_bytes(HOPPER[40:48], "little")


@pytest.mark.parametrize("path", sorted(CUBINS.glob("*.cubin")), ids=lambda path: path.stem)
def test_target_and_compiler(path):
    _, release, arch = re.fullmatch(r"(\w+?)_([\d.]+)_(sm_\w+)", path.stem).groups()
    cubin = inspect(path.read_bytes())
    assert cubin.arch == Architecture.parse(arch)
    assert release in cubin.compiler


@pytest.mark.parametrize("path", sorted(CUBINS.glob("*.cubin")), ids=lambda path: path.stem)
def test_entries_agree_with_an_elf_library(path):
    """pyelftools reads the same entries: functions with a section of their own and parameters or threads."""
    elf = ELFFile(BytesIO(path.read_bytes()))
    names = {section.name for section in elf.iter_sections()}
    entries = {
        symbol.name
        for symbol in elf.get_section_by_name(".symtab").iter_symbols()
        if symbol["st_info"]["type"] == "STT_FUNC" and f".nv.info.{symbol.name}" in names
    }
    assert set(inspect(path.read_bytes()).kernels) == entries


def test_one_struct_by_value():
    kernel = inspect(HOPPER).kernels["by_value"]
    assert kernel.parameters == (Parameter(0, 0, 320),)
    assert kernel.parameter_bytes == 320
    assert (kernel.max_threads, kernel.required_threads, kernel.threads) == (384, None, 384)
    assert (kernel.static_shared_memory, kernel.dynamic_shared_memory) == (400, 196608)
    assert (kernel.registers, kernel.local_bytes) == (14, 0)  # as ptxas -v says


@pytest.mark.parametrize("name", ["facts_13.0_sm_90a", "facts_13.0_sm_100f", "facts_13.0_sm_120f"])
def test_facts_do_not_depend_on_where_the_constant_bank_starts(name):
    kernels = inspect(read(name)).kernels
    assert kernels["by_value"].parameter_bytes == 320
    assert kernels["by_value"].static_shared_memory == 400
    assert kernels["several"].parameters == (
        Parameter(0, 0, 4),
        Parameter(1, 16, 16),
        Parameter(2, 32, 1),
        Parameter(3, 40, 8),
        Parameter(4, 48, 8),
    )
    assert kernels["none"].parameters == ()
    assert kernels["none"].parameter_bytes == 0
    assert kernels["local_array"].local_bytes == 160
    assert kernels["fixed_block"].required_threads == kernels["fixed_block"].threads == 256


@pytest.mark.parametrize("name", ["facts_11.8_sm_80", "facts_12.8_sm_90a", "facts_12.9_sm_100f"])
def test_older_compilers(name):
    kernel = inspect(read(name)).kernels["by_value"]
    assert kernel.parameters == (Parameter(0, 0, 320), Parameter(1, 320, 4))
    assert (kernel.parameter_bytes, kernel.static_shared_memory, kernel.threads) == (324, 400, 256)
    assert kernel.dynamic_shared_memory == 5000


def test_parameters_past_14_bits():
    kernel = inspect(read("large_13.0_sm_90a")).kernels["large"]
    assert kernel.parameters == (Parameter(0, 0, 16400), Parameter(1, 16400, 8))
    assert kernel.dynamic_shared_memory is None


def test_constants_that_are_zero_are_found_too():
    assert inspect(HOPPER).symbols == {"fmha_dynamic_shared_memory": 196608, "fmha_other_constant": 0}


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize(
    "arch",
    ["sm_80", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_100f", "sm_103f", "sm_110a", "sm_121a"],
)
def test_every_target_of_the_installed_compiler(tmp_path, arch):
    output = tmp_path / "facts.cubin"
    command = ["nvcc", "-cubin", f"-arch={arch}", "-DLARGE", "-o", str(output), str(CUBINS / "facts.cu")]
    subprocess.run(command, check=True, capture_output=True)
    cubin = inspect(output.read_bytes())
    assert cubin.arch == Architecture.parse(arch)
    assert cubin.kernels["large"].parameter_bytes == 16408


# ---- damage ----


def decode(data: bytes) -> None:
    """A result or CubinFormatError; anything else fails the test."""
    with contextlib.suppress(CubinFormatError):
        assert len(repr(inspect(data))) < 2**20


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a cubin"),
        (b"<!DOCTYPE html>" * 100, "starts with b'<!DOCT'"),
        (b"\x7fELF", "not a cubin"),
        (HOPPER[:18] + b"\x3e\x00" + HOPPER[20:], "machine is 62"),
        (HOPPER[:7] + b"\x00" + HOPPER[8:], "OS ABI 0"),
        (HOPPER[:8] + b"\x09" + HOPPER[9:], "version 9"),
        (HOPPER[: len(HOPPER) // 2], "damaged"),
        (HOPPER[: _TABLES + 1000], "damaged"),
    ],
)
def test_what_is_no_cubin_is_told_apart(data, message):
    with pytest.raises(CubinFormatError, match=re.escape(message)):
        inspect(data)


@given(st.binary(max_size=4096))
def test_random_bytes(data):
    decode(data)


@given(st.binary(max_size=4096))
def test_random_bytes_after_a_real_header(data):
    decode(HOPPER[:64] + data)


@given(st.integers(0, len(HOPPER)))
def test_truncation(length):
    decode(HOPPER[:length])


@settings(max_examples=500)
@given(
    st.lists(
        st.tuples(
            # Headers, tables and attributes lie at both ends; code, which is not read, in the middle.
            st.one_of(
                st.integers(0, len(HOPPER) - 1), st.integers(0, 4096), st.integers(_TABLES, len(HOPPER) - 1)
            ),
            st.integers(0, 255),
        ),
        min_size=1,
        max_size=16,
    )
)
def test_overwritten_bytes(changes):
    data = bytearray(HOPPER)
    for position, value in changes:
        data[position] = value
    decode(bytes(data))


@given(st.integers(0, 30), st.integers(0, 7), st.integers(0, 2**64 - 1))
def test_section_headers_with_any_number(section, field, value):
    data = bytearray(HOPPER)
    position = (_TABLES + section * 64 + field * 8) % (len(HOPPER) - 8)
    data[position : position + 8] = value.to_bytes(8, "little")
    decode(bytes(data))


def test_sections_that_all_span_the_file_are_refused_at_once():
    count = 60_000
    header = bytearray(HOPPER[:64])
    header[40:48] = (64).to_bytes(8, "little")
    header[60:62] = count.to_bytes(2, "little")
    header[62:64] = bytes(2)
    size = 64 + 64 * count
    section = bytes(24) + bytes(8) + size.to_bytes(8, "little") + bytes(24)
    started = time.perf_counter()
    with pytest.raises(CubinFormatError, match="claim more than"):
        inspect(bytes(header) + section * count)
    assert time.perf_counter() - started < 2


def test_names_that_all_span_the_file_are_refused_at_once():
    count = 20_000
    names = 64 + 64 * count
    data = bytearray(HOPPER[:64]) + bytearray(64 * count) + b"x" * 2_000_000 + b"\0"
    data[40:48] = (64).to_bytes(8, "little")
    data[60:64] = count.to_bytes(2, "little") + bytes(2)
    data[64 + 24 : 64 + 40] = names.to_bytes(8, "little") + (len(data) - names).to_bytes(8, "little")
    with pytest.raises(CubinFormatError, match="names claim more than"):
        inspect(bytes(data))


def test_an_attribute_without_a_value():
    """`.nv.compat` starts with the mark of an `a` target; a sized attribute of no bytes takes its place."""
    position = HOPPER.index(bytes.fromhex("02090100"))
    assert inspect(HOPPER[:position] + bytes.fromhex("04090000") + HOPPER[position + 4 :]).arch.suffix == ""


# ---- rows ----


def make_row(**changes) -> KernelRow:
    """The row that HOPPER's entry `by_value` fits."""
    resources = {
        "threads": 384,
        "registers": 14,
        "shared_memory": 196608,
        "static_shared_memory": 400,
        "parameter_bytes": 320,
    }
    columns = {
        "family": "fmha_sm90",
        "arch": "sm_90a",
        **{f"dtype_{x}": DType.BF16 for x in "qkvo"},
        "head_dim_qk": 192,
        "head_dim_v": 128,
        "mask_type": MaskType.CAUSAL,
        "tile_q": 128,
        "tile_kv": 128,
        "scheduler": Scheduler.STATIC,
        "abi": "test/1",
        "entry": "by_value",
    }
    for name, value in changes.items():
        (resources if name in resources else columns)[name] = value
    return KernelRow(**{"resources": Resources(**resources), **columns})


def test_a_row_that_fits():
    check_row(inspect(HOPPER), make_row())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "sm_90"}, "arch is sm_90 in the table and sm_90a in the cubin"),
        (
            {"entry": "other"},
            "the entry other, the cubin holds by_value, fixed_block, local_array, none, several",
        ),
        ({"threads": 256}, "threads is 256 in the table and 384 in the cubin"),
        ({"registers": 13}, "registers is 13 in the table and 14 in the cubin"),
        ({"shared_memory": 1}, "shared_memory is 1 in the table and 196608 in the cubin"),
        ({"static_shared_memory": 0}, "static_shared_memory is 0 in the table and 400 in the cubin"),
        ({"parameter_bytes": 328}, "parameter_bytes is 328 in the table and 320 in the cubin"),
        ({"resources": None}, "has not been built"),
    ],
)
def test_a_row_that_does_not_fit_names_both_sides(changes, message):
    row = make_row(**changes)
    with pytest.raises(CubinFormatError, match=re.escape(message)) as caught:
        check_row(inspect(HOPPER), row)
    assert str(caught.value).startswith(row.name)


def test_all_differences_are_told_at_once():
    with pytest.raises(CubinFormatError, match=r"threads .*registers .*parameter_bytes"):
        check_row(inspect(HOPPER), make_row(threads=1, registers=1, parameter_bytes=1))


def test_without_the_constant_the_table_decides():
    row = make_row(entry="large", registers=8, static_shared_memory=0, parameter_bytes=16408, threads=128)
    cubin = inspect(read("large_13.0_sm_90a"))
    with pytest.raises(CubinFormatError, match="threads is 128 in the table and None in the cubin") as caught:
        check_row(cubin, row)
    assert "shared_memory" not in str(caught.value)
