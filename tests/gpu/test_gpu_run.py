"""`cubin-runtime run` on a GPU: launches what it planned, times it, and checks the result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.cli_support import Result

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--mask", "sliding", "--window", "300", "--kv-heads", "8", "--lse", "--sinks"],
        ["--mask", "dense", "--dtype", "fp16", "--head-dims", "256,256", "--heads", "16"],
    ],
    ids=" ".join,
)
def test_launched_timed_and_right(cli: Callable[..., Result], device: torch.device, flags: list[str]) -> None:
    result = cli("run", *flags, "--json")
    assert result.code == 0, result.out + result.err
    plan, found = result.json["plan"], result.json["outcome"]
    properties = torch.cuda.get_device_properties(device)
    assert plan["launch"]["device"] == properties.name
    assert plan["launch"]["grid"] == [properties.multi_processor_count, 1, 1]
    assert found["type"] == "launched"
    assert 0 < found["check"]["error"] <= found["check"]["allowed"]
    assert found["check"]["rows"] == 16392
    assert (found["check"]["lse_error"] is not None) == ("--lse" in flags)
    timing = found["timing"]
    assert timing["fastest_ms"] <= timing["median_ms"] <= timing["slowest_ms"]
    assert found["tflops"] == pytest.approx(found["flops"] / timing["median_ms"] / 1e9)
    assert 1 < found["tflops"] < 2000


def test_text(cli: Callable[..., Result], device: torch.device) -> None:
    result = cli("run", "--q-lens", "1,700")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    labels = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert labels == [
        *("batch", "request", "kernel", "why", "cubin", "verified", "launch", "time", "rate", "error")
    ]
