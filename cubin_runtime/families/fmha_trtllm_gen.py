"""NVIDIA's Blackwell kernels (trtllm-gen), as flashinfer-cubin publishes them.

Byte for byte what NVIDIA's own host code gives the kernels, where that is right; where it is silently wrong,
`check` raises. Up to three launches: a softmax scale that lies on the device is converted, then the attention
kernel runs, then its softmax statistics become the LSE. The first and the last are kernels of ours.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kernel_meta
from cubin_runtime import _driver
from cubin_runtime.bounded import Bounded
from cubin_runtime.errors import InvalidArgumentError, TableError, UnsupportedError
from cubin_runtime.families import Arguments, Problem, TensorLayout
from cubin_runtime.families.packing import StructLayout, fast_divisor, load_layout
from cubin_runtime.launch import LaunchPlan, launch
from cubin_runtime.module import DeviceInfo, Loaded, LoadedKernel, load_step
from cubin_runtime.request import DType, MaskType
from cubin_runtime.tensormap import TiledMap
from cubin_runtime.workspace import ALIGNMENT, WorkspaceLayout
from kernel_meta.schema import KernelRow
from kernel_meta.tables import find_step

FAMILY = "fmha_trtllm_gen"

_LOG2E = math.log2(math.e)
_INT32_MAX = 2**31 - 1
_SWIZZLE_BYTES = 128
_MAX_ENCODED = 256

_COUNTER_BYTES = 8 * 2**20
_STATS_BYTES = 8  # (max, sum) of one row and head
_STATS_SLACK = 2**20
_STATS_ROUNDING = 256  # query rows
_SCALE_BYTES = 4

# struct Params of kernel_meta/fmha_trtllm_gen/lse.cu and scale.cu.
LSE_PARAMETERS = struct.Struct("<QQQqqiii4x")
SCALE_PARAMETERS = struct.Struct("<QQ")


def workspace(problem: Problem, row: KernelRow, sm_count: int) -> WorkspaceLayout:
    """Counters, the converted scale if there is one, the softmax statistics if there is an LSE, scratch.

    Kernels for ragged batches have no use for scratch, so the buffer may end where it starts. Its bytes are
    those that statistics would take if lengths on the device were longer than max_q_len says.
    """
    total_q, num_heads_q, _ = problem.query.shape
    softmax, scratch = 0, 0
    if problem.lse_strides is not None:
        rows = problem.batch_size * _round_up(problem.max_q_len, _STATS_ROUNDING)
        softmax = _STATS_BYTES * num_heads_q * rows + _STATS_SLACK
        scratch = max(0, _STATS_BYTES * num_heads_q * total_q - softmax)
    return WorkspaceLayout.of(
        counters=_COUNTER_BYTES,
        scale=_SCALE_BYTES if problem.bmm1_scale_on_device else 0,
        softmax=softmax,
        scratch=scratch,
    )


def grid(problem: Problem, row: KernelRow, sm_count: int) -> tuple[int, int, int]:
    """A block for each step of query rows of the longest sequence, head and sequence."""
    return -(-problem.max_q_len // _step_q(row)), problem.query.shape[1], problem.batch_size


def check(problem: Problem) -> None:
    """Raises what the kernels, or NVIDIA's own host code, would do silently wrong."""
    for name, tensor in (("query", problem.query), ("out", problem.out)):
        if not _is_contiguous(tensor):
            raise InvalidArgumentError(
                f"{name} has strides {tensor.strides} for shape {tensor.shape}; kernels of {FAMILY} need it "
                "contiguous"
            )
    for name, tensor in (("key", problem.key), ("value", problem.value)):
        if not all(0 <= stride <= _INT32_MAX for stride in tensor.strides):
            raise InvalidArgumentError(
                f"{name} has strides {tensor.strides}; kernels of {FAMILY} need them below 2**31 elements"
            )
    if problem.request.mask_type is MaskType.DENSE and problem.window_left != -1:
        raise UnsupportedError(f"window_left is {problem.window_left} with a dense mask; expected -1")
    if not problem.max_q_len or not problem.batch_size:
        raise InvalidArgumentError(
            f"max_q_len is {problem.max_q_len} and batch_size {problem.batch_size} for a query of "
            f"{problem.query.shape[0]} tokens; expected at least 1"
        )


