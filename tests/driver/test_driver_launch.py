"""Launching through the real cuda.bindings: what arrives in the stub driver is what was asked for."""

import pytest

SETUP = """
from stub_support import *
from cubin_runtime.errors import DriverError, InvalidArgumentError
from cubin_runtime.launch import LaunchPlan, launch
from cubin_runtime.module import load
row = make_row()
folder = publish(row)
parameters = bytes(i % 251 for i in range(row.resources.parameter_bytes))
"""

LAUNCH = SETUP + "launch(LaunchPlan(load(row, 0, folder=folder), (3, 2, 1)), parameters, 77)\n"


def test_everything_that_was_asked_for_arrives(run_with_stub):
    (call,) = run_with_stub(LAUNCH, parameter_bytes=320).named("cuLaunchKernelEx")
    assert (call["kernel"], call["grid"], call["block"]) == ("by_value", [3, 2, 1], [384, 1, 1])
    assert (call["shared"], call["stream"]) == (196608, 77)
    assert bytes.fromhex(call["parameters"]) == bytes(i % 251 for i in range(320))
    assert "pdl" not in call
    assert "cluster" not in call


@pytest.mark.parametrize(("row_pdl", "asked", "expected"), [(1, 1, True), (1, 0, None), (0, 1, None)])
def test_dependent_launch_needs_the_kernel_and_the_caller(run_with_stub, row_pdl, asked, expected):
    run = run_with_stub(
        SETUP
        + f"""
import msgspec
row = msgspec.structs.replace(row, pdl=bool({row_pdl}))
launch(LaunchPlan(load(row, 0, folder=folder), (1, 1, 1)), parameters, 0, pdl=bool({asked}))
"""
    )
    (call,) = run.named("cuLaunchKernelEx")
    assert call.get("pdl") is expected


def test_a_cluster_is_passed_with_dependent_launch(run_with_stub):
    run = run_with_stub(
        SETUP
        + """
import msgspec
row = msgspec.structs.replace(row, cluster=(2, 1, 1))
launch(LaunchPlan(load(row, 0, folder=folder), (4, 1, 1)), parameters, 0, pdl=True)
"""
    )
    (call,) = run.named("cuLaunchKernelEx")
    assert (call["cluster"], call["pdl"]) == ([2, 1, 1], True)


def test_later_launches_change_grid_stream_parameters_and_pdl(run_with_stub):
    run = run_with_stub(
        SETUP
        + """
kernel = load(row, 0, folder=folder)
for i, (grid, stream, pdl) in enumerate([((1, 1, 1), 0, False), ((2, 1, 3), 5, True), ((1, 1, 1), 0, False)]):
    launch(LaunchPlan(kernel, grid), bytes([i]) * len(parameters), stream, pdl)
""",
        parameter_bytes=1,
    )
    calls = run.named("cuLaunchKernelEx")
    assert [(c["grid"], c["stream"], c.get("pdl", False), c["parameters"]) for c in calls] == [
        ([1, 1, 1], 0, False, "00"),
        ([2, 1, 3], 5, True, "01"),
        ([1, 1, 1], 0, False, "02"),
    ]


def test_a_warm_launch_makes_two_driver_calls(run_with_stub):
    run = run_with_stub(
        SETUP
        + """
from cubin_runtime import _driver
plan = LaunchPlan(load(row, 0, folder=folder), (1, 1, 1))
with _driver.pushed(plan.kernel.context):
    for _ in range(3):
        launch(plan, parameters, 0)
"""
    )
    warm = [call["call"] for call in run.calls[-5:-1]]
    assert warm == ["cuCtxGetCurrent", "cuLaunchKernelEx"] * 2


def test_two_devices_in_turn_keep_the_callers_context(run_with_stub):
    run = run_with_stub(
        SETUP
        + """
import ctypes
first, second = load(row, 0, folder=folder), load(row, 1, folder=folder)
stub.cuCtxPushCurrent_v2(ctypes.c_void_p(first.context))
for kernel in (first, second, first):
    launch(LaunchPlan(kernel, (1, 1, 1)), parameters, 0)
    current = ctypes.c_void_p()
    stub.cuCtxGetCurrent(ctypes.byref(current))
    assert (current.value, stub.stub_stack_depth()) == (first.context, 1)
print(first.context, second.context)
""",
        devices=("9.0:132:232448",) * 2,
    )
    first, second = map(int, run.stdout.split())
    assert [call["context"] for call in run.named("cuLaunchKernelEx")] == [first, second, first]


