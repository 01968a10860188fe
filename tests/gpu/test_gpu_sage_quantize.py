"""Quantisation for Sage attention on the GPU: every bit against the reference.

Query, key and value: the same scales and the same numbers, bit for bit. The mean of key is summed in another
order and compared with a tolerance; what is made with it agrees bit for bit again.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cubin_runtime import quantize, trtllm_sage_attention_quantize
from cubin_runtime.reference import sage_quantize_blocks, sage_quantize_reference
from tests.gpu.support import Guarded
from tests.quantize_case import LENGTHS, PADDING, operands
from tests.ragged_call import edges

pytestmark = pytest.mark.gpu

BLOCKS = (1, 4, 16)
DTYPES = (torch.int8, torch.float8_e4m3fn)

plain_and_smooth = pytest.mark.parametrize("smooth_k", [False, True], ids=["plain", "smooth"])


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Guarded]]:
    """Results and scratch are full of rubbish at first; what lies beside them must not change."""
    made: list[Guarded] = []

    def new(shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made.append(Guarded(shape, dtype, device))
        return made[-1].tensor

    monkeypatch.setattr(quantize, "_new", new)
    yield made
    for each in made:
        each.assert_intact()


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit, but that NaN is NaN."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    bits = {1: torch.uint8, 4: torch.int32}[actual.element_size()]
    differs = actual.contiguous().view(bits) != expected.contiguous().view(bits)
    if actual.dtype.is_floating_point:
        differs &= ~(actual.isnan() & expected.isnan())
    return not differs.any()


def check(given: dict[str, Any], results: tuple[torch.Tensor, ...] | None = None) -> None:
    """Compares the results, by default of a call, with the reference."""
    if results is None:
        results = trtllm_sage_attention_quantize(**given)
    expected = list(sage_quantize_reference(**given))
    if given.get("smooth_k"):
        key, mean = given["key"], results[6]
        spread = key[: int(given["cum_seq_lens_kv"][-1])].float().nan_to_num(0, 0, 0).abs().sum(0)
        tolerance = 1e-6 * spread / max(1, int(given["cum_seq_lens_kv"][-1])) + 1e-30
        assert bool(((mean - expected[6]).abs() <= tolerance).all())
        expected[6] = mean
        expected[1], expected[4] = sage_quantize_blocks(
            key,
            given["cum_seq_lens_kv"].tolist(),
            given.get("k_block_size", 16),
            given.get("qk_quant_dtype", torch.int8),
            mean,
        )
    names = ("q_quant", "k_quant", "v_quant", "q_scale", "k_scale", "v_scale", "k_mean")
    wrong = [name for name, a, b in zip(names, results, expected, strict=False) if not same(a, b)]
    assert not wrong
    assert len(results) == len(expected)


@plain_and_smooth
@pytest.mark.parametrize("quantized", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (256, 256), (64, 256)], ids=str)
def test_every_kernel_and_block_size(
    head_dims: tuple[int, int],
    dtype: torch.dtype,
    quantized: torch.dtype,
    smooth_k: bool,
    device: torch.device,
    guarded: list[Guarded],
) -> None:
    given = operands(LENGTHS, LENGTHS[::-1], head_dims=head_dims, dtype=dtype, padding=PADDING, device=device)
    for q_block, k_block in itertools.product(BLOCKS, BLOCKS):
        sizes = {"q_block_size": q_block, "k_block_size": k_block}
        check({**given, **sizes, "qk_quant_dtype": quantized, "smooth_k": smooth_k})
    assert len(guarded) == len(BLOCKS) ** 2 * (8 if smooth_k else 7)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (5, 1), (24, 6), (128, 128)], ids=str)
@plain_and_smooth
def test_head_counts(
    heads: tuple[int, int], smooth_k: bool, device: torch.device, guarded: list[Guarded]
) -> None:
    for length in (1, 130, 3000):
        check({**operands([length], [length + 7], heads=heads, device=device), "smooth_k": smooth_k})


@plain_and_smooth
@pytest.mark.parametrize("k_block", BLOCKS)
def test_many_short_sequences(
    k_block: int, smooth_k: bool, device: torch.device, guarded: list[Guarded]
) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 40, (1500,), generator=generator).tolist()
    given = operands(lengths, lengths[::-1], padding=100, device=device)
    check({**given, "q_block_size": 4, "k_block_size": k_block, "smooth_k": smooth_k})


@plain_and_smooth
@pytest.mark.parametrize(("tokens", "heads"), [(16384, 16), (20_000, 9), (65536, 16), (100_000, 1)])
def test_more_work_than_fits_at_a_time(
    tokens: int, heads: int, smooth_k: bool, device: torch.device, guarded: list[Guarded]
) -> None:
    given = operands([tokens], [tokens - 5], heads=(2, heads), device=device)
    check({**given, "smooth_k": smooth_k})


@plain_and_smooth
def test_no_tokens(smooth_k: bool, device: torch.device, guarded: list[Guarded]) -> None:
    check({**operands([], [], device=device), "smooth_k": smooth_k})
    check({**operands([0, 0], [0, 0], padding=3, device=device), "smooth_k": smooth_k})
    check({**operands([5], [0], device=device), "smooth_k": smooth_k})
    check({**operands([0], [5], device=device), "smooth_k": smooth_k})


@plain_and_smooth
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("quantized", DTYPES, ids=str)
def test_wild_numbers(
    bad: float, quantized: torch.dtype, smooth_k: bool, device: torch.device, guarded: list[Guarded]
) -> None:
    given = operands([50, 70], [50, 70], device=device)
    for name in ("query", "key", "value"):
        given[name][18, 1, 5] = bad
    check({**given, "qk_quant_dtype": quantized, "smooth_k": smooth_k})


@plain_and_smooth
def test_lengths_that_are_wrong_do_no_harm(
    smooth_k: bool, device: torch.device, guarded: list[Guarded]
) -> None:
    """Results mean nothing then, but nothing else is touched, and the call ends."""
    given = operands([50, 70], [50, 70], device=device)
    for wrong in ([0, 500, 1000], [-70, 2**31 - 1, -(2**31)], [90, 20, 50]):
        given["cum_seq_lens_q"] = torch.tensor(wrong, dtype=torch.int32, device=device)
        given["cum_seq_lens_kv"] = given["cum_seq_lens_q"]
        trtllm_sage_attention_quantize(**given, smooth_k=smooth_k)
    torch.cuda.synchronize()


@plain_and_smooth
def test_the_same_bits_every_time(smooth_k: bool, device: torch.device) -> None:
    given = operands([20000], [20000], heads=(8, 8), device=device)
    first = trtllm_sage_attention_quantize(**given, smooth_k=smooth_k)
    for _ in range(20):
        again = trtllm_sage_attention_quantize(**given, smooth_k=smooth_k)
        assert all(same(a, b) for a, b in zip(again, first, strict=True))


@plain_and_smooth
def test_replays_follow_numbers_and_lengths(smooth_k: bool, device: torch.device) -> None:
    given = operands([300, 200, 29], [300, 200, 29], padding=PADDING, device=device)
    given.update(smooth_k=smooth_k, q_block_size=4)
    trtllm_sage_attention_quantize(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = trtllm_sage_attention_quantize(**given)
    for lengths in ([0, 0, 0], [1, 500, 3], [529, 0, 0], [177, 176, 176]):
        for name in ("query", "key", "value"):
            given[name].normal_()
            given[name][sum(lengths) :] = math.nan
        given["cum_seq_lens_q"].copy_(edges(lengths))
        given["cum_seq_lens_kv"].copy_(edges(lengths))
        for result in results:
            result.view(torch.uint8).fill_(0xA5)
        graph.replay()
        check(given, results)


def test_runs_on_the_current_stream(device: torch.device) -> None:
    given = operands([2000], [2000], device=device)
    waits: Callable[[int], None] = torch.cuda._sleep  # type: ignore[attr-defined]
    stream = torch.cuda.Stream(device)
    ready = {name: given[name].clone() for name in ("query", "key", "value")}
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for name in ready:
            given[name].zero_()
        waits(20_000_000)
        for name, tensor in ready.items():
            given[name].copy_(tensor)
        results = trtllm_sage_attention_quantize(**given)
    stream.synchronize()
    check(given, results)


@plain_and_smooth
def test_calls_side_by_side_do_not_disturb_each_other(smooth_k: bool, device: torch.device) -> None:
    given = operands([30000], [30000], heads=(8, 8), device=device)
    expected = trtllm_sage_attention_quantize(**given, smooth_k=smooth_k)
    torch.cuda.synchronize()
    results: list[tuple[torch.Tensor, ...]] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            results.extend(trtllm_sage_attention_quantize(**given, smooth_k=smooth_k) for _ in range(10))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(results) == 60
    for each in results:
        assert all(same(a, b) for a, b in zip(each, expected, strict=True))


def test_offsets_beyond_31_bits(device: torch.device) -> None:
    """Ten sequences of the same numbers, halved in the last one; the first and the last are compared."""
    batch, length, heads, head_dim = 10, 1600, 640, 256
    assert (batch - 1) * length * heads * head_dim > 2**31
    part = operands([length], [length], heads=(heads, heads), head_dims=(head_dim, head_dim), device=device)
    part = {name: part[name] for name in ("query", "key", "value")}
    given = {name: tensor.repeat(batch, 1, 1) for name, tensor in part.items()}
    for tensor in given.values():
        tensor[-length:] *= 0.5
    q, k, v, q_scale, k_scale, v_scale = trtllm_sage_attention_quantize(
        **given, cum_seq_lens_q=edges([length] * batch).to(device)
    )
    first = trtllm_sage_attention_quantize(**part)
    last = trtllm_sage_attention_quantize(part["query"] * 0.5, part["key"] * 0.5, part["value"])
    for whole, index in ((q, 0), (k, 1)):
        assert same(whole[:length], first[index])
        assert same(whole[-length:], last[index])
    for whole, index in ((q_scale, 3), (k_scale, 4)):
        columns = first[index].shape[1]
        assert whole.shape[1] == batch * columns + batch - 1
        assert same(whole[:, :columns], first[index])
        assert same(whole[:, -columns:], last[index])
    assert same(v[:length], first[2])
    assert same(v_scale, first[5])
    expected = part["value"].float().mul_(0.5).mul_(1 / v_scale).to(torch.float8_e4m3fn)
    assert same(v[-length:], expected)
