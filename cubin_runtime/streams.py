"""torch's current stream, as the driver knows it."""

from __future__ import annotations

from collections.abc import Callable

import torch


def _raw_stream_function() -> Callable[[int], int]:
    """The public way builds an object, which costs more than the rest of a warm call."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw or (lambda device: torch.cuda.current_stream(device).cuda_stream)


current_stream = _raw_stream_function()
"""Handle of torch's current stream of a device, by the device's ordinal."""
