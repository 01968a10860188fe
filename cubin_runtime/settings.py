"""Everything that the environment can change, as typed properties read on each access.

CUBIN_RUNTIME_CACHE_DIR      folder that downloads are kept in (default: the user's cache folder)
CUBIN_RUNTIME_ARTIFACT_DIR   folders of cubins to look into first, separated like PATH (default: none)
CUBIN_RUNTIME_CACHE_MAX_SIZE most bytes to keep there, such as 500M or 2G (default: no limit)
CUBIN_RUNTIME_MANIFESTS      manifests of private cubins, separated like PATH (default: none)
CUBIN_RUNTIME_TRUSTED_KEYS   PEM files of the ed25519 keys that must have signed those, separated like PATH
                             (default: none, signatures are not asked for)
CUBIN_RUNTIME_BLOCKLIST      file of cubins that must not run, a line `<sha256> <reason>` each (default: none)
CUBIN_RUNTIME_BLOCKED        such lines themselves, separated by semicolons (default: none)
CUBIN_RUNTIME_ALLOW_BLOCKED  sha256 of blocked cubins that may run all the same (default: none)
CUBIN_RUNTIME_MIRRORS        base URLs, http(s), file or s3 (default: none)
CUBIN_RUNTIME_INSECURE_HOSTS hosts, or host:port, that may be asked over plain http; this machine always
                             may (default: none)
CUBIN_RUNTIME_TOKENS         bearer tokens, host=token or host:port=token (default: none)
CUBIN_RUNTIME_CA_BUNDLE      PEM file of the authorities that may vouch for a host (default: what requests
                             takes, REQUESTS_CA_BUNDLE among others)
CUBIN_RUNTIME_OFFLINE        1/true/yes/on or 0/false/no/off (default: off)
CUBIN_RUNTIME_LOCK_TIMEOUT   seconds to wait for another process's download (default: 60)
CUBIN_RUNTIME_HTTP_TIMEOUT   seconds without an answer until a request counts as dead (default: 10)
CUBIN_RUNTIME_LOG_LEVEL      DEBUG, INFO, WARNING, ERROR or CRITICAL (default: the application's own setting)

Items of a list are separated by spaces or commas where nothing else is said. A variable that is empty
counts as unset. Proxies are those of HTTPS_PROXY, HTTP_PROXY and NO_PROXY; passwords may stand in ~/.netrc.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

from cubin_runtime.errors import SettingError

CACHE_DIR = "CUBIN_RUNTIME_CACHE_DIR"
ARTIFACT_DIR = "CUBIN_RUNTIME_ARTIFACT_DIR"
CACHE_MAX_SIZE = "CUBIN_RUNTIME_CACHE_MAX_SIZE"
MANIFESTS = "CUBIN_RUNTIME_MANIFESTS"
TRUSTED_KEYS = "CUBIN_RUNTIME_TRUSTED_KEYS"
BLOCKLIST = "CUBIN_RUNTIME_BLOCKLIST"
BLOCKED = "CUBIN_RUNTIME_BLOCKED"
ALLOW_BLOCKED = "CUBIN_RUNTIME_ALLOW_BLOCKED"
MIRRORS = "CUBIN_RUNTIME_MIRRORS"
INSECURE_HOSTS = "CUBIN_RUNTIME_INSECURE_HOSTS"
TOKENS = "CUBIN_RUNTIME_TOKENS"
CA_BUNDLE = "CUBIN_RUNTIME_CA_BUNDLE"
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
            return _path(CACHE_DIR, text)
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
        return self._paths(ARTIFACT_DIR)

    @property
    def cache_max_size(self) -> int | None:
        """Most bytes of cubins to keep in the cache; None = no limit."""
        text = self._text(CACHE_MAX_SIZE)
        return parse_size(CACHE_MAX_SIZE, text) if text else None

    @property
    def manifests(self) -> tuple[Path, ...]:
        """Manifests that add to the package's own."""
        return self._paths(MANIFESTS)

    @property
    def trusted_keys(self) -> tuple[Path, ...]:
        """PEM files of keys, one of which must have signed each of `manifests`; () = none needed."""
        return self._paths(TRUSTED_KEYS)

    @property
    def blocklist(self) -> Path | None:
        """The file that lists cubins that must not run."""
        text = self._text(BLOCKLIST)
        return _path(BLOCKLIST, text) if text else None

    @property
    def blocked(self) -> tuple[str, ...]:
        """Further lines of that list."""
        return tuple(line.strip() for line in self._text(BLOCKED).split(";") if line.strip())

    @property
    def allow_blocked(self) -> frozenset[str]:
        """sha256 of listed cubins that may run nevertheless."""
        return frozenset(word.lower() for word in self._words(ALLOW_BLOCKED))

    @property
    def mirrors(self) -> tuple[str, ...]:
        """Base URLs to download from, in order, without trailing slashes."""
        return tuple(self._base_url(url) for url in self._words(MIRRORS))

    @property
    def insecure_hosts(self) -> frozenset[str]:
        """Hosts, or host:port, for which plain http is good enough."""
        return frozenset(word.lower() for word in self._words(INSECURE_HOSTS))

    @property
    def tokens(self) -> dict[str, str]:
        """Bearer token by host or host:port."""
        pairs = [word.partition("=") for word in self._words(TOKENS)]
        for number, (host, _, token) in enumerate(pairs, start=1):
            if not host or not token:
                # The text itself may be a secret.
                raise SettingError(f"item {number} of {TOKENS} is malformed; expected host=token")
        return {host.lower(): token for host, _, token in pairs}

    @property
    def ca_bundle(self) -> Path | None:
        """PEM file that replaces the usual certificate authorities."""
        text = self._text(CA_BUNDLE)
        if not text:
            return None
        path = _path(CA_BUNDLE, text)
        if not path.is_file():
            raise SettingError(f"{CA_BUNDLE} is {text!r}; expected a PEM file, and there is none")
        return path

    def permits(self, url: str) -> bool:
        """Whether `url` may be asked: over TLS, or on this machine, or on a host of `insecure_hosts`."""
        from urllib.parse import urlsplit

        parts = urlsplit(url)
        if parts.scheme != "http":
            return True
        host = parts.hostname or ""
        return is_loopback(host) or bool({host, f"{host}:{parts.port or 80}"} & self.insecure_hosts)

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

    def _base_url(self, url: str) -> str:
        base = _checked_url(url)
        if not self.permits(base):
            raise SettingError(
                f"{MIRRORS} holds {hide_password(url)!r}, which is not encrypted; use https, or "
                f"name the host in {INSECURE_HOSTS}"
            )
        return base

    def _text(self, name: str) -> str:
        return self._environ.get(name, "").strip()

    def _words(self, name: str) -> list[str]:
        return self._text(name).replace(",", " ").split()

    def _paths(self, name: str) -> tuple[Path, ...]:
        return tuple(_path(name, part) for part in self._text(name).split(os.pathsep) if part)

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


