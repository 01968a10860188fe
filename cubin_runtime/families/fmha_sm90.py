"""Our Hopper kernels: parameters of kernel_meta/fmha_sm90/params.h, one launch, no preparation on the device.

The kernels follow the lengths on the device, write rows that see no key themselves and take a workspace
with any contents, so nothing here depends on the values of the lengths.
"""

from __future__ import annotations

import itertools
import struct
from typing import NamedTuple

from cubin_runtime import _driver
from cubin_runtime.errors import InvalidArgumentError, TableError
from cubin_runtime.families import Arguments, Problem, TensorLayout
from cubin_runtime.launch import LaunchPlan, launch
from cubin_runtime.module import LoadedKernel
from cubin_runtime.request import MaskType
from cubin_runtime.tensormap import TiledMap
from cubin_runtime.workspace import WorkspaceLayout
from kernel_meta.schema import KernelRow, Scheduler

ABI = "fmha_sm90/1"

# struct Params: tensor maps, pointers, strides, launch tag, extents, scales, division. Its size is a multiple
# of 64, the alignment of the maps.
_PARAMS = struct.Struct("<128s128s128s128s 10Q 32s I 24s 2f 20s 24x")
_STRIDES = struct.Struct("<4q")
_EXTENTS = struct.Struct("<6i")
_DIVISION = struct.Struct("<5i")
PARAMETER_BYTES = _PARAMS.size

_WARPGROUP_ROWS = 64
_CHUNK = 64  # elements of one 128-byte swizzle span
_WARPGROUP_THREADS = 128
_MAX_MAPS = 1024

# Tags tell the kernel whether the ticket counter in the workspace is of its own launch; 0 is nobody's.
_launch_tags = itertools.count(1)


