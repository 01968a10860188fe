"""Arguments for the public call, with tensors on the CPU."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cubin_runtime import trtllm_ragged_attention_deepseek
from cubin_runtime.arguments import Call

SIGNATURE = inspect.signature(trtllm_ragged_attention_deepseek)


def edges(lengths: Sequence[int]) -> torch.Tensor:
    """int32 [batch + 1]: where each sequence starts, and the total."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def cpu_call(
    q_lens: Sequence[int] = (3, 2),
    kv_lens: Sequence[int] = (5, 4),
    *,
    heads: tuple[int, int] = (4, 2),
    head_dims: tuple[int, int] = (192, 128),
    dtype: torch.dtype = torch.bfloat16,
    **changes: Any,
) -> dict[str, Any]:
    """Keyword arguments of a causal call with random tensors, without those that have a default.

    heads    (num_heads_q, num_heads_kv)
    changes  replaces arguments, or adds those that have a default
    """
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    total_q, total_kv = sum(q_lens), sum(kv_lens)
    return {
        "query": randn(total_q, heads[0], head_dims[0]),
        "key": randn(total_kv, heads[1], head_dims[0]),
        "value": randn(total_kv, heads[1], head_dims[1]),
        "workspace_buffer": torch.empty(128, dtype=torch.uint8),
        "seq_lens": torch.tensor(kv_lens, dtype=torch.int32),
        "max_q_len": max(q_lens, default=0),
        "max_kv_len": max(kv_lens, default=0),
        "bmm1_scale": 0.125,
        "bmm2_scale": 1.0,
        "o_sf_scale": 1.0,
        "batch_size": len(q_lens),
        "window_left": -1,
        "cum_seq_lens_q": edges(q_lens),
        "cum_seq_lens_kv": edges(kv_lens),
        "backend": "reference",
        **changes,
    }


def as_call(arguments: Mapping[str, Any]) -> Call:
    """The arguments as the checks take them, defaults filled in."""
    bound = SIGNATURE.bind(**arguments)
    bound.apply_defaults()
    return Call(**bound.arguments)
