"""Writing into the cache, and its upkeep while others use it."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from cubin_runtime.cache import CacheStore, WritableStore
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


# ---- upkeep


def make_artifact(data: bytes) -> Artifact:
    return Artifact(
        name="k", set_name="s", version="1", sha256=hashlib.sha256(data).hexdigest(), size=len(data)
    )


def fill(cache: CacheStore, *contents: bytes) -> list[Path]:
    """Writes files that were used one after the other, long ago."""
    paths = [cache.write(make_artifact(data), data) for data in contents]
    for number, path in enumerate(paths):
        os.utime(path, (1e9 + number, 1e9 + number))
    return paths


def test_backups_pass_over_a_new_cache_only(tmp_path: Path) -> None:
    CacheStore(tmp_path / "new").write(ARTIFACT, DATA)
    tag = (tmp_path / "new" / "CACHEDIR.TAG").read_text()
    assert tag.startswith("Signature: 8a477f597d28d172789f06886806bc55\n")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    CacheStore(tmp_path / "home").write(ARTIFACT, DATA)
    assert not (tmp_path / "home" / "CACHEDIR.TAG").exists()
    WritableStore("destination", tmp_path / "dest").write(ARTIFACT, DATA)
    assert not (tmp_path / "dest" / "CACHEDIR.TAG").exists()


def test_entries_are_cubins_and_nothing_else(tmp_path: Path) -> None:
    cache = CacheStore(tmp_path)
    assert CacheStore(tmp_path / "absent").entries() == []
    paths = fill(cache, b"a", b"bb")
    for name in (f".{ARTIFACT.sha256}.0.tmp", "note", "ab" * 31):
        (paths[0].parent / name).touch()
    assert [(entry.path, entry.size) for entry in cache.entries()] == [(paths[0], 1), (paths[1], 2)]


def test_a_link_in_place_of_a_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    cache = CacheStore(tmp_path / "cache")
    path = cache.path(ARTIFACT)
    path.parent.mkdir(parents=True)
    path.symlink_to(victim)
    with pytest.raises(IntegrityError):
        cache.read(ARTIFACT)
    assert cache.write(ARTIFACT, DATA) == path
    assert (path.is_symlink(), path.read_bytes(), victim.read_bytes()) == (False, DATA, b"precious")


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    cache = CacheStore(tmp_path)
    paths = fill(cache, b"a" * 10, b"b" * 10, b"c" * 10)
    os.utime(paths[0], (2e9, 1e9))  # read since
    removed = cache.prune(max_size=15)
    assert [entry.path for entry in removed] == [paths[1], paths[2]]
    assert cache.prune(max_size=15) == []
    assert cache.prune(max_size=0, keep=[paths[0].name]) == []
    assert paths[0].exists()


def test_pruning_without_rules_removes_what_was_abandoned(tmp_path: Path) -> None:
    cache = CacheStore(tmp_path)
    (path,) = fill(cache, b"a")
    part = path.with_name(f".{path.name}.0123.tmp")
    part.touch()
    with cache.receive(ARTIFACT) as partial:
        assert cache.prune() == []
        assert Path(partial.path).exists(), "it is in use"
    assert path.exists()
    assert not part.exists()


def test_a_reader_keeps_a_file_that_is_removed(tmp_path: Path) -> None:
    cache = CacheStore(tmp_path)
    (path,) = fill(cache, DATA)
    with path.open("rb") as reader:
        assert len(cache.prune(max_size=0)) == 1
        assert reader.read() == DATA
    assert cache.read(ARTIFACT) is None


def test_what_somebody_else_removes_meanwhile_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CacheStore(tmp_path)
    paths = fill(cache, b"a", b"b")
    entries = cache.entries()
    paths[0].unlink()
    assert cache.is_sound(entries[0])
    monkeypatch.setattr(cache, "entries", lambda: entries)
    assert [entry.path for entry in cache.prune(max_size=0)] == [paths[1]]


def test_soundness_is_the_digest_in_the_name(tmp_path: Path) -> None:
    cache = CacheStore(tmp_path)
    (path,) = fill(cache, DATA)
    (entry,) = cache.entries()
    assert cache.is_sound(entry)
    path.write_bytes(DATA[:-1] + b"x")
    assert not cache.is_sound(entry)


def test_too_little_space_is_noticed_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cubin_runtime.cache._free_bytes", lambda path: len(DATA) - 1)
    with pytest.raises(StoreWriteError, match=f"{len(DATA)} bytes needed, {len(DATA) - 1} free"):
        CacheStore(tmp_path).write(ARTIFACT, DATA)
    assert files(tmp_path) == []


@pytest.mark.slow
def test_reading_goes_on_while_others_write_and_prune(tmp_path: Path) -> None:
    cache = CacheStore(tmp_path)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            cache.write(ARTIFACT, DATA)

    def prune() -> None:
        while not stop.is_set():
            cache.prune(max_size=0)

    with ThreadPoolExecutor(2) as pool:
        workers = [pool.submit(write), pool.submit(prune)]
        found = [cache.read(ARTIFACT) for _ in range(2000)]
        while found[-1] is None and len(found) < 200_000:  # a busy machine may not let the writer run
            found.append(cache.read(ARTIFACT))
        stop.set()
        for worker in workers:
            worker.result()
    assert set(found) == {None, DATA}
