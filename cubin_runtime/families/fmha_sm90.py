"""Our Hopper kernels: parameters of kernel_meta/fmha_sm90/params.h, one launch, no preparation on the device.

The kernels follow the lengths on the device, write rows that see no key themselves and take a workspace
with any contents, so nothing here depends on the values of the lengths.
"""

from __future__ import annotations

import itertools
import struct

from cubin_runtime import _driver
from cubin_runtime.errors import InvalidArgumentError, TableError
from cubin_runtime.families import Arguments, Problem, TensorLayout
from cubin_runtime.launch import LaunchPlan, launch
from cubin_runtime.module import LoadedKernel
from cubin_runtime.tensormap import TiledMap
from cubin_runtime.workspace import WorkspaceLayout
from kernel_meta.schema import KernelRow

ABI = "fmha_sm90/1"

# struct Params: tensor maps, pointers, strides, launch tag, extents, scales. Its size is a multiple of 64,
# the alignment of the maps.
_PARAMS = struct.Struct("<128s128s128s128s 8Q 32s I 24s 2f 60x")
_STRIDES = struct.Struct("<4q")
_EXTENTS = struct.Struct("<6i")
PARAMETER_BYTES = _PARAMS.size

_WARPGROUP_ROWS = 64
_CHUNK = 64  # elements of one 128-byte swizzle span
_TICKETS = "tile_counter"
_MAX_MAPS = 1024

# Tags tell the kernel whether the ticket counter in the workspace is of its own launch; 0 is nobody's.
_launch_tags = itertools.count(1)


def workspace(problem: Problem) -> WorkspaceLayout:
    """A ticket counter. It need not be zero."""
    return WorkspaceLayout.of(**{_TICKETS: 8})


def grid(problem: Problem, row: KernelRow, sm_count: int) -> tuple[int, int, int]:
    """One block per multiprocessor, or fewer where there cannot be as many tiles whatever the lengths are."""
    total_q, num_heads_q, _ = problem.query.shape
    most_tiles = num_heads_q * min(total_q, -(-total_q // row.tile_q) + problem.batch_size)
    return max(1, min(sm_count, most_tiles)), 1, 1


class FmhaSm90Call:
    """Calls of one problem: grid, tensor maps by address, and the constant parameters."""

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
        self._query = _Maps("query", problem.query, _WARPGROUP_ROWS, context)
        self._key = _Maps("key", problem.key, tile_kv, context)
        self._value = _Maps("value", problem.value, tile_kv, context)
        self._out = _Maps("out", problem.out, _WARPGROUP_ROWS, context)
        self._counter_offset = workspace(problem).offset(_TICKETS)
        self._plan = LaunchPlan(kernel, grid(problem, kernel.row, kernel.device.sm_count))

        total_q, num_heads_q, _ = problem.query.shape
        total_kv, num_heads_kv, _ = problem.key.shape
        self._strides = _STRIDES.pack(*problem.out.strides[:2], *(problem.lse_strides or (0, 0)))
        self._extents = _EXTENTS.pack(
            problem.batch_size,
            total_q,
            total_kv,
            num_heads_q,
            num_heads_q // num_heads_kv,
            problem.window_left,
        )

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
                workspace + self._counter_offset,
                self._strides,
                next(_launch_tags) % 0xFFFFFFFF + 1,
                self._extents,
                a.bmm1_scale,
                a.bmm2_scale,
            )
        except OverflowError:
            raise InvalidArgumentError(
                f"bmm1_scale is {a.bmm1_scale} and bmm2_scale is {a.bmm2_scale}; expected values of float32"
            ) from None
        launch(self._plan, parameters, stream, pdl)


prepare = FmhaSm90Call


class _Maps(dict[int, bytes]):
    """Tensor maps of one operand, by address: allocators hand the same addresses out again and again."""

    def __init__(self, name: str, layout: TensorLayout, rows: int, context: int) -> None:
        super().__init__()
        tokens, heads, head_dim = layout.shape
        chunks = head_dim // _CHUNK
        self._map = TiledMap(
            tensor=name,
            dtype=layout.dtype,
            dims=(_CHUNK, max(tokens, 1), heads, chunks),
            strides=(*_byte_strides(layout), _CHUNK * layout.dtype.bytes),
            box=(_CHUNK, rows, 1, chunks),
        )
        self._context = context

    def __missing__(self, address: int) -> bytes:
        if len(self) >= _MAX_MAPS:
            self.clear()
        with _driver.entered(self._context):  # the driver encodes for a device
            encoded = self[address] = self._map.encode(address)
        return encoded


def _byte_strides(layout: TensorLayout) -> tuple[int, int]:
    """Token and head stride. That of a dimension of size 1 may be anything, so it gets a legal value."""
    packed = layout.shape[2] * layout.dtype.bytes
    token, head = (
        stride * layout.dtype.bytes if size > 1 else packed
        for size, stride in zip(layout.shape[:2], layout.strides[:2], strict=True)
    )
    return token, head
