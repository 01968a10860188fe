"""Fixtures of several test files."""

from __future__ import annotations

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
    for name in ("ARTIFACT_DIR", "MIRRORS", "OFFLINE", "LOG_LEVEL"):
        monkeypatch.delenv(f"CUBIN_RUNTIME_{name}", raising=False)
    monkeypatch.setenv("CUBIN_RUNTIME_CACHE_DIR", str(tmp_path / "cache"))
    # Width and colour follow the terminal that the tests happen to run in.
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
