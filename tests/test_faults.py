"""Whatever the mirrors send, in whatever order: the right bytes or one clear error, and a clean cache."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cubin_runtime import partial, transfer
from cubin_runtime.errors import ArtifactError, DownloadError, IntegrityError
from cubin_runtime.fetch import obtain
from cubin_runtime.manifest import Artifact
from cubin_runtime.settings import Settings
from tests.fault_server import FAULTS, FaultServer
from tests.proof import rounds

DATA = random.Random(4).randbytes(40_000)
ARTIFACT = Artifact(
    name="k", set_name="fmha_sm90", version="1.0", sha256=hashlib.sha256(DATA).hexdigest(), size=len(DATA)
)

SCHEDULES = st.lists(
    st.lists(st.sampled_from(sorted(FAULTS)), min_size=1, max_size=6), min_size=1, max_size=3
)
# What lies in the cache before: nothing, a part that is right, wrong or too long, a rotten file.
BEFORE = st.sampled_from(["", "part", "whole part", "wrong part", "long part", "rotten file"])


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    server = FaultServer(DATA)
    yield server
    server.close()


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses, and parts are kept from a few bytes on."""
    clock = types.SimpleNamespace(sleep=lambda seconds: None, monotonic=time.monotonic)
    monkeypatch.setattr(transfer, "time", clock)
    monkeypatch.setattr(transfer, "BACKOFF", (0.0, 0.0, 0.0))
    for module in (transfer, partial):
        monkeypatch.setattr(module, "KEEP_FROM", 4096)


def prepare(cache: Path, before: str) -> None:
    contents = {
        "part": DATA[:20_000],
        "whole part": DATA,
        "wrong part": bytes(20_000),
        "long part": DATA + b"x",
        "rotten file": DATA[:-1],
    }
    if before:
        name = ARTIFACT.sha256 if before == "rotten file" else f".{ARTIFACT.sha256}.0123.tmp"
        path = cache / ARTIFACT.sha256[:2] / name
        path.parent.mkdir(parents=True)
        path.write_bytes(contents[before])


def download(server: FaultServer, cache: Path, schedule: Sequence[Sequence[str]]) -> bytes | ArtifactError:
    environ = {
        "CUBIN_RUNTIME_CACHE_DIR": str(cache),
        "CUBIN_RUNTIME_MIRRORS": " ".join(server.schedule(schedule)),
        "CUBIN_RUNTIME_HTTP_TIMEOUT": "0.1",
    }
    try:
        return obtain(ARTIFACT, settings=Settings(environ)).data
    except ArtifactError as error:
        return error


def check_cache(cache: Path, before: str, arrived: bool) -> None:
    """The file is there if and only if it arrived; besides, there is at most what may be continued."""
    found = {path.name: path for path in (cache / ARTIFACT.sha256[:2]).iterdir()}
    final = found.pop(ARTIFACT.sha256, None)
    if arrived:
        assert final is not None
        assert final.read_bytes() == DATA
        assert not found
    elif final is not None:
        assert before == "rotten file"
        assert final.read_bytes() == DATA[:-1]
    for name, path in found.items():
        assert name.endswith(".tmp")
        assert 4096 <= path.stat().st_size <= len(DATA)


def check_error(error: ArtifactError, mirrors: int) -> None:
    text = str(error)
    assert isinstance(error, (DownloadError, IntegrityError))
    assert text.startswith("cannot obtain k (40000 bytes):")
    assert [f"/m{number}/" in text for number in range(mirrors)] == [True] * mirrors
    assert "Traceback" not in text


@pytest.mark.slow
@settings(
    max_examples=rounds(sample=150, full=2000),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(schedule=SCHEDULES, before=BEFORE)
def test_the_right_bytes_or_a_clear_error(
    server: FaultServer, tmp_path: Path, schedule: list[list[str]], before: str
) -> None:
    cache = tmp_path / os.urandom(4).hex()
    prepare(cache, before)
    began = time.monotonic()
    result = download(server, cache, schedule)
    assert time.monotonic() - began < 20
    if isinstance(result, bytes):
        assert result == DATA
    else:
        check_error(result, len(schedule))
    check_cache(cache, before, arrived=isinstance(result, bytes))
    # Nothing of it stands in the way of an honest mirror.
    assert download(server, cache, [["good"]]) == DATA
    check_cache(cache, before, arrived=True)
    shutil.rmtree(cache)


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_each_fault_is_survived_by_the_next_mirror(server: FaultServer, tmp_path: Path, name: str) -> None:
    assert download(server, tmp_path / "cache", [[name], ["good"]]) == DATA
    check_cache(tmp_path / "cache", "", arrived=True)


HARMLESS = {"good", "gzip", "unknown encoding", "broken off at the end"}


@pytest.mark.parametrize("name", sorted(FAULTS.keys() - HARMLESS))
def test_each_fault_alone_is_an_error(server: FaultServer, tmp_path: Path, name: str) -> None:
    result = download(server, tmp_path / "cache", [[name]])
    assert isinstance(result, ArtifactError)
    check_error(result, 1)
    check_cache(tmp_path / "cache", "", arrived=False)
