"""What becomes of a workload: launched, timed and checked on a GPU, or a smaller one computed on the CPU."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator

import msgspec
import torch

from cubin_runtime.cli.check import Check, check_against_reference, check_against_torch
from cubin_runtime.cli.tensors import make_call, make_tensors
from cubin_runtime.cli.workload import Workload

TIMED_MS = 500.0  # of replays
WARM_UP_REPLAYS = 5
MIN_REPLAYS, MAX_REPLAYS = 10, 200


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of one call over `replays` replays of a CUDA graph."""

    median_ms: float
    fastest_ms: float
    slowest_ms: float
    replays: int


class Launched(msgspec.Struct, frozen=True, kw_only=True, tag="launched"):
    """What a GPU made of a workload. `tflops` counts visible pairs only."""

    timing: Timing
    flops: int
    tflops: float
    check: Check

    @property
    def passed(self) -> bool:
        """Whether the result is right."""
        return self.check.passed

    def lines(self) -> Iterator[tuple[str, str]]:
        """The outcome as text."""
        timing = self.timing
        yield (
            "time",
            f"{timing.median_ms:.3f} ms, the median of {timing.replays} CUDA graph replays "
            f"({timing.fastest_ms:.3f} to {timing.slowest_ms:.3f})",
        )
        yield "rate", f"{self.tflops:.1f} TFLOP/s: {self.flops:.3e} operations, 2 x (qk + v) per visible pair"
        yield "error", f"{self.check}{'' if self.passed else ': WRONG'}"


class Computed(msgspec.Struct, frozen=True, kw_only=True, tag="computed on the CPU"):
    """What the CPU made of a smaller workload. `check` is None where nothing in torch compares."""

    workload: Workload
    seconds: float
    check: Check | None

    @property
    def passed(self) -> bool:
        """Whether the result is right, as far as it was compared."""
        return self.check is None or self.check.passed

    def lines(self) -> Iterator[tuple[str, str]]:
        """The outcome as text."""
        request = self.workload.request
        yield "not run", "torch sees no GPU here, so nothing was launched (see `cubin-runtime doctor`)"
        yield "instead", "the reference computed a smaller batch on the CPU, in float32"
        yield "", self.workload.spell_lengths()
        yield "", f"heads {request.num_heads_q} over {request.num_heads_kv}, in {self.seconds:.1f} s"
        if self.check is None:
            yield "error", "not compared: torch has no attention like it"
        else:
            yield "error", f"{self.check}{'' if self.passed else ': WRONG'}"


def can_launch() -> bool:
    """Whether torch can put tensors on a GPU of this machine."""
    return torch.cuda.is_available()


def launch(workload: Workload, ordinal: int) -> Launched:
    """Launches, times and checks a workload on a GPU."""
    device = torch.device("cuda", ordinal)
    tensors = make_tensors(workload, device)
    timing = time_call(make_call(workload, tensors, workload.request.backend), device)
    return Launched(
        timing=timing,
        flops=workload.flops(),
        tflops=workload.flops() / timing.median_ms / 1e9,
        check=check_against_reference(workload, tensors),
    )


def compute_on_cpu(workload: Workload) -> Computed:
    """Computes a smaller workload by the reference, and compares it with torch's own attention."""
    small = workload.shrunk()
    tensors = make_tensors(small, torch.device("cpu"))
    begin = time.perf_counter()
    make_call(small, tensors, "reference")()
    seconds = time.perf_counter() - begin
    return Computed(workload=small, seconds=seconds, check=check_against_torch(small, tensors))


def time_call(call: Callable[[], object], device: torch.device) -> Timing:
    """Replays the call as a CUDA graph, after a warm-up, on tensors that stay the same."""
    with torch.cuda.device(device):
        call()  # loads the kernel
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        warm_up = _replay(graph, WARM_UP_REPLAYS)
        wanted = round(TIMED_MS / max(min(warm_up), 1e-3))
        samples = _replay(graph, max(MIN_REPLAYS, min(MAX_REPLAYS, wanted)))
    return Timing(
        median_ms=statistics.median(samples),
        fastest_ms=min(samples),
        slowest_ms=max(samples),
        replays=len(samples),
    )


def _replay(graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
    """Milliseconds from each replay's begin to the next one's."""
    event = functools.partial(torch.cuda.Event, enable_timing=True)
    marks = [event() for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in itertools.pairwise(marks)]