def prepare(problem: Problem, kernel: LoadedKernel) -> FmhaTrtllmGenCall:
    """See Family.prepare."""
    check(problem)
    return FmhaTrtllmGenCall(problem, kernel)


class FmhaTrtllmGenCall:
    """Calls of one problem.

    workspace            where the kernels' areas lie, from the first aligned address of the buffer on
    partial_stats_bytes  how far behind the start of scratch partial outputs would begin
    layout               of the parameter struct
    """

    handles_empty_rows = False
    zeroed_bytes = _COUNTER_BYTES

    def __init__(self, problem: Problem, kernel: LoadedKernel) -> None:
        self.problem = problem
        self.kernel = kernel
        self.layout = _struct_layout(kernel)
        self.workspace = workspace(problem, kernel.row, kernel.device.sm_count)
        self._maps = _maps(problem, kernel.row)
        self._encoded: Bounded[tuple[int, int, int, int], dict[str, bytes]] = Bounded(_MAX_ENCODED)
        self._plan = LaunchPlan(
            kernel, grid(problem, kernel.row, kernel.device.sm_count), states_defaults=True
        )
        self._constants = _constants(problem, kernel, self._plan.grid, self.layout)
        self.partial_stats_bytes = _STATS_BYTES * kernel.device.sm_count * _step_q(kernel.row)
        self._lse: LaunchPlan | None = None
        if problem.lse_strides is not None:
            total_q, num_heads_q, _ = problem.query.shape
            self._lse = _one_dimensional(_load_step("lse", kernel.device), total_q * num_heads_q)
        self._scale: LaunchPlan | None = None
        if problem.bmm1_scale_on_device:
            self._scale = _one_dimensional(_load_step("scale", kernel.device), 1)

    def __call__(self, arguments: Arguments, stream: int, pdl: bool) -> None:
        """Launches what the call takes, one after the other."""
        converted = 0
        if arguments.bmm1_scale_pointer:
            assert self._scale is not None  # as the problem said
            converted = _aligned(arguments.workspace) + self.workspace.offset("scale")
            launch(self._scale, SCALE_PARAMETERS.pack(arguments.bmm1_scale_pointer, converted), stream, pdl)
        self.attend(arguments, converted, stream, pdl)
        self.write_lse(arguments, stream, pdl)

    def attend(self, arguments: Arguments, scale_log2_pointer: int, stream: int, pdl: bool) -> None:
        """Launches the attention kernel.

        scale_log2_pointer  address of log2(e) * bmm1_scale on the device; 0 = arguments.bmm1_scale counts
        """
        launch(self._plan, self._parameters(arguments, scale_log2_pointer), stream, pdl)

    def write_lse(self, arguments: Arguments, stream: int, pdl: bool) -> None:
        """Launches the step that makes the LSE of the attention kernel's statistics, if one is wanted."""
        if self._lse is not None:
            launch(self._lse, self._lse_parameters(arguments), stream, pdl)

    def _parameters(self, a: Arguments, scale_log2_pointer: int) -> bytes:
        if a.skip_counts:
            raise InvalidArgumentError(
                "skip_softmax_counts is given; expected None: NVIDIA's kernels do not count"
            )
        base = _aligned(a.workspace)
        scratch = base + self.workspace.offset("scratch")
        sage_q, sage_k, sage_p, sage_v = a.sage_scales
        try:
            return self.layout.pack(
                {
                    **self._constants,
                    **self._encode_maps(a),
                    "ptrO": a.out,
                    "ptrAttentionSinks": a.attention_sinks,
                    "ptrCumSeqLensQ": a.cum_seq_lens_q,
                    "ptrCumSeqLensKv": a.cum_seq_lens_kv,
                    "ptrSeqLensKv": a.seq_lens,
                    "ptrMultiCtasKvCounter": base + self.workspace.offset("counters"),
                    "ptrPartialStats": scratch,
                    "ptrPartialO": scratch + self.partial_stats_bytes,
                    "ptrSoftmaxStats": base + self.workspace.offset("softmax") if self._lse else 0,
                    "ptrSageAttnSfsQ": sage_q,
                    "ptrSageAttnSfsK": sage_k,
                    "ptrSageAttnSfsP": sage_p,
                    "ptrSageAttnSfsV": sage_v,
                    "ptrScaleSoftmaxLog2": scale_log2_pointer,
                    "ptrOutputScale": a.bmm2_scale_pointer,
                    "mScaleSoftmaxLog2": _LOG2E * (1.0 if scale_log2_pointer else a.bmm1_scale),
                    "mOutputScale": 1.0 if a.bmm2_scale_pointer else a.bmm2_scale,
                    "mScaleSfO": a.o_sf_scale,
                }
            )
        except OverflowError:
            raise InvalidArgumentError(
                f"bmm1_scale is {a.bmm1_scale}, bmm2_scale {a.bmm2_scale}, o_sf_scale {a.o_sf_scale}, the "
                f"skip-softmax factor {self.problem.skip_softmax_factor}; expected values of float32"
            ) from None

    def _encode_maps(self, a: Arguments) -> dict[str, bytes]:
        """Tensor maps, kept by address, in the order in which NVIDIA's host code refuses them."""
        addresses = (a.query, a.key, a.value, a.out)
        encoded = self._encoded.get(addresses)
        if encoded is None:
            with _driver.entered(self.kernel.context):  # the driver encodes for a device
                encoded = {
                    name: tiled.encode(address)
                    for (name, tiled), address in zip(self._maps.items(), addresses, strict=True)
                }
            self._encoded[addresses] = encoded
        return encoded

    def _lse_parameters(self, a: Arguments) -> bytes:
        assert self.problem.lse_strides is not None
        total_q, num_heads_q, _ = self.problem.query.shape
        return LSE_PARAMETERS.pack(
            _aligned(a.workspace) + self.workspace.offset("softmax"),
            a.lse,
            a.cum_seq_lens_q,
            *self.problem.lse_strides,
            self.problem.batch_size,
            num_heads_q,
            total_q,
        )


