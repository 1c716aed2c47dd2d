"""Reads what a server sent, after the run: HTTP head, chunks, server-sent events.

Input is the received pieces with their times, so that every event gets the time at which its last
byte came.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Pieces = Sequence[tuple[float, bytes]]


@dataclass(slots=True)
class Answer:
    """One answer. ``status`` is 0 where no head came. Times are those of the pieces.

    ``text_s`` are the times of the chunks that carry text, ``tokens`` the server's own count where
    it gave one, else the number of those chunks. ``whole`` says that nothing is missing.
    """

    status: int = 0
    whole: bool = False
    head_s: float | None = None
    end_s: float | None = None
    text_s: list[float] = field(default_factory=list)
    tokens: int = 0
    reason: str = ""
    degraded: str = ""
    retry_after_s: float | None = None
    should_retry: bool | None = None


def read_answer(pieces: Pieces, *, closed: bool) -> Answer:
    """Read one connection's pieces; ``closed`` says that the server ended it."""
    answer = Answer()
    head, body = _split_head(pieces)
    if head is None:
        return answer
    lines = head.decode("latin-1").split("\r\n")
    answer.status = int(lines[0].split()[1])
    headers = {
        name.strip().lower(): value.strip()
        for name, _, value in (line.partition(":") for line in lines[1:])
    }
    answer.head_s = next(t_s for t_s, piece in pieces if piece)
    answer.end_s = pieces[-1][0]
    _read_headers(answer, headers)
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = list(_dechunk(body))
    if answer.status == 200:
        _read_events(answer, body)
    else:
        answer.whole = closed
    return answer


def _read_headers(answer: Answer, headers: Mapping[str, str]) -> None:
    answer.reason = headers.get("x-sluice-reason", "")
    answer.degraded = headers.get("x-sluice-degraded", "")
    if "x-should-retry" in headers:
        answer.should_retry = headers["x-should-retry"] == "true"
    if "retry-after-ms" in headers:
        answer.retry_after_s = float(headers["retry-after-ms"]) / 1e3
    elif headers.get("retry-after", "").isdigit():
        answer.retry_after_s = float(headers["retry-after"])


def _split_head(pieces: Pieces) -> tuple[bytes | None, list[tuple[float, bytes]]]:
    """The head, without its end, and the pieces of the body."""
    seen = b""
    for number, (t_s, piece) in enumerate(pieces):
        seen += piece
        head, found, rest = seen.partition(b"\r\n\r\n")
        if found:
            return head, [(t_s, rest), *pieces[number + 1 :]]
    return None, []


def _dechunk(pieces: Pieces) -> Iterator[tuple[float, bytes]]:
    """Take the chunked transfer coding away; sizes may be split between pieces."""
    buffered, left, size = bytearray(), 0, b""
    for t_s, piece in pieces:
        buffered.clear()
        at = 0
        while at < len(piece):
            if left > 2:  # the last two bytes of a chunk are its line end
                part = piece[at : at + left - 2]
                buffered += part
                at += len(part)
                left -= len(part)
            elif left:
                skipped = min(left, len(piece) - at)
                at += skipped
                left -= skipped
            else:
                end = piece.find(b"\n", at)
                size += piece[at:] if end < 0 else piece[at : end + 1]
                at = len(piece) if end < 0 else end + 1
                if end >= 0:
                    left = int(size.split(b";")[0].strip() or b"0", 16)
                    left += 2 if left else 0
                    size = b""
        yield t_s, bytes(buffered)


def _read_events(answer: Answer, body: Pieces) -> None:
    rest = b""
    for t_s, piece in body:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                _read_event(answer, line[5:].strip(), t_s)
    answer.tokens = answer.tokens or len(answer.text_s)


def _read_event(answer: Answer, event: bytes, t_s: float) -> None:
    if event == b"[DONE]":
        answer.whole = answer.reason == ""
        answer.end_s = t_s
        return
    document: dict[str, Any] = json.loads(event)
    if "error" in document:
        answer.reason = str(document["error"].get("code") or "error in the stream")
        return
    for choice in document.get("choices", ()):
        text = choice.get("text") or choice.get("delta", {}).get("content")
        if text:
            answer.text_s.append(t_s)
    if document.get("usage"):
        answer.tokens = document["usage"]["completion_tokens"]
