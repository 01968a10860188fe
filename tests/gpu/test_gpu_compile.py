"""torch.compile on the GPU: the bits of an eager call, and no copy of the workspace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import cubin_runtime
from tests.gpu.support import Problem, arguments, assert_matches, assert_same_bits, expect, make_problem

pytestmark = [
    pytest.mark.gpu,
    # Inductor's: deprecations of what it imports, advice on TF32.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::UserWarning:torch"),
]


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch._dynamo.reset()


def attend(given: dict[str, Any]) -> Any:
    return cubin_runtime.trtllm_ragged_attention_deepseek(**given)


def compiled(backend: Any) -> Callable[[dict[str, Any]], Any]:
    function: Callable[[dict[str, Any]], Any] = torch.compile(attend, fullgraph=True, backend=backend)
    return function


def problem(device: torch.device, q_lens: list[int], kv_lens: list[int], **options: Any) -> Problem:
    return make_problem(
        q_lens, kv_lens, device=device, dims=(192, 128), heads=4, kv_heads=2, is_causal=True, **options
    )


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("scales", ["floats", "tensors"])
@pytest.mark.parametrize("results", ["allocated", "given"])
def test_compiled_equals_eager(
    backend: str, scales: str, results: str, device: torch.device, workspace: torch.Tensor
) -> None:
    tensors = {
        "bmm1_scale": torch.tensor([0.1], device=device),
        "bmm2_scale": torch.tensor(0.5, device=device),
        "attention_sinks": torch.rand(4, device=device),
    }
    case = problem(device, [129, 0, 7], [300, 5, 0], **(tensors if scales == "tensors" else {}))

    def given() -> dict[str, Any]:
        return arguments(case, workspace, **({"out": None, "lse": None} if results == "allocated" else {}))

    eager = attend(given())
    call = given()
    out, lse = compiled(backend)(call)
    if results == "given":
        assert out is call["out"]
        assert lse is call["lse"]
    assert_matches(case, (out, lse), expect(case))
    assert_same_bits((out, lse), eager)


def test_other_token_counts_make_no_other_graph(device: torch.device, workspace: torch.Tensor) -> None:
    """One graph for the first count, one for all others."""
    counter = CompileCounterWithBackend("inductor")
    function = compiled(counter)
    for tokens in (100, 150, 1000, 333):
        given = arguments(problem(device, [tokens, 3], [tokens + 50, 9]), workspace, out=None, lse=None)
        assert_same_bits(function(given), attend(given))
        if tokens == 150:
            graphs = counter.frame_count
    assert counter.frame_count == graphs


def test_inductor_does_not_copy_the_workspace(device: torch.device, workspace: torch.Tensor) -> None:
    """It is declared as written, which a compiler may honour with a copy."""
    given = arguments(problem(device, [129], [300]), workspace)
    function = compiled("inductor")
    function(given)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    function(given)
    torch.cuda.synchronize(device)
    assert torch.cuda.max_memory_allocated(device) - before < workspace.nbytes


def test_a_compiled_call_in_a_cuda_graph(device: torch.device, workspace: torch.Tensor) -> None:
    given = arguments(problem(device, [129, 7], [300, 140]), workspace)
    attend(given)
    eager = given["out"].clone(), given["lse"].clone()
    function = compiled("inductor")
    function(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function(given)
    given["out"].zero_()
    given["lse"].zero_()
    graph.replay()
    assert_same_bits((given["out"], given["lse"]), eager)
