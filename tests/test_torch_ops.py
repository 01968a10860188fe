"""The call under torch.compile, fake tensors and export: one operator, equal results, one graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, nop
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensor, FakeTensorMode

import cubin_runtime
from cubin_runtime import attention, trtllm_ragged_attention_deepseek
from cubin_runtime.arguments import Call
from cubin_runtime.errors import InvalidArgumentError
from tests.ragged_call import SIGNATURE, as_call, cpu_call

OPERATOR = torch.ops.cubin_runtime.ragged_attention.default
WRITTEN = {"workspace_buffer", "out", "lse", "skip_softmax_counts"}


def sage() -> dict[str, Any]:
    call = cpu_call()
    query, key = ((8 * call[name]).to(torch.int8) for name in ("query", "key"))
    return {
        "query": query,
        "key": key,
        "value": call["value"].to(torch.float8_e4m3fn),
        "sage_attn_sfs": (torch.rand(4, 6), torch.rand(2, 4), None, torch.rand(2, 128)),
        "num_elts_per_sage_attn_blk": (1, 4, 0, 1),
    }


# What differs from `cpu_call`, made anew for each use.
CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "lse": lambda: {"return_lse": True},
    "own out": lambda: {"out": torch.full((5, 4, 128), math.nan, dtype=torch.float16)},
    "own out, strided": lambda: {"out": torch.full((5, 4, 256), math.nan).half()[..., :128]},
    "own out and lse": lambda: {
        "out": torch.full((5, 4, 128), math.nan).half(),
        "lse": torch.full((4, 5), math.nan).T,
        "return_lse": True,
    },
    "own lse, not returned": lambda: {"lse": torch.full((5, 4), math.nan)},
    "int scales": lambda: {"bmm1_scale": 1, "bmm2_scale": 2},
    "tensor scales": lambda: {"bmm1_scale": torch.tensor(0.25), "bmm2_scale": torch.tensor([0.5])},
    "one tensor scale": lambda: {"bmm2_scale": torch.tensor([0.5])},
    "sinks": lambda: {"attention_sinks": torch.tensor([0.0, 1.0, -math.inf, 2.0])},
    "sage": sage,
    "fp8": lambda: {"dtype": torch.float8_e4m3fn},
    "window": lambda: {"window_left": 2, "enable_pdl": False},
    "not causal": lambda: {"is_causal": False},
    "mirrors": lambda: {"q_seq_lens_cpu": torch.tensor([3, 2]), "kv_seq_lens_cpu": torch.tensor([5, 4])},
    "skip softmax": lambda: {"skip_softmax_threshold_scale_factor": 1e-30},
    "skip softmax, counted": lambda: {
        "skip_softmax_threshold_scale_factor": 1e-30,
        "skip_softmax_counts": torch.zeros(2, dtype=torch.int64),
    },
}


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch._dynamo.reset()


def compiled(backend: Any = "aot_eager", **options: Any) -> Callable[..., Any]:
    """The public call as Dynamo sees it, inside a function of somebody else."""

    def attend(call: dict[str, Any]) -> Any:
        return cubin_runtime.trtllm_ragged_attention_deepseek(**call)

    function: Callable[..., Any] = torch.compile(attend, fullgraph=True, backend=backend, **options)
    return function


def results(returned: Any, call: dict[str, Any]) -> list[torch.Tensor]:
    """All that a call wrote: what it returned, and what it was given to write into."""
    returned = returned if isinstance(returned, tuple) else (returned,)
    return [*returned, *(call[name] for name in ("out", "lse") if name in call)]


# ---- compiled equals eager


@pytest.mark.parametrize("name", CALLS)
def test_compiled_equals_eager(name: str) -> None:
    eager, traced = cpu_call(**CALLS[name]()), cpu_call(**CALLS[name]())
    if name == "sage":
        traced["sage_attn_sfs"] = eager["sage_attn_sfs"]
    expected = results(trtllm_ragged_attention_deepseek(**eager), eager)
    given = results(compiled()(traced), traced)
    assert len(given) == len(expected)
    for got, right in zip(given, expected, strict=True):
        assert (got.dtype, got.shape, got.stride()) == (right.dtype, right.shape, right.stride())
        assert torch.equal(got, right)
        assert not got.isnan().any()


def test_results_of_the_callers_are_returned_themselves() -> None:
    call = cpu_call(**CALLS["own out and lse"]())
    out, lse = compiled()(call)
    assert out is call["out"]
    assert lse is call["lse"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of what inductor imports
def test_inductor() -> None:
    """Two calls with one workspace, fed by strides of inductor's choice, into buffers that it reuses."""

    def layer(call: dict[str, Any]) -> torch.Tensor:
        query = (call["query"].transpose(0, 1) * 2).transpose(0, 1)
        out, lse = trtllm_ragged_attention_deepseek(**{**call, "query": query, "return_lse": True})
        again = trtllm_ragged_attention_deepseek(**{**call, "query": query, "bmm1_scale": 0.5})
        return (out + again) * lse[..., None]

    call = cpu_call()
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(call), layer(call), rtol=0.02, atol=1e-2)


