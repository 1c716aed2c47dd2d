"""Plain HTTP for tests: what is really on the wire, without a client that helps."""

import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sluice.testing.served import Served

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json()["error"]

    def events(self) -> list[Any]:
        """The events of a stream, decoded; ``[DONE]`` as text, comments left out."""
        lines = [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


def ask(
    server: Served, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = {}
) -> Answer:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=20)
    try:
        connection.request(method, path, body or None, dict(headers))
        answer = connection.getresponse()
        told = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, told, answer.read())
    finally:
        connection.close()


def post(server: Served, path: str, body: Any, headers: Mapping[str, str] = {}) -> Answer:
    encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
    return ask(server, "POST", path, encoded, {"content-type": "application/json", **headers})


def chat(server: Served, headers: Mapping[str, str] = {}, /, **fields: Any) -> Answer:
    return post(server, CHAT, {"model": "tiny", "messages": MESSAGES, **fields}, headers)


def raw_post(path: str = CHAT, **fields: Any) -> bytes:
    """A whole request as bytes."""
    body = json.dumps({"model": "tiny", "messages": MESSAGES, **fields}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@contextmanager
def connected(server: Served) -> Iterator[socket.socket]:
    with socket.create_connection((server.host, server.port), timeout=20) as opened:
        yield opened


def read_until(opened: socket.socket, wanted: bytes) -> bytes:
    """Everything up to and including the first sight of some bytes, or the end."""
    seen = b""
    while wanted not in seen:
        part = opened.recv(65536)
        if not part:
            break
        seen += part
    return seen


def read_all(opened: socket.socket) -> bytes:
    return read_until(opened, b"\0never")
