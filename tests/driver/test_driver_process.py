"""The driver and the process: missing driver, forks, errors that cuda.bindings itself raises."""

import pytest


def test_a_missing_driver_says_what_to_install(run_with_stub, tmp_path):
    run = run_with_stub(
        """
        from cubin_runtime.errors import DriverNotFoundError
        from cubin_runtime.module import device_info
        try:
            device_info(0)
        except DriverNotFoundError as error:
            print(error)
        """,
        env={"LD_LIBRARY_PATH": str(tmp_path)},
    )
    assert "install NVIDIA's driver" in run.stdout


def test_missing_bindings_say_what_to_install(run_with_stub):
    run = run_with_stub(
        """
        import sys
        sys.modules["cuda.bindings"] = None
        from cubin_runtime import _driver
        from cubin_runtime.errors import DriverNotFoundError
        try:
            _driver.device_count()
        except DriverNotFoundError as error:
            print(error)
        """
    )
    assert "pip install 'cuda-python>=12.8'" in run.stdout


@pytest.mark.parametrize(
    ("devices", "fail", "code"),
    [((), "", 100), (("9.0:1:1",), "cuInit=803", 803), (("9.0:1:1",), "cuInit=12345", 0)],
)
def test_a_driver_without_a_device_is_not_found(run_with_stub, devices, fail, code):
    run = run_with_stub(
        """
        from cubin_runtime import _driver
        from cubin_runtime.errors import DriverNotFoundError
        for _ in range(2):
            try:
                _driver.device_count()
            except DriverNotFoundError as error:
                print(error.code, error)
        """,
        devices=devices,
        fail=fail,
    )
    first, second = run.stdout.splitlines()
    assert first == second
    assert first.startswith(f"{code} ")
    assert not run.named("cuDeviceGetCount")


QUERIES = {
    "cuDeviceGetCount": "_driver.device_count()",
    "cuDeviceGet": "_driver.device(0)",
    "cuDeviceGetName": "_driver.device_name(0)",
    "cuDeviceGetAttribute": "_driver.sm_count(0)",
    "cuDevicePrimaryCtxRetain": "_driver.retain_primary_context(0)",
    "cuCtxGetCurrent": "_driver.current_context()",
    "cuCtxSynchronize": "_driver.synchronize()",
    "cuCtxPushCurrent_v2": "_driver.pushed(4096).__enter__()",
    "cuThreadExchangeStreamCaptureMode": "_driver.relaxed_capture_mode().__enter__()",
    "cuLibraryLoadData": "_driver.load_library(b'', 'loading')",
    "cuLibraryUnload": "_driver.unload_library(1)",
    "cuLibraryGetKernel": "_driver.get_kernel(1, 'k')",
    "cuKernelSetAttribute": "_driver.set_max_dynamic_shared_memory(1, 0, 1, 'setting')",
    "cuKernelGetAttribute": "_driver.kernel_attribute(1, 0, 'NUM_REGS')",
}


@pytest.mark.parametrize("function", QUERIES)
def test_every_failure_names_the_function_and_the_result(run_with_stub, function):
    run = run_with_stub(
        f"""
        from cubin_runtime import _driver
        from cubin_runtime.errors import DriverError
        try:
            {QUERIES[function]}
        except DriverError as error:
            print(error.code, error.name, error)
        """,
        fail=f"{function}=719",
    )
    name = function.removesuffix("_v2")
    expected = (
        f"719 CUDA_ERROR_LAUNCH_FAILED {name} failed with CUDA_ERROR_LAUNCH_FAILED (unspecified launch "
    )
    assert run.stdout.startswith(expected), run.stdout
    assert " while " in run.stdout


def test_a_result_newer_than_the_bindings_is_still_a_driver_error(run_with_stub):
    run = run_with_stub(
        """
        from cubin_runtime import _driver
        from cubin_runtime.errors import DriverError
        try:
            _driver.device_count()
        except DriverError as error:
            print(error)
        """,
        fail="cuDeviceGetCount=12345",
    )
    assert "cuDeviceGetCount failed while counting devices" in run.stdout
    assert "12345" in run.stdout


def test_a_driver_that_lacks_a_function_is_too_old(run_with_stub):
    run = run_with_stub(
        """
        from cubin_runtime import _driver
        from cubin_runtime.errors import DriverError
        try:
            _driver._call("cuMemGetInfo", doing="asking")
        except DriverError as error:
            print(error)
        """
    )
    assert "the driver is too old" in run.stdout


def test_importing_does_not_touch_the_driver(run_with_stub):
    run = run_with_stub(
        """
        import sys
        import cubin_runtime.cubin, cubin_runtime.launch, cubin_runtime.module, cubin_runtime.tensormap
        assert not {"cuda", "torch", "requests", "yaml", "elftools"} & set(sys.modules)
        """
    )
    assert not run.calls


FORK = """
import os, sys
def in_child(work):
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""

KERNEL = """
from stub_support import *
from cubin_runtime.launch import LaunchPlan, launch
from cubin_runtime.module import load
row = make_row()
folder = publish(row)
def use():
    kernel = load(row, 0, folder=folder)
    launch(LaunchPlan(kernel, (1, 1, 1)), bytes(320), 0)
"""


def test_a_child_forked_before_the_first_use_works(run_with_stub):
    run = run_with_stub(FORK + KERNEL + "assert in_child(use) == 0; use()")
    assert [call["result"] for call in run.named("cuLaunchKernelEx")] == [0, 0]
    assert len({call["pid"] for call in run.named("cuLaunchKernelEx")}) == 2


@pytest.mark.parametrize(
    "work", ["use", "lambda: launch(plan, bytes(320), 0)", "lambda: load(row, 0)", "lambda: unload_all()"]
)
def test_a_child_forked_after_use_gets_a_clear_error(run_with_stub, work):
    run = run_with_stub(
        FORK
        + KERNEL
        + f"""
from cubin_runtime.module import unload_all
use()
plan = LaunchPlan(load(row, 0), (1, 1, 1))
assert in_child({work}) == 1
use()
"""
    )
    assert run.stdout.startswith("DriverError CUDA cannot be used: this process was forked")
    assert "spawn" in run.stdout
    assert len({call["pid"] for call in run.calls}) == 1  # the child did not even ask the driver


def test_a_driver_initialised_by_others_before_the_fork_is_explained(run_with_stub):
    run = run_with_stub(FORK + KERNEL + "stub.cuInit(0)\nassert in_child(use) == 1")
    assert run.stdout.startswith(
        "DriverError CUDA cannot be used: cuInit failed, as it does in a process forked"
    )
