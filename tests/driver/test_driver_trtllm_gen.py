"""NVIDIA's Blackwell kernels through the real cuda.bindings: recorded calls, and the whole public call."""

from __future__ import annotations

import re
import struct
from pathlib import Path

from golden_driver import SPECIFICATION

ROOT = Path(__file__).parents[2]

GOLDEN = f"""
import sys
sys.path.insert(0, {str(ROOT / "scripts")!r})
from check_golden import read
from golden.compare import differences
from golden.driver import kernels_without_files
from golden_driver import LogDriver
"""


def test_every_recorded_call_matches_down_to_the_driver(run_with_stub):
    """Marshalling included: attributes, structs and tensor maps as the driver gets them."""
    run = run_with_stub(
        GOLDEN
        + f"""
from pathlib import Path
driver, matched = LogDriver(), 0
with kernels_without_files():
    for call in read(Path({str(ROOT / "tests" / "golden" / "trtllm_gen_0_6_13.json.gz")!r})):
        found = differences(call, driver)
        matched += not found
        for difference in found:
            print(call["id"], difference)
print(matched, "matched")
""",
        devices=SPECIFICATION,
        parameter_bytes=1,
    )
    assert run.stdout == "650 matched\n"
    attention = [
        call for call in run.named("cuLaunchKernelEx") if not call["kernel"].startswith("fmha_trtllm_gen_")
    ]
    assert len(attention) == 373 - 7  # six break rules of tensor maps, one has an empty grid
    assert all(call["result"] == 0 for call in run.named("cuLaunchKernelEx", "cuKernelSetAttribute"))


SETUP = f"""
import sys
sys.path.insert(0, {str(ROOT / "scripts")!r})
import torch
from cuda_tensors import CudaTensor, cuda_call
from golden.driver import kernels_without_files
from stub_support import fail, stub
from cubin_runtime import attention, trtllm_ragged_attention_deepseek as attend
attention._current_stream = lambda device: 7
without_files = kernels_without_files()
without_files.__enter__()
buffer = CudaTensor((64 << 20,), torch.uint8, address=1 << 45)
def call(*lengths, **changes):
    return cuda_call(*lengths, **dict(dict(workspace_buffer=buffer, heads=(4, 2)), **changes))
def refused(**changes):
    try:
        attend(**call(**changes))
    except Exception as error:
        print(type(error).__name__, error)
"""
BLACKWELL = ["10.0:148:232448"]


def test_the_public_call_zeroes_counters_once_and_writes_the_lse(run_with_stub):
    run = run_with_stub(SETUP + "for _ in range(3): attend(**call())", devices=BLACKWELL)
    work = run.named("cuMemsetD8Async", "cuLaunchKernelEx", "cuCtxSynchronize")
    kernel = (
        "fmhaSm100fKernel_QkvBfloat16OBfloat16HQk192HV128SeparateQkvCausalVarSeqQ128Kv128PersistentContext"
    )
    assert [(c["call"], c.get("kernel")) for c in work] == [
        ("cuMemsetD8Async", None),
        *[("cuLaunchKernelEx", kernel), ("cuLaunchKernelEx", "fmha_trtllm_gen_lse_sm100f")] * 3,
    ]
    zeroed = work[0]
    assert (zeroed["address"], zeroed["value"], zeroed["size"]) == (1 << 45, 0, 8 << 20)
    assert {c["stream"] for c in work} == {7}
    assert work[1]["grid"] == [2, 4, 2]  # of 300 rows in steps of 256, heads, sequences


def test_another_buffer_is_zeroed_again(run_with_stub):
    run = run_with_stub(
        SETUP
        + """
attend(**call())
buffer = CudaTensor((64 << 20,), torch.uint8, address=1 << 45)  # other memory at the same address
attend(**call())
attend(**call())
""",
        devices=BLACKWELL,
    )
    assert len(run.named("cuMemsetD8Async")) == 2


