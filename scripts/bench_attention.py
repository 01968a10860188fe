"""Times attention of this library and of every other that is installed, in one process on one GPU.

    python scripts/bench_attention.py                                  the main set, both protocols
    python scripts/bench_attention.py --set tails --protocol burst --host
    python scripts/bench_attention.py --workloads mine.json --peers fa3,cudnn --out /tmp/results
    python scripts/bench_attention.py --render benchmarks/main.json    table and plots of an earlier run

Writes NAME.json, NAME.md and NAME_PROTOCOL.png. Every result is compared with float32 before it is timed.
A list of workloads is a JSON array; only name and q_lens are required, shown here with the defaults:

    [{"name": "mine", "q_lens": [777, 4096], "kv_lens": [777, 4096], "dtype": "bf16", "heads": 128,
      "kv_heads": 128, "head_dims": [192, 128], "mask": "causal", "window": null}]

dtype is bf16, fp16, e4m3, sage-int8 or sage-e4m3; kv_lens and kv_heads default to the queries'; mask is
causal, dense or window, and `window` counts the keys that a row sees left of the diagonal.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from bench.command import date_and_command
from bench.machine import machine
from bench.peers import OURS, PEERS, Options, Peer, PeerMissingError
from bench.report import markdown, plot_name, progress
from bench.results import Line, Report, views
from bench.run import Bench, DeviceLostError
from bench.sets import SETS
from bench.timing import PROTOCOLS
from bench.workloads import Workload, WorkloadError, matching, read_workloads

ROOT = Path(__file__).resolve().parents[1]


class Recorder:
    """One run: what is known from the start, the lines so far, and where they are written."""

    def __init__(self, name: str, folder: Path, peers: Mapping[str, Peer], missing: dict[str, str]) -> None:
        self._path = folder / name
        self._began = time.monotonic()
        self._lines: list[Line] = []
        date, command = date_and_command()
        self._report = Report(
            name=name,
            date=date,
            command=command,
            seconds=0,
            complete=False,
            machine=machine(),
            peers={name: peer.version for name, peer in peers.items()},
            missing=missing,
            copy_gbps={},
            lines=(),
        )

    def run(self, bench: Bench, workloads: Sequence[Workload], host: bool) -> None:
        """Adds and writes line after line; plots come once, at the end."""
        folder = self._path.parent
        self._update(copy_gbps=bench.copy_gbps())
        try:
            for number, line in enumerate(bench.lines(workloads, host), 1):
                self._lines.append(line)
                self._update(complete=number == len(workloads))
                self._show(line, f"[{number}/{len(workloads)}, {self._report.seconds:.0f} s]")
        finally:
            write_plots(self._report, folder)

    @property
    def passed(self) -> bool:
        """All lines are there, and ours is right wherever it has a kernel."""
        entries = [entry for line in self._lines for entry in line.entries if entry.peer == OURS]
        return self._report.complete and all(entry.status in ("ok", "refused") for entry in entries)

    def _update(self, **changes: object) -> None:
        seconds = time.monotonic() - self._began
        self._report = msgspec.structs.replace(
            self._report, lines=tuple(self._lines), seconds=seconds, **changes
        )
        write_table(self._report, self._path.parent)

    def _show(self, line: Line, prefix: str) -> None:
        if not line.matmul:
            print(prefix, f"{line.workload.name}: {line.entries[0].note}", flush=True)
        for protocol in self._report.protocols:
            for view in views(self._report, protocol):
                if view.line is line:
                    print(prefix, progress(view), flush=True)


def write_table(report: Report, folder: Path) -> None:
    """NAME.json and NAME.md."""
    folder.mkdir(parents=True, exist_ok=True)
    report.save(folder / f"{report.name}.json")
    (folder / f"{report.name}.md").write_text(markdown(report))


def write_plots(report: Report, folder: Path) -> None:
    """NAME_PROTOCOL.png, where matplotlib is installed; --render makes them elsewhere."""
    try:
        from bench.plot import plot
    except ImportError as error:
        print(f"no plots: {error}; --render makes them from the JSON", file=sys.stderr)
        return
    for protocol in report.protocols:
        plot(report, protocol, folder / plot_name(report, protocol))


def make_peers(names: Sequence[str], options: Options) -> tuple[dict[str, Peer], dict[str, str]]:
    """Those that can take part, and why the others cannot."""
    made = {name: _make_peer(name, options) for name in names}
    peers = {name: peer for name, peer in made.items() if not isinstance(peer, str)}
    return peers, {name: reason for name, reason in made.items() if isinstance(reason, str)}


def _make_peer(name: str, options: Options) -> Peer | str:
    try:
        return PEERS[name](options)
    except PeerMissingError as error:
        return str(error)
    except Exception as error:  # a library that is there but cannot start here
        return f"{type(error).__name__}: {error}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    options = _parser().parse_args(arguments)
    if options.render:
        report = Report.read(options.render)
        write_table(report, options.out)
        write_plots(report, options.out)
        return 0
    try:
        workloads = matching(_workloads(options), options.only)
    except WorkloadError as error:
        print(error, file=sys.stderr)
        return 2
    if not workloads:
        print(f"no workload matches {options.only!r}", file=sys.stderr)
        return 2
    if options.list:
        for workload in workloads:
            print(f"{workload.name:24} {workload.flops / 1e9:9.1f} GFLOP  {workload.describe()}")
        return 0
    if not torch.cuda.is_available():
        print("torch finds no CUDA device to time anything on", file=sys.stderr)
        return 2
    return _time(workloads, options)


def _time(workloads: Sequence[Workload], options: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    peers, missing = make_peers(options.peers, Options(options.fa4_aot))
    for name, reason in missing.items():
        print(f"{name} is missing: {reason}", flush=True)
    protocols = {
        name: protocol._replace(rounds=options.rounds or protocol.rounds)
        for name, protocol in PROTOCOLS.items()
        if options.protocol in (name, "both")
    }
    recorder = Recorder(_name(options), options.out, peers, missing)
    try:
        recorder.run(Bench(peers, protocols, torch.device("cuda", 0)), workloads, options.host)
    except KeyboardInterrupt:
        print("interrupted; the lines so far are written", file=sys.stderr)
        return 130
    except DeviceLostError as error:
        print(error, file=sys.stderr)
    return 0 if recorder.passed else 1


def _workloads(options: argparse.Namespace) -> tuple[Workload, ...]:
    return read_workloads(options.workloads) if options.workloads else SETS[options.set]


def _name(options: argparse.Namespace) -> str:
    return options.workloads.stem if options.workloads else str(options.set)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


def _peer_names(text: str) -> tuple[str, ...]:
    """Names between commas, ours always first."""
    names = [name for name in text.split(",") if name]
    if unknown := [name for name in names if name not in PEERS]:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(PEERS)}")
    return tuple(dict.fromkeys((OURS, *names)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--set", choices=SETS, default="main", help="built-in workloads (default: main)")
    source.add_argument("--workloads", type=Path, metavar="FILE.json", help="other workloads")
    source.add_argument("--render", type=Path, metavar="FILE.json", help="write an earlier run's table anew")
    parser.add_argument("--only", default="*", metavar="GLOB", help="workloads by name, several by commas")
    parser.add_argument("--list", action="store_true", help="print the workloads and stop")
    parser.add_argument(
        "--protocol", choices=(*PROTOCOLS, "both"), default="both", help="see bench/timing.py (default: both)"
    )
    usual = ", ".join(f"{name} {protocol.rounds}" for name, protocol in PROTOCOLS.items())
    parser.add_argument(
        "--rounds", type=_positive, metavar="N", help=f"measurements of each (default: {usual})"
    )
    parser.add_argument(
        "--peers", type=_peer_names, default=tuple(PEERS), metavar="A,B", help=f"of {', '.join(PEERS)}"
    )
    parser.add_argument(
        "--fa4-aot", type=Path, metavar="DIR", help="kernels of scripts/compile_fa4_kernels.py"
    )
    parser.add_argument("--host", action="store_true", help="also the Python time of a warm call")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks", metavar="DIR", help="(default: benchmarks/)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
