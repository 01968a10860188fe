"""Times trtllm_sage_attention_quantize beside device copies that move as many bytes, in one process.

    python scripts/bench_sage_quantize.py                     all cases, both protocols
    python scripts/bench_sage_quantize.py --only '*64k*' --protocol burst --out /tmp/results

Bytes are those of query, key, value and the results, each once: a second reading of key or value, which
statistics need, is not counted. Of the copies the faster one counts. Writes sage_quantize.json and
sage_quantize.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import msgspec
import torch
from bench.command import choose, date_and_command, save
from bench.machine import machine
from bench.results import Summary
from bench.timing import Protocol, capture, copies, measure, summarise

from cubin_runtime import trtllm_sage_attention_quantize


class Case(msgspec.Struct, frozen=True):
    """A call; all sequences have the same length, and query as many tokens as key."""

    name: str
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    batch: int = 1
    q_block: int = 1
    k_block: int = 16
    dtype: str = "int8"
    smooth_k: bool = False

    def describe(self) -> str:
        """In words."""
        return (
            f"{self.batch} x {self.tokens // self.batch} tokens, {self.heads}/{self.kv_heads} heads of "
            f"{self.head_dim}, blocks ({self.q_block}, {self.k_block}), {self.dtype}"
            f"{', smooth_k' if self.smooth_k else ''}"
        )


CASES = (
    Case("4k", 4096, 32, 32),
    Case("16k-8h", 16384, 8, 8),
    Case("16k", 16384, 32, 32),
    Case("64k-8h", 65536, 8, 8),
    Case("64k", 65536, 32, 32),
    Case("64k-gqa", 65536, 32, 8),
    Case("64k-ragged", 65536, 32, 32, batch=64),
    Case("64k-e4m3", 65536, 32, 32, dtype="float8_e4m3fn"),
    Case("64k-16-16", 65536, 32, 32, q_block=16),
    Case("64k-4-4", 65536, 32, 32, q_block=4, k_block=4),
    Case("64k-1-1", 65536, 32, 32, k_block=1),
    Case("64k-h64", 65536, 32, 32, head_dim=64),
    Case("64k-h256", 65536, 16, 16, head_dim=256),
    Case("16k-8h-smooth", 16384, 8, 8, smooth_k=True),
    Case("16k-smooth", 16384, 32, 32, smooth_k=True),
    Case("64k-8h-smooth", 65536, 8, 8, smooth_k=True),
    Case("64k-smooth", 65536, 32, 32, smooth_k=True),
    Case("64k-1-1-smooth", 65536, 32, 32, k_block=1, smooth_k=True),
)


class Line(msgspec.Struct, frozen=True):
    """What one case took under one protocol. `share` is the copy's time over the call's."""

    case: Case
    protocol: str
    bytes: int
    call: Summary
    copy: Summary
    share: float


class Report(msgspec.Struct, frozen=True):
    """A run."""

    date: str
    command: str
    machine: dict[str, str]
    lines: tuple[Line, ...]


def time_case(case: Case, protocols: dict[str, Protocol]) -> list[Line]:
    """Call and copies in turns, under each protocol."""
    device = torch.device("cuda", 0)
    shape = (case.tokens, case.heads, case.head_dim)
    kv_shape = (case.tokens, case.kv_heads, case.head_dim)
    query = torch.randn(shape, dtype=torch.bfloat16, device=device)
    key, value = torch.randn(2, *kv_shape, dtype=torch.bfloat16, device=device)
    edges = torch.arange(case.batch + 1, dtype=torch.int32, device=device) * (case.tokens // case.batch)

    def quantize() -> tuple[torch.Tensor, ...]:
        return trtllm_sage_attention_quantize(
            query,
            key,
            value,
            q_block_size=case.q_block,
            k_block_size=case.k_block,
            qk_quant_dtype=getattr(torch, case.dtype),
            cum_seq_lens_q=edges,
            smooth_k=case.smooth_k,
        )

    size = sum(tensor.nbytes for tensor in (query, key, value, *quantize()))
    timed = {"call": capture(lambda: quantize()[0]), **copies(size // 2, device)}
    lines = []
    for name, protocol in protocols.items():
        rounds: dict[str, list[list[float]]] = {what: [] for what in timed}
        for _ in range(protocol.rounds):
            for what, graph in timed.items():
                rounds[what].append(measure(graph, protocol))
        call = summarise(rounds.pop("call"))
        copy = min(map(summarise, rounds.values()), key=lambda summary: summary.median_us)
        lines.append(Line(case, name, size, call, copy, copy.median_us / call.median_us))
    return lines


def markdown(report: Report) -> str:
    """The table."""
    head = "# Quantising for Sage attention, beside a device copy of as many bytes"
    about = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    note = "GB/s counts inputs and results once each; share is the time of the faster copy over the call's."
    rows = ["| case | what | protocol | us | GB/s | copy GB/s | share |", "|---|---|---|---:|---:|---:|---:|"]
    for line in report.lines:
        rate, copy_rate = (line.bytes / summary.median_us / 1e3 for summary in (line.call, line.copy))
        rows.append(
            f"| {line.case.name} | {line.case.describe()} | {line.protocol} | {line.call.median_us:.1f} "
            f"| {rate:.0f} | {copy_rate:.0f} | {line.share:.2f} |"
        )
    return "\n\n".join((head, f"{report.date}, {about}. `{report.command}`", note, "\n".join(rows))) + "\n"


def run(cases: Iterable[Case], protocols: dict[str, Protocol]) -> Report:
    """Times all cases and prints them on the way."""
    lines: list[Line] = []
    for case in cases:
        for line in time_case(case, protocols):
            lines.append(line)
            print(
                f"{case.name:16} {line.protocol:10} {line.call.median_us:8.1f} us  {line.share:.2f}",
                flush=True,
            )
        torch.cuda.empty_cache()
    return Report(*date_and_command(), machine(), tuple(lines))


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    chosen = choose(__doc__, CASES, arguments)
    if chosen is None:
        return 2
    report = run(chosen.cases, chosen.protocols)
    save(report, markdown(report), chosen.out, "sage_quantize")
    return 0


if __name__ == "__main__":
    sys.exit(main())
