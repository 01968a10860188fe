"""Calls recorded from NVIDIA's host code: the package agrees with all, and notices any change of a record."""

from __future__ import annotations

import copy
import gzip
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from check_golden import main, read
from golden.compare import differences
from golden.driver import RecordingDriver, kernels_without_files
from golden.replay import Prepared, prepare, run

from cubin_runtime.errors import TableError
from cubin_runtime.families import fmha_trtllm_gen
from cubin_runtime.families.packing import StructLayout, field_size
from cubin_runtime.module import Launchers

RECORDED = Path(__file__).parent / "golden" / "trtllm_gen_0_6_13.json.gz"
CALLS = {call["id"]: call for call in read(RECORDED)}

Call = dict[str, Any]


def first(choose: Callable[[Call], bool]) -> Call:
    return copy.deepcopy(next(call for call in CALLS.values() if choose(call)))


def launching(**inputs: Any) -> Call:
    return first(lambda c: c["outputs"]["status"] == "ok" and inputs.items() <= c["inputs"].items())


def failing(code: str) -> Call:
    return first(lambda c: c["outputs"]["status"] == "error" and c["outputs"]["error"]["code"] == code)


@pytest.fixture(scope="module")
def driver() -> Iterator[RecordingDriver]:
    driver = RecordingDriver()
    with driver.installed(), kernels_without_files():
        yield driver


def test_every_recorded_call_matches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(RECORDED)]) == 0
    assert capsys.readouterr().out == "650 matched, 0 failed\n"


def test_differences_are_printed_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right, wrong = launching(), launching()
    wrong["outputs"]["grid"][0] += 1
    for name, opened in (("calls.json", open), ("calls.json.gz", gzip.open)):
        with opened(tmp_path / name, "wt") as file:
            json.dump({"configs": [right, wrong]}, file)
        assert main([str(tmp_path / name)]) == 1
        line, summary = capsys.readouterr().out.splitlines()
        assert f"{name}: call {wrong['id']} ({wrong['group']}): grid: there " in line
        assert summary == "1 matched, 1 failed"


def test_a_record_that_is_not_understood_does_not_match(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged, right = launching(), launching()
    del damaged["inputs"]["causal"]
    (tmp_path / "calls.json").write_text(json.dumps({"configs": [damaged, right]}))
    assert main([str(tmp_path / "calls.json")]) == 1
    line, summary = capsys.readouterr().out.splitlines()
    assert "KeyError: 'causal'" in line
    assert summary == "1 matched, 1 failed"


def test_a_file_without_calls_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "calls.json").write_text('{"configs": []}')
    assert main([str(tmp_path / "calls.json")]) == 1


# Where a launching call with an LSE is recorded, and another value for it.
CHANGES: dict[str, tuple[str, Any]] = {
    "func_name": ("function", "another"),
    "sha256": ("sha256", "0" * 64),
    "step_q": ("step_q", 64),
    "tile_q": ("tiles", 64),
    "tile_kv": ("tiles", 64),
    "mask_type": ("mask", 3),
    "threads_per_cta": ("threads", 128),
    "smem_bytes": ("smem_bytes", 1),
    "grid.2": ("grid", 1000),
    "block.0": ("block", 1),
    "launch_smem": ("launch_smem", 1),
    "stream": ("stream", 12345),
    "cluster_dim.0": ("cluster_dim", 2),
    "launch_attrs.0.1.0": ("launch_attrs", 2),
    "launch_attrs.1.1": ("launch_attrs", 1),
    "launch_attrs.2.1": ("launch_attrs", 7),
    "launch_attrs.2.0": ("launch_attrs", 7),
    "func_attrs": ("func_attrs", {}),
    "workspace.counter_bytes": ("workspace", 16),
    "workspace.softmax_offset": ("workspace", 0),
    "workspace.softmax_bytes": ("workspace", 16),
    "workspace.scratch_offset": ("workspace", 0),
    "workspace.partial_o_offset": ("workspace", 0),
    "tma.0.dtype": ("tmaQ_ dtype", 3),
    "tma.0.addr": ("tmaQ_ addr", 16),
    "tma.1.dims.1": ("tmaK_ dims", 1),
    "tma.1.strides.2": ("tmaK_ strides", 1),
    "tma.2.box.1": ("tmaV_ box", 64),
    "tma.2.elem_strides.0": ("tmaV_ elem_strides", 2),
    "tma.3.interleave": ("tmaO_ interleave", 1),
    "tma.3.swizzle": ("tmaO_ swizzle", 0),
    "tma.3.l2": ("tmaO_ l2", 0),
    "tma.3.oob": ("tmaO_ oob", 1),
    "tma.3.slot": ("tensor maps", "tmaKSf_"),
    "lse_launch": ("LSE step", None),
    "lse_launch.md": ("LSE step", 1),
    "lse_launch.lse": ("LSE step", 1),
    "lse_launch.n": ("LSE step", 1),
    "lse_launch.stride_heads": ("LSE step", 77),
    "lse_launch.stride_tokens": ("LSE step", 77),
    "lse_launch.num_heads_q": ("LSE step", 77),
    "lse_launch.stream": ("LSE step", 77),
    "lse_launch.attr_value": ("LSE step", 77),
}


