"""Where cubins are kept on this machine, and the order in which those places are asked.

Every place is content-addressed (`<sha256[:2]>/<sha256>`) and none is trusted: bytes are checked
against the manifest on every read, and before a file gets its final name.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from cubin_runtime.errors import IntegrityError, StoreWriteError
from cubin_runtime.manifest import Artifact
from cubin_runtime.settings import CACHE_DIR, Settings, warn_once

_KERNEL_META = Path(__file__).resolve().parent.parent / "kernel_meta"


class Store(Protocol):
    """A place that may hold cubins. `name` says which kind it is, `location` where it is."""

    @property
    def name(self) -> str:
        """folder, environment, embedded, package, cache or mirror."""

    @property
    def location(self) -> str:
        """Folder or URL."""

    def place(self, artifact: Artifact) -> str:
        """Path or URL of the file of `artifact`, or where it would be."""

    def read(self, artifact: Artifact) -> bytes | None:
        """The verified bytes; None if the store does not have them.

        Raises IntegrityError when it holds other bytes under that name, OSError when it cannot be read.
        """


class Attempt(NamedTuple):
    """What a store that was asked in vain answered."""

    store: str
    answer: str
    corrupt: bool


class Located(NamedTuple):
    """Verified bytes of a cubin, the store that had them, and those that were asked before."""

    data: bytes
    store: str
    path: str
    attempts: tuple[Attempt, ...]


class FolderStore:
    """A folder that is only read and need not exist: content-addressed, or as the set's publisher has it."""

    def __init__(self, name: str, path: str | Path) -> None:
        self.name = name
        self.folder = Path(path)

    @property
    def location(self) -> str:
        """The folder."""
        return str(self.folder)

    def path(self, artifact: Artifact) -> Path:
        """Where the file of `artifact` is, or would be."""
        candidates = [self.folder / relative for relative in artifact.paths]
        return next((path for path in candidates if path.exists()), candidates[0])

    def place(self, artifact: Artifact) -> str:
        """See Store.place."""
        return str(self.path(artifact))

    def read(self, artifact: Artifact) -> bytes | None:
        """See Store.read. Reads at most one byte more than the manifest promises."""
        path = self.path(artifact)
        try:
            with path.open("rb") as file:
                data = file.read(artifact.size + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        verify(artifact, data, str(path))
        return data


class CacheStore(FolderStore):
    """The folder that downloads are kept in; made when the first file is written."""

    def __init__(self, path: str | Path) -> None:
        super().__init__("cache", path)

    def write(self, artifact: Artifact, data: bytes) -> Path:
        """Stores verified bytes and returns their path; readers see the whole file or none.

        Raises IntegrityError for wrong bytes, and StoreWriteError (the final name is then untouched
        and nothing else is left behind) when the folder cannot take them.
        """
        verify(artifact, data, "the data to store")
        path = self.folder / artifact.key
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_atomically(path, data)
        except OSError as error:
            raise StoreWriteError(
                f"cannot store {artifact.name} in {path.parent}: {error.strerror or error}; {artifact.size} "
                f"bytes needed, {_free_bytes(path)} free. Make room there, or let {CACHE_DIR} name a folder "
                "that can be written"
            ) from error
        return path


def verify(artifact: Artifact, data: bytes, source: str) -> None:
    """Raises IntegrityError naming `source` unless `data` is exactly what the manifest promises."""
    if len(data) != artifact.size:
        given = f"more than {artifact.size}" if len(data) > artifact.size else str(len(data))
        raise IntegrityError(f"{source} is not {artifact.name}: {given} bytes, expected {artifact.size}")
    digest = hashlib.sha256(data).hexdigest()
    if digest != artifact.sha256:
        raise IntegrityError(f"{source} is not {artifact.name}: sha256 {digest}, expected {artifact.sha256}")


def lookup_order(settings: Settings, artifact: Artifact, folder: str | Path | None = None) -> Iterator[Store]:
    """The stores of this machine, most specific first: `folder`, the environment's, the package's own, an
    installed package of the set's publisher, the cache.

    Lazy, so that the cache's place is only worked out when nothing before it had the file.
    """
    if folder is not None:
        yield FolderStore("folder", folder)
    for path in settings.artifact_dirs:
        yield FolderStore("environment", path)
    yield FolderStore("embedded", _KERNEL_META / artifact.set_name / "cubins")
    if artifact.published is not None:
        yield from _installed(artifact.set_name)
    yield CacheStore(settings.cache_dir)


def _installed(package: str) -> Iterator[FolderStore]:
    """The folder of an installed package that publishes the set of its name. The package is not imported."""
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    for location in (spec and spec.submodule_search_locations) or ():
        yield FolderStore("package", Path(location) / "cubins")


def locate(artifact: Artifact, stores: Iterable[Store], attempts: list[Attempt]) -> Located | None:
    """The first store's verified bytes; None if no store has them. What the others say joins `attempts`.

    A wrong file is passed over with a warning once a later store has the right bytes.
    """
    for store in stores:
        try:
            data = store.read(artifact)
        except OSError as error:
            attempts.append(Attempt(store.name, str(error), isinstance(error, IntegrityError)))
            continue
        if data is None:
            sought = " or ".join(f"{store.location}/{path}" for path in artifact.paths)
            attempts.append(Attempt(store.name, f"no file {sought}", False))
            continue
        path = store.place(artifact)
        for attempt in attempts:
            if attempt.corrupt:
                warn_once(f"{attempt.answer}. {path} is used instead; remove or replace the wrong file")
        return Located(data, store.name, path, tuple(attempts))
    return None


def _write_atomically(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _free_bytes(path: Path) -> int:
    """Free bytes where `path` would be written, as seen from its nearest folder that exists."""
    for folder in path.parents:
        with contextlib.suppress(OSError):
            status = os.statvfs(folder)
            return status.f_bavail * status.f_frsize
    return 0
