"""The whole public call on the stub driver: every byte that a kernel gets, and what a call leaves alone."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cubin_runtime.request import Capability, DType
from kernel_meta.schema import Scheduler
from kernel_meta.tables import find_row, find_step

SOURCES = Path(__file__).parents[2] / "kernel_meta" / "fmha_sm90"
STREAM = 100  # + the device's ordinal

SETUP = f"""
import torch
from cuda_tensors import CudaTensor, cuda_call
from stub_support import fail, stub
from cubin_runtime import attention
from cubin_runtime import trtllm_ragged_attention_deepseek as attend
attention._current_stream = lambda device: {STREAM} + device

def sage(block_q, block_k, tokens=(320, 450), heads=(32, 16), dim_v=128, batch=2):
    def scales(which, block):
        return CudaTensor((heads[which], -(-tokens[which] // block) + batch - 1), torch.float32)
    return dict(
        value=CudaTensor((tokens[1], heads[1], dim_v), torch.float8_e4m3fn),
        out=CudaTensor((tokens[0], heads[0], dim_v)),
        sage_attn_sfs=(
            scales(0, block_q), scales(1, block_k), None, CudaTensor((heads[1], dim_v), torch.float32)
        ),
        num_elts_per_sage_attn_blk=(block_q, block_k, 0, 1),
    )
"""

FP8 = "dtype=torch.float8_e4m3fn"
MANY_ROWS_FP8 = f"heads=(128, 128), {FP8}, out=CudaTensor((320, 128, 128))"
BF16_OUT = "out=CudaTensor((320, 32, 128))"

# Arguments of `cuda_call`. "causal" has lengths (300, 20) and (400, 50), 32 heads over 16, dims (192, 128).
CALLS = {
    "causal": "",
    "dense": "is_causal=False",
    "sliding": "window_left=100",
    "window that hides one key": "window_left=398",
    "window over the longest row": "window_left=399",
    "window beyond": "window_left=2**31 - 1",
    "fp16": "dtype=torch.float16",
    "fp8": f"{FP8}, {BF16_OUT}",
    "fp8, fp16 out": f"{FP8}, out=CudaTensor((320, 32, 128), torch.float16)",
    "fp8, head dims 128": f"{FP8}, head_dims=(128, 128), {BF16_OUT}",
    "fp8, head dims 256": f"{FP8}, head_dims=(256, 256), window_left=100, out=CudaTensor((320, 32, 256))",
    "fp8, many keys": f"[300, 20], [3000, 50], {MANY_ROWS_FP8}",
    "fp8, many keys, few rows": f"[3], [3000], heads=(16, 2), {FP8}, out=CudaTensor((3, 16, 128))",
    "fp8, few keys": f"[300, 20], [1023, 50], {MANY_ROWS_FP8}",
    "fp8, window of many keys": f"[300, 20], [3000, 50], window_left=1023, {MANY_ROWS_FP8}",
    "fp8, window of few keys": f"[300, 20], [3000, 50], window_left=1022, {MANY_ROWS_FP8}",
    "fp8, few rows": f"[3], [9000], heads=(16, 2), {FP8}, out=CudaTensor((3, 16, 128))",
    "fp8, key and value in one buffer": (
        "key=CudaTensor((450, 16, 192), torch.float8_e4m3fn, strides=(5120, 320, 1), address=1 << 50), "
        "value=CudaTensor((450, 16, 128), torch.float8_e4m3fn, strides=(5120, 320, 1), "
        f"address=(1 << 50) + 192), {FP8}, {BF16_OUT}"
    ),
    "spcompress": f"{FP8}, {BF16_OUT}, uses_spcompress=True",
    "spcompress, head dims 256": (
        f"[3], [9000], heads=(16, 2), head_dims=(256, 256), is_causal=False, {FP8}, uses_spcompress=True, "
        "out=CudaTensor((3, 16, 256), torch.float16)"
    ),
    "spcompress, key and value in one buffer": (
        "head_dims=(128, 128), window_left=200, uses_spcompress=True, "
        "key=CudaTensor((450, 16, 128), torch.float8_e4m3fn, strides=(4096, 256, 1), address=1 << 50), "
        "value=CudaTensor((450, 16, 128), torch.float8_e4m3fn, strides=(4096, 256, 1), "
        f"address=(1 << 50) + 128), {FP8}, {BF16_OUT}"
    ),
    "fp8 values": "value=CudaTensor((450, 16, 128), torch.float8_e4m3fn)",
    "fp8 values, head dims 256": (
        "head_dims=(256, 256), is_causal=False, value=CudaTensor((450, 16, 256), torch.float8_e4m3fn)"
    ),
    "sage": "dtype=torch.int8, **sage(1, 16)",
    "sage, many keys": "[300, 20], [3000, 50], dtype=torch.int8, **sage(1, 16, (320, 3050))",
    "sage fp8, many keys, head dims 128": (
        f"[300, 20], [3000, 50], {FP8}, head_dims=(128, 128), **sage(16, 1, (320, 3050))"
    ),
    "sage fp8, head dims 256": f"{FP8}, head_dims=(256, 256), window_left=100, **sage(16, 4, dim_v=256)",
    "sage, few rows": (
        "[3], [9000], heads=(16, 2), dtype=torch.int8, **sage(4, 1, (3, 9000), heads=(16, 2), batch=1)"
    ),
    "head dims 128": "head_dims=(128, 128)",
    "head dims 256": "head_dims=(256, 256)",
    "tensor scales": "bmm1_scale=CudaTensor((), torch.float32), bmm2_scale=CudaTensor((1,), torch.float32)",
    "one tensor scale": "bmm2_scale=CudaTensor((1, 1), torch.float32)",
    "int scale": "bmm1_scale=3",
    "sinks": "attention_sinks=CudaTensor((32,), torch.float32)",
    "skip softmax": "skip_softmax_threshold_scale_factor=0.25",
    "skip softmax, counted": (
        "skip_softmax_threshold_scale_factor=1e-30, skip_softmax_counts=CudaTensor((2,), torch.int64)"
    ),
    "skip softmax, fp8": f"skip_softmax_threshold_scale_factor=2, {FP8}, head_dims=(128, 128), {BF16_OUT}",
    "skip softmax, few rows": "[1], [100_000], heads=(16, 1), skip_softmax_threshold_scale_factor=0.25",
    "fp16 softmax": "use_fp16_softmax=True",
    "fp16 softmax, few rows": "[1], [100_000], heads=(16, 1), use_fp16_softmax=True",
    "no lse": "lse=None",
    "lse transposed": "lse=CudaTensor((320, 32), torch.float32, strides=(1, 320))",
    "out strided": "out=CudaTensor((320, 32, 128), strides=(8192, 256, 1))",
    "key and value in one buffer": (
        "key=CudaTensor((450, 16, 192), strides=(5120, 320, 1), address=1 << 50), "
        "value=CudaTensor((450, 16, 128), strides=(5120, 320, 1), address=(1 << 50) + 384)"
    ),
    "heads outermost": "query=CudaTensor((320, 32, 192), strides=(192, 320 * 192, 1))",
    "expanded key": "key=CudaTensor((450, 16, 192), strides=(0, 192, 1))",
    "one token of any stride": (
        "[1], [1], query=CudaTensor((1, 32, 192), strides=(1, 192, 1)), "
        "key=CudaTensor((1, 16, 192), strides=(0, 192, 1)), out=CudaTensor((1, 32, 128), strides=(3, 128, 1))"
    ),
    "one head of any stride": (
        "heads=(1, 1), key=CudaTensor((450, 1, 192), strides=(192, 1, 1)), "
        "value=CudaTensor((450, 1, 128), strides=(128, 77, 1))"
    ),
    "no keys": "[3], [0]",
    "dependent launch": "enable_pdl=True",
    "no dependent launch": "enable_pdl=False",
    "one row": "[1], [1], heads=(1, 1)",
    "a tile of 64 rows and one more": "[65], [65], heads=(2, 2)",
    "many tiles": "[4096], [4096], heads=(128, 128)",
    "many sequences": "[1] * 3000, [7] * 3000",
    "few rows, long keys": "[1], [100_000], heads=(16, 1)",
    "few rows, uneven groups": "[5, 9], [3000, 2000], heads=(96, 2), head_dims=(128, 128)",
    "few rows, few keys": "[100, 20], [700, 30], heads=(24, 2), window_left=200",
    "few rows, dense": "[33], [5000], heads=(8, 8), head_dims=(256, 256), is_causal=False",
    **{f"{tokens} keys": f"[1, 1], [{tokens}, 1], heads=(128, 128)" for tokens in (87_381, 87_382, 174_763)},
    "131072 queries": "[131072], [131072], heads=(128, 128)",
}

COMBINE = find_step("fmha_sm90", "combine", Capability(9, 0))
MAPS = ("query_map", "key_map", "value_map", "out_map")
DIVISION = ("parts", "count", "sums", "statistics", "tile_tokens", "tile_heads", "least_blocks_per_part")
SAGE = ("scales_q", "scales_k", "scales_v", "columns_q", "columns_k", "block_q_log2", "block_k_log2")
SLIDING = {
    "sliding": 100,
    "fp8, head dims 256": 100,
    "sage fp8, head dims 256": 100,
    "fp8, window of many keys": 1023,
    "fp8, window of few keys": 1022,
    "spcompress, key and value in one buffer": 200,
    "window that hides one key": 398,
    "few rows, few keys": 200,
}


class Launch(NamedTuple):
    """One call: its arguments by name, the launches as the stub logged them, and the maps encoded for it."""

    arguments: dict[str, Any]
    call: dict[str, Any]
    maps: list[dict[str, Any]]
    combine: dict[str, Any] | None = None

    @property
    def parameters(self) -> bytes:
        return bytes.fromhex(self.call["parameters"])


DESCRIBE = """
def describe(value):
    if isinstance(value, tuple):
        return [describe(each) for each in value]
    if not isinstance(value, torch.Tensor):
        return value
    return {
        "address": value.data_ptr(), "shape": list(value.shape), "strides": list(value.stride()),
        "bytes": value.dtype.itemsize,
    }
"""


@pytest.fixture(scope="module")
def launches(run_once_with_stub: Callable[..., Any]) -> dict[str, Launch]:
    """Every call of CALLS, made by one process."""
    calls = "".join(f"    {name!r}: cuda_call({arguments}),\n" for name, arguments in CALLS.items())
    run = run_once_with_stub(
        SETUP
        + DESCRIBE
        + f"""
import json
calls = {{
{calls}}}
for name, arguments in calls.items():
    assert attend(**arguments) is arguments["out"], name
print(json.dumps({{name: {{n: describe(v) for n, v in call.items()}} for name, call in calls.items()}}))
""",
        parameter_bytes=_params()[1],
    )
    arguments = json.loads(run.stdout)
    found = {}
    maps: list[dict[str, Any]] = []
    names = iter(CALLS)
    name = ""
    for call in run.named("cuTensorMapEncodeTiled", "cuLaunchKernelEx"):
        if call["call"] == "cuTensorMapEncodeTiled":
            maps.append(call)
        elif call["kernel"] == COMBINE.name:
            found[name] = found[name]._replace(combine=call)
        else:
            name = next(names)
            found[name] = Launch(arguments[name], call, maps)
            maps = []
    assert list(found) == list(CALLS)
    return found


# ---- struct Params, read from the kernel's own header

_NESTED = {"DividedKeys": "parts.h", "SageScales": "params.h", "SkipSoftmax": "params.h"}
_TYPES = {"int64_t": "q", "int32_t": "i", "uint32_t": "I", "float": "f", "ptx::TensorMap": "128s"}


def _members(file: str, name: str) -> list[tuple[str, str]]:
    """(type, name) of the members of a struct, those of structs of ours in their place."""
    match = re.search(rf"struct {name} \{{(.*?)\n\}};", (SOURCES / file).read_text(), re.DOTALL)
    assert match
    members = []
    for kind, member in re.findall(r"^\s*([\w:][\w: ]*\*?) (\w+);", match[1], re.MULTILINE):
        members += _members(_NESTED[kind], kind) if kind in _NESTED else [(kind, member)]
    return members


def _layout(file: str, name: str) -> tuple[dict[str, tuple[int, str]], int]:
    """Offset and format of every member of a struct, and its size, by the layout rules of C++."""
    fields = {}
    offset = strictest = 0
    for kind, member in _members(file, name):
        form = "Q" if kind.endswith("*") else _TYPES[kind]
        size = struct.calcsize(f"<{form}")
        alignment = 64 if form == "128s" else size
        strictest = max(strictest, alignment)
        offset = -(-offset // alignment) * alignment
        fields[member] = (offset, form)
        offset += size
    return fields, -(-offset // strictest) * strictest


def _params() -> tuple[dict[str, tuple[int, str]], int]:
    return _layout("params.h", "Params")


def _decode(parameters: bytes, file: str = "params.h", name: str = "Params") -> dict[str, Any]:
    fields, _ = _layout(file, name)
    return {name: struct.unpack_from(f"<{form}", parameters, at)[0] for name, (at, form) in fields.items()}


def test_the_header_has_the_offsets_that_it_asserts() -> None:
    fields, size = _params()
    header = (SOURCES / "params.h").read_text()
    asserted = re.findall(r"offsetof\(Params, (\w+)\) == (\d+)", header)
    assert len(asserted) > 2
    assert [(name, str(fields[name][0])) for name, _ in asserted] == asserted
    assert f"sizeof(Params) == {size}," in header


@pytest.mark.parametrize("name", CALLS)
def test_every_byte_of_the_parameters(launches: dict[str, Launch], name: str) -> None:
    launch = launches[name]
    a = launch.arguments
    given = _decode(launch.parameters)
    tag = given.pop("launch_tag")
    assert 0 < tag < 2**32
    for field in (*MAPS, *DIVISION):
        given.pop(field)  # see the tests below
    sinks, lse, out = a.get("attention_sinks"), a["lse"], a["out"]
    counts, factor = a.get("skip_softmax_counts"), a.get("skip_softmax_threshold_scale_factor", 0.0)
    scales = {scale: a[scale] for scale in ("bmm1_scale", "bmm2_scale")}
    pointers = {scale: s["address"] for scale, s in scales.items() if isinstance(s, dict)}
    assert given == {
        "out": out["address"],
        "lse": lse["address"] if lse else 0,
        "cum_seq_lens_q": a["cum_seq_lens_q"]["address"],
        "cum_seq_lens_kv": a["cum_seq_lens_kv"]["address"],
        "attention_sinks": sinks["address"] if sinks else 0,
        "bmm1_scale_pointer": pointers.get("bmm1_scale", 0),
        "bmm2_scale_pointer": pointers.get("bmm2_scale", 0),
        "tile_counter": a["workspace_buffer"]["address"],
        "out_stride_token": out["strides"][0],
        "out_stride_head": out["strides"][1],
        "lse_stride_token": lse["strides"][0] if lse else 0,
        "lse_stride_head": lse["strides"][1] if lse else 0,
        "batch_size": a["batch_size"],
        "total_q": a["query"]["shape"][0],
        "total_kv": a["key"]["shape"][0],
        "num_heads_q": a["query"]["shape"][1],
        "heads_per_kv_head": a["query"]["shape"][1] // a["key"]["shape"][1],
        "window_left": SLIDING.get(name, -1),
        "bmm1_scale": 0.0 if "bmm1_scale" in pointers else scales["bmm1_scale"],
        "bmm2_scale": 0.0 if "bmm2_scale" in pointers else scales["bmm2_scale"],
        **dict.fromkeys(SAGE, 0),
        **_sage_scales(a),
        "counts": counts["address"] if counts else 0,
        "factor": struct.unpack("f", struct.pack("f", factor))[0],
    }
    fields, size = _params()
    used = max(offset + struct.calcsize(f"<{form}") for offset, form in fields.values())
    assert launch.parameters[used:] == bytes(size - used)


def _sage_scales(a: dict[str, Any]) -> dict[str, int]:
    if "sage_attn_sfs" not in a:
        return {}
    q, k, _, v = a["sage_attn_sfs"]
    block_q, block_k, _, _ = a["num_elts_per_sage_attn_blk"]
    return {
        **{f"scales_{name}": scales["address"] for name, scales in (("q", q), ("k", k), ("v", v))},
        **{f"columns_{name}": scales["shape"][1] for name, scales in (("q", q), ("k", k))},
        **{
            f"block_{name}_log2": {1: 0, 4: 2, 16: 4}[size] for name, size in (("q", block_q), ("k", block_k))
        },
    }


@pytest.mark.parametrize("name", CALLS)
def test_tensor_maps(launches: dict[str, Launch], name: str) -> None:
    launch = launches[name]
    row = find_row(launch.call["kernel"])
    given = _decode(launch.parameters)
    for number, operand in enumerate(("query", "key", "value", "out")):
        tensor = launch.arguments[operand]
        tokens, heads, head_dim = tensor["shape"]
        size = tensor["bytes"]
        token_stride, head_stride, _ = (size * stride for stride in tensor["strides"])
        # Rows in spans of 128 bytes, those of 192 bytes in spans of 64.
        span = 64 if size * head_dim == 192 else 128
        spans = size * head_dim // span
        box = [row.tile_kv, 1, spans]
        if operand in ("query", "out"):
            box = [given["tile_tokens"], given["tile_heads"], spans]
        leaves_rows = given["tile_tokens"] * given["tile_heads"] < 64
        if operand == "query" and (row.scheduler is Scheduler.SPLIT or leaves_rows):
            box[2] = 1
        encoded = launch.maps[number]
        assert encoded["address"] == (tensor["address"] or launch.arguments["workspace_buffer"]["address"])
        assert encoded["dims"] == [span // size, max(tokens, 1), heads, spans]
        assert encoded["box"] == [span // size, *box]
        assert encoded["strides"] == [
            token_stride if tokens > 1 else size * head_dim,
            head_stride if heads > 1 else size * head_dim,
            span,
        ]
        # Numbers of cuda.h: UINT8 0, FLOAT16 6, BFLOAT16 9; no interleave, L2_256B 3, zeros outside.
        dtype = getattr(row, f"dtype_{operand[0]}")
        assert encoded["dtype"] == {DType.INT8: 0, DType.E4M3: 0, DType.FP16: 6, DType.BF16: 9}[dtype]
        options = ("interleave", "l2_promotion", "oob_fill", "element_strides")
        assert [encoded[option] for option in options] == [0, 3, 0, [1, 1, 1, 1]]
        # SWIZZLE_NONE 0, 64B 2, 128B 3: as wide as the span; values of 8 bits are converted, or transposed.
        converted = operand == "value" and size == 1 and not row.e4m3_p
        assert encoded["swizzle"] == (0 if converted else {64: 2, 128: 3}[span])
        if operand == "out" and row.uses_spcompress:
            continue  # see below
        words = struct.unpack_from("<2IQ", given[f"{operand}_map"])  # the stub begins its maps with these
        assert words == (encoded["dtype"], 4, encoded["address"])
    assert len(launch.maps) == 4 + row.uses_spcompress


@pytest.mark.parametrize("name", [name for name in CALLS if "spcompress" in name])
def test_permuted_keys(launches: dict[str, Launch], name: str) -> None:
    """Where its box lands a row of K is, by what the map says, the key that the kernel takes it for."""
    launch = launches[name]
    row, given = find_row(launch.call["kernel"]), _decode(launch.parameters)
    assert row.uses_spcompress
    assert given["tile_heads"] == 1
    plain, permuted = launch.maps[1], launch.maps[4]
    words = struct.unpack_from("<2IQ", given["out_map"])
    assert words == (permuted["dtype"], 5, permuted["address"])
    for option in ("address", "dtype", "swizzle", "interleave", "l2_promotion", "oob_fill"):
        assert permuted[option] == plain[option]
    elements, tokens, heads, spans = plain["dims"]
    token_stride, head_stride, span_stride = plain["strides"]
    assert permuted["element_strides"] == [1] * 5
    assert permuted["box"] == [elements, 2, row.tile_kv // 4, 1, 1]
    assert permuted["dims"] == [elements, tokens, row.tile_kv // 4, heads, spans]
    assert permuted["strides"][2:] == [head_stride, span_stride]
    # Two boxes, the second from two tokens on; the innermost dimension of the box moves first.
    landed = [
        2 * half * token_stride + second * permuted["strides"][0] + group * permuted["strides"][1]
        for half in range(2)
        for group in range(row.tile_kv // 4)
        for second in range(2)
    ]
    # compress.cuh: columns 8 j + 2 c + e of half h of the block are the keys 16 j + 4 c + 2 h + e.
    keys = [
        16 * j + 4 * c + 2 * h + e
        for h in range(2)
        for j in range(row.tile_kv // 16)
        for c in range(4)
        for e in range(2)
    ]
    assert landed == [key * token_stride for key in keys]


@pytest.mark.parametrize("tokens", [87_382, 174_763])
def test_the_large_calls_pass_2_to_the_31_elements(launches: dict[str, Launch], tokens: int) -> None:
    key = launches[f"{tokens} keys"].maps[1]
    last = (key["dims"][1] - 1) * key["strides"][0] // 2
    assert last >= 2**31 * (1 if tokens < 100_000 else 2)


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("causal", "causal"),
        ("dense", "dense"),
        ("sliding", "sliding"),
        ("window that hides one key", "sliding"),
        ("window over the longest row", "causal"),
        ("window beyond", "causal"),
    ],
)
def test_mask_of_the_kernel(launches: dict[str, Launch], name: str, mask: str) -> None:
    assert f"_h192x128_{mask}_" in launches[name].call["kernel"]


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("spcompress", "e4m3_e4m3_e4m3_bf16_h192x128"),
        ("fp16", "fp16_fp16_fp16_fp16_h192x128"),
        ("head dims 128", "h128x128"),
        ("head dims 256", "h256x256"),
        ("fp8", "e4m3_e4m3_e4m3_bf16_h192x128"),
        ("fp8, fp16 out", "e4m3_e4m3_e4m3_fp16_h192x128"),
        ("fp8 values", "bf16_bf16_e4m3_bf16_h192x128"),
        ("sage", "int8_int8_e4m3_bf16_h192x128"),
        ("sage, few rows", "int8_int8_e4m3_bf16_h192x128"),
    ],
)
def test_dtype_and_head_dims_of_the_kernel(launches: dict[str, Launch], name: str, columns: str) -> None:
    assert f"_{columns}_causal_" in launches[name].call["kernel"]


@pytest.mark.parametrize(
    ("name", "has_e4m3_p"),
    [
        ("fp8, many keys", True),
        ("fp8, many keys, few rows", False),
        ("fp8, few keys", False),
        ("fp8, window of many keys", True),
        ("fp8, window of few keys", False),
        ("fp8, head dims 256", False),
        ("sage", False),
        ("sage, many keys", True),
        ("sage fp8, many keys, head dims 128", True),
        ("sage, few rows", True),
    ],
)
def test_probabilities_of_the_kernel(launches: dict[str, Launch], name: str, has_e4m3_p: bool) -> None:
    assert find_row(launches[name].call["kernel"]).e4m3_p == has_e4m3_p


@pytest.mark.parametrize("name", CALLS)
def test_variant_of_the_kernel(launches: dict[str, Launch], name: str) -> None:
    variant = name.split(",")[0] if "softmax" in name else ""
    kernel = launches[name].call["kernel"]
    assert kernel.endswith("_skipsoftmax") == (variant == "skip softmax")
    assert kernel.endswith("_fp16softmax") == (variant == "fp16 softmax")


@pytest.mark.parametrize("name", CALLS)
def test_packing_of_the_rows(launches: dict[str, Launch], name: str) -> None:
    """A consumer's 64 rows: of heads that share keys, and where there are many, no row unused."""
    row, given = find_row(launches[name].call["kernel"]), _decode(launches[name].parameters)
    rows = given["tile_tokens"] * given["tile_heads"]
    assert given["heads_per_kv_head"] % given["tile_heads"] == 0
    assert rows + given["tile_heads"] > 64 >= rows
    assert rows == 64 or row.scheduler.is_for_few_rows


@pytest.mark.parametrize("name", CALLS)
def test_division_of_the_keys(launches: dict[str, Launch], name: str) -> None:
    """Where keys may be divided, parts have their places in the workspace, and a launch combines them."""
    launch = launches[name]
    a, row, given = launch.arguments, find_row(launch.call["kernel"]), _decode(launch.parameters)
    divided = row.scheduler is Scheduler.SPLIT and a["max_kv_len"] > 2048
    assert (given["least_blocks_per_part"] > 0, launch.combine is not None) == (divided, divided)
    if launch.combine is None:
        assert [given[area] for area in ("parts", "count", "sums", "statistics")] == [0] * 4
        return
    slots = (given["count"] - given["parts"]) // 32
    assert slots == 2 * launch.call["grid"][0]
    assert launch.combine["grid"][0] == min(slots, 132)
    end = a["workspace_buffer"]["address"] + a["workspace_buffer"]["shape"][0]
    sizes = {
        "tile_counter": 8,
        "parts": 32 * slots,
        "count": 4,
        "sums": 4 * slots * row.tile_q * row.head_dim_v,
        "statistics": 8 * slots * row.tile_q,
    }
    for (area, size), behind in zip(sizes.items(), [*list(sizes)[1:], None], strict=True):
        assert given[area] % 16 == 0
        assert given[area] + size <= (end if behind is None else given[behind])


@pytest.mark.parametrize("name", ["few rows, long keys", "few rows, uneven groups", "few rows, dense"])
def test_every_byte_of_what_combines(launches: dict[str, Launch], name: str) -> None:
    launch = launches[name]
    assert launch.combine is not None
    given, row = _decode(launch.parameters), find_row(launch.call["kernel"])
    combine = _decode(bytes.fromhex(launch.combine["parameters"]), "combine.cu", "CombineParams")
    own = {"head_dim_v": row.head_dim_v, "out_is_fp16": row.dtype_o is DType.FP16, "tile_rows": row.tile_q}
    assert combine == {field: given[field] for field in combine if field not in own} | own
    assert COMBINE.resources is not None
    assert COMBINE.resources.parameter_bytes == _layout("combine.cu", "CombineParams")[1]
    assert launch.combine["block"] == [COMBINE.resources.threads, 1, 1]
    assert (launch.combine["stream"], launch.combine["pdl"]) == (STREAM, True)


def test_few_rows_get_a_split_kernel_that_fills_the_device(launches: dict[str, Launch]) -> None:
    launch = launches["few rows, long keys"]
    assert "_split" in launch.call["kernel"]
    assert _decode(launch.parameters)["tile_heads"] == 16
    assert launch.call["grid"] == [132, 1, 1]


def test_few_rows_over_few_keys_get_a_pair_that_needs_no_room_for_parts(launches: dict[str, Launch]) -> None:
    launch = launches["few rows, few keys"]
    assert launch.call["kernel"].endswith("_sliding_t64x64_pair")
    given = _decode(launch.parameters)
    assert (given["tile_tokens"], given["tile_heads"], given["window_left"]) == (5, 12, 200)
    assert launch.call["grid"] == [52, 1, 1]  # 120 // 5 + 2 tiles in each of 2 kv heads
    assert launch.combine is None


@pytest.mark.parametrize("name", CALLS)
def test_grid_block_memory_and_stream(launches: dict[str, Launch], name: str) -> None:
    launch = launches[name]
    row = find_row(launch.call["kernel"])
    tokens, heads, _ = launch.arguments["query"]["shape"]
    given = _decode(launch.parameters)
    tile_tokens = row.tile_q // 64 * given["tile_tokens"]
    most = heads // given["tile_heads"] * min(tokens, tokens // tile_tokens + launch.arguments["batch_size"])
    if given["least_blocks_per_part"]:
        most *= -(-launch.arguments["max_kv_len"] // row.tile_kv) // given["least_blocks_per_part"]
    assert launch.call["grid"] == [min(132 * row.blocks_per_sm, most), 1, 1]
    assert row.resources is not None
    assert launch.call["block"] == [row.resources.threads, 1, 1]
    assert launch.call["shared"] == row.resources.shared_memory
    assert launch.call["stream"] == STREAM
    assert (launch.call.get("pdl", False), "cluster" in launch.call) == (name != "no dependent launch", False)


# ---- repeated calls


def test_a_repeated_call_only_launches(run_with_stub: Callable[..., Any]) -> None:
    """Two driver calls, another tag each time, the values of this call's scales."""
    run = run_with_stub(
        SETUP
        + """
from cubin_runtime import _driver
arguments = cuda_call()
attend(**arguments)
with _driver.pushed(_driver.retain_primary_context(0)):
    for scale in (1.0, 2.0, 3):
        attend(**{**arguments, "bmm1_scale": scale})
""",
        parameter_bytes=768,
    )
    assert [call["call"] for call in run.calls[-7:-1]] == ["cuCtxGetCurrent", "cuLaunchKernelEx"] * 3
    launches = [_decode(bytes.fromhex(call["parameters"])) for call in run.named("cuLaunchKernelEx")]
    assert [launch.pop("bmm1_scale") for launch in launches] == [0.125, 1.0, 2.0, 3.0]
    tags = [launch.pop("launch_tag") for launch in launches]
    assert len(set(tags)) == 4
    assert all(launch == launches[0] for launch in launches)


def test_no_numbers_in_a_workspace_look_like_a_tag(run_with_stub: Callable[..., Any]) -> None:
    run = run_with_stub(
        SETUP
        + """
import itertools
from cubin_runtime import launch
launch._tags = itertools.count(2**20 - 4)
arguments = cuda_call()
for _ in range(6):
    attend(**arguments)
""",
        parameter_bytes=768,
    )
    tags = [_decode(bytes.fromhex(c["parameters"]))["launch_tag"] for c in run.named("cuLaunchKernelEx")]
    assert len(set(tags)) == 6
    for tag in tags:
        word = tag.to_bytes(4, "little")
        assert abs(struct.unpack("<i", word)[0]) > 1 << 20
        as_float, as_bf16 = struct.unpack("<f", word)[0], struct.unpack("<f", bytes(2) + word[2:])[0]
        as_fp16 = struct.unpack("<e", word[2:])[0]
        assert all(map(math.isnan, (as_float, as_bf16, as_fp16)))


def test_caches_are_bounded(run_with_stub: Callable[..., Any]) -> None:
    run = run_with_stub(
        SETUP
        + """
from cubin_runtime.families import fmha_sm90
attention._prepared.most = 4
fmha_sm90._MAX_MAPS = 3
for tokens in range(1, 11):
    attend(**cuda_call([tokens], [10]))
    assert 1 <= len(attention._prepared) <= 4
arguments = cuda_call()
for n in range(1, 11):
    query = CudaTensor(arguments["query"].shape, address=n << 20)
    attend(**{**arguments, "query": query})
    (prepared,) = [p for p in attention._prepared.values() if p.problem.batch_size == 2]
    assert 1 <= len(prepared._query) <= 3 and len(prepared._key) == 1
    assert n << 20 in prepared._query
many_heads = (128, 128)
attend(**cuda_call([300, 20, 7], [500, 20, 7], heads=many_heads))
chosen = len(attention._chosen)
attend(**cuda_call([301, 20, 7], [500, 20, 7], heads=many_heads))
assert len(attention._chosen) == chosen  # other lengths are no other choice
attend(**cuda_call([11], [11]))
assert len(attention._chosen) == chosen  # nor of few rows
attention._chosen.most = chosen
attend(**cuda_call([11], [11], is_causal=False))
assert len(attention._chosen) == 1
"""
    )
    assert len(run.named("cuLaunchKernelEx")) == 24
    queries = [call["address"] for call in run.named("cuTensorMapEncodeTiled") if call["address"] < 1 << 40]
    assert queries == [n << 20 for n in range(1, 11)]


def test_unloading_drops_what_was_prepared(run_with_stub: Callable[..., Any]) -> None:
    run = run_with_stub(
        SETUP
        + """
from cubin_runtime.module import unload_all
arguments = cuda_call()
for _ in range(2):
    attend(**arguments)
    attend(**arguments)
    unload_all()
    assert not attention._prepared
"""
    )
    assert len(run.named("cuLibraryLoadData")) == len(run.named("cuLibraryUnload")) == 2
    handles = [call["result"] for call in run.named("cuLaunchKernelEx")]
    assert handles == [0] * 4


# ---- bad calls

_BAD_AFTER_GOOD = """
bad = {
    "max_kv_len": dict(max_kv_len=-1),
    "max_q_len": dict(max_q_len=arguments["seq_lens"]),
    "max_kv_len ": dict(window_left=1, max_kv_len=arguments["seq_lens"]),
    "cum_seq_lens_q": dict(cum_seq_lens_q=CudaTensor((3,), torch.int64)),
    "cum_seq_lens_kv": dict(cum_seq_lens_kv=CudaTensor((2,), torch.int32)),
    "seq_lens": dict(seq_lens=CudaTensor((2,), torch.int32, device=1)),
    "key": dict(key=CudaTensor((450, 16, 192), strides=(6200, 384, 2))),
    "value": dict(value=None),
    "query": dict(query=CudaTensor((320, 32, 192), strides=(6178, 193, 1))),
    "lse": dict(lse=CudaTensor((32, 320), torch.float32)),
    "out": dict(out=CudaTensor((320, 32, 128), torch.float32)),
    "attention_sinks": dict(attention_sinks=CudaTensor((32,), torch.bfloat16)),
    "bmm1_scale": dict(bmm1_scale=CudaTensor((1,), torch.float64)),
    "bmm2_scale": dict(bmm2_scale=1e39),
    "skip-softmax": dict(skip_softmax_threshold_scale_factor=1e39),
    "enable_pdl": dict(enable_pdl="yes"),
    "num_elts_per_sage_attn_blk": dict(num_elts_per_sage_attn_blk=7),
    "sage_attn_sfs": dict(sage_attn_sfs=None),
    "backend": dict(backend=["trtllm-gen"]),
    "workspace_buffer": dict(workspace_buffer=CudaTensor((4,), torch.uint8)),
    "workspace_buffer ": dict(workspace_buffer=CudaTensor((1 << 20,), torch.uint8, address=4104)),
    "workspace_buffer  ": dict(workspace_buffer=CudaTensor((0,), torch.uint8)),
    "q_seq_lens_cpu": dict(q_seq_lens_cpu=torch.tensor([301, 19]), kv_seq_lens_cpu=torch.tensor([400, 50])),
    "kv_seq_lens_cpu": dict(q_seq_lens_cpu=torch.tensor([300, 20])),
}
"""


def test_bad_calls_between_good_ones(run_with_stub: Callable[..., Any]) -> None:
    """Each is refused with its name, warm as cold; nothing of it is launched or remembered."""
    run = run_with_stub(
        SETUP
        + """
arguments = cuda_call()
"""
        + _BAD_AFTER_GOOD
        + """
def refused():
    for name, change in bad.items():
        try:
            attend(**{**arguments, **change})
        except ValueError as error:
            assert name.split()[0] in str(error), (name, error)
            print(error)
        else:
            raise AssertionError(name)
refused()
attend(**arguments)
refused()
attend(**{**arguments, "q_seq_lens_cpu": torch.tensor([300, 20]), "kv_seq_lens_cpu": torch.tensor([1, 2])})
# Only the good ones are remembered, as one: scales, addresses and mirrors make no difference.
assert len(attention._prepared) == 1
"""
    )
    cold, warm = (lines := run.stdout.splitlines())[: len(lines) // 2], lines[len(lines) // 2 :]
    assert cold == warm
    assert any("workspace_buffer has 4 bytes; this call needs 16" in line for line in cold)
    assert any("workspace_buffer starts at 0x1008; expected a multiple of 16" in line for line in cold)
    assert any(line.startswith("query cannot be read in tiles: stride 1 is 12356 bytes") for line in cold)
    assert len(run.named("cuLaunchKernelEx")) == 2


def test_what_no_kernel_does_is_refused_with_reasons(run_with_stub: Callable[..., Any]) -> None:
    run = run_with_stub(
        SETUP
        + """
from cubin_runtime import NoKernelError, UnsupportedError
for change in (
    dict(use_fp16_softmax=True, dtype=torch.float16),
    dict(uses_spcompress=True),
    dict(backend="cute-dsl", head_dims=(96, 96)),
    dict(head_dims=(96, 96)),
    dict(out=CudaTensor((320, 32, 128), torch.float8_e4m3fn)),
):
    try:
        attend(**cuda_call(**change))
    except NoKernelError as error:
        assert error.selection.row is None
        print(str(error).splitlines()[0])
    else:
        raise AssertionError(change)
try:
    attend(**cuda_call(is_causal=False, window_left=3))
except NotImplementedError as error:
    print(error)
"""
    )
    assert len(run.stdout.splitlines()) == 6
    assert not run.named("cuLibraryLoadData", "cuLaunchKernelEx")


@pytest.mark.parametrize("function", ["cuLibraryLoadData", "cuTensorMapEncodeTiled", "cuLaunchKernelEx"])
def test_a_call_that_the_driver_refused_can_be_repeated(
    run_with_stub: Callable[..., Any], function: str
) -> None:
    run = run_with_stub(
        SETUP
        + """
from cubin_runtime import DriverError
arguments = cuda_call()
try:
    attend(**arguments)
except DriverError as error:
    print(error)
attend(**arguments)
assert stub.stub_stack_depth() == 0
""",
        fail=f"{function}=2:1",
    )
    assert run.stdout.startswith(f"{function} failed with CUDA_ERROR_OUT_OF_MEMORY")
    assert [call["result"] for call in run.named("cuLaunchKernelEx")][-1] == 0


# ---- devices, contexts, threads


def test_each_device_gets_its_own_answer(run_with_stub: Callable[..., Any]) -> None:
    """Device 0's context is current throughout; 1 has fewer multiprocessors, 2 no kernel, 3 is not used."""
    run = run_with_stub(
        SETUP
        + """
import ctypes
from cubin_runtime import NoKernelError, _driver
mine = _driver.retain_primary_context(0)
stub.cuCtxPushCurrent_v2(ctypes.c_void_p(mine))
for device in (0, 1, 0, 1):
    attend(**cuda_call([4096], [4096], heads=(128, 128), device=device))
    current = ctypes.c_void_p()
    stub.cuCtxGetCurrent(ctypes.byref(current))
    assert (current.value, stub.stub_stack_depth()) == (mine, 1)
try:
    attend(**cuda_call(device=2))
except NoKernelError as error:
    print(error)
""",
        devices=("9.0:132:232448", "9.0:114:232448", "8.0:108:166912", "9.0:78:232448"),
    )
    calls = run.named("cuLaunchKernelEx")
    assert [(call["grid"][0], call["stream"]) for call in calls] == [(132, 100), (114, 101)] * 2
    assert calls[0]["context"] != calls[1]["context"]
    assert [call["context"] for call in calls[2:]] == [call["context"] for call in calls[:2]]
    assert "no kernel runs on compute capability 8.0" in run.stdout
    assert len(run.named("cuLibraryLoadData")) == 1
    assert {call.get("device", call.get("ordinal")) for call in run.calls} == {None, 0, 1, 2}


def test_a_device_without_dependent_launch_gets_none(run_with_stub: Callable[..., Any]) -> None:
    run = run_with_stub(
        SETUP
        + """
attention._PDL_CAPABILITY = (9, 1)  # kernels for devices that lack it do not exist yet
for asked in (None, True, False):
    attend(**cuda_call(enable_pdl=asked))
"""
    )
    assert [call.get("pdl") for call in run.named("cuLaunchKernelEx")] == [None, True, None]


def test_threads_without_a_context(run_with_stub: Callable[..., Any]) -> None:
    """Eight first calls at once, each in a thread that CUDA has never seen: one load, all launched."""
    run = run_with_stub(
        SETUP
        + """
import threading
barrier = threading.Barrier(8)
def work(tokens):
    barrier.wait()
    for _ in range(20):
        attend(**cuda_call([tokens], [tokens], bmm1_scale=tokens))
    assert stub.stub_stack_depth() == 0
threads = [threading.Thread(target=work, args=(tokens,)) for tokens in range(1, 9)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
""",
        parameter_bytes=768,
    )
    calls = run.named("cuLaunchKernelEx")
    assert [call["result"] for call in calls] == [0] * 160
    assert len({call["thread"] for call in calls}) == 8
    assert len(run.named("cuLibraryLoadData")) == 1
    launches = [_decode(bytes.fromhex(call["parameters"])) for call in calls]
    assert len({launch["launch_tag"] for launch in launches}) == 160
    assert all(launch["total_q"] == launch["bmm1_scale"] for launch in launches)


# ---- what a call does besides


def test_out_and_lse_are_all_that_is_allocated(run_with_stub: Callable[..., Any]) -> None:
    """And only where they are not given. The tensors raise when any operation runs on them."""
    run = run_with_stub(
        SETUP
        + """
empty = torch.empty
allocated = []
def record(shape, *, dtype, device):
    if torch.device(device).type == "meta":
        return empty(shape, dtype=dtype, device=device)
    allocated.append((tuple(shape), dtype, str(device)))
    return CudaTensor(shape, dtype, device=torch.device(device).index)
torch.empty = record
for _ in range(2):
    attend(**cuda_call())
    attend(**cuda_call(return_lse=True))
assert not allocated
for _ in range(2):
    out = attend(**cuda_call(out=None, lse=None, device=1))
    assert allocated == [((320, 32, 128), torch.bfloat16, "cuda:1")] and out.get_device() == 1
    allocated.clear()
    out, lse = attend(**cuda_call(out=None, lse=None, return_lse=True))
    assert allocated == [((320, 32, 128), torch.bfloat16, "cuda:0"), ((320, 32), torch.float32, "cuda:0")]
    allocated.clear()
print(out.address, lse.address)
""",
        devices=("9.0:132:232448",) * 2,
        parameter_bytes=768,
    )
    last = _decode(bytes.fromhex(run.named("cuLaunchKernelEx")[-1]["parameters"]))
    assert [last["out"], last["lse"]] == [int(word) for word in run.stdout.split()]
    assert [last[f"{name}_stride_{of}"] for name in ("out", "lse") for of in ("token", "head")] == [
        4096,
        128,
        32,
        1,
    ]


def test_a_call_without_queries_launches_nothing(run_with_stub: Callable[..., Any]) -> None:
    run = run_with_stub(
        SETUP
        + """
for _ in range(2):
    for arguments in (cuda_call([], []), cuda_call([0, 0], [3, 4], return_lse=True)):
        result = attend(**arguments)
        assert result is arguments["out"] or result == (arguments["out"], arguments["lse"])
"""
    )
    assert not run.named("cuLaunchKernelEx", "cuTensorMapEncodeTiled")


def test_debug_logs_the_call_before_it_is_launched(run_with_stub: Callable[..., Any]) -> None:
    """Also when the launch then fails, and without reading a tensor: printing one raises."""
    run = run_with_stub(
        SETUP
        + """
import logging
import os
from pathlib import Path
arguments = cuda_call(
    bmm1_scale=CudaTensor((), torch.float32), q_seq_lens_cpu=torch.tensor([300, 20]),
    kv_seq_lens_cpu=torch.tensor([400, 50]), sage_attn_sfs=[None] * 4,
)
class Printed(logging.Handler):
    def emit(self, record):
        launches = Path(os.environ["CUDA_STUB_LOG"]).read_text().count("cuLaunchKernelEx")
        print(launches, record.levelname, record.getMessage())
logging.getLogger().addHandler(Printed())
for _ in range(3):
    attend(**arguments)
print("---")
logging.getLogger("cubin_runtime").setLevel(logging.DEBUG)
fail("cuLaunchKernelEx", 700, 1)
try:
    attend(**arguments)
except RuntimeError as error:
    print("failed")
"""
    )
    quiet, logged = run.stdout.split("---\n")
    assert quiet == ""
    line, failed = logged.splitlines()
    assert failed == "failed"
    assert line.startswith("3 DEBUG launching fmha_sm90_sm90a_bf16_")  # three launches before it, not four
    for part in (
        "sha256 ",
        "from embedded",
        "on device 0",
        "query=torch.bfloat16[320, 32, 192] strides (6144, 192, 1) on cuda:0",
        "bmm1_scale=torch.float32[] strides () on cuda:0",
        "bmm2_scale=1.0",
        "sage_attn_sfs=(None, None, None, None)",
        "q_seq_lens_cpu=torch.int64[2]",
        "backend='trtllm-gen'",
    ):
        assert part in line
