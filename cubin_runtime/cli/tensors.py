"""The tensors of a workload, and the public call with them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from cubin_runtime.arguments import DTYPES
from cubin_runtime.attention import trtllm_ragged_attention_deepseek
from cubin_runtime.cli.workload import Workload
from cubin_runtime.planning import workspace_size
from cubin_runtime.request import DType

_TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


class Tensors(NamedTuple):
    """Inputs and results of one call, shaped as the call documents."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sinks: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor | None


def make_tensors(workload: Workload, device: torch.device, seed: int = 0) -> Tensors:
    """Normal inputs, the same for the same seed; results filled with NaN."""
    generator = torch.Generator(device).manual_seed(seed)
    request = workload.request

    def normal(tokens: int, heads: int, head_dim: int, dtype: DType) -> torch.Tensor:
        drawn = torch.randn(tokens, heads, head_dim, generator=generator, device=device, dtype=torch.bfloat16)
        return drawn.to(_TORCH_DTYPES[dtype])

    total_q, total_kv = sum(workload.q_lens), sum(workload.kv_lens)
    heads, kv_heads = request.num_heads_q, request.num_heads_kv
    unwritten = functools.partial(torch.full, fill_value=math.nan, device=device)
    sinks = torch.randn(heads, generator=generator, device=device) if workload.has_sinks else None
    return Tensors(
        query=normal(total_q, heads, request.head_dim_qk, request.dtype_q),
        key=normal(total_kv, kv_heads, request.head_dim_qk, request.dtype_k),
        value=normal(total_kv, kv_heads, request.head_dim_v, request.dtype_v),
        sinks=sinks,
        out=unwritten((total_q, heads, request.head_dim_v), dtype=_TORCH_DTYPES[request.dtype_o]),
        lse=unwritten((total_q, heads), dtype=torch.float32) if workload.return_lse else None,
    )


def make_call(workload: Workload, tensors: Tensors, backend: str) -> Callable[[], object]:
    """The public call with everything filled in, so that repeating it costs what it costs a server."""
    device = tensors.query.device
    request = workload.request
    needed = 0
    if backend != "reference":
        needed = workspace_size(
            request=request,
            batch_size=len(workload.q_lens),
            total_q=sum(workload.q_lens),
            total_kv=sum(workload.kv_lens),
            max_q_len=max(workload.q_lens),
            max_kv_len=max(workload.kv_lens),
            return_lse=workload.return_lse,
        )
    return functools.partial(
        trtllm_ragged_attention_deepseek,
        tensors.query,
        tensors.key,
        tensors.value,
        torch.empty(needed, dtype=torch.uint8, device=device),
        seq_lens=torch.tensor(workload.kv_lens, dtype=torch.int32, device=device),
        max_q_len=max(workload.q_lens),
        max_kv_len=max(workload.kv_lens),
        bmm1_scale=workload.scale,
        bmm2_scale=1.0,
        o_sf_scale=1.0,
        batch_size=len(workload.q_lens),
        window_left=workload.window_left,
        cum_seq_lens_q=_edges(workload.q_lens, device),
        cum_seq_lens_kv=_edges(workload.kv_lens, device),
        is_causal=workload.is_causal,
        return_lse=workload.return_lse,
        attention_sinks=tensors.sinks,
        skip_softmax_threshold_scale_factor=workload.skip_softmax_factor or None,
        out=tensors.out,
        lse=tensors.lse,
        backend=backend,
        use_fp16_softmax=request.use_fp16_softmax,
        uses_spcompress=request.uses_spcompress,
    )


def _edges(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
