"""`cubin-runtime run` without a GPU: the plan, the smaller batch, and that wrong results are noticed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from cubin_runtime import module
from cubin_runtime.cli import check, outcome
from cubin_runtime.cli.check import check_against_reference, check_against_torch
from cubin_runtime.cli.tensors import Tensors, make_call, make_tensors
from cubin_runtime.cli.workload import Workload
from cubin_runtime.errors import DriverNotFoundError, InvalidArgumentError
from cubin_runtime.module import DeviceInfo
from cubin_runtime.request import Capability, DType, KernelRequest, MaskType
from tests.cli_support import Result

CPU = torch.device("cpu")
LENGTHS: dict[str, tuple[int, ...]] = {"q_lens": (130, 1, 0, 7, 40), "kv_lens": (200, 9, 5, 3, 0)}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a machine that has one."""

    def no_driver(ordinal: int) -> DeviceInfo:
        raise DriverNotFoundError("no driver")

    monkeypatch.setattr(module, "device_info", no_driver)
    monkeypatch.setattr(outcome, "can_launch", lambda: False)


def make_workload(
    *, heads: int = 4, kv_heads: int = 2, mask: MaskType = MaskType.CAUSAL, **fields: Any
) -> Workload:
    request = KernelRequest(
        capability=Capability(9, 0), num_heads_q=heads, num_heads_kv=kv_heads, mask_type=mask
    )
    return Workload(request=request, **{**LENGTHS, **fields})


def computed(workload: Workload) -> Tensors:
    tensors = make_tensors(workload, CPU)
    make_call(workload, tensors, "reference")()
    return tensors


# ---- the workload ----


@pytest.mark.parametrize(
    ("mask", "window"),
    [(MaskType.DENSE, -1), (MaskType.CAUSAL, -1), (MaskType.SLIDING, 0), (MaskType.SLIDING, 6)],
)
@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 5), (3, 17), (17, 3), (1, 9), (0, 4), (4, 0)])
def test_visible_pairs_are_those_of_the_mask(mask: MaskType, window: int, q_len: int, kv_len: int) -> None:
    workload = make_workload(mask=mask, window_left=window, q_lens=(1, q_len), kv_lens=(1, kv_len))
    shift = kv_len - q_len
    visible = [
        (row, key)
        for row in range(q_len)
        for key in range(kv_len)
        if mask is MaskType.DENSE or (key <= row + shift and (window < 0 or row + shift - key <= window))
    ]
    assert workload.visible_pairs(1) == len(visible)


def test_flops_count_both_products_of_all_heads() -> None:
    workload = make_workload(mask=MaskType.DENSE, q_lens=(2, 3), kv_lens=(5, 7))
    assert workload.flops() == 2 * (2 * 5 + 3 * 7) * 4 * (192 + 128)


def test_a_small_workload_keeps_what_is_small() -> None:
    window = {"mask": MaskType.SLIDING, "window_left": 1024}
    small = make_workload(heads=64, kv_heads=2, q_lens=(9000, 3), kv_lens=(9000, 7), **window).shrunk()
    assert (small.q_lens, small.kv_lens, small.window_left) == ((512, 3), (512, 7), 64)
    assert (small.request.num_heads_q, small.request.num_heads_kv) == (8, 2)
    assert make_workload().shrunk() == make_workload()


@pytest.mark.parametrize(("q_lens", "kv_lens"), [((1, 2), (1,)), ((-1,), (4,))])
def test_lengths_are_checked(q_lens: tuple[int, ...], kv_lens: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="expected"):
        make_workload(q_lens=q_lens, kv_lens=kv_lens)


# ---- the checks ----


@pytest.mark.parametrize(
    ("mask", "window"), [(MaskType.DENSE, -1), (MaskType.CAUSAL, -1), (MaskType.SLIDING, 50)]
)
def test_torch_agrees_with_the_reference(mask: MaskType, window: int) -> None:
    workload = make_workload(mask=mask, window_left=window)
    found = check_against_torch(workload, computed(workload))
    assert found is not None
    assert 1e-4 < found.error < 3e-3  # out is rounded to bf16
    assert (found.rows, found.heads) == (178, 4)


def test_torch_has_nothing_like_sinks() -> None:
    workload = make_workload(has_sinks=True)
    assert check_against_torch(workload, computed(workload)) is None


@pytest.mark.parametrize("fields", [{}, {"has_sinks": True}, {"mask": MaskType.SLIDING, "window_left": 20}])
def test_right_results_pass(fields: dict[str, Any]) -> None:
    workload = make_workload(return_lse=True, heads=16, kv_heads=8, **fields)
    found = check_against_reference(workload, computed(workload))
    assert found.passed
    assert (found.rows, found.heads) == (178, 4)
    assert found.lse_error == 0


@pytest.mark.parametrize("value", [0.5, math.nan])
@pytest.mark.parametrize(
    ("name", "compare"),
    [("out", check_against_reference), ("lse", check_against_reference), ("out", check_against_torch)],
)
def test_wrong_results_do_not_pass(
    name: str, value: float, compare: Callable[[Workload, Tensors], check.Check]
) -> None:
    workload = make_workload(return_lse=True)
    tensors = computed(workload)
    assert compare(workload, tensors).passed
    getattr(tensors, name)[-50] += value
    assert not compare(workload, tensors).passed


