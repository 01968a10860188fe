"""Many files at once, each with an outcome of its own: one that fails does not keep the others away."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from cubin_runtime.cache import WritableStore
from cubin_runtime.download import Fetched, Fetcher
from cubin_runtime.errors import ArtifactError
from cubin_runtime.manifest import Artifact
from cubin_runtime.settings import Settings, settings
from cubin_runtime.transfer import Transfers

_STEP = 0.005  # seconds between two looks at how it goes
_BUSY = 3  # files in a step; small ones at hand come so fast, and keep the interpreter busy


class Outcome(NamedTuple):
    """What became of one file: one of `fetched` and `error` is None."""

    artifact: Artifact
    fetched: Fetched | None
    error: ArtifactError | None


class _StoppedError(Exception):
    """Ends a transfer because the batch has ended."""


def fetch_all(
    artifacts: Iterable[Artifact],
    transfers: Transfers,
    *,
    target: WritableStore | None = None,
    settings: Settings = settings,
    jobs: int = 8,
    progress: Callable[[Artifact, int], None] = lambda artifact, size: None,
    done: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Brings every file to this machine, at most `jobs` at a time; outcomes in the order of `artifacts`.

    progress    called, from any thread, with the bytes of a file that are there
    done        called, from any thread but one at a time, with each outcome as it comes

    An interrupt stops the transfers and pauses under way, and leaves what can be continued.
    """
    from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

    ordered = list(artifacts)
    waiting = enumerate(ordered)
    outcomes: dict[int, Outcome] = {}
    stop = threading.Event()
    one_at_a_time = threading.Lock()

    def pause(seconds: float) -> None:
        if stop.wait(seconds):
            raise _StoppedError

    fetcher = Fetcher(transfers, target=target, settings=settings, pause=pause)

    def bring(artifact: Artifact) -> Outcome:
        def watch(size: int) -> None:
            if stop.is_set():
                raise _StoppedError
            progress(artifact, size)

        try:
            fetched = fetcher.fetch(artifact, watch)
        except ArtifactError as error:
            return Outcome(artifact, None, error)
        return Outcome(artifact, fetched, None)

    # Threads take files by themselves, since a future for each costs as much as to store a small one.
    def work() -> None:
        while not stop.is_set():
            with one_at_a_time:
                number, artifact = next(waiting, (0, None))
            if artifact is None:
                return
            outcome = outcomes[number] = bring(artifact)
            with one_at_a_time:
                done(outcome)

    pool = ThreadPoolExecutor(jobs, thread_name_prefix="fetch")
    try:
        # One thread after another, as long as there is something to wait for: those that nobody needs take
        # the interpreter from each other at every call of the system, and double what a small file costs.
        workers = [pool.submit(work)]
        while len(workers) < min(jobs, len(ordered)):
            before = len(outcomes)
            if wait(workers, _STEP, FIRST_EXCEPTION).done:
                break
            if len(outcomes) - before < _BUSY:
                workers.append(pool.submit(work))
        for worker in wait(workers, return_when=FIRST_EXCEPTION).done:
            worker.result()
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
    return [outcomes[number] for number in range(len(ordered))]
