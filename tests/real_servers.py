"""Real servers on this machine, for the tests that must not take a stub's word: nginx, tinyproxy, moto."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

needs_nginx = pytest.mark.skipif(shutil.which("nginx") is None, reason="there is no nginx program")
needs_proxy = pytest.mark.skipif(shutil.which("tinyproxy") is None, reason="there is no tinyproxy program")
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl program")


def free_port() -> int:
    """A port that nothing listens on, for now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(command: Sequence[str], port: int) -> Iterator[None]:
    """A server process, from when it accepts connections to the end of the block."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _wait_for(port, process)
            yield
        finally:
            process.terminate()


@contextlib.contextmanager
def nginx(folder: Path, root: Path, *directives: str, tls: Path | None = None) -> Iterator[str]:
    """nginx that serves `root`; the base URL. Its log, a line `status range path` each, is folder/access.log.

    directives  lines for the server block
    tls         folder with server.pem and server.key, which makes it https
    """
    port = free_port()
    listen = f"127.0.0.1:{port}" + (" ssl" if tls else "")
    certificate = f"ssl_certificate {tls}/server.pem; ssl_certificate_key {tls}/server.key;" if tls else ""
    folder.mkdir(parents=True, exist_ok=True)
    configuration = folder / "nginx.conf"
    configuration.write_text(f"""
daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
  sendfile on; tcp_nopush on;
  log_format plain '$status "$http_range" $request_uri';
  access_log {folder}/access.log plain;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{ listen {listen}; root {root}; {certificate} {" ".join(directives)} }}
}}
""")
    command = ["nginx", "-p", str(folder), "-c", str(configuration), "-e", str(folder / "error.log")]
    with running(command, port):
        yield f"{'https' if tls else 'http'}://127.0.0.1:{port}"


@contextlib.contextmanager
def proxy(folder: Path, *directives: str) -> Iterator[str]:
    """A forward proxy; its URL. Its log is folder/proxy.log."""
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    configuration = folder / "tinyproxy.conf"
    lines = [f"Port {port}", "Listen 127.0.0.1", f'LogFile "{folder}/proxy.log"', *directives]
    configuration.write_text("\n".join(lines) + "\n")
    with running(["tinyproxy", "-d", "-c", str(configuration)], port):
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def bucket_server() -> Iterator[str]:
    """An S3-compatible server; its endpoint."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with running(command, port):
        yield f"http://127.0.0.1:{port}"


def make_authority(folder: Path) -> Path:
    """A private authority that vouches for 127.0.0.1 in server.pem; the path of its certificate."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1\n")
    for line in (
        "req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -subj /CN=authority",
        "req -newkey rsa:2048 -nodes -keyout server.key -out server.csr -subj /CN=server",
        "x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out server.pem -extfile san",
    ):
        subprocess.run(["openssl", *line.split()], cwd=folder, check=True, capture_output=True)
    return folder / "ca.pem"


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        assert process.poll() is None, f"{process.args!r} has ended"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise AssertionError(f"{process.args!r} does not answer")
