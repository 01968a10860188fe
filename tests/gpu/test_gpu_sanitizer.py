"""compute-sanitizer over the small calls of sanitizer_case.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.support import SKIPPING, TYPES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_finds_nothing(tool: str, device: torch.device) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer on PATH")
    # racecheck does not see that cp.async, by which Sage's scales come, orders what it writes by its arrival
    # at an mbarrier, nor that choices about blocks are polled for as volatile words, nor, before its version
    # 2026.1, that a barrier of two warpgroups orders what pairs exchange.
    unclear = {name for name, each in TYPES.items() if each.sage_blocks or each.options == SKIPPING}
    types = [name for name in TYPES if tool != "racecheck" or name not in unclear]
    left_out = ["--kernel-name-exclude=kernel_substring=_pair"] if tool == "racecheck" else []
    finished = subprocess.run(
        [
            sanitizer,
            f"--tool={tool}",
            "--error-exitcode=9",
            "--report-api-errors=no",  # cuda.bindings asks old drivers for new functions, which is no error
            "--kernel-name=kernel_substring=fmha",
            *left_out,
            sys.executable,
            "-m",
            "tests.gpu.sanitizer_case",
            *types,
        ],
        cwd=Path(__file__).parents[2],
        # torch's pool would hide accesses past the end of one tensor inside the pool's block.
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-4000:]
