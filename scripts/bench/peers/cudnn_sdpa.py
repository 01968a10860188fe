"""cuDNN's attention through its Python graphs, ragged and fixed-length."""

from __future__ import annotations

from typing import Any

import torch

from bench.peers.base import Call, Options, package_version, refuse_unequal, require
from bench.problem import Problem
from bench.workloads import Workload

_MAX_OFFSET = 2**31


class Cudnn:
    """Packed tensors with ragged offsets and a padding mask; the heuristics' first plan."""

    ragged = True

    def __init__(self, options: Options) -> None:
        self._cudnn: Any = require("cudnn", "install nvidia-cudnn-frontend")
        self.version = f"cuDNN {self._cudnn.backend_version()}, {package_version('nvidia-cudnn-frontend')}"
        self._handle = self._cudnn.create_handle()

    def refusal(self, workload: Workload) -> str | None:
        """Its FP8 attention writes FP8; ragged offsets have 32 bits."""
        if workload.dtype == "e4m3":
            return "its FP8 attention writes FP8 results"
        largest = max(
            sum(workload.q_lens) * workload.heads * max(workload.head_dims),
            sum(workload.kv_lens) * workload.kv_heads * max(workload.head_dims),
        )
        if self.ragged and largest >= _MAX_OFFSET:
            return "ragged offsets have 32 bits"
        return None

    def bind(self, problem: Problem) -> Call:
        """Builds the plan; a call sets the stream and executes."""
        out = problem.new_out()
        graph, pack = self._graph(problem, out)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([self._cudnn.heur_mode.A, self._cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=out.device)
        handle, set_stream = self._handle, self._cudnn.set_stream

        def call() -> torch.Tensor:
            set_stream(handle, torch.cuda.current_stream().cuda_stream)
            graph.execute(pack, workspace, handle=handle)
            return out

        return call

    def _graph(self, problem: Problem, out: torch.Tensor) -> tuple[Any, dict[Any, torch.Tensor]]:
        """The graph, and which tensor goes where."""
        types = self._cudnn.data_type
        io_type = {"bf16": types.BFLOAT16, "fp16": types.HALF}[problem.workload.dtype]
        graph = self._cudnn.pygraph(
            io_data_type=io_type,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            handle=self._handle,
        )
        pack: dict[Any, torch.Tensor] = {}

        def index_tensor(name: str, data: torch.Tensor) -> Any:
            data = data.to(torch.int32).view(-1, 1, 1, 1)
            entry = graph.tensor(
                name=name, dim=list(data.shape), stride=list(data.stride()), data_type=types.INT32
            )
            pack[entry] = data
            return entry

        def offsets(name: str, tensor: torch.Tensor, edges: torch.Tensor) -> Any:
            return index_tensor(f"{name}_offsets", edges * tensor.stride(0)) if self.ragged else None

        def operand(name: str, tensor: torch.Tensor, edges: torch.Tensor, length: int) -> Any:
            dim, stride = _padded(tensor, problem.workload.batch, length)
            ragged = {"ragged_offset": offsets(name, tensor, edges)} if self.ragged else {}
            entry = graph.tensor(name=name, dim=dim, stride=stride, data_type=io_type, **ragged)
            pack[entry] = tensor
            return entry

        lengths: dict[str, Any] = {}
        if self.ragged:
            lengths = {
                "use_padding_mask": True,
                "seq_len_q": index_tensor("q_lens", problem.edges_q.diff()),
                "seq_len_kv": index_tensor("kv_lens", problem.kv_lens),
            }
        result, _ = graph.sdpa(
            name="sdpa",
            q=operand("q", problem.query, problem.edges_q, problem.max_q_len),
            k=operand("k", problem.key, problem.edges_kv, problem.max_kv_len),
            v=operand("v", problem.value, problem.edges_kv, problem.max_kv_len),
            generate_stats=False,
            attn_scale=problem.scale,
            **lengths,
            **self._mask(problem.workload),
        )
        dim, stride = _padded(out, problem.workload.batch, problem.max_q_len)
        result.set_output(True).set_dim(dim).set_stride(stride).set_data_type(io_type)
        if self.ragged:
            result.set_ragged_offset(offsets("o", out, problem.edges_q))
        pack[result] = out
        return graph, pack

    def _mask(self, workload: Workload) -> dict[str, Any]:
        if workload.mask == "dense":
            return {}
        alignment = self._cudnn.diagonal_alignment
        # The two are the same mask for as many keys as queries; cuDNN supports the first one more widely.
        aligned = alignment.TOP_LEFT if workload.self_attention else alignment.BOTTOM_RIGHT
        mask = {"diagonal_alignment": aligned, "diagonal_band_right_bound": 0}
        if workload.window is not None:
            mask["diagonal_band_left_bound"] = workload.window + 1  # counts the diagonal
        return mask


class CudnnFixed(Cudnn):
    """[batch, tokens, heads, dim] without offsets."""

    ragged = False

    def refusal(self, workload: Workload) -> str | None:
        """Equal lengths only."""
        return refuse_unequal(workload) or super().refusal(workload)


def _padded(tensor: torch.Tensor, batch: int, length: int) -> tuple[list[int], list[int]]:
    """Dims and strides of [batch, heads, length, dim] over packed tokens, as cuDNN wants them."""
    _, heads, dim = tensor.shape
    token, head, _ = tensor.stride()
    return [batch, heads, length, dim], [length * token, head, token, 1]
