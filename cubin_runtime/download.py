"""Bringing cubins to this machine: into the cache or a folder, or into memory where neither can take them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cubin_runtime.cache import CacheStore, WritableStore
from cubin_runtime.errors import (
    ArtifactError,
    ArtifactNotFoundError,
    DownloadError,
    IntegrityError,
    OfflineError,
    StoreWriteError,
)
from cubin_runtime.integrity import verify
from cubin_runtime.locks import Pause
from cubin_runtime.manifest import Artifact
from cubin_runtime.mirrors import FileMirror, Mirror
from cubin_runtime.settings import (
    ARTIFACT_DIR,
    CACHE_DIR,
    MIRRORS,
    OFFLINE,
    Settings,
    logger,
    settings,
    warn_once,
)
from cubin_runtime.store import (
    Attempt,
    FolderStore,
    LocalStores,
    Located,
    absence,
    locate,
    warn_of_wrong_files,
)
from cubin_runtime.transfer import MemorySink, Progress, Transfers


class Fetched(NamedTuple):
    """A file that is in place. `is_new` says whether it was not before, `source` then where it came from."""

    store: str
    path: str
    is_new: bool
    source: str
    attempts: tuple[Attempt, ...]


class Fetcher:
    """Brings files to this machine without ever having all of one in memory. May be shared by threads.

    transfers  the mirrors
    target     where the files have to be; default: any store of this machine, and if none has it, the cache
    pause      waits for other processes, and for mirrors that failed
    """

    def __init__(
        self,
        transfers: Transfers,
        *,
        target: WritableStore | None = None,
        settings: Settings = settings,
        pause: Pause = time.sleep,
    ) -> None:
        self._transfers = transfers
        self._target = target
        self._settings = settings
        self._pause = pause
        self._store = target or CacheStore(settings.cache_dir)
        self._local = LocalStores(settings)

    def fetch(self, artifact: Artifact, progress: Progress = lambda size: None) -> Fetched:
        """Brings one file, if it is not here; `progress` is called with the bytes of it that are there.

        Raises what `obtain` does, and StoreWriteError where the file cannot be kept.
        """
        attempts: list[Attempt] = []
        here = self._local.of(artifact)
        store, target = self._store, self._target
        held = holder(artifact, [target] if target else here, attempts)
        if held:
            return Fetched(held.name, held.place(artifact), False, "", ())
        others = [FileMirror(other.folder) for other in here] if target else []
        if not others and not self._transfers.mirrors:
            raise failure(artifact, attempts, self._settings)
        with store.only_writer(artifact, self._settings.lock_timeout, self._pause):
            # Whoever had the lock before may have brought it.
            if holder(artifact, [store], []):
                return Fetched(store.name, store.place(artifact), False, "", ())
            with store.receive(artifact) as partial:
                source = self._transfers.fill(artifact, partial, attempts, progress, others, self._pause)
                if source is None:
                    raise failure(artifact, attempts, self._settings)
                path = partial.commit()
        warn_of_wrong_files(attempts, source)
        trim(store, self._settings, artifact)
        return Fetched(store.name, path, True, source, tuple(attempts))


def holder(artifact: Artifact, stores: Iterable[FolderStore], attempts: list[Attempt]) -> FolderStore | None:
    """The first store that has the right bytes. What the others say joins `attempts`."""
    for store in stores:
        try:
            if store.holds(artifact):
                return store
            attempts.append(absence(store, artifact))
        except OSError as error:  # noqa: PERF203  one of few, and the file system is slower
            attempts.append(Attempt(store.name, str(error), isinstance(error, IntegrityError)))
    return None


def trim(store: FolderStore, settings: Settings, artifact: Artifact) -> None:
    """Keeps the cache below its limit after `artifact` has joined it."""
    if isinstance(store, CacheStore) and settings.cache_max_size is not None:
        for entry in store.prune(max_size=settings.cache_max_size, keep=[artifact.sha256]):
            logger.info("removed %s (%d bytes) to keep the cache below its limit", entry.path, entry.size)


def download(
    artifact: Artifact, mirrors: Sequence[Mirror], attempts: list[Attempt], settings: Settings
) -> Located:
    """The verified bytes from a mirror, kept in the cache if it takes them.

    attempts    what the stores of this machine answered; takes what the mirrors do
    """
    cache = CacheStore(settings.cache_dir)
    transfers = Transfers(mirrors, settings.http_timeout)
    with cache.only_writer(artifact, settings.lock_timeout):
        # Whoever had the lock before may have brought it.
        found = locate(artifact, [cache], [])
        if found:
            return found
        try:
            data, source = _keep(artifact, cache, transfers, attempts)
        except StoreWriteError as error:
            warn_once(f"{error}. Until then, every process downloads again", about=cache.folder)
            data, source = _hold(artifact, transfers, attempts)
    if source is None:
        raise failure(artifact, attempts, settings)
    verify(artifact, data, source)
    warn_of_wrong_files(attempts, source)
    logger.info("downloaded %s (%d bytes) from %s", artifact.name, artifact.size, source)
    trim(cache, settings, artifact)
    return Located(data, "mirror", source, tuple(attempts))


def _keep(
    artifact: Artifact, cache: CacheStore, transfers: Transfers, attempts: list[Attempt]
) -> tuple[bytes, str | None]:
    """Downloads into the cache; the bytes as they are in the file, and where they came from."""
    with cache.receive(artifact) as partial:
        source = transfers.fill(artifact, partial, attempts)
        if source is None:
            return b"", None
        data = b"".join(partial.chunks())
        partial.commit()
        return data, source


def _hold(artifact: Artifact, transfers: Transfers, attempts: list[Attempt]) -> tuple[bytes, str | None]:
    """Downloads into memory."""
    sink = MemorySink()
    source = transfers.fill(artifact, sink, attempts)
    return b"".join(sink.chunks()), source


def failure(artifact: Artifact, attempts: Sequence[Attempt], settings: Settings) -> ArtifactError:
    """The exception that says who was asked for `artifact`, what they answered, and what to do."""
    kind: type[ArtifactError]
    if any(attempt.corrupt for attempt in attempts):
        kind, remedy = IntegrityError, "Remove or replace the wrong file."
    elif settings.offline:
        kind = OfflineError
        remedy = (
            f"{OFFLINE} forbids downloads. Unset it, or run `cubin-runtime fetch --row {artifact.name} "
            f"--dest DIR` where there is a network, copy DIR here and let {ARTIFACT_DIR} name it."
        )
    else:
        kind = DownloadError if settings.mirrors else ArtifactNotFoundError
        remedy = (
            f"Let {MIRRORS} list the base URL of a mirror that has it, or {ARTIFACT_DIR} a folder; "
            f"downloads are kept in the folder that {CACHE_DIR} names."
        )
    answers = "".join(f"\n  {attempt.store}: {attempt.answer}" for attempt in attempts)
    return kind(f"cannot obtain {artifact.name} ({artifact.size} bytes):{answers}\n{remedy}")
