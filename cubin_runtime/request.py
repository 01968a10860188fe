"""What is asked of a kernel: a frozen, hashable value made of plain names and numbers.

Nothing here needs torch, a driver or a GPU. The names of dtypes, masks and architectures are parsed
in this module and nowhere else.
"""

from __future__ import annotations

import enum
import functools
import re
from typing import Literal, NamedTuple

import msgspec

from cubin_runtime.errors import InvalidArgumentError

SAGE_OFF = (0, 0, 0, 0)
SAGE_TOKENS = (1, 4, 16)
"""Tokens per scale that q and k may have."""
SAGE_ANY: Literal["any"] = "any"
"""Of a kernel that takes them as parameters."""


class DType(str, enum.Enum):
    """Element type of a tensor. `DType.parse` also takes torch's and numpy's names."""

    BF16 = "bf16"
    FP16 = "fp16"
    E4M3 = "e4m3"
    INT8 = "int8"
    E2M1 = "e2m1"
    """Two elements in a byte. Published kernels write it; no tensor of the call has it."""

    @property
    def bytes(self) -> int:
        """Size of the smallest addressable unit: one element, or two of E2M1."""
        return 2 if self in (DType.BF16, DType.FP16) else 1

    @classmethod
    def parse(cls, name: str) -> DType:
        """The dtype called `name`; raises InvalidArgumentError listing the names that exist."""
        key = name.lower().removeprefix("torch.")
        try:
            return cls(_DTYPE_ALIASES.get(key, key))
        except ValueError:
            known = ", ".join(sorted({d.value for d in cls} | set(_DTYPE_ALIASES)))
            raise InvalidArgumentError(f"unknown dtype {name!r}; expected one of {known}") from None

    def __str__(self) -> str:
        return self.value


_DTYPE_ALIASES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float8_e4m3fn": "e4m3",
    "fp8": "e4m3",
    "s8": "int8",
}


class MaskType(str, enum.Enum):
    """Which keys a query row sees. Causal and sliding are aligned to the bottom right."""

    DENSE = "dense"
    CAUSAL = "causal"
    SLIDING = "sliding"

    def __str__(self) -> str:
        return self.value


class Capability(NamedTuple):
    """Compute capability of a device, such as (9, 0)."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


class Architecture(NamedTuple):
    """Target of a cubin. `suffix` is "" (portable in its major), "a" (exact) or "f" (family)."""

    major: int
    minor: int
    suffix: str = ""

    @classmethod
    def parse(cls, name: str) -> Architecture:
        """Reads sm_90a, 90a, sm_103, 10.3 and 9.0a."""
        return _parse_architecture(name)

    @property
    def capability(self) -> Capability:
        """The compute capability that the target is named after."""
        return Capability(self.major, self.minor)

    def runs_on(self, device: Capability) -> bool:
        """Whether the driver loads code for this target on a device of that capability.

        CUDA Programming Guide, "Compute Capability" (feature sets): `a` code runs on exactly its
        capability; `f` code on its capability and higher minors of the same family; plain code on
        the same major from its minor up.
        """
        if self.suffix == "a":
            return self.capability == device
        if self.suffix == "f":
            return self.capability <= device and device in _FAMILIES.get(self.capability, (self.capability,))
        return self.major == device.major and self.minor <= device.minor

    def __str__(self) -> str:
        return f"sm_{self.major}{self.minor}{self.suffix}"


@functools.cache  # a table repeats few names in many rows
def _parse_architecture(name: str) -> Architecture:
    text = name.lower().removeprefix("sm_")
    match = re.fullmatch(r"(\d+)\.(\d)([af]?)", text) or re.fullmatch(r"(\d+)(\d)([af]?)", text)
    if not match:
        raise InvalidArgumentError(
            f"unknown architecture {name!r}; expected a name such as sm_90a, sm_103 or 9.0"
        )
    return Architecture(int(match[1]), int(match[2]), match[3])


# Members of each family-specific target, oldest first (CUDA Programming Guide, family-specific features).
_FAMILIES = {
    Capability(10, 0): (Capability(10, 0), Capability(10, 3)),
    Capability(12, 0): (Capability(12, 0), Capability(12, 1)),
}

# Largest dynamic shared memory of one block after opting in, bytes (CUDA Programming Guide,
# "Technical Specifications per Compute Capability", less the 1 KiB the system reserves per block).
_MAX_SHARED_MEMORY = {
    Capability(7, 5): 65_536,
    Capability(8, 0): 166_912,
    Capability(8, 6): 101_376,
    Capability(8, 7): 166_912,
    Capability(8, 9): 101_376,
    Capability(9, 0): 232_448,
    Capability(10, 0): 232_448,
    Capability(10, 3): 232_448,
    Capability(10, 7): 232_448,
    Capability(11, 0): 232_448,
    Capability(12, 0): 101_376,
    Capability(12, 1): 101_376,
}


class KernelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One question to the kernel tables.

    capability            compute capability of the device that holds the tensors
    backend               "trtllm-gen" or "cute-dsl"
    dtype_q/k/v/o         element types of query, key, value and out
    head_dim_qk/head_dim_v
    num_heads_q/num_heads_kv   q a multiple of kv
    mask_type             dense, causal or sliding (causal with a window)
    use_fp16_softmax      exponentials in half precision
    uses_spcompress       2:4 pruning of the logits of interior tiles
    skips_softmax         tiles of negligible weight may be left out
    sage_blocks           tokens per scale of q, k, p, v; all zero = no Sage scales
    batch_size, max_q_len number of sequences and the longest one's queries; None = many
    total_q               queries of all sequences; None = batch_size times max_q_len
    total_kv              keys of all sequences; None = batch_size times max_kv_len
    max_kv_len            most keys that a query can see: the longest sequence's, or a window's; None = many
    sm_count              the device's multiprocessors; None = 132, what the largest Hopper parts have
    max_shared_memory     the device's opt-in limit in bytes; None = what the capability documents
    """

    capability: Capability
    backend: str = "trtllm-gen"
    dtype_q: DType = DType.BF16
    dtype_k: DType = DType.BF16
    dtype_v: DType = DType.BF16
    dtype_o: DType = DType.BF16
    head_dim_qk: int = 192
    head_dim_v: int = 128
    num_heads_q: int = 1
    num_heads_kv: int = 1
    mask_type: MaskType = MaskType.CAUSAL
    use_fp16_softmax: bool = False
    uses_spcompress: bool = False
    skips_softmax: bool = False
    sage_blocks: tuple[int, int, int, int] = SAGE_OFF
    batch_size: int | None = None
    max_q_len: int | None = None
    total_q: int | None = None
    total_kv: int | None = None
    max_kv_len: int | None = None
    sm_count: int | None = None
    max_shared_memory: int | None = None

    def __post_init__(self) -> None:
        for name in ("head_dim_qk", "head_dim_v", "num_heads_q", "num_heads_kv"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.num_heads_q % self.num_heads_kv:
            raise InvalidArgumentError(
                f"num_heads_q is {self.num_heads_q} and num_heads_kv {self.num_heads_kv}; "
                "expected num_heads_q to be a multiple of num_heads_kv"
            )

    @property
    def shared_memory_limit(self) -> int | None:
        """Opt-in shared memory per block in bytes; None when the capability is unknown."""
        return self.max_shared_memory or _MAX_SHARED_MEMORY.get(self.capability)
