"""Where cubins are read from on this machine, and the order in which those places are asked.

Every place is content-addressed (`<sha256[:2]>/<sha256>`) and none is trusted: bytes are checked
against the manifest on every read.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cubin_runtime.errors import IntegrityError
from cubin_runtime.integrity import Checker, file_chunks, verify
from cubin_runtime.manifest import Artifact
from cubin_runtime.settings import Settings, warn_once

if TYPE_CHECKING:
    from io import BufferedReader

_KERNEL_META = Path(__file__).resolve().parent.parent / "kernel_meta"


class Attempt(NamedTuple):
    """What a store or mirror that was asked in vain answered."""

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
    """A folder, which is only read and need not exist: content-addressed, or laid out by a set's publisher.

    name    which kind of store it is: folder, environment, embedded, package or cache
    """

    def __init__(self, name: str, path: str | Path) -> None:
        self.name = name
        self.folder = Path(path)
        self.location = str(self.folder)

    def path(self, artifact: Artifact) -> Path:
        """Where the file of `artifact` is, or would be."""
        return Path(self.place(artifact))

    def place(self, artifact: Artifact) -> str:
        """The path as text."""
        candidates = self._candidates(artifact)
        return next(filter(os.path.exists, candidates), candidates[0])

    def read(self, artifact: Artifact) -> bytes | None:
        """The verified bytes; None if the store does not have them.

        Reads at most one byte more than the manifest promises. Raises IntegrityError when it holds other
        bytes under that name, OSError when it cannot be read.
        """
        file = self._open(artifact)
        if file is None:
            return None
        with file:
            data = file.read(artifact.size + 1)
        verify(artifact, data, file.name)
        return data

    def holds(self, artifact: Artifact) -> bool:
        """Whether `read` would return the bytes; never has all of them in memory. Raises like it."""
        file = self._open(artifact)
        if file is None:
            return False
        checker = Checker(artifact, file.name)
        with file:
            for chunk in file_chunks(file):
                checker.update(chunk)
        checker.finish()
        return True

    def _open(self, artifact: Artifact) -> BufferedReader | None:
        # Mostly there is none, and to be told so by `open` takes one call of the system, not two.
        for path in self._candidates(artifact):
            try:
                return open(path, "rb")
            except (FileNotFoundError, NotADirectoryError):  # noqa: PERF203  one or two
                continue
        return None

    def _candidates(self, artifact: Artifact) -> list[str]:
        return [f"{self.location}/{relative}" for relative in artifact.paths]


def lookup_order(
    settings: Settings, artifact: Artifact, folder: str | Path | None = None
) -> Iterator[FolderStore]:
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
    yield FolderStore("cache", settings.cache_dir)


class LocalStores:
    """`lookup_order` for many files: those of one set have the same stores, which are worked out once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._found: dict[tuple[str, bool], list[FolderStore]] = {}

    def of(self, artifact: Artifact) -> list[FolderStore]:
        """The stores that may have `artifact`, most specific first."""
        key = artifact.set_name, artifact.published is None
        if key not in self._found:
            self._found[key] = list(lookup_order(self._settings, artifact))
        return self._found[key]


def _installed(package: str) -> Iterator[FolderStore]:
    """The folder of an installed package that publishes the set of its name. The package is not imported."""
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    for location in (spec and spec.submodule_search_locations) or ():
        yield FolderStore("package", Path(location) / "cubins")


def locate(artifact: Artifact, stores: Iterable[FolderStore], attempts: list[Attempt]) -> Located | None:
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
            attempts.append(absence(store, artifact))
            continue
        path = store.place(artifact)
        warn_of_wrong_files(attempts, path)
        return Located(data, store.name, path, tuple(attempts))
    return None


def absence(store: FolderStore, artifact: Artifact) -> Attempt:
    """What a store answers that does not have the file."""
    sought = " or ".join(f"{store.location}/{path}" for path in artifact.paths)
    return Attempt(store.name, f"no file {sought}", False)


def warn_of_wrong_files(attempts: Sequence[Attempt], used: str) -> None:
    """Says once for each wrong file that it was passed over for the one at `used`."""
    for attempt in attempts:
        if attempt.corrupt:
            warn_once(f"{attempt.answer}. {used} is used instead; remove or replace the wrong file")
