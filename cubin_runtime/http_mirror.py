"""A mirror behind http or https: what its answers mean."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import requests
import urllib3

from cubin_runtime.errors import DownloadError, IntegrityError
from cubin_runtime.http_session import MirrorSession, discard, pieces
from cubin_runtime.manifest import Artifact
from cubin_runtime.mirrors import Body, MissingError, TransientError
from cubin_runtime.settings import hide_password

_PERMANENT = (
    requests.exceptions.SSLError,
    urllib3.exceptions.SSLError,
    urllib3.exceptions.LocationValueError,
)
_MAY_PASS = (408, 425, 429)  # and all of 5xx


class HttpMirror:
    """The files below `url`; see mirrors.Mirror. `timeout` is the longest silence, in seconds."""

    def __init__(self, url: str, timeout: float, session: MirrorSession) -> None:
        self.location = hide_password(url)
        self._url = url
        self._timeout = timeout
        self._session = session

    @contextlib.contextmanager
    def open(self, path: str, artifact: Artifact, start: int) -> Iterator[Body]:
        """See Mirror.open. What the libraries raise becomes a failure that may pass, or one that does not."""
        place = f"{self.location}/{path}"
        response = None
        try:
            response = self._session.fetch(self._url, path, self._timeout, start)
            begin = _first_byte(response, place, start, artifact.size)
            if begin == 0:
                _check_length(response, place, artifact)
            yield Body(begin, pieces(response))  # whose errors arrive here too
        except _PERMANENT as error:  # although of a kind that is listed next
            raise DownloadError(f"{place}: {_clean(error)}") from error
        except (requests.ConnectionError, requests.Timeout, urllib3.exceptions.HTTPError) as error:
            raise TransientError(f"{place}: {_clean(error)}") from error
        except (requests.RequestException, ValueError) as error:  # ValueError: a redirect to what is no URL
            raise DownloadError(f"{place}: {_clean(error)}") from error
        finally:
            if response is not None:
                response.close()


def _first_byte(response: urllib3.BaseHTTPResponse, place: str, start: int, size: int) -> int:
    """Where the body begins: at `start`, or at 0 from a server that sends the whole."""
    status = response.status
    if status == 200:
        return 0
    if status == 206 and start:
        found = response.headers.get("Content-Range", "")
        if "Content-Encoding" in response.headers:
            raise IntegrityError(f"{place}: a range of the encoded file, expected one of the file itself")
        if found not in (f"bytes {start}-{size - 1}/{size}", f"bytes {start}-{size - 1}/*"):
            raise IntegrityError(f"{place}: range {found!r}, expected bytes {start}-{size - 1}/{size}")
        return start
    if status == 416 and start:
        raise IntegrityError(f"{place}: HTTP 416, the file has no more than {start} bytes, expected {size}")
    reason = f"{place}: HTTP {status} {response.reason}"
    discard(response)
    if status in _MAY_PASS or status >= 500:
        raise TransientError(reason, pause=_retry_after(response))
    raise MissingError(reason) if status in (404, 410) else DownloadError(reason)


def _check_length(response: urllib3.BaseHTTPResponse, place: str, artifact: Artifact) -> None:
    """Refuses an answer that says itself that it is not the file: an error page, mostly."""
    length = response.headers.get("Content-Length", str(artifact.size))
    if length != str(artifact.size) and "Content-Encoding" not in response.headers:
        kind = response.headers.get("Content-Type", "unknown type")
        raise IntegrityError(
            f"{place} is not {artifact.name}: {length} bytes ({kind}), expected {artifact.size}"
        )


def _retry_after(response: urllib3.BaseHTTPResponse) -> float:
    """Seconds that the server asks to wait, given as a number or a date; 0 if it does not say."""
    try:
        return urllib3.Retry().get_retry_after(response) or 0.0
    except (urllib3.exceptions.InvalidHeader, OverflowError, ValueError):  # the latter two for absurd dates
        return 0.0


def _clean(error: Exception) -> str:
    """The error's text without queries, which may hold a signature, and without passwords."""
    return re.sub(r"\?[^\s'\")]+", "?...", hide_password(str(error)))
