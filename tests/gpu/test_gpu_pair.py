"""Kernels for few query rows over few keys: two consumers of a block divide the keys of a tile."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.gpu.support import (
    HEAD_DIMS,
    MASKS,
    TYPES,
    arguments,
    assert_matches_by,
    assert_replays_follow,
    assert_same_bits,
    call,
    chosen_scheduler,
    make_problem,
    make_workspace,
    surrounded,
)

pytestmark = pytest.mark.gpu

SIXTEEN_BITS = ["bf16", "fp16"]

# One block, which one consumer has alone; one block more for one than for the other; as many for both. No
# queries, no keys, rows that see none.
Q_LENS = [1, 0, 5, 63, 64, 65, 130, 40, 200]
KV_LENS = [1, 90, 0, 64, 65, 129, 1000, 7, 200]


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (5, 1), (11, 1)], ids=lambda h: f"{h[0]}over{h[1]}")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("types", SIXTEEN_BITS)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_against_the_reference(
    dims: tuple[int, int],
    types: str,
    mask: str,
    heads: tuple[int, int],
    device: torch.device,
    workspace: torch.Tensor,
) -> None:
    for scale in (0.1, -0.1, 0.0):
        problem = make_problem(
            Q_LENS,
            KV_LENS,
            device=device,
            dims=dims,
            heads=heads[0],
            kv_heads=heads[1],
            types=TYPES[types],
            padding=3,
            **MASKS[mask],
        ).with_options(bmm1_scale=scale, attention_sinks=torch.randn(heads[0], device=device))
        assert_matches_by("pair", problem, workspace)


@pytest.mark.parametrize("kv_len", [63, 64, 65, 128, 129, 2048])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_one_row(dims: tuple[int, int], kv_len: int, device: torch.device, workspace: torch.Tensor) -> None:
    problem = make_problem([1], [kv_len], device=device, dims=dims, heads=16, kv_heads=2, is_causal=True)
    assert_matches_by("pair", problem, workspace)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("padding", [0, 1, 200])
@pytest.mark.parametrize("kv_len", [1, 15, 16, 17, 63, 64, 65, 100])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_what_lies_behind_the_keys(
    dims: tuple[int, int],
    mask: str,
    kv_len: int,
    padding: int,
    poison: float,
    device: torch.device,
    workspace: torch.Tensor,
) -> None:
    """Another sequence, tokens of nobody or the end of the tensors: none of it reaches a product."""
    clean = make_problem(
        [3, 2], [kv_len, kv_len], device=device, dims=dims, heads=4, padding=padding, **MASKS[mask]
    )
    assert_matches_by("pair", clean, workspace)
    expected = call(clean, workspace)
    for end in (kv_len, 2 * kv_len):
        key, value = surrounded(clean.key), surrounded(clean.value)
        key[end:] = value[end:] = poison
        results = call(replace(clean, key=key, value=value), workspace)
        assert_same_bits(results, expected, slice(0, 3 if end == kv_len else 5))


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_maxima_far_apart(dims: tuple[int, int], device: torch.device, workspace: torch.Tensor) -> None:
    """Keys of one consumer outweigh those of the other by more than a float has powers of two."""
    for loud in (slice(0, 64), slice(192, 256)):
        problem = make_problem([64], [256], device=device, dims=dims, heads=4, kv_heads=4)
        problem.query.abs_()
        problem.key.abs_().neg_()
        problem.key[loud].neg_()
        problem = problem.with_options(bmm1_scale=3.0)
        assert_matches_by("pair", problem, workspace)


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_several_tiles_in_a_block(
    dims: tuple[int, int], device: torch.device, workspace: torch.Tensor
) -> None:
    """Whoever says that queries are shorter than they are gets the same results."""
    problem = make_problem([3000, 2000], [500, 700], device=device, dims=dims, heads=4, kv_heads=4)
    assert_matches_by("pair", problem, workspace, max_q_len=1)


@pytest.mark.parametrize("lens", [(640, 640), (600, 790), (1029, 1000)], ids=str)
@pytest.mark.parametrize("types", SIXTEEN_BITS)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_one_sequence_with_two_tiles_in_a_block(
    dims: tuple[int, int], types: str, lens: tuple[int, int], device: torch.device, workspace: torch.Tensor
) -> None:
    problem = make_problem(
        [lens[0]],
        [lens[1]],
        device=device,
        dims=dims,
        heads=15,
        kv_heads=15,
        types=TYPES[types],
        padding=3,
        is_causal=True,
    )
    assert_matches_by("pair", problem, workspace)


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_runs_repeat_bit_for_bit(
    dims: tuple[int, int], device: torch.device, workspace: torch.Tensor
) -> None:
    problem = make_problem([500], [700], device=device, dims=dims, heads=8, kv_heads=8, is_causal=True)
    given = arguments(problem, workspace)
    assert chosen_scheduler(given) == "pair"
    for _ in range(30):
        assert_same_bits(call(problem, make_workspace(device)), (given["out"], given["lse"]))


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_graph_replays_with_other_lengths(dims: tuple[int, int], device: torch.device) -> None:
    """Consumers gain and lose their blocks from replay to replay."""
    lens = [300] * 3, [500] * 3
    problem = make_problem(*lens, device=device, dims=dims, heads=8, kv_heads=8, is_causal=True)
    given = arguments(problem, make_workspace(device))
    assert chosen_scheduler(given) == "pair"
    rounds = [([1, 300, 0], [500, 5, 77]), ([300, 300, 300], [0, 64, 65]), ([2, 0, 65], [64, 0, 500])]
    assert_replays_follow(problem, given, rounds)


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_graph_replays_of_one_sequence(dims: tuple[int, int], device: torch.device) -> None:
    """Blocks have one tile or two or none from replay to replay."""
    problem = make_problem([1000], [1000], device=device, dims=dims, heads=16, kv_heads=16, is_causal=True)
    given = arguments(problem, make_workspace(device))
    assert chosen_scheduler(given) == "pair"
    assert_replays_follow(
        problem, given, [([n], [kv]) for n, kv in [(1000, 900), (500, 1000), (0, 7), (540, 540)]]
    )
