"""Many threads, processes and users that want one file, and those of them that die or hang on the way."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests  # noqa: F401  imported now, because it may be out of reach after a change of user
from http_server import Reply, ScriptedServer, serving

from cubin_runtime import download, fetch, transfer
from cubin_runtime.cache import CacheStore
from cubin_runtime.errors import DownloadError
from cubin_runtime.fetch import obtain
from cubin_runtime.locks import locked
from cubin_runtime.manifest import Artifact
from cubin_runtime.settings import Settings
from cubin_runtime.store import Located

ROOT = Path(__file__).parent.parent
NOBODY = 65534

DATA = b"\x7fELF" + hashlib.sha256(b"seed").digest() * 4000
ARTIFACT = Artifact(
    name="k", set_name="fmha_sm90", version="1.0", sha256=hashlib.sha256(DATA).hexdigest(), size=len(DATA)
)

# Imports, says so, waits for a line, downloads and prints the digest of what it got.
CHILD = f"""
import hashlib, sys
import requests
from cubin_runtime.fetch import obtain
from cubin_runtime.locks import locked
from cubin_runtime.manifest import Artifact
artifact = {ARTIFACT!r}
print("ready", flush=True)
sys.stdin.readline()
print(hashlib.sha256(obtain(artifact).data).hexdigest(), flush=True)
"""


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving() as running:
        yield running


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user can enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def make_settings(folder: Path, *mirrors: str, lock_timeout: float = 20) -> Settings:
    return Settings(
        {
            "CUBIN_RUNTIME_CACHE_DIR": str(folder / "cache"),
            "CUBIN_RUNTIME_MIRRORS": " ".join(mirrors),
            "CUBIN_RUNTIME_LOCK_TIMEOUT": str(lock_timeout),
        }
    )


@contextlib.contextmanager
def child(folder: Path, url: str) -> Iterator[subprocess.Popen[str]]:
    environ = os.environ | {"CUBIN_RUNTIME_CACHE_DIR": str(folder / "cache"), "CUBIN_RUNTIME_MIRRORS": url}
    command = [sys.executable, "-c", CHILD]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line)
    process.stdin.flush()


def hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Root may do everything, so it steps down to see permissions at work."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def in_threads(count: int, work: Callable[[], Located]) -> list[Located | Exception]:
    """Results of `count` threads that start together."""
    barrier = threading.Barrier(count)

    def run() -> Located | Exception:
        barrier.wait()
        try:
            return work()
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(run) for _ in range(count)]]


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def tree(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}


def test_processes_and_threads_download_once(server: ScriptedServer, tmp_path: Path) -> None:
    url = server.script("m", Reply(DATA, delay=0.5))
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(child(tmp_path, url)) for _ in range(8)]
        assert [hear(process) for process in children] == ["ready"] * 8
        for process in children:
            tell(process, "go\n")
        results = in_threads(8, lambda: obtain(ARTIFACT, settings=make_settings(tmp_path, url)))
        assert [hear(process) for process in children] == [ARTIFACT.sha256] * 8
    assert all(isinstance(found, Located) and found.data == DATA for found in results)
    assert server.paths == [f"/m/{ARTIFACT.key}"]


@pytest.mark.parametrize("stage", ["answer", "body"])
def test_a_killed_downloader_hinders_nobody(server: ScriptedServer, tmp_path: Path, stage: str) -> None:
    slow = Reply(DATA, delay=60) if stage == "answer" else Reply(DATA, trickle=60)
    url = server.script("m", slow, Reply(DATA))
    with child(tmp_path, url) as process:
        tell(process, "go\n")
        wait_for(lambda: server.paths)
        process.kill()
        process.wait()
    assert obtain(ARTIFACT, settings=make_settings(tmp_path, url)).data == DATA
    assert len(server.paths) == 2


def test_what_a_killed_writer_leaves_is_ignored(server: ScriptedServer, tmp_path: Path) -> None:
    settings = make_settings(tmp_path, server.script("m", Reply(DATA)))
    cache = CacheStore(settings.cache_dir)
    leftover = cache.path(ARTIFACT).with_name(f".{ARTIFACT.sha256}.0123.tmp")
    leftover.parent.mkdir(parents=True)
    leftover.write_bytes(DATA[:100])
    assert obtain(ARTIFACT, settings=settings).data == DATA
    assert cache.read(ARTIFACT) == DATA


def test_a_holder_that_hangs_costs_the_timeout_and_no_more(server: ScriptedServer, tmp_path: Path) -> None:
    settings = make_settings(tmp_path, server.script("m", Reply(DATA)), lock_timeout=0.2)
    locks = settings.cache_dir / "locks"
    locks.mkdir(parents=True)
    with locked(locks / f"{ARTIFACT.sha256}.lock", timeout=1):
        began = time.monotonic()
        assert obtain(ARTIFACT, settings=settings).data == DATA
        assert 0.2 <= time.monotonic() - began < 5
    assert CacheStore(settings.cache_dir).read(ARTIFACT) == DATA


def test_the_cache_is_looked_into_again_after_the_wait(server: ScriptedServer, tmp_path: Path) -> None:
    settings = make_settings(tmp_path, server.script("m", Reply(DATA)))
    locks = settings.cache_dir / "locks"
    locks.mkdir(parents=True)
    with ThreadPoolExecutor(1) as pool:
        with locked(locks / f"{ARTIFACT.sha256}.lock", timeout=1):
            future = pool.submit(obtain, ARTIFACT, settings=settings)
            wait_for(lambda: fetch._flights)
            CacheStore(settings.cache_dir).write(ARTIFACT, DATA)
        found = future.result()
    assert (found.data, found.store) == (DATA, "cache")
    assert server.paths == []


def test_threads_share_a_download_that_cannot_be_kept(
    server: ScriptedServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_bytes(b"")  # a file where the folder would be
    settings = make_settings(tmp_path, server.script("m", Reply(DATA, delay=1)))
    results = in_threads(8, lambda: obtain(ARTIFACT, settings=settings))
    assert all(isinstance(found, Located) and found.data == DATA for found in results)
    assert len(server.paths) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_failure_is_shared_and_not_remembered(server: ScriptedServer, tmp_path: Path) -> None:
    url = server.script("m", Reply(status=404, delay=1), Reply(DATA))
    settings = make_settings(tmp_path, url)
    results = in_threads(4, lambda: obtain(ARTIFACT, settings=settings))
    assert all(isinstance(error, DownloadError) and "HTTP 404" in str(error) for error in results)
    assert len(server.paths) == 1
    assert obtain(ARTIFACT, settings=settings).data == DATA


def test_an_interrupt_stays_in_its_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entered, leave = threading.Event(), threading.Event()

    def interrupted(*args: object) -> Located:
        entered.set()
        leave.wait(20)
        raise KeyboardInterrupt

    monkeypatch.setattr(download, "download", interrupted)
    settings = make_settings(tmp_path, "http://127.0.0.1:9")
    with ThreadPoolExecutor(2) as pool:
        leader = pool.submit(obtain, ARTIFACT, settings=settings)
        entered.wait(20)
        follower = pool.submit(obtain, ARTIFACT, settings=settings)
        time.sleep(0.5)  # so that it waits for the leader
        leave.set()
        assert isinstance(leader.exception(), KeyboardInterrupt)
        assert isinstance(follower.exception(), DownloadError)
    assert fetch._flights == {}


def test_a_forked_child_does_not_wait_for_its_parents_threads(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(tmp_path, server.script("m", Reply(DATA, delay=60), Reply(DATA)), lock_timeout=0)
    monkeypatch.setattr(transfer, "BACKOFF", ())
    parent = os.getpid()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(obtain, ARTIFACT, settings=settings)
        wait_for(lambda: server.paths)
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: parent + 1)
            assert obtain(ARTIFACT, settings=settings).data == DATA
        server.closing.set()
        future.exception()


def test_a_read_only_warm_cache_serves_with_no_write(shared: Path) -> None:
    settings = make_settings(shared, "http://127.0.0.1:9")
    path = CacheStore(settings.cache_dir).write(ARTIFACT, DATA)
    path.parent.chmod(0o555)
    settings.cache_dir.chmod(0o555)
    before = tree(shared)
    try:
        with unprivileged():
            assert obtain(ARTIFACT, settings=settings).store == "cache"
        assert tree(shared) == before
    finally:
        settings.cache_dir.chmod(0o755)
        path.parent.chmod(0o755)


def test_a_read_only_cold_cache_costs_one_warning(
    server: ScriptedServer, shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = make_settings(shared, server.script("m", Reply(DATA)))
    settings.cache_dir.mkdir(mode=0o555)
    with unprivileged():
        for _ in range(2):
            assert obtain(ARTIFACT, settings=settings).data == DATA
    assert list(settings.cache_dir.iterdir()) == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    for text in (str(settings.cache_dir), "Permission denied", "CUBIN_RUNTIME_CACHE_DIR"):
        assert text in caplog.text


@pytest.mark.parametrize("mode", [0o600, 0o000])
def test_a_lock_of_another_user_is_gone_without(server: ScriptedServer, shared: Path, mode: int) -> None:
    settings = make_settings(shared, server.script("m", Reply(DATA)))
    (settings.cache_dir / "locks").mkdir(parents=True)
    lock = settings.cache_dir / "locks" / f"{ARTIFACT.sha256}.lock"
    lock.touch()
    lock.chmod(mode)
    settings.cache_dir.chmod(0o777)
    began = time.monotonic()
    with unprivileged():
        assert obtain(ARTIFACT, settings=settings).data == DATA
        assert CacheStore(settings.cache_dir).read(ARTIFACT) == DATA
    assert time.monotonic() - began < 5
