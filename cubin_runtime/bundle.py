"""Cubins for where there is no network: one archive, or a tree that any web server or bucket can serve.

Both hold the files by content, `<sha256[:2]>/<sha256>`, as the package's own store does, and a
cubins_manifest.yaml that names them. An archive is a plain tar of that tree, the same bytes for the same
contents; unpacked anywhere, it is a folder for CUBIN_RUNTIME_ARTIFACT_DIR, or a mirror.

Neither is trusted: what is imported is verified against the manifest of the package.
"""

from __future__ import annotations

import contextlib
import os
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, NamedTuple

from cubin_runtime.download import holder
from cubin_runtime.errors import ArtifactNotFoundError, IntegrityError, StoreWriteError
from cubin_runtime.integrity import Checker, file_chunks
from cubin_runtime.manifest import FILE_NAME, MAX_MANIFEST_SIZE, Artifact, Manifest
from cubin_runtime.mirrors import CHUNK, Body, MissingError
from cubin_runtime.settings import Settings, settings
from cubin_runtime.store import FolderStore, LocalStores

_BLOCK = 512  # bytes; everything in a tar begins at a multiple of it


class Member(NamedTuple):
    """Where the bytes of a file are in the archive."""

    offset: int
    size: int


class Bundle:
    """An archive, as a mirror of the files in it; see mirrors.Mirror. Reads headers only, until it is asked.

    Raises IntegrityError for what is not a bundle: links, devices, names other than those of its files.
    """

    def __init__(self, path: Path) -> None:
        self.location = str(path)
        self._path = path
        with path.open("rb") as file:
            self._members = dict(_members(file, self.location))

    @property
    def keys(self) -> frozenset[str]:
        """Relative paths of the files."""
        return frozenset(self._members) - {FILE_NAME}

    def manifest(self) -> Manifest:
        """What the archive says that it holds. Nobody vouches for that."""
        member = self._members.get(FILE_NAME)
        if member is None or member.size > MAX_MANIFEST_SIZE:
            raise IntegrityError(f"{self.location} has no usable {FILE_NAME}; it is no bundle")
        with self._path.open("rb") as file:
            file.seek(member.offset)
            return Manifest.from_yaml(file.read(member.size), source=f"{FILE_NAME} in {self.location}")

    @contextlib.contextmanager
    def open(self, path: str, artifact: Artifact, start: int) -> Iterator[Body]:
        """See Mirror.open."""
        member = self._members.get(path)
        if member is None:
            raise MissingError(f"no file {path} in {self.location}")
        if member.size != artifact.size:
            raise IntegrityError(
                f"{path} in {self.location} is not {artifact.name}: {member.size} bytes, "
                f"expected {artifact.size}"
            )
        with self._path.open("rb", buffering=0) as file:
            file.seek(member.offset + start)
            yield Body(start, _read(file, member.size - start))


def export(path: Path, artifacts: Iterable[Artifact], settings: Settings = settings) -> None:
    """Writes an archive of these files, which must be on this machine, and replaces `path` with it.

    Raises ArtifactNotFoundError naming those that are not, StoreWriteError where there is no room.
    """
    chosen = {artifact.name: artifact for artifact in artifacts}
    manifest = Manifest(artifacts=chosen).to_yaml().encode()
    sources = _sources(chosen, settings)
    try:
        with _replacing(path) as file:
            _write_member(file, FILE_NAME, len(manifest), [manifest])
            for key, (artifact, source) in sorted(sources.items()):
                _write_member(file, key, artifact.size, _verified(artifact, source.path(artifact)))
            file.write(bytes(2 * _BLOCK))
    except IntegrityError:
        raise
    except OSError as error:
        raise StoreWriteError(f"cannot write {path}: {error.strerror or error}") from error


