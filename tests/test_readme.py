"""README.md: its Python runs, its commands print what it shows, and its tables are true."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cubin_runtime import errors, settings
from kernel_meta.tables import all_rows

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def sessions() -> Iterator[tuple[str, str]]:
    """Every command in a console block, with the output that follows it."""
    for block in blocks("console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield command, output


def table(first_column: str) -> list[list[str]]:
    """The cells of the table whose header begins with that column, without the header."""
    lines = README[README.index(f"| {first_column} |") :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def stable(output: str) -> list[str]:
    """Lines without what differs between machines and runs: decimals, and where the checkout lies."""
    output = re.sub(r"\S*(?=/kernel_meta/)", "", output)
    return [re.sub(r"\d+\.\d+(e[-+]\d+)?", "#", line).rstrip() for line in output.splitlines()]


@pytest.mark.parametrize("code", blocks("python"), ids=itertools.count())
def test_python_runs(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize(("command", "output"), list(sessions()), ids=[c for c, _ in sessions()])
def test_commands_print_what_is_shown(command: str, output: str, tmp_path: Path) -> None:
    # As on a machine without a GPU, like the one that the output is from.
    environment = {name: value for name, value in os.environ.items() if name not in ours()}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "80", "TERM": "dumb", "PYTHONPATH": str(ROOT)}
    environment |= {"CUBIN_RUNTIME_CACHE_DIR": str(tmp_path)}
    function = f'cubin-runtime() {{ "{sys.executable}" -m cubin_runtime.cli "$@"; }}\n'
    process = subprocess.run(
        ["bash", "-c", function + command], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert stable(process.stdout + process.stderr) == stable(output)


def test_there_is_something_to_run() -> None:
    assert len(blocks("python")) >= 2
    assert [command.split()[1] for command, _ in sessions()] == ["run", "explain", "verify"]


def test_the_support_table_is_the_kernel_table() -> None:
    claimed = {
        (dtype, head_dims, mask)
        for dtype, dims, masks in table("query, key, value and out")
        for head_dims in re.findall(r"\(.*?\)", dims)
        for mask in masks.split(", ")
    }
    built = {
        (str(row.dtype_q), f"({row.head_dim_qk}, {row.head_dim_v})", str(row.mask_type))
        for row in all_rows()
        if row.resources
    }
    assert claimed == built
    for row in all_rows():
        assert row.dtype_q == row.dtype_k == row.dtype_v == row.dtype_o
        assert (row.family, row.arch) == ("fmha_sm90", "sm_90a")
        assert not any((row.fp16_softmax, row.uses_spcompress, row.skips_softmax, *row.sage_blocks))


def ours() -> set[str]:
    return {v for v in vars(settings).values() if isinstance(v, str) and v.startswith("CUBIN_RUNTIME_")}


def test_settings_exist() -> None:
    named = set(re.findall(r"CUBIN_RUNTIME_[A-Z_]+", README))
    assert named == {row[0].strip("`") for row in table("variable")}
    assert named <= ours()


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
