"""Skips this folder where its kernels cannot run, and lends its tests a device and a workspace."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.gpu.support import make_workspace


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns where the driver is missing or old
        available = torch.cuda.is_available()
    if not available:
        pytest.skip("needs a CUDA device, and torch sees none")
    capability = torch.cuda.get_device_capability(0)
    if capability != (9, 0):
        pytest.skip(f"needs compute capability 9.0; device 0 has {capability[0]}.{capability[1]}")
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def workspace(device: torch.device) -> torch.Tensor:
    """Shared by all tests and never cleared: a call must not depend on what is in it."""
    return make_workspace(device)
