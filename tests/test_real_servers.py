"""Downloads from nginx, through a proxy, with a private authority, from a bucket, onto a small disk."""

from __future__ import annotations

import gzip
import hashlib
import os
import random
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cubin_runtime import transfer
from cubin_runtime.batch import Outcome, fetch_all
from cubin_runtime.cache import CacheStore, WritableStore
from cubin_runtime.errors import DownloadError, SettingError, StoreWriteError
from cubin_runtime.fetch import obtain
from cubin_runtime.manifest import Artifact
from cubin_runtime.mirrors import open_mirrors
from cubin_runtime.partial import KEEP_FROM
from cubin_runtime.settings import Settings
from cubin_runtime.transfer import Transfers
from tests.real_servers import (
    bucket_server,
    make_authority,
    needs_nginx,
    needs_openssl,
    needs_proxy,
    nginx,
    proxy,
)

RANDOM = random.Random(3)
CONTENTS = [RANDOM.randbytes(size) for size in (100, 130_000, 1_000_000, 3 * KEEP_FROM)]


def artifact(data: bytes, name: str = "k") -> Artifact:
    digest = hashlib.sha256(data).hexdigest()
    return Artifact(name=name, set_name="fmha_sm90", version="1", sha256=digest, size=len(data))


ARTIFACTS = [artifact(data, f"k{number}") for number, data in enumerate(CONTENTS)]
LARGE, LARGE_DATA = ARTIFACTS[-1], CONTENTS[-1]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "BACKOFF", (0.0, 0.0))


@pytest.fixture(autouse=True)
def clean_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_") or name.upper().endswith(("_PROXY", "_CA_BUNDLE")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The static layout of all files."""
    store = WritableStore("destination", tmp_path / "tree")
    for each, data in zip(ARTIFACTS, CONTENTS, strict=True):
        store.write(each, data)
    return tmp_path / "tree"


def make_settings(cache: Path, *mirrors: str, **variables: str) -> Settings:
    environ = {"CACHE_DIR": str(cache), "MIRRORS": " ".join(mirrors), "HTTP_TIMEOUT": "5", **variables}
    return Settings({f"CUBIN_RUNTIME_{name}": value for name, value in environ.items()})


def bring(settings: Settings) -> list[Outcome]:
    with open_mirrors(settings, connections=4) as mirrors:
        return fetch_all(ARTIFACTS, Transfers(mirrors, 5), settings=settings, jobs=4)


def assert_all_here(settings: Settings) -> None:
    for each, data in zip(ARTIFACTS, CONTENTS, strict=True):
        assert CacheStore(settings.cache_dir).read(each) == data


def log(folder: Path) -> list[str]:
    return (folder / "access.log").read_text().splitlines()


@needs_nginx
def test_nginx_serves_the_tree_as_it_is(tree: Path, tmp_path: Path) -> None:
    with nginx(tmp_path / "nginx", tree) as url:
        settings = make_settings(tmp_path / "cache", url)
        outcomes = bring(settings)
        assert [outcome.error for outcome in outcomes] == [None] * len(ARTIFACTS)
        bring(settings)
    assert_all_here(settings)
    assert sorted(log(tmp_path / "nginx")) == sorted(f'200 "-" /{each.key}' for each in ARTIFACTS)


