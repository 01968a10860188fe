"""Sage attention: scales of every block size at their ragged columns, and the quantiser's results."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from cubin_runtime import trtllm_sage_attention_quantize
from cubin_runtime.many_keys import MANY_KEYS
from cubin_runtime.quantize import HEAD_DIMS as QUANTIZER_DIMS
from cubin_runtime.reference import sage_quantize_reference
from cubin_runtime.request import SAGE_TOKENS
from tests.gpu.support import (
    E4M3,
    HEAD_DIMS,
    MANY_HEADS,
    MASKS,
    TYPES,
    Problem,
    Types,
    arguments,
    assert_matches,
    assert_same_bits,
    call,
    capture,
    edges,
    expect,
    make_problem,
    make_workspace,
    run,
    sage_columns,
    set_lengths,
)

pytestmark = pytest.mark.gpu

DTYPES = {"int8": torch.int8, "fp8": E4M3}
SAGE_TYPES = [name for name, types in TYPES.items() if types.sage_blocks]
Q_LENS = [1, 63, 0, 129, 3, 17, 300]
KV_LENS = [129, 63, 5, 1, 0, 15, 777]


def with_scales(problem: Problem, index: int, scales: torch.Tensor) -> Problem:
    """Other scales of q (0), k (1) or v (3)."""
    given = list(problem.options["sage_attn_sfs"])
    given[index] = scales
    return problem.with_options(sage_attn_sfs=tuple(given))


@pytest.mark.parametrize("max_kv_len", [0, MANY_KEYS], ids=["few", "many"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("query", DTYPES)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_every_block_size(
    dims: tuple[int, int],
    query: str,
    mask: str,
    max_kv_len: int,
    device: torch.device,
    workspace: torch.Tensor,
) -> None:
    """Tokens and columns behind the last sequence hold NaN."""
    for blocks, (heads, kv_heads) in zip(
        itertools.product(SAGE_TOKENS, SAGE_TOKENS), itertools.cycle([(4, 4), (6, 2), (80, 16), (64, 1)])
    ):
        problem = make_problem(
            Q_LENS,
            KV_LENS,
            device=device,
            dims=dims,
            heads=heads,
            kv_heads=kv_heads,
            types=Types(DTYPES[query], E4M3, torch.bfloat16, sage_blocks=blocks, max_kv_len=max_kv_len),
            padding=21,
            attention_sinks=torch.linspace(-2, 4, heads, device=device),
            bmm2_scale=0.7,
            **MASKS[mask],
        )
        problem.value[problem.covered_keys :] = math.nan
        if query == "fp8":
            problem.query[problem.covered :], problem.key[problem.covered_keys :] = math.nan, math.nan
        assert_matches(
            problem, call(problem, workspace), expect(problem), context=f"with blocks {blocks}, {heads} heads"
        )


@pytest.mark.parametrize("types", SAGE_TYPES)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_many_sequences(
    dims: tuple[int, int], types: str, device: torch.device, workspace: torch.Tensor
) -> None:
    """More than lanes of a warp, and so few that they are sorted by their keys."""
    for batch in (20, 100):
        lens = [(37 * n) % 90 for n in range(batch)]
        problem = make_problem(
            lens,
            lens[::-1],
            device=device,
            dims=dims,
            heads=4,
            kv_heads=2,
            types=TYPES[types],
            is_causal=True,
        )
        assert_matches(problem, call(problem, workspace), expect(problem))


@pytest.mark.parametrize("scale", [-0.08, 0.0])
@pytest.mark.parametrize("kind", ["float", "tensor"])
@pytest.mark.parametrize("types", SAGE_TYPES)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_scales_that_no_quantiser_makes(
    dims: tuple[int, int],
    types: str,
    kind: str,
    scale: float,
    device: torch.device,
    workspace: torch.Tensor,
) -> None:
    """Zero and of either sign, those of queries and keys alike; -128 among the numbers."""
    problem = make_problem(
        [200, 3],
        [300, 290],
        device=device,
        dims=dims,
        heads=4,
        kv_heads=2,
        types=TYPES[types],
        is_causal=True,
    )
    q, k, _, _ = problem.options["sage_attn_sfs"]
    q[:, ::5], k[:, ::3] = 0, 0
    if TYPES[types].query == torch.int8:
        problem.query[::7], problem.key[::11] = -128, -128
    bmm1_scale = torch.tensor([scale], device=device) if kind == "tensor" else scale
    problem = problem.with_options(bmm1_scale=bmm1_scale)
    assert_matches(problem, call(problem, workspace), expect(problem))


@pytest.mark.parametrize("step", [1.0, 9.0, 100.0])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("types", SAGE_TYPES)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_logits_that_grow_block_after_block(
    dims: tuple[int, int],
    types: str,
    sign: int,
    step: float,
    device: torch.device,
    workspace: torch.Tensor,
) -> None:
    """By their keys' scales. Keys are visited from the last to the first, so no reference lasts."""
    tokens = 1024
    problem = make_problem(
        [300], [tokens], device=device, dims=dims, heads=MANY_HEADS, kv_heads=2, types=TYPES[types]
    )
    problem.query.fill_(1)
    problem.key.fill_(1)
    q, k, _, _ = problem.options["sage_attn_sfs"]
    _, block, _, _ = problem.options["num_elts_per_sage_attn_blk"]
    first_token = torch.arange(0, tokens, block, device=device)
    q.fill_(sign)
    k.copy_(sign * step * (tokens - first_token) / 128)
    problem = problem.with_options(bmm1_scale=1 / dims[0])
    (out, lse), (exact, exact_lse) = call(problem, workspace), expect(problem)
    # All rows have the same probabilities: what is rounded to 8 bits does not average over them.
    tolerance = (1.5 if problem.has_e4m3_p else 1) * problem.tolerance
    assert (out.float() - exact).norm() <= tolerance * exact.norm()
    torch.testing.assert_close(lse, exact_lse, rtol=1e-6, atol=problem.lse_tolerance)


