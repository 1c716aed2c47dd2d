"""Plain HTTP clients: whole answers, streams read event by event, and clients that leave."""

import http.client
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Target:
    """Where a server listens."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes
    seconds: float

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json()["error"]

    @property
    def text(self) -> str:
        """Text of the first choice of either kind of completion."""
        choice = self.json()["choices"][0]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])


def ask(
    target: Target,
    method: str,
    path: str,
    body: bytes = b"",
    headers: Mapping[str, str] = {},
    timeout_s: float = 120.0,
) -> Answer:
    start = time.monotonic()
    connection = http.client.HTTPConnection(target.host, target.port, timeout=timeout_s)
    try:
        connection.request(method, path, body or None, dict(headers))
        answer = connection.getresponse()
        told = {name.lower(): value for name, value in answer.getheaders()}
        read = answer.read()
        return Answer(answer.status, told, read, time.monotonic() - start)
    finally:
        connection.close()


def post(target: Target, path: str, body: Any, headers: Mapping[str, str] = {}) -> Answer:
    encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
    return ask(target, "POST", path, encoded, {"content-type": "application/json", **headers})


def complete(target: Target, model: str, prompt: Any, **fields: Any) -> Answer:
    """A text completion; greedy unless the test says otherwise."""
    body = {"model": model, "prompt": prompt, "temperature": 0, **fields}
    return post(target, COMPLETIONS, body)


def events_of(raw: bytes) -> list[Any]:
    """The events of a stream, decoded; ``[DONE]`` as text, comments left out."""
    lines = [line[6:] for line in raw.decode().split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@dataclass
class Stream:
    """One streamed completion, read as the test says."""

    connection: http.client.HTTPConnection
    response: http.client.HTTPResponse
    start_s: float
    times_s: list[float] = field(default_factory=list)

    @property
    def status(self) -> int:
        return self.response.status

    def event(self) -> Any:
        """The next event, ``None`` at the end."""
        while line := self.response.readline():
            if line.startswith(b"data: "):
                self.times_s.append(time.monotonic() - self.start_s)
                text = line[6:].strip().decode()
                return text if text == "[DONE]" else json.loads(text)
        self.leave()
        return None

    def rest(self) -> list[Any]:
        return list(iter(self.event, None))

    def leave(self, *, hard: bool = False) -> None:
        """Close the connection, with a reset if ``hard``."""
        opened = self.connection.sock
        if hard and opened is not None:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.response.close()
        self.connection.close()


def open_stream(target: Target, model: str, prompt: Any, **fields: Any) -> Stream:
    """Start a streamed text completion; returns once the answer has begun."""
    connection = http.client.HTTPConnection(target.host, target.port, timeout=120)
    body = {"model": model, "prompt": prompt, "temperature": 0, "stream": True, **fields}
    start_s = time.monotonic()
    connection.request(
        "POST", COMPLETIONS, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    return Stream(connection, connection.getresponse(), start_s)


def stream_text(events: Sequence[Any], choice: int = 0) -> str:
    return "".join(
        part["text"]
        for event in events
        if isinstance(event, dict)
        for part in event.get("choices", ())
        if part["index"] == choice
    )


def raw_request(path: str, fields: Mapping[str, Any], headers: Sequence[str] = ()) -> bytes:
    """A whole request as bytes."""
    body = json.dumps(fields).encode()
    lines = [
        f"POST {path} HTTP/1.1", "host: x", "content-type: application/json",
        f"content-length: {len(body)}", *headers,
    ]  # fmt: skip
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@contextmanager
def connected(target: Target) -> Iterator[socket.socket]:
    with socket.create_connection((target.host, target.port), timeout=120) as opened:
        yield opened


def at_once(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """Make calls at the same time, each in a thread of its own; results in order."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(lambda call: call(), calls))


def flood(
    target: Target, requests: Sequence[tuple[str, str, bytes, Mapping[str, str]]]
) -> list[int]:
    """Send many small requests over a few kept connections; returns the status of each."""
    lanes = 4

    def lane(number: int) -> list[int]:
        connection = http.client.HTTPConnection(target.host, target.port, timeout=120)
        statuses = []
        for method, path, body, headers in requests[number::lanes]:
            connection.request(method, path, body or None, dict(headers))
            answer = connection.getresponse()
            answer.read()
            statuses.append(answer.status)
        connection.close()
        return statuses

    return [
        status
        for part in at_once([partial(lane, number) for number in range(lanes)])
        for status in part
    ]
