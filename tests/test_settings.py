from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from cubin_runtime.errors import SettingError
from cubin_runtime.settings import Settings

ROOT = Path(__file__).parent.parent


def make(**variables: str) -> Settings:
    return Settings({f"CUBIN_RUNTIME_{name}": value for name, value in variables.items()})


@pytest.mark.parametrize("empty", [{}, {"CACHE_DIR": "", "MIRRORS": " ", "OFFLINE": "", "LOCK_TIMEOUT": ""}])
def test_defaults_when_unset_or_empty(empty: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    settings = make(**empty)
    assert settings.cache_dir == Path("/somewhere/cubin-runtime")
    assert settings.artifact_dirs == ()
    assert settings.mirrors == ()
    assert settings.offline is False
    assert (settings.lock_timeout, settings.http_timeout) == (60.0, 10.0)
    assert settings.log_level == logging.NOTSET


def test_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    settings = make(
        CACHE_DIR="~/cubins",
        ARTIFACT_DIR="/a:/b b:",
        MIRRORS="https://one/x/, http://two:8080\n file:///mnt/three//",
        OFFLINE="Yes",
        LOCK_TIMEOUT="0",
        HTTP_TIMEOUT="2.5",
        LOG_LEVEL="debug",
    )
    assert settings.cache_dir == Path("/home/me/cubins")
    assert settings.artifact_dirs == (Path("/a"), Path("/b b"))
    assert settings.mirrors == ("https://one/x", "http://two:8080", "file:///mnt/three")
    assert settings.offline is True
    assert (settings.lock_timeout, settings.http_timeout) == (0.0, 2.5)
    assert settings.log_level == logging.DEBUG


def test_variables_are_read_on_each_access(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings()
    monkeypatch.setenv("CUBIN_RUNTIME_OFFLINE", "1")
    assert settings.offline
    monkeypatch.setenv("CUBIN_RUNTIME_OFFLINE", "0")
    assert not settings.offline


@pytest.mark.parametrize(
    ("variable", "value", "read"),
    [
        ("CACHE_DIR", "a\0b", "cache_dir"),
        ("CACHE_DIR", "~no-such-user/x", "cache_dir"),
        ("ARTIFACT_DIR", "/fine:~no-such-user", "artifact_dirs"),
        ("OFFLINE", "maybe", "offline"),
        ("LOCK_TIMEOUT", "soon", "lock_timeout"),
        ("LOCK_TIMEOUT", "-1", "lock_timeout"),
        ("LOCK_TIMEOUT", "inf", "lock_timeout"),
        ("HTTP_TIMEOUT", "nan", "http_timeout"),
        ("HTTP_TIMEOUT", "0", "http_timeout"),
        ("MIRRORS", "ftp://host/x", "mirrors"),
        ("MIRRORS", "host/x", "mirrors"),
        ("MIRRORS", "https:///x", "mirrors"),
        ("MIRRORS", "https://host:port/x", "mirrors"),
        ("MIRRORS", "https://[::1/x", "mirrors"),
        ("MIRRORS", "https://host/x?token=1", "mirrors"),
        ("MIRRORS", "file://host/x", "mirrors"),
        ("MIRRORS", "file:relative", "mirrors"),
    ],
)
def test_bad_value_names_the_variable(variable: str, value: str, read: str) -> None:
    with pytest.raises(SettingError, match=f"CUBIN_RUNTIME_{variable}"):
        getattr(make(**{variable: value}), read)


def test_no_home_folder_is_an_error_that_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: Path("~/.cache") / name)
    with pytest.raises(SettingError, match="set CUBIN_RUNTIME_CACHE_DIR"):
        _ = make().cache_dir


@pytest.mark.parametrize("level", ["verbose", "10", "getLogger"])
def test_bad_log_level_is_one_warning(level: str, caplog: pytest.LogCaptureFixture) -> None:
    settings = make(LOG_LEVEL=level)
    assert [settings.log_level, settings.log_level] == [logging.WARNING] * 2
    assert len(caplog.records) == 1
    assert "CUBIN_RUNTIME_LOG_LEVEL" in caplog.text


def test_import_is_light_and_writes_nothing(tmp_path: Path) -> None:
    code = """
import sys
import cubin_runtime.settings, cubin_runtime.manifest, cubin_runtime.store, cubin_runtime.fetch
heavy = {"yaml", "requests", "urllib3", "filelock", "platformdirs", "torch", "cuda"} & set(sys.modules)
assert not heavy, heavy
"""
    environ = {"HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ, check=True)
    assert list(tmp_path.iterdir()) == []
