"""A run as a picture: how near to the hardware's bounds, and how it compares with the best peer."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.peers import OURS, PEERS
from bench.results import Report, View, geometric_mean, views

# Okabe and Ito's colours, told apart with every common colour vision; markers differ as well.
_COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7")
_MARKERS = ("D", "o", "s", "^", "v", "P", "X", "<", ">", "p", "h")
_FASTER, _SLOWER = "#0072B2", "#D55E00"


def plot(report: Report, protocol: str, path: Path) -> None:
    """PNG of one protocol: every implementation as a share of the bound, and ours over the best ragged."""
    seen = list(views(report, protocol))
    figure = Figure(figsize=(13, 2.4 + 0.36 * len(seen)), layout="constrained")
    shares, ratios = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    _draw_shares(shares, seen)
    _draw_ratios(ratios, seen)
    shares.set_yticks(range(len(seen)), [view.line.workload.name for view in seen])
    shares.invert_yaxis()
    if shares.collections:  # something passed its check
        figure.legend(loc="outside lower center", fontsize=8, ncols=6, title="hollow: fixed length only")
    gpu = report.machine.get("GPU", "")
    figure.suptitle(f"Attention forward, {report.name}, {protocol}, {gpu}, {report.date[:10]}")
    figure.savefig(path, dpi=130)


def _draw_shares(axes: Axes, seen: list[View]) -> None:
    axes.set_xlabel("share of the bound: matrix product or copy, measured in the same run")
    axes.grid(alpha=0.3)
    for number, peer in enumerate(PEERS):
        points = [(view.floor_us / us, row) for row, view in enumerate(seen) if (us := view.us(peer))]
        if not points:
            continue
        across, down = zip(*points, strict=True)
        ours = peer == OURS
        entries = (view.line.entry(peer) for view in seen)
        ragged = next(entry.ragged for entry in entries if entry)
        axes.scatter(
            across,
            down,
            label=peer,
            marker=_MARKERS[number],
            color=_COLOURS[number % len(_COLOURS)],
            facecolors=None if ragged else "none",
            s=60 if ours else 36,
            zorder=3 if ours else 2,
        )
    axes.set_xlim(left=0)


def _draw_ratios(axes: Axes, seen: list[View]) -> None:
    known = [(row, ratio) for row, view in enumerate(seen) if (ratio := view.ratio(OURS))]
    for row, ratio in known:
        axes.barh(row, ratio - 1, left=1, height=0.6, color=_FASTER if ratio >= 1 else _SLOWER)
        axes.annotate(
            f"{ratio:.2f}",
            (ratio, row),
            xytext=(4 if ratio >= 1 else -4, 0),
            textcoords="offset points",
            ha="left" if ratio >= 1 else "right",
            va="center",
            fontsize=8,
        )
    axes.axvline(1, color="black", linewidth=1)
    axes.margins(x=0.15)
    mean = geometric_mean(ratio for _, ratio in known)
    axes.set_xlabel("speed of ours / best ragged peer" + (f" (geometric mean {mean:.3f})" if mean else ""))
    axes.grid(alpha=0.3)
