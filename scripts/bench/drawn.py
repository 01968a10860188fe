"""Shapes drawn by lot, of the kinds that serving engines make. NOTES.md has what changed for one of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from bench.workloads import Dtype, Mask, Workload

_Item = TypeVar("_Item")
_Lengths = tuple[tuple[int, ...], tuple[int, ...]]

_MOST_FLOPS = 6e12  # some 8 ms
_MOST_BYTES = 3e9

_MULTI_HEAD = ((8, 8), (16, 16), (32, 32), (64, 64), (128, 128))
_GROUPED = ((8, 1), (8, 8), (16, 2), (16, 4), (24, 8), (28, 4), (32, 8), (32, 32), (40, 8), (48, 8), (64, 8))
_HEADS = {(192, 128): _MULTI_HEAD, (128, 128): _GROUPED, (256, 256): _GROUPED}
_HEAD_DIMS = ((192, 128), (192, 128), (128, 128), (128, 128), (256, 256))
_MASKS: tuple[Mask, ...] = ("causal", "causal", "causal", "dense")
_DTYPES: tuple[Dtype, ...] = ("bf16", "bf16", "bf16", "e4m3")


def draw(seed: int, count: int) -> Iterator[Workload]:
    """As many workloads, the same for the same seed."""
    lot = _Lot(seed)
    number = 0
    while number < count:
        kind = lot.one_of(tuple(_KINDS))
        q_lens, kv_lens = _KINDS[kind](lot)
        head_dims = lot.one_of(_HEAD_DIMS)
        heads, kv_heads = lot.one_of(_HEADS[head_dims])
        mask, dtype = lot.one_of(_MASKS), lot.one_of(_DTYPES)
        name = f"{number + 1:02}_{kind}_{dtype}_{head_dims[0]}_h{heads}_{kv_heads}_{mask}"
        drawn = Workload(name, q_lens, kv_lens, dtype, heads, kv_heads, head_dims, mask)
        if drawn.flops <= _MOST_FLOPS and drawn.bytes <= _MOST_BYTES:
            number += 1
            yield drawn


class _Lot:
    """Goes by random() alone, which is the same in all versions of Python."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def one_of(self, items: Sequence[_Item]) -> _Item:
        return items[int(self._random.random() * len(items))]

    def number(self, low: int, high: int) -> int:
        """Small ones are as likely as large ones: their logarithm is evenly distributed."""
        return round(low * math.exp(self._random.random() * math.log(high / low)))

    def numbers(self, count: int, low: int, high: int) -> tuple[int, ...]:
        return tuple(self.number(low, high) for _ in range(count))


def _prompts_of_one_length(lot: _Lot) -> _Lengths:
    lengths = (lot.number(64, 9000),) * lot.number(1, 24)
    return lengths, lengths


def _prompts(lot: _Lot) -> _Lengths:
    lengths = lot.numbers(lot.number(2, 60), 16, 8000)
    return lengths, lengths


def _chunks(lot: _Lot) -> _Lengths:
    chunks = tuple(lot.one_of((256, 512, 1024, 2048, 4096)) for _ in range(lot.number(1, 4)))
    return chunks, _behind(chunks, lot.numbers(len(chunks), 500, 40_000))


def _cached_prefixes(lot: _Lot) -> _Lengths:
    rests = lot.numbers(lot.number(2, 12), 30, 1500)
    return rests, _behind(rests, lot.numbers(len(rests), 100, 12_000))


def _prompt_beside_single_tokens(lot: _Lot) -> _Lengths:
    tokens, prompt = (1,) * lot.number(2, 30), lot.number(128, 4000)
    return (*tokens, prompt), (*lot.numbers(len(tokens), 200, 20_000), prompt)


def _few_rows(lot: _Lot) -> _Lengths:
    rows = lot.numbers(lot.number(1, 16), 1, 200)
    return rows, _behind(rows, lot.numbers(len(rows), 1000, 80_000))


def _behind(queries: tuple[int, ...], prefixes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(sum, zip(queries, prefixes, strict=True)))


_KINDS: dict[str, Callable[[_Lot], _Lengths]] = {
    "equal": _prompts_of_one_length,
    "ragged": _prompts,
    "chunks": _chunks,
    "prefixes": _cached_prefixes,
    "mixed": _prompt_beside_single_tokens,
    "few": _few_rows,
}