def test_a_thread_without_a_context_can_launch(run_with_stub):
    run = run_with_stub(
        SETUP
        + """
import threading
def work():
    launch(LaunchPlan(load(row, 0, folder=folder), (1, 1, 1)), parameters, 0)
    assert stub.stub_stack_depth() == 0
threads = [threading.Thread(target=work) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
    )
    calls = run.named("cuLaunchKernelEx")
    assert [call["result"] for call in calls] == [0] * 4
    assert len({call["thread"] for call in calls}) == 4


def test_threads_do_not_share_parameters(run_with_stub):
    """Each launch must carry one thread's bytes whole, with the grid that the thread asked for."""
    run = run_with_stub(
        SETUP
        + """
import threading
kernel = load(row, 0, folder=folder)
def work(i):
    for _ in range(50):
        launch(LaunchPlan(kernel, (i, 1, 1)), bytes([i]) * len(parameters), i)
threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 5)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
""",
        parameter_bytes=320,
    )
    calls = run.named("cuLaunchKernelEx")
    assert len(calls) == 200
    for call in calls:
        i = call["grid"][0]
        assert (call["stream"], call["parameters"]) == (i, f"{i:02x}" * 320)


def test_several_parameters_are_laid_out_as_the_cubin_says(run_with_stub):
    run = run_with_stub(
        """
        from stub_support import *
        from cubin_runtime import _driver
        from cubin_runtime.cubin import inspect
        facts = inspect((CUBINS / "facts_13.0_sm_90a.cubin").read_bytes()).kernels["several"]
        print([(p.offset, p.size) for p in facts.parameters], facts.parameter_bytes)
        launcher = _driver.Launcher(
            1, threads=32, shared_memory=0, attributes=[],
            offsets=[p.offset for p in facts.parameters], parameter_bytes=facts.parameter_bytes,
        )
        launcher.area[:] = bytes(range(facts.parameter_bytes))
        import ctypes
        pointers = (ctypes.c_void_p * 5).from_address(launcher._arguments)
        print([ctypes.string_at(p, 1)[0] for p in pointers])
        """
    )
    assert run.stdout.splitlines() == [
        "[(0, 4), (16, 16), (32, 1), (40, 8), (48, 8)] 56",
        "[0, 16, 32, 40, 48]",
    ]


@pytest.mark.parametrize("code", [1, 201, 400, 700, 701, 719])
def test_a_refused_launch_names_everything(run_with_stub, code):
    run = run_with_stub(
        SETUP
        + """
kernel = load(row, 0, folder=folder)
try:
    launch(LaunchPlan(kernel, (3, 2, 1)), parameters, 77)
except DriverError as error:
    print(error.code, error)
assert stub.stub_stack_depth() == 0
fail("cuLaunchKernelEx", 0)
launch(LaunchPlan(kernel, (3, 2, 1)), parameters, 77)
""",
        fail=f"cuLaunchKernelEx={code}:1",
    )
    assert run.stdout.startswith(f"{code} cuLaunchKernelEx failed with CUDA_ERROR_")
    for part in ("fmha_sm90_sm90a", "device 0", "grid (3, 2, 1)", "384 threads", "196608 bytes", "0x4d"):
        assert part in run.stdout


def test_an_empty_grid_is_the_drivers_to_refuse(run_with_stub):
    run = run_with_stub(
        SETUP
        + """
try:
    launch(LaunchPlan(load(row, 0, folder=folder), (0, 1, 1)), parameters, 0)
except DriverError as error:
    print(error.name)
"""
    )
    assert run.stdout == "CUDA_ERROR_INVALID_VALUE\n"


@pytest.mark.parametrize("length", [0, 319, 321])
def test_parameters_of_another_size_are_refused(run_with_stub, length):
    run = run_with_stub(
        SETUP
        + f"""
try:
    launch(LaunchPlan(load(row, 0, folder=folder), (1, 1, 1)), bytes({length}), 0)
except InvalidArgumentError as error:
    print(error)
"""
    )
    assert f"{length} bytes; expected 320" in run.stdout
    assert not run.named("cuLaunchKernelEx")


def test_launchers_go_with_their_kernel(run_with_stub):
    run_with_stub(
        SETUP
        + """
import gc
from cubin_runtime import _driver
from cubin_runtime.module import unload_all
for _ in range(3):
    launch(LaunchPlan(load(row, 0, folder=folder), (1, 1, 1)), parameters, 0)
    unload_all()
gc.collect()
assert not any(isinstance(each, _driver.Launcher) for each in gc.get_objects())
"""
    )
