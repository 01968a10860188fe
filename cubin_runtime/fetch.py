"""Getting a cubin: from this machine if it is here, else from a mirror into the cache."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cubin_runtime.errors import DownloadError
from cubin_runtime.manifest import Artifact
from cubin_runtime.settings import Settings, settings
from cubin_runtime.store import Attempt, Located, locate, lookup_order

if TYPE_CHECKING:
    from concurrent.futures import Future

    from cubin_runtime.mirrors import Mirror

# Downloads under way in this process. The key holds the process id, so that a forked child does not
# wait for a thread that only its parent has.
_flights: dict[tuple[object, ...], Future[Located]] = {}


def obtain(
    artifact: Artifact,
    *,
    folder: str | Path | None = None,
    settings: Settings = settings,
    mirrors: Sequence[Mirror] | None = None,
) -> Located:
    """The verified bytes of `artifact`, downloaded into the cache if no store of this machine has them.

    folder    asked before every other store
    settings  which stores and mirrors there are, and the timeouts
    mirrors   asked instead of those of the settings

    A cache that cannot be written costs a warning and not the result. Thread-safe. Raises IntegrityError
    if wrong bytes are all there is, else OfflineError, ArtifactNotFoundError (no mirror) or DownloadError.
    """
    attempts: list[Attempt] = []
    found = locate(artifact, lookup_order(settings, artifact, folder), attempts)
    if found:
        return found
    # Only now, because most processes find every file at hand.
    from cubin_runtime.download import download, failure
    from cubin_runtime.mirrors import open_mirrors

    with contextlib.nullcontext(mirrors) if mirrors is not None else open_mirrors(settings) as usable:
        if not usable:
            raise failure(artifact, attempts, settings)
        return _share(
            (os.getpid(), artifact.sha256, settings.cache_dir, *(mirror.location for mirror in usable)),
            lambda: download(artifact, usable, attempts, settings),
        )


def _share(key: tuple[object, ...], work: Callable[[], Located]) -> Located:
    """Runs `work` in the first thread that comes with `key`; threads that come meanwhile get its outcome."""
    from concurrent.futures import Future

    mine: Future[Located] = Future()
    flight = _flights.setdefault(key, mine)
    if flight is not mine:
        return flight.result()
    try:
        result = work()
    except BaseException as error:
        # A KeyboardInterrupt is for this thread only.
        mine.set_exception(error if isinstance(error, Exception) else DownloadError("download interrupted"))
        raise
    else:
        mine.set_result(result)
        return result
    finally:
        del _flights[key]