def test_a_query_that_requires_grad_gets_results_that_do_not() -> None:
    call = cpu_call()
    call["query"].requires_grad_()
    assert not trtllm_ragged_attention_deepseek(**call).requires_grad
    assert not compiled()(call).requires_grad


# ---- graphs


@pytest.mark.parametrize("results", [1, 2])
def test_the_graph_is_one_operator_after_allocations(results: int) -> None:
    counter = CompileCounterWithBackend("eager")
    compiled(counter)(cpu_call(return_lse=results == 2))
    (graph,) = counter.graphs
    calls = [node.target for node in graph.graph.nodes if node.op in ("call_function", "call_method")]
    assert calls == ["new_empty"] * results + [OPERATOR]


def lengths(number: int) -> tuple[list[int], list[int]]:
    """Another batch size, other maxima and totals for each number.

    None is the size of anything else in the first call: those Dynamo takes for one variable.
    """
    return [11 + number] * (7 + number), [13 + number] * (7 + number)


@pytest.mark.parametrize(("dynamic", "calls_until_settled"), [(None, 2), (True, 1)])
def test_other_sizes_make_no_other_graph(dynamic: bool | None, calls_until_settled: int) -> None:
    """By default Dynamo learns from the second call which sizes vary."""
    counter = CompileCounterWithBackend("aot_eager")
    attend = compiled(counter, dynamic=dynamic)
    graphs = []
    for number in range(5):
        call = cpu_call(*lengths(number), return_lse=True)
        for got, right in zip(attend(call), trtllm_ragged_attention_deepseek(**call), strict=True):
            assert torch.equal(got, right)
        graphs.append(counter.frame_count)
    assert len(set(graphs[calls_until_settled - 1 :])) == 1


def test_other_values_of_tensor_scales_make_no_other_graph() -> None:
    counter = CompileCounterWithBackend("eager")
    attend = compiled(counter)
    for scale in (0.1, 0.2, 0.3):
        call = cpu_call(bmm1_scale=torch.tensor(scale))
        assert torch.equal(attend(call), trtllm_ragged_attention_deepseek(**call))
    assert counter.frame_count == 1


