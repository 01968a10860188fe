"""Whether bytes are those that the manifest names, judged while they pass or as a whole."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cubin_runtime.errors import IntegrityError
from cubin_runtime.manifest import Artifact

if TYPE_CHECKING:
    from io import BufferedReader

_CHUNK = 2**20  # bytes


class Checker:
    """Counts and hashes the bytes of one artifact, piece by piece. `source` says in messages where from."""

    def __init__(self, artifact: Artifact, source: str) -> None:
        self.source = source
        self._artifact = artifact
        self._hash = hashlib.sha256()
        self._size = 0

    def update(self, data: bytes | memoryview) -> None:
        """Takes the next piece; raises IntegrityError as soon as there is more than the manifest promises."""
        self._size += len(data)
        if self._size > self._artifact.size:
            raise self._error(f"more than {self._artifact.size} bytes, expected {self._artifact.size}")
        self._hash.update(data)

    def finish(self) -> None:
        """Raises IntegrityError unless what has passed is exactly the artifact."""
        if self._size != self._artifact.size:
            raise self._error(f"{self._size} bytes, expected {self._artifact.size}")
        digest = self._hash.hexdigest()
        if digest != self._artifact.sha256:
            raise self._error(f"sha256 {digest}, expected {self._artifact.sha256}")

    def _error(self, found: str) -> IntegrityError:
        return IntegrityError(f"{self.source} is not {self._artifact.name}: {found}")


def verify(artifact: Artifact, data: bytes, source: str) -> None:
    """Raises IntegrityError naming `source` unless `data` is exactly what the manifest promises."""
    checker = Checker(artifact, source)
    checker.update(data)
    checker.finish()


def file_chunks(file: BufferedReader) -> Iterator[memoryview]:
    """The bytes of a file just opened, in pieces, each of which is only good until the next."""
    buffer = memoryview(bytearray(min(_CHUNK, os.fstat(file.fileno()).st_size + 1)))
    while count := file.readinto(buffer):
        yield buffer[:count]


def file_sha256(path: str | Path) -> str:
    """The digest of a file, of which only a piece is in memory at a time."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for chunk in file_chunks(file):
            digest.update(chunk)
    return digest.hexdigest()
