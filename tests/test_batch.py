from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cubin_runtime import batch
from cubin_runtime.batch import Outcome, fetch_all
from cubin_runtime.locks import locked
from cubin_runtime.manifest import Artifact
from cubin_runtime.mirrors import Body, MissingError, TransientError
from cubin_runtime.settings import Settings
from cubin_runtime.transfer import Transfers

CONTENTS = {f"k{number}": bytes([number]) * 1000 for number in range(40)}
ARTIFACTS = [
    Artifact(name=name, set_name="s", version="1", sha256=hashlib.sha256(data).hexdigest(), size=len(data))
    for name, data in CONTENTS.items()
]
ABSENT = "k7"


class Memory:
    """A mirror that has all files but one, and counts who is asking."""

    location = "memory"

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._lock = threading.Lock()
        self._now = 0
        self.most = 0

    @contextlib.contextmanager
    def open(self, path: str, artifact: Artifact, start: int) -> Iterator[Body]:
        with self._lock:
            self.asked.append(artifact.name)
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(0.002)
        with self._lock:
            self._now -= 1
        if artifact.name == ABSENT:
            raise MissingError("not here")
        yield Body(0, iter([CONTENTS[artifact.name]]))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings({"CUBIN_RUNTIME_CACHE_DIR": str(tmp_path)})


@pytest.mark.parametrize("jobs", [1, 4])
def test_every_file_is_asked_for_once_and_so_many_at_a_time(settings: Settings, jobs: int) -> None:
    mirror = Memory()
    outcomes = fetch_all(ARTIFACTS, Transfers([mirror], 5), settings=settings, jobs=jobs)
    assert [outcome.artifact for outcome in outcomes] == ARTIFACTS
    assert sorted(mirror.asked) == sorted(CONTENTS)
    assert mirror.most <= jobs
    assert (mirror.most > 1) == (jobs > 1)
    failed = {outcome.artifact.name: outcome.error for outcome in outcomes if outcome.error}
    assert list(failed) == [ABSENT]
    assert all(outcome.fetched for outcome in outcomes if outcome.artifact.name != ABSENT)


def test_files_that_come_fast_take_one_thread(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "_STEP", 60)
    mirror = Memory()
    assert len(fetch_all(ARTIFACTS, Transfers([mirror], 5), settings=settings, jobs=4)) == len(ARTIFACTS)
    assert mirror.most == 1


def test_outcomes_are_told_one_at_a_time(settings: Settings) -> None:
    one_at_a_time = threading.Lock()
    told: list[str] = []

    def done(outcome: Outcome) -> None:
        assert one_at_a_time.acquire(blocking=False)
        time.sleep(0.001)
        told.append(outcome.artifact.name)
        one_at_a_time.release()

    fetch_all(ARTIFACTS, Transfers([Memory()], 5), settings=settings, done=done)
    assert sorted(told) == sorted(CONTENTS)


def test_an_error_that_is_not_about_a_file_ends_the_batch(settings: Settings) -> None:
    def done(outcome: Outcome) -> None:
        raise BrokenPipeError

    mirror = Memory()
    with pytest.raises(BrokenPipeError):
        fetch_all(ARTIFACTS, Transfers([mirror], 5), settings=settings, jobs=2, done=done)
    assert len(mirror.asked) < len(ARTIFACTS)


class Busy(Memory):
    """A mirror that has the first file, and asks to come back later for all others."""

    @contextlib.contextmanager
    def open(self, path: str, artifact: Artifact, start: int) -> Iterator[Body]:
        if artifact is not ARTIFACTS[0]:
            raise TransientError("busy", pause=20)
        time.sleep(0.1)  # so that others wait meanwhile
        with super().open(path, artifact, start) as body:
            yield body


@pytest.mark.parametrize("locks", [False, True], ids=["for a mirror", "for other processes"])
def test_the_end_of_a_batch_ends_the_waiting(settings: Settings, tmp_path: Path, locks: bool) -> None:
    def done(outcome: Outcome) -> None:
        raise KeyboardInterrupt

    with contextlib.ExitStack() as stack:
        if locks:
            (tmp_path / "locks").mkdir()
            for artifact in ARTIFACTS[1:]:
                stack.enter_context(locked(tmp_path / "locks" / f"{artifact.sha256}.lock", 0))
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            fetch_all(ARTIFACTS, Transfers([Busy()], 5), settings=settings, jobs=4, done=done)
    assert time.monotonic() - began < 10


def test_no_files_are_no_outcomes(settings: Settings) -> None:
    assert fetch_all([], Transfers([], 5), settings=settings) == []