def test_a_graph_sees_what_the_operator_writes() -> None:
    """Reads before and after the call, of results and of the workspace, keep their order."""

    def attend(call: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        before = call["out"] + 1, call["lse"] + 1
        trtllm_ragged_attention_deepseek(**call)
        return *before, call["out"] + 1, call["lse"] + 1

    def call() -> dict[str, Any]:
        return cpu_call(out=torch.zeros(5, 4, 128).half(), lse=torch.zeros(5, 4))

    given = torch.compile(attend, fullgraph=True, backend="aot_eager")(call())
    assert all(map(torch.equal, given, attend(call())))
    assert not torch.equal(given[0], given[2])
    assert not torch.equal(given[1], given[3])


def test_what_the_operator_declares() -> None:
    arguments = OPERATOR._schema.arguments
    assert {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write} == WRITTEN
    assert {a.name for a in arguments} == {*Call.__struct_fields__} - {"return_lse"} | {
        "bmm1_scale_tensor",
        "bmm2_scale_tensor",
    }
    assert not OPERATOR._schema.returns


# ---- export and AOTAutograd


class Attention(torch.nn.Module):
    """Tensors in, so that export can name them."""

    NAMES = ("query", "key", "value", "workspace_buffer", "seq_lens", "cum_seq_lens_q", "cum_seq_lens_kv")

    def forward(self, *tensors: torch.Tensor) -> Any:
        return trtllm_ragged_attention_deepseek(
            **dict(zip(self.NAMES, tensors, strict=True)),
            max_q_len=16,
            max_kv_len=16,
            bmm1_scale=0.125,
            bmm2_scale=1.0,
            o_sf_scale=1.0,
            batch_size=2,
            window_left=-1,
            return_lse=True,
            backend="reference",
        )

    @classmethod
    def tensors(cls, *batch: list[int]) -> tuple[torch.Tensor, ...]:
        call = cpu_call(*batch)
        return tuple(call[name] for name in cls.NAMES)


@pytest.mark.parametrize("strict", [True, False])
def test_export_with_free_token_counts(strict: bool) -> None:
    queries, keys = torch.export.Dim("queries"), torch.export.Dim("keys")
    program = torch.export.export(
        Attention(),
        Attention.tensors([3, 2], [5, 4]),
        dynamic_shapes=(({0: queries}, {0: keys}, {0: keys}, None, None, None, None),),
        strict=strict,
    )
    others = Attention.tensors([4, 7], [9, 8])
    assert all(map(torch.equal, program.module()(*others), Attention()(*others)))


def test_aot_autograd_without_dynamo() -> None:
    tensors = Attention.tensors([3, 2], [5, 4])
    traced = aot_function(Attention(), fw_compiler=nop)
    assert all(map(torch.equal, traced(*tensors), Attention()(*tensors)))


# ---- fake tensors


def fake_call(**changes: Any) -> dict[str, Any]:
    """`cpu_call` with its tensors made fake ones on a CUDA device, for a backend that needs one."""
    call = cpu_call(**changes)
    with FakeTensorMode():
        return {
            name: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
            if isinstance(value, torch.Tensor)
            else value
            for name, value in {**call, "backend": "trtllm-gen"}.items()
        }


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.int8, torch.bfloat16),
    ],
)
def test_fake_results_have_shape_dtype_and_device(dtype: torch.dtype, expected: torch.dtype) -> None:
    call = fake_call(dtype=dtype)
    out, lse = trtllm_ragged_attention_deepseek(**call, return_lse=True)
    assert isinstance(out, FakeTensor)
    assert isinstance(lse, FakeTensor)
    assert (out.shape, out.dtype, out.device) == ((5, 4, 128), expected, call["query"].device)
    assert (lse.shape, lse.dtype, lse.device) == ((5, 4), torch.float32, call["query"].device)
    assert isinstance(trtllm_ragged_attention_deepseek(**call), FakeTensor)


def test_fake_results_of_the_callers_are_returned_themselves() -> None:
    call = fake_call(**CALLS["own out and lse"]())
    out, lse = trtllm_ragged_attention_deepseek(**call)
    assert out is call["out"]
    assert lse is call["lse"]


@pytest.mark.parametrize(
    ("name", "shape"),
    [("query", (5, 4)), ("value", (9,)), ("out", (5, 4, 192)), ("out", (20, 128)), ("lse", (4, 5))],
)
def test_wrong_shapes_are_refused_before_anything_runs(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{name} has shape"):
        trtllm_ragged_attention_deepseek(**fake_call(**{name: torch.empty(shape)}))


def test_a_compiled_call_is_checked_when_it_runs() -> None:
    with pytest.raises(ValueError, match="max_q_len is -1"):
        compiled("eager")(cpu_call(max_q_len=-1))


def test_a_fake_call_does_not_find_what_a_real_one_prepared() -> None:
    """They differ in nothing but what they are, and a fake tensor has no address to launch with."""
    call = cpu_call()
    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for n, v in call.items()}
        fake, real = as_call(fakes), as_call(call)
    assert attention._layout(fake.query) == attention._layout(real.query)
    assert attention._signature(fake) != attention._signature(real)


# ---- torch's own checks of operators


@pytest.mark.parametrize("name", ["own out", "own out and lse", "tensor scales", "sinks", "sage"])
def test_opcheck(name: str) -> None:
    call = cpu_call(**{"out": torch.zeros(5, 4, 128).bfloat16(), **CALLS[name]()})
    call["value"] = call["value"].bfloat16()  # the check does arithmetic, which e4m3 has none of
    given = {n: getattr(as_call(call), n) for n in SIGNATURE.parameters if n != "return_lse"}
    for scale in ("bmm1_scale", "bmm2_scale"):
        is_tensor = isinstance(given[scale], torch.Tensor)
        given[f"{scale}_tensor"] = given[scale] if is_tensor else None
        given[scale] = None if is_tensor else given[scale]
    torch.library.opcheck(OPERATOR, [given[argument.name] for argument in OPERATOR._schema.arguments])
