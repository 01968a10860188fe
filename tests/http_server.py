"""A loopback HTTP server whose answers, right and wrong, are scripted by the test."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import threading
from collections.abc import Iterator
from typing import cast


@dataclasses.dataclass(frozen=True)
class Reply:
    """One answer. Without `length`, Content-Length is the body's; `length=None` leaves it out."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    length: int | None = -1
    delay: float = 0.0  # seconds before the answer
    trickle: float = 0.0  # seconds before each byte of the body
    pace: float = 0.0  # seconds before each 64 KiB of the body
    endless: bool = False  # repeats the body until the client hangs up
    ranges: bool = False  # sends what a Range header asks for, as 206

    def part(self, header: str | None) -> Reply:
        """The answer to a request with this Range header, of the form `bytes=N-`."""
        if not self.ranges or header is None:
            return self
        start, size = int(header[len("bytes=") : -1]), len(self.body)
        content_range = {"Content-Range": f"bytes {start}-{size - 1}/{size}"}
        return dataclasses.replace(
            self, body=self.body[start:], status=206, headers={**self.headers, **content_range}
        )


class ScriptedServer(http.server.ThreadingHTTPServer):
    """Answers GET below each scripted prefix; `paths` and `headers` record what was asked for."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.closing = threading.Event()
        self._scripts: dict[str, list[Reply]] = {}
        self._files: dict[str, Reply] = {}
        self._lock = threading.Lock()

    def script(self, prefix: str, *replies: Reply) -> str:
        """Plays `replies` in order to requests below `prefix`, the last one for good; returns the URL."""
        self._scripts[prefix] = list(replies)
        return f"http://127.0.0.1:{self.server_address[1]}/{prefix}"

    def script_paths(self, prefix: str, replies: dict[str, Reply]) -> str:
        """Answers requests for these paths for good, 404 to others below `prefix`; returns the URL."""
        self._files.update(replies)
        return self.script(prefix, Reply(status=404))

    def reply_to(self, path: str, headers: dict[str, str]) -> Reply:
        with self._lock:
            self.paths.append(path)
            self.headers.append(headers)
            if path in self._files:
                return self._files[path]
            replies = self._scripts[path.split("/")[1]]
            return replies.pop(0) if len(replies) > 1 else replies[0]


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = cast(ScriptedServer, self.server)
        reply = server.reply_to(self.path, dict(self.headers)).part(self.headers["Range"])
        with contextlib.suppress(ConnectionError):
            if server.closing.wait(reply.delay):
                return
            self.send_response(reply.status)
            headers = dict(reply.headers)
            if reply.length is not None and not reply.endless:
                headers["Content-Length"] = str(len(reply.body) if reply.length < 0 else reply.length)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self._send_body(reply, server.closing)

    def _send_body(self, reply: Reply, closing: threading.Event) -> None:
        if reply.trickle:
            for value in reply.body:
                if closing.wait(reply.trickle):
                    return
                self.wfile.write(bytes([value]))
            return
        step = 65536 if reply.pace else len(reply.body) or 1
        for start in range(0, len(reply.body), step):
            if closing.wait(reply.pace):
                return
            self.wfile.write(reply.body[start : start + step])
        while reply.endless and not closing.is_set():
            self.wfile.write(reply.body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def serving() -> Iterator[ScriptedServer]:
    """A running server; pending delays end when the block does."""
    with ScriptedServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.closing.set()
            server.shutdown()
            thread.join()
