"""Many processes at once, and processes that are killed at any point."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_server import Reply, ScriptedServer, serving

from cubin_runtime.cache import CacheStore
from cubin_runtime.manifest import Artifact
from cubin_runtime.partial import KEEP_FROM
from tests.proof import rounds

ROOT = Path(__file__).parent.parent

RANDOM = random.Random(5)
CONTENTS = [RANDOM.randbytes(size) for size in (1000, 130_000, 400_000, 2 * KEEP_FROM)]


def artifact(data: bytes, name: str) -> Artifact:
    digest = hashlib.sha256(data).hexdigest()
    return Artifact(name=name, set_name="fmha_sm90", version="1", sha256=digest, size=len(data))


ARTIFACTS = [artifact(data, f"k{number}") for number, data in enumerate(CONTENTS)]

# A process that has everything imported, and forks one that downloads for each line that it reads. Those
# start together, when the parent closes the pipe that they wait for.
NURSERY = """
import hashlib, os, signal, sys, threading
import requests
from cubin_runtime import download, http_mirror, http_session
from cubin_runtime.batch import fetch_all
from cubin_runtime.fetch import obtain
from cubin_runtime.manifest import Artifact
from cubin_runtime.mirrors import open_mirrors
from cubin_runtime.settings import Settings
from cubin_runtime.transfer import Transfers

artifacts = eval(sys.argv[1])

def load():
    for artifact in artifacts:
        assert hashlib.sha256(obtain(artifact).data).hexdigest() == artifact.sha256

def fetch():
    settings = Settings()
    with open_mirrors(settings, connections=4) as mirrors:
        outcomes = fetch_all(artifacts, Transfers(mirrors, 10), settings=settings, jobs=4)
    assert not any(outcome.error for outcome in outcomes), outcomes

for line in sys.stdin:
    verb, count = line.split()
    gate, opened = os.pipe()
    children = []
    for _ in range(int(count)):
        pid = os.fork()
        if not pid:
            os.close(opened)
            os.read(gate, 1)
            try:
                {"load": load, "fetch": fetch}[verb]()
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        children.append(pid)
    print(*children, flush=True)
    os.close(gate)
    os.close(opened)
    print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children), flush=True)
"""


class Nursery:
    """Starts downloading processes that share a cache."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self, verb: str, count: int) -> list[int]:
        """Process ids. verb: load (as a call does) or fetch (as the command does)."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{verb} {count}\n")
        self._process.stdin.flush()
        return self._read()

    def wait(self) -> list[int]:
        """Exit statuses of those that were started; negative = killed by that signal."""
        return self._read()

    def _read(self) -> list[int]:
        assert self._process.stdout is not None
        return [int(word) for word in self._process.stdout.readline().split()]


@contextlib.contextmanager
def nursery(cache: Path, url: str) -> Iterator[Nursery]:
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("CUBIN_RUNTIME_")},
        "CUBIN_RUNTIME_CACHE_DIR": str(cache),
        "CUBIN_RUNTIME_MIRRORS": url,
    }
    command, pipe = [sys.executable, "-c", NURSERY, repr(ARTIFACTS)], subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdin=pipe, stdout=pipe, text=True) as process:
        yield Nursery(process)
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving() as running:
        yield running


def script_tree(server: ScriptedServer, pace: float = 0.0, delay: float = 0.0) -> str:
    """Serves all artifacts below one URL, with ranges."""
    files = {
        f"/m/{each.key}": Reply(data, ranges=True, pace=pace, delay=delay)
        for each, data in zip(ARTIFACTS, CONTENTS, strict=True)
    }
    return server.script_paths("m", files)


def check_final_files(cache: Path) -> None:
    """Every file that has its final name is whole."""
    for entry in CacheStore(cache).entries():
        assert hashlib.sha256(entry.path.read_bytes()).hexdigest() == entry.sha256


def leftovers(cache: Path) -> list[Path]:
    return list(cache.glob("??/.*"))


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["load", "fetch"])
def test_64_processes_download_each_file_once(server: ScriptedServer, tmp_path: Path, verb: str) -> None:
    url = script_tree(server, delay=0.5)
    with nursery(tmp_path / "cache", url) as processes:
        assert len(set(processes.start(verb, 64))) == 64
        assert processes.wait() == [0] * 64
    assert collections.Counter(server.paths) == {f"/m/{each.key}": 1 for each in ARTIFACTS}
    check_final_files(tmp_path / "cache")
    assert len(CacheStore(tmp_path / "cache").entries()) == len(ARTIFACTS)
    assert leftovers(tmp_path / "cache") == []


@pytest.mark.slow
def test_kills_at_any_point_leave_no_bad_file_and_lose_no_good_one(
    server: ScriptedServer, tmp_path: Path
) -> None:
    url = script_tree(server, pace=0.002)
    moments = random.Random(6)
    cache = tmp_path / "cache"
    killed = had = 0
    with nursery(cache, url) as processes:
        for number in range(rounds(sample=40, full=200)):
            verb, count = ("fetch", 1) if number % 2 else ("load", 3)
            children = processes.start(verb, count)
            time.sleep(moments.uniform(0, 0.12))
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            statuses = processes.wait()
            assert set(statuses) <= {0, -signal.SIGKILL}
            killed += statuses.count(-signal.SIGKILL)
            check_final_files(cache)
            here = len(CacheStore(cache).entries())
            assert here >= had, "a good file is gone"
            had = here
            if had == len(ARTIFACTS):  # begin anew, with what is left of parts
                for entry in CacheStore(cache).entries():
                    entry.path.unlink()
                had = 0
        assert killed > 0
        processes.start("fetch", 1)
        assert processes.wait() == [0]
    for each, data in zip(ARTIFACTS, CONTENTS, strict=True):
        assert CacheStore(cache).read(each) == data
    CacheStore(cache).remove_abandoned()
    assert leftovers(cache) == []
    assert any("Range" in headers for headers in server.headers), "no part was ever continued"
