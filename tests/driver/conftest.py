"""Runs code against a stub of libcuda.so.1, so that the real cuda.bindings work without a GPU.

`run_with_stub(code, ...)` starts a Python process that finds the stub first, and returns what it printed and
every driver call that it made.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kernel_meta.tables import all_steps

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

HOPPER = "9.0:132:232448"


class StubRun(NamedTuple):
    """One process that ran on the stub. `calls` are the driver calls in order, as the stub logged them."""

    returncode: int
    stdout: str
    stderr: str
    calls: list[dict[str, Any]]

    def named(self, *names: str) -> list[dict[str, Any]]:
        return [call for call in self.calls if call["call"] in names]


@pytest.fixture(scope="session")
def stub_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the compiled stub, for LD_LIBRARY_PATH."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler, "a C compiler is needed to build the stub driver"
    folder = tmp_path_factory.mktemp("stub")
    warnings = ["-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror"]
    command = [compiler, "-shared", "-fPIC", "-O1", *warnings, "-o", str(folder / "libcuda.so.1")]
    subprocess.run([*command, str(HERE / "libcuda_stub.c"), "-lpthread"], check=True)
    return folder


@pytest.fixture
def run_with_stub(stub_folder: Path, tmp_path: Path) -> Callable[..., StubRun]:
    """`make_runner` for one test."""
    return make_runner(stub_folder, tmp_path)


@pytest.fixture(scope="module")
def run_once_with_stub(stub_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., StubRun]:
    """`make_runner` for fixtures that several tests look at: a process with torch takes seconds to start."""
    return make_runner(stub_folder, tmp_path_factory.mktemp("runs"))


def make_runner(stub_folder: Path, folder: Path) -> Callable[..., StubRun]:
    """A function that runs code on the stub; logs and caches go into `folder`.

    code             Python source; may import `stub_support`, which has a row and its cubin
    devices          one "major.minor:SMs:opt-in shared memory" per physical device; CUDA_VISIBLE_DEVICES is
                     honoured
    fail             "cuLaunchKernelEx=719" fails every call of a function, "cuLaunchKernelEx=719:2" the first
                     two; several with commas. stub_fail(name, code, times) does the same from within
    parameter_bytes  how much of the first kernel parameter a launch logs, as hex under "parameters"; of a
                     family's step, all of it
    env              further environment variables
    check            whether a process that fails, or that writes to stderr, fails the test
    """

    def run(
        code: str,
        *,
        devices: Sequence[str] = (HOPPER,),
        fail: str = "",
        parameter_bytes: int = 0,
        env: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> StubRun:
        log = folder / f"calls-{len(list(folder.iterdir()))}.jsonl"
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": str(stub_folder),
            "PYTHONPATH": os.pathsep.join([*_paths("PYTHONPATH"), str(ROOT), str(HERE)]),
            "CUDA_STUB_DEVICES": ",".join(devices),
            "CUDA_STUB_FAIL": fail,
            "CUDA_STUB_PARAMETER_BYTES": str(parameter_bytes),
            "CUDA_STUB_PARAMETER_BYTES_OF": ",".join(
                f"{step.name}:{step.resources.parameter_bytes}" for step in all_steps() if step.resources
            ),
            "CUDA_STUB_LOG": str(log),
            "CUBIN_RUNTIME_OFFLINE": "1",
            "CUBIN_RUNTIME_CACHE_DIR": str(folder / "cache"),
            **(env or {}),
        }
        process = subprocess.run(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        lines = log.read_text().splitlines() if log.exists() else []
        result = StubRun(
            process.returncode, process.stdout, process.stderr, [json.loads(line) for line in lines]
        )
        if check:
            assert (result.returncode, result.stderr) == (0, ""), result.stdout + result.stderr
        return result

    return run


def _paths(variable: str) -> list[str]:
    return [path for path in os.environ.get(variable, "").split(os.pathsep) if path]