# ---- parameters


def _struct_layout(kernel: LoadedKernel) -> StructLayout:
    """The layout that the row's ABI names, checked against the cubin."""
    row = kernel.row
    family, _, release = row.abi.partition("/")
    if family != FAMILY:
        raise TableError(f"{row.name} has parameter layout {row.abi}; expected {FAMILY}/<release>")
    folder = Path(kernel_meta.__file__).parent / FAMILY
    layout = load_layout(folder / f"params_{release.replace('.', '_')}.yaml")
    if kernel.facts.parameter_bytes != layout.size:
        raise TableError(
            f"{row.name} takes {kernel.facts.parameter_bytes} bytes of parameters; "
            f"{row.abi} has {layout.size}"
        )
    return layout


def _constants(
    problem: Problem, kernel: LoadedKernel, grid: tuple[int, int, int], layout: StructLayout
) -> Mapping[str, Any]:
    """What is the same in every call."""
    total_q, num_heads_q, head_dim_qk = problem.query.shape
    total_kv, num_heads_kv, _ = problem.key.shape
    log2_q, log2_k, log2_p, log2_v = (max(size, 1).bit_length() - 1 for size in problem.request.sage_blocks)
    group = num_heads_q // num_heads_kv
    return {
        **_window(problem.window_left, layout),
        "mBatchSize": problem.batch_size,
        "mLogNumEltsPerSageAttnBlkQ": log2_q,
        "mLogNumEltsPerSageAttnBlkK": log2_k,
        "mLogNumEltsPerSageAttnBlkP": log2_p,
        "mLogNumEltsPerSageAttnBlkV": log2_v,
        "mMaxSeqLenQ": problem.max_q_len,
        "mMaxSeqLenKv": problem.max_kv_len,
        "mMaxNumCtasQ": grid[0],
        "mMaxNumCtasKv": 1,
        "mNumHeadsQ": num_heads_q,
        "mNumHeadsKv": num_heads_kv,
        "mNumHeadsQPerKv": group,
        "mNumHeadsQPerKvDivisor": fast_divisor(group),
        "mNumHiddenEltsO": num_heads_q * head_dim_qk,
        "mNumTokensPerCtaQ": kernel.row.tile_q,
        "mNumTokensPerPageLog2": -1,
        "mReshapeFactorKv": 1,
        "mSkipSoftmaxThresholdScaleFactor": problem.skip_softmax_factor,
        "mSumOfSeqLensQ": total_q,
        "mSumOfSeqLensKv": total_kv,
    }


