"""FlashAttention-3 and -4, ragged and fixed-length."""

from __future__ import annotations

import lzma
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bench import fa4_files
from bench.peers.base import (
    Call,
    Options,
    PeerMissingError,
    package_version,
    refuse_unequal,
    require,
)
from bench.problem import Problem
from bench.workloads import Workload

_FA3_MODULES = ("flash_attn_interface", "flash_attn_3.flash_attn_interface", "fa3_fwd_interface")


class FlashAttention3:
    """flash_attn_varlen_func of FlashAttention-3."""

    ragged = True
    splits = 1  # the library's own default: keys are not split

    def __init__(self, options: Options) -> None:
        self._module = _fa3()
        self.version = package_version("flash-attn-3", "fa3-fwd")

    def refusal(self, workload: Workload) -> str | None:
        """None: what it was not built for it says itself."""
        return None

    def bind(self, problem: Problem) -> Call:
        """The public function. It takes no out: its own is a part of what it costs."""
        function = self._module.flash_attn_varlen_func
        max_q_len, max_kv_len = problem.max_q_len, problem.max_kv_len
        options = _fa3_mask(problem.workload) | {"softmax_scale": problem.scale, "num_splits": self.splits}

        def call() -> torch.Tensor:
            return _only_out(
                function(
                    problem.query,
                    problem.key,
                    problem.value,
                    problem.edges_q,
                    problem.edges_kv,
                    max_q_len,
                    max_kv_len,
                    **options,
                )
            )

        return call


class FlashAttention3Split(FlashAttention3):
    """The same, with FlashAttention-3's own choice of how many parts the keys are split into."""

    splits = 0


class FlashAttention3Fixed(FlashAttention3):
    """flash_attn_func of FlashAttention-3."""

    ragged = False

    def refusal(self, workload: Workload) -> str | None:
        """Equal lengths only."""
        return refuse_unequal(workload)

    def bind(self, problem: Problem) -> Call:
        """The public function over [batch, tokens, heads, dim]."""
        function = self._module.flash_attn_func
        inputs = [problem.batched(tensor) for tensor in (problem.query, problem.key, problem.value)]
        options = _fa3_mask(problem.workload) | {"softmax_scale": problem.scale}
        return lambda: _only_out(function(*inputs, **options))


class FlashAttention4:
    """FlashAttention-4's Hopper path: the installed package, or kernel files in its place."""

    ragged = True

    def __init__(self, options: Options) -> None:
        self._files = None if options.fa4_aot is None else _KernelFiles(options.fa4_aot)
        if self._files:
            self.version = self._files.version
            return
        self._module = require("flash_attn.cute", "install flash-attn-4, or give --fa4-aot DIR")
        self.version = package_version("flash-attn-4")

    def refusal(self, workload: Workload) -> str | None:
        """No FP8 on Hopper; and a kernel file must be there."""
        if workload.dtype == "e4m3":
            return "no FP8 on Hopper"
        return self._files.refusal(workload, fixed=not self.ragged) if self._files else None

    def bind(self, problem: Problem) -> Call:
        """The public function, or the function of a kernel file, which spares the package's Python."""
        if self._files:
            return self._files.bind(problem, fixed=not self.ragged)
        workload = problem.workload
        function = self._module.flash_attn_varlen_func
        options = _fa4_mask(workload) | {
            "softmax_scale": problem.scale,
            "cu_seqlens_q": problem.edges_q,
            "cu_seqlens_k": problem.edges_kv,
            "max_seqlen_q": problem.max_q_len,
            "max_seqlen_k": problem.max_kv_len,
        }
        return lambda: _only_out(function(problem.query, problem.key, problem.value, **options))


class FlashAttention4Fixed(FlashAttention4):
    """The same over [batch, tokens, heads, dim]."""

    ragged = False

    def refusal(self, workload: Workload) -> str | None:
        """Equal lengths only."""
        return refuse_unequal(workload) or super().refusal(workload)

    def bind(self, problem: Problem) -> Call:
        """The public function, or the function of a kernel file."""
        if self._files:
            return self._files.bind(problem, fixed=True)
        function = self._module.flash_attn_func
        inputs = [problem.batched(tensor) for tensor in (problem.query, problem.key, problem.value)]
        options = _fa4_mask(problem.workload) | {"softmax_scale": problem.scale}
        return lambda: _only_out(function(*inputs, **options))


class _KernelFiles:
    """A folder that scripts/compile_fa4_kernels.py made."""

    def __init__(self, folder: Path) -> None:
        self._ffi: Any = require("tvm_ffi", "install apache-tvm-ffi")
        self._folder = folder
        self._functions: dict[str, Any] = {}
        try:
            self.version = (folder / fa4_files.VERSIONS).read_text().strip() + ", ahead of time"
            fa4_files.load_runtime(folder)
        except (OSError, lzma.LZMAError) as error:
            raise PeerMissingError(
                f"{folder} is no folder of compiled kernels ({error}); make it with "
                "scripts/compile_fa4_kernels.py"
            ) from error

    def refusal(self, workload: Workload, fixed: bool) -> str | None:
        """The file that is missing."""
        name = fa4_files.kernel_file(workload, fixed)
        return None if (self._folder / name).exists() else f"{name} is not in {self._folder.name}"

    def bind(self, problem: Problem, fixed: bool) -> Call:
        """The compiled function, called with the arguments that the package would give it."""
        function = self._function(fa4_files.kernel_file(problem.workload, fixed))
        out = problem.new_out()
        tensors: tuple[torch.Tensor, ...] = (problem.query, problem.key, problem.value, out)
        edges = (problem.edges_q, problem.edges_kv)
        if fixed:
            tensors = tuple(map(problem.batched, tensors))
        arguments = fa4_files.call_arguments(problem.workload, tensors, (None, None) if fixed else edges)
        on_torch_stream = self._ffi.use_torch_stream

        def call() -> torch.Tensor:
            with on_torch_stream():
                function(*arguments)
            return out

        return call

    def _function(self, name: str) -> Any:
        if name not in self._functions:
            module = self._ffi.load_module(str(self._folder / name))
            self._functions[name] = module[fa4_files.FUNCTION]
        return self._functions[name]


def _fa3() -> ModuleType:
    """FlashAttention-3 under the first of its names that is there."""
    name = next((name for name in _FA3_MODULES if find_spec(name.partition(".")[0])), _FA3_MODULES[0])
    return require(name, f"install FlashAttention-3 as one of {', '.join(_FA3_MODULES)}")


def _fa3_mask(workload: Workload) -> dict[str, Any]:
    window = (-1, -1) if workload.window is None else (workload.window, 0)
    return {"causal": workload.mask == "causal", "window_size": window}


def _fa4_mask(workload: Workload) -> dict[str, Any]:
    window = (None, None) if workload.window is None else (workload.window, 0)
    return {"causal": workload.mask == "causal", "window_size": window}


def _only_out(result: Any) -> torch.Tensor:
    """Some releases return (out, lse)."""
    out = result[0] if isinstance(result, tuple) else result
    assert isinstance(out, torch.Tensor)
    return out
