"""What was retrieved for an answer, told with it: one header, and one member of its JSON.

``relay`` asks for it once an answer is to come. The member goes into the body of an answer, or into
the first event of a stream, whoever made it: bytes of remote engines are not decoded for it. An
error tells the header alone.
"""

import re

from sluice.runtime.generation import Retrieval
from sluice.server.exchange import Exchange, Message, Send
from sluice.server.problems import Headers, header_text
from sluice.server.sse import encode_json
from sluice.server.wire import Json

# The first object of an answer or an event, however its engine writes it.
_OBJECT = re.compile(rb"\{(?=\s*\")")


def tell_sources(exchange: Exchange, retrieval: Retrieval) -> None:
    """Let the answer of an exchange tell what was retrieved for it."""
    standing = exchange.standing
    header = (b"x-sluice-retrieval", header_text(header_of(retrieval)))
    exchange.standing = lambda: [*standing(), header]
    member = b'"retrieval":' + encode_json(member_of(retrieval)) + b","
    exchange.send_through(lambda send: _Ahead(send, member))


def header_of(retrieval: Retrieval) -> str:
    """How much was retrieved, in what time, and why no more."""
    parts = [
        f"pipeline={retrieval.pipeline}",
        f"passages={len(retrieval.sources)}",
        f"found={retrieval.found}",
        f"ms={retrieval.duration_ns / 1e6:.1f}",
    ]
    if retrieval.budget_ns is not None:
        parts.append(f"budget_ms={retrieval.budget_ns / 1e6:.0f}")
    if retrieval.reason:
        parts.append(f"reason={retrieval.reason}")
    return "; ".join(parts)


def member_of(retrieval: Retrieval) -> Json:
    """The same for programs, with the passages by the numbers that the model knows them by."""
    return {
        "pipeline": retrieval.pipeline,
        "ms": round(retrieval.duration_ns / 1e6, 3),
        "found": retrieval.found,
        "prompt_tokens_estimated": retrieval.tokens,
        "degraded": list(retrieval.degraded),
        "reason": retrieval.reason,
        "sources": [
            {
                "number": one.number,
                "id": one.id,
                "document": one.document,
                "title": one.title,
                "score": one.score,
            }
            for one in retrieval.sources
        ],
    }


class _Ahead:
    """Puts a member in front of the others of the first JSON object that is sent."""

    def __init__(self, send: Send, member: bytes) -> None:
        self._send, self._member = send, member
        self._due = False
        # The head of an answer that tells its length waits until that is known.
        self._head: Message | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._due = message["status"] == 200
            if self._due and any(name == b"content-length" for name, _ in message["headers"]):
                self._head = message
                return
        elif self._due:
            body: bytes = message["body"]
            found = _OBJECT.search(body)
            added = 0
            if found is not None:
                self._due, added = False, len(self._member)
                message["body"] = body[: found.end()] + self._member + body[found.end() :]
            await self._begin(added)
        await self._send(message)

    async def _begin(self, added: int) -> None:
        head, self._head = self._head, None
        if head is not None:
            headers: Headers = head["headers"]
            head["headers"] = [_longer(name, value, added) for name, value in headers]
            await self._send(head)


def _longer(name: bytes, value: bytes, added: int) -> tuple[bytes, bytes]:
    return (name, str(int(value) + added).encode()) if name == b"content-length" else (name, value)