def parse_size(name: str, text: str) -> int:
    """Bytes of a size such as 1000, 64K, 500M or 2G (powers of 1024); raises SettingError naming `name`."""
    match = re.fullmatch(r"(\d{1,15})\s*([kmgt]?)(i?b)?", text.strip().lower())
    if not match:
        raise SettingError(f"{name} is {text!r}; expected a size such as 1000, 64K, 500M or 2G")
    return int(match[1]) << 10 * " kmgt".index(match[2] or " ")


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, so that nothing that is sent to it can be overheard."""
    import ipaddress

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def hide_password(url: str) -> str:
    """The URL without user and password."""
    return re.sub(r"//[^/\s]*@", "//", url)


def _path(name: str, text: str) -> Path:
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise SettingError(f"{name} is {text!r}: {error}") from None
    if "\0" in text:
        raise SettingError(f"{name} is {text!r}; a path cannot hold a NUL character")
    return path


def _checked_url(url: str) -> str:
    from urllib.parse import urlsplit

    shown = hide_password(url)
    expected = "expected a base URL such as https://host/cubins, file:///mnt/cubins or s3://bucket/cubins"
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port  # reading the port checks it
    except ValueError as error:
        raise SettingError(f"{MIRRORS} holds {shown!r} ({error}); {expected}") from None
    if parts.query or parts.fragment:
        raise SettingError(f"{MIRRORS} holds {shown!r}, which has a query or fragment; {expected}")
    if parts.scheme == "file":
        usable = host in (None, "localhost") and parts.path.startswith("/")
    else:
        usable = parts.scheme in ("http", "https", "s3") and bool(host)
    if not usable:
        raise SettingError(f"{MIRRORS} holds {shown!r}; {expected}")
    return url.rstrip("/")


settings = Settings()
