"""Every kernel variant against the float32 reference, odd lengths in one ragged batch per variant."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import cubin_runtime
from tests.gpu.support import (
    E4M3,
    HEAD_DIMS,
    MANY_HEADS,
    MASKS,
    TYPES,
    Guarded,
    arguments,
    assert_matches,
    assert_same_bits,
    call,
    chosen_scheduler,
    expect,
    make_problem,
    make_workspace,
)

pytestmark = pytest.mark.gpu

Q_LENS = [63, 0, 1, 129, 300, 5, 777, 129, 2]
KV_LENS = [129, 63, 1, 63, 777, 0, 1000, 129, 300]
HEADS = 8
REPEATED = [
    *("bf16", "fp8", "fp8 many keys", "fp8 values", "sage int8", "sage fp8"),
    *("sage int8 many keys", "sage fp8 many keys"),
    *("bf16, skipping", "fp8, skipping", "fp16 softmax", "spcompress"),
]
# Of these lengths, where few heads would be a matter of kernels for few rows.
ENOUGH_HEADS = {"fp8 many keys": 3 * HEADS}

SCALES: dict[str, Callable[[float, torch.device], float | torch.Tensor]] = {
    "float": lambda value, device: value,
    "tensor": lambda value, device: torch.tensor([value], device=device),
    "0-d tensor": lambda value, device: torch.tensor(value, device=device),
}


def sinks_for(heads: int, device: torch.device) -> torch.Tensor:
    sinks = torch.linspace(-2.0, 4.0, heads, device=device)
    sinks[0] = -math.inf
    return sinks


@pytest.fixture(scope="module")
def dirty_workspaces(device: torch.device) -> list[torch.Tensor]:
    return [make_workspace(device, 0xFF), make_workspace(device)]


@pytest.mark.parametrize("kv_heads", [8, 2, 1], ids=lambda n: f"gqa{HEADS // n}")
@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_variant(
    dims: tuple[int, int],
    types: str,
    mask: str,
    has_sinks: bool,
    kv_heads: int,
    device: torch.device,
    dirty_workspaces: list[torch.Tensor],
) -> None:
    bmm1_scale, bmm2_scale = 1 / math.sqrt(dims[0]), 0.7
    heads = ENOUGH_HEADS.get(types, HEADS)
    problem = make_problem(
        Q_LENS,
        KV_LENS,
        device=device,
        dims=dims,
        heads=heads,
        kv_heads=kv_heads * heads // HEADS,
        types=TYPES[types],
        padding=3,
        attention_sinks=sinks_for(heads, device) if has_sinks else None,
        bmm2_scale=bmm2_scale,
        **MASKS[mask],
    )
    assert problem.has_e4m3_p == (types.endswith("many keys") and mask != "sliding" and dims != (256, 256))
    expected = expect(problem)
    dirt = itertools.cycle(dirty_workspaces)
    for (kind, scale), return_lse in itertools.product(SCALES.items(), [True, False]):
        out = Guarded(problem.out_shape, problem.out_dtype, device)
        lse = Guarded(problem.out_shape[:2], torch.float32, device)
        call(
            problem,
            next(dirt),
            bmm1_scale=scale(bmm1_scale, device),
            bmm2_scale=scale(bmm2_scale, device),
            out=out.tensor,
            lse=lse.tensor if return_lse else None,
            return_lse=return_lse,
        )
        assert_matches(
            problem,
            (out.tensor, lse.tensor),
            expected,
            has_lse=return_lse,
            context=f"with {kind} scales, return_lse={return_lse}",
        )
        out.assert_intact()
        lse.assert_intact()


@pytest.mark.parametrize("seed", range(40))
def test_random_shapes(seed: int, device: torch.device, workspace: torch.Tensor) -> None:
    choose = random.Random(seed)
    batch = choose.randint(1, 24)

    def lengths() -> list[int]:
        edge = [0, 1, 2, 64, 79, 80, 81, 127, 128, 129, 255, 256, 257]
        return [choose.choice([choose.choice(edge), choose.randint(0, 600)]) for _ in range(batch)]

    kv_heads = choose.choice([1, 2, 3])
    mask: dict[str, Any] = {"is_causal": choose.random() < 0.7}
    if mask["is_causal"] and choose.random() < 0.5:
        mask["window_left"] = choose.choice([0, 1, 79, 127, 128, 129, 400])
    types = choose.choice(list(TYPES.values()))
    # A scale of 0 makes all logits equal, and which keys of several equal ones are kept is not defined.
    scales = [0.1, 0.02, -0.1, *([] if "uses_spcompress" in types.options else [0.0])]
    problem = make_problem(
        lengths(),
        lengths(),
        device=device,
        dims=choose.choice(HEAD_DIMS),
        heads=kv_heads * choose.choice([1, 2, 5]),
        kv_heads=kv_heads,
        types=types,
        padding=choose.choice([0, 1, 130]),
        seed=seed,
        **mask,
    ).with_options(bmm1_scale=choose.choice(scales))
    assert_matches(problem, call(problem, workspace), expect(problem))


def test_more_work_than_the_device_holds_at_once(device: torch.device, workspace: torch.Tensor) -> None:
    """Several times as many tiles as there are SMs, of very unequal cost."""
    q_lens = [2000, 1, 1, 700, 128, 0, 1300] + 50 * [17]
    kv_lens = [2000, 4000, 0, 900, 3000, 8, 1300] + 50 * [33]
    for mask in MASKS.values():
        problem = make_problem(q_lens, kv_lens, device=device, dims=(192, 128), heads=16, kv_heads=4, **mask)
        assert_matches(problem, call(problem, workspace), expect(problem))


def test_large_logits(device: torch.device, workspace: torch.Tensor) -> None:
    """Rows whose softmax is all but one-hot, with logits in the hundreds of either sign."""
    for scale in (4.0, -4.0):
        problem = make_problem([200], [333], device=device, heads=4, kv_heads=4, is_causal=True).with_options(
            bmm1_scale=scale
        )
        out, lse = call(problem, workspace)
        exact, exact_lse = expect(problem)
        assert (out.float() - exact).norm() <= 2e-2 * exact.norm()
        torch.testing.assert_close(lse, exact_lse, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    "bounds", [{"max_q_len": 5000, "max_kv_len": 70_000}, {"max_q_len": 1, "max_kv_len": 1}]
)
def test_bounds_that_are_not_the_lengths(
    bounds: dict[str, int], device: torch.device, workspace: torch.Tensor
) -> None:
    """Too high or, against the contract, too low. With few query rows they decide how keys are divided, hence
    the rounding; with many they decide nothing."""
    few = make_problem([129, 300], [300, 140], device=device, heads=2, is_causal=True)
    assert_matches(few, call(few, workspace, **bounds), expect(few))
    many = make_problem(
        [129, 300], [300, 140], device=device, heads=MANY_HEADS, kv_heads=MANY_HEADS, is_causal=True
    )
    assert_same_bits(call(many, workspace, **bounds), call(many, workspace))


def test_results_are_allocated_when_not_given(device: torch.device, workspace: torch.Tensor) -> None:
    for types in (TYPES[name] for name in TYPES if "to fp16" not in name):
        problem = make_problem([129, 7], [300, 140], device=device, heads=2, types=types)
        given = arguments(problem, workspace, out=None, lse=None)
        out, lse = cubin_runtime.trtllm_ragged_attention_deepseek(**given)
        assert out.dtype == types.out
        assert lse.dtype == torch.float32
        assert out.shape == problem.out_shape
        assert lse.shape == problem.out_shape[:2]
        assert_same_bits((out, lse), call(problem, workspace))
        alone = cubin_runtime.trtllm_ragged_attention_deepseek(**{**given, "return_lse": False})
        assert_same_bits((alone,), (out,))


def test_lse_is_written_when_given_though_not_returned(device: torch.device, workspace: torch.Tensor) -> None:
    problem = make_problem([129, 7], [300, 140], device=device)
    assert_same_bits(call(problem, workspace, return_lse=False), call(problem, workspace))


def test_reference_backend_is_the_same_contract(device: torch.device, workspace: torch.Tensor) -> None:
    problem = make_problem([129, 0, 7], [300, 9, 0], device=device, heads=2, padding=2, is_causal=True)
    out, lse = call(problem, workspace, backend="reference")
    exact, exact_lse = expect(problem)
    torch.testing.assert_close(out, exact.to(out.dtype), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(lse, exact_lse, rtol=0, atol=0, equal_nan=True)
    assert_matches(problem, call(problem, workspace), (exact, exact_lse))


@pytest.mark.parametrize("mask", MASKS)
def test_reference_is_exact_on_both_sides(mask: str, device: torch.device) -> None:
    problem = make_problem([129, 0, 7], [300, 9, 2], device=device, heads=2, padding=2, **MASKS[mask])
    host = replace(problem, query=problem.query.cpu(), key=problem.key.cpu(), value=problem.value.cpu())
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # then the reference calculates in float64
    try:
        exact = expect(host)
    finally:
        torch.set_float32_matmul_precision(before)
    for side in (host, problem):
        for result, wanted in zip(expect(side), exact, strict=True):
            torch.testing.assert_close(
                result.cpu(),
                wanted,
                rtol=1e-4,
                atol=1e-5,
                equal_nan=True,
                msg=lambda text, side=side: f"on {side.device}: {text}",
            )


@pytest.mark.parametrize("types", ["fp8", "fp8 values", "sage int8", "sage fp8", "spcompress"])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_long_sums_of_one_sign(
    dims: tuple[int, int], types: str, device: torch.device, workspace: torch.Tensor
) -> None:
    """Where accumulators of few bits lose what they add."""
    problem = make_problem([200], [32768], device=device, dims=dims, heads=2, kv_heads=2, types=TYPES[types])
    one_sign = replace(problem, value=(problem.value.bfloat16() + 1).to(E4M3))
    assert_matches(one_sign, call(one_sign, workspace), expect(one_sign))


@pytest.mark.parametrize(("types", "lse_tolerance"), [("fp8", 2e-3), ("sage int8", 2e-3), ("sage fp8", 1e-2)])
@pytest.mark.parametrize("dims", [(192, 128), (128, 128)], ids=str)
def test_long_sums_of_one_sign_in_a_product_of_8_bits(
    dims: tuple[int, int], types: str, lse_tolerance: float, device: torch.device, workspace: torch.Tensor
) -> None:
    """Its accumulator alone would lose 30 %."""
    problem = make_problem(
        [200], [32768], device=device, dims=dims, heads=MANY_HEADS, kv_heads=2, types=TYPES[types]
    )
    assert problem.has_e4m3_p
    one_sign = replace(problem, value=(problem.value.bfloat16() + 1).to(E4M3))
    (out, lse), (exact, exact_lse) = call(one_sign, workspace), expect(one_sign)
    assert (out.float() - exact).norm() <= 2e-2 * exact.norm()
    torch.testing.assert_close(lse, exact_lse, rtol=0, atol=lse_tolerance)


@pytest.mark.parametrize("types", ["fp8", "fp8 to fp16", "sage int8", "sage fp8"])
@pytest.mark.parametrize("dims", [(192, 128), (128, 128)], ids=str)
def test_windows_over_many_keys(
    dims: tuple[int, int], types: str, device: torch.device, workspace: torch.Tensor
) -> None:
    problem = make_problem(
        [300, 1, 3000],
        [5000, 2500, 3000],
        device=device,
        dims=dims,
        heads=16,
        kv_heads=4,
        types=TYPES[types],
        is_causal=True,
        window_left=2100,
    )
    assert problem.has_e4m3_p
    assert_matches(problem, call(problem, workspace), expect(problem))


@pytest.mark.parametrize("step", [1.0, 9.0, 100.0])
@pytest.mark.parametrize("types", ["fp8", "fp8 many keys", "fp8 values"])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_logits_that_grow_block_after_block(
    dims: tuple[int, int], types: str, step: float, device: torch.device, workspace: torch.Tensor
) -> None:
    """Keys are visited from the last to the first, so no reference lasts; the largest step overflows p."""
    blocks, keys, in_key = 8, 128, 16
    problem = make_problem(
        [300], [blocks * keys], device=device, dims=dims, heads=MANY_HEADS, kv_heads=2, types=TYPES[types]
    )
    growth = torch.arange(blocks, 0, -1, device=device).repeat_interleave(keys)
    problem.key[..., 0] = (in_key * growth)[:, None].to(problem.key.dtype)
    problem.query[..., 0] = step * math.sqrt(dims[0]) / in_key
    (out, lse), (exact, exact_lse) = call(problem, workspace), expect(problem)
    # Products of 8 bits cut each of their terms to about 13 bits of the largest, here all of the logit.
    rounding = 0.0 if types == "fp8 values" else blocks * step * 2**-9
    assert out.isfinite().all()
    if rounding < 1:  # else nothing is left of the other terms
        assert (out.float() - exact).norm() <= (problem.tolerance + rounding) * exact.norm()
    torch.testing.assert_close(lse, exact_lse, rtol=1e-6, atol=problem.lse_tolerance + 2 * rounding)


@pytest.mark.parametrize("types", ["bf16", "fp8", "fp8 many keys"])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_many_keys_of_little_weight_are_not_lost(
    dims: tuple[int, int], types: str, device: torch.device, workspace: torch.Tensor
) -> None:
    """They meet references of keys that weigh e^5 as much, in numerators as in row sums."""
    heavy, keys, in_query = 1024, 65536, 8
    problem = make_problem([300], [keys], device=device, dims=dims, heads=MANY_HEADS, types=TYPES[types])
    problem.query.zero_()
    problem.key.zero_()
    problem.value.fill_(1)
    problem.query[..., 0] = in_query
    problem.key[:-heavy, :, 0] = -5 * math.sqrt(dims[0]) / in_query
    out, _ = call(problem, workspace)
    torch.testing.assert_close(out.float(), torch.ones_like(out, dtype=torch.float32), rtol=0, atol=2e-2)


@pytest.mark.parametrize("mask", [{}, {"is_causal": True}, {"is_causal": True, "window_left": 1700}], ids=str)
@pytest.mark.parametrize("types", ["bf16", "fp8", "fp8 many keys"])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_rows_of_a_tile_do_not_move_each_other(
    dims: tuple[int, int], types: str, mask: dict[str, Any], device: torch.device, workspace: torch.Tensor
) -> None:
    """Some keep their references, outgrow them, overflow, or are NaN: side by side as alone."""
    nats_above = torch.tensor([0.0, 12.0, 128.0, 224.0, math.nan], device=device)
    rows, keys, in_key = 300, 1900, 8
    kinds = torch.arange(rows, device=device) * 7 % len(nats_above)

    def results(nats: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        problem = make_problem(
            [rows], [keys], device=device, dims=dims, heads=MANY_HEADS, kv_heads=2, types=TYPES[types], **mask
        )
        problem.key[..., 0] = 0
        problem.key[400:700, :, 0] = in_key
        problem.query[..., 0] = (nats * math.sqrt(dims[0]) / in_key)[:, None].to(problem.query.dtype)
        return call(problem, workspace)

    mixed = results(nats_above[kinds])
    for kind, nats in enumerate(nats_above):
        if nats.isnan():
            assert mixed[0][kinds == kind].isnan().all()
        else:
            assert mixed[0][kinds == kind].isfinite().all()
            assert_same_bits(mixed, results(nats.expand(rows)), rows=kinds == kind)


@pytest.mark.parametrize("types", REPEATED)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_runs_repeat_bit_for_bit(
    dims: tuple[int, int], types: str, device: torch.device, workspace: torch.Tensor
) -> None:
    for mask in MASKS.values():
        problem = make_problem(
            Q_LENS,
            KV_LENS,
            device=device,
            dims=dims,
            heads=ENOUGH_HEADS.get(types, HEADS),
            kv_heads=2,
            types=TYPES[types],
            **mask,
        )
        first = call(problem, workspace)
        for _ in range(20):
            assert_same_bits(call(problem, workspace), first)


@pytest.mark.parametrize("types", REPEATED)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_short_tiles_behind_each_other_repeat(
    dims: tuple[int, int], types: str, device: torch.device, workspace: torch.Tensor
) -> None:
    """Tiles of one key block, every other one of a single row.

    Here the next tile's Q lands soonest after a tile's own was read, while one consumer stores rows and the
    other one has none: what is given back before it has been read shows in a few launches of a hundred.
    """
    problem = make_problem(
        [129] * 32,
        [63] * 32,
        device=device,
        dims=dims,
        heads=MANY_HEADS,
        kv_heads=MANY_HEADS,
        types=TYPES[types],
        is_causal=False,
    )
    first = call(problem, workspace)
    assert_matches(problem, first, expect(problem))
    for _ in range(300):
        assert_same_bits(call(problem, workspace), first)


@pytest.mark.parametrize("types", ["bf16", "fp16", "fp16 softmax"])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "dense"])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_rows_of_two_tiles_are_those_of_one(
    dims: tuple[int, int],
    is_causal: bool,
    types: str,
    device: torch.device,
    workspace: torch.Tensor,
) -> None:
    """Where keys are many, a last tile of few rows gets some of the one before. Their bits stay the same."""
    keys = 2500
    whole = make_problem(
        [384],
        [keys],
        device=device,
        dims=dims,
        heads=128,
        kv_heads=128,
        types=TYPES[types],
        is_causal=is_causal,
    )
    aligned = call(whole, workspace)
    assert_matches(whole, aligned, expect(whole))
    for rows in (129, 160, 192, 193, 257, 320):
        last = replace(whole, q_lens=[rows], query=whole.query[-rows:].clone())
        given = arguments(last, workspace)
        assert chosen_scheduler(given) == "persistent"
        for _ in range(3):
            assert_same_bits(call(last, workspace), [tensor[-rows:] for tensor in aligned])


@pytest.mark.parametrize("types", REPEATED)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_a_batch_is_its_sequences(
    dims: tuple[int, int], types: str, device: torch.device, workspace: torch.Tensor
) -> None:
    """No sequence's bits depend on its company, where no kernel divides the keys."""
    heads = 2 * MANY_HEADS  # so many that one row of each is not few: kernels for few rows round otherwise
    for mask in MASKS.values():
        problem = make_problem(
            Q_LENS,
            KV_LENS,
            device=device,
            dims=dims,
            heads=heads,
            kv_heads=heads,
            types=TYPES[types],
            **mask,
        )
        out, lse = call(problem, workspace)
        for number, rows in enumerate(problem.spans()):
            if problem.q_lens[number]:
                assert_same_bits((out[rows], lse[rows]), call(problem.alone(number), workspace))
