"""HTTP requests that carry credentials to the host they are meant for, and to no other."""

from __future__ import annotations

from http.cookiejar import DefaultCookiePolicy
from typing import Any
from urllib.parse import urljoin, urlsplit

import requests
from requests.adapters import HTTPAdapter
from requests.auth import AuthBase, HTTPBasicAuth
from requests.utils import get_auth_from_url, get_netrc_auth

from cubin_runtime.errors import DownloadError
from cubin_runtime.settings import INSECURE_HOSTS, Settings, hide_password

MAX_REDIRECTS = 5


class MirrorSession(requests.Session):
    """A session for one or more mirrors; may be shared by threads.

    A host gets its token from the settings, else user and password from its URL or ~/.netrc. A redirect to
    another host, port or scheme goes without, and never from TLS to plain http that is not permitted.

    settings     tokens, authorities and hosts that may do without TLS
    connections  most that are kept open for each host
    """

    def __init__(self, settings: Settings, connections: int = 1) -> None:
        super().__init__()
        self.max_redirects = MAX_REDIRECTS
        self.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))  # and thus none
        self._settings = settings
        self._tokens = settings.tokens
        self._bundle = settings.ca_bundle
        self._known_auth: dict[str, AuthBase] = {}
        self._known_environment: dict[str, Any] = {}
        adapter = HTTPAdapter(pool_maxsize=connections)
        self.mount("https://", adapter)
        self.mount("http://", adapter)

    def fetch(self, url: str, timeout: float, start: int = 0) -> requests.Response:
        """The answer to a GET for the bytes of `url` from `start` on, as they are and not yet read."""
        headers = {"Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        # An own bundle has to come with each request, else REQUESTS_CA_BUNDLE takes precedence.
        verify = str(self._bundle) if self._bundle else None
        return self.get(
            url, headers=headers, auth=self._auth(url), timeout=timeout, stream=True, verify=verify
        )

    def merge_environment_settings(self, url: Any, proxies: Any, stream: Any, verify: Any, cert: Any) -> Any:
        """What the environment says of a host; worked out once, since a thousand files ask for it."""
        origin = _origin(str(url))
        if origin not in self._known_environment:
            self._known_environment[origin] = super().merge_environment_settings(
                url, proxies, stream, verify, cert
            )
        return {**self._known_environment[origin]}

    def get_redirect_target(self, resp: requests.Response) -> str | None:
        """Where a redirect leads; raises DownloadError where that is not permitted."""
        target = super().get_redirect_target(resp)
        if target is not None:
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

    def _auth(self, url: str) -> AuthBase:
        origin = _origin(url)
        if origin not in self._known_auth:
            self._known_auth[origin] = self._find_auth(url)
        return self._known_auth[origin]

    def _find_auth(self, url: str) -> AuthBase:
        parts = urlsplit(url)
        for host in (parts.netloc.rpartition("@")[2].lower(), parts.hostname or ""):
            if host in self._tokens:
                return _Bearer(self._tokens[host])
        user, password = get_auth_from_url(url)
        found = (user, password) if user or password else get_netrc_auth(url)
        return HTTPBasicAuth(*found) if found else _Nothing()


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


def _origin(url: str) -> str:
    """Scheme and host, with user and port if there are any."""
    return "/".join(url.split("/", 3)[:3])


def _without_query(url: str) -> str:
    """The URL without what may be secret in it."""
    return hide_password(url).partition("?")[0]
