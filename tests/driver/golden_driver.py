"""The stub driver as a golden.driver.Driver: what a recorded call sent is read from the stub's log."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from golden.driver import Launch, Sent

from cubin_runtime import module
from cubin_runtime.request import Capability

DEVICES = [(major_minor, sms) for major_minor in (100, 103) for sms in (148, 152, 160)]
SPECIFICATION = [f"{arch // 10}.{arch % 10}:{sms}:232448" for arch, sms in DEVICES]


class LogDriver:
    """Reads the log that CUDA_STUB_LOG names."""

    fills_slots = False
    takes_anything = False

    def __init__(self) -> None:
        from stub_support import stub  # loads the stub

        self._stub = stub
        self._log = Path(os.environ["CUDA_STUB_LOG"])
        self._lines_read = 0
        self._opt_ins: dict[tuple[str, int], int] = {}
        self._latest = ""

    def ordinal(self, capability: Capability, sm_count: int) -> int:
        return DEVICES.index((capability.major * 10 + capability.minor, sm_count))

    def take(self) -> Sent:
        # A launch logs as many bytes as its kernel takes; kernels are known to the stub once they are loaded.
        for kernel in module._modules.kernels.values():
            self._stub.stub_parameter_bytes(kernel.row.entry_name.encode(), kernel.facts.parameter_bytes)
        sent = Sent([], [])
        lines = self._log.read_text(encoding="utf-8").splitlines()[self._lines_read :]
        self._lines_read += len(lines)
        for line in lines:
            self._read(json.loads(line), sent)
        return sent

    def _read(self, call: dict[str, Any], sent: Sent) -> None:
        if call["call"] == "cuLibraryGetKernel":
            self._latest = call["name"]
        elif call["call"] == "cuKernelSetAttribute":
            self._opt_ins[self._latest, call["device"]] = call["value"]
        elif call["call"] == "cuTensorMapEncodeTiled":
            names = {
                "addr": "address",
                "elem_strides": "element_strides",
                "l2": "l2_promotion",
                "oob": "oob_fill",
            }
            same = ("dtype", "dims", "strides", "box", "interleave", "swizzle")
            sent.maps.append(
                {name: call[name] for name in same} | {name: call[theirs] for name, theirs in names.items()}
            )
        elif call["call"] == "cuLaunchKernelEx":
            sent.launches.append(self._launch(call))

    def _launch(self, call: dict[str, Any]) -> Launch:
        values = {4: call.get("cluster"), 5: call.get("policy"), 6: int(call.get("pdl", 0))}
        device = call["context"] - 0x1000  # the stub's primary contexts
        return Launch(
            kernel=call["kernel"],
            grid=call["grid"],
            block=call["block"],
            shared_memory=call["shared"],
            stream=call["stream"],
            attributes=[[number, values[number]] for number in call["attributes"]],
            opt_in=self._opt_ins.get((call["kernel"], device)),
            parameters=bytes.fromhex(call["parameters"]),
        )
