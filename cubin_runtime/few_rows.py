"""The rule that sends calls to kernels that divide keys, among blocks or in one: most have few query rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

from cubin_runtime.many_keys import many_keys
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
"""Tiles are counted from above: up to so many for each multiprocessor, they may be no more than these."""
_TOO_HIGH = 1.2
"""Where lengths differ, the share is a guess, mostly so many times too high: who has most keys often has few
queries. To divide nothing after all costs up to 5 %; the other way up to half of the speed is lost."""
_MORE_TILES = 1.1
"""Tiles that leave rows unused are worth it where others would be so many times as many."""
_EIGHT_BITS = 1.3
"""The same for 8-bit queries over many keys: in kernels that cannot divide they are faster (many_keys.py)."""


class FewRows(NamedTuple):
    """The tile that suits a call, and why."""

    tile_q: int
    reason: str


@functools.lru_cache(maxsize=64)  # selection asks once for every row of such kernels
def few_rows(request: KernelRequest) -> FewRows | None:
    """The tile for the request; None = other kernels are as good or better, or lengths are not known.

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
    least = divided if mean == 1 else divided / _TOO_HIGH
    if _gives_up_speed(request):
        least = max(least, 1.0)
    if longest < least:
        return None
    reason = _no_more_than(tiles, _LARGE_TILE, sm_count)
    if tiles > sm_count:
        reason += f", and the longest has about {longest:.1f} times a multiprocessor's share of all keys"
    return FewRows(_LARGE_TILE, reason)


def _fewer_tiles(request: KernelRequest) -> FewRows | None:
    """Tiles of 128 that leave rows unused, where tiles without such rows are more."""
    tiles, filled = _tiles(request, _LARGE_TILE), _tiles(request, _LARGE_TILE, filling_heads)
    more = _EIGHT_BITS if _gives_up_speed(request) else _MORE_TILES
    if filled < more * max(tiles, _sm_count(request)):
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
    if request.total_kv is None or not request.batch_size:
        return 1.0
    return min(1.0, request.total_kv / (request.batch_size * max(1, _longest_keys(request))))


def _longest_keys(request: KernelRequest) -> int:
    """No more than the caller's bound, which may be a loose one, nor than a sequence can have.

    That takes sequences for no shorter in keys than in queries.
    """
    assert request.total_kv is not None
    bounds = [request.total_kv]
    if request.max_kv_len is not None:
        bounds.append(request.max_kv_len)
    if request.total_q is not None and request.max_q_len is not None:
        bounds.append(request.max_q_len + max(0, request.total_kv - request.total_q))
    return min(bounds)


def _gives_up_speed(request: KernelRequest) -> bool:
    """Whether other kernels have probabilities of 8 bits: a mere guess is not worth theirs."""
    return request.dtype_q.bytes == 1 and many_keys(request)


def _sm_count(request: KernelRequest) -> int:
    return request.sm_count or DEFAULT_SM_COUNT


def _no_more_than(tiles: int, rows: int, sm_count: int) -> str:
    noun = f"{rows}-row tile" if tiles == 1 else f"{rows}-row tiles"
    return f"no more than {tiles} {noun} for {sm_count} multiprocessors"
