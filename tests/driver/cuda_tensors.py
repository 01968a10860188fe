"""Tensors that claim to lie on a CUDA device: shape, strides and an address, but no memory.

With them the public call runs whole where there is no GPU. Whatever would read, write or allocate one raises.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

_addresses = itertools.count(1 << 40, 1 << 32)


class CudaTensor(torch.Tensor):
    """A tensor on `cuda:<device>` at an address that nobody owns."""

    address: int

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype = torch.bfloat16,
        *,
        strides: Sequence[int] | None = None,
        address: int | None = None,
        device: int = 0,
    ) -> CudaTensor:
        """strides in elements, default: no gaps; address default: one far from every other tensor's."""
        if strides is None:
            strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=dtype, device=f"cuda:{device}"
        )
        tensor.address = next(_addresses) if address is None else address
        return tensor

    def data_ptr(self) -> int:
        return self.address if self.numel() else 0

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was run on a tensor of the device")

    def __repr__(self) -> str:
        raise AssertionError("a tensor of the device was printed, which would read it")


def cuda_call(
    q_lens: Sequence[int] = (300, 20),
    kv_lens: Sequence[int] = (400, 50),
    *,
    heads: tuple[int, int] = (32, 16),
    head_dims: tuple[int, int] = (192, 128),
    dtype: torch.dtype = torch.bfloat16,
    device: int = 0,
    **changes: Any,
) -> dict[str, Any]:
    """Arguments of `trtllm_ragged_attention_deepseek` for a causal batch, with out and lse given.

    heads    (num_heads_q, num_heads_kv)
    changes  replaces arguments, or adds those that have a default
    """

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> CudaTensor:
        return CudaTensor(shape, dtype, device=device)

    batch, total_q, total_kv = len(q_lens), sum(q_lens), sum(kv_lens)
    return {
        "query": tensor(total_q, heads[0], head_dims[0]),
        "key": tensor(total_kv, heads[1], head_dims[0]),
        "value": tensor(total_kv, heads[1], head_dims[1]),
        "workspace_buffer": tensor(128 << 20, dtype=torch.uint8),
        "seq_lens": tensor(batch, dtype=torch.int32),
        "max_q_len": max(q_lens, default=0),
        "max_kv_len": max(kv_lens, default=0),
        "bmm1_scale": 0.125,
        "bmm2_scale": 1.0,
        "o_sf_scale": 1.0,
        "batch_size": batch,
        "window_left": -1,
        "cum_seq_lens_q": tensor(batch + 1, dtype=torch.int32),
        "cum_seq_lens_kv": tensor(batch + 1, dtype=torch.int32),
        "out": tensor(total_q, heads[0], head_dims[1]),
        "lse": tensor(total_q, heads[0], dtype=torch.float32),
        **changes,
    }
