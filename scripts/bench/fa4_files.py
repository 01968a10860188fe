"""FlashAttention-4's Hopper kernels as files: their names and how they are called.

scripts/compile_fa4_kernels.py makes them. Written against flash-attn-4 4.0.0b36.
"""

from __future__ import annotations

import ctypes
import lzma
import math
import tempfile
from pathlib import Path
from typing import Any

from bench.workloads import Workload

# The compiler's runtime, whose symbols every kernel file needs: 44 MB, 14 packed.
RUNTIME = "libcute_dsl_runtime.so.xz"
VERSIONS = "versions.txt"
FUNCTION = "func"


def kernel_file(workload: Workload, fixed: bool) -> str:
    """Name of the file that holds the kernel for a workload: all that FlashAttention-4 specialises on.

    fixed   the fixed-length entry, [batch, tokens, heads, dim], instead of the ragged one
    """
    dim_qk, dim_v = workload.head_dims
    layout = "fixed" if fixed else "ragged"
    return f"fa4_{workload.dtype}_{dim_qk}_{dim_v}_x{workload.group}_{workload.mask}_{layout}.so"


def call_arguments(workload: Workload, tensors: tuple[Any, ...], edges: tuple[Any, Any]) -> list[Any]:
    """What a kernel file's function takes, in order.

    tensors   query, key, value, out
    edges     cumulated query and key lengths, both None for the fixed-length entry
    """
    window = (workload.window, 0) if workload.mask == "window" else (None, None)
    lse = used_q = used_k = pages = sinks = sparse = total_blocks = split_blocks = None
    scale = 1 / math.sqrt(workload.head_dims[0])
    auxiliary = (None, None)
    return [
        *tensors,
        lse,
        scale,
        *edges,
        used_q,
        used_k,
        pages,
        *window,
        sinks,
        sparse,
        auxiliary,
        total_blocks,
        split_blocks,
    ]


def load_runtime(folder: Path) -> None:
    """Makes the runtime's symbols visible to the kernel files. Raises OSError, lzma.LZMAError."""
    with tempfile.NamedTemporaryFile(suffix=".so") as unpacked:
        unpacked.write(lzma.decompress((folder / RUNTIME).read_bytes()))
        unpacked.flush()
        ctypes.CDLL(unpacked.name, mode=ctypes.RTLD_GLOBAL)
