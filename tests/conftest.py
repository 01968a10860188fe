"""Fixtures of several test files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cubin_runtime.cli.app import run
from tests.cli_support import Result


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], clean_environment: None) -> Callable[..., Result]:
    """Runs a command in this process."""

    def call(*arguments: str) -> Result:
        with pytest.raises(SystemExit) as caught:
            run(list(arguments))
        code = caught.value.code
        assert code is None or isinstance(code, int)
        return Result(code or 0, *capsys.readouterr())

    return call


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings but an empty cache, and no terminal."""
    for name in [name for name in os.environ if name.startswith("CUBIN_RUNTIME_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUBIN_RUNTIME_CACHE_DIR", str(tmp_path / "cache"))
    # Width and colour follow the terminal that the tests happen to run in.
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
