"""A run as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.peers import OURS
from bench.results import Report, View, geometric_mean, views

_NOTHING = "-"


def markdown(report: Report) -> str:
    """Tables of every protocol, and everything that was not timed with its reason."""
    parts = [_heading(report)]
    parts += [_timings(report, protocol) for protocol in report.protocols]
    parts += [_host(report), _left_out(report)]
    return "\n\n".join(filter(None, parts)) + "\n"


def plot_name(report: Report, protocol: str) -> str:
    """The file beside the Markdown that it shows."""
    return f"{report.name}_{protocol}.png"


def progress(view: View) -> str:
    """A line in a few words: who takes how long."""
    shown = [f"{view.protocol} {view.line.workload.name}:"]
    for entry in view.line.entries:
        us = view.us(entry.peer)
        shown.append(f"{entry.peer} {_us(us)}" if us else f"{entry.peer} {entry.status}")
    ratio = view.ratio(OURS)
    return ", ".join(shown).replace(":,", ":") + (f"; ratio {ratio:.3f}" if ratio else "")


def _heading(report: Report) -> str:
    machine = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    lines = [
        f"# Attention forward, {report.name}",
        f"`{report.name}.json` has all of it. {report.date}, {machine}."
        + ("" if report.complete else " **Interrupted: lines are missing.**"),
        f"`{report.command}`",
        "Medians of CUDA-graph replays, all implementations interleaved in one process on the same tensors, "
        "each checked against float32 first. TFLOP/s count the visible pairs only. Burst: 0.2 s idle, 3 ms "
        "warm-up, 12 ms window. Sustained: 110 ms warm-up, 250 ms window. Compare columns of one table only.",
    ]
    return "\n\n".join(lines)


def _timings(report: Report, protocol: str) -> str:
    seen = list(views(report, protocol))
    ragged = _names(seen, ragged=True)
    header = ["workload", "shape", "us", "TFLOP/s", "of matmul", "GB/s (of copy)"]
    header += [*ragged, "best fixed-length", "ours / best ragged"]
    rows = [_row(view, ragged) for view in seen]
    ratios = [ratio for view in seen if (ratio := view.ratio(OURS))]
    mean = geometric_mean(ratios)
    matmul = sorted(view.matmul_tflops for view in seen)
    about = [
        f"## {protocol.capitalize()}",
        f"![Speed in this protocol]({plot_name(report, protocol)})",
        f"Matrix product (bf16, 8192 cubed): {matmul[0]:.0f} to {matmul[-1]:.0f} TFLOP/s, timed beside each "
        f"line. Device copy: {report.copy_gbps[protocol]:.0f} GB/s, read and written. The columns from us to "
        "GB/s are ours, GB/s only where memory is the bound; peers: TFLOP/s. Fixed-length entries "
        "take no ragged batches.",
        _table(header, rows),
    ]
    if mean:
        about.append(
            f"Geometric mean of ours / best ragged over {len(ratios)} workloads: **{mean:.3f}** "
            f"(lowest {min(ratios):.3f}, highest {max(ratios):.3f})."
        )
    return "\n\n".join(about)


def _row(view: View, ragged: Sequence[str]) -> list[str]:
    workload, us = view.line.workload, view.us(OURS)
    row = [workload.name, workload.describe()]
    if us:
        rate = view.tflops(us)
        traffic = view.gbps(us)
        memory = f"{traffic:.0f} ({traffic / view.copy_gbps:.2f})" if view.memory_bound else _NOTHING
        row += [_us(us), _rate(rate), f"{rate / view.matmul_tflops:.3f}", memory]
    else:
        row += [_NOTHING] * 4
    row += [_rate(view.tflops(time)) if (time := view.us(peer)) else _NOTHING for peer in ragged]
    fixed, ratio = view.best(ragged=False, apart_from=OURS), view.ratio(OURS)
    best = f"{_rate(view.tflops(fixed.timings[view.protocol].median_us))} {fixed.peer}" if fixed else _NOTHING
    return [*row, best, f"{ratio:.3f}" if ratio else _NOTHING]


def _host(report: Report) -> str:
    rows = []
    peers = list(
        dict.fromkeys(
            entry.peer for line in report.lines for entry in line.entries if entry.host_us is not None
        )
    )
    for line in report.lines:
        costs = {entry.peer: entry.host_us for entry in line.entries}
        if any(cost is not None for cost in costs.values()):
            cells = [costs.get(peer) for peer in peers]
            shown = [_NOTHING if cost is None else f"{cost:.1f}" for cost in cells]
            rows.append([line.workload.name, *shown])
    if not rows:
        return ""
    return "\n\n".join(
        (
            "## Host time of a warm call",
            "Microseconds until the call returns. Kernel files (fa4 ahead of time) and plans (cudnn, "
            "flashinfer) are called directly, without what their packages do before.",
            _table(["workload", *peers], rows),
        )
    )


def _left_out(report: Report) -> str:
    taking_part = [f"- {peer}: {version}" for peer, version in report.peers.items()]
    missing = [f"- {peer}: missing. {reason}" for peer, reason in report.missing.items()]
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for line in report.lines:
        for entry in line.entries:
            if entry.status != "ok":
                key = (entry.peer, entry.status, entry.note)
                reasons.setdefault(key, []).append(line.workload.name)
    untimed = [
        f"- {peer}: {status} ({note}): {', '.join(names)}" for (peer, status, note), names in reasons.items()
    ]
    parts = ["## Who took part", "\n".join(taking_part + missing)]
    if untimed:
        parts += ["Not timed:", "\n".join(untimed)]
    return "\n\n".join(parts)


def _names(seen: Iterable[View], ragged: bool) -> list[str]:
    """Peers that were timed anywhere."""
    names = dict.fromkeys(
        entry.peer
        for view in seen
        for entry in view.line.entries
        if entry.ragged is ragged and entry.peer != OURS and view.us(entry.peer)
    )
    return list(names)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    numeric = ["---" if name in ("workload", "shape") else "---:" for name in header]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, numeric, *rows))


def _us(us: float) -> str:
    return f"{us:.2f}" if us < 100 else f"{us:.0f}"


def _rate(tflops: float) -> str:
    return f"{tflops:.0f}" if tflops >= 100 else f"{tflops:.3g}"
