"""What our own reading of cubins and our own rules claim, against the driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from cubin_runtime import _driver
from cubin_runtime.cubin import inspect
from cubin_runtime.request import DType
from cubin_runtime.tensormap import TiledMap

pytestmark = pytest.mark.gpu

CUBINS = Path(__file__).parent.parent / "driver" / "cubins"


@pytest.mark.parametrize("name", ["facts_13.0_sm_90a", "large_13.0_sm_90a", "facts_12.8_sm_90a"])
def test_facts_are_what_the_driver_reports(name):
    from cuda.bindings import driver

    data = (CUBINS / f"{name}.cubin").read_bytes()
    library = _driver.load_library(data, "testing")
    for facts in inspect(data).kernels.values():
        kernel = _driver.get_kernel(library, facts.name)
        assert _driver.kernel_attribute(kernel, 0, "NUM_REGS") == facts.registers
        assert _driver.kernel_attribute(kernel, 0, "SHARED_SIZE_BYTES") == facts.static_shared_memory
        assert _driver.kernel_attribute(kernel, 0, "LOCAL_SIZE_BYTES") == facts.local_bytes
        # The driver ignores __block_size__ here, which `threads` honours.
        assert _driver.kernel_attribute(kernel, 0, "MAX_THREADS_PER_BLOCK") == (facts.max_threads or 1024)
        for parameter in facts.parameters:
            code, _, size = driver.cuKernelGetParamInfo(driver.CUkernel(kernel), parameter.ordinal)
            assert (int(code), size) == (0, parameter.size)
    _driver.unload_library(library)


def test_a_cubin_loads_without_a_context_and_leaves_none():
    import threading

    data = (CUBINS / "facts_13.0_sm_90a.cubin").read_bytes()
    seen = []

    def work() -> None:
        with _driver.relaxed_capture_mode():
            library = _driver.load_library(data, "testing")
        kernel = _driver.get_kernel(library, "by_value")
        _driver.set_max_dynamic_shared_memory(kernel, 0, 196608, "testing")
        seen.append(_driver.kernel_attribute(kernel, 0, "MAX_DYNAMIC_SHARED_SIZE_BYTES"))
        seen.append(_driver.current_context())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [196608, 0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"strides": (49152, 384)},  # heads outside tokens
        {"strides": (0, 49152)},  # one extent shared by all
        {"strides": (384, 2**40 - 16)},
        {"dims": (192, 128, 2**32)},
        {"element_strides": (1, 8, 1)},
        {"oob_fill": "nan"},
        {"dtype": DType.E4M3, "box": (128, 1, 64)},
        {"swizzle": 0, "box": (256, 1, 1)},
    ],
)
def test_the_driver_encodes_what_the_rules_allow(changes):
    fields = {
        "tensor": "key",
        "dtype": DType.BF16,
        "dims": (192, 128, 4096),
        "strides": (384, 49152),
        "box": (64, 1, 128),
    }
    assert len(TiledMap(**{**fields, **changes}).encode(0x7F00_0000_0000)) == 128
