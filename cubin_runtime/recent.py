"""A shortcut to what an earlier call prepared: one check in C++ of all tensors at once.

Comparing the shapes, strides, dtypes and devices of nine tensors in Python costs half of a warm call. torch
has that comparison for the guards of torch.compile. It is not a public interface, so a torch without it, or
with another one, only makes calls slower.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from cubin_runtime.bounded import Bounded

_Value = TypeVar("_Value")


class Recent(Generic[_Value]):
    """The latest value for each key, valid for tensors that are laid out like those it was remembered with.

    That means type, shape, strides, dtype, device and how torch treats them (such as inference mode). No
    tensor is kept alive. Safe to use from several threads.
    """

    def __init__(self, most: int) -> None:
        self._entries: Bounded[Hashable, tuple[Any, _Value]] = Bounded(most)

    def find(self, key: Hashable, tensors: Sequence[Tensor]) -> _Value | None:
        """The value remembered for the key and such tensors, whose number must follow from the key."""
        entry = self._entries.get(key)
        return entry[1] if entry is not None and entry[0].check(*tensors) else None

    def remember(self, key: Hashable, tensors: Sequence[Tensor], value: _Value) -> None:
        """Replaces what is known for the key; where there are too many keys, starts over."""
        guards = _tensor_guards(tensors)
        if guards is not None:
            self._entries[key] = guards, value

    def clear(self) -> None:
        """Forgets everything."""
        self._entries.clear()


def _tensor_guards(tensors: Sequence[Tensor]) -> Any:
    try:
        from torch._C._dynamo.guards import TensorGuards

        guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        return guards if guards.check(*tensors) else None
    except Exception:  # whatever another version of an internal interface may do
        return None
