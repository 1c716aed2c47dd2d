"""A server that answers at once with the same few chunks: only the client can be too slow for it.

Runs in a process of its own. Called by ``client_limit.py``.
"""

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection as Pipe
from typing import cast

import uvloop

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_START_S_MAX = 20.0


def _answer(chunks: int) -> bytes:
    """A streamed answer of so many tokens, as one piece of bytes."""
    choice = {"index": 0, "delta": {"content": " a"}, "text": " a"}
    events = [{"choices": [choice]} for _ in range(chunks)]
    events.append({"choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": "length"}]})
    usage = {"prompt_tokens": 1, "completion_tokens": chunks, "total_tokens": chunks + 1}
    texts = [json.dumps(one) for one in (*events, {"choices": [], "usage": usage})]
    body = "".join(f"data: {text}\n\n" for text in (*texts, "[DONE]")).encode()
    head = (
        f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class _Connection(asyncio.Protocol):
    """Answers each request that is whole."""

    def __init__(self, answer: bytes) -> None:
        self._answer, self._pending = answer, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, received: bytes) -> None:
        self._pending += received
        while (end := self._pending.find(b"\r\n\r\n")) >= 0:
            found = _LENGTH.search(self._pending, 0, end)
            whole = end + 4 + (int(found[1]) if found else 0)
            if len(self._pending) < whole:
                return
            self._pending = self._pending[whole:]
            self._transport.write(self._answer)


def _serve(pipe: Pipe, chunks: int) -> None:
    """The process: tells its port, and serves until the pipe closes."""

    async def serving() -> None:
        loop = asyncio.get_running_loop()
        answer, over = _answer(chunks), asyncio.Event()
        server = await loop.create_server(lambda: _Connection(answer), "127.0.0.1", 0)
        loop.add_reader(pipe.fileno(), over.set)
        pipe.send(server.sockets[0].getsockname()[1])
        await over.wait()
        server.close()

    uvloop.run(serving())


@contextmanager
def null_server(chunks: int) -> Iterator[int]:
    """The port of a server that answers with so many chunks, as long as the context lasts."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, chunks), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(_START_S_MAX):
            raise TimeoutError("the server that the client is measured against did not start")
        yield ours.recv()
    finally:
        ours.close()
        process.join(timeout=5)
        if process.is_alive():
            process.kill()
