"""The kernels behind `trtllm_sage_attention_quantize`: which ones a call launches, and with what.

`blocks` quantises query, and key unless that is smoothed, in one pass. Value, and smoothed key, take two:
`statistics` over all tokens, and `value` or `key`, right behind it for what is still in the L2 cache.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import msgspec

from cubin_runtime.launch import LaunchPlan, launch
from cubin_runtime.module import DeviceInfo, Loaded, load_step
from cubin_runtime.workspace import WorkspaceLayout
from kernel_meta.tables import find_step

FAMILY = "sage_quantize"

_VECTOR = 8  # elements that a thread loads at once
_ROWS = 8  # that a thread has at a time; of blocks of 16 tokens it has a whole one
_REGISTERS_PER_SM = 1 << 16
_COUNTER_BYTES = 4
_PARTIAL_BYTES = 4

# `statistics` has so many times the blocks of threads that fit on the device, so that faster multiprocessors
# take more of them; not more than that, since each leaves a partial result to join.
_WAVES = 4

# The structs of kernel_meta/sage_quantize/params.h.
_BLOCK_TENSOR, _FORMAT = "QQQQiiiii4x", "iiif"
BLOCKS_PARAMETERS = struct.Struct(f"<{_BLOCK_TENSOR}{_BLOCK_TENSOR}Qii{_FORMAT}")
KEY_PARAMETERS = struct.Struct(f"<{_BLOCK_TENSOR}Q{_FORMAT}")
STATISTICS_PARAMETERS = struct.Struct(f"<QQQQQiiiii{_FORMAT}4x")
VALUE_PARAMETERS = struct.Struct(f"<QQQQiii{_FORMAT}4x")


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
        kv = problem.key
        blocks = _load("blocks", device)
        self._query_blocks = _thread_blocks(problem.query, problem.head_dim, blocks)
        key_blocks = 0 if problem.smooth_k else _thread_blocks(kv, problem.head_dim, blocks)
        self._blocks = _plan(blocks, self._query_blocks + key_blocks)
        self._value = _TwoPasses(
            _Statistics(kv, problem.head_dim_v, device), _value_plan(kv, problem.head_dim_v, device)
        )
        self._key = None
        if problem.smooth_k:
            self._key = _TwoPasses(
                _Statistics(kv, problem.head_dim, device), _key_plan(kv, problem.head_dim, device)
            )
        partials = max(each.statistics.partial_bytes for each in (self._value, self._key) if each)
        self.scratch = WorkspaceLayout.of(counters=kv.heads * _COUNTER_BYTES, partials=partials)

    def __call__(self, addresses: Addresses, stream: int, pdl: bool) -> None:
        """Launches three or five kernels into `stream`."""
        a, problem = addresses, self._problem
        query = _tensor(problem.query, a.query, a.q_quant, a.q_scale, a.cum_seq_lens_q)
        key = _tensor(problem.key, a.key, a.k_quant, a.k_scale, a.cum_seq_lens_kv)
        form = (problem.head_dim, problem.is_fp16, problem.is_e4m3, problem.range)
        form_v = (problem.head_dim_v, *form[1:])
        counters = (a.scratch + self.scratch.offset("counters"), problem.key.heads)
        blocks = BLOCKS_PARAMETERS.pack(*query, *key, *counters, self._query_blocks, *form)
        launch(self._blocks, blocks, stream, pdl)
        sizes = _sizes(problem.key)
        scratch = (a.scratch + self.scratch.offset("partials"), counters[0], *sizes)
        if self._key:
            statistics = self._key.statistics
            means = (a.key, a.k_mean, a.cum_seq_lens_kv, *scratch, statistics.chunk_tokens, True)
            launch(statistics.plan, STATISTICS_PARAMETERS.pack(*means, *form), stream, pdl)
            launch(self._key.second, KEY_PARAMETERS.pack(*key, a.k_mean, *form), stream, pdl)
        statistics = self._value.statistics
        scales = (a.value, a.v_scale, a.cum_seq_lens_kv, *scratch, statistics.chunk_tokens, False)
        launch(statistics.plan, STATISTICS_PARAMETERS.pack(*scales, *form_v), stream, pdl)
        value = (a.value, a.v_quant, a.v_scale, a.cum_seq_lens_kv, *sizes)
        launch(self._value.second, VALUE_PARAMETERS.pack(*value, *form_v), stream, pdl)


class _Statistics:
    """How `statistics` cuts a tensor: a block of threads has `chunk_tokens` tokens of a head."""

    def __init__(self, tensor: Blocks, head_dim: int, device: DeviceInfo) -> None:
        kernel = _load("statistics", device)
        threads, registers = kernel.resources.threads, kernel.resources.registers
        at_a_time = _ROWS * threads // (head_dim // _VECTOR)
        resident = device.sm_count * (_REGISTERS_PER_SM // (threads * registers))
        wanted = _over(tensor.tokens * tensor.heads, _WAVES * resident)
        self.chunk_tokens = max(1, _over(wanted, at_a_time)) * at_a_time
        chunks = max(1, _over(tensor.tokens, self.chunk_tokens))
        self.plan = LaunchPlan(kernel, (tensor.heads, chunks, 1))
        self.partial_bytes = tensor.heads * chunks * head_dim * _PARTIAL_BYTES


class _TwoPasses(NamedTuple):
    """What quantises a tensor with statistics over all its tokens."""

    statistics: _Statistics
    second: LaunchPlan


def _over(amount: int, size: int) -> int:
    """How many of `size` hold `amount`."""
    return -(-amount // size)


def _plan(kernel: Loaded, blocks: int) -> LaunchPlan:
    """One block there is always: `blocks` zeroes the counters, too."""
    return LaunchPlan(kernel, (max(1, blocks), 1, 1))


def _key_plan(tensor: Blocks, head_dim: int, device: DeviceInfo) -> LaunchPlan:
    kernel = _load("key", device)
    return _plan(kernel, _thread_blocks(tensor, head_dim, kernel))


def _value_plan(tensor: Blocks, head_dim: int, device: DeviceInfo) -> LaunchPlan:
    kernel = _load("value", device)
    threads = _over(tensor.tokens, _ROWS) * (tensor.heads * head_dim // _VECTOR)
    return _plan(kernel, _over(threads, kernel.resources.threads))


def _thread_blocks(tensor: Blocks, head_dim: int, kernel: Loaded) -> int:
    """Blocks of threads that quantise a tensor in blocks of tokens."""
    threads = _over(tensor.walked, tensor.per_thread) * (tensor.heads * head_dim // _VECTOR)
    return _over(threads, kernel.resources.threads)


def _tensor(blocks: Blocks, source: int, target: int, scales: int, edges: int) -> tuple[int, ...]:
    """struct BlockTensor."""
    return (source, target, scales, edges, *_sizes(blocks), blocks.columns, blocks.size)


def _sizes(tensor: Blocks) -> tuple[int, int, int]:
    return tensor.tokens, tensor.sequences, tensor.heads


def _load(name: str, device: DeviceInfo) -> Loaded:
    return load_step(find_step(FAMILY, name, device.capability), device.ordinal)
