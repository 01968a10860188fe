"""Where a kernel family's scratch areas lie in the caller's workspace buffer."""

from __future__ import annotations

import msgspec

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
