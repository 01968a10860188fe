"""HTTP requests that carry credentials to the host they are meant for, and to no other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from http.cookiejar import DefaultCookiePolicy
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter
from requests.auth import AuthBase, HTTPBasicAuth
from requests.utils import get_auth_from_url, get_netrc_auth

from cubin_runtime.errors import DownloadError
from cubin_runtime.mirrors import CHUNK
from cubin_runtime.settings import INSECURE_HOSTS, Settings, hide_password

MAX_REDIRECTS = 5

_ONCE = urllib3.Retry(False, redirect=False)  # what a bare False becomes, at every request anew


class _Route(NamedTuple):
    """How the files below a base URL are asked for; worked out once, since a thousand of them are.

    request      a request for the base URL, with headers and credentials
    headers      those, as a mapping that is quick to go through
    environment  proxies, authorities and certificates
    adapter      owns the pool, so that nobody else's hosts push it out
    pool         connections to the host, or to the proxy on the way
    target       what the request line says of the base URL
    """

    request: requests.PreparedRequest
    headers: dict[str, str]
    environment: dict[str, Any]
    adapter: HTTPAdapter
    pool: urllib3.HTTPConnectionPool
    target: str


class MirrorSession(requests.Session):
    """A session for one or more mirrors; may be shared by threads.

    A host gets its token from the settings, else user and password from its URL or ~/.netrc. A redirect to
    another host, port or scheme goes without, and never from TLS to plain http that is not permitted.

    requests works out how to ask, and follows redirects; each file then costs what it costs urllib3.

    settings     tokens, authorities and hosts that may do without TLS
    connections  most that are kept open for each host
    """

    def __init__(self, settings: Settings, connections: int = 1) -> None:
        super().__init__()
        self.max_redirects = MAX_REDIRECTS
        for scheme in ("https://", "http://"):  # to follow redirects with
            self.mount(scheme, HTTPAdapter(pool_maxsize=connections))
        self.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))  # and thus none
        self._settings = settings
        self._tokens = settings.tokens
        self._bundle = settings.ca_bundle
        self._connections = connections
        self._routes: dict[str, _Route] = {}

    def fetch(self, base: str, path: str, timeout: float, start: int = 0) -> urllib3.BaseHTTPResponse:
        """The answer to a GET for the bytes of a file below `base` from `start` on, not yet read."""
        route = self._routes.get(base) or self._routes.setdefault(base, self._find_route(base))
        headers = {**route.headers, "Range": f"bytes={start}-"} if start else route.headers
        answer = route.pool.urlopen(
            "GET",
            f"{route.target}/{path}",
            headers=headers,
            timeout=timeout,
            retries=_ONCE,
            redirect=False,
            assert_same_host=False,
            preload_content=False,
            decode_content=False,
        )
        if answer.get_redirect_location():
            return self._follow(answer, route, path, headers, timeout)
        return answer

    def close(self) -> None:
        """Closes all connections."""
        for route in self._routes.values():
            route.adapter.close()
        super().close()

    def _find_route(self, base: str) -> _Route:
        headers = {"Accept-Encoding": "identity"}
        request = self.prepare_request(
            requests.Request("GET", base, headers=headers, auth=self._find_auth(base))
        )
        # An own bundle has to be given here, else REQUESTS_CA_BUNDLE takes precedence.
        verify = str(self._bundle) if self._bundle else None
        environment: dict[str, Any] = {**self.merge_environment_settings(request.url, {}, True, verify, None)}
        proxies, cert, verify = (environment[name] for name in ("proxies", "cert", "verify"))
        adapter: Any = HTTPAdapter(pool_maxsize=self._connections)  # the stubs leave half of it untyped
        pool = adapter.get_connection_with_tls_context(request, verify, proxies=proxies, cert=cert)
        adapter.cert_verify(pool, request.url, verify, cert)
        target = adapter.request_url(request, proxies).rstrip("/")
        return _Route(request, dict(request.headers), environment, adapter, pool, target)

    def _follow(
        self,
        answer: urllib3.BaseHTTPResponse,
        route: _Route,
        path: str,
        headers: dict[str, str],
        timeout: float,
    ) -> urllib3.BaseHTTPResponse:
        """What the redirect of `answer` leads to in the end."""
        request = route.request.copy()
        request.url = f"{str(route.request.url).rstrip('/')}/{path}"
        request.headers.update(headers)
        redirect = route.adapter.build_response(request, answer)
        *_, last = self.resolve_redirects(redirect, request, timeout=timeout, **route.environment)
        found: urllib3.BaseHTTPResponse = last.raw
        return found

    def get_redirect_target(self, resp: requests.Response) -> str | None:
        """Where a redirect leads; raises DownloadError where that is not permitted."""
        target = super().get_redirect_target(resp)
        if target is not None:
            discard(resp.raw)  # before requests reads all of it, which may be endless
            url = urljoin(resp.url, target)
            if not self._settings.permits(url):
                raise DownloadError(
                    f"{_without_query(resp.url)} redirects to {_without_query(url)}, which is not encrypted; "
                    f"name the host in {INSECURE_HOSTS} to permit it"
                )
        return target

    def rebuild_auth(self, prepared_request: requests.PreparedRequest, response: requests.Response) -> None:
        """Drops credentials on the way to another host; ~/.netrc is not asked about that one."""
        old, new = str(response.request.url), str(prepared_request.url)
        if self.should_strip_auth(old, new):  # type: ignore[no-untyped-call]  # the stubs leave it untyped
            prepared_request.headers.pop("Authorization", None)

    def _find_auth(self, url: str) -> AuthBase:
        parts = urlsplit(url)
        for host in (parts.netloc.rpartition("@")[2].lower(), parts.hostname or ""):
            if host in self._tokens:
                return _Bearer(self._tokens[host])
        user, password = get_auth_from_url(url)
        found = (user, password) if user or password else get_netrc_auth(url)
        return HTTPBasicAuth(*found) if found else _Nothing()


def discard(answer: urllib3.BaseHTTPResponse) -> None:
    """Lets go of an answer. If its body has arrived, the connection serves the next request."""
    with contextlib.suppress(urllib3.exceptions.HTTPError):
        next(pieces(answer), None)
    answer.close()


def pieces(answer: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    """The body as it arrives, so that a trickle meets a deadline too."""
    read = getattr(answer, "read1", answer.read)  # urllib3 1 lacks it, and waits for all of a piece
    is_encoded = "Content-Encoding" in answer.headers  # else decoding would only copy
    while piece := read(CHUNK, decode_content=is_encoded):
        yield piece


class _Bearer(AuthBase):
    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, r: requests.PreparedRequest) -> requests.PreparedRequest:
        r.headers["Authorization"] = f"Bearer {self._token}"
        return r


class _Nothing(AuthBase):
    """Keeps requests from looking for credentials by itself."""

    def __call__(self, r: requests.PreparedRequest) -> requests.PreparedRequest:
        return r


def _without_query(url: str) -> str:
    """The URL without what may be secret in it."""
    return hide_password(url).partition("?")[0]
