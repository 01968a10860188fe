from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

import pytest

from cubin_runtime.locks import locked, try_lock


def test_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path, timeout=1):
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"was locked for 0\.1 seconds"), locked(path, timeout=0.1):
            pass
        assert 0.1 <= time.monotonic() - began < 5
        with pytest.raises(TimeoutError), locked(path, timeout=0):
            pass
    with locked(path, timeout=0):
        pass
    assert path.exists(), "removing it would let two in"


def test_it_is_given_up_when_the_block_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), locked(tmp_path / "lock", timeout=0):
        raise RuntimeError
    with locked(tmp_path / "lock", timeout=0):
        pass


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(OSError, match="has no locks"), locked(tmp_path / "lock", timeout=60):
        pass
    descriptor = os.open(tmp_path / "lock", os.O_RDWR)
    assert try_lock(descriptor) is None
    os.close(descriptor)
