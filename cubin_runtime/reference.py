"""The numerical contract in torch: what `backend="reference"` runs and every kernel is judged against.

`ragged_attention_reference` is attention, `sage_quantize_reference` what makes 8-bit operands for it.

Runs on CPU and GPU, in float32 or wider, in chunks of query rows and heads, so that tens of
thousands of tokens fit in memory. It reads cum_seq_lens on the host, hence synchronises and cannot be
captured in a CUDA graph.

The variants that leave terms out (skip-softmax, spcompress) do so in tiles of 128 query rows of one
head by 128 keys, both counted from the start of their sequence. A term that is left out has its logit
set to -inf, like one that the mask hides; the softmax after that is the same for every variant.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

TILE = 128  # query rows, and keys, of one tile

Scale = float | torch.Tensor
SageScales = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]

_LOGITS_PER_CHUNK = 1 << 25
_LOG2_E = math.log2(math.e)
E4M3_MAX = 448.0
INT8_RANGE = 126.9  # of Sage: rounding up does not leave int8
_LEAST_AMAX = 1e-3


@torch.no_grad()
def ragged_attention_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    bmm1_scale: Scale,
    bmm2_scale: Scale,
    is_causal: bool,
    window_left: int = -1,
    attention_sinks: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    skip_softmax_counts: torch.Tensor | None = None,
    uses_spcompress: bool = False,
    sage_attn_sfs: SageScales = (None, None, None, None),
    num_elts_per_sage_attn_blk: tuple[int, int, int, int] = (0, 0, 0, 0),
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    """Attention of every sequence of a ragged batch, written into `out` and, when given, `lse`.

    query [total_q, num_heads_q, d_qk], key [total_kv, num_heads_kv, d_qk] and value
    [total_kv, num_heads_kv, d_v] have any dtype and strides; num_heads_q is a multiple of num_heads_kv.
    cum_seq_lens_q and cum_seq_lens_kv are integer [batch + 1]. bmm1_scale and bmm2_scale are floats or
    tensors of one element. attention_sinks is float [num_heads_q]. The Sage scales (q, k, p, v) with
    their tokens per scale are laid out as the public call documents; all block sizes 0 = off.

    out [total_q, num_heads_q, d_v] takes any floating dtype (float32 keeps all that is computed;
    e4m3 saturates at 448); lse is float32 [total_q, num_heads_q], base 2. Only rows that
    cum_seq_lens_q covers are written. A row that sees no key gets out 0 and lse -inf.

    skip_softmax_counts, int64 [2], has the number of tiles that skip-softmax left out added to the first
    and that of tiles of which a row sees a key to the second.

    Half-precision softmax has no counterpart here: its reference is the exact one.

    Arguments are taken as valid; the public call checks them.
    """
    problem = _Problem(
        query=query,
        key=key,
        value=value,
        dtype=_working_dtype(),
        bmm1_scale=_scalar(bmm1_scale),
        bmm2_scale=_scalar(bmm2_scale),
        sinks=attention_sinks,
        skip_factor=skip_softmax_threshold_scale_factor or 0.0,
        skip_counts=skip_softmax_counts,
        uses_spcompress=uses_spcompress,
        sage_scales=sage_attn_sfs if sum(num_elts_per_sage_attn_blk) else (None, None, None, None),
        sage_blocks=num_elts_per_sage_attn_blk,
    )
    q_edges, kv_edges = cum_seq_lens_q.tolist(), cum_seq_lens_kv.tolist()
    for number in range(len(q_edges) - 1):
        tokens_q = slice(q_edges[number], q_edges[number + 1])
        tokens_kv = slice(kv_edges[number], kv_edges[number + 1])
        mask = _Mask(_length(tokens_q), _length(tokens_kv), is_causal, window_left)
        _attend(
            problem,
            _Sequence(number, tokens_q, tokens_kv, mask),
            out[tokens_q],
            None if lse is None else lse[tokens_q],
        )


@torch.no_grad()
def sage_quantize_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    q_block_size: int = 1,
    k_block_size: int = 16,
    qk_quant_dtype: torch.dtype = torch.int8,
    cum_seq_lens_q: torch.Tensor | None = None,
    cum_seq_lens_kv: torch.Tensor | None = None,
    smooth_k: bool = False,
) -> tuple[torch.Tensor, ...]:
    """What `trtllm_sage_attention_quantize` documents, with its arguments and results.

    Arguments are taken as valid; the public call checks them.
    """
    cum_seq_lens_kv = cum_seq_lens_q if cum_seq_lens_kv is None else cum_seq_lens_kv
    q_edges = _edges_of(cum_seq_lens_q, query)
    kv_edges = _edges_of(cum_seq_lens_kv, key)
    real = slice(kv_edges[0], kv_edges[-1])
    mean = torch.zeros(key.shape[1:], device=key.device)
    if smooth_k:
        total = key[real].double().nan_to_num(0.0, 0.0, 0.0).sum(0)
        mean = (total / max(_length(real), 1)).float()
    q_quant, q_scale = sage_quantize_blocks(query, q_edges, q_block_size, qk_quant_dtype)
    k_quant, k_scale = sage_quantize_blocks(key, kv_edges, k_block_size, qk_quant_dtype, mean)
    v_quant, v_scale = _quantize_channels(value, real)
    results = (q_quant, k_quant, v_quant, q_scale, k_scale, v_scale)
    return (*results, mean) if smooth_k else results


def sage_quantize_blocks(
    tensor: torch.Tensor,
    edges: list[int],
    block: int,
    dtype: torch.dtype,
    mean: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`tensor - mean` in blocks of tokens that share a scale: the numbers, and scales [heads, columns].

    Sequence b has the tokens edges[b] to edges[b + 1]; mean is float32 [heads, head_dim].
    """
    tokens, heads, head_dim = tensor.shape
    # As a tensor: torch divides by a number on a GPU with a multiplication, which rounds otherwise.
    top = torch.full((), INT8_RANGE if dtype == torch.int8 else E4M3_MAX, device=tensor.device)
    quantized = torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)
    columns = -(-tokens // block) + max(len(edges) - 2, 0)
    scales = torch.full((heads, columns), _LEAST_AMAX, device=tensor.device) / top
    for number, (begin, end) in enumerate(itertools.pairwise(edges)):
        length = end - begin
        blocks = -(-length // block)
        if not blocks:
            continue
        rows = tensor[begin:end].float()
        if mean is not None:
            rows = rows - mean
        rows = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, blocks * block - length))
        rows = rows.view(blocks, block, heads, head_dim)
        amax = rows.abs().amax((1, 3))
        scale = torch.where(amax.isfinite(), amax.clamp(min=_LEAST_AMAX) / top, torch.nan)
        inverse = (1 / scale)[:, None, :, None]
        rows = torch.where(inverse.isnan(), 0.0, rows * inverse).view(-1, heads, head_dim)[:length]
        quantized[begin:end] = _to_eight_bits(rows, dtype)
        column = begin // block + number
        scales[:, column : column + blocks] = scale.T
    return quantized, scales


