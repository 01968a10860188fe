"""torch's scaled_dot_product_attention, one backend at a time."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.peers.base import Call, Options, refuse_unequal
from bench.problem import Problem
from bench.workloads import Workload


class TorchFlash:
    """The backend that torch builds from FlashAttention-2."""

    ragged = False
    backend = SDPBackend.FLASH_ATTENTION

    def __init__(self, options: Options) -> None:
        self.version = f"torch {torch.__version__}"

    def refusal(self, workload: Workload) -> str | None:
        """Equal lengths, no window, no FP8; torch aligns a causal mask to the top left."""
        if workload.dtype == "e4m3":
            return "no FP8"
        if workload.mask == "window":
            return "no window"
        if workload.mask == "causal" and not workload.self_attention:
            return "causal mask of as many keys as queries only"
        return refuse_unequal(workload)

    def bind(self, problem: Problem) -> Call:
        """Over views [batch, heads, tokens, dim] of the same tensors."""
        query, key, value = (
            problem.batched(tensor).transpose(1, 2) for tensor in (problem.query, problem.key, problem.value)
        )
        causal, grouped = problem.workload.mask == "causal", problem.workload.group > 1

        def call() -> torch.Tensor:
            with sdpa_kernel(self.backend):
                out = scaled_dot_product_attention(
                    query, key, value, is_causal=causal, scale=problem.scale, enable_gqa=grouped
                )
            return out.transpose(1, 2)

        return call


class TorchCudnn(TorchFlash):
    """The backend that calls cuDNN."""

    backend = SDPBackend.CUDNN_ATTENTION
