"""Planning without tensors: requests from plain values, what they select, workspace, warmup."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cubin_runtime
from cubin_runtime import module, planning
from cubin_runtime.errors import DriverNotFoundError, InvalidArgumentError, NoKernelError
from cubin_runtime.module import DeviceInfo
from cubin_runtime.planning import explain, make_request, packed_problem, warmup, workspace_size
from cubin_runtime.request import SAGE_OFF, Capability, DType, KernelRequest, MaskType
from cubin_runtime.selection import select
from kernel_meta.tables import all_rows

HOPPER = {"arch": "sm_90a"}


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def device_info(ordinal: int) -> DeviceInfo:
        raise DriverNotFoundError("no usable CUDA driver")

    monkeypatch.setattr(module, "device_info", device_info)


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [
        DeviceInfo(ordinal=0, name="a", capability=Capability(9, 0), sm_count=132, max_shared_memory=232448),
        DeviceInfo(ordinal=1, name="b", capability=Capability(10, 3), sm_count=160, max_shared_memory=99999),
    ]
    monkeypatch.setattr(module, "device_info", devices.__getitem__)


def test_the_public_names_are_these() -> None:
    for name in ("explain", "make_request", "warmup", "workspace_size"):
        assert getattr(cubin_runtime, name) is getattr(planning, name)


def test_defaults(no_device: None) -> None:
    assert make_request() == KernelRequest(
        capability=Capability(9, 0),
        backend="trtllm-gen",
        dtype_q=DType.BF16,
        dtype_k=DType.BF16,
        dtype_v=DType.BF16,
        dtype_o=DType.BF16,
        head_dim_qk=192,
        head_dim_v=128,
        num_heads_q=128,
        num_heads_kv=128,
        mask_type=MaskType.CAUSAL,
        sage_blocks=SAGE_OFF,
        max_shared_memory=None,
    )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"arch": "10.3"}, {"capability": Capability(10, 3)}),
        ({"dtype": "torch.float16"}, {f"dtype_{x}": DType.FP16 for x in "qkvo"}),
        ({"dtype": "e4m3"}, {"dtype_q": DType.E4M3, "dtype_v": DType.E4M3, "dtype_o": DType.BF16}),
        ({"dtype": "e4m3", "dtype_o": "fp16"}, {"dtype_o": DType.FP16}),
        (
            {"dtype": "int8"},
            {"dtype_q": DType.INT8, "dtype_k": DType.INT8, "dtype_v": DType.E4M3, "dtype_o": DType.BF16},
        ),
        ({"dtype_v": "e4m3"}, {"dtype_k": DType.BF16, "dtype_v": DType.E4M3, "dtype_o": DType.BF16}),
        ({"dtype_k": "fp8"}, {"dtype_q": DType.BF16, "dtype_k": DType.E4M3, "dtype_v": DType.BF16}),
        ({"dtype_q": "e4m3"}, {"dtype_q": DType.E4M3, "dtype_k": DType.BF16, "dtype_o": DType.BF16}),
        ({"head_dims": (256, 64)}, {"head_dim_qk": 256, "head_dim_v": 64}),
        ({"mask": "sliding"}, {"mask_type": MaskType.SLIDING}),
        ({"num_heads_q": 32}, {"num_heads_q": 32, "num_heads_kv": 32}),
        ({"num_heads_q": 32, "num_heads_kv": 4}, {"num_heads_q": 32, "num_heads_kv": 4}),
        ({"backend": "trtllm-native"}, {"backend": "trtllm-gen"}),
        ({"backend": "cute-dsl"}, {"backend": "cute-dsl"}),
        ({"use_fp16_softmax": True}, {"use_fp16_softmax": True}),
        ({"uses_spcompress": True}, {"uses_spcompress": True}),
        ({"skips_softmax": True}, {"skips_softmax": True}),
        ({"sage_blocks": (1, 16, 0, 1)}, {"sage_blocks": (1, 16, 0, 1)}),
    ],
)
def test_values_become_a_request(values: dict[str, Any], expected: dict[str, object]) -> None:
    request = make_request(**{**HOPPER, **values})
    assert {name: getattr(request, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dtype": "float32"}, "unknown dtype 'float32'; expected one of"),
        ({"dtype_o": "x"}, "unknown dtype 'x'"),
        ({"mask": "diagonal"}, "mask is 'diagonal'; expected one of dense, causal, sliding"),
        ({"arch": "hopper"}, "unknown architecture 'hopper'"),
        ({"arch": "sm_90a", "device": 0}, "arch and device are both given"),
        ({"num_heads_q": 5, "num_heads_kv": 2}, "num_heads_q to be a multiple"),
        ({"num_heads_kv": 0}, "num_heads_kv is 0"),
        ({"head_dims": (0, 128)}, "head_dim_qk is 0"),
    ],
)
def test_a_value_without_meaning_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        make_request(**{**HOPPER, **values} if "device" not in values else values)


def test_a_device_answers_for_itself(two_devices: None) -> None:
    requests = [make_request(), make_request(device=0), make_request(device=1), make_request(arch="sm_90a")]
    assert [(r.capability, r.max_shared_memory) for r in requests] == [
        (Capability(9, 0), 232448),
        (Capability(9, 0), 232448),
        (Capability(10, 3), 99999),
        (Capability(9, 0), None),
    ]


def test_a_device_that_is_asked_for_must_exist(no_device: None) -> None:
    with pytest.raises(DriverNotFoundError):
        make_request(device=0)


def test_explain_takes_a_request_or_its_values() -> None:
    request = make_request(arch="sm_90a", dtype="fp16", mask="dense")
    assert explain(request) == explain(arch="sm_90a", dtype="fp16", mask="dense") == select(request)
    assert explain(request).row in all_rows()


def test_explain_returns_misses_too() -> None:
    selection = explain(arch="7.5")
    assert selection.row is None
    tables = "the tables have sm_100a, sm_100f, sm_103a, sm_90a"
    assert f"no kernel runs on compute capability 7.5; {tables}" in selection.explain()


def test_a_request_excludes_values() -> None:
    request = make_request(**HOPPER)
    with pytest.raises(InvalidArgumentError, match="both a request and dtype, mask are given"):
        explain(request, mask="dense", dtype="fp16")


SHAPES = {"batch_size": 3, "total_q": 1000, "total_kv": 2000, "max_q_len": 400, "max_kv_len": 900}


def test_workspace_size_is_what_the_call_checks() -> None:
    size = workspace_size(**SHAPES, **HOPPER)
    assert 0 < size <= 128 << 20  # what serving engines reserve
    assert size == workspace_size(**SHAPES, request=make_request(**HOPPER), return_lse=True)


LARGEST = 36 << 20


@given(
    batch_size=st.integers(1, 300),
    max_q_len=st.integers(1, 300_000),
    max_kv_len=st.integers(1, 300_000),
    heads=st.sampled_from([(1, 1), (8, 1), (28, 4), (64, 8), (128, 128)]),
    dims=st.sampled_from([(192, 128), (128, 128), (256, 256)]),
    dtype=st.sampled_from(["bf16", "e4m3"]),
)
def test_one_size_does_for_all(
    batch_size: int,
    max_q_len: int,
    max_kv_len: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: str,
) -> None:
    """What the docstring says."""
    assert workspace_size.__doc__ is not None
    assert "36 MiB do for every call" in workspace_size.__doc__
    size = workspace_size(
        batch_size=batch_size,
        total_q=batch_size * max_q_len,
        total_kv=batch_size * max_kv_len,
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
        dtype=dtype,
        head_dims=dims,
        num_heads_q=heads[0],
        num_heads_kv=heads[1],
        **HOPPER,
    )
    assert size <= LARGEST


def test_the_largest_size_is_needed() -> None:
    shapes = {"batch_size": 1, "total_q": 1, "total_kv": 300_000, "max_q_len": 1, "max_kv_len": 300_000}
    heads = {"num_heads_q": 8, "num_heads_kv": 8}
    assert workspace_size(**shapes, **heads, **HOPPER, head_dims=(256, 256)) > LARGEST - (4 << 20)


def test_workspace_size_of_a_miss_says_why() -> None:
    with pytest.raises(NoKernelError, match="head_dims"):
        workspace_size(**SHAPES, **HOPPER, head_dims=(96, 96))


@pytest.mark.parametrize("return_lse", [True, False])
def test_packed_problem(return_lse: bool) -> None:
    request = make_request(**HOPPER, dtype="e4m3", num_heads_q=8, num_heads_kv=2)
    problem = packed_problem(request, **SHAPES, return_lse=return_lse)
    layouts = [problem.query, problem.key, problem.value, problem.out]
    assert [(layout.shape, layout.strides, layout.dtype) for layout in layouts] == [
        ((1000, 8, 192), (1536, 192, 1), DType.E4M3),
        ((2000, 2, 192), (384, 192, 1), DType.E4M3),
        ((2000, 2, 128), (256, 128, 1), DType.E4M3),
        ((1000, 8, 128), (1024, 128, 1), DType.BF16),
    ]
    assert problem.lse_strides == ((8, 1) if return_lse else None)
    assert (problem.batch_size, problem.max_q_len, problem.window_left) == (3, 400, -1)


def test_warmup_loads_what_the_requests_select(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []

    class Loaded:
        def __init__(self, row: object, device: int) -> None:
            loaded.append((row, device))
            self.row = row

    monkeypatch.setattr(module, "load", Loaded)
    requests = [make_request(**HOPPER, mask=mask) for mask in ("dense", "causal")]
    rows = warmup(iter(requests), device=1)
    assert rows == [select(request).require() for request in requests]
    assert loaded == [(row, 1) for row in rows]


def test_warmup_raises_what_the_first_call_would() -> None:
    with pytest.raises(NoKernelError):
        warmup([make_request(arch="7.5")])
