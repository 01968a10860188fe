"""The torch reference against per-element float64 arithmetic, closed forms and the contract's rules."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cubin_runtime import reference
from cubin_runtime.reference import ragged_attention_reference

E4M3 = torch.float8_e4m3fn
LN2 = math.log(2.0)


def edges(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_lens: list[int],
    kv_lens: list[int],
    **arguments: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference with poisoned float32 results, unless `out` is given."""
    out = torch.full((*q.shape[:2], v.shape[-1]), math.nan)
    lse = torch.full(q.shape[:2], math.nan)
    arguments = {
        "bmm1_scale": 1.0,
        "bmm2_scale": 1.0,
        "is_causal": False,
        "out": out,
        "lse": lse,
        **arguments,
    }
    ragged_attention_reference(
        q, k, v, cum_seq_lens_q=edges(q_lens), cum_seq_lens_kv=edges(kv_lens), **arguments
    )
    return arguments["out"], arguments["lse"]


def naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_lens: list[int],
    kv_lens: list[int],
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    is_causal: bool = False,
    window_left: int = -1,
    sinks: list[float] | None = None,
    skip_factor: float = 0.0,
    uses_spcompress: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract, one logit at a time, in float64. Rows that no sequence covers stay NaN."""
    out = torch.full((*q.shape[:2], v.shape[-1]), math.nan, dtype=torch.float64)
    lse = torch.full(q.shape[:2], math.nan, dtype=torch.float64)
    q0 = kv0 = 0
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        keys = range(kv_len)

        def visible(i: int, j: int, diagonal: int = kv_len - q_len) -> bool:
            behind = i + diagonal - j
            return (not is_causal or behind >= 0) and (window_left < 0 or behind <= window_left)

        for h in range(q.shape[1]):
            kv_head = h // (q.shape[1] // k.shape[1])
            sequence_v = v[kv0 : kv0 + kv_len, kv_head].double()
            logits = bmm1_scale * (q[q0 : q0 + q_len, h].double() @ k[kv0 : kv0 + kv_len, kv_head].double().T)
            rows = [{j: x for j, x in enumerate(r) if visible(i, j)} for i, r in enumerate(logits.tolist())]
            hidden = [not row for row in rows]
            for top in range(0, q_len, 128):
                tile = rows[top : top + 128]
                spans = [range(left, left + 128) for left in keys[::128]]
                if uses_spcompress:
                    for span in spans:
                        if span.stop <= kv_len and all(
                            visible(i, j) for i in range(top, min(top + 128, q_len)) for j in span
                        ):
                            prune(tile, span)
                if skip_factor:
                    skip(tile, spans, skip_factor / max(1, kv_len))
            for i, row in enumerate(rows):
                if hidden[i]:
                    out[q0 + i, h], lse[q0 + i, h] = 0.0, -math.inf
                    continue
                shift = max(row.values())
                total = sum(math.exp(x - shift) for x in row.values())
                total += math.exp(sinks[h] - shift) if sinks else 0.0
                weights = torch.zeros(kv_len, dtype=torch.float64)
                for j, x in row.items():
                    weights[j] = math.exp(x - shift) / total
                out[q0 + i, h] = bmm2_scale * (weights @ sequence_v)
                lse[q0 + i, h] = (shift + math.log(total)) / LN2
        q0, kv0 = q0 + q_len, kv0 + kv_len
    return out, lse


def prune(tile: list[dict[int, float]], span: range) -> None:
    for row in tile:
        for left in span[::4]:
            for j in sorted(range(left, left + 4), key=row.__getitem__)[:2]:
                del row[j]


def skip(tile: list[dict[int, float]], spans: list[range], threshold: float) -> None:
    running = [-math.inf] * len(tile)
    for span in reversed(spans):
        peaks = [max((row[j] for j in span if j in row), default=-math.inf) for row in tile]
        seen = [(peak, best) for peak, best in zip(peaks, running, strict=True) if peak > -math.inf]
        if all(best > -math.inf and math.exp(peak - best) < threshold for peak, best in seen):
            for row in tile:
                for j in span:
                    row.pop(j, None)
        running = [max(pair) for pair in zip(peaks, running, strict=True)]


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True
    )


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    sequences = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4))
    kv_heads, group = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3]))
    heads = kv_heads * group
    return {
        "q_lens": [q for q, _ in sequences],
        "kv_lens": [kv for _, kv in sequences],
        "heads": heads,
        "kv_heads": kv_heads,
        "bmm1_scale": draw(st.sampled_from([0.5, 1.0, 0.0, -0.7])),
        "bmm2_scale": draw(st.sampled_from([1.0, -2.5, 0.0])),
        "is_causal": draw(st.booleans()),
        "window_left": draw(st.integers(-1, 10)),
        "sinks": draw(st.none() | st.lists(st.floats(-100, 100), min_size=heads, max_size=heads)),
        "seed": draw(st.integers(0, 1 << 20)),
        "padding": draw(st.integers(0, 2)),
    }


@settings(max_examples=150, deadline=None, derandomize=True)
@given(problem=problems(), tensor_scales=st.booleans())
def test_agrees_with_elementwise_arithmetic(problem: dict[str, Any], tensor_scales: bool) -> None:
    q_lens, kv_lens, seed = problem.pop("q_lens"), problem.pop("kv_lens"), problem.pop("seed")
    heads, kv_heads, padding = problem.pop("heads"), problem.pop("kv_heads"), problem.pop("padding")
    q = randn(sum(q_lens) + padding, heads, 8, seed=seed)
    k = randn(sum(kv_lens), kv_heads, 8, seed=seed + 1)
    v = randn(sum(kv_lens), kv_heads, 6, seed=seed + 2)
    expected = naive(q, k, v, q_lens, kv_lens, **problem)

    sinks = problem.pop("sinks")
    if tensor_scales:
        problem["bmm1_scale"] = torch.tensor([problem["bmm1_scale"]])
        problem["bmm2_scale"] = torch.tensor(problem["bmm2_scale"])
    out, lse = attend(
        q, k, v, q_lens, kv_lens, attention_sinks=None if sinks is None else torch.tensor(sinks), **problem
    )
    assert_close(out, expected[0])
    assert_close(lse, expected[1])


MASKS = [
    pytest.param({}, id="dense"),
    pytest.param({"is_causal": True}, id="causal"),
    pytest.param({"is_causal": True, "window_left": 300}, id="sliding"),
]
LONG_Q, LONG_KV = [130, 0, 257], [515, 3, 400]


def long_problem(seed: int, spread: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = randn(sum(LONG_Q), 2, 8, seed=seed) * spread
    return q, randn(sum(LONG_KV), 1, 8, seed=seed + 1), randn(sum(LONG_KV), 1, 4, seed=seed + 2)


@pytest.mark.parametrize("mask", MASKS)
def test_chunks_hold_few_logits_and_change_no_result(mask: dict[str, Any]) -> None:
    q, k, v = long_problem(1)
    expected = naive(q, k, v, LONG_Q, LONG_KV, **mask)
    chunks = []
    compute = reference._attend_chunk

    def spy(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        _, _, heads, rows = arguments[:4]
        chunks.append((heads.stop - heads.start) * (rows.stop - rows.start))
        return compute(*arguments)

    budget = 128 * max(LONG_KV)  # one tile of rows of one head of the longest sequence
    with (
        mock.patch.object(reference, "_LOGITS_PER_CHUNK", budget),
        mock.patch.object(reference, "_attend_chunk", spy),
    ):
        out, lse = attend(q, k, v, LONG_Q, LONG_KV, **mask)
    assert_close(out, expected[0])
    assert_close(lse, expected[1])
    assert max(chunks) == 128
    assert len(chunks) == 2 * (2 + 3)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("factor", [1e-30, 0.5, 20.0, 250.0])
def test_skip_softmax_leaves_out_negligible_tiles(mask: dict[str, Any], factor: float) -> None:
    q, k, v = long_problem(2, spread=4.0)
    # Keys of later tiles tower over the first, so that some tiles do fall below the threshold.
    k[:128, 0] *= 0.2
    k[515 + 3 : 515 + 3 + 128, 0] *= 0.2
    expected = naive(q, k, v, LONG_Q, LONG_KV, skip_factor=factor, **mask)
    out, lse = attend(q, k, v, LONG_Q, LONG_KV, skip_softmax_threshold_scale_factor=factor, **mask)
    assert_close(out, expected[0])
    assert_close(lse, expected[1])
    plain = attend(q, k, v, LONG_Q, LONG_KV, **mask)
    if factor == 1e-30:
        assert torch.equal(out, plain[0])
    if factor == 250.0:
        assert not torch.equal(out, plain[0])


def test_skip_softmax_visits_the_last_tile_first() -> None:
    """Two tiles, the first far above the second: nothing is skipped. Reversed: the first one is."""
    q = torch.ones(1, 1, 1)
    v = torch.cat([torch.zeros(128, 1, 1), torch.ones(128, 1, 1)])
    rising = torch.cat([torch.full((128, 1, 1), -5.0), torch.zeros(128, 1, 1)])
    skipping = {"skip_softmax_threshold_scale_factor": 2.56}  # threshold 0.01 > exp(-5)
    out, lse = attend(q, rising, v, [1], [256], **skipping)
    assert out.item() == 1.0
    assert lse.item() == pytest.approx(7.0)
    out, lse = attend(q, -5.0 - rising, v, [1], [256], **skipping)
    assert out.item() == pytest.approx(math.exp(-5) / (1 + math.exp(-5)))


def test_skip_softmax_counts_tiles_that_a_row_sees() -> None:
    """Of 3 x 3 tiles a causal mask shows 6; each row of tiles keeps the diagonal, far above the rest."""
    q = torch.ones(384, 2, 1)
    k = torch.tensor([-20.0, -10.0, 0.0]).repeat_interleave(128)[:, None, None].expand(-1, 2, -1)
    counts = torch.tensor([5, 7])
    attend(
        q,
        k,
        torch.ones(384, 2, 1),
        [384],
        [384],
        is_causal=True,
        skip_softmax_threshold_scale_factor=0.384,  # threshold 0.001 > exp(-10)
        skip_softmax_counts=counts,
    )
    assert counts.tolist() == [5 + 2 * 3, 7 + 2 * 6]


def test_skip_softmax_keeps_a_tile_that_one_row_needs() -> None:
    q = torch.tensor([1.0, -1.0]).view(2, 1, 1)
    k = torch.cat([torch.full((128, 1, 1), -5.0), torch.zeros(128, 1, 1)])
    v = torch.cat([torch.zeros(128, 1, 1), torch.ones(128, 1, 1)])
    kept, _ = attend(q, k, v, [2], [256], skip_softmax_threshold_scale_factor=2.56)
    plain, _ = attend(q, k, v, [2], [256])
    assert torch.equal(kept, plain)
    assert kept[0].item() < 1.0


def test_skip_softmax_error_shrinks_with_the_factor() -> None:
    q, k, v = (randn(512, 1, 8, seed=3 + i) / 4 for i in range(3))
    q[..., 0] = 1.0
    k[..., 0] = torch.tensor([-9.0, -6.0, -3.0, 0.0]).repeat_interleave(128)[:, None]
    plain, _ = attend(q[:9], k, v, [9], [512])

    def error(factor: float) -> float:
        out, _ = attend(q[:9], k, v, [9], [512], skip_softmax_threshold_scale_factor=factor)
        return float((out - plain).norm() / plain.norm())

    # The thresholds let go of three, two, one and no tile.
    errors = [error(512 * math.exp(exponent)) for exponent in (-1.5, -4.5, -7.5, -12.0)]
    assert errors == sorted(errors, reverse=True)
    assert len(set(errors)) == 4
    assert errors[-1] == 0.0


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sinks", [None, [0.5, -1.0]], ids=["", "sinks"])
def test_spcompress_prunes_interior_tiles(mask: dict[str, Any], sinks: list[float] | None) -> None:
    q, k, v = long_problem(4)
    expected = naive(q, k, v, LONG_Q, LONG_KV, uses_spcompress=True, sinks=sinks, **mask)
    sink_tensor = None if sinks is None else torch.tensor(sinks)
    out, lse = attend(q, k, v, LONG_Q, LONG_KV, uses_spcompress=True, attention_sinks=sink_tensor, **mask)
    assert_close(out, expected[0])
    assert_close(lse, expected[1])
    assert not torch.equal(lse, attend(q, k, v, LONG_Q, LONG_KV, attention_sinks=sink_tensor, **mask)[1])


def test_spcompress_keeps_two_of_four_and_the_tail() -> None:
    q = torch.ones(1, 1, 1)
    k = torch.tensor([3.0, 1.0, 2.0, 0.0]).repeat(33).view(132, 1, 1)
    v = torch.tensor([1.0, 0.0, 1.0, 0.0]).repeat(33).view(132, 1, 1)
    kept, dropped = math.exp(3) + math.exp(2), math.exp(1) + 1.0
    out, lse = attend(q, k, v, [1], [132], uses_spcompress=True)
    total = 33 * kept + dropped
    assert out.item() == pytest.approx(33 * kept / total)
    assert lse.item() == pytest.approx(math.log2(total))


@pytest.mark.parametrize("blocks", [(1, 1, 0, 1), (1, 16, 0, 1), (4, 16, 0, 1), (16, 4, 0, 1)])
@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=["int8", "e4m3"])
def test_sage_scales_at_ragged_columns(blocks: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    q_lens, kv_lens, heads, kv_heads = [5, 0, 17, 1], [33, 2, 20, 16], 4, 2
    block_q, block_k = blocks[:2]
    q = (randn(sum(q_lens), heads, 8, seed=5) * 40).to(dtype)
    k = (randn(sum(kv_lens), kv_heads, 8, seed=6) * 40).to(dtype)
    v = randn(sum(kv_lens), kv_heads, 6, seed=7).to(E4M3)
    q_sf = torch.rand(heads, -(-sum(q_lens) // block_q) + 3) / 20
    k_sf = torch.rand(kv_heads, -(-sum(kv_lens) // block_k) + 3) / 20
    v_sf = torch.rand(kv_heads, 6)

    def dequantize(x: torch.Tensor, scales: torch.Tensor, lens: list[int], block: int) -> torch.Tensor:
        scaled, start = x.double(), 0
        for b, length in enumerate(lens):
            for t in range(length):
                scaled[start + t] *= scales[:, start // block + b + t // block, None].double()
            start += length
        return scaled

    expected = naive(
        dequantize(q, q_sf, q_lens, block_q),
        dequantize(k, k_sf, kv_lens, block_k),
        v.double() * v_sf.double(),
        q_lens,
        kv_lens,
        bmm1_scale=0.3,
        bmm2_scale=2.0,
        is_causal=True,
    )
    out, lse = attend(
        q,
        k,
        v,
        q_lens,
        kv_lens,
        bmm1_scale=0.3,
        bmm2_scale=2.0,
        is_causal=True,
        sage_attn_sfs=(q_sf, k_sf, None, v_sf),
        num_elts_per_sage_attn_blk=blocks,
    )
    assert_close(out, expected[0])
    assert_close(lse, expected[1])


def test_sage_scales_of_one_give_the_integer_product() -> None:
    q = torch.randint(-127, 128, (16, 1, 128), dtype=torch.int8)
    k = torch.randint(-127, 128, (256, 1, 128), dtype=torch.int8)
    v = randn(256, 1, 128, seed=8).to(E4M3)
    scales = (torch.ones(1, 16), torch.ones(1, 16), None, torch.ones(1, 128))
    sage = {"sage_attn_sfs": scales, "num_elts_per_sage_attn_blk": (1, 16, 0, 1)}
    with_scales = attend(q, k, v, [16], [256], bmm1_scale=1e-4, **sage)
    without = attend(q, k, v, [16], [256], bmm1_scale=1e-4)
    assert torch.equal(with_scales[0], without[0])
    assert torch.equal(with_scales[1], without[1])


@pytest.mark.parametrize(
    ("dtype_qk", "dtype_v"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (E4M3, E4M3),
        (torch.bfloat16, E4M3),
    ],
    ids=["bf16", "fp16", "fp8", "mixed"],
)
def test_input_dtypes_are_read_exactly(dtype_qk: torch.dtype, dtype_v: torch.dtype) -> None:
    q, k = randn(7, 2, 16, seed=9).to(dtype_qk), randn(11, 1, 16, seed=10).to(dtype_qk)
    v = randn(11, 1, 8, seed=11).to(dtype_v)
    expected = naive(q, k, v, [3, 4], [4, 7], bmm1_scale=0.25, is_causal=True)
    out, lse = attend(q, k, v, [3, 4], [4, 7], bmm1_scale=0.25, is_causal=True)
    assert_close(out, expected[0])
    assert_close(lse, expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, E4M3], ids=str)
def test_out_is_rounded_once_to_its_dtype(dtype: torch.dtype) -> None:
    q, k, v = randn(3, 1, 8, seed=12), randn(5, 1, 8, seed=13), randn(5, 1, 8, seed=14)
    exact, _ = attend(q, k, v, [3], [5])
    out, _ = attend(q, k, v, [3], [5], out=torch.empty(3, 1, 8, dtype=dtype))
    assert torch.equal(out.float(), exact.to(dtype).float())


def test_e4m3_out_saturates() -> None:
    v = torch.tensor([1e4, -1e4, 1.0, math.nan]).view(1, 1, 4)
    out, _ = attend(
        torch.zeros(1, 1, 4), torch.zeros(1, 1, 4), v, [1], [1], out=torch.empty_like(v, dtype=E4M3)
    )
    assert out.flatten()[:3].tolist() == [448.0, -448.0, 1.0]
    assert out.float().flatten()[3].isnan()


def test_works_wider_where_torch_may_round_products() -> None:
    q, k, v = randn(4, 2, 32, seed=15), randn(9, 1, 32, seed=16), randn(9, 1, 8, seed=17)
    expected, _ = naive(q, k, v, [4], [9])
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        out, _ = attend(q, k, v, [4], [9], out=torch.empty(4, 2, 8, dtype=torch.float64))
    finally:
        torch.set_float32_matmul_precision(before)
    assert_close(out, expected, tolerance=1e-12)


def test_strided_inputs_and_results() -> None:
    q = randn(2, 7, 8, seed=18).transpose(0, 1)
    packed = randn(12, 2, 16, seed=19)
    k, v = packed[..., :8], packed[..., 8:]
    buffer, lse_buffer = torch.full((7, 3, 16), 7.0), torch.full((2, 7), 7.0)
    attend(q, k, v, [3, 4], [5, 7], is_causal=True, out=buffer[:, 1:, 4:12], lse=lse_buffer.T)
    expected = attend(q.contiguous(), k.contiguous(), v.contiguous(), [3, 4], [5, 7], is_causal=True)
    assert torch.equal(buffer[:, 1:, 4:12], expected[0])
    assert torch.equal(lse_buffer.T, expected[1])
    buffer[:, 1:, 4:12] = 7.0
    assert (buffer == 7.0).all()


def test_only_covered_rows_are_written() -> None:
    q, k, v = randn(9, 1, 4, seed=20), randn(9, 1, 4, seed=21), randn(9, 1, 4, seed=22)
    out, lse = attend(q, k, v, [2, 3], [4, 1])
    assert out[:5].isfinite().all()
    assert lse[:5].isfinite().all()
    assert out[5:].isnan().all()
    assert lse[5:].isnan().all()


def test_lse_is_optional() -> None:
    q, k, v = randn(2, 1, 4, seed=23), randn(3, 1, 4, seed=24), randn(3, 1, 4, seed=25)
    assert torch.equal(attend(q, k, v, [2], [3], lse=None)[0], attend(q, k, v, [2], [3])[0])


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tensor", ["q", "k", "v"])
@pytest.mark.parametrize("mask", MASKS)
def test_poison_stays_in_its_sequence(poison: float, tensor: str, mask: dict[str, Any]) -> None:
    lens = [5, 4, 6]
    tensors = {name: randn(15, 2, 8, seed=26 + i) for i, name in enumerate("qkv")}
    clean = attend(*tensors.values(), lens, lens, **mask)
    tensors[tensor][5:9] = poison
    out, lse = attend(*tensors.values(), lens, lens, **mask)
    others = [0, 1, 2, 3, 4, 9, 10, 11, 12, 13, 14]
    assert torch.equal(out[others], clean[0][others])
    assert torch.equal(lse[others], clean[1][others])


def test_masked_keys_cannot_poison_a_row() -> None:
    q, k, v = randn(4, 1, 8, seed=29), randn(4, 1, 8, seed=30), randn(4, 1, 8, seed=31)
    clean = attend(q, k, v, [4], [4], is_causal=True)
    k[2] = math.nan
    v[2] = math.inf
    out, lse = attend(q, k, v, [4], [4], is_causal=True)
    assert torch.equal(out[:2], clean[0][:2])
    assert torch.equal(lse[:2], clean[1][:2])
    assert out[2:].isnan().all()


def test_values_at_infinity_follow_the_arithmetic() -> None:
    v = torch.tensor([math.inf, 1.0]).view(2, 1, 1)
    out, _ = attend(torch.zeros(2, 1, 1), torch.zeros(2, 1, 1), v, [2], [2], is_causal=True)
    assert out.flatten().tolist() == [math.inf, math.inf]


def test_inputs_that_require_grad() -> None:
    q, k, v = (randn(3, 1, 4, seed=32 + i).requires_grad_() for i in range(3))
    out, _ = attend(q, k, v, [3], [3])
    assert not out.requires_grad


@pytest.mark.parametrize("sinks", [None, torch.zeros(1)], ids=["", "sinks"])
@pytest.mark.parametrize("scale", [1.0, torch.ones(1)], ids=["float", "tensor"])
def test_rows_without_keys(sinks: torch.Tensor | None, scale: float | torch.Tensor) -> None:
    q, k, v = randn(6, 1, 8, seed=35), randn(9, 1, 8, seed=36), randn(9, 1, 8, seed=37)
    common = {"attention_sinks": sinks, "bmm1_scale": scale, "bmm2_scale": scale}
    out, lse = attend(q, k, v, [3, 2, 0, 1], [4, 0, 5, 0], **common)
    assert (out[3:] == 0).all()
    assert (lse[3:] == -math.inf).all()
    alone = attend(q[:3], k[:4], v[:4], [3], [4], **common)
    assert torch.equal(out[:3], alone[0])
    assert torch.equal(lse[:3], alone[1])

    out, lse = attend(q, k[:0], v[:0], [3, 2, 0, 1], [0, 0, 0, 0], **common)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_causal_rows_before_the_first_key() -> None:
    out, lse = attend(
        torch.zeros(4, 1, 8), torch.zeros(2, 1, 8), torch.ones(2, 1, 8), [4], [2], is_causal=True
    )
    assert lse.flatten().tolist() == [-math.inf, -math.inf, 0.0, 1.0]
    assert out[:, 0, 0].tolist() == [0.0, 0.0, 1.0, 1.0]


def test_equal_logits_count_the_visible_keys() -> None:
    _, lse = attend(torch.zeros(3, 2, 8), randn(8, 1, 8, seed=38), randn(8, 1, 8, seed=39), [3], [8])
    assert lse.shape == (3, 2)
    assert (lse == 3.0).all()


def two_scores(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores 0 and 1 for the values 0 and 1."""
    q = torch.zeros(1, 1, 128)
    q[..., 0] = 1.0
    k, v = torch.zeros(2, 1, 128), torch.zeros(2, 1, 128)
    k[1, 0, 0] = 1.0
    v[1] = 1.0
    return q.to(dtype), k.to(dtype), v.to(dtype)


