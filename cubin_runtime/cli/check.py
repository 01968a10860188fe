"""How far the results of a workload are from exact ones."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import torch

from cubin_runtime.cli.tensors import Tensors
from cubin_runtime.cli.workload import Workload
from cubin_runtime.reference import TILE, ragged_attention_reference
from cubin_runtime.request import DType, KernelRequest

CHECKED_HEADS = 4
CHECKED_PAIRS = 1 << 27  # (query row, key) pairs per sequence and head; bounds time and memory


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """How results differ from exact ones.

    error      relative Frobenius error of out
    lse_error  largest absolute error of lse (base 2); None where it was not compared
    allowed, lse_allowed   what rounding explains
    rows, heads            how many were compared
    """

    against: str
    error: float
    allowed: float
    lse_error: float | None
    lse_allowed: float
    rows: int
    heads: int

    @property
    def passed(self) -> bool:
        """False for NaN, too."""
        lse_is_right = self.lse_error is None or self.lse_error <= self.lse_allowed
        return self.error <= self.allowed and lse_is_right

    def __str__(self) -> str:
        text = f"out {self.error:.1e} relative (allowed {self.allowed:.0e})"
        if self.lse_error is not None:
            text += f", lse {self.lse_error:.1e} absolute (allowed {self.lse_allowed:.0e})"
        return f"{text} against {self.against}, in {self.rows} rows of {self.heads} heads"


def check_against_reference(workload: Workload, tensors: Tensors) -> Check:
    """Compares a few heads of every sequence with the float32 reference."""
    heads = _some_heads(workload.request.num_heads_q)
    kv_heads = [head // (workload.request.num_heads_q // workload.request.num_heads_kv) for head in heads]
    error = _Error(workload, "the float32 reference")
    for rows, keys in _last_rows(workload):
        query = _pick(tensors.query, rows, heads)
        exact = torch.empty(*query.shape[:2], tensors.value.shape[2], device=query.device)
        exact_lse = torch.empty(query.shape[:2], device=query.device)
        ragged_attention_reference(
            query,
            _pick(tensors.key, keys, kv_heads),
            _pick(tensors.value, keys, kv_heads),
            cum_seq_lens_q=torch.tensor([0, query.shape[0]]),
            cum_seq_lens_kv=torch.tensor([0, keys.stop - keys.start]),
            bmm1_scale=workload.scale,
            bmm2_scale=1.0,
            is_causal=workload.is_causal,
            window_left=workload.window_left,
            attention_sinks=None if tensors.sinks is None else tensors.sinks[heads],
            skip_softmax_threshold_scale_factor=workload.skip_softmax_factor or None,
            uses_spcompress=workload.request.uses_spcompress,
            out=exact,
            lse=exact_lse,
        )
        error.add(_pick(tensors.out, rows, heads), exact)
        if tensors.lse is not None:
            error.add_lse(tensors.lse[rows][:, heads], exact_lse)
    return error.check(len(heads))


def check_against_torch(workload: Workload, tensors: Tensors) -> Check | None:
    """Compares every sequence with torch's scaled_dot_product_attention in float32.

    None where it has no counterpart: sinks, and the variants that leave terms out.
    """
    request = workload.request
    if workload.has_sinks or request.uses_spcompress or request.skips_softmax:
        return None
    group = request.num_heads_q // request.num_heads_kv
    error = _Error(workload, "torch's scaled_dot_product_attention")
    for rows, keys in _sequences(workload):
        query = tensors.query[rows].float().transpose(0, 1)
        key = tensors.key[keys].float().transpose(0, 1).repeat_interleave(group, dim=0)
        value = tensors.value[keys].float().transpose(0, 1).repeat_interleave(group, dim=0)
        visible = _visible(workload, query.shape[1], key.shape[1])
        exact = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, scale=workload.scale
        )
        # The contract gives rows without keys zeros; torch's answer to them has changed between versions.
        exact = exact.masked_fill(~visible.any(dim=1)[:, None], 0.0)
        error.add(tensors.out[rows], exact.transpose(0, 1))
    return error.check(request.num_heads_q)


def _visible(workload: Workload, q_len: int, kv_len: int) -> torch.Tensor:
    """bool [q_len, kv_len]: the mask, aligned to the bottom right."""
    visible = torch.ones(q_len, kv_len, dtype=torch.bool)
    if workload.is_causal:
        visible = visible.tril(kv_len - q_len)
    if workload.window_left >= 0:
        visible = visible.triu(kv_len - q_len - workload.window_left)
    return visible


class _Error:
    """Adds up differences over sequences."""

    def __init__(self, workload: Workload, against: str) -> None:
        self._against = against
        self._allowed, self._lse_allowed = _tolerances(workload.request)
        self._rows = 0
        self._difference = 0.0
        self._norm = 0.0
        self._lse: list[float] = []

    def add(self, out: torch.Tensor, exact: torch.Tensor) -> None:
        self._rows += out.shape[0]
        self._difference += float((out.float() - exact).norm()) ** 2
        self._norm += float(exact.norm()) ** 2

    def add_lse(self, lse: torch.Tensor, exact: torch.Tensor) -> None:
        # Equal infinities differ by NaN.
        difference = torch.where(lse == exact, 0.0, (lse - exact).abs())
        if difference.numel():
            self._lse.append(float(difference.max()))

    def check(self, heads: int) -> Check:
        error = math.sqrt(self._difference / self._norm) if self._norm else math.sqrt(self._difference)
        return Check(
            against=self._against,
            error=error,
            allowed=self._allowed,
            lse_error=float(torch.tensor(self._lse).max()) if self._lse else None,  # NaN stays NaN
            lse_allowed=self._lse_allowed,
            rows=self._rows,
            heads=heads,
        )


def _tolerances(request: KernelRequest) -> tuple[float, float]:
    """Relative error of out and absolute error of lse that rounding explains."""
    if request.use_fp16_softmax or min(request.dtype_q.bytes, request.dtype_v.bytes) == 1:
        return 3e-2, 1e-2
    return (1e-3 if request.dtype_o is DType.FP16 else 5e-3), 1e-3


def _some_heads(count: int) -> list[int]:
    """The first, the last, and some between."""
    steps = min(count, CHECKED_HEADS)
    return sorted({step * (count - 1) // max(steps - 1, 1) for step in range(steps)})


def _pick(tensor: torch.Tensor, tokens: slice, heads: list[int]) -> torch.Tensor:
    """[tokens, heads, dim] in float32; by slices, because float8 tensors cannot be indexed by lists."""
    return torch.stack([tensor[tokens, head].float() for head in heads], dim=1)


def _last_rows(workload: Workload) -> Iterator[tuple[slice, slice]]:
    """Query rows and keys of each sequence; of a long one, the last rows within CHECKED_PAIRS.

    The mask is aligned to the bottom right, so these rows are a sequence of their own. They begin with a
    tile of the reference, because the variants that leave terms out count tiles from the first row.
    """
    for rows, keys in _sequences(workload):
        affordable = CHECKED_PAIRS // max(1, keys.stop - keys.start)
        skipped = max(0, rows.stop - rows.start - affordable) // TILE * TILE
        yield slice(rows.start + skipped, rows.stop), keys


def _sequences(workload: Workload) -> Iterator[tuple[slice, slice]]:
    """Query rows and keys of each sequence."""
    row, key = 0, 0
    for q_len, kv_len in zip(workload.q_lens, workload.kv_lens, strict=True):
        yield slice(row, row + q_len), slice(key, key + kv_len)
        row, key = row + q_len, key + kv_len
