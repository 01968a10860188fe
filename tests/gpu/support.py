"""Problems, calls and comparisons that the GPU tests share. Runs on any device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

import cubin_runtime
from cubin_runtime import attention
from cubin_runtime.many_keys import MANY_KEYS
from cubin_runtime.reference import ragged_attention_reference
from cubin_runtime.request import SAGE_OFF

HEAD_DIMS = [(192, 128), (128, 128), (256, 256)]
E4M3 = torch.float8_e4m3fn
# So many that even one row of each fills more than half of the device, and with few: see few_rows.py.
MANY_HEADS = 72
FEW_AND_MANY_HEADS = [4, MANY_HEADS]
MASKS: dict[str, dict[str, Any]] = {
    "dense": {"is_causal": False},
    "causal": {"is_causal": True},
    "sliding": {"is_causal": True, "window_left": 150},
}
# Relative Frobenius error of out against float32.
TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 1e-3}
_FP8_TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 3e-3}
_E4M3_P_TOLERANCE = 3e-2
# A probability of 8 bits is rounded by up to 2^-4 of it. What that does to a row is the same in all of its
# columns: only over many rows is the error the mean one.
_E4M3_P_TOLERANCE_OF_FEW = 2.0**-4
_FEW_ROWS = 256
LSE_TOLERANCE = 1e-3
# The products of 8-bit queries and keys round their sums, to about 13 bits: of the tens of thousands of rows
# of a call, some see one key, and have its rounding. An exponential in half precision is off by 2.4e-3 at
# most: by the rounding of its argument, up to 8, and the instruction's own.
_ROUNDED_LSE_TOLERANCE = 6e-3
# Scaled 8-bit elements use all of their range, so that sums which cancel have larger terms to round.
_SAGE_FP8_LSE_TOLERANCE = 1e-2
WORKSPACE_BYTES = 128 << 20
_GUARD_BYTES = 64 << 10
_GUARD_PATTERN = 0xA5

Results = tuple[torch.Tensor, torch.Tensor]


class Types(NamedTuple):
    """Element types of query and key, of value, and of out; and the arguments that ask for a variant.

    sage_blocks   tokens per Sage scale of query and key
    max_kv_len    what the call says at least of its keys
    """

    query: torch.dtype
    value: torch.dtype
    out: torch.dtype
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed
    sage_blocks: tuple[int, int] | None = None
    max_kv_len: int = 0


SKIPPING = {"skip_softmax_threshold_scale_factor": 1e-30}
"""Nothing is negligible enough: the result is that of the plain kernel."""


TYPES = {
    "bf16": Types(torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "fp16": Types(torch.float16, torch.float16, torch.float16),
    "fp8": Types(E4M3, E4M3, torch.bfloat16),
    "fp8 to fp16": Types(E4M3, E4M3, torch.float16),
    "fp8 many keys": Types(E4M3, E4M3, torch.bfloat16, max_kv_len=MANY_KEYS),
    "fp8 values": Types(torch.bfloat16, E4M3, torch.bfloat16),
    "sage int8": Types(torch.int8, E4M3, torch.bfloat16, sage_blocks=(1, 16)),
    "sage fp8": Types(E4M3, E4M3, torch.bfloat16, sage_blocks=(16, 4)),
    "sage int8 many keys": Types(torch.int8, E4M3, torch.bfloat16, sage_blocks=(1, 16), max_kv_len=MANY_KEYS),
    "sage fp8 many keys": Types(E4M3, E4M3, torch.bfloat16, sage_blocks=(16, 4), max_kv_len=MANY_KEYS),
    "bf16, skipping": Types(torch.bfloat16, torch.bfloat16, torch.bfloat16, SKIPPING),
    "fp16, skipping": Types(torch.float16, torch.float16, torch.float16, SKIPPING),
    "fp8, skipping": Types(E4M3, E4M3, torch.bfloat16, SKIPPING),
    "fp8 to fp16, skipping": Types(E4M3, E4M3, torch.float16, SKIPPING),
    "fp16 softmax": Types(torch.bfloat16, torch.bfloat16, torch.bfloat16, {"use_fp16_softmax": True}),
    "spcompress": Types(E4M3, E4M3, torch.bfloat16, {"uses_spcompress": True}),
    "spcompress to fp16": Types(E4M3, E4M3, torch.float16, {"uses_spcompress": True}),
}
_INT8_DEVIATION = 40.0


@dataclass(frozen=True)
class Problem:
    """The tensors of one call; `options` are further keyword arguments of it."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    q_lens: list[int]
    kv_lens: list[int]
    options: dict[str, Any] = field(default_factory=dict)
    out_dtype: torch.dtype = torch.bfloat16
    least_max_kv_len: int = 0

    @property
    def max_kv_len(self) -> int:
        return max([self.least_max_kv_len, *self.kv_lens])

    @property
    def has_e4m3_p(self) -> bool:
        """Whether its kernel rounds probabilities to 8 bits."""
        window = self.options.get("window_left", -1)
        slides = -1 < window < self.max_kv_len - 1
        selection = cubin_runtime.explain(
            device=self.device.index,
            dtype_q=str(self.query.dtype),
            dtype_k=str(self.key.dtype),
            dtype_v=str(self.value.dtype),
            dtype_o=str(self.out_dtype),
            head_dims=(self.query.shape[2], self.value.shape[2]),
            mask="sliding" if slides else "causal" if self.options.get("is_causal") else "dense",
            num_heads_q=self.query.shape[1],
            num_heads_kv=self.key.shape[1],
            batch_size=len(self.q_lens),
            max_q_len=max(self.q_lens),
            total_q=self.query.shape[0],
            total_kv=self.key.shape[0],
            max_kv_len=window + 1 if slides else self.max_kv_len,
            use_fp16_softmax=bool(self.options.get("use_fp16_softmax")),
            uses_spcompress=bool(self.options.get("uses_spcompress")),
            skips_softmax=bool(self.options.get("skip_softmax_threshold_scale_factor")),
            sage_blocks=self.options.get("num_elts_per_sage_attn_blk", SAGE_OFF),
        )
        return selection.require().e4m3_p

    @property
    def tolerance(self) -> float:
        if self.query.dtype.itemsize == 1 and self.has_e4m3_p:
            return _E4M3_P_TOLERANCE
        return (_FP8_TOLERANCE if self.query.dtype == E4M3 else TOLERANCE)[self.out_dtype]

    @property
    def lse_tolerance(self) -> float:
        if self.query.dtype == E4M3 and "sage_attn_sfs" in self.options:
            return _SAGE_FP8_LSE_TOLERANCE
        rounded = self.query.dtype == E4M3 or self.options.get("use_fp16_softmax")
        return _ROUNDED_LSE_TOLERANCE if rounded else LSE_TOLERANCE

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def out_shape(self) -> tuple[int, int, int]:
        return (*self.query.shape[:2], self.value.shape[2])

    @property
    def covered(self) -> int:
        """Query rows that belong to a sequence; the rest are padding."""
        return sum(self.q_lens)

    @property
    def covered_keys(self) -> int:
        """The same of the keys."""
        return sum(self.kv_lens)

    def with_options(self, **options: Any) -> Problem:
        return replace(self, options={**self.options, **options})

    def spans(self) -> Iterator[slice]:
        """The query rows of each sequence."""
        return spans(self.q_lens)

    def alone(self, number: int) -> Problem:
        """One sequence as a batch of its own, in tensors of its own."""
        rows = list(self.spans())[number]
        begin = sum(self.kv_lens[:number])
        keys = slice(begin, begin + self.kv_lens[number])
        options = self.options
        if "sage_attn_sfs" in options:
            q, k, p, v = options["sage_attn_sfs"]
            q_block, k_block, _, _ = options["num_elts_per_sage_attn_blk"]
            q = q[:, sage_columns(self.q_lens, q_block)[number]].contiguous()
            k = k[:, sage_columns(self.kv_lens, k_block)[number]].contiguous()
            options = {**options, "sage_attn_sfs": (q, k, p, v)}
        return replace(
            self,
            query=self.query[rows].clone(),
            key=self.key[keys].clone(),
            value=self.value[keys].clone(),
            q_lens=[self.q_lens[number]],
            kv_lens=[self.kv_lens[number]],
            options=options,
        )