def put(record: Any, path: str, value: Any) -> None:
    *parents, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    for step in parents:
        record = record[step]
    record[last] = value


@pytest.mark.parametrize("path", CHANGES)
def test_each_recorded_fact_counts(driver: RecordingDriver, path: str) -> None:
    call = first(lambda c: bool(c["outputs"].get("lse_launch")) and not any(c["inputs"]["sage_blocks"]))
    assert differences(call, driver) == []
    name, value = CHANGES[path]
    put(call["outputs"], path, value)
    assert any(found.startswith(f"{name}: ") for found in differences(call, driver))


@pytest.mark.parametrize("head_dim", [128, 192, 256])
def test_each_byte_of_the_parameters_counts(driver: RecordingDriver, head_dim: int) -> None:
    call = launching(head_dim_qk=head_dim)
    parameters = bytes.fromhex(call["outputs"]["params_hex"])
    for i in range(0, len(parameters), 7):
        changed = bytearray(parameters)
        changed[i] ^= 0x10
        call["outputs"]["params_hex"] = changed.hex()
        assert len(differences(call, driver)) == 1, f"byte {i}"
    call["outputs"]["params_hex"] = parameters[:-1].hex()
    assert differences(call, driver) == ["parameters: there 1279 bytes, here 1280"]


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("no_kernel", {"code": "workspace_overflow"}),
        ("head_dim_range", {"code": "no_kernel"}),
        ("workspace_overflow", {"code": "no_kernel"}),
        ("head_ratio", {"code": "no_kernel"}),
        ("unsupported_dtype", {"operand": "K"}),
        ("tma_addr_align", {"slot": "tmaV_"}),
        ("tma_dim_zero", {"slot": "tmaO_"}),
        ("tma_dim_zero", {"code": "tma_addr_align"}),
    ],
)
def test_the_reason_of_a_failure_counts(driver: RecordingDriver, code: str, changes: Call) -> None:
    call = failing(code)
    assert differences(call, driver) == []
    call["outputs"]["error"].update(changes)
    (found,) = differences(call, driver)
    assert found.startswith("fails there with ")


def test_failing_and_launching_calls_are_told_apart(driver: RecordingDriver) -> None:
    launches, fails = launching(), failing("no_kernel")
    launches["outputs"], fails["outputs"] = fails["outputs"], launches["outputs"]
    assert "launches here" in differences(launches, driver)[0]
    assert "launches there, fails here with no_kernel" in differences(fails, driver)[0]


def test_the_reasons_are_checked_in_the_recorded_order(driver: RecordingDriver) -> None:
    """A call with everything wrong fails with one reason after another, as they are put right."""
    call = failing("tma_addr_align")
    good = copy.deepcopy(call["inputs"])
    bad = {
        "num_heads_q": 7,
        "dtype_q": "fp32",
        "dtype_o": "e5m2",
        "workspace_size": 0,
        "head_dim_qk": 8,
        "sage_blocks": [3, 3, 0, 0],
        "q_ptr": 8,
        "k_ptr": 8,
    }
    codes = [
        {"code": "head_ratio"},
        {"code": "unsupported_dtype", "operand": "Q"},
        {"code": "unsupported_dtype", "operand": "Output"},
        {"code": "workspace_overflow"},
        {"code": "head_dim_range"},
        {"code": "no_kernel"},
        {"code": "tma_addr_align", "slot": "tmaQ_"},
        {"code": "tma_addr_align", "slot": "tmaK_"},
    ]
    call["inputs"].update(bad)
    assert call["inputs"]["num_heads_kv"] == 16
    for name, error in zip(bad, codes, strict=True):
        call["outputs"]["error"] = error
        assert differences(call, driver) == []
        call["inputs"][name] = 134209400356864 if name.endswith("_ptr") else good[name]


# ---- what NVIDIA's host code does silently wrong


WRONG = {
    "strides of query": lambda call: (
        call["outputs"]["status"] == "ok" and call["inputs"]["q_stride"][1] > call["inputs"]["head_dim_qk"]
    ),
    "strides of key": lambda call: call["id"] == 419,
    "dense window": lambda call: call["id"] == 305,
    "empty grid": lambda call: 0 in call["outputs"].get("grid", []),
}


