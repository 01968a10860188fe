"""Measures what a call costs on the host, over a driver that does nothing. Needs a C compiler, no GPU.

    python scripts/bench_host.py [--json]

  warm_call_us       the public call when it repeats an earlier one, out and lse given, the device's context
                     current as in a process with torch
  import_ms          `import cubin_runtime` in a new process, beyond what Python itself takes
  first_load_ms      from the first selection to a loaded kernel of the package, in a new process that has
                     imported torch and cuda.bindings already
  first_load_bare_ms the same in a process that has imported neither: cuda.bindings is imported on the way

Each is a median, then the best of all repeats: their distance says what other work the machine had. The
driver is tests/driver/libcuda_stub.c behind the real cuda.bindings. Tensors are stand-ins of a torch.Tensor
subclass; what torch adds to every attribute of a subclass is switched off, so that they cost what plain
tensors do. Python's compiled files are kept in a folder of this run, and written before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "tests" / "driver" / "libcuda_stub.c"

_CALLS = 30_000
_PROCESSES = 9


def warm_call() -> list[float]:
    """Seconds of each call. Runs on the stub driver."""
    import torch

    from cubin_runtime import _driver, attention, trtllm_ragged_attention_deepseek
    from tests.driver.cuda_tensors import cuda_call

    attention._current_stream = lambda device: 0  # torch asks its own CUDA runtime, which is not there
    arguments = cuda_call([2048] * 4, [4096] * 4, heads=(128, 128))
    trtllm_ragged_attention_deepseek(**arguments)
    seconds = []
    with _driver.pushed(_driver.retain_primary_context(0)), torch._C.DisableTorchFunctionSubclass():
        for _ in range(_CALLS):
            start = time.perf_counter()
            trtllm_ragged_attention_deepseek(**arguments)
            seconds.append(time.perf_counter() - start)
    return seconds


def first_load() -> list[float]:
    """Seconds from selection to a loaded kernel. Runs on the stub driver."""
    import torch  # noqa: F401
    from cuda.bindings import driver  # noqa: F401

    return first_load_bare()


def first_load_bare() -> list[float]:
    """The same without torch and cuda.bindings."""
    start = time.perf_counter()
    from cubin_runtime import explain
    from cubin_runtime.module import load

    load(explain(arch="sm_90a").require(), 0)
    return [time.perf_counter() - start]


class Stub:
    """Runs this file's functions, and Python, in processes that find the stub driver first."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("gcc") or shutil.which("cc")
        if not compiler:
            sys.exit("a C compiler is needed to build the stub driver; install gcc")
        library = folder / "libcuda.so.1"
        subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, STUB, "-lpthread"], check=True)
        self._environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
            "LD_LIBRARY_PATH": str(folder),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")]),
            "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
            "CUBIN_RUNTIME_OFFLINE": "1",
        }

    def python(self, code: str) -> str:
        """What a new process prints."""
        command = [sys.executable, "-c", code]
        return subprocess.run(
            command, env=self._environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    def times(self, function: Callable[[], list[float]], processes: int = 1) -> list[float]:
        """What the function returns in new processes, after one that compiles."""
        code = f"import bench_host, json; print(json.dumps(bench_host.{function.__name__}()))"
        outputs = [self.python(code) for _ in range(processes + 1)][1:]
        return [seconds for output in outputs for seconds in json.loads(output)]

    def import_times(self) -> list[float]:
        """What importing the package adds to the fastest process without it."""
        imports = "import cubin_runtime, sys; assert 'torch' not in sys.modules"
        self.python(imports)
        pairs = [(self._seconds("pass"), self._seconds(imports)) for _ in range(_PROCESSES)]
        bare = min(seconds for seconds, _ in pairs)
        return [seconds - bare for _, seconds in pairs]

    def _seconds(self, code: str) -> float:
        start = time.perf_counter()
        self.python(code)
        return time.perf_counter() - start


def main() -> None:
    """Measures everything and prints it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stub = Stub(Path(folder))
        results = {
            "warm_call_us": _summary(stub.times(warm_call), 1e6),
            "import_ms": _summary(stub.import_times(), 1e3),
            "first_load_ms": _summary(stub.times(first_load, _PROCESSES), 1e3),
            "first_load_bare_ms": _summary(stub.times(first_load_bare, _PROCESSES), 1e3),
        }
    if options.json:
        print(json.dumps(results))
        return
    for name, result in results.items():
        print(f"{name:20} {result['median']:7.1f}   best {result['best']:7.1f}")


def _summary(seconds: list[float], scale: float) -> dict[str, float]:
    return {
        "median": round(statistics.median(seconds) * scale, 2),
        "best": round(min(seconds) * scale, 2),
    }


if __name__ == "__main__":
    main()
