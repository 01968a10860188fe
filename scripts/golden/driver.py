"""What takes the driver's place while recorded calls are replayed; kernels that load without their files."""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from unittest import mock

from cubin_runtime import _driver, module
from cubin_runtime.cubin import Cubin, KernelFacts, Parameter, inspect
from cubin_runtime.fetch import obtain
from cubin_runtime.manifest import Artifact
from cubin_runtime.request import Capability
from cubin_runtime.store import Located
from kernel_meta.schema import KernelRow
from kernel_meta.tables import all_rows

# Numbers of cuda.h.
_ATTRIBUTES = {
    "CLUSTER_DIMENSION": 4,
    "CLUSTER_SCHEDULING_POLICY_PREFERENCE": 5,
    "PROGRAMMATIC_STREAM_SERIALIZATION": 6,
}
_DTYPES = {"UINT8": 0, "FLOAT16": 6, "BFLOAT16": 9}
_SWIZZLES = {"NONE": 0, "32B": 1, "64B": 2, "128B": 3}
_PROMOTIONS = {"NONE": 0, "L2_64B": 1, "L2_128B": 2, "L2_256B": 3}
_FILLERS = {"query": 0xA0, "key": 0xA1, "value": 0xA2, "out": 0xA3}
_SHARED_MEMORY = 232448  # that a block of such a device can have


class Launch(NamedTuple):
    """One launch.

    attributes  [number, value] in order
    opt_in      shared memory that the kernel was allowed to have, bytes
    """

    kernel: str
    grid: list[int]
    block: list[int]
    shared_memory: int
    stream: int
    attributes: list[list[Any]]
    opt_in: int | None
    parameters: bytes


class Sent(NamedTuple):
    """What one call sent: the arguments of its tensor maps, then its launches."""

    maps: list[dict[str, Any]]
    launches: list[Launch]


class Driver(Protocol):
    """Takes the place of the driver and remembers what is sent to it."""

    fills_slots: bool
    """Whether an encoded map is the filler of its slot in the recorded struct."""
    takes_anything: bool
    """Whether it launches what a real driver refuses."""

    def ordinal(self, capability: Capability, sm_count: int) -> int:
        """A device of that kind."""

    def take(self) -> Sent:
        """What has been sent since the last time."""


class RecordingDriver:
    """Stands in for cubin_runtime._driver within `installed`."""

    fills_slots = True
    takes_anything = True

    def __init__(self) -> None:
        self._devices: dict[tuple[Capability, int], int] = {}
        self._handles = itertools.count(1)
        self._names: dict[int, str] = {}
        self._opt_ins: dict[int, int] = {}
        self._sent = Sent([], [])

    def ordinal(self, capability: Capability, sm_count: int) -> int:
        """See Driver.ordinal."""
        return self._devices.setdefault((capability, sm_count), len(self._devices))

    def take(self) -> Sent:
        """See Driver.take."""
        sent = Sent(list(self._sent.maps), list(self._sent.launches))
        self._sent.maps.clear()
        self._sent.launches.clear()
        return sent

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Puts this in the driver's place."""
        fakes: dict[str, Any] = {
            "refuse_after_fork": lambda: None,
            "device": lambda ordinal: ordinal,
            "device_name": lambda device: "a device of the recorded calls",
            "capability": lambda device: self._device(device)[0],
            "sm_count": lambda device: self._device(device)[1],
            "max_shared_memory_optin": lambda device: _SHARED_MEMORY,
            "retain_primary_context": lambda device: device + 1,
            "current_context": lambda: 0,
            "entered": lambda context: contextlib.nullcontext(),
            "pushed": lambda context: contextlib.nullcontext(),
            "relaxed_capture_mode": contextlib.nullcontext,
            "load_library": lambda data, doing: next(self._handles),
            "get_kernel": self._get_kernel,
            "set_max_dynamic_shared_memory": self._opt_in,
            "encode_tiled": self._encode,
            "Launcher": self._launcher,
        }
        module.device_info.cache_clear()
        module._forget()
        try:
            with mock.patch.multiple(_driver, **fakes):
                yield
        finally:
            module.device_info.cache_clear()
            module._forget()

    def _device(self, ordinal: int) -> tuple[Capability, int]:
        return list(self._devices)[ordinal]

    def _get_kernel(self, library: int, name: str) -> int:
        handle = next(self._handles)
        self._names[handle] = name
        return handle

    def _opt_in(self, kernel: int, device: int, size: int, doing: str) -> None:
        self._opt_ins[kernel] = size

    def _encode(self, *, doing: str, **arguments: Any) -> bytes:
        tensor = doing.rpartition(" ")[2]
        self._sent.maps.append(
            {
                "dtype": _DTYPES[arguments["dtype"]],
                "addr": arguments["address"],
                "dims": list(arguments["dims"]),
                "strides": list(arguments["strides"]),
                "box": list(arguments["box"]),
                "elem_strides": list(arguments["element_strides"]),
                "interleave": 0,
                "swizzle": _SWIZZLES[arguments["swizzle"]],
                "l2": _PROMOTIONS[arguments["l2_promotion"]],
                "oob": 0 if arguments["oob_fill"] == "NONE" else 1,
            }
        )
        return bytes([_FILLERS[tensor]]) * _driver.TENSOR_MAP_BYTES

    def _launcher(self, kernel: int, **what: Any) -> _Launcher:
        return _Launcher(self._sent, self._names[kernel], self._opt_ins.get(kernel), what)


