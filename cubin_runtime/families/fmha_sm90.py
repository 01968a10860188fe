"""Our Hopper kernels: parameters of kernel_meta/fmha_sm90/params.h, no preparation on the device.

The kernels follow the lengths on the device, write rows that see no key themselves and take a workspace
with any contents, so nothing here depends on the values of the lengths. Where the keys of a tile may be
divided among blocks, a second launch combines what the parts leave in the workspace.
"""

from __future__ import annotations

import math
import struct
from typing import Literal, NamedTuple

from cubin_runtime import _driver
from cubin_runtime.bounded import Bounded
from cubin_runtime.errors import InvalidArgumentError, TableError
from cubin_runtime.families import Arguments, Problem, TensorLayout
from cubin_runtime.few_rows import FEW_KEYS, filling_heads, packed_heads
from cubin_runtime.launch import LaunchPlan, launch, launch_tag
from cubin_runtime.module import Loaded, LoadedKernel, load_step
from cubin_runtime.request import SAGE_OFF, DType, MaskType
from cubin_runtime.tensormap import TiledMap
from cubin_runtime.workspace import WorkspaceLayout
from kernel_meta.schema import KernelRow, Scheduler
from kernel_meta.tables import find_step

FAMILY = "fmha_sm90"
ABI = "fmha_sm90/3"
COMBINE_ABI = "fmha_sm90_combine/1"

# struct Params: tensor maps, pointers, divided keys, strides, launch tag, extents, scales, packing, and what
# only variants read. Its size is a multiple of 64, the alignment of the maps.
_PARAMS = struct.Struct("<128s128s128s128s 8Q 32s 32s I 24s 2f 12s 40s 16s 24x")
_STRIDES = struct.Struct("<4q")
_EXTENTS = struct.Struct("<6i")
_PACKING = struct.Struct("<3i")
_SAGE_SCALES = struct.Struct("<3Q 4i")
_SKIP_SOFTMAX = struct.Struct("<Q f")
PARAMETER_BYTES = _PARAMS.size

# struct DividedKeys, and struct CombineParams: divided keys, pointers, strides, scale, shape.
_DIVIDED = struct.Struct("<4Q")
_COMBINE = struct.Struct("<32s 4Q 32s f 20s")
_COMBINE_SHAPE = struct.Struct("<5i")

_WARPGROUP_ROWS = 64
_SPAN = 128  # bytes of a row that lie together in shared memory, under the widest swizzle
_WHOLE_ROWS = 0  # of a box: all spans of a row
_MAX_MAPS = 1024
_PART_BYTES = 32  # struct Part

_LEAST_BLOCKS_PER_PART = 2  # a shorter part costs more to combine than it saves
_COMBINE_SLICES = 4  # combine.cu: blocks of a slot


