"""The rule that sends 8-bit calls over many keys to kernels whose second product is one of 8-bit elements."""

from __future__ import annotations

import msgspec

from cubin_runtime.request import KernelRequest

MANY_KEYS = 1024
"""At so many keys 8 bits of the probabilities instead of 16 are 1.16 times as fast; fewer keep the bits."""


def many_keys(request: KernelRequest) -> bool:
    """Whether queries see many keys, or it is not known how many."""
    return request.max_kv_len is None or request.max_kv_len >= MANY_KEYS


def without_lengths(request: KernelRequest) -> KernelRequest:
    """The request of all calls that differ from this one in lengths to which selection is indifferent.

    Of few query rows (few_rows.py), the tile counts besides.
    """
    keys = None if many_keys(request) else MANY_KEYS - 1
    return msgspec.structs.replace(
        request, batch_size=None, max_q_len=None, total_q=None, total_kv=None, max_kv_len=keys
    )
