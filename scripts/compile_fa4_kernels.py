"""Compiles FlashAttention-4's Hopper kernels into files, for bench_attention.py --fa4-aot.

For GPU machines that cannot have flash-attn-4 and its compiler installed. On any Linux machine with
flash-attn-4, nvidia-cutlass-dsl, quack-kernels, apache-tvm-ffi, torch-c-dlpack-ext, a CUDA build of torch
(no GPU is needed) and g++, all for the Python of the GPU machine:

    python scripts/compile_fa4_kernels.py OUT [SET or FILE.json ...]      default: all built-in sets

Copy OUT to the GPU machine, install apache-tvm-ffi there, and give OUT to bench_attention.py --fa4-aot.
Written against flash-attn-4 4.0.0b36 and nvidia-cutlass-dsl 4.8.1.
"""

from __future__ import annotations

import importlib
import lzma
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from bench.fa4_files import RUNTIME, VERSIONS, kernel_file
from bench.sets import SETS
from bench.workloads import Workload, read_workloads


def main(arguments: list[str]) -> int:
    """Compiles what is missing in the folder; returns the exit status."""
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    workloads = _workloads(arguments[1:] or list(SETS))
    compiler = _Compiler()
    compiler.copy_runtime(folder)
    for workload in workloads:
        for fixed in (False, True) if workload.equal_lengths else (False,):
            target = folder / kernel_file(workload, fixed)
            if workload.dtype == "e4m3" or workload.sage or target.exists():
                continue
            begin = time.perf_counter()
            compiler.compile(workload, fixed, target)
            print(f"{target.name}: {time.perf_counter() - begin:.1f} s", flush=True)
    return 0


def _workloads(sources: Iterable[str]) -> list[Workload]:
    return [
        workload
        for source in sources
        for workload in (SETS[source] if source in SETS else read_workloads(Path(source)))
    ]


class _Compiler:
    """flash-attn-4's own just-in-time compiler, told of a GPU that is not there."""

    def __init__(self) -> None:
        self._cache = tempfile.TemporaryDirectory()
        os.environ |= {
            "FLASH_ATTENTION_ARCH": "sm_90",
            "CUTE_DSL_ARCH": "sm_90a",
            "FLASH_ATTENTION_NUM_SMS": "132",
            "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
            "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": self._cache.name,
        }
        self._interface = importlib.import_module("flash_attn.cute.interface")
        self._ffi = importlib.import_module("tvm_ffi")
        self._runtime = importlib.import_module("cutlass.cute.runtime")

    def copy_runtime(self, folder: Path) -> None:
        """Puts the runtime library and the versions it is of beside the kernels."""
        libraries = map(Path, self._runtime.find_runtime_libraries(enable_tvm_ffi=False))
        library = next(path for path in libraries if path.name == RUNTIME.removesuffix(".xz"))
        if not (folder / RUNTIME).exists():
            (folder / RUNTIME).write_bytes(lzma.compress(library.read_bytes()))
        packages = ("flash-attn-4", "nvidia-cutlass-dsl", "apache-tvm-ffi")
        (folder / VERSIONS).write_text(", ".join(f"{name} {version(name)}" for name in packages) + "\n")

    def compile(self, workload: Workload, fixed: bool, target: Path) -> None:
        """Traces the public forward with tensors of shape only, and links the object that it caches."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        before = self._objects()
        self._interface._flash_attn_fwd.compile_cache.cache.clear()
        with FakeTensorMode():
            self._trace(workload, fixed)
        (made,) = self._objects() - before
        libraries = Path(self._ffi.__path__[0]) / "lib"
        command = ["g++", "-shared", "-s", "-o", str(target), str(made), f"-L{libraries}", "-ltvm_ffi"]
        subprocess.run(command, check=True)

    def _objects(self) -> set[Path]:
        return set(Path(self._cache.name).rglob("*.o"))

    def _trace(self, workload: Workload, fixed: bool) -> None:
        import torch

        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[workload.dtype]
        dim_qk, dim_v = workload.head_dims

        def empty(lengths: tuple[int, ...], heads: int, dim: int) -> torch.Tensor:
            tokens = (len(lengths), lengths[0]) if fixed else (sum(lengths),)
            return torch.empty(*tokens, heads, dim, dtype=dtype, device="cuda")

        def edges() -> torch.Tensor | None:
            return None if fixed else torch.empty(workload.batch + 1, dtype=torch.int32, device="cuda")

        self._interface._flash_attn_fwd(
            empty(workload.q_lens, workload.heads, dim_qk),
            empty(workload.kv_lens, workload.kv_heads, dim_qk),
            empty(workload.kv_lens, workload.kv_heads, dim_v),
            cu_seqlens_q=edges(),
            cu_seqlens_k=edges(),
            max_seqlen_q=None if fixed else max(workload.q_lens),
            max_seqlen_k=None if fixed else max(workload.kv_lens),
            causal=workload.mask != "dense",
            window_size_left=workload.window,
            window_size_right=None if workload.window is None else 0,
            out=empty(workload.q_lens, workload.heads, dim_v),
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