def _window(left: int, layout: StructLayout) -> Mapping[str, int]:
    """The window as a number of keys with the row's own, or in later releases as distances, -1 = no bound."""
    if "mAttentionWindowSize" in layout.fields:
        return {"mAttentionWindowSize": _INT32_MAX if left == -1 else min(left + 1, _INT32_MAX)}
    return {"mLeftSlidingWindow": left, "mRightSlidingWindow": -1}


# ---- tensor maps


def _maps(problem: Problem, row: KernelRow) -> dict[str, TiledMap]:
    """The maps of query, key, value and out, in this order."""
    total_q, num_heads_q, head_dim_qk = problem.query.shape
    num_heads_kv = problem.key.shape[1]
    head_dim_v = problem.value.shape[2]
    query_row = head_dim_qk * problem.query.dtype.bytes
    # NVIDIA's host code describes out with query's dtype, whatever its own.
    out_row = head_dim_v * problem.query.dtype.bytes
    return {
        "tmaQ_": _map(
            "query",
            problem.query.dtype,
            dims=(head_dim_qk, 1, num_heads_q, total_q),
            strides=(query_row, query_row, num_heads_q * query_row),
            box=(1, 1, row.tile_q),
        ),
        "tmaK_": _key_value_map("key", problem.key, row),
        "tmaV_": _key_value_map("value", problem.value, row),
        "tmaO_": _map(
            "out",
            problem.query.dtype,
            dims=(head_dim_v, total_q, num_heads_kv, num_heads_q // num_heads_kv, 1),
            strides=(num_heads_q * out_row, out_row, num_heads_kv * out_row, 0),
            box=(row.tile_q, 1, 1, 1),
        ),
    }


def _key_value_map(name: str, layout: TensorLayout, row: KernelRow) -> TiledMap:
    tokens, heads, head_dim = layout.shape
    token_stride, head_stride = (stride * layout.dtype.bytes for stride in _strides(layout))
    return _map(
        name,
        layout.dtype,
        dims=(head_dim, tokens, heads, 1),
        strides=(token_stride, head_stride, _batch_stride(tokens * heads * head_dim) * layout.dtype.bytes),
        box=(row.tile_kv, 1, 1),
    )


def _map(
    name: str,
    dtype: DType,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
) -> TiledMap:
    """Tiles as wide as the widest swizzle, or as a row."""
    width = min(dims[0], _SWIZZLE_BYTES // dtype.bytes)
    return TiledMap(
        tensor=name,
        dtype=dtype,
        dims=dims,
        strides=strides,
        box=(width, *box),
        swizzle=64 if width * dtype.bytes == 64 else 128,
        l2_promotion=128,
    )


def _strides(layout: TensorLayout) -> tuple[int, int]:
    """Token and head stride. That of a dimension of size 1 may be anything, so it gets a legal value."""
    token, head = (
        stride if size > 1 or stride * layout.dtype.bytes % ALIGNMENT == 0 else layout.shape[2]
        for size, stride in zip(layout.shape[:2], layout.strides[:2], strict=True)
    )
    return token, head


def _batch_stride(elements: int) -> int:
    """Stride of a dimension of size 1. No address depends on it, so it is NVIDIA's: 32 bits, or 0."""
    cut = elements & 0xFFFFFFFF
    return 0 if cut > _INT32_MAX else cut


def _is_contiguous(layout: TensorLayout) -> bool:
    """Whether there are no gaps; the stride of a dimension of size 1 is of no account."""
    _, heads, head_dim = layout.shape
    packed = (heads * head_dim, head_dim, 1)
    return all(
        size == 1 or stride == expected
        for size, stride, expected in zip(layout.shape, layout.strides, packed, strict=True)
    )


# ---- what is small


def _load_step(name: str, device: DeviceInfo) -> Loaded:
    return load_step(find_step(FAMILY, name, device.capability), device.ordinal)


def _one_dimensional(kernel: Loaded, threads: int) -> LaunchPlan:
    return LaunchPlan(kernel, (-(-threads // kernel.resources.threads), 1, 1))


def _step_q(row: KernelRow) -> int:
    return row.step_q or row.tile_q


def _aligned(workspace: int) -> int:
    return _round_up(workspace, ALIGNMENT)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
