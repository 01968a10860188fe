"""Command line and files of a benchmark: what those that time our own calls only share, and some with all."""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec
import torch

from bench import timing

_RESULTS = Path(__file__).resolve().parents[2] / "benchmarks"


class Named(Protocol):
    """A case."""

    @property
    def name(self) -> str:
        """By which it is chosen."""


_Case = TypeVar("_Case", bound=Named)


class Chosen(NamedTuple, Generic[_Case]):
    """What a command line asks for."""

    cases: list[_Case]
    protocols: dict[str, timing.Protocol]
    out: Path


def choose(
    description: str | None, cases: Sequence[_Case], arguments: Sequence[str] | None
) -> Chosen[_Case] | None:
    """None, once it has been said why, where there is nothing to run or nothing to run it on."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="*", metavar="GLOB", help="cases by name")
    parser.add_argument(
        "--protocol", choices=(*timing.PROTOCOLS, "both"), default="both", help="see bench/timing.py"
    )
    parser.add_argument("--out", type=Path, default=_RESULTS, metavar="DIR", help="(default: benchmarks/)")
    options = parser.parse_args(arguments)
    chosen = [case for case in cases if fnmatch.fnmatchcase(case.name, options.only)]
    if not chosen or not torch.cuda.is_available():
        print("no case matches" if not chosen else "torch finds no CUDA device", file=sys.stderr)
        return None
    protocols = {n: p for n, p in timing.PROTOCOLS.items() if options.protocol in (n, "both")}
    return Chosen(chosen, protocols, options.out)


def date_and_command() -> tuple[str, str]:
    """Of the run that asks, for its report."""
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return date, shlex.join(["python", *sys.argv])


def save(report: msgspec.Struct, markdown: str, folder: Path, name: str) -> None:
    """Writes NAME.json and NAME.md."""
    folder.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(report), indent=1)
    (folder / f"{name}.json").write_bytes(text + b"\n")
    (folder / f"{name}.md").write_text(markdown)
