"""Everything that the environment can change, as typed properties read on each access.

CUBIN_RUNTIME_CACHE_DIR      folder that downloads are kept in (default: the user's cache folder)
CUBIN_RUNTIME_ARTIFACT_DIR   folders of cubins to look into first, separated like PATH (default: none)
CUBIN_RUNTIME_MIRRORS        base URLs, http(s) or file, separated by spaces or commas (default: none)
CUBIN_RUNTIME_OFFLINE        1/true/yes/on or 0/false/no/off (default: off)
CUBIN_RUNTIME_LOCK_TIMEOUT   seconds to wait for another process's download (default: 60)
CUBIN_RUNTIME_HTTP_TIMEOUT   seconds without an answer until a request counts as dead (default: 10)
CUBIN_RUNTIME_LOG_LEVEL      DEBUG, INFO, WARNING, ERROR or CRITICAL (default: the application's own setting)

A variable that is empty counts as unset.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path

from cubin_runtime.errors import SettingError

CACHE_DIR = "CUBIN_RUNTIME_CACHE_DIR"
ARTIFACT_DIR = "CUBIN_RUNTIME_ARTIFACT_DIR"
MIRRORS = "CUBIN_RUNTIME_MIRRORS"
OFFLINE = "CUBIN_RUNTIME_OFFLINE"
LOCK_TIMEOUT = "CUBIN_RUNTIME_LOCK_TIMEOUT"
HTTP_TIMEOUT = "CUBIN_RUNTIME_HTTP_TIMEOUT"
LOG_LEVEL = "CUBIN_RUNTIME_LOG_LEVEL"

logger = logging.getLogger("cubin_runtime")

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


_warned: set[object] = set()


def warn_once(message: str, about: object = None) -> None:
    """Logs a warning, once per process for each `about` (default: the text itself)."""
    subject = about or message
    if subject not in _warned:
        _warned.add(subject)
        logger.warning(message)


class Settings:
    """Typed view of the CUBIN_RUNTIME_* variables in `environ` (default: os.environ).

    A bad value raises SettingError naming the variable, when it is read.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ

    @property
    def cache_dir(self) -> Path:
        """Where downloads are kept. The folder need not exist."""
        if text := self._text(CACHE_DIR):
            return _folder(CACHE_DIR, text)
        import platformdirs

        path = platformdirs.user_cache_path("cubin-runtime")
        if not path.is_absolute():
            raise SettingError(
                f"this user has no home folder to keep a cache in; set {CACHE_DIR} to a folder"
            )
        return path

    @property
    def artifact_dirs(self) -> tuple[Path, ...]:
        """Folders of cubins that are looked into before the package's own."""
        parts = self._text(ARTIFACT_DIR).split(os.pathsep)
        return tuple(_folder(ARTIFACT_DIR, part) for part in parts if part)

    @property
    def mirrors(self) -> tuple[str, ...]:
        """Base URLs to download from, in order, without trailing slashes."""
        return tuple(_base_url(url) for url in self._text(MIRRORS).replace(",", " ").split())

    @property
    def offline(self) -> bool:
        """Whether the network must not be used."""
        word = self._text(OFFLINE).lower()
        if word in ("", *_FALSE):
            return False
        if word in _TRUE:
            return True
        raise SettingError(f"{OFFLINE} is {word!r}; expected one of {', '.join(_TRUE + _FALSE)}")

    @property
    def lock_timeout(self) -> float:
        """Longest wait in seconds for a download by another process; 0 = do not wait."""
        return self._seconds(LOCK_TIMEOUT, 60.0)

    @property
    def http_timeout(self) -> float:
        """Longest silence of a server in seconds; above 0."""
        seconds = self._seconds(HTTP_TIMEOUT, 10.0)
        if seconds == 0:
            raise SettingError(f"{HTTP_TIMEOUT} is 0; expected a number of seconds above 0")
        return seconds

    @property
    def log_level(self) -> int:
        """Level for this package's logger. A bad name is a warning, never an error."""
        name = self._text(LOG_LEVEL).upper()
        if not name:
            return logging.NOTSET
        if name not in _LOG_LEVELS:
            warn_once(f"{LOG_LEVEL} is {name!r}; expected one of {', '.join(_LOG_LEVELS)}; WARNING is used")
            return logging.WARNING
        return int(getattr(logging, name))

    def _text(self, name: str) -> str:
        return self._environ.get(name, "").strip()

    def _seconds(self, name: str, default: float) -> float:
        text = self._text(name)
        if not text:
            return default
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 <= seconds < math.inf:
            raise SettingError(f"{name} is {text!r}; expected a number of seconds, 0 or more")
        return seconds


def _folder(name: str, text: str) -> Path:
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise SettingError(f"{name} is {text!r}: {error}") from None
    if "\0" in text:
        raise SettingError(f"{name} is {text!r}; a path cannot hold a NUL character")
    return path


def _base_url(url: str) -> str:
    from urllib.parse import urlsplit

    expected = "expected a base URL such as https://host/cubins or file:///mnt/cubins"
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port  # reading the port checks it
    except ValueError as error:
        raise SettingError(f"{MIRRORS} holds {url!r} ({error}); {expected}") from None
    if parts.query or parts.fragment:
        raise SettingError(f"{MIRRORS} holds {url!r}, which has a query or fragment; {expected}")
    if parts.scheme == "file":
        usable = host in (None, "localhost") and parts.path.startswith("/")
    else:
        usable = parts.scheme in ("http", "https") and bool(host)
    if not usable:
        raise SettingError(f"{MIRRORS} holds {url!r}; {expected}")
    return url.rstrip("/")


settings = Settings()
