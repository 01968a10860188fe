"""The kernels behind `trtllm_sage_attention_quantize`: which ones a call launches, and with what.

`blocks` quantises query, and key unless that is smoothed, and zeroes the counters of those that follow. `key`
(where key is smoothed) and `value` make two passes over their tensor each: statistics, then numbers.
"""

from __future__ import annotations

import struct

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

# Wide groups of channels read long pieces of memory, but leave many partial results to each thread that joins
# them. This is the most of tokens * lanes**2.
_JOINABLE = 1 << 24

# The structs of kernel_meta/sage_quantize/params.h.
_BLOCK_TENSOR, _ITEMS, _FORMAT = "QQQQiiiii4x", "QQiiii", "iiif"
BLOCKS_PARAMETERS = struct.Struct(f"<{_BLOCK_TENSOR}{_BLOCK_TENSOR}Qii{_FORMAT}")
KEY_PARAMETERS = struct.Struct(f"<{_BLOCK_TENSOR}Q{_ITEMS}{_FORMAT}")
VALUE_PARAMETERS = struct.Struct(f"<QQQQiii4x{_ITEMS}{_FORMAT}")


class Blocks(msgspec.Struct, frozen=True):
    """A tensor [tokens, heads, head_dim] of some sequences, with a scale for `size` tokens of a head each."""

    tokens: int
    heads: int
    sequences: int
    size: int

    @property
    def columns(self) -> int:
        """Scales of a head. Every sequence begins a block of its own."""
        return -(-self.tokens // self.size) + max(self.sequences - 1, 0)

    @property
    def walked(self) -> int:
        """Columns that kernels visit: padding behind the last sequence may need one more."""
        return -(-self.tokens // self.size) + self.sequences

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
        blocks = _load("blocks", device)
        self._query_blocks = _thread_blocks(problem.query, problem.head_dim, blocks)
        key_blocks = 0 if problem.smooth_k else _thread_blocks(problem.key, problem.head_dim, blocks)
        # One there is always: it zeroes the counters.
        self._blocks = LaunchPlan(blocks, (max(1, self._query_blocks + key_blocks), 1, 1))
        kv, key = problem.key, None
        value = _Passes(_load("value", device), kv.tokens, kv.tokens, kv.heads, problem.head_dim_v, _ROWS)
        if problem.smooth_k:
            kernel = _load("key", device)
            key = _Passes(kernel, kv.tokens, kv.walked, kv.heads, problem.head_dim, kv.per_thread)
        self._value, self._key = value, key
        self.scratch = WorkspaceLayout.of(
            value_counters=value.counter_bytes,
            key_counters=key.counter_bytes if key else 0,
            value_partials=value.partial_bytes,
            key_partials=key.partial_bytes if key else 0,
        )
        self._counters = self.scratch.offset("value_partials") // _COUNTER_BYTES  # these come first

    def __call__(self, addresses: Addresses, stream: int, pdl: bool) -> None:
        """Launches two or three kernels into `stream`."""
        a, problem = addresses, self._problem
        query = _tensor(problem.query, a.query, a.q_quant, a.q_scale, a.cum_seq_lens_q)
        key = _tensor(problem.key, a.key, a.k_quant, a.k_scale, a.cum_seq_lens_kv)
        form = (problem.head_dim, problem.is_fp16, problem.is_e4m3, problem.range)
        counters = (a.scratch, self._counters)
        launch(
            self._blocks,
            BLOCKS_PARAMETERS.pack(*query, *key, *counters, self._query_blocks, *form),
            stream,
            pdl,
        )
        if self._key:
            items = self._items("key", self._key, a.scratch)
            launch(self._key.plan, KEY_PARAMETERS.pack(*key, a.k_mean, *items, *form), stream, pdl)
        kv = problem.key
        value = (a.value, a.v_quant, a.v_scale, a.cum_seq_lens_kv, kv.tokens, kv.sequences, kv.heads)
        items = self._items("value", self._value, a.scratch)
        form = (problem.head_dim_v, *form[1:])
        launch(self._value.plan, VALUE_PARAMETERS.pack(*value, *items, *form), stream, pdl)

    def _items(self, name: str, passes: _Passes, scratch: int) -> tuple[int, ...]:
        """struct Items."""
        counters = scratch + self.scratch.offset(f"{name}_counters")
        partials = scratch + self.scratch.offset(f"{name}_partials")
        return counters, partials, passes.groups, passes.chunks, passes.lanes, passes.ahead


class _Passes:
    """How a kernel that makes two passes over a tensor cuts them into items of work; see struct Items.

    units   tokens, or columns of them, and how many a thread has at a time
    """

    def __init__(
        self, kernel: Loaded, tokens: int, units: int, heads: int, head_dim: int, per_thread: int
    ) -> None:
        threads, registers = kernel.resources.threads, kernel.resources.registers
        vectors = heads * head_dim // _VECTOR
        self.lanes = _lanes(tokens, vectors, head_dim // _VECTOR, threads)
        self.groups = vectors // self.lanes
        self.chunks = max(1, -(-units // (threads // self.lanes * per_thread)))
        count = self.groups * self.chunks
        resident = kernel.device.sm_count * (_REGISTERS_PER_SM // (threads * registers))
        self.plan = LaunchPlan(kernel, (min(2 * count, resident), 1, 1))
        # With twice of what is in flight nobody waits long, and more would not stay in the cache.
        self.ahead = min(count, max(self.chunks, 2 * resident))
        self.counter_bytes = (1 + 2 * self.groups) * _COUNTER_BYTES
        self.partial_bytes = count * self.lanes * _VECTOR * _PARTIAL_BYTES


def _lanes(tokens: int, vectors: int, least: int, most: int) -> int:
    """Threads along the channels of a group: a power of two that divides `vectors`; a head is not divided."""
    lanes = least
    while 2 * lanes <= most and vectors % (2 * lanes) == 0 and tokens * (2 * lanes) ** 2 <= _JOINABLE:
        lanes *= 2
    return lanes


def _thread_blocks(tensor: Blocks, head_dim: int, kernel: Loaded) -> int:
    """Blocks of threads that quantise a tensor in one pass."""
    threads = -(-tensor.walked // tensor.per_thread) * (tensor.heads * head_dim // _VECTOR)
    return -(-threads // kernel.resources.threads)


def _tensor(blocks: Blocks, source: int, target: int, scales: int, edges: int) -> tuple[int, ...]:
    """struct BlockTensor."""
    sizes = (blocks.tokens, blocks.sequences, blocks.heads, blocks.columns, blocks.size)
    return (source, target, scales, edges, *sizes)


def _load(name: str, device: DeviceInfo) -> Loaded:
    return load_step(find_step(FAMILY, name, device.capability), device.ordinal)
