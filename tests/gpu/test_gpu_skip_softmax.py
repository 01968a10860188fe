"""skip-softmax: which blocks are left out, what that does to the result, and how they are counted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from tests.gpu.support import (
    E4M3,
    HEAD_DIMS,
    MASKS,
    TYPES,
    Problem,
    Results,
    arguments,
    assert_matches,
    assert_same_bits,
    call,
    capture,
    expect,
    make_problem,
    poisoned,
    run,
)

pytestmark = pytest.mark.gpu

CONSUMER_ROWS = 64
KEYS_OF_BLOCK = {(192, 128): 128, (128, 128): 128, (256, 256): 80}
PATTERNS = 8  # granules of tokens have one in turn
LEVELS = (0.0, -4.0, -24.0, -32.0)  # largest logits of blocks, exact in 8 bits
BELOW = 8.0  # where the others lie
# Together with the lengths below no threshold is a difference of two levels, or of two halves of levels.
FACTOR = 1000 * math.exp(-5)
Q_LENS = [300, 0, 129, 63, 1, 513, 5, 300]
KV_LENS = [1000, 63, 777, 129, 300, 1, 0, 4000]
WIDE_MASKS = {**MASKS, "sliding": {"is_causal": True, "window_left": 900}}
HEADS = 4
SKIPPING = ["bf16, skipping", "fp16, skipping", "fp8, skipping", "fp8 to fp16, skipping"]


def skipping(factor: float) -> dict[str, float]:
    return {"skip_softmax_threshold_scale_factor": factor}


def counters(device: torch.device) -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int64, device=device)


class Expected(NamedTuple):
    """What must come out of a problem of levels."""

    out: torch.Tensor
    lse: torch.Tensor
    left_out: int
    granules: int


def levels_problem(
    types: str, dims: tuple[int, int], kv_heads: int, device: torch.device, **options: Any
) -> Problem:
    """Logits with a level for each block and granule, halved in every other row.

    Of every eight keys one has its block's level, not the same in each block: threads share a row by columns.
    """
    lens = Q_LENS, KV_LENS
    problem = make_problem(
        *lens, device=device, dims=dims, heads=HEADS, kv_heads=kv_heads, types=TYPES[types], padding=2
    ).with_options(bmm1_scale=1.0, **skipping(FACTOR), **options)
    generator = torch.Generator().manual_seed(5)
    query, key = torch.zeros(problem.query.shape), torch.zeros(problem.key.shape)
    tokens = granule_tokens(kv_heads)
    for rows in problem.spans():
        local = torch.arange(rows.stop - rows.start)
        query[rows.start + local, :, local // tokens % PATTERNS] = (1.0 - 0.5 * (local % 2))[:, None]
    begin = 0
    for length in problem.kv_lens:
        local = torch.arange(length) // KEYS_OF_BLOCK[dims]
        levels = torch.tensor(LEVELS)[torch.randint(0, 4, (length + 1, PATTERNS), generator=generator)]
        below = BELOW * (torch.arange(length) % 8 != 3 * local % 8)
        key[begin : begin + length, :, :PATTERNS] = (levels[local] - below[:, None])[:, None]
        begin += length
    dtype = problem.query.dtype
    return replace(problem, query=query.to(device, dtype), key=key.to(device, dtype))


def granule_tokens(kv_heads: int) -> int:
    return CONSUMER_ROWS // math.gcd(HEADS // kv_heads, CONSUMER_ROWS)


def granules(problem: Problem, dims: tuple[int, int], kv_heads: int) -> Iterator[tuple[int, slice, slice]]:
    """(sequence, its query rows, all of its key rows) of each granule of tokens."""
    tokens = granule_tokens(kv_heads)
    first_key = 0
    for number, rows in enumerate(problem.spans()):
        keys = slice(first_key, first_key + problem.kv_lens[number])
        for begin in range(rows.start, rows.stop, tokens):
            yield number, slice(begin, min(begin + tokens, rows.stop)), keys
        first_key = keys.stop


def expect_levels(problem: Problem, dims: tuple[int, int], kv_heads: int) -> Expected:
    """The definition, block by block: all heads of a problem of levels agree."""
    out = poisoned(problem.out_shape, torch.float32, problem.device)
    lse = poisoned(problem.out_shape[:2], torch.float32, problem.device)
    size = KEYS_OF_BLOCK[dims]
    starts = [rows.start for rows in problem.spans()]
    left_out = seen = 0
    for number, rows, keys in granules(problem, dims, kv_heads):
        q_len, kv_len = problem.q_lens[number], problem.kv_lens[number]
        if not kv_len:
            out[rows], lse[rows] = 0.0, -math.inf
            continue
        query = problem.query[rows, 0].float()
        logits = query @ problem.key[keys, 0].float().T
        local = torch.arange(rows.start, rows.stop, device=problem.device) - starts[number]
        distance = (local + kv_len - q_len)[:, None] - torch.arange(kv_len, device=problem.device)
        if problem.options.get("is_causal"):
            logits.masked_fill_(distance < 0, -math.inf)
        if problem.options.get("window_left", -1) >= 0:
            logits.masked_fill_(distance > problem.options["window_left"], -math.inf)
        running = logits.new_full((len(logits),), -math.inf)
        threshold = math.log(FACTOR / kv_len)
        for begin in reversed(range(0, kv_len, size)):
            block = logits[:, begin : begin + size]
            peaks = block.amax(1)
            visible = peaks != -math.inf
            if not visible.any():
                continue
            seen += 1
            if bool((~visible | (peaks < running + threshold)).all()):
                left_out += 1
                block.fill_(-math.inf)
            else:
                running = torch.maximum(running, peaks)
        lse[rows] = (torch.logsumexp(logits, 1) / math.log(2.0))[:, None]
        weights = logits.softmax(1).nan_to_num(0.0)
        group = HEADS // kv_heads
        values = problem.value[keys].float().repeat_interleave(group, dim=1)
        out[rows] = torch.einsum("qk,khd->qhd", weights, values)
    return Expected(out, lse, left_out * kv_heads, seen * kv_heads)  # heads that share keys share a tile


@pytest.mark.parametrize("kv_heads", [4, 2, 1], ids=lambda n: f"gqa{HEADS // n}")
@pytest.mark.parametrize("mask", WIDE_MASKS)
@pytest.mark.parametrize("types", SKIPPING)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_exactly_the_negligible_blocks_are_left_out(
    dims: tuple[int, int],
    types: str,
    mask: str,
    kv_heads: int,
    device: torch.device,
    workspace: torch.Tensor,
) -> None:
    problem = levels_problem(types, dims, kv_heads, device, **WIDE_MASKS[mask])
    expected = expect_levels(problem, dims, kv_heads)
    assert 0 < expected.left_out < expected.granules
    counts = counters(device)
    results = call(problem, workspace, skip_softmax_counts=counts)
    assert_matches(problem, results, (expected.out, expected.lse))
    assert counts.tolist() == [expected.left_out, expected.granules]
    assert_same_bits(call(problem, workspace), results)
    call(problem, workspace, skip_softmax_counts=counts, lse=None, return_lse=False)
    assert counts.tolist() == [2 * expected.left_out, 2 * expected.granules]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("types", SKIPPING)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_a_tiny_factor_leaves_nothing_out(
    dims: tuple[int, int], types: str, mask: str, device: torch.device, workspace: torch.Tensor
) -> None:
    problem = make_problem(
        Q_LENS, KV_LENS, device=device, dims=dims, heads=72, kv_heads=72, types=TYPES[types], **MASKS[mask]
    )
    counts = counters(device)
    results = call(problem, workspace, skip_softmax_counts=counts)
    assert counts[0].item() == 0
    assert counts[1].item() > 0
    plain = problem.with_options(skip_softmax_threshold_scale_factor=None)
    if problem.query.dtype != E4M3:  # the plain kernel of 8 bits moves its references later
        assert_same_bits(results, call(plain, workspace))
    assert_matches(problem, results, expect(plain))


def local_problem(device: torch.device, dims: tuple[int, int], tokens: int = 4096) -> Problem:
    """Logits that fall with the distance, and a few heavy keys."""
    problem = make_problem([tokens], [tokens], device=device, dims=dims, heads=2, kv_heads=2, is_causal=True)
    angles = torch.arange(tokens, device=device)[:, None] / tokens * torch.tensor([0.7, 2.0], device=device)
    circle = torch.cat((angles.cos(), angles.sin()), dim=1)[:, None] * math.sqrt(12 * math.sqrt(dims[0]))
    problem.query[..., :4] = circle.bfloat16()
    problem.key[..., :4] = circle.bfloat16()
    problem.key[torch.arange(5, tokens, 997, device=device), :, 4] = 8.0
    problem.query[..., 4] = 8.0
    return problem


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_error_and_blocks_left_out_grow_with_the_factor(
    dims: tuple[int, int], device: torch.device, workspace: torch.Tensor
) -> None:
    problem = local_problem(device, dims)
    exact, _ = expect(problem)
    errors, skipped = [], []
    for factor in (1e-30, 1e-6, 1e-3, 1e-1, 1.0, 10.0, 100.0, 1000.0, 4000.0):
        counts = counters(device)
        out, _ = call(problem, workspace, skip_softmax_counts=counts, **skipping(factor))
        errors.append(float((out.float() - exact).norm() / exact.norm()))
        skipped.append(counts[0].item())
        total = counts[1].item()
    assert errors[0] <= problem.tolerance
    assert skipped[0] == 0
    assert skipped == sorted(skipped)
    assert skipped[-1] > 0.3 * total
    # Rounding hides what is smaller.
    assert all(after >= before - 1e-4 for before, after in itertools.pairwise(errors))
    assert errors[-1] > 2 * errors[0]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_a_threshold_above_one_keeps_what_a_row_sees_first(
    dims: tuple[int, int], mask: str, device: torch.device, workspace: torch.Tensor
) -> None:
    problem = make_problem(
        Q_LENS, KV_LENS, device=device, dims=dims, heads=2, types=TYPES["bf16, skipping"], **MASKS[mask]
    ).with_options(**skipping(1e30))
    exact_lse = expect(problem.with_options(skip_softmax_threshold_scale_factor=None))[1]
    out, lse = call(problem, workspace)
    assert out.isfinite().all()
    assert torch.equal(lse == -math.inf, exact_lse == -math.inf)
    assert (lse <= exact_lse + problem.lse_tolerance).all()


@pytest.mark.parametrize("types", SKIPPING)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_nan_is_not_left_out(
    dims: tuple[int, int], types: str, device: torch.device, workspace: torch.Tensor
) -> None:
    """Not even beside negligible keys."""
    problem = levels_problem(types, dims, HEADS, device, is_causal=False)
    problem.key[3] = math.nan
    out, lse = call(problem, workspace)
    first = next(problem.spans())
    assert out[first].isnan().all()
    assert lse[first].isnan().all()
    assert out[first.stop : problem.covered].isfinite().all()


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_neighbours_decide_nothing(
    dims: tuple[int, int], mask: str, poison: float, device: torch.device, workspace: torch.Tensor
) -> None:
    """Rows of the next sequence lie in a short tile, and stop it from leaving out no block."""
    clean = levels_problem("bf16, skipping", dims, HEADS, device, **MASKS[mask])
    expected: Results = call(clean, workspace)
    spans = list(clean.spans())
    for victim in range(1, len(spans)):
        query = clean.query.clone()
        query[spans[victim]] = poison
        results = call(replace(clean, query=query), workspace)
        for number, rows in enumerate(spans):
            if number != victim:
                assert_same_bits(results, expected, rows)


def test_a_replay_counts_again(device: torch.device, workspace: torch.Tensor) -> None:
    problem = levels_problem("bf16, skipping", (128, 128), HEADS, device, is_causal=True)
    counts = counters(device)
    given = {**arguments(problem, workspace), "skip_softmax_counts": counts}
    run(given)
    once = counts.clone()
    graph = capture(given)
    for _ in range(3):
        graph.replay()
    assert torch.equal(counts, 4 * once)


def test_the_reference_counts_its_own_tiles(device: torch.device, workspace: torch.Tensor) -> None:
    problem = local_problem(device, (128, 128), tokens=1024).with_options(**skipping(1.0))
    counts = counters(device)
    call(problem, workspace, skip_softmax_counts=counts, backend="reference")
    assert counts[1].item() == 2 * 8 * 9 // 2
    assert 0 < counts[0].item() < counts[1].item()
