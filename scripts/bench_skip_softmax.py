"""skip-softmax over the factor: tiles left out, error against float32, and speed beside the plain kernel.

    python scripts/bench_skip_softmax.py                     all cases, both protocols
    python scripts/bench_skip_softmax.py --only bf16-128 --protocol burst --out /tmp/results

Logits fall with the distance between query and key at several rates, rise at a few heavy keys, and have noise
of standard deviation 1 everywhere. Factors: a sweep, and those that leave out a quarter, a half and three
quarters of the tiles, found by bisection. Everything of a case runs in one process, plain and skipping calls
in turns. Writes skip_softmax.json, skip_softmax.md and skip_softmax.png.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from bench.command import choose, date_and_command, save
from bench.machine import machine
from bench.peers.base import Options
from bench.peers.ours import Ours
from bench.problem import DTYPES, Check, Problem, make_problem
from bench.results import Summary
from bench.timing import Protocol
from bench.variants import compare
from bench.workloads import Workload

TOKENS = 32768
NOTHING = 1e-30  # a factor that leaves nothing out
SWEEP = tuple(10.0**exponent for exponent in (-4, -3, -2, -1, 0, 1, 2, 3, 4))
RATES = (0.25, 0.5, 0.75)
_BISECTIONS = 12
_RATE_TOLERANCE = 0.005

CASES = (
    Workload("bf16-192", (TOKENS,), heads=16),
    Workload("bf16-128", (TOKENS,), heads=16, head_dims=(128, 128)),
    Workload("bf16-256", (TOKENS,), heads=16, head_dims=(256, 256)),
    Workload("bf16-128-gqa", (TOKENS,), heads=32, kv_heads=8, head_dims=(128, 128)),
    Workload("fp16-128", (TOKENS,), heads=16, head_dims=(128, 128), dtype="fp16"),
    Workload("e4m3-192", (TOKENS,), heads=16, dtype="e4m3"),
    Workload("e4m3-128", (TOKENS,), heads=16, head_dims=(128, 128), dtype="e4m3"),
    Workload("bf16-128-dense", (TOKENS // 2,), heads=16, head_dims=(128, 128), mask="dense"),
)

# A few features of query and key turn with the token, so that their products are cosines of the distance.
_AMPLITUDES = (7.0, 4.0, 2.0, 1.0)  # of logits
_RADIANS = (2.5 / 32768, 2.5 / 8192, 2.5 / 2048, 2.5 / 512)  # per token
_HEAVY_EVERY = 1021  # tokens
_HEAVY = 5.0  # of logits


class Point(msgspec.Struct, frozen=True):
    """One factor: which share of the tiles is left out, and the error of out against float32."""

    factor: float
    left_out: float
    error: float


class Speed(msgspec.Struct, frozen=True):
    """One factor under one protocol."""

    protocol: str
    point: Point
    summary: Summary
    speedup: float


class Case(msgspec.Struct, frozen=True):
    """All about one workload. `bound` is the speedup were every tile's Q K all that is left of it."""

    workload: Workload
    plain_error: float
    plain: dict[str, Summary]
    sweep: tuple[Point, ...]
    speeds: tuple[Speed, ...]

    def bound(self, left_out: float) -> float:
        """Speedup that the remaining products allow."""
        dim_qk, dim_v = self.workload.head_dims
        return (dim_qk + dim_v) / (dim_qk + (1 - left_out) * dim_v)


class Report(msgspec.Struct, frozen=True):
    """A run."""

    date: str
    command: str
    machine: dict[str, str]
    cases: tuple[Case, ...]


def sparse_problem(workload: Workload, device: torch.device) -> Problem:
    """Normal inputs whose logits have the structure that the module describes."""
    problem = make_problem(workload, device)
    dtype = DTYPES[workload.dtype]
    query, key = (tensor.to(torch.float32) for tensor in (problem.query, problem.key))
    root = math.sqrt(workload.head_dims[0])  # products are divided by it
    for number, (amplitude, radians) in enumerate(zip(_AMPLITUDES, _RADIANS, strict=True)):
        for tensor in (query, key):
            angle = torch.arange(tensor.shape[0], device=device)[:, None] * radians
            tensor[..., 2 * number] = math.sqrt(amplitude * root) * angle.cos()
            tensor[..., 2 * number + 1] = math.sqrt(amplitude * root) * angle.sin()
    heavy = 2 * len(_AMPLITUDES)
    side = math.sqrt(_HEAVY * root)
    query[..., heavy] = side
    key[..., heavy] = 0.0
    key[::_HEAVY_EVERY, :, heavy] = side
    return replace(problem, query=query.to(dtype), key=key.to(dtype))


