"""Places to download from: a folder, a bucket, or a server behind http (http_mirror.py)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from cubin_runtime.errors import DownloadError
from cubin_runtime.manifest import Artifact
from cubin_runtime.settings import INSECURE_HOSTS, Settings

CHUNK = 2**20  # bytes

_BLOCK = 8 * 2**20  # bytes of a bucket's object that one request asks for


class TransientError(Exception):
    """A failure that another try may get past, `pause` seconds from now at the earliest."""

    def __init__(self, reason: str, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.pause = pause


class MissingError(DownloadError):
    """The mirror has no such file."""


class Body(NamedTuple):
    """What a mirror sends: the bytes of a file from offset `start` on."""

    start: int
    chunks: Iterator[bytes]


class Mirror(Protocol):
    """A place that nobody has to trust: what it sends is verified by who asked."""

    @property
    def location(self) -> str:
        """Base URL or folder, without user and password."""

    def open(self, path: str, artifact: Artifact, start: int) -> AbstractContextManager[Body]:
        """The file below `location`, from `start` on, or from 0 if the mirror cannot do that.

        Raises TransientError, here or while the body is read, where another try may help; MissingError where
        there is no such file; DownloadError otherwise, and IntegrityError where it can tell before the end.
        """


class FileMirror:
    """A folder that is mounted here, behind a file: URL."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def location(self) -> str:
        """The folder."""
        return str(self._folder)

    @contextlib.contextmanager
    def open(self, path: str, artifact: Artifact, start: int) -> Iterator[Body]:
        """See Mirror.open."""
        try:
            file = (self._folder / path).open("rb", buffering=0)
            file.seek(start)
        except (FileNotFoundError, NotADirectoryError):
            raise MissingError(f"no file {self._folder / path}") from None
        except OSError as error:
            raise DownloadError(str(error)) from error
        with file:
            yield Body(start, _read(file, f"{self._folder / path}"))


class BucketMirror:
    """A bucket behind an s3: URL, through fsspec and s3fs (the extra `s3`).

    Credentials, endpoint and region are those of the AWS tools (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL ...) or
    of fsspec (FSSPEC_S3). The endpoint has to be permitted by the settings, as any other host.
    """

    def __init__(self, url: str, settings: Settings) -> None:
        self.location = url
        self._settings = settings

    @contextlib.contextmanager
    def open(self, path: str, artifact: Artifact, start: int) -> Iterator[Body]:
        """See Mirror.open."""
        url = f"{self.location}/{path}"
        try:
            file = self._bucket.open(url, "rb", block_size=_BLOCK, cache_type="readahead")
            file.seek(start)
        except DownloadError:
            raise
        except FileNotFoundError:
            raise MissingError(f"no object {url}") from None
        except PermissionError as error:
            raise DownloadError(f"{url}: {error}") from error
        except Exception as error:  # s3fs lets those of botocore and aiohttp through
            raise TransientError(f"{url}: {error}") from error
        with file:
            yield Body(start, _read(file, url))

    @functools.cached_property
    def _bucket(self) -> Any:
        try:
            import s3fs
        except ImportError:
            raise DownloadError(
                f"{self.location} takes the s3fs package: pip install 'cubin-runtime[s3]'"
            ) from None
        timeout, bundle = self._settings.http_timeout, self._settings.ca_bundle
        bucket = s3fs.S3FileSystem(
            config_kwargs={"connect_timeout": timeout, "read_timeout": timeout},
            client_kwargs={"verify": str(bundle)} if bundle else {},
        )
        endpoint = bucket.s3.meta.endpoint_url
        if not self._settings.permits(endpoint):
            raise DownloadError(
                f"{self.location} is at {endpoint}, which is not encrypted; name the host in "
                f"{INSECURE_HOSTS} to permit it"
            )
        return bucket


@contextlib.contextmanager
def open_mirrors(settings: Settings, connections: int = 1) -> Iterator[list[Mirror]]:
    """The mirrors of the settings, in order; offline, those that need no network.

    connections  most that are kept open for each host
    """
    from urllib.parse import unquote, urlsplit

    mirrors: list[Mirror] = []
    with contextlib.ExitStack() as stack:
        for url in settings.mirrors:
            if url.startswith("file:"):
                mirrors.append(FileMirror(Path(unquote(urlsplit(url).path))))
            elif settings.offline:
                continue
            elif url.startswith("s3:"):
                mirrors.append(BucketMirror(url, settings))
            else:
                from cubin_runtime.http_mirror import HttpMirror
                from cubin_runtime.http_session import MirrorSession

                session = stack.enter_context(MirrorSession(settings, connections))
                mirrors.append(HttpMirror(url, settings.http_timeout, session))
        yield mirrors


def _read(file: IO[bytes], place: str) -> Iterator[bytes]:
    try:
        while chunk := file.read(CHUNK):
            yield chunk
    except Exception as error:  # as above
        raise TransientError(f"{place}: {error}") from error
