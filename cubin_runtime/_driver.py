"""The CUDA driver API: the only file that imports cuda.bindings.

Handles and devices are plain integers on this side. Every call that does not succeed raises DriverError with
the driver's name for it and what was being done; nothing here keeps state besides "the driver is initialised
in this process".
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from cubin_runtime.errors import DriverError, DriverNotFoundError

_cuda: ModuleType | None = None
_forked = False

_NOT_INITIALIZED = 3

# What cuda.bindings raises for a result that is newer than itself.
_UNKNOWN_RESULT = (KeyError, ValueError)


def _after_fork_in_child() -> None:
    global _forked
    _forked = _forked or _cuda is not None


os.register_at_fork(after_in_child=_after_fork_in_child)


def _bindings() -> ModuleType:
    """cuda.bindings.driver, with the driver initialised in this process."""
    global _cuda
    if _cuda is None or _forked:
        refuse_after_fork()
        _cuda = _initialize()
    return _cuda


def refuse_after_fork() -> None:
    """Raises DriverError in a process that was forked after its parent had initialised the driver here."""
    if _forked:
        raise _not_initialized("this process was forked after CUDA had been initialised")


def _not_initialized(reason: str) -> DriverError:
    return DriverError(
        f'CUDA cannot be used: {reason}; start worker processes with the "spawn" method of multiprocessing',
        _NOT_INITIALIZED,
        "CUDA_ERROR_NOT_INITIALIZED",
    )


def _initialize() -> ModuleType:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DriverNotFoundError(
            f"cuda.bindings cannot be imported ({error}); install it with: pip install 'cuda-python>=12.8'"
        ) from error
    try:
        (code,) = driver.cuInit(0)
    except (RuntimeError, *_UNKNOWN_RESULT) as error:
        raise DriverNotFoundError(
            f"no usable CUDA driver: {error}; install NVIDIA's driver, or let the container use the GPUs"
        ) from error
    if code == _NOT_INITIALIZED:
        raise _not_initialized(
            "cuInit failed, as it does in a process forked after CUDA had been initialised"
        )
    if code:
        name, text = _describe(driver, code)
        raise DriverNotFoundError(
            f"no usable CUDA device: cuInit failed with {name} ({text}); "
            "check nvidia-smi and CUDA_VISIBLE_DEVICES",
            int(code),
            name,
        )
    module: ModuleType = driver
    return module


def _describe(cuda: ModuleType, code: int) -> tuple[str, str]:
    """Name and sentence of a result; the driver has neither for those that it never returns itself."""
    try:
        result = cuda.CUresult(code)
    except _UNKNOWN_RESULT:
        return f"CUDA error {code}", "newer than the installed cuda.bindings"
    _, name = cuda.cuGetErrorName(result)
    _, sentence = cuda.cuGetErrorString(result)
    return name.decode() if name else result.name, sentence.decode() if sentence else "no description"


def _call(name: str, *arguments: Any, doing: str) -> Any:
    """Calls a driver function; its one output, or None. `doing` completes "while ..."."""
    cuda = _bindings()
    try:
        code, *outputs = getattr(cuda, name)(*arguments)
    except RuntimeError as error:  # the installed driver does not export it
        raise DriverError(
            f"{name} while {doing}: {error}; the driver is too old: update it to one for CUDA 12.8 or later"
        ) from error
    except _UNKNOWN_RESULT as error:
        raise DriverError(f"{name} failed while {doing}: {error}") from error
    if code:
        raise failure(name, code, doing)
    return outputs[0] if outputs else None


def failure(function: str, code: int, doing: str) -> DriverError:
    """The exception for a result that is not success."""
    name, text = _describe(_bindings(), code)
    return DriverError(f"{function} failed with {name} ({text}) while {doing}", int(code), name)


# ---- devices ----


def driver_version() -> tuple[int, int]:
    """CUDA version that the installed driver supports, such as (13, 0)."""
    version = _call("cuDriverGetVersion", doing="reading the driver's version")
    return version // 1000, version % 1000 // 10


def device_count() -> int:
    """Number of devices that this process sees."""
    return int(_call("cuDeviceGetCount", doing="counting devices"))


def device(ordinal: int) -> int:
    """The handle of a device, by its ordinal among the visible ones."""
    return int(_call("cuDeviceGet", ordinal, doing=f"looking up device {ordinal}"))


def device_name(device: int) -> str:
    """Such as "NVIDIA H200"."""
    name: bytes = _call("cuDeviceGetName", 256, device, doing=f"reading the name of device {device}")
    return name.split(b"\0", 1)[0].decode()


def capability(device: int) -> tuple[int, int]:
    """Compute capability."""
    return (
        _device_attribute("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR", device),
        _device_attribute("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR", device),
    )


def sm_count(device: int) -> int:
    """Number of streaming multiprocessors."""
    return _device_attribute("CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT", device)


def max_shared_memory_optin(device: int) -> int:
    """Most shared memory that one block can opt in to, bytes."""
    return _device_attribute("CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", device)


def _device_attribute(name: str, device: int) -> int:
    attribute = getattr(_bindings().CUdevice_attribute, name)
    return int(_call("cuDeviceGetAttribute", attribute, device, doing=f"reading {name} of device {device}"))


# ---- contexts ----


def retain_primary_context(device: int) -> int:
    """The device's primary context, the one that torch uses. Held until the process ends."""
    return int(_call("cuDevicePrimaryCtxRetain", device, doing=f"retaining the context of device {device}"))


