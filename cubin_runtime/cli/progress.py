"""How transfers go, on stderr: a bar on a terminal, else a line for each file."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from cubin_runtime.cli.output import note

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from cubin_runtime.batch import Outcome
    from cubin_runtime.manifest import Artifact


class Display(Protocol):
    """Takes what batch.fetch_all has to tell."""

    def progress(self, artifact: Artifact, size: int) -> None:
        """`size` bytes of a file are there."""

    def done(self, outcome: Outcome) -> None:
        """A file has arrived, was there, or has failed."""


@contextlib.contextmanager
def display(artifacts: Sequence[Artifact]) -> Iterator[Display]:
    """A display for these files, taken away at the end of the block."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield _Bars(progress, artifacts)


class _Lines:
    def progress(self, artifact: Artifact, size: int) -> None:
        pass

    def done(self, outcome: Outcome) -> None:
        for line in _lines(outcome):
            note(line)


class _Bars:
    """One bar for all files, and one for each that is under way and large."""

    def __init__(self, progress: Progress, artifacts: Sequence[Artifact]) -> None:
        self._progress = progress
        self._count = len(artifacts)
        self._ended = 0
        self._here: dict[str, int] = {}
        self._total = progress.add_task(self._title(), total=sum(artifact.size for artifact in artifacts))
        self._single: dict[str, TaskID] = {}

    def progress(self, artifact: Artifact, size: int) -> None:
        if artifact.size >= _LARGE:
            if artifact.name not in self._single:
                self._single[artifact.name] = self._progress.add_task(artifact.name, total=artifact.size)
            self._progress.update(self._single[artifact.name], completed=size)
        self._advance(artifact, size)

    def done(self, outcome: Outcome) -> None:
        self._ended += 1
        self._advance(outcome.artifact, outcome.artifact.size)
        self._progress.update(self._total, description=self._title())
        task = self._single.pop(outcome.artifact.name, None)
        if task is not None:
            self._progress.remove_task(task)
        if outcome.fetched and outcome.fetched.attempts:
            for line in _lines(outcome):
                self._progress.console.print(line, markup=False, highlight=False)

    def _advance(self, artifact: Artifact, size: int) -> None:
        self._progress.advance(self._total, size - self._here.get(artifact.name, 0))
        self._here[artifact.name] = size

    def _title(self) -> str:
        return f"{self._ended} of {self._count} cubins"


_LARGE = 8 * 2**20  # bytes; smaller ones come and go too fast to look at


def _lines(outcome: Outcome) -> Iterator[str]:
    if outcome.fetched and outcome.fetched.is_new:
        for attempt in outcome.fetched.attempts:
            if attempt.store == "mirror":
                yield f"passed over {attempt.answer}"
        yield f"fetched {outcome.artifact.name} ({outcome.artifact.size} bytes) from {outcome.fetched.source}"
