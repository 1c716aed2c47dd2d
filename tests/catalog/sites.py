"""A scripted web site: what its paths answer, and what was asked of it."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

Answer = Callable[[BaseHTTPRequestHandler], None]


@dataclass
class Site:
    """Paths and what they answer; every request is kept with its headers."""

    address: str
    answers: dict[str, Answer] = field(default_factory=dict)
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)

    def url(self, path: str) -> str:
        return self.address + path


def whole(content: bytes, **headers: str) -> Answer:
    """The whole file, whatever range was asked for."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()
        request.wfile.write(content)

    return answer


def ranged(content: bytes, etag: str = '"v1"', cut: int | None = None) -> Answer:
    """The part asked for; with ``cut``, the connection ends after that many bytes of it."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        asked, version = request.headers.get("Range"), request.headers.get("If-Range")
        start = 0
        if asked and version in {None, etag}:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            if start >= len(content):
                request.send_error(416)
                return
        request.send_response(206 if start else 200)
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        request.send_header("Content-Length", str(len(content) - start))
        request.send_header("ETag", etag)
        request.end_headers()
        request.wfile.write(content[start:][:cut])

    return answer


def redirect(url: str, **headers: str) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(302)
        request.send_header("Location", url)
        request.send_header("Content-Length", "0")
        for name, value in headers.items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()

    return answer
