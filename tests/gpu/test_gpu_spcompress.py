"""spcompress: which keys of a tile count, where the choice is exact and where rounding has a say in it."""

from __future__ import annotations

import math
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
    assert_matches,
    call,
    expect,
    make_problem,
)

pytestmark = pytest.mark.gpu

OUTS = ["spcompress", "spcompress to fp16"]
TILE = 128
# Windows that leave no tile interior, one at most, and several.
WINDOWS = [254, 255, 400, 900]
ALL_MASKS: dict[str, dict[str, Any]] = {
    **{name: mask for name, mask in MASKS.items() if name != "sliding"},
    **{f"window {left}": {"is_causal": True, "window_left": left} for left in WINDOWS},
}


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("mask", ALL_MASKS)
@pytest.mark.parametrize("types", OUTS)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_lengths_around_tiles(
    dims: tuple[int, int],
    types: str,
    mask: str,
    kv_heads: int,
    device: torch.device,
    workspace: torch.Tensor,
) -> None:
    q_lens = [1000, 0, 1, 63, 128, 129, 256, 1, 257, 64, 385, 128]
    kv_lens = [1000, 128, 256, 1000, 128, 129, 256, 1025, 0, 1151, 384, 1]
    problem = make_problem(
        q_lens,
        kv_lens,
        device=device,
        dims=dims,
        heads=4,
        kv_heads=kv_heads,
        types=TYPES[types],
        padding=5,
        **ALL_MASKS[mask],
    )
    assert_matches(problem, call(problem, workspace), expect(problem))


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_other_choices_would_be_seen(
    dims: tuple[int, int], device: torch.device, workspace: torch.Tensor
) -> None:
    """The result is far from that of keeping all keys, and of groups that begin one key later."""
    problem = make_problem([512], [1024], device=device, dims=dims, heads=2, types=TYPES["spcompress"])
    out, _ = call(problem, workspace)
    for wrong in wrong_results(problem):
        assert (out.float() - wrong).norm() > 20 * problem.tolerance * wrong.norm()


@pytest.mark.parametrize("step", [4.0, 12.0])
@pytest.mark.parametrize("mask", ["dense", "causal"])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_logits_that_grow_tile_after_tile(
    dims: tuple[int, int], mask: str, step: float, device: torch.device, workspace: torch.Tensor
) -> None:
    """Keys are visited from the last to the first, so no reference lasts. All sums are exact."""
    tiles = 8
    problem = make_problem(
        [300],
        [tiles * TILE + 3],
        device=device,
        dims=dims,
        heads=4,
        kv_heads=2,
        types=TYPES["spcompress"],
        **MASKS[mask],
    )
    growth = torch.arange(tiles + 1, 0, -1, device=device).repeat_interleave(TILE)[: tiles * TILE + 3]
    problem.key[..., 0] = (12.0 * growth)[:, None].to(E4M3)
    problem.query[..., 0] = step
    assert_matches(problem, call(problem, workspace), expect(problem))


@pytest.mark.parametrize("scale", [-1.0, 40.0])
def test_scales(scale: float, device: torch.device, workspace: torch.Tensor) -> None:
    """The largest logits of a negative scale are those of the smallest products."""
    problem = make_problem(
        [300], [900], device=device, heads=2, types=TYPES["spcompress"], is_causal=True
    ).with_options(bmm1_scale=scale / math.sqrt(128))
    assert_matches(problem, call(problem, workspace), expect(problem))


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_random_logits(dims: tuple[int, int], device: torch.device, workspace: torch.Tensor) -> None:
    """Within what the rounding of Q K explains, and what wrong kernels are not."""
    problem = uneven_problem(dims, device)
    exact, _ = expect(problem)
    out, _ = call(problem, workspace)
    limit = problem.tolerance * exact.norm() + rounding_of_choice(problem)
    assert (out.float() - exact).norm() <= limit
    for wrong in wrong_results(problem):
        assert (wrong - exact).norm() > 3 * limit  # so that no rounding makes up for it


def wrong_results(problem: Problem) -> list[torch.Tensor]:
    """Without pruning, and with groups that begin one key later. The problem is dense, one sequence."""
    everything, _ = expect(problem.with_options(uses_spcompress=False))

    def rolled(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(torch.uint8).roll(1, 0).view(tensor.dtype)

    shifted, _ = expect(replace(problem, key=rolled(problem.key), value=rolled(problem.value)))
    return [everything, shifted]


def uneven_problem(dims: tuple[int, int], device: torch.device) -> Problem:
    """One head, whole tiles, and logits whose rounding is known to be small: of terms of similar size and
    random sign, all but the first 32 zero."""
    problem = make_problem([128], [512], device=device, dims=dims, types=TYPES["fp8"]).with_options(
        uses_spcompress=True, bmm1_scale=0.5 / math.sqrt(32)
    )

    def uneven(tensor: torch.Tensor) -> torch.Tensor:
        sizes = torch.rand(tensor.shape, generator=generator, device=device) + 1
        return (sizes * tensor.float().sign()).to(E4M3)

    generator = torch.Generator(device).manual_seed(3)
    query = uneven(problem.query)
    query[..., 32:] = 0
    return replace(problem, query=query, key=uneven(problem.key))


class Logits(NamedTuple):
    """Of one head, [rows, keys]: exact, and how far a product of e4m3 may be off."""

    exact: torch.Tensor
    error: torch.Tensor


def logits_of(problem: Problem) -> Logits:
    """A product takes 32 elements at a time. It aligns them and what it adds to by the largest of these 33
    terms, and keeps 13 bits below that one's leading bit: each that is not zero may lose a unit."""
    query, key = problem.query[:, 0].float(), problem.key[:, 0].float()
    total = query.new_zeros(query.shape[0], key.shape[0])
    error = torch.zeros_like(total)
    for q, k in zip(query.split(32, 1), key.split(32, 1), strict=True):
        terms = q[:, None] * k[None]
        largest = torch.maximum(terms.abs().amax(-1), total.abs() + error)
        error += ((terms != 0).sum(-1) + 1) * 2.0 ** (largest.log2().floor() - 13)
        total += terms.sum(-1)
    scale = problem.options["bmm1_scale"]
    return Logits(total * scale, error * scale)


def rounding_of_choice(problem: Problem) -> torch.Tensor:
    """Norm of the most that out may change where rounding decides which of a group's keys are kept.

    A kept key and one that is left out may change places where they are closer than their errors. What that
    changes in the denominator is less than the tolerance covers.
    """
    logits, error = logits_of(problem)
    rows, keys = logits.shape
    fours, errors = (tensor.view(rows, keys // 4, 4) for tensor in (logits, error))
    values = problem.value[:, 0].float().view(keys // 4, 4, -1)
    ordered, order = fours.sort(-1, descending=True)
    errors = errors.gather(-1, order)
    total = ordered[..., :2].exp().sum((-1, -2))
    change = torch.zeros_like(total)
    groups = torch.arange(keys // 4, device=logits.device)
    for kept in (0, 1):
        for left_out in (2, 3):
            close = ordered[..., kept] - ordered[..., left_out] <= errors[..., kept] + errors[..., left_out]
            apart = values[groups, order[..., kept]] - values[groups, order[..., left_out]]
            change += (close * ordered[..., kept].exp() * apart.norm(dim=-1)).sum(-1)
    return (change / total).norm()
