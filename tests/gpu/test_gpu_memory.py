"""Where a call reads and writes: strides, alignment, guard regions, poison, the workspace, huge tensors."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import replace

import pytest
import torch

from tests.gpu.support import (
    FEW_AND_MANY_HEADS,
    HEAD_DIMS,
    MANY_HEADS,
    MASKS,
    TYPES,
    Guarded,
    Problem,
    arguments,
    assert_matches,
    assert_same_bits,
    call,
    expect,
    make_problem,
    make_workspace,
    poisoned,
    run,
    surrounded,
)

pytestmark = pytest.mark.gpu

LENS = [129, 1, 0, 300, 127], [300, 140, 9, 257, 127]


def assert_usable(device: torch.device, workspace: torch.Tensor) -> None:
    """The context survived: a plain call still works."""
    torch.cuda.synchronize(device)
    problem = make_problem([3], [5], device=device)
    assert_matches(problem, call(problem, workspace), expect(problem))


@pytest.mark.parametrize(
    "types",
    [
        *("bf16", "fp8", "fp8 many keys", "sage fp8", "sage fp8 many keys"),
        *("bf16, skipping", "fp8, skipping", "fp16 softmax", "spcompress"),
    ],
)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_strided_tensors(
    dims: tuple[int, int], mask: str, types: str, device: torch.device, workspace: torch.Tensor
) -> None:
    """k and v are halves of one projection, q and out slices of wider buffers; none is copied."""
    heads = MANY_HEADS if types == "fp8 many keys" else 4
    kv_heads = heads // 2
    plain = make_problem(
        *LENS, device=device, dims=dims, heads=heads, kv_heads=kv_heads, types=TYPES[types], **MASKS[mask]
    )
    d_qk, d_v = dims
    packed = poisoned((plain.key.shape[0], kv_heads, d_qk + d_v), plain.key.dtype, device)
    packed[..., :d_qk], packed[..., d_qk:] = plain.key, plain.value
    wide_q = poisoned((plain.query.shape[0], heads + 1, d_qk + 64), plain.query.dtype, device)
    wide_q[:, 1:, 32:-32] = plain.query
    strided = replace(plain, query=wide_q[:, 1:, 32:-32], key=packed[..., :d_qk], value=packed[..., d_qk:])
    wide_out = torch.full(
        (plain.query.shape[0], heads + 2, d_v + 16), 7.0, dtype=plain.out_dtype, device=device
    )
    given = arguments(strided, workspace, out=wide_out[:, 1:-1, 8:-8])
    run(given)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    results = run(given)
    assert torch.cuda.max_memory_allocated(device) == before
    assert_same_bits(results, call(plain, workspace))
    wide_out[:, 1:-1, 8:-8] = 7.0
    assert (wide_out == 7.0).all()


def test_heads_before_tokens(device: torch.device, workspace: torch.Tensor) -> None:
    plain = make_problem(*LENS, device=device, heads=4, kv_heads=2, is_causal=True)
    transposed = replace(
        plain,
        **{
            name: getattr(plain, name).transpose(0, 1).contiguous().transpose(0, 1)
            for name in ("query", "key", "value")
        },
    )
    out = poisoned((4, plain.query.shape[0], 128), torch.bfloat16, device).transpose(0, 1)
    assert_same_bits(call(transposed, workspace, out=out), call(plain, workspace))


@pytest.mark.parametrize("odd", [1, 3, 129, 1 << 33])
def test_strides_of_dimensions_of_size_one(odd: int, device: torch.device, workspace: torch.Tensor) -> None:
    """Such a stride is never used, so torch leaves anything in it."""
    plain = make_problem([1], [1], device=device)
    views = {
        name: getattr(plain, name).as_strided((1, 1, 128), (odd, odd, 1))
        for name in ("query", "key", "value")
    }
    out = poisoned((1, 1, 128), torch.bfloat16, device).as_strided((1, 1, 128), (odd, odd, 1))
    assert_same_bits(call(replace(plain, **views), workspace, out=out), call(plain, workspace))

    two_heads = make_problem([1], [1], device=device, heads=2, kv_heads=2)
    key = two_heads.key.as_strided((1, 2, 128), (odd, 128, 1))
    assert_same_bits(call(replace(two_heads, key=key), workspace), call(two_heads, workspace))


def misaligned(kind: str, tensor: torch.Tensor) -> torch.Tensor:
    """A view with the values of `tensor` that breaks a rule of TMA or of the contract."""
    tokens, heads, dim = tensor.shape
    if kind == "base off by one element":
        view = tensor.new_empty(tensor.numel() + 8)[1 : 1 + tensor.numel()].view_as(tensor)
    elif kind == "odd head stride":
        view = tensor.new_empty(tokens, heads, dim + 1)[..., :dim]
    elif kind == "odd token stride":
        view = tensor.new_empty(tokens, heads * dim + 4)[:, : heads * dim].view(tokens, heads, dim)
    else:
        view = tensor.new_empty(tokens, heads, 2 * dim)[..., ::2]
    return view.copy_(tensor)


@pytest.mark.parametrize("name", ["query", "key", "value", "out"])
@pytest.mark.parametrize(
    "kind", ["base off by one element", "odd head stride", "odd token stride", "every other element"]
)
def test_misaligned_views(kind: str, name: str, device: torch.device, workspace: torch.Tensor) -> None:
    """Either the contiguous result, or a ValueError that names the tensor, before anything is launched."""
    plain = make_problem([3, 4], [5, 9], device=device, heads=2, kv_heads=2)
    out = poisoned(plain.out_shape, torch.bfloat16, device)
    views = {"query": plain.query, "key": plain.key, "value": plain.value, "out": out}
    views[name] = misaligned(kind, views[name])
    given = arguments(plain, workspace, **views)
    try:
        results = run(given)
    except ValueError as error:
        assert name in str(error)  # noqa: PT017 - not raising is right too
        assert given["out"].isnan().all()
    else:
        assert kind != "every other element" or name == "out", "the last dimension must be contiguous"
        assert_same_bits(results, call(plain, workspace))
    assert_usable(device, workspace)


def test_workspace_must_be_aligned_and_large_enough(device: torch.device, workspace: torch.Tensor) -> None:
    problem = make_problem([3, 4], [5, 9], device=device)
    with pytest.raises(ValueError, match="workspace_buffer"):
        call(problem, workspace[1:])
    with pytest.raises(ValueError, match="workspace_buffer"):
        call(problem, torch.empty(1024, dtype=torch.uint8))
    with pytest.raises(ValueError, match="workspace_buffer"):
        call(problem, workspace[:0])
    for dtype in (torch.float32, torch.int8, torch.bfloat16):
        assert_same_bits(call(problem, workspace.view(dtype)), call(problem, workspace))
    assert_usable(device, workspace)


@pytest.mark.parametrize("name", ["cum_seq_lens_q", "cum_seq_lens_kv", "seq_lens"])
@pytest.mark.parametrize("kind", ["int64", "float32", "too short", "two-dimensional"])
def test_metadata_of_another_kind_is_refused(
    name: str, kind: str, device: torch.device, workspace: torch.Tensor
) -> None:
    given = arguments(make_problem([2, 2], [3, 4], device=device), workspace)
    right = given[name]
    given[name] = {
        "int64": right.long(),
        "float32": right.float(),
        "too short": right[:-1],
        "two-dimensional": right[None],
    }[kind]
    with pytest.raises((ValueError, TypeError), match=name):
        run(given)
    assert given["out"].isnan().all()
    assert_usable(device, workspace)


@pytest.mark.parametrize("name", ["cum_seq_lens_q", "cum_seq_lens_kv"])
def test_metadata_on_the_host_is_refused(name: str, device: torch.device, workspace: torch.Tensor) -> None:
    given = arguments(make_problem([2, 2], [3, 4], device=device), workspace)
    with pytest.raises((ValueError, TypeError), match=name):
        run({**given, name: given[name].cpu()})


def test_no_synchronisation(device: torch.device, workspace: torch.Tensor) -> None:
    """Neither the first checks nor the launch read the device, whatever kind the scales and sinks are."""
    problem = make_problem(*LENS, device=device, heads=2, is_causal=True)
    scale, sinks = torch.tensor([0.1], device=device), torch.zeros(2, device=device)
    plain = arguments(problem, workspace)
    tensors = arguments(problem, workspace, bmm1_scale=scale, bmm2_scale=scale, attention_sinks=sinks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        run(plain)
        run(tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_matches(problem, (plain["out"], plain["lse"]), expect(problem))


@pytest.mark.parametrize("heads", FEW_AND_MANY_HEADS)
@pytest.mark.parametrize("padding", [0, 5, 200])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_guard_regions(
    dims: tuple[int, int], mask: str, padding: int, heads: int, device: torch.device, workspace: torch.Tensor
) -> None:
    """NaN on both sides of the inputs reaches no result; bytes on both sides of the results stay."""
    lens = [129, 1, 127]
    plain = make_problem(lens, lens, device=device, dims=dims, heads=heads, padding=padding, **MASKS[mask])
    plain.key[sum(lens) :], plain.value[sum(lens) :], plain.query[sum(lens) :] = math.nan, math.inf, math.nan

    inner = replace(plain, **{name: surrounded(getattr(plain, name)) for name in ("query", "key", "value")})
    out = Guarded(plain.out_shape, plain.query.dtype, device)
    lse = Guarded(plain.out_shape[:2], torch.float32, device)
    results = call(inner, workspace, out=out.tensor, lse=lse.tensor)
    out.assert_intact()
    lse.assert_intact()
    assert_same_bits(results, call(plain, workspace))
    assert_matches(plain, results, expect(plain))


@pytest.mark.parametrize("heads", FEW_AND_MANY_HEADS)
@pytest.mark.parametrize(
    ("types", "poison"),
    [
        *itertools.product(["bf16", "bf16, skipping", "fp16 softmax"], [math.nan, math.inf, -math.inf]),
        # e4m3 has no infinity
        *itertools.product(
            [
                *("fp8", "fp8 many keys", "fp8 values", "sage fp8", "sage fp8 many keys"),
                *("fp8, skipping", "spcompress"),
            ],
            [math.nan],
        ),
    ],
)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_poison_stays_in_its_sequence(
    dims: tuple[int, int],
    mask: str,
    types: str,
    poison: float,
    heads: int,
    device: torch.device,
    workspace: torch.Tensor,
) -> None:
    lens = [129, 40, 130, 0, 61]
    clean = make_problem(
        lens,
        lens,
        device=device,
        dims=dims,
        heads=heads,
        kv_heads=heads // 2,
        types=TYPES[types],
        **MASKS[mask],
    )
    expected = call(clean, workspace)
    spans = list(clean.spans())
    for names, victim in itertools.product(
        [("query",), ("key",), ("value",), ("query", "key", "value")], [0, 1, 2]
    ):
        tensors = {name: getattr(clean, name).clone() for name in names}
        for tensor in tensors.values():
            tensor[spans[victim]] = poison
        results = call(replace(clean, **tensors), workspace)
        for number, rows in enumerate(spans):
            if number != victim:
                assert_same_bits(results, expected, rows)


def test_workspace_contents_do_not_matter(device: torch.device) -> None:
    """Calls of many kinds through one dirty workspace equal the same calls with a fresh one."""
    dirty = make_workspace(device, 0xFF)
    kinds = itertools.product([1, 64, 3], [False, True], [1, 16], [False, True])
    for number, (batch, is_causal, heads, return_lse) in enumerate(kinds):
        lens = [(37 * (i + 1)) % 300 for i in range(batch)]
        problem = make_problem(
            lens,
            lens,
            device=device,
            dims=HEAD_DIMS[number % 3],
            heads=heads,
            kv_heads=1,
            is_causal=is_causal,
        )
        given = {"return_lse": return_lse} if return_lse else {"return_lse": return_lse, "lse": None}
        reused = call(problem, dirty, **given)
        fresh = call(problem, make_workspace(device, 0), **given)
        count = 2 if return_lse else 1
        assert_same_bits(reused[:count], fresh[:count])


def test_calls_in_a_row_share_a_workspace(device: torch.device, workspace: torch.Tensor) -> None:
    """No synchronisation in between, with and without programmatic launches."""
    problems = [
        make_problem([q] * 3, [kv] * 3, device=device, dims=dims, heads=4, seed=q, is_causal=True)
        for dims in HEAD_DIMS
        for q, kv in ((129, 300), (1, 777), (300, 300))
    ]
    expected = [call(problem, workspace) for problem in problems]
    for enable_pdl in (True, False, None):
        rounds = [[arguments(p, workspace, enable_pdl=enable_pdl) for p in problems] for _ in range(5)]
        for given in itertools.chain.from_iterable(rounds):
            run(given)
        for batch in rounds:
            for given, wanted in zip(batch, expected, strict=True):
                assert_same_bits((given["out"], given["lse"]), wanted)


def free_or_skip(device: torch.device, needed: int) -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    if free < needed:
        pytest.skip(f"needs {needed >> 30} GiB of free device memory; there are {free >> 30}")


@pytest.mark.parametrize("types", ["bf16", "fp8", "sage int8", "spcompress"])
def test_kv_offsets_past_two_to_the_31(types: str, device: torch.device, workspace: torch.Tensor) -> None:
    """The second request begins at element 87382 * 128 * 192, just past 2^31."""
    free_or_skip(device, 12 << 30)
    problem = make_problem(
        [1, 1],
        [87_382, 1],
        device=device,
        dims=(192, 128),
        heads=128,
        kv_heads=128,
        types=TYPES[types],
    )
    results = call(problem, workspace)
    second = call(problem.alone(1), workspace)
    if not problem.has_e4m3_p:  # a kernel for many keys rounds unlike that of the second request alone
        assert_same_bits((results[0][1:], results[1][1:]), second)
    assert_matches(problem.alone(1), second, expect(problem.alone(1)))
    assert_matches(problem, results, expect(problem))


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_offsets_past_two_to_the_32(
    dims: tuple[int, int], device: torch.device, workspace: torch.Tensor
) -> None:
    """Two requests with more than 2^32 elements between them, in every tensor.

    What lies between belongs to requests without keys (q) or without queries (k, v): it is never read,
    and stays unwritten in q, k and v.
    """
    heads = 128
    gap = (1 << 32) // (heads * min(dims)) + 1000
    free_or_skip(device, 60 << 30)
    q_lens, kv_lens = [3, gap, 0, 140], [7, 0, gap, 200]
    first = make_problem(
        [3], [7], device=device, dims=dims, heads=heads, kv_heads=heads, seed=1, is_causal=True
    )
    last = make_problem(
        [140], [200], device=device, dims=dims, heads=heads, kv_heads=heads, seed=2, is_causal=True
    )

    def spread(head: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
        tensor = head.new_empty(head.shape[0] + gap + tail.shape[0], *head.shape[1:])
        tensor[: head.shape[0]], tensor[-tail.shape[0] :] = head, tail
        return tensor

    problem = Problem(
        spread(first.query, last.query),
        spread(first.key, last.key),
        spread(first.value, last.value),
        q_lens,
        kv_lens,
        first.options,
    )
    out = problem.query.new_empty(problem.out_shape)
    out[:3] = out[-140:] = math.nan
    out, lse = call(problem, workspace, out=out)
    assert_same_bits((out[:3], lse[:3]), call(first, workspace))
    tail = call(last, workspace)
    assert_same_bits((out[-140:], lse[-140:]), tail)
    assert_matches(last, tail, expect(last))
    assert (lse[3:-140] == -math.inf).all()
    assert not out[3:-140].any()
