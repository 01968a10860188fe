"""Locks that end with their process, however that ends: flock on an open file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

Pause = Callable[[float], None]
"""Waits so many seconds, like time.sleep; may raise something to end what waits."""

_POLL = 0.05  # seconds


def try_lock(descriptor: int) -> bool | None:
    """Whether the lock of an open file was to be had; None on a file system without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextlib.contextmanager
def locked(path: str | Path, timeout: float, pause: Pause = time.sleep) -> Iterator[None]:
    """Holds the lock of a file, which is made if need be and stays.

    Raises TimeoutError after `timeout` seconds, another OSError where there can be no lock.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        deadline = time.monotonic() + timeout
        while not (taken := try_lock(descriptor)):
            if taken is None:
                raise OSError(f"the file system of {path} has no locks")
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{path} was locked for {timeout} seconds")
            pause(_POLL)
        yield
    finally:
        os.close(descriptor)
