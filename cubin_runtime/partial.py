"""A file on its way to its final name.

It lies next to that name under a name of its own, `.<final name>.<random>.tmp`, and belongs to the
process that holds the lock on it. The kernel drops the lock with the process, however that ends: what is
not locked has been abandoned, and whoever wants the same file may go on where its owner stopped.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from cubin_runtime.locks import try_lock

KEEP_FROM = 2**20  # bytes; less is sooner downloaded again than kept and looked for

_CHUNK = 2**20  # bytes
_TRIES = 10  # of making a file while others look for abandoned ones


class PartialFile:
    """The part of a file that has arrived. Errors of the file system come as OSError.

    The name `final` appears with `commit`, whole and on disk; `leave` keeps a part that is worth it.
    """

    def __init__(self, final: Path, path: Path, descriptor: int) -> None:
        self.path = path
        self._final = final
        self._file = os.fdopen(descriptor, "r+b", buffering=0)
        self.size = self._file.seek(0, os.SEEK_END)

    @classmethod
    def open(cls, final: Path) -> PartialFile:
        """The largest part of `final` that was abandoned, else a new and empty one."""
        for path in sorted(_parts(final), key=_size, reverse=True):
            if _size(path) >= KEEP_FROM and (descriptor := _take(path)) is not None:
                return cls(final, path, descriptor)
        return cls(final, *_create(final))

    def append(self, data: bytes) -> None:
        """Adds what has arrived next."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
        self.size += len(data)

    def restart(self) -> None:
        """Drops what has arrived so far."""
        self._file.truncate(0)
        self._file.seek(0)
        self.size = 0

    def chunks(self) -> Iterator[bytes]:
        """All that has arrived, in pieces."""
        for offset in range(0, self.size, _CHUNK):
            yield os.pread(self._file.fileno(), min(_CHUNK, self.size - offset), offset)

    def commit(self) -> None:
        """Gives the file its final name once its bytes are on disk; clears away abandoned parts of it."""
        os.fsync(self._file.fileno())
        self.path.replace(self._final)
        self._file.close()
        with contextlib.suppress(OSError):  # it is there, whatever becomes of the others
            for path in _parts(self._final):
                remove_abandoned(path)

    def leave(self) -> None:
        """Lets go of a part that was not committed, and removes it if it is small."""
        if self.size < KEEP_FROM and not self._file.closed:
            self.discard()
        self._file.close()

    def discard(self) -> None:
        """Removes the part."""
        with contextlib.suppress(OSError):
            self.path.unlink()
        self._file.close()


def is_part(path: Path) -> bool:
    """Whether a file's name is that of a part."""
    return path.name.startswith(".") and path.name.endswith(".tmp")


def remove_abandoned(path: Path) -> bool:
    """Removes a part whose owner is gone; False if it has one, or cannot be removed."""
    descriptor = _take(path)
    if descriptor is None:
        return False
    try:
        path.unlink()
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _parts(final: Path) -> list[Path]:
    prefix = f".{final.name}."
    names = os.listdir(final.parent)  # noqa: PTH208  a path for each of them takes longer than all the rest
    return [final.with_name(name) for name in names if name.startswith(prefix) and name.endswith(".tmp")]


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return -1


def _create(final: Path) -> tuple[Path, int]:
    for _ in range(_TRIES):
        path = final.with_name(f".{final.name}.{os.urandom(8).hex()}.tmp")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        # Between these two calls it looks abandoned, so that somebody may have removed it.
        if try_lock(descriptor) is not False and _is_named(descriptor, path):
            return path, descriptor
        os.close(descriptor)
    raise FileExistsError(errno.EEXIST, "temporary files are removed as soon as they are made", str(final))


def _take(path: Path) -> int | None:
    """A descriptor of an abandoned part of ours, locked; None if it is not to be had."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    status = os.fstat(descriptor)
    ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    if ours and try_lock(descriptor) and _is_named(descriptor, path):
        return descriptor
    os.close(descriptor)
    return None


def _is_named(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except OSError:
        return False