def make_problem(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    device: torch.device,
    dims: tuple[int, int] = (128, 128),
    heads: int = 1,
    kv_heads: int = 1,
    types: Types = TYPES["bf16"],
    padding: int = 0,
    seed: int = 0,
    **options: Any,
) -> Problem:
    """Normal inputs. `padding` tokens at the end of every tensor belong to no sequence.

    Where a kernel chooses among logits, queries and keys are such that rounding does not decide the choice.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def randn(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        drawn_as = torch.bfloat16 if dtype.itemsize == 1 else dtype
        drawn = torch.randn(*shape, generator=generator, device=device, dtype=drawn_as)
        return ((drawn * _INT8_DEVIATION).clamp(-127, 127) if dtype == torch.int8 else drawn).to(dtype)

    total_q, total_kv = sum(q_lens) + padding, sum(kv_lens) + padding
    if types.sage_blocks:
        lens = (q_lens, total_q, heads), (kv_lens, total_kv, kv_heads)
        q_scales, k_scales = (
            sage_scales(*of, block, types.query, generator)
            for of, block in zip(lens, types.sage_blocks, strict=True)
        )
        v_scales = torch.rand(kv_heads, dims[1], generator=generator, device=device) + 0.5
        options["sage_attn_sfs"] = (q_scales, k_scales, None, v_scales)
        options["num_elts_per_sage_attn_blk"] = (*types.sage_blocks, 0, 1)
    query, key = randn(types.query, total_q, heads, dims[0]), randn(types.query, total_kv, kv_heads, dims[0])
    if types.options.get("uses_spcompress"):
        query, key = _without_ties(query, key, kv_lens)
    return Problem(
        query=query,
        key=key,
        value=randn(types.value, total_kv, kv_heads, dims[1]),
        q_lens=list(q_lens),
        kv_lens=list(kv_lens),
        options={"bmm1_scale": 1 / math.sqrt(dims[0]), **types.options, **options},
        out_dtype=types.out,
        least_max_kv_len=types.max_kv_len,
    )


def sage_columns(lengths: Sequence[int], block: int) -> list[slice]:
    """Where each sequence has its scales."""
    begins = itertools.accumulate(lengths, initial=0)
    return [
        slice(begin // block + number, begin // block + number + -(-length // block))
        for number, (begin, length) in enumerate(zip(begins, lengths, strict=False))
    ]


def sage_scales(
    lengths: Sequence[int],
    tokens: int,
    heads: int,
    block: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> torch.Tensor:
    """Scales of normal numbers, each of its own size, one of eight negative; NaN where none is needed."""
    shape = heads, -(-tokens // block) + max(len(lengths) - 1, 0)
    scales = torch.rand(shape, generator=generator, device=generator.device) / 2 + 0.75
    scales[torch.rand(shape, generator=generator, device=generator.device) < 0.125] *= -1
    if dtype == torch.int8:
        scales /= _INT8_DEVIATION
    unused = torch.ones(shape[1], dtype=torch.bool)
    for columns in sage_columns(lengths, block):
        unused[columns] = False
    scales[:, unused.to(scales.device)] = math.nan
    return scales


def _without_ties(
    query: torch.Tensor, key: torch.Tensor, kv_lens: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Small whole numbers, and a last element that tells four consecutive keys apart: multiples of 1/4, which
    even products of 8 bits add up exactly, and no two of the four are equal."""
    query, key = (tensor.float().round().clamp(-3, 3) for tensor in (query, key))
    query[..., -1] = 1
    for keys in spans(kv_lens):
        place = torch.arange(keys.stop - keys.start, device=key.device) % 4
        key[keys, :, -1] = place[:, None] / 4
    return query.to(E4M3), key.to(E4M3)


