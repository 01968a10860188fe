"""What is timed: shapes of attention calls, their exact work, and lists of them in files."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

Mask = Literal["causal", "dense", "window"]
Dtype = Literal["bf16", "fp16", "e4m3", "sage-int8", "sage-e4m3"]

SAGE_BLOCKS = (1, 16, 0, 1)
"""Tokens per scale of q, k, p and v in workloads of Sage attention."""

_ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "e4m3": 1, "sage-int8": 1, "sage-e4m3": 1}
_OUT_BYTES = 2


class WorkloadError(ValueError):
    """A list of workloads that cannot be run; the message names the file or workload and the rule."""


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One attention call. Sequence n has q_lens[n] queries and kv_lens[n] keys.

    head_dims   of query and key, and of value
    mask        "causal": row i sees keys j <= i + kv_len - q_len; "window": of those the `window` keys
                before the diagonal and the diagonal itself; "dense": all
    window      only with mask "window"
    spcompress  logits pruned 2:4, which only we do; work counts as without
    kv_lens     default: q_lens
    """

    name: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...] = ()
    dtype: Dtype = "bf16"
    heads: int = 128
    kv_heads: int = 0
    head_dims: tuple[int, int] = (192, 128)
    mask: Mask = "causal"
    window: int | None = None
    spcompress: bool = False

    def __post_init__(self) -> None:
        # msgspec's way to give a frozen struct defaults that depend on other fields.
        if not self.kv_lens:
            msgspec.structs.force_setattr(self, "kv_lens", self.q_lens)
        if not self.kv_heads:
            msgspec.structs.force_setattr(self, "kv_heads", self.heads)
        for broken, rule in (
            (not self.q_lens or len(self.q_lens) != len(self.kv_lens), "q_lens and kv_lens need one length"),
            (min((*self.q_lens, *self.kv_lens), default=0) < 0, "lengths are not negative"),
            (min(self.heads, self.kv_heads) < 1, "heads and kv_heads are at least 1"),
            (self.heads % max(self.kv_heads, 1) != 0, "heads is a multiple of kv_heads"),
            (min(self.head_dims) < 1, "head_dims are at least 1"),
            ((self.mask == "window") != (self.window is not None), "window goes with mask 'window', only"),
            (self.window is not None and self.window < 0, "window is not negative"),
            (self.spcompress and self.dtype != "e4m3", "spcompress goes with dtype 'e4m3', only"),
            (not self.pairs, "at least one query sees a key"),
        ):
            if broken:
                raise ValueError(f"workload {self.name!r}: {rule}")

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return len(self.q_lens)

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.heads // self.kv_heads

    @property
    def sage(self) -> bool:
        """Operands have scales by blocks: nobody else's business."""
        return self.dtype.startswith("sage-")

    @property
    def equal_lengths(self) -> bool:
        """Fits a dense [batch, tokens, heads, dim] tensor, so that fixed-length entries can take part."""
        return len(set(self.q_lens)) == 1 and len(set(self.kv_lens)) == 1

    @property
    def self_attention(self) -> bool:
        """Every sequence has as many keys as queries."""
        return self.q_lens == self.kv_lens

    @property
    def pairs(self) -> int:
        """(query, key) pairs that see each other, of all sequences and one head."""
        return sum(map(self._pairs, self.q_lens, self.kv_lens))

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products over the visible pairs."""
        return 2 * sum(self.head_dims) * self.heads * self.pairs

    @property
    def bytes(self) -> int:
        """Memory traffic that no kernel can avoid: every visible operand and every result once."""
        dim_qk, dim_v = self.head_dims
        element = _ELEMENT_BYTES[self.dtype]
        query = sum(self.q_lens) * self.heads * (dim_qk * element + dim_v * _OUT_BYTES)
        keys = sum(map(self._visible_keys, self.q_lens, self.kv_lens))
        return query + keys * self.kv_heads * (dim_qk + dim_v) * element

    def describe(self) -> str:
        """The shape in a few words."""
        heads = str(self.heads) if self.group == 1 else f"{self.heads}/{self.kv_heads}"
        mask = f"window {self.window}" if self.mask == "window" else self.mask
        lengths = f"q {_compact(self.q_lens)}"
        if not self.self_attention:
            lengths += f" kv {_compact(self.kv_lens)}"
        dim_qk, dim_v = self.head_dims
        variant = " spcompress" if self.spcompress else ""
        return f"{self.dtype}{variant} ({dim_qk},{dim_v}) {mask}, {heads} heads, {lengths}"

    def _pairs(self, q_len: int, kv_len: int) -> int:
        if self.mask == "dense":
            return q_len * kv_len
        # The rows see kv_len - q_len + 1, ..., kv_len keys, cut off below 0 and above the window.
        limit = kv_len if self.window is None else self.window + 1
        return _clipped_sum(kv_len, limit) - _clipped_sum(kv_len - q_len, limit)

    def _visible_keys(self, q_len: int, kv_len: int) -> int:
        if not q_len:
            return 0
        return kv_len if self.window is None else min(kv_len, q_len + self.window)


def _clipped_sum(last: int, limit: int) -> int:
    """1 + 2 + ... + last with every term cut to `limit`; 0 where there is none."""
    last = max(last, 0)
    below = min(last, limit)
    return below * (below + 1) // 2 + (last - below) * limit


def _compact(lengths: Sequence[int]) -> str:
    if len(set(lengths)) == 1:
        return str(lengths[0]) if len(lengths) == 1 else f"{len(lengths)} x {lengths[0]}"
    shown = ",".join(map(str, lengths[:8]))
    return shown if len(lengths) <= 8 else f"{shown},... ({len(lengths)} sequences)"


def read_workloads(path: Path) -> tuple[Workload, ...]:
    """A JSON list of objects with Workload's fields. Raises WorkloadError."""
    try:
        return unique(msgspec.json.decode(path.read_bytes(), type=tuple[Workload, ...]), str(path))
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror or error}") from error
    except msgspec.MsgspecError as error:
        raise WorkloadError(f"{path}: {error}") from error


def matching(workloads: Iterable[Workload], pattern: str) -> tuple[Workload, ...]:
    """Those whose name fits a shell pattern, or one of several between commas."""
    patterns = pattern.split(",")
    return tuple(w for w in workloads if any(fnmatch.fnmatchcase(w.name, p) for p in patterns))


def unique(workloads: tuple[Workload, ...], source: str) -> tuple[Workload, ...]:
    """The same list. Raises WorkloadError where two have one name."""
    names = [workload.name for workload in workloads]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise WorkloadError(f"{source}: names are used twice: {', '.join(sorted(repeated))}")
    return workloads
