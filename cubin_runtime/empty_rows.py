"""Rows that see no key, for kernels that cannot handle them: left out of the call and filled in here.

Kernels of such a family need at least one query and one key of every sequence, and a key for every query row.
Where the lengths are known, other rows and sequences are cut out, the rest is attended to, and its results
are put in their places; empty rows get out = 0 and lse = -inf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from cubin_runtime.arguments import Call
from cubin_runtime.errors import InvalidArgumentError
from cubin_runtime.request import SAGE_OFF


class Span(NamedTuple):
    """Rows, or sequences, from `start` up to but not including `end`."""

    start: int
    end: int


class Split(NamedTuple):
    """Which rows and sequences have something to do. Spans are in order, apart, and not empty.

    kept        query rows that see a key
    empty       query rows that see none
    sequences   sequences with rows that are kept
    keys        key rows of those sequences
    cuts_keys   whether there are others
    is_whole    whether nothing at all is cut out
    """

    kept: list[Span]
    empty: list[Span]
    sequences: list[Span]
    keys: list[Span]
    cuts_keys: bool
    is_whole: bool


def split(lengths: Iterable[tuple[int, int]], is_causal: bool) -> Split:
    """Splits a batch by its lengths: (queries, keys) of each sequence."""
    kept, empty, sequences, keys = [], [], [], []
    q_start = kv_start = cut_keys = 0
    is_whole = True
    for number, (q_len, kv_len) in enumerate(lengths):
        q_end, kv_end = q_start + q_len, kv_start + kv_len
        seeing = q_end - (min(q_len, kv_len) if is_causal or not kv_len else q_len)
        empty.append(Span(q_start, seeing))
        if seeing < q_end:
            kept.append(Span(seeing, q_end))
            sequences.append(Span(number, number + 1))
            keys.append(Span(kv_start, kv_end))
        else:
            cut_keys += kv_len
        is_whole = is_whole and q_start == seeing < q_end
        q_start, kv_start = q_end, kv_end
    return Split(
        kept=_joined(kept),
        empty=_joined(empty),
        sequences=_joined(sequences),
        keys=_joined(keys),
        cuts_keys=cut_keys > 0,
        is_whole=is_whole,
    )


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Spans that touch as one; empty ones left out."""
    joined: list[Span] = []
    for span in spans:
        if span.start == span.end:
            continue
        if joined and joined[-1].end == span.start:
            joined[-1] = Span(joined[-1].start, span.end)
        else:
            joined.append(span)
    return joined


def known_lengths(call: Call) -> list[tuple[int, int]] | None:
    """(queries, keys) of each sequence: from the CPU mirrors, else from the device if the call wants that.

    None = not known, and the caller vouches that no row is empty. Raises InvalidArgumentError where the
    device must not be read.
    """
    if call.q_seq_lens_cpu is not None and call.kv_seq_lens_cpu is not None:
        return list(zip(call.q_seq_lens_cpu.tolist(), call.kv_seq_lens_cpu.tolist(), strict=True))
    if call.skip_all_rows_active_check:
        return None
    if call.query.is_cuda and torch.cuda.is_current_stream_capturing():
        raise InvalidArgumentError(
            "skip_all_rows_active_check=False reads the lengths from the device, which a CUDA graph cannot "
            "record; give q_seq_lens_cpu and kv_seq_lens_cpu, or leave the check out"
        )
    q_lens = call.cum_seq_lens_q.diff()
    return [(q, kv) for q, kv in torch.stack((q_lens, call.seq_lens), dim=1).tolist()]


def attend(call: Call, parts: Split, run: Callable[[Call], object]) -> None:
    """Computes a call with rows to be left out into its out and lse: `run` does the call without them.

    Everything that depends on lengths is cut by spans known on the host, or computed on the device, so that
    the call may be captured. Raises InvalidArgumentError for arguments that belong to whole batches.
    """
    out, lse = call.out, call.lse
    assert out is not None
    for span in parts.empty:
        out[span.start : span.end].zero_()
        if lse is not None:
            lse[span.start : span.end].fill_(-torch.inf)
    if not parts.kept:
        return
    _check_cuttable(call)
    query = _taken(call.query, parts.kept)
    results = _Results(
        query.new_empty((*query.shape[:2], out.shape[2]), dtype=out.dtype),
        None if lse is None else query.new_empty(query.shape[:2], dtype=lse.dtype),
    )
    run(_cut(call, parts, query, results))
    _put(results.out, out, parts.kept)
    if lse is not None and results.lse is not None:
        _put(results.lse, lse, parts.kept)


def fill(call: Call) -> None:
    """Writes out and lse of a call without any keys, whatever the lengths of its sequences are."""
    assert call.out is not None
    rows = torch.arange(call.query.shape[0], device=call.out.device) < call.cum_seq_lens_q[-1]
    call.out.masked_fill_(rows[:, None, None], 0)
    if call.lse is not None:
        call.lse.masked_fill_(rows[:, None], -torch.inf)


class _Results(NamedTuple):
    out: Tensor
    lse: Tensor | None


def _check_cuttable(call: Call) -> None:
    kinds = {
        "attention_sinks": call.attention_sinks is not None,
        "bmm1_scale as a tensor": isinstance(call.bmm1_scale, Tensor),
        "bmm2_scale as a tensor": isinstance(call.bmm2_scale, Tensor),
        "sage_attn_sfs": tuple(call.num_elts_per_sage_attn_blk) != SAGE_OFF,
    }
    given = [name for name, is_given in kinds.items() if is_given]
    if given:
        raise InvalidArgumentError(
            f"{', '.join(given)} cannot be combined with rows that see no key on this device; leave out "
            "sequences without queries or keys, and rows before the first key of a causal mask"
        )


def _cut(call: Call, parts: Split, query: Tensor, results: _Results) -> Call:
    """The call with what is kept."""
    q_lens = _taken(call.cum_seq_lens_q.diff(), parts.sequences)
    kv_lens = _taken(call.seq_lens, parts.sequences)
    if call.is_causal:
        q_lens = torch.minimum(q_lens, kv_lens)
    return msgspec.structs.replace(
        call,
        query=query,
        key=_taken(call.key, parts.keys) if parts.cuts_keys else call.key,
        value=_taken(call.value, parts.keys) if parts.cuts_keys else call.value,
        seq_lens=kv_lens,
        batch_size=kv_lens.shape[0],
        cum_seq_lens_q=_edges(q_lens),
        cum_seq_lens_kv=_edges(kv_lens),
        out=results.out,
        lse=results.lse,
        q_seq_lens_cpu=None,
        kv_seq_lens_cpu=None,
        skip_all_rows_active_check=True,
    )


def _taken(tensor: Tensor, spans: Sequence[Span]) -> Tensor:
    return torch.cat([tensor[span.start : span.end] for span in spans])


def _put(source: Tensor, target: Tensor, spans: Sequence[Span]) -> None:
    parts = torch.split(source, [span.end - span.start for span in spans])
    for span, part in zip(spans, parts, strict=True):
        target[span.start : span.end].copy_(part)


def _edges(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
