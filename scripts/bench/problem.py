"""The tensors of a workload, and whether a result is right."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from bench.workloads import SAGE_BLOCKS, Workload
from cubin_runtime.reference import sage_quantize_reference

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "sage-int8": torch.int8,
    "sage-e4m3": torch.float8_e4m3fn,
}
OUT_DTYPES = {name: torch.float16 if name == "fp16" else torch.bfloat16 for name in DTYPES}

# Relative Frobenius error of the sampled rows against float32: what rounding of operands and P explains. Sage
# is judged by what its operands were made from.
TOLERANCE = {"bf16": 6e-3, "fp16": 1.5e-3, "e4m3": 8e-2, "sage-int8": 8e-2, "sage-e4m3": 8e-2}

_TILE = 128  # query rows, and keys, that spcompress judges together
_SAMPLED_SEQUENCES = 12
_SAMPLED_ROWS = 48


@dataclass(frozen=True)
class Problem:
    """Inputs of one workload on one device: tokens of all sequences in a row, heads, dims.

    sage_scales   of query, key, p and value
    originals     query, key and value before they were quantised; None = they were not
    """

    workload: Workload
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    edges_q: torch.Tensor
    edges_kv: torch.Tensor
    kv_lens: torch.Tensor
    sage_scales: tuple[torch.Tensor | None, ...] = (None, None, None, None)
    originals: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    @property
    def scale(self) -> float:
        """What logits are multiplied by."""
        return 1 / math.sqrt(self.workload.head_dims[0])

    @property
    def max_q_len(self) -> int:
        """Longest query of a sequence."""
        return max(self.workload.q_lens)

    @property
    def max_kv_len(self) -> int:
        """Most keys of a sequence."""
        return max(self.workload.kv_lens)

    def new_out(self) -> torch.Tensor:
        """A result filled with NaN, so that rows that nobody writes are seen."""
        shape = (*self.query.shape[:2], self.value.shape[2])
        return torch.full(shape, math.nan, dtype=OUT_DTYPES[self.workload.dtype], device=self.query.device)

    def batched(self, tensor: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, heads, dim], for workloads of equal lengths."""
        return tensor.view(self.workload.batch, -1, *tensor.shape[1:])


def make_problem(workload: Workload, device: torch.device, seed: int = 0) -> Problem:
    """Normal inputs, the same for the same seed."""
    generator = torch.Generator(device).manual_seed(seed)
    total_q, total_kv = sum(workload.q_lens), sum(workload.kv_lens)
    dim_qk, dim_v = workload.head_dims

    def normal(*shape: int) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=OUT_DTYPES[workload.dtype], device=device)
        tensor.normal_(generator=generator)
        return tensor if workload.sage else tensor.to(DTYPES[workload.dtype])

    def edges(lengths: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)

    problem = Problem(
        workload,
        query=normal(total_q, workload.heads, dim_qk),
        key=normal(total_kv, workload.kv_heads, dim_qk),
        value=normal(total_kv, workload.kv_heads, dim_v),
        edges_q=edges(workload.q_lens),
        edges_kv=edges(workload.kv_lens),
        kv_lens=torch.tensor(workload.kv_lens, dtype=torch.int32, device=device),
    )
    return _quantised(problem) if workload.sage else problem


def _quantised(problem: Problem) -> Problem:
    originals = (problem.query, problem.key, problem.value)
    q_block, k_block, _, _ = SAGE_BLOCKS
    query, key, value, q_scale, k_scale, v_scale = sage_quantize_reference(
        *originals,
        q_block_size=q_block,
        k_block_size=k_block,
        qk_quant_dtype=DTYPES[problem.workload.dtype],
        cum_seq_lens_q=problem.edges_q,
        cum_seq_lens_kv=problem.edges_kv,
    )
    return replace(
        problem,
        query=query,
        key=key,
        value=value,
        sage_scales=(q_scale, k_scale, None, v_scale),
        originals=originals,
    )


