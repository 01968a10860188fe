"""The whole quantising call on the stub driver: what is launched, and every parameter of it."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernel_meta.tables import all_steps

HEADER = (Path(__file__).parents[2] / "kernel_meta" / "sage_quantize" / "params.h").read_text()
STREAM = 100

SETUP = f"""
import torch
from cuda_tensors import CudaTensor
from stub_support import fail, stub
from cubin_runtime import quantize, trtllm_sage_attention_quantize
quantize._current_stream = lambda device: {STREAM} + device
made = []
def new(shape, dtype, device):
    tensor = CudaTensor(tuple(shape), dtype, device=device.index)
    made.append((list(tensor.shape), str(dtype), tensor.data_ptr()))
    return tensor
quantize._new = new
def call(tokens=320, heads=(4, 2), dim=128, dim_v=128, dtype=torch.bfloat16, batch=2, device=0, **changes):
    def tensor(*shape, dtype=dtype):
        return CudaTensor(shape, dtype, device=device)
    edges = tensor(batch + 1, dtype=torch.int32)
    given = dict(query=tensor(tokens, heads[0], dim), key=tensor(tokens, heads[1], dim),
        value=tensor(tokens, heads[1], dim_v), cum_seq_lens_q=edges)
    given.update(changes)
    return given, trtllm_sage_attention_quantize(**given)
"""

_FORMATS = {"int": "i", "uint32_t": "I", "float": "f"}


def fields(name: str, prefix: str = "") -> list[tuple[str, str]]:
    """(name, format) of each member of a struct of params.h, structs in it opened."""
    body = HEADER.split(f"struct {name} {{")[1].split("};")[0]
    found = []
    for line in body.splitlines():
        declaration = line.split(";")[0].split()
        if not declaration or declaration[0] == "//":
            continue
        kind, member = declaration[-2].rstrip("*"), declaration[-1]
        if "*" in "".join(declaration):
            found.append((prefix + member, "P"))
        elif kind in _FORMATS:
            found.append((prefix + member, _FORMATS[kind]))
        else:
            found += fields(kind, f"{prefix}{member}.")
    return found


def unpack(name: str, data: str) -> dict[str, Any]:
    """A struct's members by name. Pointers have the alignment of the compiler's, as `@` gives it."""
    members = fields(name)
    layout = "".join(kind for _, kind in members)
    raw = bytes.fromhex(data)
    assert len(raw) - struct.calcsize(f"@{layout}") in range(8)
    values = struct.unpack_from(f"@{layout}", raw)
    return dict(zip([member for member, _ in members], values, strict=True))


def launches(run_with_stub: Callable[..., Any], code: str, **options: Any) -> tuple[list[Any], list[str]]:
    """The launches of `code`, parameters whole, and the lines printed."""
    sizes = {step.name: step.resources.parameter_bytes for step in all_steps() if step.resources}
    logged = "\n".join(
        f"stub.stub_parameter_bytes(b'{name}', {size})"
        for name, size in sizes.items()
        if name.startswith("sage_quantize")
    )
    run = run_with_stub(f"{SETUP}\n{code}\n{logged}\nmade.clear()\n{code}", parameter_bytes=1, **options)
    work = run.named("cuLaunchKernelEx")
    assert not run.named("cuCtxSynchronize", "cuMemAlloc_v2", "cuMemsetD8Async")
    return work[len(work) // 2 :], run.stdout.splitlines()


def test_two_launches_and_their_parameters(run_with_stub: Callable[..., Any]) -> None:
    code = """