class _Launcher:
    """Stands in for _driver.Launcher."""

    def __init__(self, sent: Sent, kernel: str, opt_in: int | None, what: dict[str, Any]) -> None:
        self.area = memoryview(bytearray(what["parameter_bytes"]))
        self._sent, self._kernel, self._opt_in, self._what = sent, kernel, opt_in, what

    def __call__(self, grid: tuple[int, int, int], stream: int) -> int:
        launch = Launch(
            kernel=self._kernel,
            grid=list(grid),
            block=[self._what["threads"], 1, 1],
            shared_memory=self._what["shared_memory"],
            stream=stream,
            attributes=[
                [_ATTRIBUTES[name], list(value) if isinstance(value, tuple) else value]
                for name, value in self._what["attributes"]
            ],
            opt_in=self._opt_in,
            parameters=bytes(self.area),
        )
        self._sent.launches.append(launch)
        return 0


@contextlib.contextmanager
def kernels_without_files() -> Iterator[None]:
    """Lets published kernels load although their cubins are not at hand: with the facts of their rows."""
    rows = {row.name: row for row in all_rows()}
    cubins: dict[bytes, Cubin] = {}

    def stand_in(artifact: Artifact, *, folder: str | Path | None = None) -> Located:
        if artifact.published is None:
            return obtain(artifact, folder=folder)
        cubin = _cubin(rows[artifact.name])
        image = _image(*cubin.kernels)
        cubins[image] = cubin
        return Located(image, "none", "nowhere", ())

    with (
        mock.patch.object(module, "obtain", stand_in),
        mock.patch.object(module, "inspect", lambda data: cubins.get(data) or inspect(data)),
    ):
        yield


def _cubin(row: KernelRow) -> Cubin:
    assert row.resources is not None  # as for every published row
    facts = KernelFacts(
        name=row.entry_name,
        parameters=(Parameter(0, 0, row.resources.parameter_bytes),),
        parameter_bytes=row.resources.parameter_bytes,
        static_shared_memory=row.resources.static_shared_memory,
        registers=row.resources.registers,
        local_bytes=0,
        max_threads=row.resources.threads,
        required_threads=None,
        dynamic_shared_memory=None,
    )
    return Cubin(arch=row.architecture, compiler=None, kernels={facts.name: facts}, symbols={})


def _image(entry: str) -> bytes:
    """An ELF header without sections, and the entry's name."""
    name = entry.encode() + b"\0"
    header = bytearray(64)
    header[:4] = b"\x7fELF"
    struct.pack_into("<Q", header, 0x28, len(header) + len(name))
    return bytes(header) + name
