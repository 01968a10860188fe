"""The library of this repository."""

from __future__ import annotations

from typing import Any

import torch

import cubin_runtime
from bench.peers.base import Call, Options
from bench.problem import Problem
from bench.workloads import SAGE_BLOCKS, Workload
from cubin_runtime.request import SAGE_OFF

_MASKS = {"causal": "causal", "dense": "dense", "window": "sliding"}


class Ours:
    """cubin_runtime.trtllm_ragged_attention_deepseek."""

    ragged = True

    def __init__(self, options: Options) -> None:
        self.version = f"cubin-runtime {cubin_runtime.__version__}"

    def refusal(self, workload: Workload) -> str | None:
        """Says so where the tables have no kernel."""
        selection = cubin_runtime.explain(**_request(workload))
        return None if selection.row else "no kernel for it yet"

    def bind(self, problem: Problem, **options: Any) -> Call:
        """The public call, with out and workspace given. `options` are further arguments of it."""
        workload = problem.workload
        size = cubin_runtime.workspace_size(
            batch_size=workload.batch,
            total_q=sum(workload.q_lens),
            total_kv=sum(workload.kv_lens),
            max_q_len=problem.max_q_len,
            max_kv_len=problem.max_kv_len,
            **_request(workload),
        )
        workspace = torch.empty(max(size, 16), dtype=torch.uint8, device=problem.query.device)
        out = problem.new_out()
        max_q_len, max_kv_len, batch = problem.max_q_len, problem.max_kv_len, workload.batch
        window = -1 if workload.window is None else workload.window
        causal = workload.mask != "dense"
        blocks = SAGE_BLOCKS if workload.sage else SAGE_OFF

        def call() -> torch.Tensor:
            cubin_runtime.trtllm_ragged_attention_deepseek(
                query=problem.query,
                key=problem.key,
                value=problem.value,
                workspace_buffer=workspace,
                seq_lens=problem.kv_lens,
                max_q_len=max_q_len,
                max_kv_len=max_kv_len,
                bmm1_scale=problem.scale,
                bmm2_scale=1.0,
                o_sf_scale=1.0,
                batch_size=batch,
                window_left=window,
                cum_seq_lens_q=problem.edges_q,
                cum_seq_lens_kv=problem.edges_kv,
                is_causal=causal,
                out=out,
                sage_attn_sfs=problem.sage_scales,
                num_elts_per_sage_attn_blk=blocks,
                uses_spcompress=workload.spcompress,
                **options,
            )
            return out

        return call


def _request(workload: Workload) -> dict[str, Any]:
    return {
        "dtype": workload.dtype.removeprefix("sage-"),
        "sage_blocks": SAGE_BLOCKS if workload.sage else SAGE_OFF,
        "head_dims": workload.head_dims,
        "mask": _MASKS[workload.mask],
        "num_heads_q": workload.heads,
        "num_heads_kv": workload.kv_heads,
        "uses_spcompress": workload.spcompress,
    }
