"""Getting a cubin's bytes: from this machine if it has them, else from a mirror into the cache.

Mirrors are untrusted: a body is bounded by the manifest's size while it arrives and verified in memory,
before anything is written.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cubin_runtime.errors import (
    ArtifactError,
    ArtifactNotFoundError,
    DownloadError,
    IntegrityError,
    OfflineError,
    StoreWriteError,
)
from cubin_runtime.manifest import Artifact
from cubin_runtime.settings import (
    ARTIFACT_DIR,
    CACHE_DIR,
    MIRRORS,
    OFFLINE,
    Settings,
    logger,
    settings,
    warn_once,
)
from cubin_runtime.store import Attempt, CacheStore, FolderStore, Located, Store, locate, lookup_order, verify

if TYPE_CHECKING:
    from concurrent.futures import Future

    import requests

BACKOFF = (0.5, 2.0)  # seconds before the second and the third try of one mirror
MAX_PAUSE = 30.0  # seconds; a mirror that asks for a longer pause is passed over
MIN_RATE = 16 * 2**10  # bytes per second; a slower transfer counts as stalled
CHUNK = 64 * 2**10  # bytes

# Downloads under way in this process. The key holds the process id, so that a forked child does not
# wait for a thread that only its parent has.
_flights: dict[tuple[object, ...], Future[Located]] = {}


def obtain(
    artifact: Artifact,
    *,
    folder: str | Path | None = None,
    settings: Settings = settings,
    session: requests.Session | None = None,
) -> Located:
    """The verified bytes of `artifact`, downloaded into the cache if no store of this machine has them.

    folder    asked before every other store
    settings  which stores and mirrors there are, and the timeouts
    session   makes the HTTP requests; default: a new requests.Session for each download

    A cache that cannot be written costs a warning and not the result. Thread-safe. Raises IntegrityError
    if wrong bytes are all there is, else OfflineError, ArtifactNotFoundError (no mirror) or DownloadError.
    """
    attempts: list[Attempt] = []
    found = locate(artifact, lookup_order(settings, artifact, folder), attempts)
    if found:
        return found
    # file: mirrors need no network, so they serve offline too.
    urls = [url for url in settings.mirrors if url.startswith("file:") or not settings.offline]
    if not urls:
        raise _failure(artifact, attempts, settings)
    mirrors = [_mirror(url, settings.http_timeout, session) for url in urls]
    return _share(
        (os.getpid(), artifact.sha256, settings.cache_dir, *urls),
        lambda: _download(artifact, mirrors, attempts, settings),
    )


class HttpMirror:
    """A store behind http or https. Retries what may pass, and hands over nothing but the right bytes."""

    name = "mirror"

    def __init__(self, url: str, timeout: float, session: requests.Session | None = None) -> None:
        self._url = url.rstrip("/")
        self._timeout = timeout
        self._session = session

    @property
    def location(self) -> str:
        """The base URL, without user and password."""
        return re.sub("//[^/]*@", "//", self._url)

    def place(self, artifact: Artifact) -> str:
        """See Store.place: the content-addressed one, without user and password."""
        return f"{self.location}/{artifact.key}"

    def read(self, artifact: Artifact) -> bytes:
        """The verified bytes. Raises DownloadError with the reason, or IntegrityError for wrong bytes."""
        import requests

        waits = iter(BACKOFF)
        with contextlib.ExitStack() as stack:
            session = self._session or stack.enter_context(requests.Session())
            while True:
                try:
                    return self._get(session, artifact)
                except _TransientError as error:
                    failure = error
                wait = next(waits, None)
                if wait is None or failure.pause > MAX_PAUSE:
                    raise self._error(artifact, str(failure)) from failure
                time.sleep(max(wait, failure.pause))

    def _get(self, session: requests.Session, artifact: Artifact) -> bytes:
        *others, last = artifact.paths
        for path in others:
            with contextlib.suppress(_MissingError):
                return self._get_path(session, artifact, path)
        return self._get_path(session, artifact, last)

    def _get_path(self, session: requests.Session, artifact: Artifact, path: str) -> bytes:
        import requests
        import urllib3

        headers = {"Accept-Encoding": "identity"}
        url = f"{self._url}/{path}"
        try:
            with session.get(url, headers=headers, timeout=self._timeout, stream=True) as response:
                self._check_status(response, artifact)
                return self._read_body(response, artifact)
        except requests.exceptions.SSLError as error:  # a ConnectionError, but it does not pass
            raise self._error(artifact, str(error)) from error
        except (requests.ConnectionError, requests.Timeout, urllib3.exceptions.HTTPError) as error:
            raise _TransientError(str(error)) from error
        except requests.RequestException as error:
            raise self._error(artifact, str(error)) from error

    def _check_status(self, response: requests.Response, artifact: Artifact) -> None:
        status = response.status_code
        if status == 200:
            return
        reason = f"HTTP {status} {response.reason}"
        if status in (408, 425, 429) or status >= 500:
            raise _TransientError(reason, pause=_retry_after(response))
        error = self._error(artifact, reason)
        raise _MissingError(str(error)) if status == 404 else error

    def _read_body(self, response: requests.Response, artifact: Artifact) -> bytes:
        source = f"{self.location}/{artifact.key}"
        length = response.headers.get("Content-Length", str(artifact.size))
        if length != str(artifact.size) and "Content-Encoding" not in response.headers:
            kind = response.headers.get("Content-Type", "unknown type")
            raise IntegrityError(
                f"{source} is not {artifact.name}: {length} bytes ({kind}), expected {artifact.size}"
            )
        # read1 hands over what has arrived, so that a trickle meets the deadline too; urllib3 1 lacks it.
        read = getattr(response.raw, "read1", response.raw.read)
        deadline = time.monotonic() + self._timeout + artifact.size / MIN_RATE
        data = bytearray()
        # A body that is longer than promised is wrong, however long it may be.
        while len(data) <= artifact.size and (chunk := read(CHUNK, decode_content=True)):
            data += chunk
            if time.monotonic() > deadline:
                raise _TransientError(f"too slow, {len(data)} of {artifact.size} bytes until the deadline")
        if len(data) < artifact.size:
            raise _TransientError(f"the body ended after {len(data)} of {artifact.size} bytes")
        body = bytes(data)
        verify(artifact, body, source)
        return body

    def _error(self, artifact: Artifact, reason: str) -> DownloadError:
        return DownloadError(f"{self.location}/{artifact.key}: {reason}")


class _MissingError(DownloadError):
    """The mirror has no file under that path."""


class _TransientError(Exception):
    """A failure that another try may get past, `pause` seconds from now at the earliest."""

    def __init__(self, reason: str, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.pause = pause


def _retry_after(response: requests.Response) -> float:
    """Seconds that the server asks to wait, given as a number or a date; 0 if it does not say."""
    import urllib3

    try:
        return urllib3.Retry().get_retry_after(response.raw) or 0.0
    except urllib3.exceptions.InvalidHeader:
        return 0.0


def _mirror(url: str, timeout: float, session: requests.Session | None) -> Store:
    from urllib.parse import unquote, urlsplit

    if url.startswith("file:"):
        return FolderStore("mirror", unquote(urlsplit(url).path))
    return HttpMirror(url, timeout, session)


def _share(key: tuple[object, ...], work: Callable[[], Located]) -> Located:
    """Runs `work` in the first thread that comes with `key`; threads that come meanwhile get its outcome."""
    from concurrent.futures import Future

    mine: Future[Located] = Future()
    flight = _flights.setdefault(key, mine)
    if flight is not mine:
        return flight.result()
    try:
        result = work()
    except BaseException as error:
        # A KeyboardInterrupt is for this thread only.
        mine.set_exception(error if isinstance(error, Exception) else DownloadError("download interrupted"))
        raise
    else:
        mine.set_result(result)
        return result
    finally:
        del _flights[key]


def _download(
    artifact: Artifact, mirrors: Sequence[Store], attempts: list[Attempt], settings: Settings
) -> Located:
    cache = CacheStore(settings.cache_dir)
    with _only_downloader(cache, artifact, settings.lock_timeout):
        # Whoever had the lock before may have brought it.
        found = locate(artifact, [cache], [])
        if found:
            return found
        found = locate(artifact, mirrors, attempts)
        if not found:
            raise _failure(artifact, attempts, settings)
        try:
            cache.write(artifact, found.data)
        except StoreWriteError as error:
            warn_once(f"{error}. Until then, every process downloads again", about=cache.folder)
        logger.info("downloaded %s (%d bytes) from %s", artifact.name, artifact.size, found.path)
        return found


@contextlib.contextmanager
def _only_downloader(cache: CacheStore, artifact: Artifact, timeout: float) -> Iterator[None]:
    """Keeps other processes from downloading the same file, as far as that can be had within `timeout`.

    A lock that is not to be had (another user's, a read-only folder, a holder that hangs) costs at most
    a second download, as files are verified and replaced atomically.
    """
    import filelock

    path = cache.folder / "locks" / f"{artifact.sha256}.lock"
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(filelock.FileLock(path, timeout=timeout))
        except (OSError, NotImplementedError) as error:  # filelock.Timeout is an OSError
            logger.debug("downloading %s without a lock: %s", artifact.name, error)
        yield


def _failure(artifact: Artifact, attempts: Sequence[Attempt], settings: Settings) -> ArtifactError:
    """The exception that says who was asked for `artifact`, what they answered, and what to do."""
    kind: type[ArtifactError]
    if any(attempt.corrupt for attempt in attempts):
        kind, remedy = IntegrityError, "Remove or replace the wrong file."
    elif settings.offline:
        kind = OfflineError
        remedy = (
            f"{OFFLINE} forbids downloads. Unset it, or run `cubin-runtime fetch {artifact.name}` where "
            f"there is a network, copy the cache folder here and let {CACHE_DIR} or {ARTIFACT_DIR} name it."
        )
    else:
        kind = DownloadError if settings.mirrors else ArtifactNotFoundError
        remedy = (
            f"Let {MIRRORS} list the base URL of a mirror that has it, or {ARTIFACT_DIR} a folder; "
            f"downloads are kept in the folder that {CACHE_DIR} names."
        )
    answers = "".join(f"\n  {attempt.store}: {attempt.answer}" for attempt in attempts)
    return kind(f"cannot obtain {artifact.name} ({artifact.size} bytes):{answers}\n{remedy}")