@needs_nginx
def test_a_connection_serves_many_files_and_misses(
    tree: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    missing, *present = ARTIFACTS
    (tree / missing.key).unlink()
    with (
        nginx(tmp_path / "nginx", tree) as url,
        open_mirrors(make_settings(tmp_path / "cache", url)) as mirrors,
        caplog.at_level("DEBUG", "urllib3"),
    ):
        settings = make_settings(tmp_path / "cache")
        outcomes = fetch_all([missing, *present], Transfers(mirrors, 5), settings=settings, jobs=1)
    assert [outcome.error is None for outcome in outcomes] == [False, True, True, True]
    assert sum("Starting new HTTP connection" in message for message in caplog.messages) == 1


@needs_nginx
def test_nginx_continues_a_part(tree: Path, tmp_path: Path) -> None:
    settings = make_settings(tmp_path / "cache")
    part = tmp_path / "cache" / LARGE.sha256[:2] / f".{LARGE.sha256}.0123.tmp"
    part.parent.mkdir(parents=True)
    part.write_bytes(LARGE_DATA[:KEEP_FROM])
    with nginx(tmp_path / "nginx", tree) as url:
        settings = make_settings(tmp_path / "cache", url)
        assert obtain(LARGE, settings=settings).data == LARGE_DATA
    assert log(tmp_path / "nginx") == [f'206 "bytes={KEEP_FROM}-" /{LARGE.key}']


@needs_nginx
def test_nginx_that_limits_requests_is_asked_again(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "BACKOFF", (0.1,) * 50)
    busy = "location / { add_header Retry-After 0 always; if (-f $document_root/busy) { return 429; } }"
    (tree / "busy").touch()
    waits = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            (tree / "busy").unlink()

    clock = types.SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
    monkeypatch.setattr(transfer, "time", clock)
    with nginx(tmp_path / "nginx", tree, busy) as url:
        assert obtain(LARGE, settings=make_settings(tmp_path / "cache", url)).data == LARGE_DATA
    assert [line[:3] for line in log(tmp_path / "nginx")] == ["429"] * 3 + ["200"]


@needs_nginx
def test_nginx_that_sends_compressed_files_anyway(tree: Path, tmp_path: Path) -> None:
    for each, data in zip(ARTIFACTS, CONTENTS, strict=True):
        (tree / each.key).write_bytes(gzip.compress(data))
    with nginx(tmp_path / "nginx", tree, "add_header Content-Encoding gzip;") as url:
        settings = make_settings(tmp_path / "cache", url)
        assert not any(outcome.error for outcome in bring(settings))
    assert_all_here(settings)


@needs_nginx
@needs_openssl
def test_a_private_authority_has_to_be_named(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = make_authority(tmp_path / "tls")
    other = make_authority(tmp_path / "other")
    with nginx(tmp_path / "nginx", tree, tls=tmp_path / "tls") as url:
        for variables in ({}, {"CA_BUNDLE": str(other)}, {"INSECURE_HOSTS": "127.0.0.1"}):
            with pytest.raises(DownloadError, match="certificate verify failed"):
                obtain(LARGE, settings=make_settings(tmp_path / "cache", url, **variables))
        settings = make_settings(tmp_path / "cache", url, CA_BUNDLE=str(authority))
        assert obtain(LARGE, settings=settings).data == LARGE_DATA
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(authority))
        settings = make_settings(tmp_path / "second", url)
        assert obtain(LARGE, settings=settings).data == LARGE_DATA
        wrong_name = make_settings(tmp_path / "third", url.replace("127.0.0.1", "localhost"))
        with pytest.raises(DownloadError, match=r"certificate verify failed|doesn't match"):
            obtain(LARGE, settings=wrong_name)
    with pytest.raises(SettingError, match="CUBIN_RUNTIME_CA_BUNDLE"):
        obtain(ARTIFACTS[0], settings=make_settings(tmp_path / "x", url, CA_BUNDLE="/absent"))


@needs_nginx
@needs_proxy
@needs_openssl
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_downloads_go_through_the_proxy(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    tls = tmp_path / "tls" if scheme == "https" else None
    variables = {"CA_BUNDLE": str(make_authority(tls))} if tls else {}
    with nginx(tmp_path / "nginx", tree, tls=tls) as url, proxy(tmp_path / "proxy") as through:
        monkeypatch.setenv(f"{scheme.upper()}_PROXY", through)
        settings = make_settings(tmp_path / "cache", url, **variables)
        assert obtain(LARGE, settings=settings).data == LARGE_DATA
        request = "CONNECT 127.0.0.1" if tls else f"GET {url}/{LARGE.key}"
        assert (tmp_path / "proxy" / "proxy.log").read_text().count(request) == 1
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        settings = make_settings(tmp_path / "second", url, **variables)
        assert obtain(LARGE, settings=settings).data == LARGE_DATA
        assert (tmp_path / "proxy" / "proxy.log").read_text().count(request) == 1


@needs_nginx
@needs_proxy
def test_a_proxy_that_wants_a_password(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with nginx(tmp_path / "nginx", tree) as url, proxy(tmp_path / "proxy", "BasicAuth me secret") as through:
        settings = make_settings(tmp_path / "cache", url)
        monkeypatch.setenv("HTTP_PROXY", through.replace("//", "//me:wrong@"))
        with pytest.raises(DownloadError, match=r"HTTP 40[17]") as caught:
            obtain(LARGE, settings=settings)
        assert "wrong" not in str(caught.value)
        monkeypatch.setenv("HTTP_PROXY", through.replace("//", "//me:secret@"))
        assert obtain(LARGE, settings=settings).data == LARGE_DATA


# ---- a bucket


@pytest.fixture
def bucket(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket with the tree below cubins/; its endpoint is set in the environment."""
    pytest.importorskip("moto", reason="moto is not installed")
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
    with bucket_server() as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        s3fs.S3FileSystem.clear_instance_cache()
        files = s3fs.S3FileSystem()
        files.mkdir("fleet")
        files.put(f"{tree}/", "fleet/cubins/", recursive=True)
        yield "s3://fleet/cubins"
        s3fs.S3FileSystem.clear_instance_cache()


def test_a_bucket_is_a_mirror(bucket: str, tmp_path: Path) -> None:
    settings = make_settings(tmp_path / "cache", bucket)
    assert [outcome.error for outcome in bring(settings)] == [None] * len(ARTIFACTS)
    assert_all_here(settings)


def test_a_bucket_continues_a_part(bucket: str, tmp_path: Path) -> None:
    part = tmp_path / "cache" / LARGE.sha256[:2] / f".{LARGE.sha256}.0123.tmp"
    part.parent.mkdir(parents=True)
    part.write_bytes(LARGE_DATA[:KEEP_FROM])
    found = obtain(LARGE, settings=make_settings(tmp_path / "cache", bucket))
    assert (found.data, found.path) == (LARGE_DATA, f"{bucket}/{LARGE.key}")


def test_what_a_bucket_does_not_have(bucket: str, tmp_path: Path) -> None:
    absent = artifact(b"absent")
    with pytest.raises(DownloadError, match=f"no object {bucket}/{absent.key}"):
        obtain(absent, settings=make_settings(tmp_path / "cache", bucket))
    with pytest.raises(DownloadError, match="s3://no-such-bucket"):
        obtain(absent, settings=make_settings(tmp_path / "cache", "s3://no-such-bucket"))


def test_a_bucket_has_to_be_behind_tls_as_well(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://bucket.invalid")
    with pytest.raises(DownloadError, match="CUBIN_RUNTIME_INSECURE_HOSTS"):
        obtain(LARGE, settings=make_settings(tmp_path / "cache", bucket))


def test_without_the_extra_the_message_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(DownloadError, match=r"cubin-runtime\[s3\]"):
        obtain(LARGE, settings=make_settings(tmp_path / "cache", "s3://fleet/cubins"))


# ---- a small disk, and other users


@pytest.fixture
def mounted() -> Iterator[Callable[[str], Path]]:
    """Makes a tmpfs of some size."""
    folders: list[Path] = []

    def mount(size: str) -> Path:
        folder = Path(tempfile.mkdtemp())
        command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=777", "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
            folder.rmdir()
            pytest.skip("a tmpfs cannot be mounted here")
        folders.append(folder)
        return folder

    yield mount
    for folder in folders:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()


def files(folder: Path) -> list[str]:
    """Names of cubins and parts of them."""
    return [path.name for path in folder.glob("??/*")]


def test_a_full_disk_leaves_nothing_and_a_retry_works(
    tree: Path, mounted: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    cache = mounted("1m")
    settings = make_settings(cache, f"file://{tree}")
    assert obtain(LARGE, settings=settings).data == LARGE_DATA
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    for text in (
        "No space left",
        f"{LARGE.size} bytes needed",
        "free",
        str(cache),
        "CUBIN_RUNTIME_CACHE_DIR",
    ):
        assert text in caplog.text
    outcomes = {outcome.artifact.name: outcome for outcome in bring(settings)}
    assert isinstance(outcomes["k3"].error, StoreWriteError)
    assert not any(name.endswith(".tmp") for name in files(cache))
    assert LARGE.sha256 not in files(cache)
    subprocess.run(["mount", "-o", "remount,size=20m", str(cache)], check=True)
    assert not any(outcome.error for outcome in bring(settings))
    assert_all_here(settings)


def test_a_disk_that_fills_while_a_file_arrives(
    tree: Path, mounted: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cubin_runtime.cache._require_space", lambda path, size: None)
    cache = mounted("2m")
    settings = make_settings(cache, f"file://{tree}")
    with open_mirrors(settings) as mirrors:
        (outcome,) = fetch_all([LARGE], Transfers(mirrors, 5), settings=settings)
    assert isinstance(outcome.error, StoreWriteError)
    assert "No space left" in str(outcome.error)
    assert files(cache) == []


def test_the_system_temporary_folder_may_be_full(
    tree: Path, tmp_path: Path, mounted: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = mounted("4k")
    (full / "ballast").write_bytes(bytes(4096))
    monkeypatch.setenv("TMPDIR", str(full))
    monkeypatch.setattr(tempfile, "tempdir", str(full))
    assert obtain(LARGE, settings=make_settings(tmp_path / "cache", f"file://{tree}")).data == LARGE_DATA