def current_context() -> int:
    """The calling thread's context; 0 = none."""
    code, context = _bindings().cuCtxGetCurrent()
    if code:
        raise failure("cuCtxGetCurrent", code, "reading the current context")
    return int(context)


def entered(context: int) -> contextlib.AbstractContextManager[None]:
    """Makes sure that `context` is current within the block; costs little where it is already."""
    return contextlib.nullcontext() if current_context() == context else pushed(context)


@contextlib.contextmanager
def pushed(context: int) -> Iterator[None]:
    """Makes `context` current within the block; the caller's stack is the same afterwards."""
    handle = _bindings().CUcontext(context)
    _call("cuCtxPushCurrent", handle, doing="making a device's context current")
    try:
        yield
    finally:
        _call("cuCtxPopCurrent", doing="restoring the caller's context")


def synchronize() -> None:
    """Waits for everything in the current context."""
    _call("cuCtxSynchronize", doing="waiting for the device")


@contextlib.contextmanager
def relaxed_capture_mode() -> Iterator[None]:
    """Lets the thread load code within the block although a stream is being captured."""
    mode = _bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    previous = _call("cuThreadExchangeStreamCaptureMode", mode, doing="relaxing the capture mode")
    try:
        yield
    finally:
        _call("cuThreadExchangeStreamCaptureMode", previous, doing="restoring the capture mode")


# ---- libraries and kernels ----


def load_library(data: bytes, doing: str) -> int:
    """Loads a cubin for all contexts; the library's handle."""
    return int(_call("cuLibraryLoadData", data, [], [], 0, [], [], 0, doing=doing))


def unload_library(library: int) -> None:
    """Frees the library's code on every device; none of it may still be running."""
    _call("cuLibraryUnload", _bindings().CUlibrary(library), doing="unloading a library")


def get_kernel(library: int, name: str) -> int:
    """The handle of an entry: a CUkernel, valid in every context."""
    handle = _bindings().CUlibrary(library)
    return int(_call("cuLibraryGetKernel", handle, name.encode(), doing=f"looking up the entry {name}"))


def set_max_dynamic_shared_memory(kernel: int, device: int, size: int, doing: str) -> None:
    """Allows launches of the kernel on the device with up to `size` bytes of dynamic shared memory."""
    cuda = _bindings()
    attribute = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _call("cuKernelSetAttribute", attribute, size, cuda.CUkernel(kernel), device, doing=doing)