def test_a_captured_call_zeroes_for_itself(run_with_stub):
    run = run_with_stub(
        SETUP
        + """
attend(**call(lse=None))
buffer = CudaTensor((64 << 20,), torch.uint8, address=1 << 46)
stub.stub_capture(1)
attend(**call(lse=None))
attend(**call(lse=None))
stub.stub_capture(0)
attend(**call(lse=None))
attend(**call(lse=None))
assert not stub.stub_capture_invalidated()
""",
        devices=BLACKWELL,
    )
    order = [c["call"][2:8] for c in run.named("cuMemsetD8Async", "cuLaunchKernelEx")]
    assert order == ["Memset", "Launch"] * 4 + ["Launch"]


def test_loading_during_capture_works(run_with_stub):
    run_with_stub(
        SETUP
        + """
stub.stub_capture(1)
attend(**call(bmm1_scale=CudaTensor((), torch.float32)))
assert not stub.stub_capture_invalidated()
""",
        devices=BLACKWELL,
    )


def test_a_scale_on_the_device_is_converted_first(run_with_stub):
    run = run_with_stub(
        SETUP
        + """
scale = CudaTensor((1,), torch.float32, address=1 << 44)
attend(**call(bmm1_scale=scale, bmm2_scale=scale, lse=None))
for kernel in ("fmha_trtllm_gen_scale_sm100f",):
    stub.stub_parameter_bytes(kernel.encode(), 16)
attend(**call(bmm1_scale=scale, bmm2_scale=scale, lse=None))
""",
        devices=BLACKWELL,
        parameter_bytes=16,
    )
    *_, converted, attention = run.named("cuLaunchKernelEx")
    slot = (1 << 45) + (8 << 20)
    assert converted["kernel"] == "fmha_trtllm_gen_scale_sm100f"
    assert bytes.fromhex(converted["parameters"]) == (1 << 44).to_bytes(8, "little") + slot.to_bytes(
        8, "little"
    )
    assert (converted["grid"], attention["kernel"][:4]) == ([1, 1, 1], "fmha")


def test_dependent_launch_is_stated_either_way(run_with_stub):
    run = run_with_stub(
        SETUP + "attend(**call(enable_pdl=True)); attend(**call(enable_pdl=False))", devices=BLACKWELL
    )
    launches = run.named("cuLaunchKernelEx")
    assert [c["attributes"] for c in launches] == [[4, 5, 6], [6], [4, 5, 6], []]
    assert [c.get("pdl") for c in launches] == [True, True, False, None]
    assert (launches[0]["cluster"], launches[0]["policy"]) == ([1, 1, 1], 0)


REFUSALS = {
    "query=CudaTensor((320, 4, 192), strides=(1024, 256, 1))": (
        "InvalidArgumentError query has strides (1024, 256, 1) for shape (320, 4, 192)"
    ),
    "out=CudaTensor((320, 4, 128), strides=(1024, 256, 1))": (
        "InvalidArgumentError out has strides (1024, 256, 1) for shape (320, 4, 128)"
    ),
    "key=CudaTensor((450, 2, 192), strides=(1 << 31, 192, 1))": (
        "InvalidArgumentError key has strides (2147483648, 192, 1)"
    ),
    "value=CudaTensor((450, 2, 128), strides=(128, 1 << 32, 1))": (
        "InvalidArgumentError value has strides (128, 4294967296, 1)"
    ),
    "key=CudaTensor((450, 2, 192), strides=(388, 192, 1))": (
        "InvalidArgumentError key cannot be read in tiles: stride 1 is 776 bytes"
    ),
    "is_causal=False, window_left=5": "UnsupportedError window_left is 5 with is_causal=False",
    "window_left=5": "NoKernelError no kernel for compute capability 10.0",
    "use_fp16_softmax=True": "NoKernelError no kernel for compute capability 10.0",
    "max_q_len=0": "InvalidArgumentError max_q_len is 0 and batch_size 2 for a query of 320 tokens",
    "query=CudaTensor((320, 4, 192), address=(1 << 40) + 8)": (
        "InvalidArgumentError query cannot be read in tiles: its address is 0x10000000008"
    ),
    "workspace_buffer=CudaTensor((8 << 20,), torch.uint8)": (
        "InvalidArgumentError workspace_buffer has 8388608 bytes; this call needs "
    ),
    "skip_softmax_threshold_scale_factor=1.0, skip_softmax_counts=CudaTensor((2,), torch.int64)": (
        "InvalidArgumentError skip_softmax_counts is given; expected None: NVIDIA's kernels do not count"
    ),
    "bmm1_scale=1e39": "InvalidArgumentError bmm1_scale is 1e+39, bmm2_scale 1.0",
}


