"""One row of a kernel table, and the name that it goes by.

A row is a kernel's identity (the selection columns), its build recipe (the tile columns become -D
macros) and, once built, its resource facts. The facts are written by scripts/build_cubins.py from the
cubin itself and are checked against the cubin again whenever it is loaded.
"""

from __future__ import annotations

import enum
import re
from typing import ClassVar, Literal

import msgspec

from cubin_runtime.errors import TableError
from cubin_runtime.request import SAGE_ANY, SAGE_OFF, SAGE_TOKENS, Architecture, DType, MaskType


class Scheduler(str, enum.Enum):
    """How a block finds its work.

    static       one tile per block
    persistent   blocks stay and draw tiles
    split        persistent, over parts of the keys
    pair         persistent, the keys of a tile divided inside of a block
    """

    STATIC = "static"
    PERSISTENT = "persistent"
    SPLIT = "split"
    PAIR = "pair"

    def __str__(self) -> str:
        return self.value

    @property
    def is_for_few_rows(self) -> bool:
        """Whether cubin_runtime/few_rows.py decides about the kernel."""
        return self in (Scheduler.SPLIT, Scheduler.PAIR)


class Resources(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one launch of the built kernel needs. Read from the cubin, never typed in."""

    threads: int
    """Threads per block."""
    registers: int
    """Registers per thread at launch."""
    shared_memory: int
    """Dynamic shared memory per block, bytes."""
    static_shared_memory: int
    """Static shared memory per block, bytes."""
    parameter_bytes: int
    """Total size of the kernel's parameters, bytes."""


class KernelRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kernel. `name` and the columns above the blank line determine each other."""

    family: str
    arch: str
    dtype_q: DType
    dtype_k: DType
    dtype_v: DType
    dtype_o: DType
    head_dim_qk: int
    head_dim_v: int
    mask_type: MaskType
    tile_q: int
    tile_kv: int
    scheduler: Scheduler
    fp16_softmax: bool = False
    uses_spcompress: bool = False
    skips_softmax: bool = False
    e4m3_p: bool = False
    """P and V are of 8 bits in their product, too; for many keys: see cubin_runtime/many_keys.py."""
    sage_blocks: tuple[int, int, int, int] | Literal["any"] = SAGE_OFF

    abi: str
    """Parameter layout, such as "fmha_sm90/1"; the family's packer checks it."""
    source: str | None = None
    """File that the kernel is built from, relative to the family's folder; None = published elsewhere."""
    entry: str | None = None
    """Entry name in the cubin where it differs from `name`."""
    step_q: int | None = None
    """Query rows that one block covers at a time; None = tile_q."""
    cluster: tuple[int, int, int] = (1, 1, 1)
    pdl: bool = True
    """Whether the kernel waits for its predecessor itself (programmatic dependent launch)."""
    blocks_per_sm: int = 1
    """Blocks that a multiprocessor holds at the same time."""
    stages_k: int | None = None
    stages_v: int | None = None
    resources: Resources | None = None
    """None until the kernel has been built."""

    @property
    def architecture(self) -> Architecture:
        """`arch`, parsed."""
        return Architecture.parse(self.arch)

    @property
    def entry_name(self) -> str:
        """Name of the kernel's entry function in its cubin."""
        return self.entry or self.name

    @property
    def name(self) -> str:
        """The row's unique name, a C identifier; `parse_name` is its inverse."""
        parts = [
            self.family,
            self.arch.replace("_", ""),
            *(str(t) for t in (self.dtype_q, self.dtype_k, self.dtype_v, self.dtype_o)),
            f"h{self.head_dim_qk}x{self.head_dim_v}",
            str(self.mask_type),
            f"t{self.tile_q}x{self.tile_kv}",
            str(self.scheduler),
        ]
        parts += [flag for flag, on in zip(_FLAGS, self._flags(), strict=True) if on]
        if self.sage_blocks == SAGE_ANY:
            parts.append("sage")
        elif self.sage_blocks != SAGE_OFF:
            parts.append("sage" + "x".join(map(str, self.sage_blocks)))
        return "_".join(parts)

    def takes_sage_blocks(self, blocks: tuple[int, int, int, int]) -> bool:
        """Whether the kernel computes with so many tokens per scale of q, k, p and v."""
        if self.sage_blocks != SAGE_ANY:
            return blocks == self.sage_blocks
        q, k, p, v = blocks
        return q in SAGE_TOKENS and k in SAGE_TOKENS and (p, v) == (0, 1)

    def _flags(self) -> tuple[bool, ...]:
        return (self.fp16_softmax, self.uses_spcompress, self.skips_softmax, self.e4m3_p)

    def __post_init__(self) -> None:
        Architecture.parse(self.arch)
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.family):
            raise ValueError(f"family {self.family!r} is not a lower-case identifier")


