"""Checks and times implementations on workloads, interleaved, in one process."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from bench.peers import OURS, Peer
from bench.problem import TOLERANCE, Check, Problem, make_problem
from bench.results import Entry, Line, Summary
from bench.timing import Protocol, Timed, capture, copies, host_us, measure, summarise
from bench.workloads import Workload

_MATMUL = "matrix product"
_COPY_BYTES = 1 << 30


class DeviceLostError(RuntimeError):
    """An implementation broke the CUDA context; nothing can be timed in this process any more."""


class _Bound(NamedTuple):
    """A call on one problem, captured, and its error against float32."""

    call: Callable[[], torch.Tensor]
    timed: Timed
    error: float


class Bench:
    """Times peers under protocols on one device."""

    def __init__(
        self, peers: Mapping[str, Peer], protocols: Mapping[str, Protocol], device: torch.device
    ) -> None:
        self._peers = peers
        self._protocols = protocols
        self._device = device
        self._random = random.Random(0)
        self._matmul = _matmul(device)

    def copy_gbps(self) -> dict[str, float]:
        """Rate of the fastest device copy by protocol, bytes read and written."""
        timings = self._time(copies(_COPY_BYTES, self._device)).values()
        fastest = {name: min(timing[name].median_us for timing in timings) for name in self._protocols}
        return {name: 2 * _COPY_BYTES / us / 1e3 for name, us in fastest.items()}

    def line(self, workload: Workload, host: bool) -> Line:
        """One workload. Without a kernel of ours nothing is timed: there is nothing to compare."""
        refusals = {name: _refusal(name, peer, workload) for name, peer in self._peers.items()}
        if refusals.get(OURS):
            return Line(workload, (Entry(OURS, True, "refused", refusals[OURS] or ""),))
        problem = make_problem(workload, self._device)
        check = Check(problem)
        entries: dict[str, Entry] = {}
        bound: dict[str, _Bound] = {}
        for name, peer in self._peers.items():
            if refusal := refusals[name]:
                entries[name] = Entry(name, peer.ragged, "refused", refusal)
                continue
            try:
                candidate = _bind(peer, problem, check)
            except Exception as error:  # whatever a library raises, the others go on
                _require_device(name, workload)
                entries[name] = Entry(name, peer.ragged, "failed", _first_line(error))
                continue
            if not candidate.error <= TOLERANCE[workload.dtype]:  # NaN fails too
                note = f"error {candidate.error:.2g}, allowed {TOLERANCE[workload.dtype]:.2g}"
                entries[name] = Entry(name, peer.ragged, "wrong", note, candidate.error)
                continue
            bound[name] = candidate
        timings = self._time({name: candidate.timed for name, candidate in bound.items()} | self._matmul)
        for name, candidate in bound.items():
            ragged = self._peers[name].ragged
            cost = host_us(candidate.call) if host else None
            entries[name] = Entry(name, ragged, "ok", "", candidate.error, cost, timings[name])
        ordered = tuple(entries[name] for name in self._peers)
        return Line(workload, ordered, timings[_MATMUL])

    def lines(self, workloads: Iterable[Workload], host: bool = False) -> Iterator[Line]:
        """Each workload as soon as it is timed; its tensors are given back before the next."""
        for workload in workloads:
            yield self.line(workload, host)
            gc.collect()
            torch.cuda.empty_cache()

    def _time(self, candidates: Mapping[str, Timed]) -> dict[str, dict[str, Summary]]:
        """All candidates in random order, a new one each round; by candidate and protocol."""
        found: dict[str, dict[str, Summary]] = {name: {} for name in candidates}
        for protocol, settings in self._protocols.items():
            samples: dict[str, list[list[float]]] = {name: [] for name in candidates}
            for _ in range(settings.rounds):
                for name in self._random.sample(list(candidates), len(candidates)):
                    samples[name].append(measure(candidates[name], settings))
            for name, rounds in samples.items():
                found[name][protocol] = summarise(rounds)
        return found


def _refusal(name: str, peer: Peer, workload: Workload) -> str | None:
    if workload.sage and name != OURS:
        return "has no scales by blocks"
    if workload.spcompress and name != OURS:
        return "does not prune"
    return peer.refusal(workload)


def _bind(peer: Peer, problem: Problem, check: Check) -> _Bound:
    """Captures a peer's call and judges what a replay writes over NaN."""
    call = peer.bind(problem)
    call()
    timed = capture(call)
    timed.result.fill_(float("nan"))
    timed.replay()
    return _Bound(call, timed, check.error(timed.result))


def _matmul(device: torch.device) -> dict[str, Timed]:
    left, right = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(left)
    torch.mm(left, right, out=out)
    return {_MATMUL: capture(lambda: torch.mm(left, right, out=out))}


def _require_device(peer: str, workload: Workload) -> None:
    try:
        torch.cuda.synchronize()
    except Exception as error:
        raise DeviceLostError(
            f"{peer} broke the CUDA context on {workload.name} ({_first_line(error)}); run again without it: "
            "--peers"
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