def write_manifest(folder: Path, artifacts: Iterable[Artifact]) -> Path:
    """Puts the manifest of these files beside them, for others to read; returns its path."""
    path = folder / FILE_NAME
    text = Manifest(artifacts={artifact.name: artifact for artifact in artifacts}).to_yaml()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise StoreWriteError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def stale_sets(bundle: Manifest, ours: Manifest) -> Iterator[str]:
    """For each set whose files the package does not know: both versions, and what to do about it."""
    digests = {artifact.sha256 for artifact in ours.artifacts.values()}
    versions = {artifact.set_name: artifact.version for artifact in ours.artifacts.values()}
    unknown = [a for a in bundle.artifacts.values() if a.sha256 not in digests]
    for set_name, version in sorted({(a.set_name, a.version) for a in unknown}):
        count = sum(a.set_name == set_name for a in unknown)
        known = versions.get(set_name)
        # A local label (0.1.0+cu130) says where it was built and not which release it is.
        if known and known.partition("+")[0] != version.partition("+")[0]:
            cause = f"this package has version {known}; export a bundle from that one"
        elif known:
            cause = (
                f"this package has version {known} with other bytes; export the bundle from the same build"
            )
        else:
            cause = "this package has no such set; let CUBIN_RUNTIME_MANIFESTS name its manifest"
        yield f"{count} files of {set_name} {version} are passed over: {cause}"


def _sources(
    artifacts: Mapping[str, Artifact], settings: Settings
) -> dict[str, tuple[Artifact, FolderStore]]:
    """A store that has the right bytes, for each file by its key."""
    stores = LocalStores(settings)
    found, missing = {}, []
    for artifact in artifacts.values():
        store = holder(artifact, stores.of(artifact), [])
        if store is None:
            missing.append(artifact.name)
        else:
            found[artifact.key] = (artifact, store)
    if missing:
        raise ArtifactNotFoundError(
            f"{len(missing)} of {len(artifacts)} files are not on this machine ({', '.join(missing[:3])}"
            f"{' ...' if len(missing) > 3 else ''}); bring them with cubin-runtime fetch"
        )
    return found


def _write_member(file: IO[bytes], name: str, size: int, chunks: Iterable[bytes | memoryview]) -> None:
    """The same bytes for the same file, wherever and whenever it is written."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    file.write(info.tobuf(tarfile.USTAR_FORMAT))
    for chunk in chunks:
        file.write(chunk)
    file.write(bytes(-size % _BLOCK))


def _verified(artifact: Artifact, path: Path) -> Iterator[memoryview]:
    """The bytes of a file; raises IntegrityError before the end unless they are the artifact's."""
    checker = Checker(artifact, str(path))
    with path.open("rb") as file:
        for chunk in file_chunks(file):
            checker.update(chunk)
            yield chunk
    checker.finish()


def _members(file: IO[bytes], source: str) -> Iterator[tuple[str, Member]]:
    """Walks the headers by hand: the reader in tarfile follows links and takes headers of any size."""
    end = file.seek(0, os.SEEK_END)
    position = 0
    while True:
        file.seek(position)
        block = file.read(_BLOCK)
        if block == bytes(_BLOCK):
            return
        try:
            info = tarfile.TarInfo.frombuf(block, "ascii", "strict")
        except (tarfile.HeaderError, UnicodeDecodeError, ValueError) as error:
            raise IntegrityError(f"{source} is no bundle: byte {position}: {error}") from None
        offset, name = position + _BLOCK, info.name.removeprefix("./")
        position = offset + -(-info.size // _BLOCK) * _BLOCK
        if info.isdir() and info.size == 0:  # of an unpacked tree that was packed again
            continue
        if not (info.isreg() and info.size >= 0 and position <= end and _is_ours(name)):
            raise IntegrityError(
                f"{source} is no bundle: {name!r} (type {info.type!r}, {info.size} bytes) has no place in one"
            )
        yield name, Member(offset, info.size)


def _is_ours(name: str) -> bool:
    folder, _, digest = name.partition("/")
    is_key = len(digest) == 64 and set(digest) <= set("0123456789abcdef") and digest[:2] == folder
    return is_key or name == FILE_NAME


def _read(file: IO[bytes], size: int) -> Iterator[bytes]:
    while size > 0 and (chunk := file.read(min(CHUNK, size))):
        size -= len(chunk)
        yield chunk


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of `path` once it is whole and on disk."""
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