@pytest.mark.parametrize("choose", WRONG.values(), ids=WRONG)
def test_what_is_silently_wrong_there_has_to_be_refused_here(
    driver: RecordingDriver, monkeypatch: pytest.MonkeyPatch, choose: Callable[[Call], bool]
) -> None:
    call = first(choose)
    assert differences(call, driver) == []
    monkeypatch.setattr(fmha_trtllm_gen, "check", lambda problem: None)
    (found,) = differences(call, driver)
    assert found.endswith(", and here nothing refuses it")


def test_broken_rules_of_tensor_maps_have_to_be_refused_here(driver: RecordingDriver) -> None:
    broken = [
        call
        for call in CALLS.values()
        if any(tma["documented_rule_violations"] for tma in call["outputs"].get("tma", []))
    ]
    assert len(broken) == 6
    for call in map(copy.deepcopy, broken):
        assert differences(call, driver) == []
        for tma in call["outputs"]["tma"]:
            tma["documented_rule_violations"] = []
        assert "fails here with another rule for " in differences(call, driver)[0]


def test_a_kernel_for_other_sage_blocks_has_to_be_refused_here(driver: RecordingDriver) -> None:
    call = first(lambda c: c["inputs"]["dtype_q"] == "int8" and c["outputs"]["status"] == "ok")
    call["inputs"]["sage_blocks"] = [1, 2, 0, 1]
    assert differences(call, driver) == []  # there is no kernel for them
    call["inputs"]["sage_blocks"] = [1, 1, 0, 1]
    call["outputs"]["func_name"] = call["outputs"]["func_name"].replace("SageK1", "SageK4")
    (found,) = differences(call, driver)
    assert "for Sage blocks [1, 1, 0, 1]; nothing refuses that here" in found


# ---- another release's parameter struct


@pytest.mark.parametrize("window", [-1, 4096])
def test_the_abi_of_a_row_decides_the_layout(driver: RecordingDriver, window: int) -> None:
    """The same values, at the places where the later struct has them."""
    call = first(lambda c: bool(c["outputs"].get("lse_launch")) and c["inputs"]["causal"])["inputs"]
    call["window_left"] = window
    call["max_kv"] = min(call["max_kv"], 4096)
    prepared = prepare(call, driver)
    run(prepared, call)
    earlier = driver.take().launches[0].parameters
    row = msgspec.structs.replace(prepared.call.kernel.row, abi="fmha_trtllm_gen/0.7.4")
    facts = msgspec.structs.replace(prepared.call.kernel.facts, parameter_bytes=1408)
    kernel = msgspec.structs.replace(prepared.call.kernel, row=row, facts=facts, launchers=Launchers())
    later_call = fmha_trtllm_gen.FmhaTrtllmGenCall(prepared.problem, kernel)
    run(Prepared(prepared.problem, later_call), call)
    later = driver.take().launches[0].parameters
    assert (len(earlier), len(later)) == (1280, 1408)

    def fields(parameters: bytes, layout: StructLayout) -> dict[str, bytes]:
        return {
            name: parameters[offset : offset + field_size(kind)]
            for name, (offset, kind) in layout.fields.items()
        }

    old, new = fields(earlier, prepared.call.layout), fields(later, later_call.layout)
    assert {name: new[name] for name in old.keys() & new.keys()} == {
        name: old[name] for name in old.keys() & new.keys()
    }
    assert int.from_bytes(new["mLeftSlidingWindow"], "little", signed=True) == window
    assert new["mRightSlidingWindow"] == b"\xff" * 4


def test_a_struct_of_another_size_than_the_cubins_is_refused(driver: RecordingDriver) -> None:
    prepared = prepare(launching()["inputs"], driver)
    row = msgspec.structs.replace(prepared.call.kernel.row, abi="fmha_trtllm_gen/0.7.4")
    kernel = msgspec.structs.replace(prepared.call.kernel, row=row)
    with pytest.raises(TableError, match=r"takes 1280 bytes of parameters; fmha_trtllm_gen/0\.7\.4 has 1408"):
        fmha_trtllm_gen.FmhaTrtllmGenCall(prepared.problem, kernel)
    for abi, message in (
        ("fmha_trtllm_gen/9.9", "params_9_9.yaml"),
        ("fmha_sm90/1", "expected fmha_trtllm_gen/"),
    ):
        row = msgspec.structs.replace(row, abi=abi)
        with pytest.raises(TableError, match=re.escape(message)):
            fmha_trtllm_gen.FmhaTrtllmGenCall(prepared.problem, msgspec.structs.replace(kernel, row=row))
