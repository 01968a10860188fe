"""Everything about a launch that is known before it: which bytes, and in what shape. Needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from cubin_runtime.cli.workload import Workload
from cubin_runtime.cubin import check_row, inspect
from cubin_runtime.families import family
from cubin_runtime.fetch import obtain
from cubin_runtime.manifest import default_manifest
from cubin_runtime.module import device_info
from cubin_runtime.planning import packed_problem
from cubin_runtime.selection import Selection, describe
from kernel_meta.schema import KernelRow, Resources

ASSUMED_DEVICE = ("NVIDIA H200", 132)  # name and multiprocessors, to plan for where there is no device

Line = tuple[str, str]
"""Label and text; without a label, more of the one above."""


class Bytes(msgspec.Struct, frozen=True, kw_only=True):
    """A cubin that was obtained and verified: sha256, size and facts are what manifest and table promise."""

    sha256: str
    size: int
    arch: str
    compiler: str | None
    store: str
    path: str


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """One launch. `parameters` names the layout of the parameters; `ordinal` None = the device is assumed."""

    ordinal: int | None
    device: str
    multiprocessors: int
    grid: tuple[int, int, int]
    cluster: tuple[int, int, int]
    resources: Resources
    parameters: str
    workspace_bytes: int

    def where(self) -> str:
        """The device as text."""
        device = f"{self.device}, {self.multiprocessors} multiprocessors"
        if self.ordinal is None:
            return f"planned for {device}, since no device is here"
        return f"on device {self.ordinal}, {device}"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A workload with the kernel that was chosen for it."""

    workload: Workload
    kernel: str
    reason: str
    cubin: Bytes
    launch: Shape

    def lines(self) -> Iterator[Line]:
        """The plan as text."""
        cubin, launch, facts = self.cubin, self.launch, self.launch.resources
        yield "batch", self.workload.spell_lengths()
        yield "request", describe(self.workload.request)
        yield "kernel", self.kernel
        yield "why", self.reason
        yield "cubin", f"sha256 {cubin.sha256}"
        yield "", f"{cubin.size} bytes for {cubin.arch}, made by {cubin.compiler}"
        yield "", f"from the {cubin.store} store: {cubin.path}"
        yield "verified", "sha256 and size by the manifest; target, entry and resources by the kernel table"
        yield "launch", launch.where()
        yield "", f"grid {_by(launch.grid)}, cluster {_by(launch.cluster)}, block {facts.threads}x1x1"
        yield "", f"{facts.shared_memory} bytes of dynamic shared memory per block"
        yield "", f"{facts.parameter_bytes} bytes of parameters, laid out as {launch.parameters}"
        yield "", f"{launch.workspace_bytes} bytes of workspace"


def make_plan(workload: Workload, selection: Selection, ordinal: int | None) -> Plan:
    """Obtains the chosen cubin, verifies it, and works out its launch.

    ordinal     device of this machine; None = ASSUMED_DEVICE

    Raises ArtifactError where the cubin cannot be had, CubinFormatError where it is not the row's.
    """
    row = selection.require()
    artifact = default_manifest().find(row.name)
    located = obtain(artifact)
    cubin = inspect(located.data)
    check_row(cubin, row)
    return Plan(
        workload=workload,
        kernel=row.name,
        reason=selection.reason,
        cubin=Bytes(
            sha256=artifact.sha256,
            size=artifact.size,
            arch=str(cubin.arch),
            compiler=cubin.compiler,
            store=located.store,
            path=located.path,
        ),
        launch=_shape(workload, row, ordinal),
    )


def _shape(workload: Workload, row: KernelRow, ordinal: int | None) -> Shape:
    assert row.resources is not None  # check_row refuses such a row
    if ordinal is None:
        name, sm_count = ASSUMED_DEVICE
    else:
        info = device_info(ordinal)
        name, sm_count = info.name, info.sm_count
    problem = packed_problem(
        workload.request,
        batch_size=len(workload.q_lens),
        total_q=sum(workload.q_lens),
        total_kv=sum(workload.kv_lens),
        max_q_len=max(workload.q_lens),
        max_kv_len=max(workload.kv_lens),
        return_lse=workload.return_lse,
    )
    implementation = family(row.family)
    return Shape(
        ordinal=ordinal,
        device=name,
        multiprocessors=sm_count,
        grid=implementation.grid(problem, row, sm_count),
        cluster=row.cluster,
        resources=row.resources,
        parameters=row.abi,
        workspace_bytes=implementation.workspace(problem, row, sm_count).size,
    )


def _by(extent: tuple[int, int, int]) -> str:
    return "x".join(map(str, extent))
