from __future__ import annotations

import contextlib
import email.utils
import errno
import gzip
import hashlib
import itertools
import os
import socket
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from http_server import Reply, ScriptedServer, serving

from cubin_runtime import explain, transfer
from cubin_runtime.cache import CacheStore
from cubin_runtime.errors import ArtifactNotFoundError, DownloadError, IntegrityError, OfflineError
from cubin_runtime.fetch import obtain
from cubin_runtime.manifest import Artifact, default_manifest
from cubin_runtime.mirrors import Body
from cubin_runtime.settings import Settings

DATA = b"\x7fELF" + hashlib.sha256(b"seed").digest() * 4000
ARTIFACT = Artifact(
    name="k", set_name="fmha_sm90", version="1.0", sha256=hashlib.sha256(DATA).hexdigest(), size=len(DATA)
)
OK = Reply(DATA)
ERROR_PAGE = Reply(b"<h1>Sign in</h1>", headers={"Content-Type": "text/html"})


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving() as running:
        yield running


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Takes the place of the pauses between tries."""
    pauses: list[float] = []
    clock = types.SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic)
    monkeypatch.setattr(transfer, "time", clock)
    monkeypatch.setattr(transfer, "_jittered", lambda seconds: seconds)
    return pauses


@pytest.fixture
def no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        pytest.fail("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)


def make_settings(folder: Path, *mirrors: str, **variables: str) -> Settings:
    environ = {
        "CACHE_DIR": str(folder / "cache"),
        "MIRRORS": " ".join(mirrors),
        "HTTP_TIMEOUT": "5",
        **variables,
    }
    return Settings({f"CUBIN_RUNTIME_{name}": value for name, value in environ.items()})


def cached(folder: Path) -> list[str]:
    """Files in the cache, without locks and tag."""
    cache = folder / "cache"
    found = [str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file()]
    return sorted(path for path in found if path != "CACHEDIR.TAG" and not path.startswith("locks/"))


class NoMirror:
    """Fails the test that asks it for something."""

    location = "nowhere"

    def open(self, path: str, artifact: Artifact, start: int) -> contextlib.AbstractContextManager[Body]:
        pytest.fail("a mirror was asked")


def test_download_is_kept_and_not_repeated(server: ScriptedServer, tmp_path: Path) -> None:
    settings = make_settings(tmp_path, server.script("m", OK))
    first = obtain(ARTIFACT, settings=settings)
    second = obtain(ARTIFACT, settings=settings)
    assert first.data == second.data == DATA
    assert (first.store, second.store) == ("mirror", "cache")
    assert first.path.endswith(f"/m/{ARTIFACT.key}")
    assert [attempt.store for attempt in first.attempts] == ["embedded", "cache"]
    assert server.paths == [f"/m/{ARTIFACT.key}"]
    assert cached(tmp_path) == [ARTIFACT.key]


@pytest.mark.parametrize("slashes", ["", "/", "//"])
def test_one_form_of_url(server: ScriptedServer, tmp_path: Path, slashes: str) -> None:
    obtain(ARTIFACT, settings=make_settings(tmp_path, server.script("m", OK) + slashes))
    assert server.paths == [f"/m/{ARTIFACT.key}"]


def test_local_stores_come_first(server: ScriptedServer, tmp_path: Path) -> None:
    settings = make_settings(tmp_path, "http://127.0.0.1:9", ARTIFACT_DIR=str(tmp_path / "environment"))
    for store in ("environment", "folder"):
        CacheStore(tmp_path / store).write(ARTIFACT, DATA)
        found = obtain(ARTIFACT, folder=tmp_path / "folder", settings=settings, mirrors=[NoMirror()])
        assert (found.store, found.data) == (store, DATA)
    assert not (tmp_path / "cache").exists()


def test_a_refusal_is_not_retried_and_the_next_mirror_is_asked(
    server: ScriptedServer, tmp_path: Path, sleeps: list[float]
) -> None:
    urls = [
        server.script("a", Reply(status=403)),
        server.script("b", Reply(status=404)),
        server.script("c", OK),
    ]
    found = obtain(ARTIFACT, settings=make_settings(tmp_path, *urls))
    assert found.data == DATA
    assert [path[1] for path in server.paths] == ["a", "b", "c"]
    assert sleeps == []
    assert [attempt.answer.split(": ")[1] for attempt in found.attempts[-2:]] == [
        "HTTP 403 Forbidden",
        "HTTP 404 Not Found",
    ]


def test_all_mirrors_fail(server: ScriptedServer, tmp_path: Path) -> None:
    urls = [server.script(name, Reply(status=403)) for name in "ab"]
    with pytest.raises(DownloadError) as caught:
        obtain(ARTIFACT, settings=make_settings(tmp_path, *urls))
    for url in urls:
        assert f"{url}/{ARTIFACT.key}: HTTP 403 Forbidden" in str(caught.value)
    assert "CUBIN_RUNTIME_MIRRORS" in str(caught.value)
    assert "CUBIN_RUNTIME_ARTIFACT_DIR" in str(caught.value)
    assert cached(tmp_path) == []


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_what_may_pass_is_retried_in_place(
    server: ScriptedServer, tmp_path: Path, sleeps: list[float], status: int
) -> None:
    url = server.script("m", *[Reply(status=status)] * 4, OK)
    assert obtain(ARTIFACT, settings=make_settings(tmp_path, url)).data == DATA
    assert len(server.paths) == 5
    assert sleeps == list(transfer.BACKOFF)


def test_retries_are_bounded(server: ScriptedServer, tmp_path: Path, sleeps: list[float]) -> None:
    urls = [server.script("a", Reply(status=502)), server.script("b", OK)]
    assert obtain(ARTIFACT, settings=make_settings(tmp_path, *urls)).data == DATA
    assert [path[1] for path in server.paths] == ["a"] * 5 + ["b"]


@pytest.mark.parametrize(
    ("header", "pause"),
    [("7", 7), ("0", 0), ("soon", 0), ("-3", 0), ("Mon, 99 Foo 99999", 0)],
)
def test_retry_after(
    server: ScriptedServer, tmp_path: Path, sleeps: list[float], header: str, pause: float
) -> None:
    url = server.script("m", Reply(status=429, headers={"Retry-After": header}), OK)
    assert obtain(ARTIFACT, settings=make_settings(tmp_path, url)).data == DATA
    assert sleeps == [pause + transfer.BACKOFF[0]]


def test_retry_after_as_a_date(server: ScriptedServer, tmp_path: Path, sleeps: list[float]) -> None:
    date = email.utils.formatdate(time.time() + 20, usegmt=True)
    url = server.script("m", Reply(status=503, headers={"Retry-After": date}), OK)
    assert obtain(ARTIFACT, settings=make_settings(tmp_path, url)).data == DATA
    assert 10 < sleeps[0] <= 20 + transfer.BACKOFF[0]


def test_a_mirror_that_asks_for_a_long_pause_is_passed_over(
    server: ScriptedServer, tmp_path: Path, sleeps: list[float]
) -> None:
    busy = Reply(status=429, headers={"Retry-After": "9" * 400})
    urls = [server.script("a", busy), server.script("b", OK)]
    assert obtain(ARTIFACT, settings=make_settings(tmp_path, *urls)).data == DATA
    assert [path[1] for path in server.paths] == ["a", "b"]
    assert sleeps == []


FAULTS = {
    "stalls before the answer": (Reply(delay=60), 5, "timed out"),
    "stalls in the body": (Reply(DATA[:10], length=len(DATA), trickle=60), 5, "timed out"),
    "is cut short": (Reply(DATA[:-1], length=len(DATA)), 5, "IncompleteRead"),
    "is cut short unnoticed": (Reply(DATA[:-1], length=None), 5, "ended after"),
    "is empty": (Reply(b"", length=None), 5, "ended after 0"),
    "has wrong bytes": (Reply(DATA[:-1] + b"x"), 1, "sha256"),
    "is too long": (Reply(DATA + b"x"), 1, "expected"),
    "never ends": (Reply(DATA, endless=True), 1, "more than"),
    "is an error page": (ERROR_PAGE, 1, "text/html"),
    "unpacks to too much": (
        Reply(gzip.compress(bytes(50 * 2**20)), headers={"Content-Encoding": "gzip"}),
        1,
        "more than",
    ),
    "is not what its encoding says": (Reply(DATA, headers={"Content-Encoding": "gzip"}), 5, "decode"),
    "is an empty success": (Reply(status=204), 1, "HTTP 204"),
}


@pytest.mark.parametrize(("fault", "tries", "reason"), FAULTS.values(), ids=FAULTS)
def test_a_bad_body_never_gets_through(
    server: ScriptedServer, tmp_path: Path, sleeps: list[float], fault: Reply, tries: int, reason: str
) -> None:
    bad = server.script("bad", fault)
    with pytest.raises((DownloadError, IntegrityError), match=reason) as caught:
        obtain(ARTIFACT, settings=make_settings(tmp_path, bad, HTTP_TIMEOUT="0.3"))
    assert f"{bad}/{ARTIFACT.key}" in str(caught.value)
    assert isinstance(caught.value, IntegrityError) == (tries == 1 and fault.status == 200)
    assert cached(tmp_path) == []
    assert len(server.paths) == tries

    both = make_settings(tmp_path, bad, server.script("good", OK), HTTP_TIMEOUT="0.3")
    assert obtain(ARTIFACT, settings=both).data == DATA
    assert cached(tmp_path) == [ARTIFACT.key]


def test_a_trickle_meets_the_deadline(
    server: ScriptedServer, tmp_path: Path, sleeps: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "MIN_RATE", 2**40)
    slow = server.script("slow", Reply(DATA, trickle=0.02))
    began = time.monotonic()
    with pytest.raises(DownloadError, match="too slow"):
        obtain(ARTIFACT, settings=make_settings(tmp_path, slow, HTTP_TIMEOUT="0.2"))
    assert time.monotonic() - began < 5


def test_a_body_that_the_server_compressed(server: ScriptedServer, tmp_path: Path) -> None:
    packed = Reply(gzip.compress(DATA), headers={"Content-Encoding": "gzip"})
    assert obtain(ARTIFACT, settings=make_settings(tmp_path, server.script("m", packed))).data == DATA


def test_a_server_without_tls_is_not_retried(
    server: ScriptedServer, tmp_path: Path, sleeps: list[float]
) -> None:
    url = server.script("m", OK).replace("http:", "https:")
    with pytest.raises(DownloadError, match="SSL"):
        obtain(ARTIFACT, settings=make_settings(tmp_path, url))
    assert sleeps == []


def test_passwords_are_used_and_not_shown(server: ScriptedServer, tmp_path: Path) -> None:
    url = server.script("m", Reply(status=401)).replace("//", "//user:secret@")
    with pytest.raises(DownloadError) as caught:
        obtain(ARTIFACT, settings=make_settings(tmp_path, url))
    assert "HTTP 401" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.usefixtures("no_socket")
@pytest.mark.parametrize("offline", ["0", "1"])
def test_file_mirror_needs_no_network(tmp_path: Path, offline: str) -> None:
    CacheStore(tmp_path / "a b").write(ARTIFACT, DATA)
    settings = make_settings(tmp_path, f"file://{tmp_path}/a%20b/", OFFLINE=offline)
    found = obtain(ARTIFACT, settings=settings)
    assert (found.store, found.path) == ("mirror", f"{tmp_path}/a b/{ARTIFACT.key}")
    assert cached(tmp_path) == [ARTIFACT.key]


def test_no_mirror(tmp_path: Path) -> None:
    with pytest.raises(ArtifactNotFoundError) as caught:
        obtain(ARTIFACT, settings=make_settings(tmp_path))
    for text in ("k ", str(tmp_path / "cache"), "CUBIN_RUNTIME_MIRRORS", "CUBIN_RUNTIME_CACHE_DIR"):
        assert text in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_socket")
def test_offline_opens_no_socket(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, "https://mirror.invalid/x s3://bucket", OFFLINE="1")
    path = CacheStore(settings.cache_dir).write(ARTIFACT, DATA)
    assert obtain(ARTIFACT, settings=settings).store == "cache"
    path.unlink()
    with pytest.raises(OfflineError, match="`cubin-runtime fetch --row k --dest DIR`") as caught:
        obtain(ARTIFACT, settings=settings)
    assert "CUBIN_RUNTIME_OFFLINE" in str(caught.value)


@pytest.mark.usefixtures("no_socket")
def test_offline_explains_and_has_the_bytes_of_what_it_chose(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, "https://mirror.invalid/x", OFFLINE="1")
    row = explain(arch="sm_90a").require()
    assert obtain(default_manifest().find(row.name), settings=settings).store == "embedded"
    assert list(tmp_path.iterdir()) == []


def test_a_present_file_needs_no_cache_and_no_mirror_settings() -> None:
    environ = {"CUBIN_RUNTIME_CACHE_DIR": "a\0b", "CUBIN_RUNTIME_MIRRORS": "nonsense"}
    row = explain(arch="sm_90a").require()
    assert obtain(default_manifest().find(row.name), settings=Settings(environ)).store == "embedded"


def test_dead_network_serves_cached_files_at_once(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, "http://127.0.0.1:9")
    CacheStore(settings.cache_dir).write(ARTIFACT, DATA)
    assert obtain(ARTIFACT, settings=settings, mirrors=[NoMirror()]).store == "cache"


def test_dead_network_is_a_download_error(tmp_path: Path, sleeps: list[float]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/m"
        with pytest.raises(DownloadError, match="Connection refused"):
            obtain(ARTIFACT, settings=make_settings(tmp_path, url))


def test_a_rotten_cache_file_is_replaced(
    server: ScriptedServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = make_settings(tmp_path, server.script("m", OK))
    path = CacheStore(settings.cache_dir).write(ARTIFACT, DATA)
    path.write_bytes(DATA[:-1])
    found = obtain(ARTIFACT, settings=settings)
    assert (found.store, found.data) == ("mirror", DATA)
    assert path.read_bytes() == DATA
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(path) in caplog.text


@pytest.mark.parametrize("offline", ["0", "1"])
def test_a_rotten_file_alone_is_an_integrity_error(tmp_path: Path, offline: str) -> None:
    settings = make_settings(tmp_path, OFFLINE=offline)
    path = CacheStore(settings.cache_dir).write(ARTIFACT, DATA)
    path.write_bytes(DATA[:-1])
    with pytest.raises(IntegrityError, match="Remove or replace") as caught:
        obtain(ARTIFACT, settings=settings)
    assert str(path) in str(caught.value)


def test_full_disk_costs_a_warning_and_not_the_result(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    settings = make_settings(tmp_path, server.script("m", OK))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        free = itertools.count()  # the warning is one, though what it says changes
        patch.setattr("cubin_runtime.cache._free_bytes", lambda path: 2**30 + next(free))
        for _ in range(2):
            assert obtain(ARTIFACT, settings=settings).data == DATA
    assert cached(tmp_path) == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"{len(DATA)} bytes needed" in caplog.text
    obtain(ARTIFACT, settings=settings)
    assert cached(tmp_path) == [ARTIFACT.key]


def test_the_system_temporary_folder_is_not_used(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "absent"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    obtain(ARTIFACT, settings=make_settings(tmp_path, server.script("m", OK)))
    assert cached(tmp_path) == [ARTIFACT.key]
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize(("first", "asked"), [(404, ["key", "published"]), (200, ["key"])])
def test_a_mirror_may_have_the_publishers_layout(
    server: ScriptedServer, tmp_path: Path, first: int, asked: list[str]
) -> None:
    artifact = msgspec.structs.replace(ARTIFACT, published="0a1b/fmha/k.cubin")
    url = server.script("m", Reply(DATA, first), Reply(DATA))
    assert obtain(artifact, settings=make_settings(tmp_path, url)).data == DATA
    paths = {"key": f"/m/{artifact.key}", "published": "/m/0a1b/fmha/k.cubin"}
    assert server.paths == [paths[each] for each in asked]


def test_a_mirror_that_has_neither_layout(server: ScriptedServer, tmp_path: Path) -> None:
    artifact = msgspec.structs.replace(ARTIFACT, published="0a1b/fmha/k.cubin")
    url = server.script("m", Reply(status=404))
    with pytest.raises(DownloadError, match="404"):
        obtain(artifact, settings=make_settings(tmp_path, url))
    assert len(server.paths) == 2
