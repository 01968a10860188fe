"""Results that can be written down: empty rows, LSE base, scales, window edges, sinks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cuda.bindings import driver

from cubin_runtime.errors import CubinRuntimeError, NoKernelError
from tests.gpu.support import (
    E4M3,
    HEAD_DIMS,
    Problem,
    arguments,
    assert_matches,
    assert_same_bits,
    call,
    capture,
    constant_problem,
    expect,
    make_problem,
    poisoned,
    run,
    two_scores,
)

pytestmark = pytest.mark.gpu

BACKENDS = ["trtllm-gen", "trtllm-native", "reference"]


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("kind", ["plain", "sinks", "tensor scales"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["dense", "causal"])
def test_rows_without_keys(
    dims: tuple[int, int], kind: str, is_causal: bool, device: torch.device, workspace: torch.Tensor
) -> None:
    problem = make_problem(
        [3, 2, 0, 1], [4, 0, 5, 0], device=device, dims=dims, padding=2, is_causal=is_causal
    )
    if kind == "sinks":
        problem = problem.with_options(attention_sinks=torch.ones(1, device=device))
    elif kind == "tensor scales":
        problem = problem.with_options(
            bmm1_scale=torch.tensor([0.1], device=device), bmm2_scale=torch.tensor([2.0], device=device)
        )
    out, lse = call(problem, workspace)
    assert (out[3:6] == 0).all()
    assert (lse[3:6] == -math.inf).all()
    assert out[6:].isnan().all()
    assert lse[6:].isnan().all()
    assert_same_bits((out[:3], lse[:3]), call(problem.alone(0), workspace))

    no_keys = Problem(problem.query, problem.key, problem.value, [3, 2, 0, 1], [0] * 4, problem.options)
    out, lse = call(no_keys, workspace)
    assert (out[:6] == 0).all()
    assert (lse[:6] == -math.inf).all()


def test_no_query_rows_at_all(device: torch.device, workspace: torch.Tensor) -> None:
    problem = make_problem([0, 0], [3, 0], device=device, padding=2)
    out, lse = call(problem, workspace)
    assert out.isnan().all()
    assert lse.isnan().all()


def test_tensors_without_tokens(device: torch.device, workspace: torch.Tensor) -> None:
    out, lse = call(make_problem([0, 0], [0, 0], device=device), workspace)
    assert out.shape == (0, 1, 128)
    assert lse.shape == (0, 1)
    out, lse = call(make_problem([2, 1], [0, 0], device=device), workspace)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_lse_counts_keys_in_base_two(backend: str, device: torch.device, workspace: torch.Tensor) -> None:
    problem = constant_problem([1.0] * 8, 3, heads=2, device=device)
    _, lse = call(problem, workspace, backend=backend)
    assert lse.shape == (3, 2)
    assert (lse == 3.0).all()
    _, lse = call(two_scores(device), workspace, backend=backend)
    assert lse.item() == pytest.approx(1.89464, abs=1e-4)


def test_partial_results_merge_by_powers_of_two(device: torch.device, workspace: torch.Tensor) -> None:
    context = call(constant_problem([1.0] * 3, 1, device=device), workspace)
    suffix = call(constant_problem([0.0], 1, device=device), workspace)
    weights = context[1].exp2(), suffix[1].exp2()
    merged = (weights[0][..., None] * context[0] + weights[1][..., None] * suffix[0]) / sum(weights)[
        ..., None
    ]
    torch.testing.assert_close(merged, torch.full_like(merged, 0.75))


def test_lse_strides_are_honoured(device: torch.device, workspace: torch.Tensor) -> None:
    problem = make_problem([129, 7], [300, 140], device=device, heads=3)
    buffer = poisoned((3, 2, 136), torch.float32, device)
    out, lse = call(problem, workspace, lse=buffer[:, 1].T)
    assert_same_bits((out, lse), call(problem, workspace))
    assert buffer[:, 0].isnan().all()


@pytest.mark.parametrize("shape", [(3, 136), (136, 2), (136,)])
def test_lse_of_another_shape_is_refused(
    shape: tuple[int, ...], device: torch.device, workspace: torch.Tensor
) -> None:
    problem = make_problem([129, 7], [300, 140], device=device, heads=3)
    with pytest.raises(ValueError, match="lse"):
        call(problem, workspace, lse=poisoned(shape, torch.float32, device))


@pytest.mark.parametrize("backend", BACKENDS)
def test_scale_kinds_agree(backend: str, device: torch.device, workspace: torch.Tensor) -> None:
    scales = [1.0, torch.tensor([1.0], device=device), torch.tensor(1.0, device=device)]
    for scale in scales:
        out, lse = call(two_scores(device, bmm1_scale=scale), workspace, backend=backend)
        assert out.float().mean().item() == pytest.approx(0.73106, abs=2e-3)
        assert lse.item() == pytest.approx(1.89464, abs=1e-4)
        doubled, _ = call(two_scores(device, bmm2_scale=scale * 2.0), workspace, backend=backend)
        assert doubled.float().mean().item() == pytest.approx(2 * 0.73106, abs=4e-3)
    assert [float(scale) for scale in scales] == [1.0, 1.0, 1.0]


def test_a_scale_is_read_by_the_kernel_alone(device: torch.device, workspace: torch.Tensor) -> None:
    """A replayed graph sees a new value, and a tensor scale costs no kernel of its own."""
    scale = torch.tensor([1.0], device=device)
    problem = two_scores(device, bmm1_scale=scale)
    given = arguments(problem, workspace)
    run(given)
    graph = capture(given, keep_graph=True)
    for value, expected in ((1.0, 0.73106), (0.0, 0.5), (2.0, 0.88080)):
        scale.fill_(value)
        graph.replay()
        assert given["out"].float().mean().item() == pytest.approx(expected, abs=3e-3)
    assert node_count(graph) == node_count(capture({**given, "bmm1_scale": 1.0}, keep_graph=True))


def node_count(graph: torch.cuda.CUDAGraph) -> int:
    code, _, count = driver.cuGraphGetNodes(driver.CUgraph(graph.raw_cuda_graph()))
    assert code == driver.CUresult.CUDA_SUCCESS
    assert count > 0
    return int(count)


@pytest.mark.parametrize("name", ["bmm1_scale", "bmm2_scale"])
@pytest.mark.parametrize("kind", ["float64", "bf16", "cpu", "two elements"])
def test_scale_tensors_of_another_kind_are_refused(
    name: str, kind: str, device: torch.device, workspace: torch.Tensor
) -> None:
    scale = {
        "float64": torch.ones(1, dtype=torch.float64, device=device),
        "bf16": torch.ones(1, dtype=torch.bfloat16, device=device),
        "cpu": torch.ones(1),
        "two elements": torch.ones(2, device=device),
    }[kind]
    with pytest.raises((ValueError, TypeError), match=name):
        call(two_scores(device), workspace, **{name: scale})


@pytest.mark.parametrize("backend", BACKENDS)
def test_sliding_window_edge(backend: str, device: torch.device, workspace: torch.Tensor) -> None:
    def attend(q_len: int, window_left: int) -> tuple[list[float], list[float]]:
        problem = constant_problem([0.0, 1.0, 2.0, 3.0], q_len, device=device)
        out, lse = call(problem, workspace, is_causal=True, window_left=window_left, backend=backend)
        return out[:, 0, 0].tolist(), lse[:, 0].tolist()

    assert attend(4, 1) == ([0.0, 0.5, 1.5, 2.5], [0.0, 1.0, 1.0, 1.0])
    assert attend(2, 1) == ([1.5, 2.5], [1.0, 1.0])
    assert attend(4, 0)[0] == [0.0, 1.0, 2.0, 3.0]
    assert attend(4, 4) == attend(4, -1)


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_window_of_a_late_chunk(dims: tuple[int, int], device: torch.device, workspace: torch.Tensor) -> None:
    problem = make_problem([300], [4096], device=device, dims=dims, heads=2, is_causal=True, window_left=333)
    assert_matches(problem, call(problem, workspace), expect(problem))
    covering = problem.with_options(window_left=4096)
    assert_matches(covering, call(covering, workspace), expect(covering))


def test_window_without_causal_is_refused(device: torch.device, workspace: torch.Tensor) -> None:
    with pytest.raises(NotImplementedError, match="window_left"):
        call(two_scores(device), workspace, window_left=1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_join_the_denominator(backend: str, device: torch.device, workspace: torch.Tensor) -> None:
    problem = constant_problem([1.0] * 4, 1, heads=2, device=device)
    sinks = torch.tensor([math.log(4.0), -math.inf], device=device)
    out, lse = call(problem, workspace, attention_sinks=sinks, backend=backend)
    assert out[0, :, 0].tolist() == pytest.approx([0.5, 1.0], abs=2e-3)
    assert lse[0].tolist() == pytest.approx([3.0, 2.0], abs=1e-3)


def test_a_sink_far_from_the_logits(device: torch.device, workspace: torch.Tensor) -> None:
    sinks = torch.tensor([300.0, -300.0], device=device)
    out, lse = call(constant_problem([1.0] * 4, 1, heads=2, device=device), workspace, attention_sinks=sinks)
    assert out[0, :, 0].tolist() == [0.0, 1.0]
    assert lse[0].tolist() == pytest.approx([300.0 / math.log(2.0), 2.0], rel=1e-5)


@pytest.mark.parametrize("kind", ["bf16", "one too many", "cpu"])
def test_sinks_of_another_kind_are_refused(kind: str, device: torch.device, workspace: torch.Tensor) -> None:
    sinks = {
        "bf16": torch.zeros(2, dtype=torch.bfloat16, device=device),
        "one too many": torch.zeros(3, device=device),
        "cpu": torch.zeros(2),
    }[kind]
    problem = constant_problem([1.0] * 4, 1, heads=2, device=device)
    with pytest.raises((ValueError, TypeError), match="attention_sinks"):
        call(problem, workspace, attention_sinks=sinks)


@pytest.mark.parametrize(
    "variant",
    [
        "fp8 with bf16 values",
        "sage with bf16 values",
        "fp8 values, skipping",
        "fp16 with fp16 softmax",
        "bf16 spcompress",
    ],
)
def test_variants_without_a_kernel_say_so(
    variant: str, device: torch.device, workspace: torch.Tensor
) -> None:
    """No silent fallback: the error names what is missing, and the next call works."""
    problem = two_scores(device)
    query, key, value = problem.query, problem.key, problem.value
    options: dict[str, Any] = {}
    if variant == "fp8 with bf16 values":
        query, key = query.to(E4M3), key.to(E4M3)
    elif variant == "bf16 spcompress":
        options = {"uses_spcompress": True}
    elif variant == "sage with bf16 values":
        query, key = query.to(torch.int8), key.to(torch.int8)
        scales = torch.ones(1, 1, device=device), torch.ones(1, 1, device=device)
        options = {
            "sage_attn_sfs": (*scales, None, torch.ones(1, 128, device=device)),
            "num_elts_per_sage_attn_blk": (1, 16, 0, 1),
        }
    elif variant == "fp8 values, skipping":
        value = value.to(E4M3)
        options = {"skip_softmax_threshold_scale_factor": 1e-30}
    elif variant == "fp16 with fp16 softmax":
        query, key, value = query.half(), key.half(), value.half()
        options = {"use_fp16_softmax": True}
    asked = Problem(query, key, value, [1], [2], options)
    out = poisoned(problem.out_shape, query.dtype if query.dtype.itemsize == 2 else torch.bfloat16, device)
    with pytest.raises(NoKernelError) as caught:
        call(asked, workspace, out=out)
    assert caught.value.selection.row is None
    assert caught.value.selection.decisions
    assert out.isnan().all()
    assert call(problem, workspace)[0].float().mean().item() == pytest.approx(0.73106, abs=2e-3)


def test_fp8_out_of_fp8_query_is_refused(device: torch.device, workspace: torch.Tensor) -> None:
    problem = two_scores(device)
    asked = Problem(problem.query.to(E4M3), problem.key.to(E4M3), problem.value.to(E4M3), [1], [2])
    out = torch.zeros(problem.out_shape, dtype=E4M3, device=device)
    with pytest.raises(CubinRuntimeError, match="out"):
        call(asked, workspace, out=out)