class Skipping:
    """The call on one problem with any factor."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._ours = Ours(Options())
        self._check = Check(problem)
        self.plain = self._ours.bind(problem)
        self.plain_error = self._check.error(self.plain())

    def bind(self, factor: float, **options: Any) -> Any:
        """The call with this factor."""
        return self._ours.bind(self._problem, skip_softmax_threshold_scale_factor=factor, **options)

    def measure(self, factor: float) -> Point:
        """Share and error."""
        counts = torch.zeros(2, dtype=torch.int64, device=self._problem.query.device)
        out = self.bind(factor, skip_softmax_counts=counts)()
        left_out, tiles = counts.tolist()
        return Point(factor, left_out / tiles, self._check.error(out))

    def find(self, rate: float) -> Point:
        """The point that leaves out as good as this share, by bisection over the factor's logarithm."""
        low, high = math.log(NOTHING), math.log(10.0 * self._problem.max_kv_len)
        point = self.measure(math.exp(high))
        for _ in range(_BISECTIONS):
            if abs(point.left_out - rate) < _RATE_TOLERANCE:
                break
            middle = (low + high) / 2
            point = self.measure(math.exp(middle))
            low, high = (low, middle) if point.left_out > rate else (middle, high)
        return point


def run_case(workload: Workload, protocols: dict[str, Protocol]) -> Case:
    """Sweep, then the speeds."""
    skipping = Skipping(sparse_problem(workload, torch.device("cuda", 0)))
    sweep = tuple(skipping.measure(factor) for factor in SWEEP)
    points = [skipping.measure(NOTHING), *map(skipping.find, RATES)]
    calls = {str(number): skipping.bind(point.factor) for number, point in enumerate(points)}
    plain: dict[str, Summary] = {}
    speeds = []
    for name, protocol in protocols.items():
        timings = compare(skipping.plain, calls, protocol)
        plain[name] = timings["plain"].summary
        speeds += [
            Speed(name, point, timings[str(number)].summary, timings[str(number)].speedup)
            for number, point in enumerate(points)
        ]
    return Case(workload, skipping.plain_error, plain, sweep, tuple(speeds))


def markdown(report: Report) -> str:
    """Both tables."""
    about = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    speeds = [
        "| case | what | protocol | plain us | factor | left out | us | speedup | bound | error |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    sweep = ["| case | factor | left out | error | plain error |", "|---|---:|---:|---:|---:|"]
    for case in report.cases:
        name, what = case.workload.name, case.workload.describe()
        for speed in case.speeds:
            point = speed.point
            speeds.append(
                f"| {name} | {what} | {speed.protocol} | {case.plain[speed.protocol].median_us:.0f} "
                f"| {point.factor:.3g} | {point.left_out:.1%} | {speed.summary.median_us:.0f} "
                f"| {speed.speedup:.3f} | {case.bound(point.left_out):.2f} | {point.error:.2e} |"
            )
        sweep += [
            f"| {name} | {p.factor:.3g} | {p.left_out:.1%} | {p.error:.2e} | {case.plain_error:.2e} |"
            for p in case.sweep
        ]
    parts = (
        "# skip-softmax beside the plain kernel",
        f"{report.date}, {about}. `{report.command}`",
        "A tile is 64 query rows by one block of keys. The bound is what the remaining products allow. "
        "Errors are relative, of sampled rows, against float32.",
        "\n".join(speeds),
        "## Over the factor",
        "\n".join(sweep),
    )
    return "\n\n".join(parts) + "\n"


def plot(report: Report, path: Path) -> None:
    """Share and error over the factor, and speed over the share."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    shares, errors, speeds = figure.subplots(1, 3)
    for case in report.cases:
        factors = [point.factor for point in case.sweep]
        shares.semilogx(
            factors, [point.left_out for point in case.sweep], marker="o", label=case.workload.name
        )
        errors.loglog(factors, [point.error for point in case.sweep], marker="o", label=case.workload.name)
        first = case.speeds[0].protocol
        drawn = [speed for speed in case.speeds if speed.protocol == first]
        left_out = [speed.point.left_out for speed in drawn]
        (line,) = speeds.plot(left_out, [s.speedup for s in drawn], marker="o", label=case.workload.name)
        speeds.plot(left_out, list(map(case.bound, left_out)), linestyle=":", color=line.get_color())
    for axes, across, down in (
        (shares, "factor", "share of tiles left out"),
        (errors, "factor", "relative error against float32"),
        (speeds, "share of tiles left out", "speed / plain kernel (dotted: bound)"),
    ):
        axes.set_xlabel(across)
        axes.set_ylabel(down)
        axes.grid(alpha=0.3)
    shares.legend(fontsize=8)
    figure.suptitle(f"skip-softmax, {report.machine.get('GPU', '')}, {report.date[:10]}")
    figure.savefig(path, dpi=130)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    chosen = choose(__doc__, CASES, arguments)
    if chosen is None:
        return 2
    cases = []
    for workload in chosen.cases:
        cases.append(run_case(workload, chosen.protocols))
        for speed in cases[-1].speeds:
            point = speed.point
            print(
                f"{workload.name:15} {speed.protocol:10} factor {point.factor:9.3g} "
                f"left out {point.left_out:6.1%} error {point.error:.2e} "
                f"speedup {speed.speedup:.3f} of {cases[-1].bound(point.left_out):.2f}",
                flush=True,
            )
        torch.cuda.empty_cache()
    report = Report(*date_and_command(), machine(), tuple(cases))
    save(report, markdown(report), chosen.out, "skip_softmax")
    plot(report, chosen.out / "skip_softmax.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
