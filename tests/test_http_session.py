"""Who gets credentials, and who vouches for a host."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests
from http_server import Reply, ScriptedServer, serving

from cubin_runtime import transfer
from cubin_runtime.errors import DownloadError
from cubin_runtime.fetch import obtain
from cubin_runtime.http_session import MAX_REDIRECTS, MirrorSession, pieces
from cubin_runtime.manifest import Artifact
from cubin_runtime.settings import Settings

DATA = b"\x7fELF" + bytes(range(256)) * 40
ARTIFACT = Artifact(
    name="k", set_name="fmha_sm90", version="1.0", sha256=hashlib.sha256(DATA).hexdigest(), size=len(DATA)
)
PATH = ARTIFACT.key
OK = Reply(DATA)

Get = Callable[..., bytes]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving() as running:
        yield running


@pytest.fixture
def other() -> Iterator[ScriptedServer]:
    with serving() as running:
        yield running


@pytest.fixture(autouse=True)
def netrc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty ~/.netrc."""
    path = tmp_path / "netrc"
    path.touch(mode=0o600)
    monkeypatch.setenv("NETRC", str(path))
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    return path


@pytest.fixture
def get(tmp_path: Path) -> Get:
    def call(url: str, **variables: str) -> bytes:
        environ = {"MIRRORS": url, "CACHE_DIR": str(tmp_path / "cache"), **variables}
        settings = Settings({f"CUBIN_RUNTIME_{name}": value for name, value in environ.items()})
        return obtain(ARTIFACT, settings=settings).data

    return call


def host(server: ScriptedServer) -> str:
    return f"127.0.0.1:{server.server_address[1]}"


def sent(server: ScriptedServer) -> list[str | None]:
    return [headers.get("Authorization") for headers in server.headers]


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def redirect(target: str, status: int = 302) -> Reply:
    return Reply(status=status, headers={"Location": target})


def test_a_token_goes_to_its_host(server: ScriptedServer, get: Get) -> None:
    assert get(server.script("m", OK), TOKENS=f"other=x {host(server)}=secret") == DATA
    assert sent(server) == ["Bearer secret"]


def test_a_token_of_a_host_is_for_all_its_ports(server: ScriptedServer, get: Get) -> None:
    assert get(server.script("m", OK), TOKENS="127.0.0.1=secret") == DATA
    assert sent(server) == ["Bearer secret"]


def test_no_token_goes_to_another_host(server: ScriptedServer, get: Get) -> None:
    assert get(server.script("m", OK), TOKENS="localhost=secret 127.0.0.1:1=secret") == DATA
    assert sent(server) == [None]


def test_netrc_and_url_are_for_hosts_without_a_token(server: ScriptedServer, get: Get, netrc: Path) -> None:
    url = server.script("m", Reply(status=404))
    netrc.write_text("machine 127.0.0.1 login me password secret\n")
    for variables in ({}, {"TOKENS": "127.0.0.1=token"}):
        with pytest.raises(DownloadError):
            get(url, **variables)
    netrc.write_text("")
    with pytest.raises(DownloadError):
        get(url.replace("//", "//you:secret@"))
    assert sent(server) == [basic("me", "secret"), "Bearer token", basic("you", "secret")]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_to_another_host_goes_without(
    server: ScriptedServer, other: ScriptedServer, get: Get, netrc: Path, status: int
) -> None:
    # The other host has an entry in ~/.netrc, which a mirror must not be able to draw on.
    netrc.write_text("machine localhost login me password secret\n")
    elsewhere = other.script("x", OK).replace("127.0.0.1", "localhost")
    url = server.script("m", redirect(f"{elsewhere}/{PATH}", status))
    assert get(url, TOKENS="127.0.0.1=secret localhost=secret") == DATA
    assert (sent(server), sent(other)) == (["Bearer secret"], [None])


def test_a_redirect_to_another_port_goes_without(
    server: ScriptedServer, other: ScriptedServer, get: Get
) -> None:
    url = server.script("m", redirect(f"{other.script('x', OK)}/{PATH}"))
    assert get(url.replace("//", "//me:secret@")) == DATA
    assert (sent(server), sent(other)) == ([basic("me", "secret")], [None])


def test_a_redirect_within_the_host_keeps_them(server: ScriptedServer, get: Get) -> None:
    server.script("x", OK)
    url = server.script("m", redirect(f"/x/{PATH}"))
    assert get(url, TOKENS=f"{host(server)}=secret") == DATA
    assert sent(server) == ["Bearer secret", "Bearer secret"]


def test_redirects_keep_as_many_connections_as_are_asked_for(
    server: ScriptedServer, other: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    url = server.script("m", redirect(f"{other.script('x', OK)}/{PATH}"))
    with MirrorSession(Settings({}), connections=12) as session:
        answers = [session.fetch(url, PATH, 5) for _ in range(12)]
        assert all(b"".join(pieces(answer)) == DATA for answer in answers)
    assert [record.getMessage() for record in caplog.records] == []  # of one that is thrown away


def test_a_redirect_to_plain_http_is_refused(server: ScriptedServer, get: Get) -> None:
    target = "http://mirror.invalid/x?signature=secret"
    with pytest.raises(DownloadError, match=r"redirects to http://mirror\.invalid/x, which is not") as caught:
        get(server.script("m", redirect(target)))
    assert "CUBIN_RUNTIME_INSECURE_HOSTS" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert len(server.paths) == 1


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://host/x", "gopher://host"])
def test_a_redirect_leads_to_http_only(server: ScriptedServer, get: Get, target: str) -> None:
    with pytest.raises(DownloadError, match="No connection adapters"):
        get(server.script("m", redirect(target)))


def test_a_circle_of_redirects_ends(server: ScriptedServer, get: Get) -> None:
    with pytest.raises(DownloadError, match="redirects"):
        get(server.script("m", redirect(f"/m/{PATH}")))
    assert len(server.paths) == MAX_REDIRECTS + 1


def test_queries_are_not_in_messages(
    server: ScriptedServer, get: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "BACKOFF", ())
    with pytest.raises(DownloadError) as caught:
        get(
            server.script("m", redirect("https://127.0.0.1:1/x?signature=secret")),
            HTTP_TIMEOUT="0.5",
        )
    assert "secret" not in str(caught.value)
    assert "127.0.0.1" in str(caught.value)


def test_no_cookie_is_brought_back(server: ScriptedServer) -> None:
    url = server.script("m", Reply(b"", headers={"Set-Cookie": "a=b"}), Reply(b""))
    with MirrorSession(Settings({})) as session:
        for _ in range(2):
            session.fetch(url, "x", 5).close()
    assert "Cookie" not in server.headers[1]


def test_an_own_bundle_wins_over_that_of_requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[object] = []

    def connect(self: object, request: object, verify: object, **kwargs: object) -> None:
        seen.append(verify)
        raise requests.ConnectionError

    monkeypatch.setattr(requests.adapters.HTTPAdapter, "get_connection_with_tls_context", connect)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/theirs.pem")
    ours = tmp_path / "ours.pem"
    ours.touch()
    for environ in ({}, {"CUBIN_RUNTIME_CA_BUNDLE": str(ours)}):
        with MirrorSession(Settings(environ)) as session, pytest.raises(requests.ConnectionError):
            session.fetch("https://host", "x", 5)
    assert seen == ["/theirs.pem", str(ours)]