def _quantize_channels(value: torch.Tensor, real: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 numbers, and scales [heads, head_dim] over the real tokens."""
    rows = value[real].float()
    finite = rows.abs().nan_to_num(0.0, 0.0, 0.0)
    floor = torch.full((1, *value.shape[1:]), _LEAST_AMAX, device=value.device)
    scale = torch.cat((finite, floor)).amax(0) / torch.full((), E4M3_MAX, device=value.device)
    quantized = torch.zeros(value.shape, dtype=torch.float8_e4m3fn, device=value.device)
    quantized[real] = _to_eight_bits(rows * (1 / scale), torch.float8_e4m3fn)
    return quantized, scale


def _to_eight_bits(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.int8:
        return rows.round().to(dtype)
    return rows.clamp(-E4M3_MAX, E4M3_MAX).to(dtype)


def _edges_of(cum_seq_lens: torch.Tensor | None, tensor: torch.Tensor) -> list[int]:
    """Where sequences begin, and the end of the last one."""
    edges: list[int] = [0, tensor.shape[0]] if cum_seq_lens is None else cum_seq_lens.tolist()
    return edges


class _Problem(NamedTuple):
    """What all sequences share."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    dtype: torch.dtype  # of everything computed
    bmm1_scale: Scale
    bmm2_scale: Scale
    sinks: torch.Tensor | None
    skip_factor: float  # 0 = off
    skip_counts: torch.Tensor | None
    uses_spcompress: bool
    sage_scales: SageScales
    sage_blocks: tuple[int, int, int, int]


class _Mask(NamedTuple):
    """Which keys a query row of one sequence sees: always one interval."""

    q_len: int
    kv_len: int
    is_causal: bool
    window_left: int  # negative = no window

    @property
    def diagonal(self) -> int:
        """The key that query row 0 is aligned to; negative when queries outnumber keys."""
        return self.kv_len - self.q_len

    def first_key(self, row: int) -> int:
        """The first visible key of a row, were every key from there on visible."""
        return max(0, row + self.diagonal - self.window_left) if self.window_left >= 0 else 0

    def end_key(self, row: int) -> int:
        """One past the last visible key of a row; 0 when it sees none."""
        return min(max(0, row + self.diagonal + 1), self.kv_len) if self.is_causal else self.kv_len

    def tiles_seen_by(self, rows: slice) -> slice:
        """The keys that some of these rows see, begun at a tile's edge."""
        begin = self.first_key(rows.start) // TILE * TILE
        return slice(begin, max(begin, self.end_key(rows.stop - 1)))

    def visible(self, rows: slice, keys: slice, device: torch.device) -> torch.Tensor:
        """bool [rows, keys]."""
        distance = torch.arange(rows.start, rows.stop, device=device)[:, None] + self.diagonal
        distance = distance - torch.arange(keys.start, keys.stop, device=device)
        visible = torch.ones_like(distance, dtype=torch.bool)
        if self.is_causal:
            visible &= distance >= 0
        if self.window_left >= 0:
            visible &= distance <= self.window_left
        return visible


class _Sequence(NamedTuple):
    """One request of the batch."""

    number: int
    tokens_q: slice
    tokens_kv: slice
    mask: _Mask


def _attend(problem: _Problem, sequence: _Sequence, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Fills the rows of one sequence: out [q_len, heads, d_v], lse [q_len, heads]."""
    num_heads = problem.query.shape[1]
    q_len, kv_len = sequence.mask.q_len, sequence.mask.kv_len
    tiles = max(1, _LOGITS_PER_CHUNK // (TILE * max(1, kv_len)))
    heads_step = min(num_heads, tiles)
    rows_step = TILE * (tiles // heads_step)
    for heads in _slices(num_heads, heads_step):
        keys, values = _load_kv(problem, sequence, heads)
        for rows in _slices(q_len, rows_step):
            queries = _load_queries(problem, sequence, heads, rows)
            chunk_out, chunk_lse = _attend_chunk(problem, sequence.mask, heads, rows, queries, keys, values)
            _store(out[rows, heads], chunk_out.transpose(0, 1))
            if lse is not None:
                lse[rows, heads] = chunk_lse.T.to(lse.dtype)


def _attend_chunk(
    problem: _Problem,
    mask: _Mask,
    heads: slice,
    rows: slice,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Result of some rows of some heads: out [heads, rows, d_v] and lse [heads, rows]."""
    seen = mask.tiles_seen_by(rows)
    if not _length(seen):
        shape = queries.shape[:2]
        return values.new_zeros(*shape, values.shape[-1]), values.new_full(shape, -math.inf)
    logits = torch.matmul(queries, keys[:, seen].transpose(1, 2)).mul_(problem.bmm1_scale)
    visible = mask.visible(rows, seen, logits.device)
    logits.masked_fill_(~visible, -math.inf)
    if problem.uses_spcompress:
        _prune_interior_tiles(logits, mask, rows, seen)
    if problem.skip_factor:
        tiles = _Tiles.of(logits, problem.skip_factor / mask.kv_len)
        logits.masked_fill_(tiles.spread(logits), -math.inf)
        if problem.skip_counts is not None:
            problem.skip_counts.add_(torch.stack((tiles.left_out.sum(), tiles.seen.sum())))

    peak = logits.amax(-1)
    sinks = None if problem.sinks is None else problem.sinks[heads, None].to(problem.dtype)
    if sinks is not None:
        peak = torch.maximum(peak, sinks)
    peak = peak.masked_fill(peak == -math.inf, 0.0)  # a row without terms: exp(-inf - 0), not NaN
    weights = logits.sub_(peak[..., None]).exp_()
    total = weights.sum(-1)
    if sinks is not None:
        total += torch.exp(sinks - peak)

    empty = ~visible.any(-1)
    out = _weigh(weights, values[:, seen]).div_(total[..., None]).mul_(problem.bmm2_scale)
    lse = (total.log() + peak) * _LOG2_E
    return out.masked_fill_(empty[:, None], 0.0), lse.masked_fill_(empty, -math.inf)


def _prune_interior_tiles(logits: torch.Tensor, mask: _Mask, rows: slice, keys: slice) -> None:
    """spcompress: of each 4 consecutive keys of an interior tile only the 2 largest logits stay.

    Interior means visible to all of the tile's query rows: 128, or what is left of the sequence. A last
    tile with fewer keys is not interior.
    """
    for row in range(rows.start, rows.stop, TILE):
        last_row = min(row + TILE, rows.stop) - 1
        begin = -(-mask.first_key(last_row) // TILE) * TILE
        end = mask.end_key(row) // TILE * TILE
        if begin >= end:
            continue
        tile_rows = slice(row - rows.start, row - rows.start + TILE)
        block = logits[:, tile_rows, begin - keys.start : end - keys.start]
        fours = block.view(*block.shape[:2], -1, 4)
        fours.scatter_(-1, fours.topk(2, largest=False).indices, -math.inf)


class _Tiles(NamedTuple):
    """skip-softmax: which tiles some row sees, and which of these are left out, bool [heads, rows, keys].

    Tiles are visited from the last visible one to the first, as our kernels do. One is left out when
    exp(tile maximum - maximum over the tiles visited before) < threshold holds for each of its rows; a
    row that sees no key of the tile agrees. So the first tile that a row sees is never left out.
    """

    seen: torch.Tensor
    left_out: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor, threshold: float) -> _Tiles:
        """Of logits [heads, rows, keys], -inf where a key is hidden."""
        heads, rows, keys = logits.shape
        row_tiles, key_tiles = -(-rows // TILE), -(-keys // TILE)
        padding = (0, key_tiles * TILE - keys, 0, row_tiles * TILE - rows)
        padded = torch.nn.functional.pad(logits, padding, value=-math.inf)
        peaks = padded.view(heads, row_tiles, TILE, key_tiles, TILE).amax(-1)
        running = peaks.flip(-1).cummax(-1).values.flip(-1)
        before = torch.nn.functional.pad(running[..., 1:], (0, 1), value=-math.inf)
        seen = peaks != -math.inf
        negligible = ((peaks < before + math.log(threshold)) | ~seen).all(2)
        return cls(seen.any(2), negligible & seen.any(2))

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """bool like the logits, true where they are left out."""
        left_out = self.left_out.repeat_interleave(TILE, 1).repeat_interleave(TILE, 2)
        return left_out[:, : logits.shape[1], : logits.shape[2]]


def _weigh(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """weights @ values, where a weight of zero silences even NaN and infinity."""
    product = torch.matmul(weights, values)
    wild = ~values.isfinite()
    if not wild.any():
        return product
    finite = torch.matmul(weights, values.masked_fill(wild, 0.0))
    touched = torch.matmul((weights != 0).to(values.dtype), wild.to(values.dtype)) != 0
    return torch.where(touched, product, finite)


def _load_queries(problem: _Problem, sequence: _Sequence, heads: slice, rows: slice) -> torch.Tensor:
    """[heads, rows, d_qk] with the Sage scales applied."""
    queries = problem.query[sequence.tokens_q][rows, heads].transpose(0, 1).to(problem.dtype)
    scales, block = problem.sage_scales[0], problem.sage_blocks[0]
    if scales is None:
        return queries
    return queries * _scale_of_tokens(scales, block, sequence.number, sequence.tokens_q)[heads, rows, None]


def _load_kv(problem: _Problem, sequence: _Sequence, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values per query head, [heads, kv_len, d], with the Sage scales applied."""
    group = problem.query.shape[1] // problem.key.shape[1]
    used = slice(heads.start // group, (heads.stop - 1) // group + 1)
    tokens = sequence.tokens_kv
    keys = problem.key[tokens, used].transpose(0, 1).to(problem.dtype)
    values = problem.value[tokens, used].transpose(0, 1).to(problem.dtype)
    _, k_scales, _, v_scales = problem.sage_scales
    if k_scales is not None:
        block = problem.sage_blocks[1]
        keys = keys * _scale_of_tokens(k_scales, block, sequence.number, tokens)[used, :, None]
    if v_scales is not None:
        values = values * v_scales[used, None]
    of_head = torch.arange(heads.start, heads.stop, device=keys.device) // group - used.start
    return keys[of_head], values[of_head]


def _scale_of_tokens(scales: torch.Tensor, block: int, number: int, tokens: slice) -> torch.Tensor:
    """The Sage scales of one sequence's tokens, [heads, length], from [heads, columns].

    Every sequence begins a block of its own, so sequence `number` lies that many columns further on.
    """
    local = torch.arange(_length(tokens), device=scales.device)
    return scales[:, tokens.start // block + number + local // block]


def _store(destination: torch.Tensor, result: torch.Tensor) -> None:
    if destination.dtype == torch.float8_e4m3fn:  # as cvt.satfinite; torch's conversion makes NaN
        result = result.clamp(-E4M3_MAX, E4M3_MAX)
    destination.copy_(result)


def _working_dtype() -> torch.dtype:
    """float32, or float64 where the process lets torch round the factors of float32 products."""
    try:
        exact = torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # torch refuses to answer once both its old and its new switches were used
        exact = False
    return torch.float32 if exact else torch.float64


def _scalar(scale: Scale) -> Scale:
    return scale.reshape(()) if isinstance(scale, torch.Tensor) else scale


def _slices(length: int, step: int) -> Iterator[slice]:
    return (slice(begin, min(begin + step, length)) for begin in range(0, length, step))


def _length(span: slice) -> int:
    length: int = span.stop - span.start
    return length
