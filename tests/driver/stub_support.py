"""What the code that runs on the stub driver shares: a row, its cubin, and the stub's own functions."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from cubin_runtime import module
from cubin_runtime.cubin import inspect
from cubin_runtime.manifest import Artifact, Manifest
from cubin_runtime.request import DType, MaskType
from kernel_meta.schema import KernelRow, Resources, Scheduler

CUBINS = Path(__file__).parent / "cubins"

stub = ctypes.CDLL("libcuda.so.1")


def fail(function: str, code: int, times: int = -1) -> None:
    """Makes the next calls of a driver function return `code`; -1 = all of them."""
    stub.stub_fail(function.encode(), code, times)


def make_row(cubin: str = "facts_13.0_sm_90a", entry: str = "by_value", **columns: Any) -> KernelRow:
    """A row that describes an entry of a cubin in this folder."""
    found = inspect((CUBINS / f"{cubin}.cubin").read_bytes())
    facts = found.kernels[entry]
    row = KernelRow(
        family="fmha_sm90",
        arch=str(found.arch),
        dtype_q=DType.BF16,
        dtype_k=DType.BF16,
        dtype_v=DType.BF16,
        dtype_o=DType.BF16,
        head_dim_qk=192,
        head_dim_v=128,
        mask_type=MaskType.CAUSAL,
        tile_q=128,
        tile_kv=128,
        scheduler=Scheduler.STATIC,
        abi="test/1",
        entry=entry,
        resources=Resources(
            threads=facts.threads or 32,
            registers=facts.registers,
            shared_memory=facts.dynamic_shared_memory or 0,
            static_shared_memory=facts.static_shared_memory,
            parameter_bytes=facts.parameter_bytes,
        ),
    )
    return msgspec.structs.replace(row, **columns)


def publish(*rows: KernelRow, cubin: str = "facts_13.0_sm_90a") -> Path:
    """Makes `load` find that cubin for the rows; the folder that holds it."""
    data = (CUBINS / f"{cubin}.cubin").read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    artifacts = {
        row.name: Artifact(name=row.name, set_name="test", version="1", sha256=digest, size=len(data))
        for row in rows
    }
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    path = folder / digest[:2] / digest
    path.parent.mkdir()
    path.write_bytes(data)
    manifest = Manifest(artifacts=artifacts)
    module.default_manifest = lambda: manifest  # type: ignore[assignment]  # a cached function, as a plain one
    return folder
