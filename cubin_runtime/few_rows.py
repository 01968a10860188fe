"""The rule that sends calls with few query rows to kernels that divide their keys, among blocks or in one."""

from __future__ import annotations

import functools
from typing import NamedTuple

from cubin_runtime.request import KernelRequest

DEFAULT_SM_COUNT = 132

_SMALL_TILE = 64
_LARGE_TILE = 128
FEW_KEYS = 2048
"""Up to so many keys, reading them again for every small tile costs less than idle multiprocessors, and
dividing them among blocks costs more than it saves."""


class FewRows(NamedTuple):
    """The tile that suits a call, and why."""

    tile_q: int
    reason: str


@functools.lru_cache(maxsize=64)  # selection asks once for every row of such kernels
def few_rows(request: KernelRequest) -> FewRows | None:
    """The tile for the request; None = it has many query rows, or does not say how many.

    The rows of all heads that share a kv head are packed into tiles. Where tiles of 128 leave multiprocessors
    idle and the keys are many, a kernel is taken that divides them among blocks. Few keys stay in one block,
    whose consumers divide those of 16 bits: then it is a kernel with tiles of 64, if these leave some idle,
    too, so that nothing but the number of tiles decides.
    """
    if request.batch_size is None or request.max_q_len is None:
        return None
    sm_count = request.sm_count or DEFAULT_SM_COUNT
    few_keys = request.max_kv_len is not None and request.max_kv_len <= FEW_KEYS
    tile_q = _SMALL_TILE if few_keys else _LARGE_TILE
    tiles = _tiles(request, tile_q)
    if tiles > sm_count:
        return None
    noun = f"{tile_q}-row tile" if tiles == 1 else f"{tile_q}-row tiles"
    return FewRows(tile_q, f"no more than {tiles} {noun} for {sm_count} multiprocessors")


def packed_heads(group: int) -> int:
    """How many of the `group` heads that share a kv head lie in one tile of a kernel for few rows."""
    return max(n for n in range(1, _SMALL_TILE + 1) if group % n == 0)


def _tiles(request: KernelRequest, tile_q: int) -> int:
    """At most so many tiles."""
    assert request.batch_size is not None
    assert request.max_q_len is not None
    packed = packed_heads(request.num_heads_q // request.num_heads_kv)
    tokens = tile_q // _SMALL_TILE * (_SMALL_TILE // packed)
    most = request.batch_size * -(-request.max_q_len // tokens)
    if request.total_q is not None:
        most = min(most, request.total_q // tokens + request.batch_size)
    return most * (request.num_heads_q // packed)