class Check:
    """Exact results of sampled rows, to judge any number of implementations by."""

    def __init__(self, problem: Problem) -> None:
        workload = problem.workload
        self._heads = sorted({0, workload.heads // 2, workload.heads - 1})
        self._expected = [
            (rows, torch.stack([_exact(problem, sequence, local, head) for head in self._heads], dim=1))
            for sequence, rows, local in _sample(problem)
        ]

    def error(self, out: torch.Tensor) -> float:
        """Largest relative Frobenius error of a sequence's sampled rows; NaN where any of out is NaN."""
        if not bool(out.isfinite().all()):
            return math.nan
        out = out.flatten(0, -3)
        return max(
            float((out[rows][:, self._heads].float() - exact).norm() / exact.norm().clamp_min(1e-30))
            for rows, exact in self._expected
        )


def _sample(problem: Problem) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Sequences, and some rows of each: counted over all tokens, and inside the sequence."""
    workload = problem.workload
    chosen = random.Random(1)
    starts = [0, *accumulate(workload.q_lens)]
    used = [n for n in range(workload.batch) if workload.q_lens[n]]
    if len(used) > _SAMPLED_SEQUENCES:
        used = sorted({used[0], used[-1], *chosen.sample(used, _SAMPLED_SEQUENCES - 2)})
    for sequence in used:
        length = workload.q_lens[sequence]
        ends = {0, length // 2, length - 1}
        rows = ends | set(chosen.sample(range(length), min(length, _SAMPLED_ROWS)))
        local = torch.tensor(sorted(rows), device=problem.query.device)
        yield sequence, local + starts[sequence], local


def _exact(problem: Problem, sequence: int, local: torch.Tensor, head: int) -> torch.Tensor:
    """Float32 attention of one head for some rows of a sequence: [rows, head_dim_v]."""
    workload = problem.workload
    q_len, kv_len = workload.q_lens[sequence], workload.kv_lens[sequence]
    first_q, first_kv = sum(workload.q_lens[:sequence]), sum(workload.kv_lens[:sequence])
    keys = slice(first_kv, first_kv + kv_len)
    kv_head = head // workload.group
    # One head and sequence at a time: float8 tensors cannot be indexed by tensors.
    all_queries, all_keys, all_values = problem.originals or (problem.query, problem.key, problem.value)
    query = all_queries[first_q : first_q + q_len, head].float()[local]
    logits = query @ all_keys[keys, kv_head].float().T * problem.scale
    if workload.mask != "dense":
        distance = (local + kv_len - q_len)[:, None] - torch.arange(kv_len, device=local.device)
        hidden = distance < 0
        if workload.window is not None:
            hidden |= distance > workload.window
        logits = logits.masked_fill(hidden, -math.inf)
    if workload.spcompress:
        logits = logits.masked_fill(_pruned(logits, workload, local, kv_len - q_len), -math.inf)
    # A row that sees no key is zero.
    return logits.softmax(dim=-1).nan_to_num(0) @ all_values[keys, kv_head].float()


def _pruned(logits: torch.Tensor, workload: Workload, local: torch.Tensor, diagonal: int) -> torch.Tensor:
    """The two smallest of each four logits in the tiles of keys that all of a row's 128 rows see whole, or
    what is left of these in the sequence.
    """
    kv_len = logits.shape[1]
    first_row = local // _TILE * _TILE
    begin, end = torch.zeros_like(local), torch.full_like(local, kv_len)
    if workload.mask != "dense":
        end = (first_row + diagonal + 1).clamp(0, kv_len)
    if workload.window is not None:
        last_row = (first_row + _TILE).clamp_max(kv_len - diagonal) - 1
        begin = (last_row + diagonal - workload.window).clamp_min(0)
    begin, end = -(-begin // _TILE) * _TILE, end // _TILE * _TILE
    keys = torch.arange(kv_len, device=logits.device)
    interior = (keys >= begin[:, None]) & (keys < end[:, None])
    whole = kv_len // 4 * 4
    smallest = logits[:, :whole].unflatten(1, (-1, 4)).topk(2, largest=False).indices
    pruned = torch.zeros_like(interior)
    pruned[:, :whole] = (
        torch.zeros_like(interior[:, :whole]).unflatten(1, (-1, 4)).scatter(2, smallest, True).flatten(1)
    )
    return pruned & interior
