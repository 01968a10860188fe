"""What a run found out, as a value: written to JSON, read back, compared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from bench.workloads import Workload

Status = Literal["ok", "refused", "failed", "wrong"]


class Summary(msgspec.Struct, frozen=True):
    """Microseconds of one call over all rounds."""

    median_us: float
    fastest_us: float
    round_medians_us: tuple[float, ...]
    spread: float  # (slowest - fastest) / median of the rounds' medians


class Entry(msgspec.Struct, frozen=True):
    """One implementation on one workload.

    ragged   takes sequences of different lengths
    note     why it was not timed
    error    against float32, see problem.Check
    host_us  Python time of a warm call
    timings  by protocol
    """

    peer: str
    ragged: bool
    status: Status
    note: str = ""
    error: float | None = None
    host_us: float | None = None
    timings: dict[str, Summary] = {}


class Line(msgspec.Struct, frozen=True):
    """All implementations on one workload, and the 8192-cubed matrix product between them."""

    workload: Workload
    entries: tuple[Entry, ...]
    matmul: dict[str, Summary] = {}

    def entry(self, peer: str) -> Entry | None:
        """What `peer` did here."""
        return next((entry for entry in self.entries if entry.peer == peer), None)


class Report(msgspec.Struct, frozen=True):
    """A run. `machine` has GPU, driver and software; `missing` says why a peer took no part."""

    name: str
    date: str
    command: str
    seconds: float
    complete: bool
    machine: dict[str, str]
    peers: dict[str, str]
    missing: dict[str, str]
    copy_gbps: dict[str, float]
    lines: tuple[Line, ...]

    @property
    def protocols(self) -> tuple[str, ...]:
        """Those that anything was timed under."""
        return tuple(dict.fromkeys(protocol for line in self.lines for protocol in line.matmul))

    def save(self, path: Path) -> None:
        """JSON, in place of an earlier one at once."""
        partial = path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> Report:
        """What `save` wrote."""
        return msgspec.json.decode(path.read_bytes(), type=cls)


MATMUL_FLOPS = 2 * 8192**3


class View(NamedTuple):
    """A line as one protocol saw it."""

    line: Line
    protocol: str
    copy_gbps: float

    @property
    def matmul_tflops(self) -> float:
        """Rate of the matrix product."""
        return MATMUL_FLOPS / self.line.matmul[self.protocol].median_us / 1e6

    @property
    def memory_bound(self) -> bool:
        """Copying the operands takes longer than the products."""
        return self._copy_us > self._matmul_us

    @property
    def floor_us(self) -> float:
        """What no kernel can beat at the rates of the matrix product and the copy of the same run."""
        return max(self._copy_us, self._matmul_us)

    def us(self, peer: str) -> float | None:
        """Microseconds of a call; None where it was not timed."""
        entry = self.line.entry(peer)
        return entry.timings[self.protocol].median_us if entry and self.protocol in entry.timings else None

    def tflops(self, us: float) -> float:
        """Rate of a call that takes `us`."""
        return self.line.workload.flops / us / 1e6

    def gbps(self, us: float) -> float:
        """Unavoidable memory traffic over the time of a call."""
        return self.line.workload.bytes / us / 1e3

    def best(self, ragged: bool, apart_from: str) -> Entry | None:
        """The fastest right one that takes, or does not take, ragged batches."""
        timed = [
            entry
            for entry in self.line.entries
            if entry.ragged is ragged and entry.peer != apart_from and self.protocol in entry.timings
        ]
        return min(timed, key=lambda entry: entry.timings[self.protocol].median_us, default=None)

    def ratio(self, peer: str, ragged: bool = True) -> float | None:
        """Speed of `peer` over that of the best other one; above 1 = faster."""
        own, best = self.us(peer), self.best(ragged, apart_from=peer)
        return best.timings[self.protocol].median_us / own if own and best else None

    @property
    def _copy_us(self) -> float:
        return self.line.workload.bytes / self.copy_gbps / 1e3

    @property
    def _matmul_us(self) -> float:
        return self.line.workload.flops / self.matmul_tflops / 1e6


def views(report: Report, protocol: str) -> Iterator[View]:
    """The lines that were timed under a protocol."""
    for line in report.lines:
        if protocol in line.matmul:
            yield View(line, protocol, report.copy_gbps[protocol])


def geometric_mean(values: Iterable[float]) -> float | None:
    """None of nothing."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else None
