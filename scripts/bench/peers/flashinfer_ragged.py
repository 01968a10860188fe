"""FlashInfer's prefill over ragged keys and values."""

from __future__ import annotations

import torch

from bench.peers.base import Call, Options, package_version, require
from bench.problem import DTYPES, OUT_DTYPES, Problem
from bench.workloads import Workload

_WORKSPACE_BYTES = 256 << 20


class FlashInfer:
    """BatchPrefillWithRaggedKVCacheWrapper; planning is done once and not timed."""

    ragged = True

    def __init__(self, options: Options) -> None:
        self._module = require("flashinfer", "install flashinfer-python")
        self.version = package_version("flashinfer-python")

    def refusal(self, workload: Workload) -> str | None:
        """None: what it has no kernel for it says itself."""
        return None

    def bind(self, problem: Problem) -> Call:
        """The wrapper's run, with out given."""
        workload, out = problem.workload, problem.new_out()
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=problem.query.device)
        wrapper = self._module.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        dtype = DTYPES[workload.dtype]
        wrapper.plan(
            problem.edges_q,
            problem.edges_kv,
            workload.heads,
            workload.kv_heads,
            workload.head_dims[0],
            head_dim_vo=workload.head_dims[1],
            causal=workload.mask != "dense",
            window_left=-1 if workload.window is None else workload.window,
            sm_scale=problem.scale,
            q_data_type=dtype,
            kv_data_type=dtype,
            o_data_type=OUT_DTYPES[workload.dtype],
        )

        def call() -> torch.Tensor:
            wrapper.run(problem.query, problem.key, problem.value, out=out)
            return out

        return call
