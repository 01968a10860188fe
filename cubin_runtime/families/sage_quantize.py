"""The kernels behind `trtllm_sage_attention_quantize`: how a call's work is cut, and what it launches.

Value, and key where that is smoothed, are read twice: for statistics over all tokens, and to be quantised.
The second kernel begins with what is read once, while the first one is ending.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import msgspec

from cubin_runtime.launch import LaunchPlan, launch, launch_tag
from cubin_runtime.module import DeviceInfo, Loaded, load_step
from cubin_runtime.workspace import WorkspaceLayout
from kernel_meta.tables import find_step

FAMILY = "sage_quantize"

_VECTOR = 8  # elements that a thread loads at once
_ROWS = 8  # that a thread has at a time; of blocks of 16 tokens it has a whole one
_TICKET_BYTES = 8
_PARTIAL_BYTES = 4

# A block of threads has so many times its rows for statistics, and a head at most so many such chunks, since
# the last one to end joins what all have left.
_CHUNK_STEPS = 16
_MOST_CHUNKS = 32

# The structs of kernel_meta/sage_quantize/params.h.
_BLOCK_TENSOR, _CHANNEL_TENSOR, _FORMAT = "QQQQiiiiii", "QQQQQiiiiii", "iif"
STATISTICS_PARAMETERS = struct.Struct(f"<{_CHANNEL_TENSOR}{_CHANNEL_TENSOR}iI")
QUANTIZE_PARAMETERS = struct.Struct(f"<{_BLOCK_TENSOR}{_BLOCK_TENSOR}QQQQiiiiI{_FORMAT}")


class Blocks(msgspec.Struct, frozen=True):
    """A tensor [tokens, heads, head_dim] of some sequences, with a scale for `size` tokens of a head each."""

    tokens: int
    heads: int
    sequences: int
    size: int

    @property
    def columns(self) -> int:
        """Scales of a head. Every sequence begins a block of its own."""
        return _over(self.tokens, self.size) + max(self.sequences - 1, 0)

    @property
    def walked(self) -> int:
        """Columns that kernels visit: padding behind the last sequence may need one more."""
        return _over(self.tokens, self.size) + self.sequences

    @property
    def per_thread(self) -> int:
        """Columns that a thread has at a time."""
        return max(1, _ROWS // self.size)


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """A checked call without its addresses. `range` is the largest magnitude of a quantised query or key."""

    query: Blocks
    key: Blocks
    head_dim: int
    head_dim_v: int
    is_fp16: bool
    is_e4m3: bool
    range: float
    smooth_k: bool


class Addresses(msgspec.Struct, frozen=True):
    """What differs between calls of a problem: device addresses, 0 = not given."""

    query: int
    key: int
    value: int
    q_quant: int
    k_quant: int
    v_quant: int
    q_scale: int
    k_scale: int
    v_scale: int
    k_mean: int
    cum_seq_lens_q: int
    cum_seq_lens_kv: int
    scratch: int


class QuantizeCall:
    """Calls of one problem on one device. Safe to call from several threads.

    scratch   memory that a call needs; its contents do not matter
    """

    def __init__(self, problem: Problem, device: DeviceInfo) -> None:
        self.device = device
        self._problem = problem
        kv, smooth = problem.key, problem.smooth_k
        statistics, quantize = _load("statistics", device), _load("quantize", device)
        threads = statistics.resources.threads
        self._scales = scales = _Chunks.of(kv.tokens, problem.head_dim_v, threads)
        self._means = means = _Chunks.of(kv.tokens, problem.head_dim, threads)
        chunks = scales.chunks + (means.chunks if smooth else 0)
        self._statistics = LaunchPlan(statistics, (kv.heads * chunks, 1, 1))
        threads = quantize.resources.threads
        self._query_blocks = _thread_blocks(problem.query, problem.head_dim, threads)
        self._key_blocks = _thread_blocks(kv, problem.head_dim, threads)
        value = _over(_over(kv.tokens, _ROWS) * (kv.heads * problem.head_dim_v // _VECTOR), threads)
        # At least one, which waits for `statistics`: what follows the call waits for `quantize` alone.
        value_blocks = max(1, value)
        # Key's blocks take turns with those of value where they wait, too, else with those of query.
        self._key_start = self._query_blocks if smooth else 0
        self._key_share = _share(self._key_blocks, value_blocks if smooth else self._query_blocks)
        self._quantize = LaunchPlan(quantize, (self._query_blocks + self._key_blocks + value_blocks, 1, 1))
        self.scratch = WorkspaceLayout.of(
            tickets=2 * kv.heads * _TICKET_BYTES,
            scales=kv.heads * scales.partial_bytes,
            means=kv.heads * means.partial_bytes if smooth else 0,
        )

    def __call__(self, addresses: Addresses, stream: int, pdl: bool) -> None:
        """Launches two kernels into `stream`."""
        a, problem, scratch = addresses, self._problem, self.scratch
        kv, dim = problem.key, problem.head_dim
        tickets = a.scratch + scratch.offset("tickets")
        of_all = (a.cum_seq_lens_kv, *_sizes(kv))
        scales = (a.value, a.v_scale, a.scratch + scratch.offset("scales"), tickets)
        tickets += kv.heads * _TICKET_BYTES
        means = (a.key, a.k_mean, a.scratch + scratch.offset("means"), tickets)
        tensors = (*scales, *of_all, *self._scales, *means, *of_all, *self._means)
        parameters = STATISTICS_PARAMETERS.pack(*tensors, problem.is_fp16, launch_tag())
        launch(self._statistics, parameters, stream, pdl)
        query = _tensor(problem.query, dim, a.query, a.q_quant, a.q_scale, a.cum_seq_lens_q)
        key = _tensor(kv, dim, a.key, a.k_quant, a.k_scale, a.cum_seq_lens_kv)
        value = (a.k_mean, a.value, a.v_quant, a.v_scale, problem.head_dim_v)
        blocks = (self._query_blocks, self._key_blocks, self._key_start, self._key_share)
        form = (problem.is_fp16, problem.is_e4m3, problem.range)
        launch(self._quantize, QUANTIZE_PARAMETERS.pack(*query, *key, *value, *blocks, *form), stream, pdl)


class _Chunks(NamedTuple):
    """How statistics cut a head: the end of struct ChannelTensor."""

    head_dim: int
    chunk_tokens: int
    chunks: int

    @classmethod
    def of(cls, tokens: int, head_dim: int, threads: int) -> _Chunks:
        at_a_time = _ROWS * threads // (head_dim // _VECTOR)
        steps = max(_CHUNK_STEPS, _over(tokens, _MOST_CHUNKS * at_a_time))
        return cls(head_dim, steps * at_a_time, max(1, _over(tokens, steps * at_a_time)))

    @property
    def partial_bytes(self) -> int:
        """What is kept of a head."""
        return self.chunks * self.head_dim * _PARTIAL_BYTES


def _over(amount: int, size: int) -> int:
    """How many of `size` hold `amount`."""
    return -(-amount // size)


def _thread_blocks(tensor: Blocks, head_dim: int, threads: int) -> int:
    """Blocks of threads that quantise a tensor in blocks of tokens."""
    return _over(_over(tensor.walked, tensor.per_thread) * (tensor.heads * head_dim // _VECTOR), threads)


def _share(ours: int, others: int) -> int:
    """Of our blocks in all of them, in 2^-31: rounded up, so that all of ours come."""
    return _over(ours << 31, max(1, ours + others))


def _tensor(
    blocks: Blocks, head_dim: int, source: int, target: int, scales: int, edges: int
) -> tuple[int, ...]:
    """struct BlockTensor."""
    return (source, target, scales, edges, *_sizes(blocks), head_dim, blocks.columns, blocks.size)


def _sizes(tensor: Blocks) -> tuple[int, int, int]:
    return tensor.tokens, tensor.sequences, tensor.heads


def _load(name: str, device: DeviceInfo) -> Loaded:
    return load_step(find_step(FAMILY, name, device.capability), device.ordinal)
