"""The one version of NVIDIA's compiler that builds our cubins, and where it is found.

Other versions give other bytes, so a compiler of another version is refused rather than used.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

VERSION = "13.0.88"
INSTALL = 'pip install "cubin-runtime[build]"   (in a checkout: pip install -e ".[build]")'


class ToolchainError(RuntimeError):
    """No usable compiler; the message says what was found and how to install the right one."""


class Toolchain(NamedTuple):
    """A compiler of the pinned version. `nvdisasm` is None when there is no disassembler."""

    nvcc: Path
    nvdisasm: Path | None
    version: str = VERSION


def find_toolchain() -> Toolchain:
    """The PyPI wheels' compiler, else nvcc on PATH; raises ToolchainError unless it is exactly VERSION."""
    refused = []
    for nvcc in _candidates("nvcc"):
        version = _version(nvcc)
        if version == VERSION:
            return Toolchain(nvcc, next(_candidates("nvdisasm"), None))
        refused.append(f"{nvcc} is version {version}")
    found = "; ".join(refused) or "no nvcc in the Python environment or on PATH"
    raise ToolchainError(f"building cubins takes nvcc {VERSION}; {found}. Install it with: {INSTALL}")


def _candidates(tool: str) -> Iterator[Path]:
    """Where a tool lies: the wheels unpack into <site-packages>/nvidia/cu13, which has no __init__."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / "cu13" / "bin" / tool
        if path.is_file():
            yield path
    on_path = shutil.which(tool)
    if on_path:
        yield Path(on_path)


def _version(nvcc: Path) -> str:
    try:
        output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"
    match = re.search(r"\bV(\d+\.\d+\.\d+)", output.stdout)
    return match[1] if match else "unknown"