class Step(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A small kernel of ours that a family launches beside its attention kernels; no request selects it."""

    family: str
    step: str
    """What it does, such as "lse"; with family and arch it makes the name."""
    arch: str
    abi: str
    """Parameter layout, as for KernelRow."""
    source: str
    resources: Resources | None = None

    cluster: ClassVar[tuple[int, int, int]] = (1, 1, 1)
    pdl: ClassVar[bool] = True

    @property
    def architecture(self) -> Architecture:
        """`arch`, parsed."""
        return Architecture.parse(self.arch)

    @property
    def name(self) -> str:
        """The step's unique name, a C identifier."""
        return f"{self.family}_{self.step}_{self.arch.replace('_', '')}"

    @property
    def entry_name(self) -> str:
        """Name of the kernel's entry function in its cubin."""
        return self.name

    def __post_init__(self) -> None:
        Architecture.parse(self.arch)


_FLAGS = ("fp16softmax", "spcompress", "skipsoftmax", "e4m3p")

_NAME = re.compile(
    r"(?P<family>[a-z][a-z0-9_]*?)_sm(?P<arch>\d+[af]?)"
    r"_(?P<q>[a-z0-9]+)_(?P<k>[a-z0-9]+)_(?P<v>[a-z0-9]+)_(?P<o>[a-z0-9]+)"
    r"_h(?P<qk>\d+)x(?P<dv>\d+)_(?P<mask>[a-z]+)_t(?P<tq>\d+)x(?P<tkv>\d+)_(?P<scheduler>[a-z]+)"
    r"(?P<fp16softmax>_fp16softmax)?(?P<spcompress>_spcompress)?(?P<skipsoftmax>_skipsoftmax)?"
    r"(?P<e4m3p>_e4m3p)?"
    r"(?P<sage>_sage(?P<blocks>\d+x\d+x\d+x\d+)?)?"
)


def parse_name(name: str) -> dict[str, object]:
    """The identity columns that `name` spells, ready for `KernelRow(**columns, ...)`.

    Raises TableError where the name is not one that `KernelRow.name` makes.
    """
    m = _NAME.fullmatch(name)
    if m is None:
        raise TableError(f"{name!r} is not a kernel name")
    try:
        return {
            "family": m["family"],
            "arch": f"sm_{m['arch']}",
            **{f"dtype_{x}": DType(m[x]) for x in "qkvo"},
            "head_dim_qk": int(m["qk"]),
            "head_dim_v": int(m["dv"]),
            "mask_type": MaskType(m["mask"]),
            "tile_q": int(m["tq"]),
            "tile_kv": int(m["tkv"]),
            "scheduler": Scheduler(m["scheduler"]),
            "fp16_softmax": m["fp16softmax"] is not None,
            "uses_spcompress": m["spcompress"] is not None,
            "skips_softmax": m["skipsoftmax"] is not None,
            "e4m3_p": m["e4m3p"] is not None,
            "sage_blocks": _sage_blocks(m["sage"], m["blocks"]),
        }
    except ValueError as error:
        raise TableError(f"{name!r} is not a kernel name: {error}") from None


def _sage_blocks(suffix: str | None, blocks: str | None) -> object:
    if blocks:
        return tuple(map(int, blocks.split("x")))
    return SAGE_ANY if suffix else SAGE_OFF
