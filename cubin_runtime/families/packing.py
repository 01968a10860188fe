"""Parameter structs described as data: a file of fields with their offsets and types, packed by name.

size: 1280
fields:
  tmaQ_:  0 tensor_map
  ptrO: 912 pointer
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from cubin_runtime import strict_yaml
from cubin_runtime.errors import TableError

_FORMATS = {
    "tensor_map": "128s",
    "pointer": "Q",
    "int32": "i",
    "int64": "q",
    "float32": "f",
    "bool": "?",
    "divisor": "16s",
}
_DIVISOR = struct.Struct("<iIIi")


class _Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: int
    fields: dict[str, str]


class StructLayout:
    """Names, places and types of a struct's fields.

    size    bytes
    fields  name -> (offset in bytes, type)
    """

    def __init__(self, size: int, fields: Mapping[str, tuple[int, str]]) -> None:
        """Raises ValueError for fields that overlap or lie outside, and for unknown types."""
        self.size = size
        self.fields = dict(sorted(fields.items(), key=lambda item: item[1][0]))
        parts, end, self._zeros = [], 0, {}
        for name, (offset, kind) in self.fields.items():
            if kind not in _FORMATS:
                raise ValueError(f"{name} has type {kind!r}; expected one of {', '.join(_FORMATS)}")
            if offset < end:
                raise ValueError(f"{name} at {offset} overlaps the field before it, which ends at {end}")
            parts.append(f"{offset - end}x{_FORMATS[kind]}")
            end = offset + field_size(kind)
            self._zeros[name] = b"" if _FORMATS[kind].endswith("s") else 0
        if end > size:
            raise ValueError(f"the fields end at {end}, behind the struct's {size} bytes")
        self._struct = struct.Struct(f"<{''.join(parts)}{size - end}x")

    def pack(self, values: Mapping[str, Any]) -> bytes:
        """The struct's bytes; a field that is not given, and every gap, is zero.

        Raises KeyError for a name that is no field, OverflowError or struct.error for values that do not fit.
        """
        if not values.keys() <= self._zeros.keys():
            raise KeyError(f"no field is called {', '.join(sorted(values.keys() - self._zeros.keys()))}")
        return self._struct.pack(*{**self._zeros, **values}.values())


def field_size(kind: str) -> int:
    """Bytes of a field of that type."""
    return struct.calcsize(f"<{_FORMATS[kind]}")


@functools.cache
def load_layout(path: Path) -> StructLayout:
    """The layout that a file describes; raises TableError naming the file."""
    try:
        found = msgspec.convert(strict_yaml.parse(path.read_bytes()), _Description, strict=False)
        fields = {name: (int(place), kind) for name, (place, kind) in map(_split, found.fields.items())}
        return StructLayout(found.size, fields)
    except (OSError, ValueError) as error:
        raise TableError(f"{path}: {error}") from None


def _split(field: tuple[str, str]) -> tuple[str, list[str]]:
    name, text = field
    words = text.split()
    if len(words) != 2:
        raise ValueError(f"{name} is {text!r}; expected an offset and a type")
    return name, words


def fast_divisor(number: int) -> bytes:
    """What a kernel needs to divide by `number`, at least 1, with a multiplication and a shift."""
    bits = (number - 1).bit_length()
    return _DIVISOR.pack(number, -(-(1 << (31 + bits)) // number), 0, bits - 1)
