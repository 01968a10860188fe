"""Leaving out rows that see no key: what is cut, and that the rest comes out as if nothing had been."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cubin_runtime import trtllm_ragged_attention_deepseek
from cubin_runtime.arguments import Call
from cubin_runtime.empty_rows import Span, attend, fill, known_lengths, split
from cubin_runtime.errors import InvalidArgumentError
from tests.ragged_call import SIGNATURE, cpu_call

Lengths = list[tuple[int, int]]
LENGTHS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=6)


def make_call(lengths: Lengths, **changes: Any) -> Call:
    """A call on the CPU with out and lse full of sevens."""
    q_lens, kv_lens = [q for q, _ in lengths], [kv for _, kv in lengths]
    arguments = cpu_call(q_lens, kv_lens, backend="reference", **changes)
    bound = SIGNATURE.bind(**arguments)
    bound.apply_defaults()
    call = Call(**bound.arguments)
    tokens, heads, _ = call.query.shape
    return msgspec.structs.replace(
        call,
        out=torch.full((tokens, heads, call.value.shape[2]), 7.0, dtype=torch.bfloat16),
        lse=torch.full((tokens, heads), 7.0),
    )


def reference(call: Call) -> None:
    trtllm_ragged_attention_deepseek(**msgspec.structs.asdict(call))


def rows(spans: list[Span]) -> set[int]:
    return {row for span in spans for row in range(span.start, span.end)}


@given(LENGTHS, st.booleans())
def test_each_row_is_kept_or_empty_by_what_it_sees(lengths: Lengths, is_causal: bool) -> None:
    parts = split(lengths, is_causal)
    start, kept, empty = 0, set(), set()
    for q_len, kv_len in lengths:
        for i in range(q_len):
            sees = i + kv_len - q_len >= 0 if is_causal else kv_len > 0
            (kept if sees and kv_len else empty).add(start + i)
        start += q_len
    assert (rows(parts.kept), rows(parts.empty)) == (kept, empty)
    for spans in (parts.kept, parts.empty, parts.sequences, parts.keys):
        assert all(a.end < b.start for a, b in itertools.pairwise(spans))
    live = [n for n, (q, kv) in enumerate(lengths) if q and kv]
    assert rows(parts.sequences) == set(live)
    assert parts.cuts_keys == any(kv and not q for q, kv in lengths)
    assert parts.is_whole == (not empty and len(live) == len(lengths))


@settings(deadline=None)  # the first call of torch takes its time
@given(LENGTHS.filter(bool), st.booleans())
def test_the_results_are_those_of_the_whole_call(lengths: Lengths, is_causal: bool) -> None:
    call = make_call(lengths, is_causal=is_causal)
    seen: list[Call] = []

    def run(smaller: Call) -> None:
        seen.append(smaller)
        reference(smaller)

    attend(call, split(lengths, is_causal), run)
    whole = make_call(lengths, is_causal=is_causal)
    whole = msgspec.structs.replace(whole, query=call.query, key=call.key, value=call.value)
    reference(whole)
    torch.testing.assert_close(call.out, whole.out)
    torch.testing.assert_close(call.lse, whole.lse)
    for smaller in seen:  # every sequence and every row of it sees a key
        q_lens, kv_lens = smaller.cum_seq_lens_q.diff(), smaller.cum_seq_lens_kv.diff()
        assert torch.equal(kv_lens, smaller.seq_lens)
        assert min(q_lens.min(), kv_lens.min()) > 0
        assert not is_causal or bool((q_lens <= kv_lens).all())
        assert smaller.query.shape[0] == int(q_lens.sum())
        assert smaller.batch_size == len(q_lens)


def test_rows_behind_the_last_sequence_are_left_alone() -> None:
    call = make_call([(2, 0), (3, 4), (1, 0), (2, 2)])
    padded = functools.partial(torch.nn.functional.pad, pad=(0, 0, 0, 0, 0, 3), value=7.0)
    call = msgspec.structs.replace(
        call,
        query=padded(call.query),
        out=padded(call.out),
        lse=torch.nn.functional.pad(call.lse, (0, 0, 0, 3), value=7.0),  # type: ignore[arg-type]
    )
    attend(call, split([(2, 0), (3, 4), (1, 0), (2, 2)], True), reference)
    assert call.out is not None
    assert call.lse is not None
    assert bool((call.out[8:] == 7).all())
    assert bool((call.lse[8:] == 7).all())
    assert not (call.out[:8] == 7).any()
    assert bool((call.out[[0, 1, 5]] == 0).all())
    assert bool((call.lse[[0, 1, 5]] == -torch.inf).all())


def test_a_batch_of_empty_rows_is_filled_without_a_kernel() -> None:
    call = make_call([(2, 0), (0, 3), (1, 0)], attention_sinks=torch.zeros(4))
    attend(call, split([(2, 0), (0, 3), (1, 0)], True), lambda smaller: pytest.fail("nothing to launch"))
    assert bool((call.out == 0).all())  # type: ignore[union-attr]
    assert bool((call.lse == -torch.inf).all())  # type: ignore[union-attr]


def test_without_keys_only_covered_rows_are_filled() -> None:
    call = make_call([(2, 0), (3, 0)])
    call.cum_seq_lens_q[-1] = 4
    fill(call)
    assert call.out is not None
    assert call.lse is not None
    assert (call.out[:4].unique().tolist(), call.out[4:].unique().tolist()) == ([0], [7])
    assert (call.lse[:4].unique().tolist(), call.lse[4:].unique().tolist()) == ([-torch.inf], [7])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention_sinks": torch.zeros(4)}, "attention_sinks"),
        ({"bmm1_scale": torch.ones(1)}, "bmm1_scale as a tensor"),
        ({"bmm2_scale": torch.ones(1)}, "bmm2_scale as a tensor"),
        ({"num_elts_per_sage_attn_blk": (1, 1, 0, 1)}, "sage_attn_sfs"),
    ],
)
def test_what_belongs_to_whole_batches_is_refused(changes: dict[str, Any], named: str) -> None:
    call = msgspec.structs.replace(make_call([(2, 1)]), **changes)
    with pytest.raises(InvalidArgumentError, match=f"^{named} cannot be combined with rows that see no key"):
        attend(call, split([(2, 1)], True), reference)
    whole = split([(2, 2)], True)
    assert whole.is_whole


def test_lengths_come_from_the_mirrors_or_the_device_or_nowhere() -> None:
    call = make_call([(2, 1), (0, 3)])
    assert known_lengths(call) is None
    checked = msgspec.structs.replace(call, skip_all_rows_active_check=False)
    assert known_lengths(checked) == [(2, 1), (0, 3)]
    mirrors = {"q_seq_lens_cpu": torch.tensor([1, 1]), "kv_seq_lens_cpu": torch.tensor([4, 0])}
    assert known_lengths(msgspec.structs.replace(checked, **mirrors)) == [(1, 4), (1, 0)]
    assert known_lengths(msgspec.structs.replace(call, **mirrors)) == [(1, 4), (1, 0)]


def test_reading_the_device_is_refused_under_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    call = msgspec.structs.replace(make_call([(2, 1)]), skip_all_rows_active_check=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with pytest.raises(ValueError, match="give q_seq_lens_cpu and kv_seq_lens_cpu, or leave the check out"):
        known_lengths(call)
