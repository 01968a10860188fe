"""CUDA graphs: replays that see new lengths and scales, and a first load inside a capture."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.support import (
    HEAD_DIMS,
    TYPES,
    Problem,
    arguments,
    assert_matches,
    assert_replays_follow,
    capture,
    chosen_scheduler,
    expect,
    make_problem,
    make_workspace,
    run,
)

pytestmark = pytest.mark.gpu

REPLAYS = 1000
BATCH = 6
TOTAL_Q, TOTAL_KV = 700, 1500


def random_lengths(rounds: int, total: int, *, seed: int) -> list[list[int]]:
    """Lengths of BATCH sequences per round: at most `total` together, about a quarter of them empty."""
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randint(0, total + 1, (rounds, BATCH), generator=generator).sort(dim=1).values
    lengths = cuts.diff(dim=1, prepend=torch.zeros(rounds, 1, dtype=cuts.dtype))
    lengths[torch.rand(rounds, BATCH, generator=generator) < 0.25] = 0
    return [list(map(int, row)) for row in lengths]


@pytest.mark.parametrize("types", ["bf16", "bf16, skipping", "fp16 softmax"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["dense", "causal"])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_replays_follow_lengths_changed_in_place(
    dims: tuple[int, int], is_causal: bool, types: str, device: torch.device, workspace: torch.Tensor
) -> None:
    """Every replay writes exactly the rows that its lengths cover; a sample is compared in full."""
    q_rounds = random_lengths(REPLAYS, TOTAL_Q, seed=1)
    kv_rounds = random_lengths(REPLAYS, TOTAL_KV, seed=2)
    q_rounds[0], kv_rounds[0] = [0] * BATCH, [0] * BATCH
    q_rounds[1] = [100] * BATCH
    kv_rounds[1] = [0] * BATCH
    kv_lens = torch.tensor(kv_rounds, dtype=torch.int32, device=device)
    q_edges = torch.tensor([[0, *row] for row in q_rounds], device=device).cumsum(1).to(torch.int32)
    kv_edges = torch.tensor([[0, *row] for row in kv_rounds], device=device).cumsum(1).to(torch.int32)

    most = make_problem(
        [TOTAL_Q] + [0] * (BATCH - 1),
        [TOTAL_KV] + [0] * (BATCH - 1),
        device=device,
        dims=dims,
        heads=4,
        kv_heads=2,
        types=TYPES[types],
        is_causal=is_causal,
        attention_sinks=torch.zeros(4, device=device),
    ).with_options(bmm1_scale=torch.tensor([0.1], device=device))
    given = arguments(most, workspace, max_q_len=TOTAL_Q, max_kv_len=TOTAL_KV)
    run(given)
    graph = capture(given)

    rows = torch.arange(TOTAL_Q, device=device)
    all_right = torch.ones((), dtype=torch.bool, device=device)
    for number in range(REPLAYS):
        given["seq_lens"].copy_(kv_lens[number])
        given["cum_seq_lens_q"].copy_(q_edges[number])
        given["cum_seq_lens_kv"].copy_(kv_edges[number])
        most.options["bmm1_scale"].fill_(0.05 + 0.0001 * number)
        given["out"].fill_(float("nan"))
        given["lse"].fill_(float("nan"))
        graph.replay()
        covered = rows < q_edges[number, -1]
        all_right &= (given["out"].isfinite().all(-1).all(-1) == covered).all()
        all_right &= (given["lse"].isnan().all(-1) != covered).all()
        if number % 40 in (0, 1):
            now = Problem(most.query, most.key, most.value, q_rounds[number], kv_rounds[number], most.options)
            assert_matches(now, (given["out"], given["lse"]), expect(now), context=f"in replay {number}")
    assert bool(all_right)


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_replays_of_one_long_sequence(dims: tuple[int, int], device: torch.device) -> None:
    """Blocks draw tiles, or have one each, from replay to replay."""
    problem = make_problem([2500], [2500], device=device, dims=dims, heads=16, kv_heads=4, is_causal=True)
    given = arguments(problem, make_workspace(device))
    assert chosen_scheduler(given) == "persistent"
    assert_replays_follow(problem, given, [([n], [n]) for n in (2500, 1800, 2500, 900, 1, 2400, 2000)])


def test_replays_of_one_graph_in_flight_together(device: torch.device, workspace: torch.Tensor) -> None:
    """Replays queue up without synchronisation, each on the input that the one before left."""
    problem = make_problem([129, 7], [300, 140], device=device, heads=2, kv_heads=2, is_causal=True)
    given = arguments(problem, workspace)
    run(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(given)
        problem.query.copy_(given["out"])
    original = problem.query.clone()
    for _ in range(50):
        graph.replay()
    chained = given["out"].clone()
    problem.query.copy_(original)
    for _ in range(50):
        run(given)
        problem.query.copy_(given["out"])
        torch.cuda.synchronize(device)
    assert torch.equal(given["out"], chained)


FIRST_LOAD = """
import threading
import torch
from tests.gpu.support import arguments, assert_matches, expect, make_problem, make_workspace, run

device = torch.device("cuda", 0)
workspace = make_workspace(device)
problem = make_problem([129, 0, 7], [300, 5, 0], device=device, dims=(192, 128), heads=2, is_causal=True)
given = arguments(problem, workspace)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode="{mode}"):
    run(given)
assert given["out"].isnan().all(), "the capture itself must launch nothing"
for _ in range(3):
    given["out"].fill_(float("nan"))
    graph.replay()
    assert_matches(problem, (given["out"], given["lse"]), expect(problem))
"""


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_first_load_inside_a_capture(mode: str, device: torch.device) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", FIRST_LOAD.format(mode=mode)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
