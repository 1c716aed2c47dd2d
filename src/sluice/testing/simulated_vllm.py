"""A vLLM that computes nothing: slots, a queue of its own, live metrics, exact usage.

A route for ``ScriptedUpstream``. For tests of whole fleets that need an engine whose load is real:
what it cannot run waits in it, what its client leaves is stopped and its slot is free. The text is
made from the request, so that a test knows what must come back. Faults are the test's: a script of
its own for the requests that it picks.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from sluice.testing.engine_answers import DONE, delta, error_body, event
from sluice.testing.upstream import (
    STREAM_HEAD,
    Act,
    Received,
    Script,
    Send,
    Until,
    Wait,
    http_chunk,
    whole,
)

TOKENS_UNASKED = 16  # the length of an answer to a request without a limit
_STAMP = {"id": "chatcmpl-sim", "created": 1_796_055_633, "model": "m"}


@dataclass(frozen=True, slots=True)
class Speed:
    """What the engine runs at a time and how long it takes, in seconds."""

    slots: int = 8
    prefill_s: float = 0.002
    token_s: float = 0.001
    context_tokens: int = 4096


@dataclass(frozen=True, slots=True)
class _Asked:
    prompt_tokens: int
    tokens: int
    streamed: bool
    shows_usage: bool
    chat: bool

    @property
    def pieces(self) -> list[str]:
        return [f" w{number}" for number in range(self.tokens)]

    @property
    def usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens,
            "total_tokens": total,
        }


def text_of(tokens: int) -> str:
    """The answer of so many tokens."""
    return "".join(_Asked(0, tokens, streamed=False, shows_usage=False, chat=True).pieces)


class SimulatedVllm:
    """One engine. ``fault`` may give another script for a request that is to be generated.

    ``sleeps`` is ``None`` while it has no routes for that, as of a server without development mode.
    """

    def __init__(
        self, speed: Speed | None = None, fault: Callable[[Received], Script | None] | None = None
    ) -> None:
        self.speed = speed or Speed()
        self.fault = fault or (lambda _: None)
        self.running = 0
        self.completed = 0
        self.left = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.waiting_most = 0
        self.sleeps: bool | None = None
        self._queue: deque[asyncio.Event] = deque()
        self._changed = asyncio.Event()

    async def until(self, holds: Callable[[], bool], within_s: float = 5.0) -> None:
        """Wait for what changes when requests begin or end. Raises ``TimeoutError``."""
        async with asyncio.timeout(within_s):
            while not holds():
                self._changed.clear()
                await self._changed.wait()

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return len(self._queue)

    def route(self, received: Received) -> Script:
        """What it does about a request."""
        match received.path:
            case "/health":
                return whole(b"")
            case "/metrics":
                return whole(self.metrics().encode(), kind="text/plain; version=0.0.4")
            case "/v1/models":
                model = {"id": "m", "object": "model", "max_model_len": self.speed.context_tokens}
                return whole(msgspec.json.encode({"object": "list", "data": [model]}))
            case "/sleep?level=1" | "/wake_up" if self.sleeps is not None:
                self.sleeps = received.path != "/wake_up"
                return whole(b"")
            case "/is_sleeping" if self.sleeps is not None:
                return whole(msgspec.json.encode({"is_sleeping": self.sleeps}))
            case "/v1/chat/completions" | "/v1/completions" if self.sleeps:
                return whole(b'{"detail":"the engine is asleep"}', 500)
            case "/v1/chat/completions" | "/v1/completions":
                return self.fault(received) or self._generate(received)
            case _:
                return whole(b'{"detail":"Not Found"}', 404)

    def metrics(self) -> str:
        """Its page of metrics."""
        labels = '{engine="0",model_name="m"}'
        use = min(1.0, self.running / max(1, self.speed.slots))
        values = {
            "vllm:num_requests_running": self.running,
            "vllm:num_requests_waiting": self.waiting,
            "vllm:kv_cache_usage_perc": use,
            "vllm:prompt_tokens_total": self.prompt_tokens,
            "vllm:generation_tokens_total": self.output_tokens,
        }
        return "".join(f"{name}{labels} {float(value)}\n" for name, value in values.items())

    def _generate(self, received: Received) -> Script:
        fields = msgspec.json.decode(received.body)
        asked = _asked(fields, chat="chat" in received.path)
        room = self.speed.context_tokens
        if asked.prompt_tokens + asked.tokens > room:
            return _wrong(f"This model's maximum context length is {room} tokens.")
        if asked.tokens < 1:
            return _wrong("max_tokens must be at least 1.")
        return self._served(asked)

    def _served(self, asked: _Asked) -> Generator[Act]:
        """Wait for a slot, hold it, and free it however the answer ends."""
        turn = asyncio.Event()
        self._queue.append(turn)
        self._give_turns()
        self.waiting_most = max(self.waiting_most, self.waiting)
        done = False
        try:
            yield Until(turn)
            yield Wait(self.speed.prefill_s)
            self.prompt_tokens += asked.prompt_tokens
            yield from self._streamed(asked) if asked.streamed else self._whole(asked)
            done = True
        finally:
            self.completed += done
            self.left += not done
            if turn.is_set():
                self.running -= 1
            else:
                self._queue.remove(turn)
            self._give_turns()

    def _give_turns(self) -> None:
        self._changed.set()
        while self._queue and self.running < self.speed.slots:
            self.running += 1
            self._queue.popleft().set()

    def _streamed(self, asked: _Asked) -> Generator[Act]:
        yield Send(STREAM_HEAD)
        if asked.chat:
            yield Send(http_chunk(delta({"role": "assistant", "content": ""})))
        for piece in asked.pieces:
            yield Wait(self.speed.token_s)
            self.output_tokens += 1
            yield Send(http_chunk(_event(asked, piece, None)))
        ending = _event(asked, "", "length")
        if asked.shows_usage:
            ending += event({**_STAMP, "choices": [], "usage": asked.usage})
        yield Send(http_chunk(ending + DONE) + http_chunk(b""))

    def _whole(self, asked: _Asked) -> Generator[Act]:
        yield Wait(self.speed.token_s * asked.tokens)
        self.output_tokens += asked.tokens
        text = "".join(asked.pieces)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        if asked.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        yield from whole(msgspec.json.encode({**_STAMP, "choices": [choice], "usage": asked.usage}))


def _wrong(message: str) -> Script:
    return whole(error_body(message, "BadRequestError", 400), 400)


def _event(asked: _Asked, text: str, finish: str | None) -> bytes:
    if asked.chat:
        return delta({"content": text} if text else {}, finish)
    return event({**_STAMP, "choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def _asked(fields: Mapping[str, Any], *, chat: bool) -> _Asked:
    """What a request wants; a word of its prompt counts as a token."""
    if chat:
        prompt = " ".join(str(message.get("content", "")) for message in fields["messages"])
    else:
        prompt = str(fields["prompt"])
    limit = fields.get("max_completion_tokens") or fields.get("max_tokens") or TOKENS_UNASKED
    options = fields.get("stream_options") or {}
    return _Asked(
        prompt_tokens=len(prompt.split()),
        tokens=int(limit),
        streamed=bool(fields.get("stream")),
        shows_usage=bool(options.get("include_usage")),
        chat=chat,
    )
