"""What results were measured on."""

from __future__ import annotations

import platform
import subprocess

import torch


def machine() -> dict[str, str]:
    """GPU, driver and software, where they can be found out."""
    found = {
        "GPU": torch.cuda.get_device_name(0),
        "driver": _driver_version(),
        "CUDA": str(torch.version.cuda),
        "torch": str(torch.__version__),
        "Python": platform.python_version(),
    }
    return {name: value for name, value in found.items() if value}


def _driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