def spans(lengths: Sequence[int]) -> Iterator[slice]:
    """The tokens of each sequence."""
    begin = 0
    for length in lengths:
        yield slice(begin, begin + length)
        begin += length


def edges(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def arguments(problem: Problem, workspace: torch.Tensor, **overrides: Any) -> dict[str, Any]:
    """Keyword arguments of the public call. out and lse are poisoned tensors unless given."""
    given = {
        "query": problem.query,
        "key": problem.key,
        "value": problem.value,
        "workspace_buffer": workspace,
        "seq_lens": torch.tensor(problem.kv_lens, dtype=torch.int32, device=problem.device),
        "max_q_len": max(problem.q_lens),
        "max_kv_len": problem.max_kv_len,
        "bmm1_scale": 1.0,
        "bmm2_scale": 1.0,
        "o_sf_scale": 1.0,
        "batch_size": len(problem.q_lens),
        "window_left": -1,
        "cum_seq_lens_q": edges(problem.q_lens, problem.device),
        "cum_seq_lens_kv": edges(problem.kv_lens, problem.device),
        "enable_pdl": None,
        "is_causal": False,
        "return_lse": True,
        **problem.options,
        **overrides,
    }
    if "out" not in given:
        given["out"] = poisoned(problem.out_shape, problem.out_dtype, problem.device)
    if "lse" not in given:
        given["lse"] = poisoned(problem.out_shape[:2], torch.float32, problem.device)
    return given


def run(given: dict[str, Any]) -> Results:
    """The public call with results of the caller's; returns (out, lse)."""
    returned = cubin_runtime.trtllm_ragged_attention_deepseek(**given)
    if given["return_lse"]:
        assert returned[0] is given["out"]
        assert returned[1] is given["lse"]
    else:
        assert returned is given["out"]
    return given["out"], given["lse"]


def chosen_scheduler(given: dict[str, Any]) -> str:
    """Makes the call, and says how its kernel finds its work."""
    attention._forget()
    run(given)
    (prepared,) = attention._prepared.values()
    return str(prepared.kernel.row.scheduler)


def capture(given: dict[str, Any], *, keep_graph: bool = False) -> torch.cuda.CUDAGraph:
    """A graph of the call. Its kernels must have been loaded before."""
    graph = torch.cuda.CUDAGraph(keep_graph=keep_graph)
    with torch.cuda.graph(graph):
        run(given)
    return graph


def set_lengths(given: dict[str, Any], q_lens: list[int], kv_lens: list[int]) -> None:
    """Changes the lengths in place, and poisons the results, for a replay that has to follow."""
    device = given["query"].device
    given["seq_lens"].copy_(torch.tensor(kv_lens))
    given["cum_seq_lens_q"].copy_(edges(q_lens, device))
    given["cum_seq_lens_kv"].copy_(edges(kv_lens, device))
    for name in ("out", "lse"):
        given[name].fill_(math.nan)


def call(problem: Problem, workspace: torch.Tensor, **overrides: Any) -> Results:
    """The public call into poisoned results; returns (out, lse)."""
    return run(arguments(problem, workspace, **overrides))


def expect(problem: Problem) -> Results:
    """The exact results in float32; rows of padding are NaN."""
    out = poisoned(problem.out_shape, torch.float32, problem.device)
    lse = poisoned(problem.out_shape[:2], torch.float32, problem.device)
    options = {"bmm2_scale": 1.0, "is_causal": False, **problem.options}
    options.pop("use_fp16_softmax", None)  # the exact result is its reference
    ragged_attention_reference(
        problem.query,
        problem.key,
        problem.value,
        cum_seq_lens_q=edges(problem.q_lens, problem.device),
        cum_seq_lens_kv=edges(problem.kv_lens, problem.device),
        **options,
        out=out,
        lse=lse,
    )
    return out, lse


def poisoned(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(tuple(shape), math.nan, dtype=dtype, device=device)


def surrounded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with NaN on both sides."""
    margin = 32 << 10  # elements
    buffer = poisoned((tensor.numel() + 2 * margin,), tensor.dtype, tensor.device)
    return buffer[margin:-margin].view_as(tensor).copy_(tensor)


def make_workspace(
    device: torch.device, fill: int | None = None, size: int = WORKSPACE_BYTES
) -> torch.Tensor:
    """Random bytes, or every byte `fill`."""
    if fill is None:
        return torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    return torch.full((size,), fill, dtype=torch.uint8, device=device)


class Guarded:
    """A tensor in the middle of a buffer whose both ends must keep their bytes; floats in it are NaN."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        size = math.prod(shape) * dtype.itemsize
        self.buffer = torch.full((size + 2 * _GUARD_BYTES,), _GUARD_PATTERN, dtype=torch.uint8, device=device)
        self.tensor = self.buffer[_GUARD_BYTES : _GUARD_BYTES + size].view(dtype).view(tuple(shape))
        if dtype.is_floating_point:
            self.tensor.fill_(math.nan)

    def assert_intact(self) -> None:
        for end in (self.buffer[:_GUARD_BYTES], self.buffer[-_GUARD_BYTES:]):
            assert bool((end == _GUARD_PATTERN).all()), "bytes outside the tensor were written"


def assert_matches(
    problem: Problem, actual: Results, expected: Results, *, has_lse: bool = True, context: object = ""
) -> None:
    """Each sequence within tolerance, rows without keys exact, padding untouched."""
    (out, lse), (exact, exact_lse) = actual, expected
    for number, rows in enumerate(problem.spans()):
        difference = (out[rows].float() - exact[rows]).norm()
        tolerance = problem.tolerance
        if tolerance == _E4M3_P_TOLERANCE and exact[rows].shape[:2].numel() < _FEW_ROWS:
            tolerance = _E4M3_P_TOLERANCE_OF_FEW
        limit = tolerance * exact[rows].norm()
        assert bool(difference <= limit), (  # NaN fails too
            f"sequence {number} ({problem.q_lens[number]} x {problem.kv_lens[number]}): "
            f"error {float(difference):.3g}, allowed {float(limit):.3g} {context}"
        )
    assert bool(out[problem.covered :].isnan().all()), f"rows of padding were written {context}"
    if not has_lse:
        return
    torch.testing.assert_close(
        lse,
        exact_lse,
        rtol=4e-6,  # float32's own rounding of large logits
        atol=problem.lse_tolerance,
        equal_nan=True,
        msg=lambda text: f"lse: {text} {context}",
    )
    empty = exact_lse == -math.inf
    assert bool((out[empty] == 0).all()), f"rows without keys are not zero {context}"


def assert_matches_by(scheduler: str, problem: Problem, workspace: torch.Tensor, **overrides: Any) -> None:
    """The call matches the reference, and its kernel finds its work in this way."""
    given = arguments(problem, workspace, **overrides)
    assert chosen_scheduler(given) == scheduler
    assert_matches(problem, (given["out"], given["lse"]), expect(problem))


def assert_replays_follow(
    problem: Problem, given: dict[str, Any], rounds: list[tuple[list[int], list[int]]]
) -> None:
    """Replays of a call that has run before match the reference for each (q_lens, kv_lens)."""
    graph = capture(given)
    for q_lens, kv_lens in rounds:
        set_lengths(given, q_lens, kv_lens)
        for _ in range(3):
            graph.replay()
        changed = replace(problem, q_lens=q_lens, kv_lens=kv_lens)
        assert_matches(changed, (given["out"], given["lse"]), expect(changed))


def assert_same_bits(
    actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], rows: Any = slice(None)
) -> None:
    """Bit for bit, NaN included."""
    for got, wanted in zip(actual, expected, strict=True):
        bits = torch.int16 if got.dtype.itemsize == 2 else torch.int32
        assert torch.equal(got[rows].contiguous().view(bits), wanted[rows].contiguous().view(bits))


def assert_streams_share_nothing(problems: Sequence[Problem], device: torch.device, *, rounds: int) -> None:
    """Calls in one stream for each problem, all under way at once, have the bits of calls alone."""
    workspaces = [make_workspace(device) for _ in problems]
    expected = [call(p, w) for p, w in zip(problems, workspaces, strict=True)]
    streams = [torch.cuda.Stream(device) for _ in problems]
    calls = [[arguments(p, w) for p, w in zip(problems, workspaces, strict=True)] for _ in range(rounds)]
    torch.cuda.synchronize(device)
    for batch in calls:
        for given, stream in zip(batch, streams, strict=True):
            with torch.cuda.stream(stream):
                run(given)
    torch.cuda.synchronize(device)
    for batch in calls:
        for given, wanted in zip(batch, expected, strict=True):
            assert_same_bits((given["out"], given["lse"]), wanted)


def constant_problem(
    values: Sequence[float], q_len: int, *, device: torch.device, heads: int = 1, **options: Any
) -> Problem:
    """q = k = 0, so that all visible keys weigh the same; key j has the value `values[j]`."""
    zeros = torch.zeros(len(values), 1, 128, dtype=torch.bfloat16, device=device)
    value = torch.tensor(values, dtype=torch.bfloat16, device=device)[:, None, None].expand_as(zeros)
    query = zeros.new_zeros(q_len, heads, 128)
    return Problem(query, zeros, value.contiguous(), [q_len], [len(values)], options)


def two_scores(device: torch.device, **options: Any) -> Problem:
    """Logits 0 and 1 for the values 0 and 1: out = e / (1 + e), lse = log2(1 + e)."""
    problem = constant_problem([0.0, 1.0], 1, device=device, **options)
    problem.query[..., 0] = 1.0
    problem.key[1, :, 0] = 1.0
    return problem