@pytest.mark.parametrize(
    ("keys", "mask"),
    [(1904, {}), (1904, {"is_causal": True}), (2704, {"is_causal": True, "window_left": 2100})],
    ids=str,
)
@pytest.mark.parametrize("types", SAGE_TYPES)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_rows_of_a_tile_do_not_move_each_other(
    dims: tuple[int, int],
    types: str,
    keys: int,
    mask: dict[str, Any],
    device: torch.device,
    workspace: torch.Tensor,
) -> None:
    """Some keep their references, outgrow them, or overflow: side by side as alone."""
    nats_above = torch.tensor([0.0, 12.0, 128.0, 224.0], device=device)
    rows, large = 300, slice(keys - 1504, keys - 1200)
    in_query, in_key = 112.0, 100.0  # at most
    kinds = torch.arange(rows, device=device) * 7 % len(nats_above)

    def results(nats: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        problem = make_problem(
            [rows], [keys], device=device, dims=dims, heads=MANY_HEADS, kv_heads=2, types=TYPES[types], **mask
        )
        problem.query[..., 0] = (nats / nats_above.max() * in_query)[:, None].to(problem.query.dtype)
        problem.key[..., 0] = 0
        problem.key[large] = 0
        problem.key[large, :, 0] = in_key
        q_scales, k_scales, _, _ = problem.options["sage_attn_sfs"]
        block = problem.options["num_elts_per_sage_attn_blk"][1]
        for scales in (q_scales, k_scales):
            scales.fill_(scales.abs().mean())
        k_scales[:, large.start // block : large.stop // block] = (
            nats_above.max() * math.sqrt(dims[0]) / (in_query * in_key * q_scales[0, 0])
        )
        return call(problem, workspace)

    mixed = results(nats_above[kinds])
    assert mixed[0].isfinite().all()
    for kind, nats in enumerate(nats_above):
        assert_same_bits(mixed, results(nats.expand(rows)), rows=kinds == kind)


@pytest.mark.parametrize("heads", [4, MANY_HEADS])
@pytest.mark.parametrize("types", SAGE_TYPES)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_scales_of_one_sequence_stay_there(
    dims: tuple[int, int], types: str, heads: int, device: torch.device, workspace: torch.Tensor
) -> None:
    """NaN among them poisons the rows that use it, and no others by a bit."""
    lens = [129, 40, 130, 0, 61]
    clean = make_problem(
        lens, lens, device=device, dims=dims, heads=heads, kv_heads=2, types=TYPES[types], is_causal=True
    )
    expected = call(clean, workspace)
    spans = list(clean.spans())
    for index, victim in itertools.product((0, 1), (0, 1, 2)):
        scales = clean.options["sage_attn_sfs"][index].clone()
        block = clean.options["num_elts_per_sage_attn_blk"][index]
        scales[:, sage_columns(lens, block)[victim]] = math.nan
        results = call(with_scales(clean, index, scales), workspace)
        assert results[0][spans[victim]].isnan().all()
        for number, rows in enumerate(spans):
            if number != victim:
                assert_same_bits(results, expected, rows)


@pytest.mark.parametrize("types", SAGE_TYPES)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_rows_without_keys(
    dims: tuple[int, int], types: str, device: torch.device, workspace: torch.Tensor
) -> None:
    """Known from the lengths on the device alone, with sinks and tensor scales."""
    problem = make_problem(
        [3, 2, 0, 100], [4, 0, 5, 7], device=device, dims=dims, types=TYPES[types], padding=2, is_causal=True
    ).with_options(
        attention_sinks=torch.ones(1, device=device),
        bmm1_scale=torch.tensor([0.1], device=device),
        bmm2_scale=torch.tensor([2.0], device=device),
    )
    out, lse = call(problem, workspace)
    assert (out[3:98] == 0).all()
    assert (lse[3:98] == -math.inf).all()
    assert_matches(problem, (out, lse), expect(problem))


@pytest.mark.parametrize("types", SAGE_TYPES)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_replays_follow_lengths_and_scales(
    dims: tuple[int, int], types: str, device: torch.device, workspace: torch.Tensor
) -> None:
    """New lengths move every column."""
    most = make_problem(
        [600, 0, 0],
        [900, 0, 0],
        device=device,
        dims=dims,
        heads=4,
        kv_heads=2,
        types=TYPES[types],
        is_causal=True,
    )
    for scales in most.options["sage_attn_sfs"][:2]:
        scales.nan_to_num_(nan=float(scales[0, 0]))
    given = arguments(most, workspace, max_q_len=600)
    run(given)
    graph = capture(given)
    for q_lens, kv_lens in (
        ([0, 0, 0], [0, 0, 0]),
        ([1, 599, 0], [300, 600, 0]),
        ([200, 7, 393], [15, 17, 868]),
        ([0, 33, 5], [0, 0, 900]),
    ):
        set_lengths(given, q_lens, kv_lens)
        for scales in (*most.options["sage_attn_sfs"][:2], most.options["sage_attn_sfs"][3]):
            scales.mul_(1.1)
        graph.replay()
        now = replace(most, q_lens=q_lens, kv_lens=kv_lens)
        assert_matches(now, (given["out"], given["lse"]), expect(now), context=f"with {q_lens} x {kv_lens}")


def test_offsets_past_two_to_the_32(device: torch.device, workspace: torch.Tensor) -> None:
    """More than 2^32 elements lie between two sequences, of others without keys or queries."""
    heads, dims = 128, (128, 128)
    gap = (1 << 32) // (heads * dims[0]) + 1000
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    if free < 40 << 30:
        pytest.skip(f"needs 40 GiB of free device memory; there are {free >> 30}")
    types = Types(torch.int8, E4M3, torch.bfloat16, sage_blocks=(1, 1))
    first, last = (
        make_problem(
            [q], [kv], device=device, dims=dims, heads=heads, kv_heads=heads, types=types, is_causal=True
        )
        for q, kv in ((3, 7), (140, 200))
    )

    def spread(head: torch.Tensor, tail: torch.Tensor, dim: int = 0, between: int = gap) -> torch.Tensor:
        shape = list(head.shape)
        shape[dim] += between + tail.shape[dim]
        tensor = head.new_empty(shape)
        tensor.narrow(dim, 0, head.shape[dim]).copy_(head)
        tensor.narrow(dim, shape[dim] - tail.shape[dim], tail.shape[dim]).copy_(tail)
        return tensor

    (q, k, _, _), (last_q, last_k, _, v) = (p.options["sage_attn_sfs"] for p in (first, last))
    first = with_scales(first, 3, v)
    scales = (spread(q, last_q, 1, gap + 3), spread(k, last_k, 1, gap + 3), None, v)
    problem = Problem(
        spread(first.query, last.query),
        spread(first.key, last.key),
        spread(first.value, last.value),
        [3, gap, 0, 140],
        [7, 0, gap, 200],
        {**first.options, "sage_attn_sfs": scales},
    )
    out = torch.empty(problem.out_shape, dtype=torch.bfloat16, device=device)
    out, lse = call(problem, workspace, out=out)
    for rows, alone in ((slice(3), first), (slice(-140, None), last)):
        assert_same_bits((out[rows], lse[rows]), call(alone, workspace, max_kv_len=problem.max_kv_len))
    assert not out[3:-140].any()


def test_a_dirty_workspace_changes_nothing(device: torch.device) -> None:
    for types, dims in itertools.product(SAGE_TYPES, HEAD_DIMS):
        problem = make_problem([129, 7], [300, 9], device=device, dims=dims, heads=4, types=TYPES[types])
        clean = call(problem, make_workspace(device, 0))
        for fill in (0xFF, None):
            assert_same_bits(call(problem, make_workspace(device, fill)), clean)


def unquantised(dims: tuple[int, int], device: torch.device, **mask: Any) -> Problem:
    """Channels of very unequal size, and keys with a mean."""
    lens = [129, 1000, 2048, 63]
    problem = make_problem(lens, lens, device=device, dims=dims, heads=4, kv_heads=2, seed=3, **mask)
    problem.query[..., ::17] *= 4
    problem.key[..., ::13] *= 6
    problem.key.add_(torch.linspace(-8, 8, dims[0], device=device).to(problem.key.dtype))
    problem.value[..., ::19] *= 10
    return problem


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("query", DTYPES)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_what_the_quantiser_makes_is_as_good_as_it_can_be(
    dims: tuple[int, int], query: str, mask: str, device: torch.device, workspace: torch.Tensor
) -> None:
    original = unquantised(dims, device, **MASKS[mask])
    # The call quantises no head dim of 192; the reference does the same for any.
    quantize = trtllm_sage_attention_quantize if dims[0] in QUANTIZER_DIMS else sage_quantize_reference
    q, k, v, q_scale, k_scale, v_scale, _ = quantize(
        original.query,
        original.key,
        original.value,
        q_block_size=1,
        k_block_size=16,
        qk_quant_dtype=DTYPES[query],
        cum_seq_lens_q=edges(original.q_lens, device),
        cum_seq_lens_kv=edges(original.kv_lens, device),
        smooth_k=True,
    )
    problem = replace(original, query=q, key=k, value=v).with_options(
        sage_attn_sfs=(q_scale, k_scale, None, v_scale), num_elts_per_sage_attn_blk=(1, 16, 0, 1)
    )
    out, exact, wanted = call(problem, workspace)[0], expect(problem)[0], expect(original)[0]
    assert (out.float() - exact).norm() <= max(1e-2, problem.tolerance) * exact.norm()

    def error(actual: torch.Tensor) -> float:
        return float((actual.float() - wanted).norm() / wanted.norm())

    assert error(out) <= 1.15 * error(exact) + 2e-2
