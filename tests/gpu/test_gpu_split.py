"""Kernels for few query rows: packed heads, keys divided among blocks, parts combined."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import cubin_runtime
from cubin_runtime.launch import launch_tag
from tests.gpu.support import (
    HEAD_DIMS,
    TYPES,
    Guarded,
    arguments,
    assert_matches,
    assert_matches_by,
    assert_replays_follow,
    assert_same_bits,
    assert_streams_share_nothing,
    call,
    capture,
    chosen_scheduler,
    expect,
    make_problem,
    make_workspace,
    run,
    set_lengths,
)

pytestmark = pytest.mark.gpu

# Nothing to divide, a part of one block, many parts, no keys, no queries, more than one tile.
Q_LENS = [1, 0, 3, 17, 5, 2, 64, 9]
KV_LENS = [7, 1000, 63, 2049, 777, 0, 300, 4100]


@pytest.mark.parametrize(
    "heads", [(8, 8), (8, 2), (5, 1), (128, 1), (66, 11)], ids=lambda h: f"{h[0]}over{h[1]}"
)
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "dense"])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_against_the_reference(
    dims: tuple[int, int],
    is_causal: bool,
    heads: tuple[int, int],
    device: torch.device,
    workspace: torch.Tensor,
) -> None:
    for types in TYPES.values():
        problem = make_problem(
            Q_LENS,
            KV_LENS,
            device=device,
            dims=dims,
            heads=heads[0],
            kv_heads=heads[1],
            types=types,
            padding=3,
            is_causal=is_causal,
        ).with_options(bmm1_scale=0.1, attention_sinks=torch.randn(heads[0], device=device))
        assert_matches(problem, call(problem, workspace), expect(problem))


@pytest.mark.parametrize(
    ("dims", "kv_len"), [((192, 128), 2305), ((128, 128), 2305), ((256, 256), 2161)], ids=str
)
def test_a_part_of_hidden_keys_does_not_reach_the_row(
    dims: tuple[int, int], kv_len: int, device: torch.device, workspace: torch.Tensor
) -> None:
    """Of parts of three blocks, the last is one key, which the last row alone sees. Its values are NaN."""
    problem = make_problem([8], [kv_len], device=device, dims=dims, heads=16, kv_heads=2, is_causal=True)
    clean = call(problem, workspace)
    problem.value[-1].fill_(math.nan)
    given = arguments(problem, workspace)
    assert chosen_scheduler(given) == "split"
    assert_same_bits((given["out"], given["lse"]), clean, slice(0, 7))
    assert bool(given["out"][7].isnan().all())


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_one_long_sequence(dims: tuple[int, int], device: torch.device, workspace: torch.Tensor) -> None:
    for q_len, kv_len, heads, kv_heads in [(1, 40_000, 8, 8), (16, 33_333, 64, 8), (128, 9000, 16, 2)]:
        problem = make_problem(
            [q_len], [kv_len], device=device, dims=dims, heads=heads, kv_heads=kv_heads, is_causal=True
        ).with_options(bmm1_scale=torch.tensor([-0.08], device=device), bmm2_scale=0.5)
        assert_matches_by("split", problem, workspace)


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "heads"),
    [
        ([1], [70_000], (1, 1)),  # as many parts as blocks
        ([3, 1, 2, 90], [20_000, 50, 7000, 2049], (10, 2)),  # far from equal; rows of a tile unused
        ([1] * 40, [100, 9000, 0, 3000, 17] * 8, (2, 2)),  # more sequences than lanes
        ([200, 40], [4100, 4100], (6, 2)),  # several tiles, the last one short
        ([1] * 10, [3000] * 10, (8, 8)),  # 160 parts, more than the second launch has blocks
        ([128], [5000], (72, 9)),  # 72 equal tiles, in thirds
        ([1, 300], [30_000, 9000], (40, 40)),  # 160 tiles, of which one head's are cached at a time
        ([1] * 33 + [200], [9000, *[300] * 33], (24, 8)),  # more tiles than blocks, more sequences than lanes
        ([1] * 40 + [300], [700] * 40 + [1900], (24, 8)),  # three heads side by side; too few keys to divide
    ],
    ids=[
        "one row",
        "uneven",
        "many sequences",
        "several tiles",
        "many parts",
        "thirds",
        "groups of heads",
        "many tiles",
        "few keys",
    ],
)
def test_divided_as_the_lengths_ask(
    q_lens: list[int],
    kv_lens: list[int],
    heads: tuple[int, int],
    dims: tuple[int, int],
    device: torch.device,
    workspace: torch.Tensor,
) -> None:
    for is_causal in (True, False):
        problem = make_problem(
            q_lens,
            kv_lens,
            device=device,
            dims=dims,
            heads=heads[0],
            kv_heads=heads[1],
            is_causal=is_causal,
        ).with_options(attention_sinks=torch.randn(heads[0], device=device))
        assert_matches_by("split", problem, workspace)


@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (16, 2)], ids=lambda h: f"{h[0]}over{h[1]}")
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize(
    ("q_lens", "kv_lens"),
    [
        ([1], [9000]),
        ([1, 0, 1, 1, 0, 1], [4100, 300, 0, 20_000, 0, 2500]),
        ([1] * 16, [2100] * 10 + [1100] * 6),  # tiles that nobody divides, with as many kv heads
        ([9], [5000]),
    ],
    ids=["one token", "several", "undivided", "nine tokens"],
)
def test_a_few_tokens(
    q_lens: list[int],
    kv_lens: list[int],
    dims: tuple[int, int],
    heads: tuple[int, int],
    device: torch.device,
    workspace: torch.Tensor,
) -> None:
    for lse in (True, False):
        problem = make_problem(
            q_lens, kv_lens, device=device, dims=dims, heads=heads[0], kv_heads=heads[1], is_causal=True
        ).with_options(attention_sinks=torch.randn(heads[0], device=device), bmm2_scale=0.75)
        given = arguments(problem, workspace, return_lse=lse, **({} if lse else {"lse": None}))
        assert chosen_scheduler(given) == "split"
        exact = expect(problem)
        assert_matches(problem, (given["out"], given["lse"] if lse else exact[1]), exact)


def dirty_workspaces(device: torch.device) -> Iterator[torch.Tensor]:
    """Zeros, ones, random bytes, small integers, and counters that an earlier launch left in the middle."""
    yield make_workspace(device, 0)
    yield make_workspace(device, 0xFF)
    yield make_workspace(device)
    words = make_workspace(device).view(torch.int64)
    for number in (0, 1, 15):
        yield words.fill_(number).view(torch.uint8)
    yield words.copy_(torch.arange(len(words), device=device)).view(torch.uint8)
    for arrived in (0, 1, 7):
        word = launch_tag() << 32 | arrived
        yield words.fill_(word - (1 << 64)).view(torch.uint8)


def test_whatever_the_workspace_holds(device: torch.device) -> None:
    problem = make_problem([1, 3], [20_000, 5000], device=device, heads=8, kv_heads=2, is_causal=True)
    first = call(problem, make_workspace(device))
    assert_matches(problem, first, expect(problem))
    for dirty in dirty_workspaces(device):
        for _ in range(3):
            assert_same_bits(call(problem, dirty), first)


def test_replays_whatever_the_workspace_holds(device: torch.device) -> None:
    problem = make_problem([1, 1, 1], [9000, 9000, 9000], device=device, heads=8, kv_heads=1, is_causal=True)
    held = make_workspace(device)
    given = arguments(problem, held)
    run(given)
    graph = capture(given)
    rounds = [([1, 1, 1], [9000, 1, 300]), ([1, 0, 1], [0, 9000, 8000]), ([0, 0, 1], [0, 0, 9000])]
    for dirty, (q_lens, kv_lens) in zip(dirty_workspaces(device), rounds * 4, strict=False):
        held.copy_(dirty)
        set_lengths(given, q_lens, kv_lens)
        changed = replace(problem, q_lens=q_lens, kv_lens=kv_lens)
        expected = expect(changed)
        for _ in range(2):
            graph.replay()
            assert_matches(changed, (given["out"], given["lse"]), expected)


def test_two_streams_at_once(device: torch.device) -> None:
    problems = [
        make_problem([1, 2], [9000, 3000], device=device, heads=heads, kv_heads=2, is_causal=True)
        for heads in (8, 16)
    ]
    assert_streams_share_nothing(problems, device, rounds=50)


def test_the_next_call_sees_all_rows(device: torch.device, workspace: torch.Tensor) -> None:
    """A call that reads what the one before has written, and may start before that has ended."""
    problem = make_problem([1], [9000], device=device, heads=8, kv_heads=2, is_causal=True)
    for _ in range(20):
        first = call(problem, workspace, enable_pdl=True)
        chained = replace(problem, query=first[0])
        got = call(chained, workspace, enable_pdl=True)
        torch.cuda.synchronize(device)
        assert_same_bits(call(chained, workspace), got)


def test_the_rule_leaves_many_rows_to_the_others(device: torch.device, workspace: torch.Tensor) -> None:
    many = make_problem([300] * 4, [300] * 4, device=device, heads=32, kv_heads=32, is_causal=True)
    assert chosen_scheduler(arguments(many, workspace)) == "persistent"


def test_runs_repeat_bit_for_bit(device: torch.device, workspace: torch.Tensor) -> None:
    """Whichever blocks finish first: parts are combined in an order of their own."""
    problem = make_problem([16], [20_000], device=device, heads=16, kv_heads=2, is_causal=True)
    first = call(problem, workspace)
    for _ in range(30):
        assert_same_bits(call(problem, make_workspace(device)), first)


def test_a_workspace_of_exactly_the_size(device: torch.device) -> None:
    problem = make_problem([4, 1], [9000, 5000], device=device, heads=16, kv_heads=2, is_causal=True)
    size = cubin_runtime.workspace_size(
        device=0,
        head_dims=(128, 128),
        num_heads_q=16,
        num_heads_kv=2,
        batch_size=2,
        total_q=5,
        total_kv=14_000,
        max_q_len=4,
        max_kv_len=9000,
    )
    guarded = Guarded((size,), torch.uint8, device)
    assert_matches(problem, call(problem, guarded.tensor), expect(problem))
    guarded.assert_intact()
    with pytest.raises(ValueError, match=f"needs {size}"):
        call(problem, guarded.tensor[: size - 16])


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_poisoned_neighbour_changes_no_bit(
    poison: float, device: torch.device, workspace: torch.Tensor
) -> None:
    problem = make_problem([4, 3, 5], [3000, 2001, 2500], device=device, heads=8, kv_heads=2, is_causal=True)
    clean = call(problem, workspace)
    middle_q, middle_kv = slice(4, 7), slice(3000, 5001)
    problem.query[middle_q], problem.key[middle_kv], problem.value[middle_kv] = poison, poison, poison
    poisoned = call(problem, workspace)
    for rows in (slice(0, 4), slice(7, 12)):
        assert_same_bits([t[rows] for t in poisoned], [t[rows] for t in clean])


def test_graph_replays_with_other_lengths(device: torch.device) -> None:
    """Lengths between nothing and the maxima: sequences gain and lose parts from replay to replay."""
    problem = make_problem([4, 4, 4], [3000, 3000, 3000], device=device, heads=8, kv_heads=2, is_causal=True)
    given = arguments(problem, make_workspace(device))
    run(given)
    rounds = [([1, 4, 0], [3000, 5, 77]), ([4, 4, 4], [0, 3000, 129]), ([2, 0, 3], [640, 0, 3000])]
    assert_replays_follow(problem, given, rounds)
