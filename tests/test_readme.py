"""README.md: its Python runs, its commands print what it shows, and its tables are true."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
from pathlib import Path

import msgspec
import pytest
from update_readme import output_of, sessions

from cubin_runtime import errors, settings
from cubin_runtime.request import SAGE_OFF, Capability, DType
from kernel_meta.schema import KernelRow
from kernel_meta.tables import all_rows

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SESSIONS = list(sessions(README))


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def table(first_column: str) -> list[list[str]]:
    """The cells of the table whose header begins with that column, without the header."""
    lines = README[README.index(f"| {first_column} |") :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def stable(output: str) -> list[str]:
    """Lines without what differs between machines, runs, and builds of a kernel: decimals, digests, sizes."""
    varying = r"\d+\.\d+(e[-+]\d+)?|\b[0-9a-f]{2}/[0-9a-f]{64}\b|\b[0-9a-f]{64}\b|\d+(?= bytes for)"
    return [re.sub(varying, "#", line).rstrip() for line in output.splitlines()]


@pytest.mark.parametrize("code", blocks("python"), ids=itertools.count())
def test_python_runs(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize(("command", "output"), SESSIONS, ids=[command for command, _ in SESSIONS])
def test_commands_print_what_is_shown(command: str, output: str) -> None:
    assert stable(output_of(command)) == stable(output), (
        "run scripts/update_readme.py, and look at the change"
    )


def test_there_is_something_to_run() -> None:
    assert len(blocks("python")) >= 2
    assert [command.split()[1] for command, _ in SESSIONS] == ["run", "explain", "verify"]
    assert README.count("```console\n") == len(SESSIONS)


def has_module(family: str) -> bool:
    """Whether there is code that launches the family's kernels."""
    return importlib.util.find_spec(f"cubin_runtime.families.{family}") is not None


def launchable(family: str) -> list[KernelRow]:
    return [row for row in all_rows() if row.family == family and row.resources and has_module(family)]


def head_dims(row: KernelRow) -> str:
    return f"({row.head_dim_qk}, {row.head_dim_v})"


def variant_of(row: KernelRow) -> str:
    variants = {
        "skip-softmax": row.skips_softmax,
        "fp16 softmax": row.fp16_softmax,
        "spcompress": row.uses_spcompress,
        "Sage scales": row.sage_blocks != SAGE_OFF,
    }
    return " with ".join(name for name, on in variants.items() if on) or "none"


def test_no_family_is_left_out() -> None:
    assert {row.family for row in all_rows() if has_module(row.family)} == {"fmha_sm90", "fmha_trtllm_gen"}


def test_the_support_table_of_hopper_is_the_kernel_table() -> None:
    claimed = {
        (query, value, out, size, mask, variant)
        for query, value, outs, dims, masks, variants in table("query, key")
        for out in outs.split(", ")
        for size in re.findall(r"\(.*?\)", dims)
        for mask in masks.split(", ")
        for variant in variants.split(", ")
    }
    rows = launchable("fmha_sm90")
    assert claimed == {
        (
            str(row.dtype_q),
            str(row.dtype_v),
            str(row.dtype_o),
            head_dims(row),
            str(row.mask_type),
            variant_of(row),
        )
        for row in rows
    }
    for row in rows:
        assert row.dtype_q == row.dtype_k
        assert (row.family, row.arch) == ("fmha_sm90", "sm_90a")
        assert variant_of(row) == "none" or row.scheduler == "persistent"


def test_the_support_table_of_blackwell_is_the_kernel_table() -> None:
    claimed = {
        (query, value, out, size, mask, block)
        for query, value, outs, dims, masks, blocks in table("query and key")
        for out in outs.split(", ")
        for size in re.findall(r"\(.*?\)", dims)
        for mask in masks.split(", ")
        for block in blocks.split(", ")
    }
    rows = [row for row in launchable("fmha_trtllm_gen") if row.dtype_o in (DType.BF16, DType.FP16)]
    assert claimed == {
        (
            str(row.dtype_q),
            str(row.dtype_v),
            str(row.dtype_o),
            head_dims(row),
            str(row.mask_type),
            str(row.sage_blocks[1]) if row.sage_blocks[1] else "none",
        )
        for row in rows
    }
    assert not any(row.fp16_softmax or row.uses_spcompress for row in rows)
    assert {row.sage_blocks[0] for row in rows} == {0, 1}
    by_capability = {minor: {r.dtype_q for r in rows if runs_on(r, minor)} for minor in (0, 3)}
    assert by_capability[0] - by_capability[3] == {DType.INT8}
    plain = {row.name for row in rows if not row.skips_softmax}
    skipping = [row for row in rows if row.skips_softmax]
    assert {msgspec.structs.replace(row, skips_softmax=False).name for row in skipping} == plain


def runs_on(row: KernelRow, minor: int) -> bool:
    return row.architecture.runs_on(Capability(10, minor))


def test_settings_exist() -> None:
    named = set(re.findall(r"CUBIN_RUNTIME_[A-Z_]+", README))
    assert named == {row[0].strip("`") for row in table("variable")}
    assert named <= {value for value in vars(settings).values() if isinstance(value, str)}


def test_exit_codes() -> None:
    rows = table("exit code")
    known = [
        e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.CubinRuntimeError)
    ]
    assert {int(row[0]) for row in rows} == {0, *(error.exit_code for error in known)}
    for code, names, _ in rows:
        for name in re.findall(r"\w+Error", names):
            assert getattr(errors, name).exit_code == int(code), name


def test_scripts_exist() -> None:
    named = set(re.findall(r"(?:scripts/|\.ci/)\w+(?:\.py)?", README))
    assert {"scripts/run", "scripts/test", "scripts/build_cubins.py", ".ci/run"} <= named
    for path in named:
        assert (ROOT / path).is_file(), path
        assert path.endswith(".py") or os.access(ROOT / path, os.X_OK), path
