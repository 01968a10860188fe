"""The rule that sends calls with few query rows to kernels that divide their keys, among blocks or in one."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

from cubin_runtime.request import DType, KernelRequest, MaskType

DEFAULT_SM_COUNT = 132

_SMALL_TILE = 64
_LARGE_TILE = 128
FEW_KEYS = 2048
"""Up to so many keys, reading them again for every small tile costs less than idle multiprocessors, and
dividing them among blocks costs more than it saves."""

_DEALT_QUERIES = 320
"""From so many on, some multiprocessors may have two tiles of one sequence."""
_LONG_QUERIES = 768
"""From so many on, all of them may. Larger tiles were faster for shorter sequences of as many tiles."""

_DIVIDED = 1.5
"""The kernel divides a sequence that has so many times a multiprocessor's share of all keys, and where tiles
are more than multiprocessors, from one share on (kernel_meta/fmha_sm90/division.cuh)."""
_TILES_OF_ONE_ROUND = 1.25
"""Tiles are counted from above: so many for a multiprocessor may still be one."""
_TOO_HIGH = 1.2
"""Where lengths differ, the share is a guess, mostly so many times too high: who has most keys often has few
queries. To divide nothing after all costs some 3 %; the other way up to half of the speed is lost."""
_MORE_TILES = 1.1
"""Tiles that leave rows unused are worth it where others would be so many times as many."""


class FewRows(NamedTuple):
    """The tile that suits a call, and why."""

    tile_q: int
    reason: str


@functools.lru_cache(maxsize=64)  # selection asks once for every row of such kernels
def few_rows(request: KernelRequest) -> FewRows | None:
    """The tile for the request; None = it has many query rows, or does not say how many.

    The rows of all heads that share a kv head are packed into tiles. Few keys stay in one block, whose
    consumers divide those of 16 bits: then it is a kernel with tiles of 64, if these leave some
    multiprocessors idle, so that nothing but the number of tiles decides. Of one causal sequence there may be
    more: the longest tile goes with the shortest.

    Otherwise it is a kernel with tiles of 128 that can divide keys among blocks, where that ends earlier:
    where tiles are few, or one of many sequences is long. It also leaves rows of a tile unused to pack heads
    that do not fill one, such as 5 or 7, and is taken where that makes tiles fewer.
    """
    if request.batch_size is None or request.max_q_len is None:
        return None
    if request.max_kv_len is not None and request.max_kv_len <= FEW_KEYS:
        return _few_keys(request) or _fewer_tiles(request)
    return _many_keys(request) or _fewer_tiles(request)


def packed_heads(group: int) -> int:
    """How many of the `group` heads that share a kv head lie in one tile of a kernel for few rows."""
    return max(n for n in range(1, _SMALL_TILE + 1) if group % n == 0)


def filling_heads(group: int) -> int:
    """The same of a kernel for many rows, which leaves none of a tile unused."""
    return math.gcd(group, _SMALL_TILE)


def _few_keys(request: KernelRequest) -> FewRows | None:
    sm_count = _sm_count(request)
    tiles = _tiles(request, _SMALL_TILE)
    if tiles > _most_dealt(request, sm_count):
        return None
    dealt = ", the longest with the shortest" if tiles > sm_count else ""
    return FewRows(_SMALL_TILE, _no_more_than(tiles, _SMALL_TILE, sm_count) + dealt)


def _many_keys(request: KernelRequest) -> FewRows | None:
    sm_count = _sm_count(request)
    tiles = _tiles(request, _LARGE_TILE)
    mean = _mean_keys(request)
    longest = sm_count / max(tiles * mean, 1.0)  # in shares of a multiprocessor
    divided = _DIVIDED if tiles <= _TILES_OF_ONE_ROUND * sm_count else 1.0
    if longest < (divided if mean == 1 else divided / _TOO_HIGH):
        return None
    reason = _no_more_than(tiles, _LARGE_TILE, sm_count)
    if tiles > sm_count:
        reason += f", and the longest has about {longest:.1f} times a multiprocessor's share of all keys"
    return FewRows(_LARGE_TILE, reason)


def _fewer_tiles(request: KernelRequest) -> FewRows | None:
    """Tiles of 128 that leave rows unused, where tiles without such rows are more."""
    tiles, filled = _tiles(request, _LARGE_TILE), _tiles(request, _LARGE_TILE, filling_heads)
    if filled < _MORE_TILES * max(tiles, _sm_count(request)):
        return None
    group = request.num_heads_q // request.num_heads_kv
    reason = f"no more than {tiles} {_LARGE_TILE}-row tiles with the {group} heads of a kv head side by side"
    return FewRows(_LARGE_TILE, f"{reason}, {filled} without")


def _most_dealt(request: KernelRequest, sm_count: int) -> int:
    """How many tiles of 64 rows are not too many.

    More than multiprocessors where these are of one sequence, some long and some short, so that two together
    are about as long as any other two (kernel_meta/fmha_sm90/scheduler.cuh deals them so).
    """
    assert request.max_q_len is not None
    assert request.max_kv_len is not None
    is_one = request.batch_size == 1 and request.mask_type is MaskType.CAUSAL
    varies = request.max_q_len >= max(_DEALT_QUERIES, 3 * request.max_kv_len // 4)
    if not is_one or not varies or request.dtype_v not in (DType.BF16, DType.FP16):
        return sm_count
    return 2 * sm_count if request.max_q_len >= _LONG_QUERIES else 3 * sm_count // 2


def _tiles(request: KernelRequest, tile_q: int, heads_of_tile: Callable[[int], int] = packed_heads) -> int:
    """At most so many tiles."""
    assert request.batch_size is not None
    assert request.max_q_len is not None
    heads = heads_of_tile(request.num_heads_q // request.num_heads_kv)
    tokens = tile_q // _SMALL_TILE * (_SMALL_TILE // heads)
    most = request.batch_size * -(-request.max_q_len // tokens)
    if request.total_q is not None:
        most = min(most, request.total_q // tokens + request.batch_size)
    return most * (request.num_heads_q // heads)


def _mean_keys(request: KernelRequest) -> float:
    """Of a sequence, in units of the longest one's."""
    if request.total_kv is None or not request.max_kv_len or not request.batch_size:
        return 1.0
    return min(1.0, request.total_kv / (request.batch_size * request.max_kv_len))


def _sm_count(request: KernelRequest) -> int:
    return request.sm_count or DEFAULT_SM_COUNT


def _no_more_than(tiles: int, rows: int, sm_count: int) -> str:
    noun = f"{rows}-row tile" if tiles == 1 else f"{rows}-row tiles"
    return f"no more than {tiles} {noun} for {sm_count} multiprocessors"
