"""Exponentials in half precision beside the plain kernel, in one process.

    python scripts/bench_fp16_softmax.py
    python scripts/bench_fp16_softmax.py --protocol burst --out /tmp/results

Writes fp16_softmax.json and fp16_softmax.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec
import torch
from bench.command import choose, date_and_command, save
from bench.machine import machine
from bench.peers.base import Options
from bench.peers.ours import Ours
from bench.problem import Check, make_problem
from bench.timing import Protocol
from bench.variants import Timing, compare
from bench.workloads import Workload

CASES = tuple(
    case
    for dims, heads in (((192, 128), 128), ((128, 128), 128), ((256, 256), 64))
    for case in (
        Workload(f"{dims[0]}-8k", (8192,), heads=heads, head_dims=dims),
        Workload(f"{dims[0]}-1k", (1024,) * 8, heads=heads, head_dims=dims),
        Workload(f"{dims[0]}-dense", (4096,), heads=heads, head_dims=dims, mask="dense"),
    )
)


class Line(msgspec.Struct, frozen=True):
    """One case under one protocol; errors against float32."""

    workload: Workload
    protocol: str
    plain: Timing
    fp16: Timing
    plain_error: float
    fp16_error: float


class Report(msgspec.Struct, frozen=True):
    """A run."""

    date: str
    command: str
    machine: dict[str, str]
    lines: tuple[Line, ...]


def run_case(workload: Workload, protocols: dict[str, Protocol]) -> list[Line]:
    """Both calls in turns."""
    problem = make_problem(workload, torch.device("cuda", 0))
    ours, check = Ours(Options()), Check(problem)
    plain, fp16 = ours.bind(problem), ours.bind(problem, use_fp16_softmax=True)
    errors = check.error(plain()), check.error(fp16())
    lines = []
    for name, protocol in protocols.items():
        timings = compare(plain, {"fp16": fp16}, protocol)
        lines.append(Line(workload, name, timings["plain"], timings["fp16"], *errors))
    return lines


def markdown(report: Report) -> str:
    """The table."""
    about = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    rows = [
        "| case | what | protocol | plain TFLOP/s | fp16 softmax TFLOP/s | speedup | plain error | error |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for line in report.lines:
        rates = [line.workload.flops / t.summary.median_us / 1e6 for t in (line.plain, line.fp16)]
        rows.append(
            f"| {line.workload.name} | {line.workload.describe()} | {line.protocol} | {rates[0]:.0f} "
            f"| {rates[1]:.0f} | {line.fp16.speedup:.3f} | {line.plain_error:.2e} | {line.fp16_error:.2e} |"
        )
    head = "# Exponentials in half precision beside the plain kernel"
    return "\n\n".join((head, f"{report.date}, {about}. `{report.command}`", "\n".join(rows))) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    chosen = choose(__doc__, CASES, arguments)
    if chosen is None:
        return 2
    lines: list[Line] = []
    for workload in chosen.cases:
        for line in run_case(workload, chosen.protocols):
            lines.append(line)
            print(
                f"{workload.name:10} {line.protocol:10} speedup {line.fp16.speedup:.3f} "
                f"error {line.fp16_error:.2e} plain {line.plain_error:.2e}",
                flush=True,
            )
        torch.cuda.empty_cache()
    report = Report(*date_and_command(), machine(), tuple(lines))
    save(report, markdown(report), chosen.out, "fp16_softmax")
    return 0


if __name__ == "__main__":
    sys.exit(main())
