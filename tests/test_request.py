"""Names of dtypes and architectures, and which device runs code for which target."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubin_runtime.errors import InvalidArgumentError
from cubin_runtime.request import Architecture, Capability, DType, KernelRequest
from tests.rows import make_request

HOPPER = Capability(9, 0)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bf16", DType.BF16),
        ("torch.bfloat16", DType.BF16),
        ("BFloat16", DType.BF16),
        ("float16", DType.FP16),
        ("half", DType.FP16),
        ("float8_e4m3fn", DType.E4M3),
        ("torch.int8", DType.INT8),
    ],
)
def test_dtype_names(name: str, dtype: DType) -> None:
    assert DType.parse(name) is dtype


def test_unknown_dtype_lists_the_names_that_exist() -> None:
    with pytest.raises(InvalidArgumentError, match=r"'float32'; expected one of .*bf16.*e4m3.*fp16.*int8"):
        DType.parse("float32")


def test_dtype_sizes() -> None:
    assert [d.bytes for d in (DType.BF16, DType.FP16, DType.E4M3, DType.INT8)] == [2, 2, 1, 1]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sm_90a", Architecture(9, 0, "a")),
        ("90a", Architecture(9, 0, "a")),
        ("9.0a", Architecture(9, 0, "a")),
        ("SM_103", Architecture(10, 3)),
        ("10.3", Architecture(10, 3)),
        ("sm_100f", Architecture(10, 0, "f")),
    ],
)
def test_architecture_names(name: str, expected: Architecture) -> None:
    assert Architecture.parse(name) == expected


@pytest.mark.parametrize("name", ["", "sm_", "90x", "sm_9", "hopper", "9.0.1", "sm_90a\n", "-90"])
def test_bad_architecture_names(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="expected a name such as sm_90a"):
        Architecture.parse(name)


@given(st.integers(1, 99), st.integers(0, 9), st.sampled_from(["", "a", "f"]))
def test_architecture_name_round_trip(major: int, minor: int, suffix: str) -> None:
    arch = Architecture(major, minor, suffix)
    assert Architecture.parse(str(arch)) == arch


@pytest.mark.parametrize(
    ("arch", "runs", "does_not"),
    [
        ("sm_90a", ["9.0"], ["8.9", "9.1", "10.0"]),
        ("sm_80", ["8.0", "8.6", "8.9"], ["7.5", "9.0"]),
        ("sm_86", ["8.6", "8.9"], ["8.0", "9.0"]),
        ("sm_100f", ["10.0", "10.3"], ["9.0", "11.0", "12.0"]),
        ("sm_103a", ["10.3"], ["10.0", "12.0"]),
        ("sm_103f", ["10.3"], ["10.0"]),
        ("sm_120f", ["12.0", "12.1"], ["10.0", "13.0"]),
    ],
)
def test_where_code_runs(arch: str, runs: list[str], does_not: list[str]) -> None:
    target = Architecture.parse(arch)
    assert all(target.runs_on(Architecture.parse(device).capability) for device in runs)
    assert not any(target.runs_on(Architecture.parse(device).capability) for device in does_not)


def test_requests_are_values() -> None:
    one, other = KernelRequest(capability=HOPPER), KernelRequest(capability=HOPPER)
    assert one == other
    assert hash(one) == hash(other)
    assert hash(one) != hash(KernelRequest(capability=Capability(10, 0)))
    assert pickle.loads(pickle.dumps(one)) == one


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"num_heads_q is 5 and num_heads_kv 2; .*multiple"):
        KernelRequest(capability=HOPPER, num_heads_q=5, num_heads_kv=2)


@pytest.mark.parametrize("field", ["head_dim_qk", "head_dim_v", "num_heads_q", "num_heads_kv"])
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_below_one_are_refused(field: str, value: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{field} is {value}; expected at least 1"):
        make_request(**{field: value})


def test_shared_memory_limit_prefers_what_the_device_says() -> None:
    assert KernelRequest(capability=HOPPER).shared_memory_limit == 232_448
    assert KernelRequest(capability=HOPPER, max_shared_memory=1000).shared_memory_limit == 1000
    assert KernelRequest(capability=Capability(13, 0)).shared_memory_limit is None
