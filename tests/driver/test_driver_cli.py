"""The command line on machines with several devices: answers come from the device that is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

MIXED = ("9.0:132:232448", "10.0:148:232448", "10.3:160:232000")

EXPLAIN_ALL = """
import contextlib, io, json
from cubin_runtime.cli.app import run

def request(*arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        run(["explain", *arguments, "--json"])
    return json.loads(out.getvalue())["request"]

print(json.dumps([request("--device", str(n)) for n in range(3)] + [request()]))
"""


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("0,1,2", ["9.0", "10.0", "10.3", "9.0"]), ("2,0,1", ["10.3", "9.0", "10.0", "10.3"])],
)
def test_explain_follows_the_visible_devices(
    run_with_stub: Callable[..., Any], visible: str, expected: list[str]
) -> None:
    result = run_with_stub(EXPLAIN_ALL, devices=MIXED, env={"CUDA_VISIBLE_DEVICES": visible})
    requests = json.loads(result.stdout)
    assert [request["capability"] for request in requests] == expected
    limits = {request["capability"]: request["max_shared_memory"] for request in requests}
    assert limits["10.3"] == 232_000


def test_doctor_describes_every_device(run_with_stub: Callable[..., Any]) -> None:
    code = 'from cubin_runtime.cli.app import run; run(["doctor", "--json"])'
    result = run_with_stub(code, devices=MIXED, check=False)
    details = {finding["subject"]: finding["detail"] for finding in json.loads(result.stdout)}
    assert "compute capability 9.0, 132 SMs" in details["device 0"]
    assert "compute capability 10.3, 160 SMs" in details["device 2"]


def test_a_device_that_does_not_exist_is_one_clear_line(run_with_stub: Callable[..., Any]) -> None:
    code = 'from cubin_runtime.cli.app import run; run(["explain", "--device", "7"])'
    result = run_with_stub(code, devices=MIXED[:1], check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ")
    assert "device 7" in result.stderr
    assert len(result.stderr.splitlines()) == 1
