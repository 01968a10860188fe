"""Tensor maps: how the TMA unit walks a tensor in tiles.

Every rule that cuTensorMapEncodeTiled documents is checked here first, because the driver answers any
violation with the same "invalid argument", and some machines only.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from cubin_runtime import _driver
from cubin_runtime.errors import InvalidArgumentError
from cubin_runtime.request import DType

_DATA_TYPES = {
    DType.BF16: "BFLOAT16",
    DType.FP16: "FLOAT16",
    DType.E4M3: "UINT8",  # TMA moves bytes; only fp16, bf16 and wider have a type of their own
    DType.INT8: "UINT8",
    DType.E2M1: "UINT8",
}
_SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}
_L2_PROMOTIONS = {0: "NONE", 64: "L2_64B", 128: "L2_128B", 256: "L2_256B"}

_ALIGNMENT = 16
_MAX_RANK = 5
_MAX_DIM = 2**32
_MAX_STRIDE = 2**40
_MAX_BOX = 256
_MAX_ELEMENT_STRIDE = 8


class TiledMap(msgspec.Struct, frozen=True, kw_only=True):
    """A tiled view of a tensor in global memory; dimensions from the innermost, contiguous one outwards.

    tensor           the argument's name, for messages
    dtype            element type
    dims             extents, elements
    strides          distance of neighbours along every dimension but the innermost, bytes
    box              extents of one tile, elements
    element_strides  step within the tile, elements; None = 1 everywhere
    swizzle          pattern in shared memory, bytes: 0, 32, 64 or 128
    l2_promotion     granularity of L2 fetches, bytes: 0, 64, 128 or 256
    oob_fill         what elements outside the tensor read as: zero, or NaN where the dtype has it
    """

    tensor: str
    dtype: DType
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...] | None = None
    swizzle: Literal[0, 32, 64, 128] = 128
    l2_promotion: Literal[0, 64, 128, 256] = 256
    oob_fill: Literal["zero", "nan"] = "zero"

    def violations(self, ptr: int) -> list[str]:
        """Each broken rule as a sentence; `ptr` is the address of element 0. Empty = it can be encoded."""
        rank = len(self.dims)
        steps = self._steps()
        if not 1 <= rank <= _MAX_RANK:
            return [f"rank is {rank}; expected 1 to {_MAX_RANK}"]
        if (len(self.strides), len(self.box), len(steps)) != (rank - 1, rank, rank):
            return [
                f"rank is {rank}, with {len(self.strides)} strides, {len(self.box)} box extents and "
                f"{len(steps)} element strides; expected {rank - 1}, {rank} and {rank}"
            ]
        broken = []
        if ptr <= 0 or ptr % _ALIGNMENT:
            broken.append(f"its address is {ptr:#x}; expected a multiple of {_ALIGNMENT}")
        for i, dim in enumerate(self.dims):
            if not 1 <= dim <= _MAX_DIM:
                broken.append(f"extent {i} is {dim}; expected 1 to 2**32")
        for i, stride in enumerate(self.strides, 1):
            if stride % _ALIGNMENT or not 0 <= stride < _MAX_STRIDE:
                broken.append(
                    f"stride {i} is {stride} bytes; expected a multiple of {_ALIGNMENT} below 2**40"
                )
        for i, extent in enumerate(self.box):
            if not 1 <= extent <= _MAX_BOX:
                broken.append(f"box extent {i} is {extent}; expected 1 to {_MAX_BOX}")
        for i, step in enumerate(steps):
            if not 1 <= step <= _MAX_ELEMENT_STRIDE:
                broken.append(f"element stride {i} is {step}; expected 1 to {_MAX_ELEMENT_STRIDE}")
        return broken + self._row_violations()

    def _row_violations(self) -> list[str]:
        """Rules about the innermost extent of the box, and the options."""
        broken = []
        row = self.box[0] * self.dtype.bytes
        if row % _ALIGNMENT:
            broken.append(f"a row of the box has {row} bytes; expected a multiple of {_ALIGNMENT}")
        if self.swizzle not in _SWIZZLES:
            broken.append(f"swizzle is {self.swizzle}; expected one of {', '.join(map(str, _SWIZZLES))}")
        elif self.swizzle and row > self.swizzle:
            broken.append(f"a row of the box has {row} bytes; expected at most its swizzle, {self.swizzle}")
        if self.l2_promotion not in _L2_PROMOTIONS:
            known = ", ".join(map(str, _L2_PROMOTIONS))
            broken.append(f"l2_promotion is {self.l2_promotion}; expected one of {known}")
        if self.oob_fill == "nan" and _DATA_TYPES[self.dtype] == "UINT8":
            broken.append(f"oob_fill is nan; expected zero for {self.dtype}")
        return broken

    def _steps(self) -> tuple[int, ...]:
        return (1,) * len(self.dims) if self.element_strides is None else self.element_strides

    def encode(self, ptr: int) -> bytes:
        """The 128 bytes of the CUtensorMap for the tensor at `ptr`.

        Raises InvalidArgumentError, naming the tensor and the rules, before the driver is asked.
        """
        broken = self.violations(ptr)
        if broken:
            raise InvalidArgumentError(f"{self.tensor} cannot be read in tiles: " + "; ".join(broken))
        return _driver.encode_tiled(
            dtype=_DATA_TYPES[self.dtype],
            address=ptr,
            dims=self.dims,
            strides=self.strides,
            box=self.box,
            element_strides=self._steps(),
            swizzle=_SWIZZLES[self.swizzle],
            l2_promotion=_L2_PROMOTIONS[self.l2_promotion],
            oob_fill="NAN_REQUEST_ZERO_FMA" if self.oob_fill == "nan" else "NONE",
            doing=f"encoding the tensor map of {self.tensor}",
        )
