"""Streams, threads, devices and programmatic launches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cuda.bindings import driver

from tests.gpu.support import (
    HEAD_DIMS,
    MASKS,
    TYPES,
    Problem,
    Results,
    arguments,
    assert_matches,
    assert_same_bits,
    assert_streams_share_nothing,
    call,
    expect,
    make_problem,
    make_workspace,
    run,
)

pytestmark = pytest.mark.gpu

DELAY_CYCLES = 20_000_000  # about 10 ms


def some_problem(
    device: torch.device, seed: int, dims: tuple[int, int] = (192, 128), types: str = "bf16"
) -> Problem:
    return make_problem(
        [129, 0, 5, 64],
        [300, 7, 0, 140],
        device=device,
        dims=dims,
        heads=4,
        kv_heads=2,
        types=TYPES[types],
        is_causal=True,
        seed=seed,
    )


def test_runs_on_the_current_stream(device: torch.device, workspace: torch.Tensor) -> None:
    """A late producer on the same stream is waited for; nothing runs on the default stream."""
    problem = some_problem(device, seed=1)
    expected = call(problem, workspace)
    late = replace(problem, query=torch.full_like(problem.query, float("nan")))
    side = torch.cuda.Stream(device)
    for stream in (side, torch.cuda.ExternalStream(side.cuda_stream, device=device)):
        late.query.fill_(float("nan"))
        given = arguments(late, workspace)
        torch.cuda.synchronize(device)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(DELAY_CYCLES)
            late.query.copy_(problem.query)
            run(given)
            copies = given["out"].clone(), given["lse"].clone()
            late.query.fill_(float("nan"))
        stream.synchronize()
        assert_same_bits(copies, expected)


def test_two_streams_share_nothing(device: torch.device) -> None:
    problems = [some_problem(device, seed=1), some_problem(device, seed=2)]
    problems[1] = replace(problems[1], kv_lens=[0, 300, 0, 147])
    assert_streams_share_nothing(problems, device, rounds=100)


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Runs work(0) ... work(count - 1) at once, and raises what any of them raised."""
    start = threading.Barrier(count)
    errors: list[BaseException] = []

    def body(number: int) -> None:
        try:
            start.wait(timeout=60)
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


def test_eight_threads(device: torch.device) -> None:
    """Each with its own stream and workspace, and kernels of all head dims, types and variants."""
    types = ("bf16", "sage int8", "fp8", "bf16, skipping", "fp16 softmax")
    problems = [some_problem(device, n, HEAD_DIMS[n % 3], types[n % len(types)]) for n in range(8)]
    workspaces = [make_workspace(device, size=16 << 20) for _ in problems]
    expected = [call(p, w) for p, w in zip(problems, workspaces, strict=True)]
    results: list[list[Results]] = [[] for _ in problems]
    torch.cuda.synchronize(device)

    def work(number: int) -> None:
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            for _ in range(25):
                results[number].append(call(problems[number], workspaces[number]))
        stream.synchronize()

    in_threads(8, work)
    for number, wanted in enumerate(expected):
        assert len(results[number]) == 25
        for got in results[number]:
            assert_same_bits(got, wanted)


def current_context() -> int:
    code, context = driver.cuCtxGetCurrent()
    assert code == driver.CUresult.CUDA_SUCCESS
    return int(context)


def test_a_thread_without_a_context(device: torch.device, workspace: torch.Tensor) -> None:
    """The call needs no context of the thread's own, and leaves it as it was."""
    problem = some_problem(device, seed=1)
    expected = call(problem, workspace)
    given = arguments(problem, workspace)
    torch.cuda.synchronize(device)
    contexts = []

    def work(_: int) -> None:
        contexts.append(current_context())
        run(given)
        contexts.append(current_context())

    in_threads(1, work)
    torch.cuda.synchronize(device)
    assert contexts == [0, 0]
    assert_same_bits((given["out"], given["lse"]), expected)


def test_the_callers_context_stays(device: torch.device, workspace: torch.Tensor) -> None:
    problem = some_problem(device, seed=1)
    torch.cuda.synchronize(device)
    before = current_context()
    call(problem, workspace)
    assert current_context() == before
    assert torch.cuda.current_device() == device.index


def second_device() -> torch.device:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    if torch.cuda.get_device_capability(1) != (9, 0):
        pytest.skip("needs compute capability 9.0 on device 1 too")
    return torch.device("cuda", 1)


def test_another_device_than_the_current_one(device: torch.device, workspace: torch.Tensor) -> None:
    other = second_device()
    for where in (device, other, device):
        problem = some_problem(where, seed=1)
        results = call(problem, make_workspace(where))
        assert torch.cuda.current_device() == device.index
        torch.cuda.synchronize(where)
        assert_matches(problem, results, expect(problem))


def test_a_thread_bound_to_another_device(device: torch.device, workspace: torch.Tensor) -> None:
    second_device()
    problem = some_problem(device, seed=1)
    expected = call(problem, workspace)
    given = arguments(problem, workspace)
    torch.cuda.synchronize(device)

    def work(_: int) -> None:
        torch.cuda.set_device(1)
        before = current_context()
        run(given)
        assert current_context() == before
        assert torch.cuda.current_device() == 1

    in_threads(1, work)
    torch.cuda.synchronize(device)
    assert_same_bits((given["out"], given["lse"]), expected)


def test_tensors_of_two_devices_are_refused(device: torch.device, workspace: torch.Tensor) -> None:
    other = second_device()
    problem = some_problem(device, seed=1)
    for name in ("key", "value", "workspace_buffer", "cum_seq_lens_q", "cum_seq_lens_kv", "out", "lse"):
        given = arguments(problem, workspace)
        given[name] = given[name].to(other)
        with pytest.raises(ValueError, match=name):
            run(given)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_programmatic_launches_change_no_bit(
    dims: tuple[int, int], mask: str, device: torch.device, workspace: torch.Tensor
) -> None:
    problem = make_problem([129, 0, 300], [300, 7, 0], device=device, dims=dims, heads=4, **MASKS[mask])
    off = call(problem, workspace, enable_pdl=False)
    assert_same_bits(call(problem, workspace, enable_pdl=True), off)
    assert_same_bits(call(problem, workspace, enable_pdl=None), off)
    given = arguments(problem, workspace)
    del given["enable_pdl"]
    assert_same_bits(run(given), off)


def test_programmatic_launches_wait_for_their_input(device: torch.device, workspace: torch.Tensor) -> None:
    """Every call reads the output of the one before it, which its launch may overlap."""
    problem = make_problem([700], [700], device=device, heads=8, kv_heads=8, is_causal=True)

    def chain(enable_pdl: bool, *, wait: bool) -> torch.Tensor:
        current = problem
        for _ in range(40):
            out, _ = call(current, workspace, enable_pdl=enable_pdl)
            current = replace(current, query=out, value=out)
            if wait:
                torch.cuda.synchronize(device)
        return current.query

    expected = chain(enable_pdl=False, wait=True)
    for _ in range(5):
        assert torch.equal(chain(enable_pdl=True, wait=False), expected)
