"""Times variants of the same call beside each other."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from bench.peers.base import Call
from bench.results import Summary
from bench.timing import Protocol, capture, measure, summarise


class Timing(msgspec.Struct, frozen=True):
    """What a variant took, and how many times faster it is than the plain call."""

    summary: Summary
    speedup: float


def compare(plain: Call, variants: Mapping[str, Call], protocol: Protocol) -> dict[str, Timing]:
    """Plain call and variants in turns, round by round; the plain one is "plain" in the result."""
    timed = {name: capture(call) for name, call in {"plain": plain, **variants}.items()}
    rounds: dict[str, list[list[float]]] = {name: [] for name in timed}
    for _ in range(protocol.rounds):
        for name, graph in timed.items():
            rounds[name].append(measure(graph, protocol))
    summaries = {name: summarise(samples) for name, samples in rounds.items()}
    base = summaries["plain"].median_us
    return {name: Timing(summary, base / summary.median_us) for name, summary in summaries.items()}