given, results = call(q_block_size=4, k_block_size=16)
print(*[given[n].data_ptr() for n in ("query", "key", "value", "cum_seq_lens_q")])
print(*[each[2] for each in made])
"""
    (first, second), lines = launches(run_with_stub, code)
    query, key, values, edges = map(int, lines[-2].split())
    q_quant, k_quant, v_quant, q_scale, k_scale, v_scale, scratch = map(int, lines[-1].split())
    assert (first["kernel"], second["kernel"]) == (
        "sage_quantize_statistics_sm90a",
        "sage_quantize_quantize_sm90a",
    )
    for each in (first, second):
        assert each["stream"] == STREAM
        assert each["pdl"]

    # Threads: 128 a block, 2 columns of 4 tokens, or 1 of 16, or 8 tokens of value, and 8 channels each.
    q_blocks, k_blocks = -(-((80 + 2) // 2 * 4 * 16) // 128), -(-((20 + 2) * 2 * 16) // 128)
    expected = {
        "query.input": query,
        "query.output": q_quant,
        "query.scales": q_scale,
        "query.edges": edges,
        "query.tokens": 320,
        "query.sequences": 2,
        "query.heads": 4,
        "query.head_dim": 128,
        "query.columns": 81,
        "query.block": 4,
        "key.input": key,
        "key.output": k_quant,
        "key.scales": k_scale,
        "key.edges": edges,
        "key.tokens": 320,
        "key.sequences": 2,
        "key.heads": 2,
        "key.head_dim": 128,
        "key.columns": 21,
        "key.block": 16,
        "key_means": 0,
        "value": values,
        "value_output": v_quant,
        "value_scales": v_scale,
        "value_head_dim": 128,
        "query_blocks": q_blocks,
        "key_blocks": k_blocks,
        "key_start": 0,
        "key_share": -(-(k_blocks << 31) // (q_blocks + k_blocks)),
        "format.is_fp16": 0,
        "format.is_e4m3": 0,
        "format.range": pytest.approx(126.9),
    }
    assert unpack("QuantizeParams", second["parameters"]) == expected
    assert second["grid"] == [q_blocks + k_blocks + 320 // 8 * 32 // 128, 1, 1]

    found = unpack("StatisticsParams", first["parameters"])
    of_value = {
        "input": values,
        "results": v_scale,
        "partials": scratch + 32,
        "tickets": scratch,
        "edges": edges,
        "tokens": 320,
        "sequences": 2,
        "heads": 2,
        "head_dim": 128,
        "chunk_tokens": 1024,  # 16 times 8 rows of 8 slots
        "chunks": 1,
    }
    assert {name: found[f"value_scales.{name}"] for name in of_value} == of_value
    assert found["is_fp16"] == 0
    assert first["grid"] == [2, 1, 1]  # without key


@pytest.mark.parametrize("smooth_k", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (320, 4, 2), (4096, 32, 8), (70_001, 3, 3)], ids=str)
def test_keys_take_turns_with_what_is_ready_when_they_are(
    shape: tuple[int, int, int], smooth_k: bool, run_with_stub: Callable[..., Any]
) -> None:
    """All blocks of key come, evenly spread; where they wait, only behind those of query."""
    tokens, heads, kv_heads = shape
    code = f"call(tokens={tokens}, heads=({heads}, {kv_heads}), q_block_size=1, smooth_k={smooth_k})"
    (_, second), _ = launches(run_with_stub, code)
    found = unpack("QuantizeParams", second["parameters"])
    keys, start = found["key_blocks"], found["key_start"]
    before = [
        min(max(block - start, 0) * found["key_share"] >> 31, keys) for block in range(second["grid"][0] + 1)
    ]
    steps = [after - earlier for earlier, after in itertools.pairwise(before)]
    assert before[-1] == keys == sum(steps)
    assert set(steps) <= {0, 1}
    places = [block for block, step in enumerate(steps) if step]
    queries = found["query_blocks"]
    assert places[0] >= queries if smooth_k else places[-1] < queries + keys
    gaps = {later - earlier for earlier, later in itertools.pairwise(places)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_every_call_has_a_tag_of_its_own(run_with_stub: Callable[..., Any]) -> None:
    code = "call()\ncall()\ncall()"
    work, _ = launches(run_with_stub, code)
    tags = [unpack("StatisticsParams", each["parameters"])["tag"] for each in work[::2]]
    assert len({0, *tags}) == 4


def test_smoothing_and_many_tokens(run_with_stub: Callable[..., Any]) -> None:
    code = """
given, results = call(tokens=50_000, heads=(2, 7), dtype=torch.float16, k_block_size=4, smooth_k=True,
    qk_quant_dtype=torch.float8_e4m3fn, dim=64, dim_v=256)
