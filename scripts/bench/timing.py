"""CUDA-graph timing under two protocols, because the power limit decides what a number means.

A GPU that was idle runs matrix products at a higher clock than one that is hot. `burst` measures the
first: idle, a short warm-up, a short window. `sustained` measures the second. Numbers of different
protocols, processes or machines must not be compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from bench.results import Summary

# A graph holds as many calls as take this long, so that the gap between two replays does not count.
_GRAPH_MS = 0.8
_MAX_CALLS = 256
_MIN_REPLAYS = 3


class Protocol(NamedTuple):
    """Idle time, warm-up and window of one measurement, and how often everything is measured."""

    idle_ms: float
    warm_up_ms: float
    window_ms: float
    rounds: int


PROTOCOLS = {
    "burst": Protocol(idle_ms=200, warm_up_ms=3, window_ms=12, rounds=2),
    "sustained": Protocol(idle_ms=0, warm_up_ms=110, window_ms=250, rounds=1),
}


class Timed(NamedTuple):
    """A graph ready to replay."""

    replay: Callable[[], object]
    calls: int
    estimate_ms: float  # of one replay
    result: torch.Tensor  # where each replay puts it
    call: Callable[[], object]  # keeps alive what the graph reads: a graph holds addresses, not tensors


def capture(call: Callable[[], torch.Tensor]) -> Timed:
    """Puts repeated calls into a CUDA graph. The call must have run before (kernels are loaded)."""
    torch.cuda.synchronize()
    timed = _capture(call, _calls_for(min(_elapsed_ms(call, 3))))
    one_ms = timed.estimate_ms / timed.calls
    if _calls_for(one_ms) > 2 * timed.calls:  # launching one by one was slower than the kernel itself
        timed = _capture(call, _calls_for(one_ms))
    return timed


def copies(size: int, device: torch.device) -> dict[str, Timed]:
    """Copies of `size` bytes on the device, of which the faster one counts.

    The driver's copy is not captured: as a node of a graph it takes 1.5 times as long from about 1 GB on.
    """
    source = torch.randn(-(-size // 2), dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)

    def copy() -> torch.Tensor:
        return target.copy_(source)

    copy()
    driver = Timed(copy, 1, min(_elapsed_ms(copy, 3)), target, copy)
    torch.add(source, 0, out=target)
    return {"driver's copy": driver, "copying kernel": capture(lambda: torch.add(source, 0, out=target))}


def _calls_for(one_ms: float) -> int:
    return max(1, min(_MAX_CALLS, round(_GRAPH_MS / max(one_ms, 1e-3))))


def _capture(call: Callable[[], torch.Tensor], calls: int) -> Timed:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            result = call()
    graph.replay()
    torch.cuda.synchronize()
    return Timed(graph.replay, calls, min(_elapsed_ms(graph.replay, 3)), result, call)


def measure(timed: Timed, protocol: Protocol) -> list[float]:
    """Microseconds of one call, of each replay in the window."""
    torch.cuda.synchronize()
    time.sleep(protocol.idle_ms / 1e3)
    for _ in range(_replays(protocol.warm_up_ms, timed.estimate_ms, least=1)):
        timed.replay()
    count = _replays(protocol.window_ms, timed.estimate_ms, least=_MIN_REPLAYS)
    return [1e3 * elapsed / timed.calls for elapsed in _elapsed_ms(timed.replay, count)]


def summarise(rounds: Sequence[Sequence[float]]) -> Summary:
    """Median of the rounds' medians: one disturbed round moves nothing."""
    medians = tuple(statistics.median(samples) for samples in rounds)
    median = statistics.median(medians)
    return Summary(median, min(map(min, rounds)), medians, (max(medians) - min(medians)) / median)


def host_us(call: Callable[[], object], batches: int = 10, calls: int = 20) -> float:
    """Median host time of one call. Few calls at a time: a full launch queue would block the host."""
    samples = []
    for _ in range(batches):
        torch.cuda.synchronize()
        for _ in range(calls):
            begin = time.perf_counter_ns()
            call()
            samples.append((time.perf_counter_ns() - begin) / 1e3)
    torch.cuda.synchronize()
    return statistics.median(samples)


def _replays(wanted_ms: float, one_ms: float, least: int) -> int:
    return max(least, round(wanted_ms / one_ms))


def _elapsed_ms(run: Callable[[], object], count: int) -> list[float]:
    event: Callable[..., torch.cuda.Event] = torch.cuda.Event  # untyped in torch
    marks = [event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in pairwise(marks)]
