"""Folders that cubins are written to, and the upkeep of the one that downloads are kept in.

Nothing here needs the others to stand still: a file appears whole or not at all, and one that is
removed while somebody reads it stays with the reader.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from cubin_runtime.errors import ArtifactError, StoreWriteError
from cubin_runtime.integrity import file_sha256, verify
from cubin_runtime.locks import Pause, locked
from cubin_runtime.manifest import Artifact
from cubin_runtime.partial import PartialFile, is_part, remove_abandoned
from cubin_runtime.settings import CACHE_DIR, logger
from cubin_runtime.store import FolderStore

_TAG = "CACHEDIR.TAG"  # tells backup programs to pass over the folder: https://bford.info/cachedir
_TAG_TEXT = """\
Signature: 8a477f597d28d172789f06886806bc55
# Cubins that cubin-runtime downloaded. They can be removed at any time.
"""

_DIGEST = re.compile(r"[0-9a-f]{64}")


class WritableStore(FolderStore):
    """A content-addressed folder that files are added to; made when the first one is."""

    @contextlib.contextmanager
    def receive(self, artifact: Artifact) -> Iterator[PartialFile]:
        """The part of the file that is there already, to be completed, verified and committed.

        What the block leaves uncommitted is kept if it is worth going on with later. Raises StoreWriteError
        when the folder cannot take the file; the final name is then untouched, and nothing else is left.
        """
        path = f"{self.location}/{artifact.key}"
        folder = os.path.dirname(path)
        partial = None
        try:
            partial = PartialFile.create(path) if self._make(folder) else PartialFile.open(path)
            _require_space(path, artifact.size - partial.size)
            yield partial
        except ArtifactError:
            raise
        except OSError as error:
            if partial:
                partial.discard()
            raise StoreWriteError(
                f"cannot store {artifact.name} in {folder}: {error.strerror or error}; {artifact.size} bytes "
                f"needed, {_free_bytes(path) or 0} free. Make room there, or let {CACHE_DIR} name a folder "
                "that can be written"
            ) from error
        finally:
            if partial:
                partial.leave()

    def write(self, artifact: Artifact, data: bytes) -> Path:
        """Stores verified bytes and returns their path. Raises IntegrityError, or StoreWriteError."""
        verify(artifact, data, "the data to store")
        with self.receive(artifact) as partial:
            partial.restart()
            partial.append(data)
            partial.commit()
        return self.folder / artifact.key

    def only_writer(
        self, artifact: Artifact, timeout: float, pause: Pause = time.sleep
    ) -> AbstractContextManager[None]:
        """Nothing by default: without it, two writers of one file cost a second download and no more."""
        return contextlib.nullcontext()

    def _make(self, folder: str) -> bool:
        """Makes a folder of the store, and says whether it was not there."""
        if os.path.isdir(folder):
            return False
        os.makedirs(folder, exist_ok=True)
        return True


class CacheEntry(NamedTuple):
    """A file in the cache. `used` is when it was last read, as far as the file system tells, or written."""

    sha256: str
    path: Path
    size: int
    used: float


class CacheStore(WritableStore):
    """The folder that downloads are kept in."""

    def __init__(self, path: str | Path) -> None:
        super().__init__("cache", path)
        self._was_tagged = False

    @contextlib.contextmanager
    def only_writer(self, artifact: Artifact, timeout: float, pause: Pause = time.sleep) -> Iterator[None]:
        """Keeps other processes from downloading the same file, as far as that can be had within `timeout`.

        A lock that is not to be had (another user's, a read-only folder, a holder that hangs) costs at most
        a second download, as files are verified and replaced atomically.
        """
        folder = f"{self.location}/locks"
        with contextlib.ExitStack() as stack:
            try:
                self._make(folder)
                stack.enter_context(locked(f"{folder}/{artifact.sha256}.lock", timeout, pause))
            except OSError as error:
                logger.debug("downloading %s without a lock: %s", artifact.name, error)
            yield

    def entries(self) -> list[CacheEntry]:
        """The files that are there, whether sound or not; the one not used for longest first."""
        found = []
        for path in self.folder.glob("[0-9a-f][0-9a-f]/*"):
            if _DIGEST.fullmatch(path.name):
                with contextlib.suppress(OSError):  # somebody else may have removed it
                    status = path.lstat()
                    found.append(
                        CacheEntry(path.name, path, status.st_size, max(status.st_atime, status.st_mtime))
                    )
        return sorted(found, key=lambda entry: entry.used)

    def is_sound(self, entry: CacheEntry) -> bool:
        """Whether a file is what its name says; one that is gone meanwhile is not unsound."""
        try:
            return file_sha256(entry.path) == entry.sha256
        except FileNotFoundError:
            return True
        except OSError:
            return False

    def prune(
        self,
        *,
        max_size: int | None = None,
        unused_for: float | None = None,
        keep: Collection[str] = (),
    ) -> list[CacheEntry]:
        """Removes what downloads abandoned, then files by the rules given, and returns those files.

        max_size    bytes; the least recently used go until the rest fits
        unused_for  seconds; files that nobody used for so long go
        keep        sha256 of files that stay whatever the rules say
        """
        self.remove_abandoned()
        entries = self.entries()
        excess = sum(entry.size for entry in entries) - max_size if max_size is not None else 0
        oldest = time.time() - unused_for if unused_for is not None else 0.0
        removed = []
        for entry in entries:
            if entry.sha256 not in keep and (excess > 0 or entry.used < oldest) and self.remove(entry):
                removed.append(entry)
                excess -= entry.size
        return removed

    def remove(self, entry: CacheEntry) -> bool:
        """Removes one file; False if it cannot be removed. Whoever reads it keeps it until then."""
        try:
            entry.path.unlink()
        except OSError as error:
            logger.warning("cannot remove %s: %s", entry.path, error)
            return False
        return True

    def remove_abandoned(self) -> int:
        """Removes the parts of files whose downloads have ended, and returns how many there were."""
        parts = [path for path in self.folder.glob("[0-9a-f][0-9a-f]/.*") if is_part(path.name)]
        return sum(remove_abandoned(str(path)) for path in parts)

    def _make(self, folder: str) -> bool:
        if os.path.isdir(folder):
            return False
        if not self._was_tagged:
            self._tag()
        return super()._make(folder)

    def _tag(self) -> None:
        """Tags the folder if it is new; one that holds something else is not ours to exclude from backups."""
        super()._make(str(self.folder))
        with os.scandir(self.folder) as found:
            is_empty = next(found, None) is None
        if is_empty:
            (self.folder / _TAG).write_text(_TAG_TEXT)
        self._was_tagged = True


def _require_space(path: str, size: int) -> None:
    free = _free_bytes(path)
    if free is not None and free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _free_bytes(path: str) -> int | None:
    """Free bytes where `path` would be written, seen from the nearest folder that exists; None = unknown."""
    while (folder := os.path.dirname(path)) != path:
        path = folder
        with contextlib.suppress(OSError):
            status = os.statvfs(folder)
            return status.f_bavail * status.f_frsize if status.f_blocks else None
    return None
