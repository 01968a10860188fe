"""Where a kernel family's scratch areas lie in the caller's workspace buffer."""

from __future__ import annotations

import weakref

import msgspec

from cubin_runtime import _driver
from cubin_runtime.errors import InvalidArgumentError

ALIGNMENT = 16


class WorkspaceLayout(msgspec.Struct, frozen=True):
    """Named areas one behind the other, each aligned to 16 bytes. `slabs` maps a name to (offset, size)."""

    slabs: dict[str, tuple[int, int]]

    @classmethod
    def of(cls, **sizes: int) -> WorkspaceLayout:
        """Lays the areas out in the order given; sizes are bytes."""
        slabs = {}
        offset = 0
        for name, size in sizes.items():
            slabs[name] = (offset, size)
            offset += -(-size // ALIGNMENT) * ALIGNMENT
        return cls(slabs)

    @property
    def size(self) -> int:
        """Bytes that the buffer must have."""
        return max((offset + size for offset, size in self.slabs.values()), default=0)

    def offset(self, name: str) -> int:
        """Where an area starts, bytes from the start of the buffer."""
        return self.slabs[name][0]

    def check(self, available: int) -> None:
        """Raises InvalidArgumentError where a buffer of `available` bytes is too small."""
        if available < self.size:
            raise InvalidArgumentError(
                f"workspace_buffer has {available} bytes; this call needs {self.size} "
                "(cubin_runtime.workspace_size tells in advance)"
            )


_zeroed: weakref.WeakKeyDictionary[object, set[tuple[int, int]]] = weakref.WeakKeyDictionary()


def zero_once(owner: object, address: int, size: int, context: int, stream: int) -> None:
    """Zeroes memory before it is used for the first time, in the order of the stream; waits for nothing.

    owner   what frees the memory when it goes: other memory may lie at the same address then

    In a stream that is being captured every call records it: nobody knows whether, or when, the graph runs.
    """
    areas = _zeroed.setdefault(owner, set())
    if (address, size) in areas:
        return
    with _driver.entered(context):
        is_recorded = _driver.is_capturing(stream)
        _driver.set_memory(address, 0, size, stream, f"zeroing {size} bytes of workspace_buffer")
    if not is_recorded:
        areas.add((address, size))
