"""One artifact from mirrors that may fail, stall or lie: retried, continued, and verified on arrival."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from cubin_runtime.errors import ArtifactError, DownloadError, IntegrityError
from cubin_runtime.integrity import Checker
from cubin_runtime.locks import Pause
from cubin_runtime.manifest import Artifact
from cubin_runtime.mirrors import Body, Mirror, MissingError, TransientError
from cubin_runtime.partial import KEEP_FROM
from cubin_runtime.store import Attempt

BACKOFF = (0.5, 1.0, 2.0, 4.0)  # seconds before each further try of one mirror, at most
MAX_PAUSE = 30.0  # seconds; a mirror that asks for a longer pause is passed over
MIN_RATE = 16 * 2**10  # bytes per second; a slower transfer counts as stalled

Progress = Callable[[int], None]
"""Called with the number of bytes that are there, after each piece."""


class Sink(Protocol):
    """Where the bytes go: a PartialFile, or memory."""

    @property
    def size(self) -> int:
        """Bytes that are there."""

    def append(self, data: bytes) -> None:
        """Adds what has arrived next."""

    def restart(self) -> None:
        """Drops what has arrived so far."""

    def chunks(self) -> Iterator[bytes]:
        """All that is there, in pieces."""


class MemorySink:
    """Keeps the bytes, for where no folder can."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.size = 0

    def append(self, data: bytes) -> None:
        """See Sink."""
        self._parts.append(data)
        self.size += len(data)

    def restart(self) -> None:
        """See Sink."""
        self._parts.clear()
        self.size = 0

    def chunks(self) -> Iterator[bytes]:
        """See Sink."""
        return iter(self._parts)


class Transfers:
    """Asks mirrors in order. One that was out of reach is asked last from then on, and no longer patiently.

    One that had a file only where its publisher has it is asked for the next one there first.

    mirrors  in the order of preference
    timeout  seconds that a transfer may take beyond what its size takes at MIN_RATE
    """

    def __init__(self, mirrors: Sequence[Mirror], timeout: float) -> None:
        self.mirrors = mirrors
        self._timeout = timeout
        self._out_of_reach: set[str] = set()
        self._as_published: set[str] = set()

    def fill(
        self,
        artifact: Artifact,
        sink: Sink,
        attempts: list[Attempt],
        progress: Progress = lambda size: None,
        first: Sequence[Mirror] = (),
        pause: Pause = lambda seconds: time.sleep(seconds),  # looked up late: tests replace it
    ) -> str | None:
        """Completes `sink` with verified bytes, and returns where from; None if no mirror has them.

        sink        may begin with bytes of an earlier transfer, right or wrong
        attempts    takes what the mirrors answered that were asked in vain
        first       folders of this machine, asked before the mirrors
        pause       waits until a mirror that failed is asked again
        """
        if _is_complete(artifact, sink):
            return "what an earlier download left"
        mirrors = sorted(self.mirrors, key=lambda mirror: mirror.location in self._out_of_reach)
        for kind, mirror in (*(("local", each) for each in first), *(("mirror", each) for each in mirrors)):
            try:
                return self._fill_from(mirror, artifact, sink, progress, pause)
            except ArtifactError as error:  # noqa: PERF203  one of few, and slow by itself
                attempts.append(Attempt(kind, str(error), isinstance(error, IntegrityError)))
        return None

    def _fill_from(
        self, mirror: Mirror, artifact: Artifact, sink: Sink, progress: Progress, pause: Pause
    ) -> str:
        waits = iter(() if mirror.location in self._out_of_reach else BACKOFF)
        clean_start = False
        while True:
            before = sink.size
            as_published = mirror.location in self._as_published
            try:
                path = self._receive(mirror, artifact, sink, progress, as_published)
            except IntegrityError:
                sink.restart()
                self._as_published.discard(mirror.location)
                # To blame may be what was there before, a server that gets ranges wrong, or an old file where
                # its publisher has it.
                if not (before or as_published) or clean_start:
                    raise
                clean_start = True
            except TransientError as failure:
                if sink.size - before >= KEEP_FROM:  # it gets on, if haltingly
                    waits = iter(BACKOFF)
                wait = next(waits, None)
                if wait is None or failure.pause > MAX_PAUSE:
                    self._out_of_reach.add(mirror.location)
                    raise DownloadError(str(failure)) from failure
                pause(failure.pause + _jittered(wait))
            else:
                self._out_of_reach.discard(mirror.location)
                return f"{mirror.location}/{path}"

    def _receive(
        self, mirror: Mirror, artifact: Artifact, sink: Sink, progress: Progress, as_published: bool
    ) -> str:
        """One try; returns the path that the mirror has the file under."""
        *others, last = reversed(artifact.paths) if as_published else artifact.paths
        # A mirror that refuses what its publisher has may still have the file by its digest.
        passed_over = DownloadError if as_published else MissingError
        for path in others:
            with contextlib.suppress(passed_over):
                self._receive_path(mirror, path, artifact, sink, progress)
                return path
        self._receive_path(mirror, last, artifact, sink, progress)
        if others:  # the next files are where this one is, mostly
            if as_published:
                self._as_published.discard(mirror.location)
            else:
                self._as_published.add(mirror.location)
        return last

    def _receive_path(
        self, mirror: Mirror, path: str, artifact: Artifact, sink: Sink, progress: Progress
    ) -> None:
        place = f"{mirror.location}/{path}"
        checker = Checker(artifact, place)
        if sink.size >= artifact.size:  # too much, or all and wrong
            sink.restart()
        with mirror.open(path, artifact, sink.size) as body:
            if body.start != sink.size:
                sink.restart()
            for chunk in sink.chunks():
                checker.update(chunk)
            self._drain(body, artifact, sink, checker, progress)
        checker.finish()

    def _drain(
        self, body: Body, artifact: Artifact, sink: Sink, checker: Checker, progress: Progress
    ) -> None:
        deadline = time.monotonic() + self._timeout + (artifact.size - sink.size) / MIN_RATE
        for chunk in body.chunks:
            checker.update(chunk)  # first, so that an endless body does not fill the disk
            sink.append(chunk)
            progress(sink.size)
            if time.monotonic() > deadline:
                raise TransientError(
                    f"{checker.source}: too slow, {sink.size} of {artifact.size} bytes until the deadline"
                )
        if sink.size < artifact.size:
            raise TransientError(
                f"{checker.source}: the body ended after {sink.size} of {artifact.size} bytes"
            )


def _jittered(seconds: float) -> float:
    """At most so long, and random, so that clients that failed together do not come back together."""
    import random

    return seconds * random.uniform(0.5, 1.0)


def _is_complete(artifact: Artifact, sink: Sink) -> bool:
    """Whether nothing is missing: an earlier transfer may have ended just before its last step."""
    if sink.size != artifact.size:
        return False
    checker = Checker(artifact, "what an earlier download left")
    for chunk in sink.chunks():
        checker.update(chunk)
    try:
        checker.finish()
    except IntegrityError:
        return False
    return True
