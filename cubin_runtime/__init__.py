"""Precompiled GPU attention kernels: select, verify, load and launch a cubin in one call.

Importing this package touches neither torch, CUDA, the network nor the disk.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cubin_runtime.attention import trtllm_ragged_attention_deepseek
    from cubin_runtime.errors import (
        ArtifactError,
        ArtifactNotFoundError,
        BlockedError,
        CubinFormatError,
        CubinRuntimeError,
        DownloadError,
        DriverError,
        DriverNotFoundError,
        IntegrityError,
        InvalidArgumentError,
        ManifestError,
        NoKernelError,
        OfflineError,
        SettingError,
        SignatureError,
        StoreWriteError,
        TableError,
        UnsupportedError,
    )
    from cubin_runtime.planning import explain, make_request, warmup, workspace_size
    from cubin_runtime.quantize import trtllm_sage_attention_quantize
    from cubin_runtime.request import KernelRequest
    from cubin_runtime.selection import Selection

__version__ = "0.1.0"

# Where a public name lives; the rest are exceptions.
_MODULE_OF = {
    "trtllm_ragged_attention_deepseek": "attention",
    "trtllm_sage_attention_quantize": "quantize",
    "explain": "planning",
    "make_request": "planning",
    "warmup": "planning",
    "workspace_size": "planning",
    "KernelRequest": "request",
    "Selection": "selection",
}

__all__ = [
    "ArtifactError",
    "ArtifactNotFoundError",
    "BlockedError",
    "CubinFormatError",
    "CubinRuntimeError",
    "DownloadError",
    "DriverError",
    "DriverNotFoundError",
    "IntegrityError",
    "InvalidArgumentError",
    "KernelRequest",
    "ManifestError",
    "NoKernelError",
    "OfflineError",
    "Selection",
    "SettingError",
    "SignatureError",
    "StoreWriteError",
    "TableError",
    "UnsupportedError",
    "explain",
    "make_request",
    "trtllm_ragged_attention_deepseek",
    "trtllm_sage_attention_quantize",
    "warmup",
    "workspace_size",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULE_OF.get(name, "errors")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