@pytest.mark.parametrize("scale", [1.0, torch.tensor([1.0]), torch.tensor(1.0)], ids=["float", "1d", "0d"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=["bf16", "e4m3"])
def test_two_scores(scale: float | torch.Tensor, dtype: torch.dtype) -> None:
    out, lse = attend(*two_scores(dtype), [1], [2], bmm1_scale=scale)
    assert out[0, 0].tolist() == pytest.approx([0.73106] * 128, abs=1e-5)
    assert lse.item() == pytest.approx(1.89464, abs=1e-5)
    assert attend(*two_scores(dtype), [1], [2], bmm1_scale=scale * 0)[0][0, 0, 0].item() == 0.5


def test_merging_partial_results() -> None:
    """Attention over two parts of the keys, weighted by 2^lse, is attention over all of them."""
    q, k, v = randn(5, 2, 16, seed=40), randn(31, 2, 16, seed=41), randn(31, 2, 8, seed=42)
    whole, whole_lse = attend(q, k, v, [5], [31])
    parts = [
        attend(q, k[part], v[part], [5], [length])
        for part, length in ((slice(0, 20), 20), (slice(20, 31), 11))
    ]
    weights = torch.stack([lse.exp2() for _, lse in parts])
    merged = sum(w[..., None] * out for w, (out, _) in zip(weights / weights.sum(0), parts, strict=True))
    assert_close(merged, whole)
    assert_close(weights.sum(0).log2(), whole_lse)


def test_sliding_window_edge() -> None:
    q, k = torch.zeros(4, 1, 8), torch.zeros(4, 1, 8)
    v = torch.arange(4.0).view(4, 1, 1)
    out, lse = attend(q, k, v, [4], [4], is_causal=True, window_left=1)
    assert out.flatten().tolist() == [0.0, 0.5, 1.5, 2.5]
    assert lse.flatten().tolist() == [0.0, 1.0, 1.0, 1.0]
    assert attend(q[:2], k, v, [2], [4], is_causal=True, window_left=1)[0].flatten().tolist() == [1.5, 2.5]
    assert torch.equal(attend(q, k, v, [4], [4], is_causal=True, window_left=0)[0], v)
    wide = attend(q, k, v, [4], [4], is_causal=True, window_left=4)[0]
    assert torch.equal(wide, attend(q, k, v, [4], [4], is_causal=True)[0])


def test_sinks_enter_the_denominator_alone() -> None:
    sinks = torch.tensor([math.log(4.0), -math.inf])
    out, lse = attend(
        torch.zeros(1, 2, 8), torch.zeros(4, 1, 8), torch.ones(4, 1, 8), [1], [4], attention_sinks=sinks
    )
    assert out[0, :, 0].tolist() == pytest.approx([0.5, 1.0])
    assert lse[0].tolist() == pytest.approx([3.0, 2.0])


def test_a_sink_far_above_the_logits_does_not_overflow() -> None:
    out, lse = attend(
        torch.zeros(1, 1, 8),
        torch.zeros(4, 1, 8),
        torch.ones(4, 1, 8),
        [1],
        [4],
        attention_sinks=torch.tensor([500.0]),
    )
    assert out.abs().max().item() == 0.0
    assert lse.item() == pytest.approx(500.0 / LN2)


@pytest.mark.parametrize("first_visible", [127, 128])
def test_window_that_begins_at_a_tile_edge(first_visible: int) -> None:
    v = torch.zeros(300, 1, 1)
    v[first_visible] = 1.0
    window = 299 - first_visible
    out, lse = attend(
        torch.zeros(1, 1, 8), torch.zeros(300, 1, 8), v, [1], [300], is_causal=True, window_left=window
    )
    assert out.item() == pytest.approx(1 / (window + 1))
    assert lse.item() == pytest.approx(math.log2(window + 1))
