"""What becomes of a part that is there: continued, distrusted, or dropped. Retries are in test_fetch.py."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_server import Reply, ScriptedServer, serving

from cubin_runtime import transfer
from cubin_runtime.cache import CacheStore, WritableStore
from cubin_runtime.download import Fetched, Fetcher
from cubin_runtime.errors import StoreWriteError
from cubin_runtime.fetch import obtain
from cubin_runtime.http_mirror import HttpMirror
from cubin_runtime.http_session import MirrorSession
from cubin_runtime.manifest import Artifact
from cubin_runtime.partial import KEEP_FROM
from cubin_runtime.settings import Settings
from cubin_runtime.store import Attempt
from cubin_runtime.transfer import MemorySink, Transfers
from tests.proof import rounds

ROOT = Path(__file__).parent.parent

DATA = random.Random(1).randbytes(3 * 2**20)
ARTIFACT = Artifact(
    name="k", set_name="fmha_sm90", version="1.0", sha256=hashlib.sha256(DATA).hexdigest(), size=len(DATA)
)
HALF = len(DATA) // 2
WHOLE = Reply(DATA, ranges=True)
BROKEN_OFF = Reply(DATA[:HALF], length=len(DATA))


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving() as running:
        yield running


@pytest.fixture(autouse=True)
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    pauses: list[float] = []
    clock = types.SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic)
    monkeypatch.setattr(transfer, "time", clock)
    return pauses


def make_settings(folder: Path, *mirrors: str) -> Settings:
    return Settings(
        {
            "CUBIN_RUNTIME_CACHE_DIR": str(folder / "cache"),
            "CUBIN_RUNTIME_MIRRORS": " ".join(mirrors),
            "CUBIN_RUNTIME_HTTP_TIMEOUT": "5",
        }
    )


def ranges(server: ScriptedServer) -> list[str | None]:
    return [headers.get("Range") for headers in server.headers]


def leave_part(folder: Path, data: bytes) -> Path:
    path = folder / "cache" / ARTIFACT.sha256[:2] / f".{ARTIFACT.sha256}.0123.tmp"
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    return path


def parts(folder: Path) -> list[Path]:
    return list((folder / "cache").rglob(".*.tmp"))


def test_a_broken_off_body_is_continued_in_the_next_try(server: ScriptedServer, tmp_path: Path) -> None:
    url = server.script("m", BROKEN_OFF, WHOLE)
    assert obtain(ARTIFACT, settings=make_settings(tmp_path, url)).data == DATA
    assert ranges(server) == [None, f"bytes={HALF}-"]
    assert parts(tmp_path) == []


def test_it_is_continued_from_the_next_mirror(server: ScriptedServer, tmp_path: Path) -> None:
    urls = [server.script("a", BROKEN_OFF, Reply(status=404)), server.script("b", WHOLE)]
    assert obtain(ARTIFACT, settings=make_settings(tmp_path, *urls)).data == DATA
    assert ranges(server) == [None, f"bytes={HALF}-", f"bytes={HALF}-"]


def test_what_a_dead_process_left_is_continued(server: ScriptedServer, tmp_path: Path) -> None:
    leave_part(tmp_path, DATA[:HALF])
    found = obtain(ARTIFACT, settings=make_settings(tmp_path, server.script("m", WHOLE)))
    assert found.data == DATA
    assert ranges(server) == [f"bytes={HALF}-"]
    assert parts(tmp_path) == []


def test_a_failure_keeps_a_large_part_for_the_next_run(server: ScriptedServer, tmp_path: Path) -> None:
    settings = make_settings(tmp_path, server.script("m", BROKEN_OFF, Reply(status=403), WHOLE))
    with pytest.raises(OSError, match="HTTP 403"):
        obtain(ARTIFACT, settings=settings)
    assert [path.stat().st_size for path in parts(tmp_path)] == [HALF]
    assert obtain(ARTIFACT, settings=settings).data == DATA
    assert ranges(server) == [None, f"bytes={HALF}-", f"bytes={HALF}-"]


def test_a_part_that_is_whole_needs_no_mirror(server: ScriptedServer, tmp_path: Path) -> None:
    leave_part(tmp_path, DATA)
    found = obtain(ARTIFACT, settings=make_settings(tmp_path, server.script("m", WHOLE)))
    assert (found.data, found.path) == (DATA, "what an earlier download left")
    assert server.paths == []


@pytest.mark.parametrize(
    "rotten",
    [b"x" * HALF, DATA[: HALF - 1] + b"x", b"x" * len(DATA), DATA + DATA],
    ids=["all", "last byte", "whole", "too long"],
)
def test_a_rotten_part_costs_one_more_download(server: ScriptedServer, tmp_path: Path, rotten: bytes) -> None:
    leave_part(tmp_path, rotten)
    found = obtain(ARTIFACT, settings=make_settings(tmp_path, server.script("m", WHOLE)))
    assert found.data == DATA
    assert found.attempts[-1].store != "mirror"
    assert ranges(server)[-1] is None
    assert len(server.paths) <= 2
    assert parts(tmp_path) == []


RANGE_FAULTS = {
    "sends the whole": Reply(DATA),
    "sends another range": Reply(DATA[5:], 206, {"Content-Range": f"bytes 5-{len(DATA) - 1}/{len(DATA)}"}),
    "says nothing of the range": Reply(DATA[HALF:], 206),
    "sends a range of another file": Reply(
        DATA[HALF:], 206, {"Content-Range": f"bytes {HALF}-{len(DATA) - 1}/{len(DATA) + 1}"}
    ),
    "sends wrong bytes": Reply(
        b"x" * HALF, 206, {"Content-Range": f"bytes {HALF}-{len(DATA) - 1}/{len(DATA)}"}
    ),
    "sends an encoded range": Reply(
        DATA[HALF:],
        206,
        {"Content-Range": f"bytes {HALF}-{len(DATA) - 1}/{len(DATA)}", "Content-Encoding": "gzip"},
    ),
    "has no such range": Reply(b"", 416),
}


@pytest.mark.parametrize("reply", RANGE_FAULTS.values(), ids=RANGE_FAULTS)
def test_a_server_that_gets_ranges_wrong_is_asked_for_the_whole(
    server: ScriptedServer, tmp_path: Path, reply: Reply
) -> None:
    leave_part(tmp_path, DATA[:HALF])
    url = server.script("m", reply, Reply(DATA))
    assert obtain(ARTIFACT, settings=make_settings(tmp_path, url)).data == DATA
    assert ranges(server)[0] == f"bytes={HALF}-"
    assert parts(tmp_path) == []


def test_a_range_that_nobody_asked_for_is_refused(server: ScriptedServer, tmp_path: Path) -> None:
    partial = Reply(DATA, 206, {"Content-Range": f"bytes 0-{len(DATA) - 1}/{len(DATA)}"})
    with pytest.raises(OSError, match="HTTP 206"):
        obtain(ARTIFACT, settings=make_settings(tmp_path, server.script("m", partial)))


def test_a_liar_cannot_spoil_an_honest_mirror(server: ScriptedServer, tmp_path: Path) -> None:
    liar = Reply(b"x" * HALF, length=len(DATA))
    urls = [server.script("liar", liar, Reply(status=403)), server.script("honest", WHOLE)]
    found = obtain(ARTIFACT, settings=make_settings(tmp_path, *urls))
    assert found.data == DATA
    assert ranges(server) == [None, f"bytes={HALF}-", f"bytes={HALF}-", None]


def test_a_transfer_that_gets_on_is_not_given_up(server: ScriptedServer, tmp_path: Path) -> None:
    data = random.Random(2).randbytes((len(transfer.BACKOFF) + 4) * KEEP_FROM)
    artifact = Artifact(
        name="l", set_name="s", version="1", sha256=hashlib.sha256(data).hexdigest(), size=len(data)
    )
    starts = range(0, len(data), KEEP_FROM)
    scripted = [
        Reply(
            data[start : start + KEEP_FROM],
            206 if start else 200,
            {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {},
            length=len(data) - start,  # promises the rest, and breaks off
        )
        for start in starts
    ]
    settings = make_settings(tmp_path, server.script("m", *scripted))
    assert obtain(artifact, settings=settings).data == data
    assert len(server.paths) == len(starts) > len(transfer.BACKOFF) + 1


def test_pauses_are_random_and_bounded(server: ScriptedServer, tmp_path: Path, sleeps: list[float]) -> None:
    settings = make_settings(tmp_path, server.script("m", Reply(status=503)))
    for _ in range(2):
        with pytest.raises(OSError, match="HTTP 503"):
            obtain(ARTIFACT, settings=settings)
    tries = len(transfer.BACKOFF)
    assert len(sleeps) == 2 * tries
    assert sleeps[:tries] != sleeps[tries:]
    for pause, bound in zip(sleeps, transfer.BACKOFF * 2, strict=True):
        assert bound / 2 <= pause <= bound


def test_a_batch_does_not_wait_for_a_dead_mirror_again(
    server: ScriptedServer, tmp_path: Path, sleeps: list[float]
) -> None:
    settings = make_settings(tmp_path)
    urls = [server.script("dead", Reply(status=503)), server.script("good", WHOLE)]
    with MirrorSession(settings) as session:
        transfers = Transfers([HttpMirror(url, 5, session) for url in urls], 5)
        for number in range(3):
            store = WritableStore("destination", tmp_path / str(number))
            fetcher = Fetcher(transfers, target=store, settings=settings, pause=sleeps.append)
            fetched = fetcher.fetch(ARTIFACT)
            assert fetched.source == f"{urls[1]}/{ARTIFACT.key}"
    assert [path.split("/")[1] for path in server.paths] == ["dead"] * 5 + ["good"] * 3
    assert len(sleeps) == len(transfer.BACKOFF)


def test_a_mirror_that_recovers_is_asked_first_again(server: ScriptedServer, sleeps: list[float]) -> None:
    down = [Reply(status=503)] * (len(transfer.BACKOFF) + 1)
    urls = [server.script("a", *down, WHOLE), server.script("b", Reply(status=404))]
    with MirrorSession(Settings({})) as session:
        transfers = Transfers([HttpMirror(url, 5, session) for url in urls], 5)
        answers = []
        for _ in range(3):
            attempts: list[Attempt] = []
            answers.append(transfers.fill(ARTIFACT, MemorySink(), attempts))
    place = f"{urls[0]}/{ARTIFACT.key}"
    assert answers == [None, place, place]
    assert [path[1] for path in server.paths[5:]] == ["b", "b", "a", "a"]


def published_files(contents: list[bytes]) -> list[Artifact]:
    return [
        Artifact(
            name=f"k{number}",
            set_name="s",
            version="1",
            sha256=hashlib.sha256(data).hexdigest(),
            size=len(data),
            published=f"its/k{number}.cubin",
        )
        for number, data in enumerate(contents)
    ]


def test_the_layout_of_the_last_file_is_tried_first(server: ScriptedServer) -> None:
    small = [bytes([number]) * 1000 for number in range(4)]
    files = published_files(small)
    theirs, ours = [f"/m/{each.published}" for each in files], [f"/m/{each.key}" for each in files]
    places = [theirs[0], theirs[1], ours[2], ours[3]]
    url = server.script_paths("m", {place: Reply(data) for place, data in zip(places, small, strict=True)})
    with MirrorSession(Settings({})) as session:
        transfers = Transfers([HttpMirror(url, 5, session)], 5)
        for each, place in zip(files, places, strict=True):
            assert transfers.fill(each, MemorySink(), []) == f"{url}{place[2:]}"
    assert server.paths == [ours[0], theirs[0], theirs[1], theirs[2], ours[2], ours[3]]


@pytest.mark.parametrize("answer", [Reply(b"\x00" * 1000), Reply(status=403)], ids=["old", "refused"])
def test_nothing_where_its_publisher_has_a_file_hides_the_right_one(
    server: ScriptedServer, answer: Reply
) -> None:
    small = [bytes([number]) * 1000 for number in range(2)]
    first, second = published_files(small)
    replies = {
        f"/m/{first.published}": Reply(small[0]),
        f"/m/{second.published}": answer,
        f"/m/{second.key}": Reply(small[1]),
    }
    url = server.script_paths("m", replies)
    with MirrorSession(Settings({})) as session:
        transfers = Transfers([HttpMirror(url, 5, session)], 5)
        assert transfers.fill(first, MemorySink(), []) == f"{url}/{first.published}"
        assert transfers.fill(second, MemorySink(), []) == f"{url}/{second.key}"


def test_fetch_says_what_it_did(server: ScriptedServer, tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    urls = [server.script("a", Reply(status=404)), server.script("b", WHOLE)]
    seen: list[int] = []
    with MirrorSession(settings) as session:
        transfers = Transfers([HttpMirror(url, 5, session) for url in urls], 5)
        fetcher = Fetcher(transfers, settings=settings)
        first = fetcher.fetch(ARTIFACT, seen.append)
        second = fetcher.fetch(ARTIFACT)
    place = str(tmp_path / "cache" / ARTIFACT.key)
    assert first[:4] == ("cache", place, True, f"{urls[1]}/{ARTIFACT.key}")
    assert "HTTP 404" in first.attempts[-1].answer
    assert second == Fetched("cache", place, False, "", ())
    assert seen == sorted(seen)
    assert seen[-1] == len(DATA)


def test_a_destination_is_filled_from_this_machine_first(server: ScriptedServer, tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    CacheStore(settings.cache_dir).write(ARTIFACT, DATA)
    store = WritableStore("destination", tmp_path / "dest")
    fetched = Fetcher(Transfers([], 5), target=store, settings=settings).fetch(ARTIFACT)
    assert (fetched.is_new, fetched.source) == (True, str(tmp_path / "cache" / ARTIFACT.key))
    assert [path.name for path in (tmp_path / "dest").iterdir()] == [ARTIFACT.sha256[:2]]
    assert store.read(ARTIFACT) == DATA


def test_no_file_is_begun_where_nobody_can_be_asked(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no file"):
        Fetcher(Transfers([], 5), settings=make_settings(tmp_path)).fetch(ARTIFACT)
    assert list(tmp_path.iterdir()) == []


def test_fetch_does_not_pretend_that_a_file_is_kept(server: ScriptedServer, tmp_path: Path) -> None:
    (tmp_path / "cache").write_bytes(b"")
    settings = make_settings(tmp_path)
    with MirrorSession(settings) as session:
        mirror = HttpMirror(server.script("m", WHOLE), 5, session)
        fetcher = Fetcher(Transfers([mirror], 5), settings=settings)
        with pytest.raises(StoreWriteError, match="cannot store k in"):
            fetcher.fetch(ARTIFACT)


def test_the_cache_stays_below_its_limit(server: ScriptedServer, tmp_path: Path) -> None:
    cache = CacheStore(tmp_path / "cache")
    others = []
    for number in range(3):
        data = bytes([number]) * 2**20
        digest = hashlib.sha256(data).hexdigest()
        others.append(Artifact(name=f"k{number}", set_name="s", version="1", sha256=digest, size=len(data)))
        cache.write(others[-1], data)
    environ = {
        "CUBIN_RUNTIME_CACHE_DIR": str(tmp_path / "cache"),
        "CUBIN_RUNTIME_CACHE_MAX_SIZE": "4M",
        "CUBIN_RUNTIME_MIRRORS": server.script("m", WHOLE),
    }
    assert obtain(ARTIFACT, settings=Settings(environ)).data == DATA
    assert [cache.read(other) is not None for other in others] == [False, False, True]
    assert (
        obtain(ARTIFACT, settings=Settings({**environ, "CUBIN_RUNTIME_CACHE_MAX_SIZE": "1"})).store == "cache"
    )


def test_memory_stays_flat(server: ScriptedServer, tmp_path: Path) -> None:
    size = rounds(sample=256, full=1024) * 2**20
    block = bytes(2**20)
    digest = hashlib.sha256()
    for _ in range(size // len(block)):
        digest.update(block)
    folder = tmp_path / "mirror"
    artifact = Artifact(name="big", set_name="s", version="1", sha256=digest.hexdigest(), size=size)
    path = folder / artifact.key
    path.parent.mkdir(parents=True)
    path.touch()
    os.truncate(path, size)
    code = f"""
import resource
from pathlib import Path
from cubin_runtime.download import Fetcher
from cubin_runtime.manifest import Artifact
from cubin_runtime.mirrors import open_mirrors
from cubin_runtime.settings import Settings
from cubin_runtime.transfer import Transfers
settings = Settings({{"CUBIN_RUNTIME_CACHE_DIR": {str(tmp_path / "cache")!r},
                     "CUBIN_RUNTIME_MIRRORS": {f"file://{folder}"!r}}})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with open_mirrors(settings) as mirrors:
    print(Fetcher(Transfers(mirrors, 60), settings=settings).fetch({artifact!r}).is_new)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    is_new, kib = result.stdout.split()
    assert is_new == "True"
    assert int(kib) < 16 * 1024  # KiB
