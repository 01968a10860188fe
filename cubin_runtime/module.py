"""Kernels in this process: each cubin is loaded once, prepared once per device, and kept.

Nothing is unloaded when the interpreter ends: work may still be in flight, and the driver cleans up itself.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec

from cubin_runtime import _driver
from cubin_runtime.blocklist import refuse_blocked
from cubin_runtime.cubin import Cubin, KernelFacts, check_row, inspect
from cubin_runtime.errors import UnsupportedError
from cubin_runtime.fetch import obtain
from cubin_runtime.manifest import Artifact, default_manifest
from cubin_runtime.request import Capability
from kernel_meta.schema import KernelRow, Resources, Step

# From this much shared memory per block on, a kernel has to be allowed to have it, bytes.
_OPT_IN_SHARED_MEMORY = 48 * 1024


class DeviceInfo(msgspec.Struct, frozen=True):
    """A device. `ordinal` counts the visible ones, as torch does; `max_shared_memory` is bytes per block."""

    ordinal: int
    name: str
    capability: Capability
    sm_count: int
    max_shared_memory: int


class _Library(msgspec.Struct, frozen=True):
    """A loaded cubin and where its bytes came from."""

    handle: int
    cubin: Cubin
    store: str


class Launchers(threading.local):
    """A thread's launchers of a kernel, without and with programmatic dependent launch; made by `launch`."""

    plain: _driver.Launcher | None = None
    dependent: _driver.Launcher | None = None


class Loaded(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A kernel ready to launch on one device; compared by identity, since there is one per row and device.

    handle     CUkernel
    context    the device's primary context
    store      which store had the bytes
    """

    row: KernelRow | Step
    resources: Resources
    artifact: Artifact
    store: str
    facts: KernelFacts
    device: DeviceInfo
    handle: int
    context: int
    launchers: Launchers = msgspec.field(default_factory=Launchers)


class LoadedKernel(Loaded, frozen=True, eq=False, kw_only=True):
    """An attention kernel ready to launch."""

    row: KernelRow


@functools.cache
def device_info(ordinal: int) -> DeviceInfo:
    """Describes a device without making a context on it."""
    device = _driver.device(ordinal)
    return DeviceInfo(
        ordinal=ordinal,
        name=_driver.device_name(device),
        capability=Capability(*_driver.capability(device)),
        sm_count=_driver.sm_count(device),
        max_shared_memory=_driver.max_shared_memory_optin(device),
    )


class _Modules:
    """What has been loaded. Different cubins load side by side; one cubin is loaded by one thread."""

    def __init__(self) -> None:
        self.kernels: dict[tuple[KernelRow | Step, int], Loaded] = {}
        self.libraries: dict[str, _Library] = {}
        self._shared_memory: dict[tuple[int, int], int] = {}
        self._locks: dict[str, threading.Lock] = {}

    def load(self, row: KernelRow | Step, ordinal: int, folder: str | Path | None) -> Loaded:
        device = device_info(ordinal)
        _check_device(row, device)
        artifact = default_manifest().find(row.name)
        with self._locks.setdefault(artifact.sha256, threading.Lock()):
            kernel = self.kernels.get((row, ordinal))
            if kernel is None:
                library = self.libraries.get(artifact.sha256)
                if library is None:
                    library = _load_library(row, artifact, folder)
                    self.libraries[artifact.sha256] = library
                check_row(library.cubin, row)
                kernel = self._prepare(row, artifact, library, device)
                self.kernels[row, ordinal] = kernel
            return kernel

    def _prepare(
        self, row: KernelRow | Step, artifact: Artifact, library: _Library, device: DeviceInfo
    ) -> Loaded:
        handle = _driver.get_kernel(library.handle, row.entry_name)
        assert row.resources is not None  # check_row refuses such a row
        self._allow_shared_memory(row.name, handle, device, row.resources)
        kind: type[Loaded] = LoadedKernel if isinstance(row, KernelRow) else Loaded
        return kind(
            row=row,
            resources=row.resources,
            artifact=artifact,
            store=library.store,
            facts=library.cubin.kernels[row.entry_name],
            device=device,
            handle=handle,
            context=_driver.retain_primary_context(_driver.device(device.ordinal)),
        )

    def _allow_shared_memory(self, name: str, handle: int, device: DeviceInfo, needs: Resources) -> None:
        """Raises the entry's limit on the device, before its first launch there; never lowers it."""
        key = (handle, device.ordinal)
        size = needs.shared_memory
        opts_in = size + needs.static_shared_memory >= _OPT_IN_SHARED_MEMORY
        if not opts_in or size <= self._shared_memory.get(key, 0):
            return
        doing = (
            f"allowing {name} {size} bytes of dynamic shared memory on device {device.ordinal}, "
            f"whose limit is {device.max_shared_memory}"
        )
        _driver.set_max_dynamic_shared_memory(handle, _driver.device(device.ordinal), size, doing)
        self._shared_memory[key] = size


_modules = _Modules()

on_unload: list[Callable[[], None]] = []
"""Called when kernels are about to be unloaded, and in a forked child: drops what was prepared with them."""


def load(row: KernelRow, device: int, *, folder: str | Path | None = None) -> LoadedKernel:
    """The row's kernel, ready on the device with that ordinal; loaded on the first call.

    folder   where to look for the cubin before every other store

    Thread-safe, and allowed while a stream is being captured. The caller's current context stays as it is.
    After a failure the next call tries again. Raises UnsupportedError where the device cannot run the row,
    ArtifactError and ManifestError where its bytes cannot be had, CubinFormatError where they are not what
    the row describes, DriverError otherwise.
    """
    _driver.refuse_after_fork()
    loaded = _modules.kernels.get((row, device)) or _modules.load(row, device, folder)
    return cast(LoadedKernel, loaded)


def load_step(step: Step, device: int) -> Loaded:
    """The step's kernel, ready on the device with that ordinal; like `load`."""
    _driver.refuse_after_fork()
    return _modules.kernels.get((step, device)) or _modules.load(step, device, None)


def unload_all() -> None:
    """Waits for every device that kernels were loaded on, then unloads them all.

    For tests and tools. No thread may be loading or launching meanwhile, and every LoadedKernel, and every
    graph with one in it, is dead afterwards.
    """
    _driver.refuse_after_fork()
    retired = _modules
    _forget()
    for context in {kernel.context for kernel in retired.kernels.values()}:
        with _driver.pushed(context):
            _driver.synchronize()
    for library in retired.libraries.values():
        _driver.unload_library(library.handle)


def _forget() -> None:
    """Starts anew. In a forked child, too: locks may be held by threads that only the parent has, and
    handles are the parent's."""
    global _modules
    _modules = _Modules()
    for drop in on_unload:
        drop()


os.register_at_fork(after_in_child=_forget)


def _check_device(row: KernelRow | Step, device: DeviceInfo) -> None:
    if not row.architecture.runs_on(device.capability):
        raise UnsupportedError(
            f"{row.name} is built for {row.architecture}, and device {device.ordinal} ({device.name}) has "
            f"compute capability {device.capability}; select a row for that capability"
        )


def _load_library(row: KernelRow | Step, artifact: Artifact, folder: str | Path | None) -> _Library:
    refuse_blocked(artifact)
    located = obtain(artifact, folder=folder)
    cubin = inspect(located.data)
    # Before the driver sees it: a wrong image costs a clear message here and a broken context there.
    check_row(cubin, row)
    with _driver.relaxed_capture_mode():
        handle = _driver.load_library(located.data, f"loading {row.name} from {located.path}")
    return _Library(handle, cubin, located.store)
