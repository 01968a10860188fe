"""Launching: parameters in, cuLaunchKernelEx out, nothing built on the way.

A kernel keeps a launcher for each thread, so that a launch copies the parameters, sets what differs from the
one before (grid, stream) and calls the driver.
"""

from __future__ import annotations

import itertools

import msgspec

from cubin_runtime import _driver
from cubin_runtime.errors import InvalidArgumentError
from cubin_runtime.module import Loaded

Buffer = bytes | bytearray | memoryview

# Tags tell a kernel whether a ticket counter in the workspace is of its own launch. Nothing else that may lie
# there must look like one: they are no small integers, and as floats of 16 or 32 bits NaNs that nobody
# computes.
_FIRST_TAG = 0xFF90_0000
_TAGS = 1 << 20
_tags = itertools.count()


class LaunchPlan(msgspec.Struct, frozen=True):
    """What stays the same when a call is repeated.

    grid            blocks along x, y, z
    states_defaults states cluster, scheduling policy and dependence where they are the driver's defaults, too
    """

    kernel: Loaded
    grid: tuple[int, int, int]
    states_defaults: bool = False


def launch(plan: LaunchPlan, parameters: Buffer, stream: int, pdl: bool = False) -> None:
    """Launches the kernel into a stream of its device; returns at once.

    parameters   the whole parameter area, `plan.kernel.facts.parameter_bytes` long, as the kernel lays it out
    stream       handle, as torch's `stream.cuda_stream`; 0 = the default stream
    pdl          lets the kernel start while its predecessor in the stream is finishing. A permission: it has
                 no effect on a kernel that does not wait for its predecessor itself

    The caller's current context stays current. Raises InvalidArgumentError for parameters of a wrong length
    and DriverError, naming kernel, grid, block and shared memory, where the driver refuses.
    """
    kernel = plan.kernel
    pdl = pdl and kernel.row.pdl
    launcher = kernel.launchers.dependent if pdl else kernel.launchers.plain
    if launcher is None:
        launcher = _prepare(plan, pdl)
    try:
        launcher.area[:] = parameters
    except ValueError:
        raise InvalidArgumentError(
            f"parameters of {kernel.row.name} have {len(parameters)} bytes; expected {launcher.area.nbytes}"
        ) from None
    if _driver.current_context() == kernel.context:
        code = launcher(plan.grid, stream)
    else:
        with _driver.pushed(kernel.context):
            code = launcher(plan.grid, stream)
    if code:
        raise _driver.failure("cuLaunchKernelEx", code, _describe(plan, stream, pdl))


def launch_tag() -> int:
    """By which a launch knows its ticket counters (kernel_meta/common/tickets.cuh) from older ones."""
    return _FIRST_TAG + next(_tags) % _TAGS


def _prepare(plan: LaunchPlan, pdl: bool) -> _driver.Launcher:
    kernel = plan.kernel
    launcher = _driver.Launcher(
        kernel.handle,
        threads=kernel.resources.threads,
        shared_memory=kernel.resources.shared_memory,
        attributes=_attributes(plan, pdl),
        offsets=[parameter.offset for parameter in kernel.facts.parameters],
        parameter_bytes=kernel.facts.parameter_bytes,
    )
    if pdl:
        kernel.launchers.dependent = launcher
    else:
        kernel.launchers.plain = launcher
    return launcher


def _attributes(plan: LaunchPlan, pdl: bool) -> _driver.Attributes:
    attributes: list[tuple[str, int | tuple[int, int, int]]] = []
    if plan.states_defaults or plan.kernel.row.cluster != (1, 1, 1):
        attributes.append(("CLUSTER_DIMENSION", plan.kernel.row.cluster))
    if plan.states_defaults:
        attributes.append(("CLUSTER_SCHEDULING_POLICY_PREFERENCE", 0))
    if plan.states_defaults or pdl:
        attributes.append(("PROGRAMMATIC_STREAM_SERIALIZATION", int(pdl)))
    return attributes


def _describe(plan: LaunchPlan, stream: int, pdl: bool) -> str:
    kernel = plan.kernel
    return (
        f"launching {kernel.row.name} on device {kernel.device.ordinal} ({kernel.device.name}): "
        f"grid {plan.grid}, {kernel.resources.threads} threads, cluster {kernel.row.cluster}, "
        f"{kernel.resources.shared_memory} bytes of dynamic shared memory, stream {stream:#x}, "
        f"{'with' if pdl else 'without'} programmatic dependent launch"
    )
