"""Loading kernels through the real cuda.bindings, on the stub driver."""

import pytest

SETUP = """
from stub_support import *
from cubin_runtime.module import device_info, load, unload_all
row = make_row()
folder = publish(row)
"""

TWO_DEVICES = ("9.0:132:232448", "9.0:114:232448")


def test_a_cubin_is_loaded_once_and_prepared_once_per_device(run_with_stub):
    run = run_with_stub(
        SETUP
        + """
first, second = load(row, 0, folder=folder), load(row, 1, folder=folder)
assert first is load(row, 0) and second is load(row, 1) and first is not second
assert first.handle == second.handle and first.context != second.context
assert (first.store, first.facts.name, first.device.ordinal) == ("folder", "by_value", 0)
""",
        devices=TWO_DEVICES,
    )
    assert len(run.named("cuLibraryLoadData")) == 1
    assert [(c["device"], c["attribute"], c["value"]) for c in run.named("cuKernelSetAttribute")] == [
        (0, 8, 196608),
        (1, 8, 196608),
    ]


def test_shared_memory_is_raised_once_and_never_lowered(run_with_stub):
    run = run_with_stub(
        SETUP
        + """
import msgspec
small = msgspec.structs.replace(
    row, tile_q=64, resources=msgspec.structs.replace(row.resources, shared_memory=1000)
)
from cubin_runtime import module
publish(row, small)
module.check_row = lambda cubin, row: None  # the cubin states one size; here two rows share the entry
for each in (row, small, row, small):
    load(each, 0, folder=folder)
"""
    )
    assert [call["value"] for call in run.named("cuKernelSetAttribute")] == [196608]


def test_threads_that_come_together_load_once(run_with_stub):
    run = run_with_stub(
        SETUP
        + """
import threading
barrier = threading.Barrier(8)
kernels = []
def work():
    barrier.wait()
    kernels.append(load(row, 0, folder=folder))
threads = [threading.Thread(target=work) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len(kernels) == 8 and len(set(map(id, kernels))) == 1
"""
    )
    assert len(run.named("cuLibraryLoadData")) == len(run.named("cuKernelSetAttribute")) == 1


@pytest.mark.parametrize(
    "function",
    ["cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelSetAttribute", "cuDevicePrimaryCtxRetain"],
)
def test_a_failed_load_is_tried_again(run_with_stub, function):
    run = run_with_stub(
        SETUP
        + """
from cubin_runtime.errors import DriverError
try:
    load(row, 0, folder=folder)
except DriverError as error:
    print(error.code, error.name, error)
load(row, 0, folder=folder)
""",
        fail=f"{function}=2:1",
    )
    assert run.stdout.startswith(
        f"2 CUDA_ERROR_OUT_OF_MEMORY {function} failed with CUDA_ERROR_OUT_OF_MEMORY"
    )
    assert "out of memory" in run.stdout


def test_loading_is_legal_while_a_stream_is_captured(run_with_stub):
    run_with_stub(
        SETUP
        + """
stub.stub_capture(1)
load(row, 0, folder=folder)
assert not stub.stub_capture_invalidated() and stub.stub_capture_mode() == 0
"""
    )


def test_the_capture_mode_is_restored_after_a_failure(run_with_stub):
    run_with_stub(
        SETUP
        + """
from cubin_runtime.errors import DriverError
try:
    load(row, 0, folder=folder)
except DriverError:
    assert stub.stub_capture_mode() == 0
else:
    raise AssertionError
""",
        fail="cuLibraryLoadData=209",
    )


def test_loading_leaves_the_context_stack_alone(run_with_stub):
    run = run_with_stub(SETUP + "load(row, 0, folder=folder); assert stub.stub_stack_depth() == 0")
    assert {call["context"] for call in run.calls} == {0}


def test_a_cubin_for_another_device_never_reaches_the_driver(run_with_stub):
    run = run_with_stub(
        SETUP
        + """
from cubin_runtime.errors import UnsupportedError
try:
    load(row, 0, folder=folder)
except UnsupportedError as error:
    print(error)
load(row, 1, folder=folder)
""",
        devices=("10.3:160:232448", "9.0:132:232448"),
    )
    assert "built for sm_90a, and device 0 (Stub GPU 10.3) has compute capability 10.3" in run.stdout
    assert len(run.named("cuLibraryLoadData")) == 1


def test_a_cubin_that_is_not_its_row_never_reaches_the_driver(run_with_stub):
    run = run_with_stub(
        """
        from stub_support import *
        from cubin_runtime.errors import CubinFormatError
        from cubin_runtime.module import load
        row = make_row(arch="sm_90")
        try:
            load(row, 0, folder=publish(row))
        except CubinFormatError as error:
            print(error)
        """
    )
    assert "arch is sm_90 in the table and sm_90a in the cubin" in run.stdout
    assert not run.named("cuLibraryLoadData")


def test_device_facts_come_from_the_device_asked_about(run_with_stub):
    run = run_with_stub(
        """
        from cubin_runtime.module import device_info
        for ordinal in (1, 0):
            info = device_info(ordinal)
            print(info.ordinal, info.name, info.capability, info.sm_count, info.max_shared_memory)
        """,
        devices=("9.0:132:232448", "12.0:188:101376", "10.0:148:232448"),
        env={"CUDA_VISIBLE_DEVICES": "2,1"},
    )
    assert run.stdout.splitlines() == [
        "1 Stub GPU 12.0 12.0 188 101376",
        "0 Stub GPU 10.0 10.0 148 232448",
    ]
    assert not run.named("cuDevicePrimaryCtxRetain")  # looking makes no context


def test_an_unused_device_is_not_consulted(run_with_stub):
    run = run_with_stub(SETUP + "load(row, 1, folder=folder)", devices=TWO_DEVICES)
    assert {call.get("device", call.get("ordinal")) for call in run.calls} <= {None, 1}


def test_unload_all_waits_then_unloads_and_can_load_again(run_with_stub):
    run = run_with_stub(
        SETUP
        + """
for _ in range(3):
    load(row, 0, folder=folder), load(row, 1, folder=folder)
    unload_all()
assert stub.stub_stack_depth() == 0
""",
        devices=TWO_DEVICES,
    )
    sequence = [c["call"] for c in run.named("cuLibraryLoadData", "cuCtxSynchronize", "cuLibraryUnload")]
    assert sequence == ["cuLibraryLoadData", "cuCtxSynchronize", "cuCtxSynchronize", "cuLibraryUnload"] * 3


@pytest.mark.parametrize("ending", ["", "import sys; sys.exit(3)", "fail('cuCtxSynchronize', 719)"])
def test_nothing_is_unloaded_at_exit(run_with_stub, ending):
    run = run_with_stub(SETUP + "load(row, 0, folder=folder)\n" + ending, check=False)
    assert (run.returncode, run.stderr) == (3 if "exit" in ending else 0, "")
    assert not run.named("cuLibraryUnload", "cuDevicePrimaryCtxRelease_v2")