def test_what_the_kernels_would_get_wrong_is_refused(run_with_stub):
    calls = "\n".join(f"refused({changes})" for changes in REFUSALS)
    run = run_with_stub(SETUP + calls, devices=BLACKWELL)
    lines = [line for line in run.stdout.splitlines() if re.match(r"\w+Error ", line)]
    for (changes, message), line in zip(REFUSALS.items(), lines, strict=True):
        assert line.startswith(message), changes
    assert not run.named("cuLaunchKernelEx")


def test_a_large_cache_is_no_obstacle(run_with_stub):
    """Counts of elements beyond 31 bits are cut where nothing depends on them."""
    run = run_with_stub(
        SETUP
        + """
tokens = 3 << 20
key = CudaTensor((tokens, 16, 192))
value = CudaTensor((tokens, 16, 128))
attend(**call(heads=(16, 16), key=key, value=value, max_kv_len=tokens))
""",
        devices=BLACKWELL,
    )
    key = run.named("cuTensorMapEncodeTiled")[1]
    assert (key["dims"], key["strides"][:2]) == ([192, 3 << 20, 16, 1], [6144, 384])


def test_a_device_without_kernels_learns_why(run_with_stub):
    for device, name in (("10.7:148:232448", "10.7"), ("12.0:148:101376", "12.0")):
        run = run_with_stub(SETUP + "refused()", devices=[device])
        assert f"no kernel runs on compute capability {name}" in run.stdout


def test_sage_scales_skipping_and_padding_reach_the_kernel(run_with_stub):
    run = run_with_stub(
        SETUP
        + """
scales = [CudaTensor(shape, torch.float32, address=(1 << 43) + (i << 12)) for i, shape in enumerate(
    [(4, 321), (2, 114), (2, 128)])]
out = CudaTensor((320, 4, 128), torch.bfloat16)
def sage():
    arguments = call(heads=(4, 2), head_dims=(128, 128), is_causal=False, out=out, bmm1_scale=0.5,
        sage_attn_sfs=(scales[0], scales[1], None, scales[2]), num_elts_per_sage_attn_blk=(1, 4, 0, 1),
        skip_softmax_threshold_scale_factor=0.25)
    for name in ("query", "key"):
        arguments[name] = CudaTensor(arguments[name].shape, torch.int8)
    arguments["value"] = CudaTensor(arguments["value"].shape, torch.float8_e4m3fn)
    attend(**arguments)
sage()
from cubin_runtime import module
(kernel,) = [k for k in module._modules.kernels.values() if k.row.name.startswith("fmha_trtllm_gen_sm100a")]
stub.stub_parameter_bytes(kernel.row.entry.encode(), 1280)
sage()
""",
        devices=BLACKWELL,
        parameter_bytes=1,
    )
    attention = run.named("cuLaunchKernelEx")[-2]
    assert "QkInt8VE4m3OBfloat16H128SeparateQkvDenseVarSeqSkipsSoftmax" in attention["kernel"]
    assert attention["kernel"].endswith("SageQ1SageK4SageV1PersistentContext")
    parameters = bytes.fromhex(attention["parameters"])
    k, p, q, v = struct.unpack_from("<4Q", parameters, 1024)
    assert (q, k, p, v) == (1 << 43, (1 << 43) + 0x1000, 0, (1 << 43) + 0x2000)
    assert struct.unpack_from("<4i", parameters, 1128) == (2, 0, 0, 0)  # log2 of the blocks of k, p, q, v
    assert struct.unpack_from("<f", parameters, 1232) == (0.25,)