class _Tiling(NamedTuple):
    """How a kernel packs query rows into tiles and may divide their keys, from shapes alone.

    tile_tokens, tile_heads, least_blocks_per_part   as in struct Params
    grid     blocks of the launch
    slots    parts that can be needed; 0 = no tile is divided
    """

    tile_tokens: int
    tile_heads: int
    least_blocks_per_part: int
    grid: int
    slots: int

    @classmethod
    def of(cls, problem: Problem, row: KernelRow, sm_count: int) -> _Tiling:
        """As many blocks as the device holds, or fewer where there cannot be as many tiles or parts."""
        total_q, num_heads_q, _ = problem.query.shape
        group = num_heads_q // problem.key.shape[1]
        split = row.scheduler is Scheduler.SPLIT
        # A tile of few rows may leave some unused; others are filled. Those pruned together have one head.
        filled = 1 if row.uses_spcompress else filling_heads(group)
        tile_heads = packed_heads(group) if row.scheduler.is_for_few_rows else filled
        tile_tokens = _WARPGROUP_ROWS // tile_heads
        tokens = row.tile_q // _WARPGROUP_ROWS * tile_tokens
        tiles = num_heads_q // tile_heads * min(total_q, total_q // tokens + problem.batch_size)
        capacity = row.blocks_per_sm * sm_count
        if not split or problem.max_kv_len <= FEW_KEYS:
            return cls(tile_tokens, tile_heads, 0, max(1, min(capacity, tiles)), 0)
        parts = tiles * (-(-problem.max_kv_len // row.tile_kv) // _LEAST_BLOCKS_PER_PART)
        grid = max(1, min(capacity, parts))
        # division.cuh says why they are enough, whatever lengths it finds.
        slots = 2 * grid
        return cls(tile_tokens, tile_heads, _LEAST_BLOCKS_PER_PART, grid, slots)


def workspace(problem: Problem, row: KernelRow, sm_count: int) -> WorkspaceLayout:
    """A ticket counter; where keys may be divided, also what the parts leave. Nothing need be zero."""
    slots = _Tiling.of(problem, row, sm_count).slots
    rows = slots * row.tile_q
    return WorkspaceLayout.of(
        tile_counter=8,
        parts=slots * _PART_BYTES,
        count=4 if slots else 0,
        sums=4 * rows * row.head_dim_v,
        statistics=8 * rows,
    )


def grid(problem: Problem, row: KernelRow, sm_count: int) -> tuple[int, int, int]:
    """Persistent blocks of the attention kernel."""
    return _Tiling.of(problem, row, sm_count).grid, 1, 1


class FmhaSm90Call:
    """Calls of one problem: grid, tensor maps by address, and the constant parameters."""

    handles_empty_rows = True
    zeroed_bytes = 0

    def __init__(self, problem: Problem, kernel: LoadedKernel) -> None:
        _check_abi(kernel, ABI, PARAMETER_BYTES)
        self.problem = problem
        self.kernel = kernel
        row, context = kernel.row, kernel.context
        sm_count = kernel.device.sm_count
        tiling = _Tiling.of(problem, row, sm_count)
        packed = (tiling.tile_tokens, tiling.tile_heads)
        in_chunks = row.scheduler is Scheduler.SPLIT or math.prod(packed) < _WARPGROUP_ROWS
        query_box = (*packed, 1 if in_chunks else _WHOLE_ROWS)
        keys = (row.tile_kv, 1, _WHOLE_ROWS)
        # Values that are converted do not go to the matrix unit as they land (values.cuh).
        converts = row.dtype_v.bytes == 1 and not row.e4m3_p
        value_swizzle: Literal[0, 128] = 0 if converts else 128
        self._query = _Maps(_spans("query", problem.query, query_box), context)
        self._key = _Maps(_spans("key", problem.key, keys), context)
        self._value = _Maps(_spans("value", problem.value, keys, value_swizzle), context)
        self._out = _Maps(_spans("out", problem.out, (*packed, _WHOLE_ROWS)), context)
        self._permuted_keys = (
            _Maps(_permuted_keys(problem.key, row.tile_kv), context) if row.uses_spcompress else None
        )
        layout = workspace(problem, row, sm_count)
        self._tile_counter = layout.offset("tile_counter")
        self._plan = LaunchPlan(kernel, (tiling.grid, 1, 1))

        total_q, num_heads_q, _ = problem.query.shape
        total_kv, num_heads_kv, _ = problem.key.shape
        self._strides = _STRIDES.pack(*problem.out.strides[:2], *(problem.lse_strides or (0, 0)))
        self._extents = _EXTENTS.pack(
            problem.batch_size,
            total_q,
            total_kv,
            num_heads_q,
            num_heads_q // num_heads_kv,
            problem.window_left if row.mask_type is MaskType.SLIDING else -1,
        )
        self._packing = _PACKING.pack(*tiling[:3])
        self._sage_columns = _sage_columns(problem)
        self._combine = _Combine(tiling, layout, self._strides, kernel) if tiling.slots else None

    def __call__(self, arguments: Arguments, stream: int, pdl: bool) -> None:
        """Packs struct Params and launches."""
        a = arguments
        workspace = a.workspace
        combine = self._combine
        # A tensor without elements has no address, but its map must; it is never read through.
        try:
            parameters = _PARAMS.pack(
                self._query[a.query or workspace],
                self._key[a.key or workspace],
                self._value[a.value or workspace],
                self._out_map(a),
                a.out,
                a.lse,
                a.cum_seq_lens_q,
                a.cum_seq_lens_kv,
                a.attention_sinks,
                a.bmm1_scale_pointer,
                a.bmm2_scale_pointer,
                workspace + self._tile_counter,
                combine.divided(workspace) if combine else b"",
                self._strides,
                launch_tag(),
                self._extents,
                a.bmm1_scale,
                a.bmm2_scale,
                self._packing,
                self._sage_scales(a),
                self._skip_softmax(a),
            )
        except OverflowError:
            raise InvalidArgumentError(
                f"bmm1_scale is {a.bmm1_scale}, bmm2_scale {a.bmm2_scale}, the skip-softmax factor "
                f"{self.problem.skip_softmax_factor}; expected values of float32"
            ) from None
        launch(self._plan, parameters, stream, pdl)
        if combine:
            combine(a, stream)

    def _out_map(self, a: Arguments) -> bytes:
        """Params::out_map, in whose place rows with spcompress have their keys; the rules of `out` stay."""
        out = self._out[a.out or a.workspace]
        return out if self._permuted_keys is None else self._permuted_keys[a.key or a.workspace]

    def _sage_scales(self, a: Arguments) -> bytes:
        """struct SageScales."""
        if self._sage_columns is None:
            return b""
        q, k, _, v = a.sage_scales
        return _SAGE_SCALES.pack(q, k, v, *self._sage_columns)

    def _skip_softmax(self, a: Arguments) -> bytes:
        """struct SkipSoftmax."""
        if not self.kernel.row.skips_softmax:
            return b""
        return _SKIP_SOFTMAX.pack(a.skip_counts, self.problem.skip_softmax_factor)


class _Combine:
    """The launch that combines the parts of divided tiles (combine.cu)."""

    def __init__(
        self, tiling: _Tiling, layout: WorkspaceLayout, strides: bytes, kernel: LoadedKernel
    ) -> None:
        row = kernel.row
        step = load_step(find_step(FAMILY, "combine", kernel.device.capability), kernel.device.ordinal)
        _check_abi(step, COMBINE_ABI, _COMBINE.size)
        at_once = min(tiling.slots, kernel.device.sm_count)  # with all slices, about what the device holds
        self._plan = LaunchPlan(step, (at_once, _COMBINE_SLICES, 1))
        self._areas = tuple(layout.offset(name) for name in ("parts", "count", "sums", "statistics"))
        self._strides = strides
        self._shape = _COMBINE_SHAPE.pack(
            row.head_dim_v, row.dtype_o is DType.FP16, row.tile_q, tiling.tile_tokens, tiling.tile_heads
        )

    def divided(self, workspace: int) -> bytes:
        """struct DividedKeys."""
        return _DIVIDED.pack(*(workspace + area for area in self._areas))

    def __call__(self, arguments: Arguments, stream: int) -> None:
        a = arguments
        parameters = _COMBINE.pack(
            self.divided(a.workspace),
            a.out,
            a.lse,
            a.attention_sinks,
            a.bmm2_scale_pointer,
            self._strides,
            a.bmm2_scale,
            self._shape,
        )
        # It waits for the attention kernel itself, and whatever comes after it for both.
        launch(self._plan, parameters, stream, pdl=True)


def _sage_columns(problem: Problem) -> tuple[int, int, int, int] | None:
    """Columns of the scales of q and k, and log2 of how many tokens share one; None without Sage scales."""
    if problem.request.sage_blocks == SAGE_OFF:
        return None
    block_q, block_k, _, _ = problem.request.sage_blocks

    def columns(layout: TensorLayout, block: int) -> int:
        return -(-layout.shape[0] // block) + problem.batch_size - 1

    return (
        columns(problem.query, block_q),
        columns(problem.key, block_k),
        block_q.bit_length() - 1,
        block_k.bit_length() - 1,
    )


def _check_abi(kernel: Loaded, abi: str, parameter_bytes: int) -> None:
    if kernel.row.abi != abi:
        raise TableError(f"{kernel.row.name} has parameter layout {kernel.row.abi}; expected {abi}")
    if kernel.facts.parameter_bytes != parameter_bytes:
        raise TableError(
            f"{kernel.row.name} takes {kernel.facts.parameter_bytes} bytes of parameters; "
            f"{abi} has {parameter_bytes}"
        )


prepare = FmhaSm90Call


class _Maps(Bounded[int, bytes]):
    """Tensor maps of one operand, by address: allocators hand the same addresses out again and again."""

    def __init__(self, tiled: TiledMap, context: int) -> None:
        super().__init__(_MAX_MAPS)
        self._map = tiled
        self._context = context

    def __missing__(self, address: int) -> bytes:
        with _driver.entered(self._context):  # the driver encodes for a device
            encoded = self[address] = self._map.encode(address)
        return encoded


def _spans(
    name: str, layout: TensorLayout, box: tuple[int, int, int], swizzle: Literal[0, 128] = 128
) -> TiledMap:
    """An operand as (elements of a span, tokens, heads, spans of a row); `box` has all but the first.

    A span is as wide as rows are whole multiples of, and its swizzle no wider (config.h).
    """
    tokens, heads, head_dim = layout.shape
    row = head_dim * layout.dtype.bytes
    span: Literal[64, 128] = 128 if row % _SPAN == 0 else 64
    elements = span // layout.dtype.bytes
    return TiledMap(
        tensor=name,
        dtype=layout.dtype,
        dims=(elements, max(tokens, 1), heads, row // span),
        strides=(*_byte_strides(layout), span),
        box=(elements, *box[:2], box[2] or row // span),
        swizzle=swizzle and span,
    )


def _permuted_keys(key: TensorLayout, tile_kv: int) -> TiledMap:
    """The keys as compress.cuh wants them, from a token on: the first two of each four in a tile."""
    whole = _spans("key", key, (tile_kv, 1, 1))
    elements, tokens, heads, spans = whole.dims
    token, head, span = whole.strides
    return TiledMap(
        tensor=whole.tensor,
        dtype=whole.dtype,
        dims=(elements, tokens, tile_kv // 4, heads, spans),
        strides=(token, 4 * token, head, span),
        box=(elements, 2, tile_kv // 4, 1, 1),
        swizzle=whole.swizzle,
    )


def _byte_strides(layout: TensorLayout) -> tuple[int, int]:
    """Token and head stride. That of a dimension of size 1 may be anything, so it gets a legal value."""
    packed = layout.shape[2] * layout.dtype.bytes
    token, head = (
        stride * layout.dtype.bytes if size > 1 else packed
        for size, stride in zip(layout.shape[:2], layout.strides[:2], strict=True)
    )
    return token, head