def test_of_a_long_sequence_the_last_rows_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = make_workload(
        mask=MaskType.SLIDING, window_left=100, return_lse=True, q_lens=(400, 30), kv_lens=(600, 30)
    )
    tensors = computed(workload)
    monkeypatch.setattr(check, "CHECKED_PAIRS", 600 * 100)
    found = check_against_reference(workload, tensors)
    assert found.passed
    assert found.rows == 400 - 256 + 30  # whole tiles of 128 rows are left out
    tensors.out[399] += 1
    assert not check_against_reference(workload, tensors).passed


# ---- the command ----


def test_a_plan_and_a_smaller_batch(cli: Callable[..., Result]) -> None:
    result = cli("run")
    assert (result.code, result.err) == (0, "")
    lines = [line.rstrip() for line in result.out.splitlines()]
    assert lines[0] == "batch     q lens 8192,1,777,4096,2048,63,1024,191; kv lens the same"
    assert "kernel    fmha_sm90_sm90a_bf16_bf16_bf16_bf16_h192x128_causal_t128x128_persistent" in lines
    assert "launch    planned for NVIDIA H200, 132 multiprocessors, since no device is here" in lines
    assert "          grid 132x1x1, cluster 1x1x1, block 384x1x1" in lines
    assert "not run   torch sees no GPU here, so nothing was launched (see `cubin-runtime doctor`)" in lines
    assert "          q lens 512,1,512,512,512,63,512,191; kv lens the same" in lines
    assert lines[-1].endswith("against torch's scaled_dot_product_attention, in 2815 rows of 4 heads")


def test_json_has_the_same(cli: Callable[..., Result]) -> None:
    options = ("--q-lens", "5,0", "--kv-lens", "9,3", "--heads", "4", "--kv-heads", "1", "--dtype", "fp16")
    result = cli("run", *options, "--mask", "sliding", "--window", "2", "--head-dims", "256,256", "--json")
    plan, found = result.json["plan"], result.json["outcome"]
    assert plan["kernel"].startswith("fmha_sm90_sm90a_fp16_fp16_fp16_fp16_h256x256_sliding")
    assert plan["launch"]["grid"] == [2, 1, 1]
    assert plan["launch"]["ordinal"] is None
    assert plan["workload"]["window_left"] == 2
    assert found["type"] == "computed on the CPU"
    assert found["workload"]["kv_lens"] == [9, 3]
    assert 0 < found["check"]["error"] < 1e-3


def test_a_window_that_hides_nothing_needs_no_sliding_kernel(cli: Callable[..., Result]) -> None:
    assert "_causal_" in cli("run", "--mask", "sliding", "--window", "99", "--q-lens", "100", "--json").out
    assert "_sliding_" in cli("run", "--mask", "sliding", "--window", "98", "--q-lens", "100", "--json").out


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_a_miss_exits_with_3_and_says_why(cli: Callable[..., Result], as_json: list[str]) -> None:
    arguments = ["--head-dims", "96,96", *as_json]
    result = cli("run", *arguments)
    assert (result.code, result.err) == (3, "")
    explained = cli(
        "explain",
        *arguments,
        "--batch-size",
        "8",
        "--max-q-len",
        "8192",
        "--total-q",
        "16392",
        "--total-kv",
        "16392",
        "--max-kv-len",
        "8192",
    )
    assert result.out == explained.out
    assert "head_dims" in result.out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--window", "5"], "--window is 5 with --mask causal; expected --mask sliding"),
        (["--q-lens", "1,x"], "--q-lens is '1,x'; expected numbers separated by commas"),
        (["--q-lens", "1,2", "--kv-lens", "3"], "there are 2 q lens and 1 kv lens"),
        (["--dtype", "fp64"], "unknown dtype 'fp64'"),
        (["--heads", "3", "--kv-heads", "2"], "expected num_heads_q to be a multiple"),
    ],
)
def test_bad_values_exit_with_2(cli: Callable[..., Result], flags: list[str], message: str) -> None:
    result = cli("run", *flags)
    assert (result.code, result.out) == (2, "")
    assert message in " ".join(result.err.split())


def test_a_wrong_result_exits_with_1(cli: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(workload: Workload, tensors: Tensors, backend: str) -> Callable[[], object]:
        call = make_call(workload, tensors, backend)
        return lambda: (call(), tensors.out.mul_(1.01))

    monkeypatch.setattr(outcome, "make_call", too_large)
    result = cli("run", "--q-lens", "20")
    assert result.code == 1
    assert result.out.rstrip().endswith(": WRONG")


def test_a_corrupt_cubin_is_never_planned_with(
    cli: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from cubin_runtime import store
    from cubin_runtime.manifest import default_manifest

    name = "fmha_sm90_sm90a_bf16_bf16_bf16_bf16_h192x128_causal_t128x128_persistent"
    path = tmp_path / "mine" / default_manifest().find(name).key
    path.parent.mkdir(parents=True)
    path.write_bytes(b"junk")
    monkeypatch.setenv("CUBIN_RUNTIME_ARTIFACT_DIR", str(tmp_path / "mine"))
    monkeypatch.setattr(store, "_KERNEL_META", tmp_path / "nothing embedded")
    result = cli("run")
    assert (result.code, result.out) == (4, "")
    assert str(path) in result.err


def test_the_dtype_of_results_follows_the_request() -> None:
    workload = make_workload()
    request = msgspec.structs.replace(workload.request, dtype_q=DType.E4M3, dtype_k=DType.E4M3)
    tensors = make_tensors(msgspec.structs.replace(workload, request=request), CPU)
    assert (tensors.query.dtype, tensors.value.dtype) == (torch.float8_e4m3fn, torch.bfloat16)
    assert (tensors.out.dtype, tensors.lse) == (torch.bfloat16, None)
    assert bool(tensors.out.isnan().all())
