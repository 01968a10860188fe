"""A server that follows a schedule of faults, byte by byte, because no well-made server would send them."""

from __future__ import annotations

import contextlib
import gzip
import random
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

Fault = Callable[[bytes, int | None, threading.Event], Iterator[bytes]]
"""What to send, in pieces, given the file, where a Range header begins, and an event that ends waiting."""


def _head(status: str, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode("utf-8", "surrogateescape")


def good(data: bytes, start: int | None, end: threading.Event) -> Iterator[bytes]:
    """What an honest server sends, ranges included."""
    if start is None or start >= len(data):
        yield _head("200 OK", f"Content-Length: {len(data)}") + data
    else:
        span = f"Content-Range: bytes {start}-{len(data) - 1}/{len(data)}"
        yield _head("206 Partial Content", span, f"Content-Length: {len(data) - start}") + data[start:]


def status(text: str, *headers: str) -> Fault:
    """An answer without the file."""
    return lambda data, start, end: iter([_head(text, "Content-Length: 4", *headers) + b"page"])


def whole(change: Callable[[bytes], bytes], *headers: str, length: int | None = None) -> Fault:
    """200 with something made from the file. `length` lies about its size; -1 says nothing of it."""

    def fault(data: bytes, start: int | None, end: threading.Event) -> Iterator[bytes]:
        body = change(data)
        size = len(body) if length is None else length
        told = [] if size < 0 else [f"Content-Length: {size}"]
        yield _head("200 OK", *told, *headers) + body

    return fault


def ranged(content_range: str, change: Callable[[bytes, int], bytes], *headers: str) -> Fault:
    """206 to whatever was asked, with `{start}`, `{last}` and `{size}` filled in."""

    def fault(data: bytes, start: int | None, end: threading.Event) -> Iterator[bytes]:
        begin = start or 0
        span = content_range.format(start=begin, last=len(data) - 1, size=len(data))
        body = change(data, begin)
        yield _head("206 Partial Content", span, f"Content-Length: {len(body)}", *headers) + body

    return fault


def broken_off(fraction: float, wrong: bool = False) -> Fault:
    """An honest answer up to some point, or one whose bytes are wrong."""

    def fault(data: bytes, start: int | None, end: threading.Event) -> Iterator[bytes]:
        sent = next(good(data, start, end))
        head, _, body = sent.partition(b"\r\n\r\n")
        body = bytes(len(body)) if wrong else body
        yield head + b"\r\n\r\n" + body[: int(len(body) * fraction)]

    return fault


def stall(after: float) -> Fault:
    """Silence, before the answer or in the middle of it."""

    def fault(data: bytes, start: int | None, end: threading.Event) -> Iterator[bytes]:
        sent = next(good(data, start, end))
        yield sent[: int(len(sent) * after)]
        end.wait(30)

    return fault


def endless(text: str, *headers: str) -> Fault:
    """A body that goes on until the client hangs up."""

    def fault(data: bytes, start: int | None, end: threading.Event) -> Iterator[bytes]:
        yield _head(text, *headers)
        while not end.is_set():
            yield data

    return fault


def noise(seed: int) -> Fault:
    """No HTTP at all."""
    return lambda data, start, end: iter([random.Random(seed).randbytes(500)])


def nothing(data: bytes, start: int | None, end: threading.Event) -> Iterator[bytes]:
    """Hangs up."""
    return iter(())


FAULTS: dict[str, Fault] = {
    "good": good,
    "403": status("403 Forbidden"),
    "404": status("404 Not Found"),
    "410": status("410 Gone"),
    "416": status("416 Range Not Satisfiable"),
    "429": status("429 Too Many Requests", "Retry-After: 1"),
    "429 for long": status("429 Too Many Requests", "Retry-After: 86400"),
    "a thousand headers": status("200 OK", *[f"X-{number}: y" for number in range(1000)]),
    "a long header": status("200 OK", "X: " + "y" * 100_000),
    "429 for nonsense": status("429 Too Many Requests", "Retry-After: Thu, 99 Foo"),
    "500": status("500 Internal Server Error"),
    "503": status("503 Service Unavailable", "Retry-After: 0"),
    "204": status("204 No Content"),
    "status 999": status("999 What"),
    "circle": status("302 Found", "Location: {self}"),
    "redirect to nowhere": status("302 Found", "Location: http://127.0.0.1:1/x"),
    "redirect to a file": status("302 Found", "Location: file:///etc/passwd"),
    "redirect to a bad port": status("302 Found", "Location: http://127.0.0.1:99999/x"),
    "redirect to half an address": status("302 Found", "Location: http://[::1/x"),
    "redirect to no charset": status("302 Found", "Location: /\udcff\udcfe"),
    "redirect to a bad name": status("302 Found", "Location: https://.a..b/x"),
    "redirect without target": status("302 Found"),
    "page": whole(lambda data: b"<h1>Sign in</h1>", "Content-Type: text/html"),
    "page of the right size": whole(lambda data: b"x" * len(data)),
    "one bit": whole(lambda data: data[:-1] + bytes([data[-1] ^ 1])),
    "too long": whole(lambda data: data + b"x"),
    "too short": whole(lambda data: data[:-1]),
    "too short, unsaid": whole(lambda data: data[:-1], length=-1),
    "empty": whole(lambda data: b""),
    "empty, unsaid": whole(lambda data: b"", length=-1),
    "size is a word": whole(lambda data: data, "Content-Length: many", length=-1),
    "size is negative": whole(lambda data: data, "Content-Length: -5", length=-1),
    "size is huge": whole(lambda data: data, length=2**70),
    "gzip": whole(gzip.compress, "Content-Encoding: gzip"),
    "gzip, torn": whole(lambda data: gzip.compress(data)[:-9], "Content-Encoding: gzip"),
    "gzip of something else": whole(lambda data: gzip.compress(bytes(2**22)), "Content-Encoding: gzip"),
    "gzip in name only": whole(lambda data: data, "Content-Encoding: gzip"),
    "unknown encoding": whole(lambda data: data, "Content-Encoding: zork"),
    "chunked in name only": whole(lambda data: data, "Transfer-Encoding: chunked", length=-1),
    "range of zeros": ranged(
        "Content-Range: bytes {start}-{last}/{size}", lambda data, start: bytes(len(data) - start)
    ),
    "range from 0": ranged("Content-Range: bytes 0-{last}/{size}", lambda data, start: data),
    "range without bounds": ranged("X: y", lambda data, start: data[start:]),
    "range of another size": ranged(
        "Content-Range: bytes {start}-{last}/9", lambda data, start: data[start:]
    ),
    "range, too long": ranged(
        "Content-Range: bytes {start}-{last}/{size}", lambda data, start: data[start:] + b"x"
    ),
    "range, gzip": ranged(
        "Content-Range: bytes {start}-{last}/{size}",
        lambda data, start: gzip.compress(data[start:]),
        "Content-Encoding: gzip",
    ),
    "broken off early": broken_off(0.1),
    "broken off late": broken_off(0.9),
    "broken off at the end": broken_off(1.0),
    "wrong and broken off": broken_off(0.6, wrong=True),
    "stall at once": stall(0.0),
    "stall in the head": stall(0.001),
    "stall in the body": stall(0.7),
    "endless": endless("200 OK"),
    "endless page": endless("404 Not Found"),
    "endless redirect": endless("302 Found", "Location: {self}"),
    "noise": noise(1),
    "other noise": noise(2),
    "nothing": nothing,
}


class FaultServer:
    """Answers each request below /<mirror>/ with the next fault of that mirror, the last one for good."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._schedules: dict[str, list[str]] = {}
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def schedule(self, mirrors: Sequence[Sequence[str]]) -> list[str]:
        """Names of faults for each mirror, and the base URLs of those."""
        with self._lock:
            self._end.set()  # ends what hangs from the schedule before
            self._end = threading.Event()
            self._schedules = {f"m{number}": list(names) for number, names in enumerate(mirrors)}
        return [f"http://127.0.0.1:{self._socket.getsockname()[1]}/{name}" for name in self._schedules]

    def close(self) -> None:
        """Stops answering."""
        self._end.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(30)
            request = b""
            while b"\r\n\r\n" not in request:
                chunk = connection.recv(65536)
                if not chunk:
                    return
                request += chunk
            for piece in self._reply(request.decode("latin-1")):
                connection.sendall(piece)

    def _reply(self, request: str) -> Iterator[bytes]:
        path = request.split(" ")[1]
        with self._lock:
            end = self._end
            names = self._schedules.get(path.split("/")[1], ["404"])
            fault = FAULTS[names.pop(0) if len(names) > 1 else names[0]]
        asked = re.search(r"\r\nRange: bytes=(\d+)-", request)
        for piece in fault(self._data, int(asked[1]) if asked else None, end):
            yield piece.replace(b"{self}", path.encode())
