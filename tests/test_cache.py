"""Writing into the cache, and its upkeep while others use it."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from cubin_runtime.cache import CacheStore
from cubin_runtime.errors import IntegrityError, StoreWriteError
from cubin_runtime.manifest import Artifact

DATA = b"\x7fELF" + bytes(range(256)) * 40
ARTIFACT = Artifact(
    name="k", set_name="fmha_sm90", version="1.0", sha256=hashlib.sha256(DATA).hexdigest(), size=len(DATA)
)
PUBLISHED = msgspec.structs.replace(ARTIFACT, set_name="some_release", published="0a1b/fmha/k.cubin")
WRONG = {
    "shorter": DATA[:-1],
    "longer": DATA + b"x",
    "changed": DATA[:-1] + b"x",
    "empty": b"",
}


def files(folder: Path) -> list[str]:
    """Files below the folder, but for the tag."""
    found = [str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()]
    return sorted(path for path in found if not path.endswith("CACHEDIR.TAG"))


def put(folder: Path, data: bytes = DATA) -> Path:
    path = folder / ARTIFACT.key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_write_then_read(tmp_path: Path) -> None:
    cache = CacheStore(tmp_path / "deep" / "cache")
    path = cache.write(ARTIFACT, DATA)
    assert path == tmp_path / "deep" / "cache" / ARTIFACT.sha256[:2] / ARTIFACT.sha256
    assert cache.read(ARTIFACT) == DATA
    assert files(tmp_path) == [f"deep/cache/{ARTIFACT.key}"]


def test_write_replaces_a_wrong_file_and_follows_the_umask(tmp_path: Path) -> None:
    put(tmp_path, b"rotten")
    before = os.umask(0o027)
    try:
        path = CacheStore(tmp_path).write(ARTIFACT, DATA)
    finally:
        os.umask(before)
    assert path.read_bytes() == DATA
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_bytes_are_never_written(tmp_path: Path, wrong: bytes) -> None:
    with pytest.raises(IntegrityError):
        CacheStore(tmp_path / "cache").write(ARTIFACT, wrong)
    assert list(tmp_path.iterdir()) == []


def test_the_final_name_appears_after_the_bytes_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def fsync(descriptor: int) -> None:
        assert os.fstat(descriptor).st_size == len(DATA)
        seen.append(files(tmp_path))

    monkeypatch.setattr(os, "fsync", fsync)
    CacheStore(tmp_path).write(ARTIFACT, DATA)
    CacheStore(tmp_path).write(ARTIFACT, DATA)
    first, second = seen
    assert len(first) == 1
    assert re.fullmatch(rf"{ARTIFACT.sha256[:2]}/\.{ARTIFACT.sha256}\.\w+\.tmp", first[0])
    assert first[0] not in second, "the name of a temporary file must not repeat"


def failing(error: BaseException) -> Callable[[int], None]:
    def fsync(descriptor: int) -> None:
        raise error

    return fsync


def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CacheStore(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(OSError, match="No space left") as caught:
            cache.write(ARTIFACT, DATA)
    message = str(caught.value)
    assert isinstance(caught.value, StoreWriteError)
    assert re.search(rf"{len(DATA)} bytes needed, \d+ free", message)
    assert str(tmp_path) in message
    assert "CUBIN_RUNTIME_CACHE_DIR" in message
    assert files(tmp_path) == []
    assert cache.write(ARTIFACT, DATA).read_bytes() == DATA


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", failing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        CacheStore(tmp_path).write(ARTIFACT, DATA)
    assert files(tmp_path) == []


def test_a_failed_write_keeps_the_file_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CacheStore(tmp_path)
    cache.write(ARTIFACT, DATA)
    monkeypatch.setattr(os, "fsync", failing(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(StoreWriteError):
        cache.write(ARTIFACT, DATA)
    assert cache.read(ARTIFACT) == DATA
    assert files(tmp_path) == [ARTIFACT.key]


def test_a_cache_that_cannot_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreWriteError, match=r"file/cache.*Not a directory.*[1-9]\d* free"):
        CacheStore(tmp_path / "file" / "cache").write(ARTIFACT, DATA)


def test_reading_a_warm_cache_writes_nothing(tmp_path: Path) -> None:
    cache = CacheStore(tmp_path)
    cache.write(ARTIFACT, DATA)
    before = {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.rglob("*")]}
    assert cache.read(ARTIFACT) == DATA
    assert {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.rglob("*")]} == before


def test_the_cache_keeps_published_files_by_content(tmp_path: Path) -> None:
    assert CacheStore(tmp_path).write(PUBLISHED, DATA) == tmp_path / ARTIFACT.key
