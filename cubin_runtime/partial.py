"""A file on its way to its final name.

It lies next to that name under a name of its own, `.<final name>.<random>.tmp`, and belongs to the
process that holds the lock on it. The kernel drops the lock with the process, however that ends: what is
not locked has been abandoned, and whoever wants the same file may go on where its owner stopped.

Paths are text here: a batch brings thousands of files, and a Path costs more than most calls on it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence

from cubin_runtime.locks import try_lock

KEEP_FROM = 2**20  # bytes; less is sooner downloaded again than kept and looked for

_CHUNK = 2**20  # bytes
_CLOSED = -1  # as a descriptor
_TRIES = 10  # of making a file while others look for abandoned ones


class PartialFile:
    """The part of a file that has arrived. Errors of the file system come as OSError.

    The name `final` appears with `commit`, whole and on disk; `leave` keeps a part that is worth it.
    """

    def __init__(self, final: str, path: str, descriptor: int, size: int, others: Sequence[str]) -> None:
        self.path = path
        self.size = size
        self._final = final
        self._others = others
        self._descriptor = descriptor

    @classmethod
    def open(cls, final: str) -> PartialFile:
        """The largest part of `final` that was abandoned, else a new and empty one."""
        others = sorted(_parts(final), key=_size, reverse=True)
        for path in others:
            if _size(path) >= KEEP_FROM and (descriptor := _take(path)) is not None:
                return cls(final, path, descriptor, os.fstat(descriptor).st_size, others)
        return cls.create(final, others)

    @classmethod
    def create(cls, final: str, others: Sequence[str] = ()) -> PartialFile:
        """A new and empty part of `final`; `others` were abandoned."""
        path, descriptor = _create(final)
        return cls(final, path, descriptor, 0, others)

    def append(self, data: bytes) -> None:
        """Adds what has arrived next."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        self.size += len(data)

    def restart(self) -> None:
        """Drops what has arrived so far."""
        os.ftruncate(self._descriptor, 0)
        self.size = 0

    def chunks(self) -> Iterator[bytes]:
        """All that has arrived, in pieces."""
        for offset in range(0, self.size, _CHUNK):
            yield os.pread(self._descriptor, min(_CHUNK, self.size - offset), offset)

    def commit(self) -> str:
        """Gives the file its final name, which is returned, once its bytes are on disk; clears away what was
        abandoned of it.
        """
        os.fsync(self._descriptor)
        os.replace(self.path, self._final)
        self._close()
        for path in self._others:
            remove_abandoned(path)
        return self._final

    def leave(self) -> None:
        """Lets go of a part that was not committed, and removes it if it is small."""
        if self._descriptor != _CLOSED and self.size < KEEP_FROM:
            self.discard()
        self._close()

    def discard(self) -> None:
        """Removes the part."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        self._close()

    def _close(self) -> None:
        if self._descriptor != _CLOSED:
            os.close(self._descriptor)
            self._descriptor = _CLOSED


def is_part(name: str) -> bool:
    """Whether a file's name is that of a part."""
    return name.startswith(".") and name.endswith(".tmp")


def remove_abandoned(path: str) -> bool:
    """Removes a part whose owner is gone; False if it has one, or cannot be removed."""
    descriptor = _take(path)
    if descriptor is None:
        return False
    try:
        os.unlink(path)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _parts(final: str) -> list[str]:
    folder, name = os.path.split(final)
    prefix = f".{name}."
    return [f"{folder}/{each}" for each in os.listdir(folder) if each.startswith(prefix) and is_part(each)]


def _size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return -1


def _create(final: str) -> tuple[str, int]:
    folder, name = os.path.split(final)
    for _ in range(_TRIES):
        path = f"{folder}/.{name}.{os.urandom(8).hex()}.tmp"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)
        # Between these two calls it looks abandoned, so that somebody may have removed it.
        if try_lock(descriptor) is not False and _is_named(descriptor, path):
            return path, descriptor
        os.close(descriptor)
    raise FileExistsError(errno.EEXIST, "temporary files are removed as soon as they are made", final)


def _take(path: str) -> int | None:
    """A descriptor of an abandoned part of ours, locked; None if it is not to be had."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    status = os.fstat(descriptor)
    ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    if ours and try_lock(descriptor) and _is_named(descriptor, path):
        return descriptor
    os.close(descriptor)
    return None


def _is_named(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except OSError:
        return False
