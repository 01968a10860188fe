"""Quantisation for Sage attention on the CPU: results, columns, padding, and what is refused."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch

from cubin_runtime import (
    InvalidArgumentError,
    trtllm_ragged_attention_deepseek,
    trtllm_sage_attention_quantize,
)
from tests.quantize_case import LENGTHS, PADDING, operands
from tests.ragged_call import cpu_call, edges

FLOOR = torch.tensor(1e-3)
RANGES = {torch.int8: torch.tensor(126.9), torch.float8_e4m3fn: torch.tensor(448.0)}


def to_bits(number: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A float32 in 8 bits: int8 rounded to even, e4m3 saturated."""
    if dtype == torch.int8:
        return torch.tensor(round(number.item()), dtype=dtype)
    return number.clamp(-448, 448).to(dtype)


def expect_blocks(
    tensor: torch.Tensor, lengths: list[int], block: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """One number after the other; float32 in."""
    tokens, heads, head_dim = tensor.shape
    numbers = torch.zeros(tensor.shape, dtype=dtype)
    columns = math.ceil(tokens / block) + len(lengths) - 1
    scales = (FLOOR / RANGES[dtype]).repeat(heads, columns)
    for head in range(heads):
        start = 0
        for sequence, length in enumerate(lengths):
            for local in range(length):
                first = local // block * block
                members = tensor[start + first : start + min(first + block, length), head]
                scale = torch.maximum(members.abs().max(), FLOOR) / RANGES[dtype]
                scales[head, start // block + sequence + local // block] = scale
                for channel in range(head_dim):
                    scaled = tensor[start + local, head, channel] * (torch.tensor(1.0) / scale)
                    numbers[start + local, head, channel] = to_bits(scaled, dtype)
            start += length
    return numbers, scales


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    bits = {1: torch.uint8, 4: torch.int32}[actual.element_size()]
    return torch.equal(actual.view(bits), expected.view(bits))


def test_the_signature_is_that_of_the_contract() -> None:
    parameters = inspect.signature(trtllm_sage_attention_quantize).parameters
    assert {name: p.default for name, p in parameters.items()} == {
        "query": inspect.Parameter.empty,
        "key": inspect.Parameter.empty,
        "value": inspect.Parameter.empty,
        "q_block_size": 1,
        "k_block_size": 16,
        "qk_quant_dtype": torch.int8,
        "cum_seq_lens_q": None,
        "cum_seq_lens_kv": None,
        "smooth_k": False,
    }


@pytest.mark.parametrize("dtype", RANGES)
@pytest.mark.parametrize(("q_block", "k_block"), [(1, 16), (4, 1), (16, 4)])
def test_every_number_and_scale(q_block: int, k_block: int, dtype: torch.dtype) -> None:
    q_lens, kv_lens = [0, 1, 15, 16, 17, 0], [17, 16, 0, 5, 1, 0]
    given = operands(q_lens, kv_lens, heads=(2, 1), head_dims=(64, 64))
    q, k, v, q_scale, k_scale, v_scale = trtllm_sage_attention_quantize(
        **given, q_block_size=q_block, k_block_size=k_block, qk_quant_dtype=dtype
    )
    for name, lengths, block, numbers, scales in (
        ("query", q_lens, q_block, q, q_scale),
        ("key", kv_lens, k_block, k, k_scale),
    ):
        expected = expect_blocks(given[name].float(), lengths, block, dtype)
        assert same(numbers, expected[0])
        assert same(scales, expected[1])
    value = given["value"].float()
    for channel in range(64):
        scale = torch.maximum(value[:, 0, channel].abs().max(), FLOOR) / 448
        assert v_scale[0, channel] == scale
        scaled = value[:, 0, channel] * (1 / scale)
        assert same(v[:, 0, channel].contiguous(), scaled.clamp(-448, 448).to(torch.float8_e4m3fn))


def test_the_floor_and_the_range_are_used() -> None:
    given = operands([40], [40])
    given["query"][0] = 1e-4
    q, _, _, q_scale, _, _ = trtllm_sage_attention_quantize(**given)
    assert torch.equal(q_scale[:, 0], (FLOOR / RANGES[torch.int8]).expand(4))
    assert set(q[0].flatten().tolist()) == {round(float(given["query"][0, 0, 0]) / 1e-3 * 126.9)}
    assert int(q.abs().max()) == 127


@pytest.mark.parametrize("dtype", RANGES)
def test_smoothing_takes_the_mean_of_all_tokens(dtype: torch.dtype) -> None:
    given = operands([5, 3], [40, 7], padding=3)
    _, k, _, _, k_scale, _, mean = trtllm_sage_attention_quantize(
        **given, smooth_k=True, qk_quant_dtype=dtype
    )
    key = given["key"][:47].float()
    torch.testing.assert_close(mean, key.mean(0), rtol=1e-5, atol=1e-5)
    expected = expect_blocks(key - mean, [40, 7], 16, dtype)
    assert same(k[:47], expected[0])
    columns = 40 // 16 + 1 + 1  # up to the last block; padding may have added a column
    assert same(k_scale[:, :columns].contiguous(), expected[1][:, :columns].contiguous())


def test_what_is_not_given_is_one_sequence_or_the_same_sequences() -> None:
    given = operands([23], [23])
    whole = trtllm_sage_attention_quantize(**given)
    plain = trtllm_sage_attention_quantize(given["query"], given["key"], given["value"])
    assert all(same(a, b) for a, b in zip(plain, whole, strict=True))
    given = operands([20, 3], [20, 3])
    both = trtllm_sage_attention_quantize(**given)
    given.pop("cum_seq_lens_kv")
    assert all(same(a, b) for a, b in zip(trtllm_sage_attention_quantize(**given), both, strict=True))


@pytest.mark.parametrize("smooth_k", [False, True])
def test_padding_and_columns_without_tokens_are_defined(smooth_k: bool) -> None:
    given = operands(LENGTHS, LENGTHS, padding=PADDING)
    total = sum(LENGTHS)
    padded = trtllm_sage_attention_quantize(**given, q_block_size=4, smooth_k=smooth_k)
    for name in ("query", "key", "value"):
        given[name] = given[name][:total]
    plain = trtllm_sage_attention_quantize(**given, q_block_size=4, smooth_k=smooth_k)
    for with_padding, without in zip(padded[:3], plain[:3], strict=True):
        assert same(with_padding[:total], without)
        assert not with_padding[total:].view(torch.uint8).any()
    for with_padding, without, dtype in zip(padded[3:5], plain[3:5], [torch.int8] * 2, strict=True):
        columns = without.shape[1]
        assert same(with_padding[:, :columns].contiguous(), without)
        assert bool((with_padding[:, columns:] == FLOOR / RANGES[dtype]).all())
    for with_padding, without in zip(padded[5:], plain[5:], strict=True):
        assert same(with_padding, without)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", RANGES)
def test_a_wild_number_stays_in_its_sequence(bad: float, dtype: torch.dtype) -> None:
    given = operands([20, 40], [20, 40])
    for name in ("query", "key", "value"):
        given[name][:20] = 0
    calm = trtllm_sage_attention_quantize(**given, smooth_k=True, qk_quant_dtype=dtype)
    for name in ("query", "key", "value"):
        given[name][18, 1, 5] = bad
    wild = trtllm_sage_attention_quantize(**given, smooth_k=True, qk_quant_dtype=dtype)
    for a, b in zip(wild[:3], calm[:3], strict=True):
        assert same(a[20:], b[20:])
    for a, b in zip(wild[5:], calm[5:], strict=True):
        assert same(a, b)
    q_column, k_column = 18, 1
    assert bool(wild[3][1, q_column].isnan())
    assert bool(wild[4][1, k_column].isnan())
    assert (int(wild[3].isnan().sum()), int(wild[4].isnan().sum())) == (1, 1)
    assert not wild[0][18, 1].view(torch.uint8).any()
    assert not wild[1][16:20, 1].view(torch.uint8).any()
    seen = float(wild[2][18, 1, 5])
    assert math.isnan(seen) if math.isnan(bad) else seen == math.copysign(448, bad)


def test_attention_takes_the_results() -> None:
    lengths = [33, 17]
    given = operands(lengths, lengths, heads=(4, 4))
    for name in ("query", "key", "value"):
        given[name] = torch.randn_like(given[name])
    q, k, v, q_scale, k_scale, v_scale = trtllm_sage_attention_quantize(**given)
    plain = cpu_call(lengths, lengths, is_causal=False, **given)
    exact = trtllm_ragged_attention_deepseek(**plain).float()
    sage = trtllm_ragged_attention_deepseek(
        **{**plain, "query": q, "key": k, "value": v},
        sage_attn_sfs=(q_scale, k_scale, None, v_scale),
        num_elts_per_sage_attn_blk=(1, 16, 0, 1),
    )
    assert float((sage.float() - exact).norm() / exact.norm()) < 0.05


def test_nothing_to_quantise() -> None:
    given = operands([], [])
    results = trtllm_sage_attention_quantize(**given, smooth_k=True)
    assert [tuple(r.shape) for r in results[3:5]] == [(4, 0), (2, 0)]
    assert bool((results[5] == FLOOR / RANGES[torch.float8_e4m3fn]).all())
    assert not results[6].any()


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "no tensor": ({"query": None}, "query is a NoneType; expected a torch.Tensor"),
    "dtype": (
        {"value": torch.zeros(5, 2, 128)},
        "value has dtype torch.float32; expected one of torch.bfloat16",
    ),
    "dtypes": (
        {"key": torch.zeros(5, 2, 128).half()},
        "key has dtype torch.float16; expected that of query, torch.bfloat16",
    ),
    "dimensions": (
        {"query": torch.zeros(5, 128).bfloat16()},
        "query has shape (5, 128); expected 3 dimensions",
    ),
    "head_dim": (
        {"query": torch.zeros(5, 4, 192).bfloat16()},
        "query has head_dim 192; expected one of 64, 128, 256",
    ),
    "head_dims": (
        {"key": torch.zeros(5, 2, 64).bfloat16()},
        "key has head_dim 64; expected that of query, 128",
    ),
    "heads": ({"query": torch.zeros(5, 0, 128).bfloat16()}, "query has 0 heads; expected at least 1"),
    "strides": (
        {"key": torch.zeros(5, 4, 128).bfloat16()[:, ::2]},
        "key has strides (512, 256, 1) for shape (5, 2, 128); expected a contiguous tensor",
    ),
    "tokens": (
        {"value": torch.zeros(6, 2, 128).bfloat16()},
        "value has shape (6, 2, 128); expected [5, 2, ...] as key has",
    ),
    "device": (
        {"key": torch.zeros(5, 2, 128, device="meta").bfloat16()},
        "key is on meta; expected a CUDA device or the CPU, as query, on cpu",
    ),
    "q_block_size": ({"q_block_size": 8}, "q_block_size is 8; expected one of 1, 4, 16"),
    "k_block_size": ({"k_block_size": None}, "k_block_size is None; expected one of 1, 4, 16"),
    "qk_quant_dtype": (
        {"qk_quant_dtype": torch.uint8},
        "qk_quant_dtype is torch.uint8; expected one of torch.int8, torch.float8_e4m3fn",
    ),
    "smooth_k": ({"smooth_k": None}, "smooth_k is a NoneType; expected a bool"),
    "only kv": (
        {"cum_seq_lens_q": None},
        "cum_seq_lens_q is None with cum_seq_lens_kv given; expected both, neither, or cum_seq_lens_q alone",
    ),
    "edges": (
        {"cum_seq_lens_q": [0, 5]},
        "cum_seq_lens_q is a list; expected None or a torch.Tensor",
    ),
    "edges' dtype": (
        {"cum_seq_lens_kv": torch.tensor([0, 5])},
        "cum_seq_lens_kv has dtype torch.int64; expected torch.int32",
    ),
    "edges' shape": (
        {"cum_seq_lens_q": edges([])[:0]},
        "cum_seq_lens_q has shape (0,) and stride (1,); expected a contiguous (batch_size + 1,)",
    ),
    "edges' device": (
        {"cum_seq_lens_q": edges([5]).to("meta")},
        "cum_seq_lens_q is on meta; expected the device of query, cpu",
    ),
    "batches": (
        {"cum_seq_lens_kv": edges([3, 2])},
        "cum_seq_lens_kv has shape (3,); expected that of cum_seq_lens_q, (2,)",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_is_wrong_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        trtllm_sage_attention_quantize(**{**operands([5], [5]), **changes})
    assert str(raised.value).startswith(message)