print(*[str(each) for each in made], sep="\\n")
"""
    (first, second), lines = launches(run_with_stub, code)
    shapes = [eval(line)[:2] for line in lines[-8:]]
    assert shapes[:7] == [
        ([50_000, 2, 64], "torch.float8_e4m3fn"),
        ([50_000, 7, 64], "torch.float8_e4m3fn"),
        ([50_000, 7, 256], "torch.float8_e4m3fn"),
        ([2, 50_001], "torch.float32"),
        ([7, 12_501], "torch.float32"),
        ([7, 256], "torch.float32"),
        ([7, 64], "torch.float32"),
    ]
    *_, v_scale, k_mean, scratch = (eval(line)[2] for line in lines[-8:])
    found = unpack("QuantizeParams", second["parameters"])
    assert (found["key_means"], found["value_scales"]) == (k_mean, v_scale)
    assert (found["key.columns"], found["key.block"]) == (12_501, 4)
    assert (found["format.is_fp16"], found["format.is_e4m3"], found["format.range"]) == (1, 1, 448.0)
    of_key = -(-((12_500 + 2) // 2 * 7 * 64 // 8) // 128)
    of_value = -(-(50_000 // 8 * 7 * 256 // 8) // 128)
    assert found["key_blocks"] == of_key
    assert second["grid"] == [found["query_blocks"] + of_key + of_value, 1, 1]

    statistics = unpack("StatisticsParams", first["parameters"])
    assert (statistics["key_means.results"], statistics["value_scales.results"]) == (k_mean, v_scale)
    assert statistics["key_means.input"] == found["key.input"]
    assert statistics["key_means.tickets"] == statistics["value_scales.tickets"] + 8 * 7
    assert statistics["is_fp16"] == 1

    # What statistics leave lies side by side in the scratch, behind the tickets.
    ends = [statistics["value_scales.tickets"] + 2 * 8 * 7]
    blocks = 0
    for name in ("value_scales", "key_means"):
        chunks, chunk_tokens = statistics[f"{name}.chunks"], statistics[f"{name}.chunk_tokens"]
        assert (chunks - 1) * chunk_tokens < 50_000 <= chunks * chunk_tokens
        assert statistics[f"{name}.partials"] == ends[-1]
        ends.append(ends[-1] + 4 * 7 * chunks * statistics[f"{name}.head_dim"])
        blocks += 7 * chunks
    assert first["grid"] == [blocks, 1, 1]
    assert eval(lines[-1])[0] == [ends[-1] - scratch]
    assert statistics["value_scales.tickets"] == scratch


def test_without_lengths_there_is_one_sequence(run_with_stub: Callable[..., Any]) -> None:
    work, _ = launches(run_with_stub, "call(cum_seq_lens_q=None)")
    found = unpack("QuantizeParams", work[1]["parameters"])
    assert (found["query.edges"], found["query.sequences"], found["query.columns"]) == (0, 1, 320)
    assert (found["key.edges"], found["key.sequences"]) == (0, 1)
    found = unpack("StatisticsParams", work[0]["parameters"])
    assert (found["value_scales.edges"], found["value_scales.sequences"]) == (0, 1)


def test_no_tokens_still_have_scales_of_value(run_with_stub: Callable[..., Any]) -> None:
    work, _ = launches(run_with_stub, "call(tokens=0, batch=0, smooth_k=True)")
    statistics, quantize = work
    assert statistics["grid"] == [4, 1, 1]  # of 2 heads of key and value
    assert quantize["grid"] == [1, 1, 1]


def test_the_tensors_decide_the_device(run_with_stub: Callable[..., Any]) -> None:
    devices = ["9.0:132:232448", "9.0:78:232448"]
    run = run_with_stub(f"{SETUP}\ncall()\ncall(device=1)", devices=devices)
    work = run.named("cuLaunchKernelEx")
    assert [each["stream"] for each in work] == [STREAM] * 2 + [STREAM + 1] * 2
    contexts = [each["context"] for each in work]
    assert contexts == [contexts[0]] * 2 + [contexts[2]] * 2
    assert contexts[0] != contexts[2]


def test_loading_during_capture_works(run_with_stub: Callable[..., Any]) -> None:
    run_with_stub(
        SETUP + "stub.stub_capture(1)\ncall(smooth_k=True)\nassert not stub.stub_capture_invalidated()"
    )


def test_kernels_are_loaded_again_after_they_were_unloaded(run_with_stub: Callable[..., Any]) -> None:
    run = run_with_stub(
        SETUP
        + """
call()
from cubin_runtime.module import unload_all
unload_all()
call()
"""
    )
    assert len(run.named("cuLibraryLoadData")) == 4


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "call(value=CudaTensor((320, 2, 128), address=(1 << 40) + 8))",
            "InvalidArgumentError value starts at 0x10000000008; expected a multiple of 16",
        ),
        (
            "call(key=CudaTensor((320, 2, 128), strides=(512, 128, 1)))",
            "InvalidArgumentError key has strides (512, 128, 1) for shape (320, 2, 128); expected a cont",
        ),
        (
            "call(tokens=2**30 + 1)",
            "InvalidArgumentError query has 1073741825 tokens; expected at most 1073741824",
        ),
    ],
)
def test_what_is_refused_launches_nothing(code: str, message: str, run_with_stub: Callable[..., Any]) -> None:
    run = run_with_stub(
        f"{SETUP}\ntry:\n    {code}\nexcept Exception as error:\n    print(type(error).__name__, error)"
    )
    assert run.stdout.startswith(message)
    assert not run.named("cuLaunchKernelEx")


def test_a_device_without_kernels_is_told_which_have_them(run_with_stub: Callable[..., Any]) -> None:
    run = run_with_stub(
        f"{SETUP}\ntry:\n    call()\nexcept NotImplementedError as error:\n    print(error)",
        devices=["8.0:108:166912"],
    )
    assert run.stdout == (
        "sage_quantize has no kernel 'statistics' for compute capability 8.0; it is built for sm_90a\n"
    )


def test_a_refusal_of_the_driver_names_the_kernel(run_with_stub: Callable[..., Any]) -> None:
    run = run_with_stub(
        SETUP
        + """
fail("cuLaunchKernelEx", 719)
try:
    call()
except RuntimeError as error:
    print(error)
"""
    )
    assert "CUDA_ERROR_LAUNCH_FAILED" in run.stdout
    assert "sage_quantize_statistics_sm90a" in run.stdout