def kernel_attribute(kernel: int, device: int, name: str) -> int:
    """One CU_FUNC_ATTRIBUTE_*, by the rest of its name, such as "NUM_REGS"."""
    cuda = _bindings()
    attribute = getattr(cuda.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
    doing = f"reading {name} of a kernel on device {device}"
    return int(_call("cuKernelGetAttribute", attribute, cuda.CUkernel(kernel), device, doing=doing))


# ---- memory ----


def set_memory(address: int, value: int, size: int, stream: int, doing: str) -> None:
    """Fills `size` bytes of the current context's device with a byte, when the stream gets there."""
    _call("cuMemsetD8Async", address, value, size, stream, doing=doing)


def is_capturing(stream: int) -> bool:
    """Whether what is put into the stream is recorded in a graph instead of run."""
    status = _call("cuStreamIsCapturing", stream, doing="asking whether a stream is being captured")
    return bool(status != _bindings().CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)


# ---- launch ----

Attributes = Sequence[tuple[str, "int | tuple[int, int, int]"]]
"""Launch attributes in order: the end of the driver's name, and the value."""


class Launcher:
    """Launches one kernel again and again without building any object. For one thread at a time.

    kernel          handle from `get_kernel`
    threads         per block
    shared_memory   dynamic, per block, bytes
    attributes      see `Attributes`
    offsets         where in the parameter area each parameter starts
    parameter_bytes size of the parameter area
    """

    __slots__ = (
        "_arguments",
        "_buffer",
        "_config",
        "_function",
        "_grid",
        "_launch",
        "_pointers",
        "_stream",
        "area",
    )

    def __init__(
        self,
        kernel: int,
        *,
        threads: int,
        shared_memory: int,
        attributes: Attributes,
        offsets: Sequence[int],
        parameter_bytes: int,
    ) -> None:
        cuda = _bindings()
        self._launch: Callable[..., tuple[int]] = cuda.cuLaunchKernelEx
        self._function = cuda.CUfunction(kernel)
        self._config = cuda.CUlaunchConfig()
        self._config.blockDimX, self._config.blockDimY, self._config.blockDimZ = threads, 1, 1
        self._config.sharedMemBytes = shared_memory
        self._config.attrs = [_launch_attribute(cuda, name, value) for name, value in attributes]
        self._config.numAttrs = len(self._config.attrs)
        self._grid = (0, 0, 0)
        self._stream = 0
        self._buffer = (ctypes.c_char * max(parameter_bytes, 1))()
        base = ctypes.addressof(self._buffer)
        self._pointers = (ctypes.c_void_p * max(len(offsets), 1))(*(base + offset for offset in offsets))
        self._arguments = ctypes.addressof(self._pointers)
        self.area = memoryview(self._buffer).cast("B")[:parameter_bytes]
        """The parameter area, to be filled before each launch; the driver copies it."""

    def __call__(self, grid: tuple[int, int, int], stream: int) -> int:
        """Launches into the stream, in the current context; the driver's result, 0 = success."""
        if grid != self._grid:
            self._config.gridDimX, self._config.gridDimY, self._config.gridDimZ = grid
            self._grid = grid
        if stream != self._stream:
            self._config.hStream = stream
            self._stream = stream
        return self._launch(self._config, self._function, self._arguments, 0)[0]


def _launch_attribute(cuda: ModuleType, name: str, value: int | tuple[int, int, int]) -> Any:
    attribute = cuda.CUlaunchAttribute()
    attribute.id = getattr(cuda.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
    if isinstance(value, tuple):
        dimensions = attribute.value.clusterDim
        dimensions.x, dimensions.y, dimensions.z = value
    elif name == "CLUSTER_SCHEDULING_POLICY_PREFERENCE":
        attribute.value.clusterSchedulingPolicyPreference = cuda.CUclusterSchedulingPolicy(value)
    else:
        attribute.value.programmaticStreamSerializationAllowed = value
    return attribute


# ---- tensor maps ----

TENSOR_MAP_BYTES = 128
_TENSOR_MAP_ALIGNMENT = 64

# The arguments that are arrays, padded to the largest rank: dims, strides, box, element strides.
_MAX_RANK = 5
_WALK = struct.Struct(f"={_MAX_RANK}Q{_MAX_RANK}Q{_MAX_RANK}I{_MAX_RANK}I")
_DIMS, _STRIDES, _BOX, _STEPS = 0, 8 * _MAX_RANK, 16 * _MAX_RANK, 20 * _MAX_RANK

_EncodeSpace = ctypes.c_char * (_TENSOR_MAP_ALIGNMENT + TENSOR_MAP_BYTES + _WALK.size)


def encode_tiled(
    *,
    dtype: str,
    address: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    element_strides: Sequence[int],
    swizzle: str,
    l2_promotion: str,
    oob_fill: str,
    doing: str,
) -> bytes:
    """A CUtensorMap. The strings are the ends of the driver's names, such as "BFLOAT16" and "128B"."""
    refuse_after_fork()
    rest = (0,) * (_MAX_RANK - len(dims))
    space = _EncodeSpace()
    start = ctypes.addressof(space)
    shift = -start % _TENSOR_MAP_ALIGNMENT
    start += shift
    walk = start + TENSOR_MAP_BYTES
    _WALK.pack_into(
        space,
        shift + TENSOR_MAP_BYTES,
        *dims,
        *rest,
        *strides,
        0,
        *rest,
        *box,
        *rest,
        *element_strides,
        *rest,
    )
    code = _encode_function()(
        start,
        _number("CUtensorMapDataType", "DATA_TYPE", dtype),
        len(dims),
        address,
        walk + _DIMS,
        walk + _STRIDES,
        walk + _BOX,
        walk + _STEPS,
        _number("CUtensorMapInterleave", "INTERLEAVE", "NONE"),
        _number("CUtensorMapSwizzle", "SWIZZLE", swizzle),
        _number("CUtensorMapL2promotion", "L2_PROMOTION", l2_promotion),
        _number("CUtensorMapFloatOOBfill", "FLOAT_OOB_FILL", oob_fill),
    )
    if code:
        raise failure("cuTensorMapEncodeTiled", code, doing)
    return ctypes.string_at(start, TENSOR_MAP_BYTES)


@functools.cache
def _number(enumeration: str, kind: str, name: str) -> int:
    """Number of CU_TENSOR_MAP_<kind>_<name>."""
    return int(getattr(getattr(_bindings(), enumeration), f"CU_TENSOR_MAP_{kind}_{name}"))


@functools.cache
def _encode_function() -> Callable[..., int]:
    """cuTensorMapEncodeTiled as the driver exports it.

    It wants the map aligned to 64 bytes, which the one that cuda.bindings allocates is not.
    """
    pointer = _call("cuGetProcAddress", b"cuTensorMapEncodeTiled", 12000, 0, doing="looking up its address")
    address, number = ctypes.c_size_t, ctypes.c_int
    arguments = (address, number, ctypes.c_uint32, *(address,) * 5, *(number,) * 4)
    return ctypes.CFUNCTYPE(number, *arguments)(pointer)
