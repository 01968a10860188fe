"""Operands to quantise, for tests on the CPU and the GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tests.ragged_call import edges

LENGTHS = [0, 1, 15, 16, 17, 0, 63, 129, 4, 0]
PADDING = 37


def operands(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dims: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
    padding: int = 0,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Keyword arguments. Channels and tokens differ in magnitude, key has a mean, padding is NaN."""
    generator = torch.Generator(device).manual_seed(len(q_lens))

    def normal(tokens: int, heads: int, head_dim: int) -> torch.Tensor:
        tensor = torch.randn(tokens + padding, heads, head_dim, generator=generator, device=device)
        tensor *= torch.logspace(-5, 1, head_dim, device=device)
        tensor[::5] *= 1e-3
        tensor[tokens:] = math.nan
        return tensor.to(dtype)

    key = normal(sum(kv_lens), heads[1], head_dims[0])
    return {
        "query": normal(sum(q_lens), heads[0], head_dims[0]),
        "key": key + torch.linspace(-3, 3, head_dims[0], device=device).to(dtype),
        "value": normal(sum(kv_lens), heads[1], head_dims[1]),
        "cum_seq_lens_q": edges(q_lens).to(device),
        "cum_seq_lens_kv": edges(kv_lens).to(device),
    }
