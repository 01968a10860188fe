"""Loading and unloading in processes of their own: threads that race, failures, memory, interpreter exit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cubin_runtime import _driver, module
from cubin_runtime.errors import DriverError
from tests.gpu.support import HEAD_DIMS, assert_matches, call, expect, make_problem

pytestmark = pytest.mark.gpu

SETUP = """
import sys, threading
import torch
from tests.gpu.support import *

device = torch.device("cuda", 0)
workspace = make_workspace(device)
def some_problem(dims=(192, 128)):
    return make_problem([129, 0, 7], [300, 5, 0], device=device, dims=dims, heads=2, is_causal=True)
problem = some_problem()
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SETUP + code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )


EIGHT_FIRST_CALLS = """
from cubin_runtime import _driver
loads = []
load_library = _driver.load_library
_driver.load_library = lambda *args, **kwargs: loads.append(args) or load_library(*args, **kwargs)
problems = [some_problem(dims) for dims in HEAD_DIMS]
calls = [arguments(problems[n % 3], make_workspace(device, size=16 << 20)) for n in range(24)]
torch.cuda.synchronize()
barrier = threading.Barrier(8)
errors = []
def work(number):
    try:
        barrier.wait()
        for given in calls[number::8]:
            run(given)
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
assert not errors, errors
torch.cuda.synchronize()
for number, given in enumerate(calls):
    assert_matches(problems[number % 3], (given["out"], given["lse"]), expect(problems[number % 3]))
assert len(loads) == 3, f"{len(loads)} loads of three kernels"
"""


def test_eight_threads_make_the_first_calls(device: torch.device) -> None:
    """Kernels with more shared memory than the default, three of them, each loaded once."""
    finished = python(EIGHT_FIRST_CALLS)
    assert finished.returncode == 0, finished.stderr


EXITS = {
    "plain": ("call(problem, workspace)", 0),
    "work in flight": (
        "torch.cuda._sleep(100_000_000)\nfor _ in range(20): call(problem, workspace)",
        0,
    ),
    "loaded by a thread": (
        "t = threading.Thread(target=call, args=(problem, workspace)); t.start(); t.join()",
        0,
    ),
    "sys.exit": ("call(problem, workspace)\nsys.exit(3)", 3),
    "graph alive": (
        "given = arguments(problem, workspace)\n"
        "run(given)\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph): run(given)\n"
        "graph.replay()\n",
        0,
    ),
}


@pytest.mark.parametrize("how", EXITS)
def test_interpreter_exit_is_quiet(how: str, device: torch.device) -> None:
    code, status = EXITS[how]
    finished = python(code)
    assert finished.stderr == ""
    assert finished.returncode == status


def test_exit_after_the_device_failed(device: torch.device) -> None:
    """A kernel of torch's trips a device assertion, which no later call survives; our exit stays quiet."""
    finished = python(
        "call(problem, workspace)\n"
        "torch.zeros(1, device=device)[torch.tensor([5], device=device)]\n"
        "try: torch.cuda.synchronize()\n"
        "except Exception: sys.exit(3)\n"
    )
    assert finished.returncode == 3
    assert "cubin_runtime" not in finished.stderr
    assert "terminate called" not in finished.stderr


def test_memory_is_flat_over_loads_and_unloads(device: torch.device, workspace: torch.Tensor) -> None:
    problems = [make_problem([3], [5], device=device, dims=dims) for dims in HEAD_DIMS]

    def cycle() -> int:
        for problem in problems:
            call(problem, workspace)
        module.unload_all()
        return int(torch.cuda.mem_get_info(device)[0])

    cycle()
    before = cycle()
    for _ in range(200):
        after = cycle()
    assert before - after < 8 << 20
    assert_matches(problems[0], call(problems[0], workspace), expect(problems[0]))


def test_a_failed_load_caches_nothing(
    device: torch.device, workspace: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = make_problem([3], [5], device=device)
    module.unload_all()

    def fail(*_: Any) -> int:
        raise DriverError("injected failure", 1, "CUDA_ERROR_INVALID_VALUE")

    with monkeypatch.context() as patch:
        patch.setattr(_driver, "get_kernel", fail)
        for _ in range(2):
            with pytest.raises(DriverError, match="injected"):
                call(problem, workspace)
    assert_matches(problem, call(problem, workspace), expect(problem))
    module.unload_all()
    assert_matches(problem, call(problem, workspace), expect(problem))