class _Division(NamedTuple):
    """How a split kernel packs query rows into tiles and divides the keys; fields as in struct Params."""

    tile_tokens: int
    tile_heads: int
    blocks_per_split: int
    max_splits: int
    max_q_blocks: int

    @classmethod
    def of(cls, problem: Problem, row: KernelRow, sm_count: int) -> _Division:
        """Parts of such a length that all blocks of the device get about one."""
        num_heads_q = problem.query.shape[1]
        group = num_heads_q // problem.key.shape[1]
        tile_heads = max(n for n in range(1, row.tile_q + 1) if group % n == 0)
        tile_tokens = row.tile_q // tile_heads
        max_q_blocks = max(1, -(-problem.max_q_len // tile_tokens))
        key_blocks = max(1, -(-problem.max_kv_len // row.tile_kv))
        whole = cls(tile_tokens, tile_heads, key_blocks, 1, max_q_blocks)
        parts_per_tile = max(1, row.blocks_per_sm * sm_count // max(1, whole.parts(problem)))
        blocks_per_split = -(-key_blocks // parts_per_tile)
        return whole._replace(
            blocks_per_split=blocks_per_split, max_splits=-(-key_blocks // blocks_per_split)
        )

    def parts(self, problem: Problem) -> int:
        """Parts of all tiles, were every sequence as long as the maxima."""
        tiles = problem.batch_size * self.max_q_blocks * problem.query.shape[1] // self.tile_heads
        return tiles * self.max_splits


def workspace(problem: Problem, row: KernelRow, sm_count: int) -> WorkspaceLayout:
    """A ticket counter; for a split kernel also the partial results. Nothing need be zero."""
    slots = 0
    if row.scheduler is Scheduler.SPLIT:
        division = _Division.of(problem, row, sm_count)
        slots = division.parts(problem) if division.max_splits > 1 else 0
    # split.cuh: half of a row's output and two rows' m and l per thread.
    slot_bytes = 4 * _WARPGROUP_THREADS * (row.head_dim_v // 2 + 4)
    return WorkspaceLayout.of(tile_counter=8, arrivals=8 * slots, partials=slot_bytes * slots)


def grid(problem: Problem, row: KernelRow, sm_count: int) -> tuple[int, int, int]:
    """As many blocks as the device holds, or fewer where there cannot be as many tiles."""
    total_q, num_heads_q, _ = problem.query.shape
    if row.scheduler is Scheduler.SPLIT:
        most_tiles = _Division.of(problem, row, sm_count).parts(problem)
    else:
        most_tiles = num_heads_q * min(total_q, -(-total_q // row.tile_q) + problem.batch_size)
    return max(1, min(row.blocks_per_sm * sm_count, most_tiles)), 1, 1


class FmhaSm90Call:
    """Calls of one problem: grid, tensor maps by address, and the constant parameters."""

    handles_empty_rows = True
    zeroed_bytes = 0

    def __init__(self, problem: Problem, kernel: LoadedKernel) -> None:
        if kernel.row.abi != ABI:
            raise TableError(f"{kernel.row.name} has parameter layout {kernel.row.abi}; expected {ABI}")
        if kernel.facts.parameter_bytes != PARAMETER_BYTES:
            raise TableError(
                f"{kernel.row.name} takes {kernel.facts.parameter_bytes} bytes of parameters; "
                f"{ABI} has {PARAMETER_BYTES}"
            )
        self.problem = problem
        self.kernel = kernel
        tile_kv = kernel.row.tile_kv
        context = kernel.context
        sm_count = kernel.device.sm_count
        division = _Division.of(problem, kernel.row, sm_count)
        split = kernel.row.scheduler is Scheduler.SPLIT
        rows = (
            (division.tile_tokens, division.tile_heads, 1) if split else _box(problem.query, _WARPGROUP_ROWS)
        )
        self._query = _Maps("query", problem.query, rows, context)
        self._key = _Maps("key", problem.key, _box(problem.key, tile_kv), context)
        self._value = _Maps("value", problem.value, _box(problem.value, tile_kv), context)
        self._out = _Maps("out", problem.out, _box(problem.out, _WARPGROUP_ROWS), context)
        layout = workspace(problem, kernel.row, sm_count)
        self._tile_counter, self._arrivals, self._partials = map(layout.offset, layout.slabs)
        self._plan = LaunchPlan(kernel, grid(problem, kernel.row, sm_count))

        total_q, num_heads_q, _ = problem.query.shape
        total_kv, num_heads_kv, _ = problem.key.shape
        self._strides = _STRIDES.pack(*problem.out.strides[:2], *(problem.lse_strides or (0, 0)))
        self._extents = _EXTENTS.pack(
            problem.batch_size,
            total_q,
            total_kv,
            num_heads_q,
            num_heads_q // num_heads_kv,
            problem.window_left if kernel.row.mask_type is MaskType.SLIDING else -1,
        )
        self._division = _DIVISION.pack(*division)

    def __call__(self, arguments: Arguments, stream: int, pdl: bool) -> None:
        """Packs struct Params and launches."""
        a = arguments
        workspace = a.workspace
        # A tensor without elements has no address, but its map must; it is never read through.
        try:
            parameters = _PARAMS.pack(
                self._query[a.query or workspace],
                self._key[a.key or workspace],
                self._value[a.value or workspace],
                self._out[a.out or workspace],
                a.out,
                a.lse,
                a.cum_seq_lens_q,
                a.cum_seq_lens_kv,
                a.attention_sinks,
                a.bmm1_scale_pointer,
                a.bmm2_scale_pointer,
                workspace + self._tile_counter,
                workspace + self._arrivals,
                workspace + self._partials,
                self._strides,
                next(_launch_tags) % 0xFFFFFFFF + 1,
                self._extents,
                a.bmm1_scale,
                a.bmm2_scale,
                self._division,
            )
        except OverflowError:
            raise InvalidArgumentError(
                f"bmm1_scale is {a.bmm1_scale} and bmm2_scale is {a.bmm2_scale}; expected values of float32"
            ) from None
        launch(self._plan, parameters, stream, pdl)


prepare = FmhaSm90Call


class _Maps(dict[int, bytes]):
    """Tensor maps of one operand, by address: allocators hand the same addresses out again and again."""

    def __init__(self, name: str, layout: TensorLayout, box: tuple[int, int, int], context: int) -> None:
        super().__init__()
        tokens, heads, head_dim = layout.shape
        self._map = TiledMap(
            tensor=name,
            dtype=layout.dtype,
            dims=(_CHUNK, max(tokens, 1), heads, head_dim // _CHUNK),
            strides=(*_byte_strides(layout), _CHUNK * layout.dtype.bytes),
            box=(_CHUNK, *box),
        )
        self._context = context

    def __missing__(self, address: int) -> bytes:
        if len(self) >= _MAX_MAPS:
            self.clear()
        with _driver.entered(self._context):  # the driver encodes for a device
            encoded = self[address] = self._map.encode(address)
        return encoded


def _box(layout: TensorLayout, rows: int) -> tuple[int, int, int]:
    """Rows of one head, whole: tokens, heads, chunks."""
    return rows, 1, layout.shape[2] // _CHUNK


def _byte_strides(layout: TensorLayout) -> tuple[int, int]:
    """Token and head stride. That of a dimension of size 1 may be anything, so it gets a legal value."""
    packed = layout.shape[2] * layout.dtype.bytes
    token, head = (
        stride * layout.dtype.bytes if size > 1 else packed
        for size, stride in zip(layout.shape[:2], layout.strides[:2], strict=True)
    )
    return token, head
