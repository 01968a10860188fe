from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cubin_runtime import partial
from cubin_runtime.partial import KEEP_FROM, PartialFile, remove_abandoned

LARGE = bytes(KEEP_FROM)
ROOT = Path(__file__).parent.parent


def parts(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if partial.is_part(path.name))


def leave_part(final: Path, data: bytes) -> Path:
    path = final.with_name(f".{final.name}.0123.tmp")
    path.write_bytes(data)
    return path


def test_a_file_appears_whole_under_its_name(tmp_path: Path) -> None:
    final = tmp_path / "f"
    file = PartialFile.open(str(final))
    for data in (b"one", b"two"):
        file.append(data)
        assert not final.exists()
    assert (file.size, b"".join(file.chunks())) == (6, b"onetwo")
    file.commit()
    file.leave()
    assert final.read_bytes() == b"onetwo"
    assert list(tmp_path.iterdir()) == [final]


def test_a_small_part_is_not_kept_and_a_large_one_is_continued(tmp_path: Path) -> None:
    for data, kept in ((LARGE[:-1], 0), (LARGE, 1)):
        file = PartialFile.open(str(tmp_path / "f"))
        file.append(data)
        file.leave()
        assert len(parts(tmp_path)) == kept
    file = PartialFile.open(str(tmp_path / "f"))
    assert (file.size, file.path) == (len(LARGE), str(parts(tmp_path)[0]))
    file.append(b"end")
    file.commit()
    assert (tmp_path / "f").read_bytes() == LARGE + b"end"
    assert parts(tmp_path) == []


def test_restart_and_discard(tmp_path: Path) -> None:
    leave_part(tmp_path / "f", LARGE + b"rotten")
    file = PartialFile.open(str(tmp_path / "f"))
    file.restart()
    assert (file.size, list(file.chunks())) == (0, [])
    file.append(b"right")
    assert b"".join(file.chunks()) == b"right"
    file.discard()
    assert list(tmp_path.iterdir()) == []


def test_the_largest_part_is_taken_and_the_others_go_with_the_commit(tmp_path: Path) -> None:
    final = tmp_path / "f"
    small = leave_part(final, b"x")
    for number in (1, 2):
        final.with_name(f".f.{number}.tmp").write_bytes(LARGE * number)
    other = leave_part(tmp_path / "other", LARGE)
    file = PartialFile.open(str(final))
    assert file.size == 2 * len(LARGE)
    assert small.exists()
    file.commit()
    assert parts(tmp_path) == [other]


def test_a_part_with_an_owner_is_left_alone(tmp_path: Path) -> None:
    owner = PartialFile.open(str(tmp_path / "f"))
    owner.append(LARGE)
    other = PartialFile.open(str(tmp_path / "f"))
    assert (other.size, other.path != owner.path) == (0, True)
    assert not remove_abandoned(owner.path)
    other.append(b"other")
    other.commit()
    owner.append(b"more")
    owner.commit()
    assert (tmp_path / "f").read_bytes() == LARGE + b"more"


def test_the_part_of_a_killed_process_has_no_owner(tmp_path: Path) -> None:
    code = f"""
from cubin_runtime.partial import PartialFile
file = PartialFile.open({str(tmp_path / "f")!r})
file.append(bytes({KEEP_FROM}))
print(file.path, flush=True)
input()
"""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=pipe, stdout=pipe, text=True
    ) as process:
        assert process.stdout is not None
        path = process.stdout.readline().strip()
        assert not remove_abandoned(path)
        process.kill()
        process.wait()
    file = PartialFile.open(str(tmp_path / "f"))
    assert (file.path, file.size) == (path, KEEP_FROM)
    file.discard()


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_what_is_not_a_file_of_ours_is_not_touched(tmp_path: Path, kind: str) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(LARGE)
    trap = tmp_path / ".f.0123.tmp"
    if kind == "link":
        trap.symlink_to(victim)
    elif kind == "fifo":
        os.mkfifo(trap)
    else:
        trap.mkdir()
    file = PartialFile.open(str(tmp_path / "f"))
    assert file.size == 0
    file.append(b"right")
    file.commit()
    assert not remove_abandoned(str(trap))
    assert victim.read_bytes() == LARGE
    assert (tmp_path / "f").read_bytes() == b"right"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of other users")
def test_a_part_of_another_user_is_not_continued(tmp_path: Path) -> None:
    path = leave_part(tmp_path / "f", LARGE)
    os.chown(path, 65534, -1)
    file = PartialFile.open(str(tmp_path / "f"))
    assert (file.size, file.path != str(path)) == (0, True)
    file.discard()
    assert path.exists()


def test_without_locks_nothing_is_continued_or_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    path = leave_part(tmp_path / "f", LARGE)
    monkeypatch.setattr(fcntl, "flock", unsupported)
    file = PartialFile.open(str(tmp_path / "f"))
    file.append(b"right")
    file.commit()
    assert (tmp_path / "f").read_bytes() == b"right"
    assert parts(tmp_path) == [path]


def test_a_part_that_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, removed = fcntl.flock, []

    def flock(descriptor: int, operation: int) -> None:
        if not removed:
            removed.extend(parts(tmp_path))
            removed[0].unlink()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    file = PartialFile.open(str(tmp_path / "f"))
    assert parts(tmp_path) == [Path(file.path)]
    assert Path(file.path) not in removed
    file.discard()


def test_a_short_write_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = PartialFile.open(str(tmp_path / "f"))

    written: list[bytes] = []

    def write(descriptor: int, data: memoryview) -> int:
        written.append(bytes(data[:3]))
        return len(written[-1])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        file.append(b"0123456789")
    assert (b"".join(written), file.size) == (b"0123456789", 10)
    file.discard()
