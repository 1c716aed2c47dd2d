"""Writing an answer to its connection: uvicorn's ``send``, as short as our own headers allow.

Used by ``serve`` in the place of uvicorn's own for every request. All headers are made in this
package, so that a head is checked once as a whole instead of header by header.
"""

from collections.abc import MutableMapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

_BODILESS = (204, 304)


class Sender:
    """The ASGI ``send`` of one request."""

    __slots__ = ("_cycle", "_head", "_is_chunked")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._is_chunked = False
        self._head = b""  # until there is something of the body

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        """Write a message; waits while the client does not read. Raises ``RuntimeError``."""
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if cycle.disconnected:
            return
        if not cycle.response_started:
            self._start(message["status"], message.get("headers", []))
        elif cycle.response_complete:
            raise RuntimeError("the answer is complete")
        else:
            self._write(message.get("body", b""), is_last=not message.get("more_body", False))

    @property
    def is_free(self) -> bool:
        """Whether a whole answer can be written without waiting."""
        cycle = self._cycle
        return not (cycle.flow.write_paused or cycle.disconnected or cycle.response_started)

    def answer(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """Write both messages of a whole answer. Raises ``RuntimeError``."""
        self._start(status, headers)
        self._write(body, is_last=True)

    def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        cycle = self._cycle
        is_sized, lines = False, []
        for name, value in (*cycle.default_headers, *headers):
            lines.append(name + b": " + value)
            is_sized = is_sized or name == b"content-length"
        if (b"connection", b"close") in headers:
            cycle.keep_alive = False
        elif not cycle.keep_alive:
            lines.append(b"connection: close")
        has_body = cycle.scope["method"] != "HEAD" and status not in _BODILESS
        if has_body and not is_sized:
            self._is_chunked = True
            lines.append(b"transfer-encoding: chunked")
        head = b"\r\n".join(lines)
        if not head.count(b"\n") == head.count(b"\r") == len(lines) - 1 or b"\0" in head:
            raise RuntimeError("a header holds a line break")
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        self._head = STATUS_LINE[status] + head + b"\r\n\r\n"

    def _write(self, body: bytes, *, is_last: bool) -> None:
        cycle = self._cycle
        if cycle.scope["method"] == "HEAD":
            body = b""
        elif self._is_chunked:
            end = b"\r\n0\r\n\r\n" if is_last else b"\r\n"
            body = b"%x\r\n%b%b" % (len(body), body, end) if body else end[2:]
        if self._head:
            body, self._head = self._head + body, b""
        cycle.transport.write(body)
        if is_last:
            cycle.response_complete = True
            cycle.message_event.set()
            if not cycle.keep_alive:
                cycle.transport.close()
            cycle.on_response()
