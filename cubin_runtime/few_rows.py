"""The rule that sends calls with few query rows to kernels that divide their keys, among blocks or in one."""

from __future__ import annotations

import functools
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
    too, so that nothing but the number of tiles decides. Of one causal sequence there may be more: the
    longest tile goes with the shortest.
    """
    if request.batch_size is None or request.max_q_len is None:
        return None
    sm_count = request.sm_count or DEFAULT_SM_COUNT
    few_keys = request.max_kv_len is not None and request.max_kv_len <= FEW_KEYS
    tile_q = _SMALL_TILE if few_keys else _LARGE_TILE
    tiles = _tiles(request, tile_q)
    if tiles > (_most_dealt(request, sm_count) if few_keys else sm_count):
        return None
    noun = f"{tile_q}-row tile" if tiles == 1 else f"{tile_q}-row tiles"
    dealt = ", the longest with the shortest" if tiles > sm_count else ""
    return FewRows(tile_q, f"no more than {tiles} {noun} for {sm_count} multiprocessors{dealt}")


def packed_heads(group: int) -> int:
    """How many of the `group` heads that share a kv head lie in one tile of a kernel for few rows."""
    return max(n for n in range(1, _SMALL_TILE + 1) if group % n == 0)


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
