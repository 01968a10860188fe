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
        MIRRORS="https://one/x/, http://two:8080\n file:///mnt/three// s3://bucket/x/",
        INSECURE_HOSTS="TWO",
        OFFLINE="Yes",
        LOCK_TIMEOUT="0",
        HTTP_TIMEOUT="2.5",
        LOG_LEVEL="debug",
    )
    assert settings.cache_dir == Path("/home/me/cubins")
    assert settings.artifact_dirs == (Path("/a"), Path("/b b"))
    assert settings.mirrors == ("https://one/x", "http://two:8080", "file:///mnt/three", "s3://bucket/x")
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
        ("MIRRORS", "http://host/x", "mirrors"),
        ("CACHE_MAX_SIZE", "much", "cache_max_size"),
        ("CACHE_MAX_SIZE", "-1", "cache_max_size"),
        ("CACHE_MAX_SIZE", "1e9", "cache_max_size"),
        ("CA_BUNDLE", "/absent.pem", "ca_bundle"),
        ("TOKENS", "secret", "tokens"),
        ("TOKENS", "host=", "tokens"),
        ("MANIFESTS", "~no-such-user/m.yaml", "manifests"),
        ("BLOCKLIST", "a\0b", "blocklist"),
    ],
)
def test_bad_value_names_the_variable(variable: str, value: str, read: str) -> None:
    with pytest.raises(SettingError, match=f"CUBIN_RUNTIME_{variable}"):
        getattr(make(**{variable: value}), read)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("TOKENS", "secret"), ("MIRRORS", "http://me:secret@host"), ("MIRRORS", "x://me:secret@host")],
)
def test_secrets_are_not_in_messages(variable: str, value: str) -> None:
    with pytest.raises(SettingError) as caught:
        getattr(make(**{variable: value}), variable.lower())
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("1000", 1000), ("64K", 65536), ("500 MiB", 500 * 2**20), ("2g", 2**31), ("1TB", 2**40)],
)
def test_sizes(text: str, size: int) -> None:
    assert make(CACHE_MAX_SIZE=text).cache_max_size == size


@pytest.mark.parametrize(
    ("url", "permitted"),
    [
        ("https://anywhere", True),
        ("http://127.8.8.8:80/x", True),
        ("http://[::1]/x", True),
        ("http://localhost", True),
        ("http://localhost.evil.org", False),
        ("http://named", True),
        ("http://named:81", True),
        ("http://other:8080", True),
        ("http://other", False),
        ("http://sub.named", False),
        ("http://user@named", True),
        ("http://named@evil.org", False),
    ],
)
def test_plain_http_is_for_named_hosts_and_this_machine(url: str, permitted: bool) -> None:
    assert make(INSECURE_HOSTS="named, other:8080").permits(url) is permitted


def test_lists_and_pairs() -> None:
    settings = make(
        TOKENS="Host=a=b, other:8443=c",
        BLOCKED="aa one reason; bb another;",
        ALLOW_BLOCKED="AA bb",
        MANIFESTS="/a.yaml:/b.yaml",
        TRUSTED_KEYS="/k.pem",
        BLOCKLIST="/list",
    )
    assert settings.tokens == {"host": "a=b", "other:8443": "c"}
    assert settings.blocked == ("aa one reason", "bb another")
    assert settings.allow_blocked == {"aa", "bb"}
    assert settings.manifests == (Path("/a.yaml"), Path("/b.yaml"))
    assert (settings.trusted_keys, settings.blocklist) == ((Path("/k.pem"),), Path("/list"))
    empty = make()
    assert (empty.tokens, empty.blocked, empty.allow_blocked, empty.blocklist) == ({}, (), frozenset(), None)
    assert (empty.cache_max_size, empty.ca_bundle, empty.manifests) == (None, None, ())


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
