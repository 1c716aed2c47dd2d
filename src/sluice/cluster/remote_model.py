"""A model that remote engines serve, as the gateway counts its calls.

Decides what a call means in numbers without reading its text: tokens are estimated from bytes, by a
ratio that is learned from the usage that engines tell, and blocks of text stand for the beginning
of a prompt. Exact limits are the engine's to hold to: an estimate refuses nothing.
"""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sluice.cluster.classes import ServiceClasses
from sluice.cluster.forward import Forward
from sluice.core.errors import InvalidRequest
from sluice.core.events import ReplicaLimits
from sluice.core.request import Request
from sluice.runtime.generation import Call, ModelCard, RawPrompt

# Tokens that one block of text stands for, and its size at the usual ratio.
BLOCK_TOKENS = 256
_BYTES_PER_TOKEN = 4
_BLOCK_BYTES = BLOCK_TOKENS * _BYTES_PER_TOKEN
# No text has more bytes or more tokens for one of the other.
_TOKENS_PER_BYTE_MIN, _TOKENS_PER_BYTE_MAX = 1 / 16, 1.0
# Of longer prompts the rest does not matter for picking: whoever has this much has the longest part
# that conversations share.
_BLOCKS_MAX = 64
# What is counted on for a call that sets no limit, as far as there is room.
_OUTPUT_TOKENS_ASSUMED = 4096
# Stands for a context that neither the engine nor the settings tell: longer than any in use.
CONTEXT_TOKENS_UNKNOWN = 1_048_576
# Of an engine that does not tell its context no prompt is taken to be longer.
_PROMPT_TOKENS_MAX = 262_144
# The ratio is a mean over so many answers, in which one to a long prompt counts no more than one to
# a prompt of this size, and one to a short prompt less: much of that is the template's.
_ANSWERS_LEARNED = 20.0
_LEARNED_BYTES = 4000
# Pictures, sound and files within a prompt: data URLs, and members that hold nothing but base64.
_MEDIA_BEGIN = (b";base64,", b'"data":', b'"file_data":')
_BASE64 = re.compile(rb"[A-Za-z0-9+/\\_-]{64}")
# What one of them counts for, whatever its size: about a thousand tokens. Of more than so many the
# rest counts as text.
_MEDIA_BYTES, _MEDIA_MAX = 4096, 256
# Looking through a larger body takes more than a millisecond.
_INLINE_BYTES_MAX = 1024**2
# Members that hold the text of a prompt, on whatever route.
_TEXTS = ("messages", "prompt", "input", "instructions", "query", "documents", "text_1", "text_2")
# Routes of engines alone. What they answer, and in which form, is between them and their clients.
NOT_GENERATING = frozenset({
    "/v1/embeddings", "/v1/rerank", "/rerank", "/v1/score", "/score", "/tokenize", "/detokenize",
})  # fmt: skip


class RemoteModel:
    """One model that clients can ask for; see ``served.ServedModel`` for what is shared."""

    def __init__(self, card: ModelCard, classes: ServiceClasses) -> None:
        self._card = card
        self.classes = classes
        self.limits: ReplicaLimits | None = None
        # The share of traces that is kept; ``None`` where no spans are made.
        self.traced_share: float | None = None
        self._tokens_per_byte = 1 / _BYTES_PER_TOKEN
        self._answers = 1.0

    @property
    def card(self) -> ModelCard:
        """The model as clients see it."""
        context = self._context_tokens_max
        if self._card.context_tokens_max != context:
            known = context != CONTEXT_TOKENS_UNKNOWN
            self._card = replace(self._card, context_tokens_max=context, context_known=known)
        return self._card

    def named(self, call: Call) -> Call:
        """The call as it is: its class is found where it is counted. Raises ``InvalidRequest``."""
        self.classes.name_of(call)
        return call

    async def check_together(self, calls: Sequence[Call]) -> None:
        """Check the calls of one request against the limits of its tenant."""
        self.classes.check_together(calls)

    def least(self, call: Call) -> None:  # noqa: ARG002
        """Counting a call is less work than finding out whether it may be spared."""
        return

    def holds(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens can run here, as far as anyone knows."""
        return tokens <= self._context_tokens_max

    def tool_calls(self, call: Call) -> None:
        """Nothing is taken out of what an engine answers."""

    def tokens_in(self, text: str) -> int:
        """About how many tokens a piece of text has."""
        return round(len(text.encode("utf-8", "replace")) * self._tokens_per_byte)

    def text_of(self, tokens: Sequence[int]) -> str:  # noqa: ARG002
        """There are no tokens here."""
        return ""

    async def submit(self, call: Call) -> Forward:
        """Turn a call into what a replica is sent. Raises ``InvalidRequest``."""
        raw = _raw_of(call)
        if len(raw.body) > _INLINE_BYTES_MAX:
            measured = await asyncio.to_thread(_measured, raw)
        else:
            measured = _measured(raw)
        text_bytes, media_bytes, _ = measured
        request = self._request(call, raw, measured)
        return Forward(request, raw, 0 if media_bytes else text_bytes)

    def request_of(self, call: Call) -> Request:
        """The request that a call would be. Raises ``InvalidRequest``."""
        raw = _raw_of(call)
        return self._request(call, raw, _measured(raw))

    def _request(
        self, call: Call, raw: RawPrompt, measured: tuple[int, int, tuple[int, ...]]
    ) -> Request:
        text_bytes, media_bytes, prefixes = measured
        room = self._context_tokens_max
        most = _PROMPT_TOKENS_MAX if room == CONTEXT_TOKENS_UNKNOWN else room - 1
        tokens = round(text_bytes * self._tokens_per_byte + media_bytes / _BYTES_PER_TOKEN)
        estimate = min(max(1, tokens), most)
        output_tokens_max = self._output_tokens_max(call, raw, room - estimate)
        # No more of it can be cached than it has.
        prefixes = prefixes[: estimate // BLOCK_TOKENS]
        request = self.classes.request(call, (), output_tokens_max, estimate, prefixes)
        if self.limits is not None and request.choices > self.limits.sequences_max:
            # An engine lets choices wait inside that do not run together.
            request = replace(request, choices=self.limits.sequences_max)
        return request

    def learn(self, text_bytes: int, prompt_tokens: int) -> None:
        """An engine told how many tokens a prompt had."""
        if text_bytes and prompt_tokens > 0:
            told = min(max(_TOKENS_PER_BYTE_MIN, prompt_tokens / text_bytes), _TOKENS_PER_BYTE_MAX)
            weight = min(1.0, text_bytes / _LEARNED_BYTES)
            self._answers = min(_ANSWERS_LEARNED, self._answers + weight)
            self._tokens_per_byte += (told - self._tokens_per_byte) * weight / self._answers

    @property
    def _context_tokens_max(self) -> int:
        limits = self.limits
        return self._card.context_tokens_max if limits is None else limits.context_tokens_max

    def _output_tokens_max(self, call: Call, raw: RawPrompt, room: int) -> int:
        if raw.path in NOT_GENERATING:
            return 1
        asked = call.output_tokens_max
        return min(_OUTPUT_TOKENS_ASSUMED if asked is None else asked, room)


def _raw_of(call: Call) -> RawPrompt:
    raw = call.prompt if isinstance(call.prompt, RawPrompt) else call.raw
    if raw is None:
        raise InvalidRequest("Several prompts in one request are not forwarded.", param="prompt")
    return raw


def _measured(raw: RawPrompt) -> tuple[int, int, tuple[int, ...]]:
    """The size of a prompt's text in bytes, what the media in it count for, and numbers that stand
    for the blocks it begins with.

    A list of token ids counts about as many bytes for each as text does: nothing is parsed for it.
    """
    fields, body = raw.sent.fields, raw.sent.raw
    texts: list[Any] = [memoryview(fields[name]) for name in _TEXTS if name in fields]
    if not texts:
        return 0, 0, ()
    first = texts[0]
    text_bytes, media_bytes = sum(map(len, texts)), 0
    # Most have none, and need not be copied to be looked through.
    if len(body) > _MEDIA_BYTES and any(begin in body for begin in _MEDIA_BEGIN):
        for size, counted in [_media(bytes(text)) for text in texts]:
            text_bytes -= size
            media_bytes += counted
    chain, hashes = hash(raw.path), []
    for end in range(_BLOCK_BYTES, min(len(first), _BLOCKS_MAX * _BLOCK_BYTES) + 1, _BLOCK_BYTES):
        chain = hash((chain, bytes(first[end - _BLOCK_BYTES : end])))
        hashes.append(chain)
    return text_bytes, media_bytes, tuple(hashes)


def _media(text: bytes) -> tuple[int, int]:
    """The size of the media in a member, and what they count for. Nothing of it is decoded."""
    size = counted = 0
    if len(text) <= _MEDIA_BYTES:
        return 0, 0
    for begin in _MEDIA_BEGIN:
        at = text.find(begin)
        for _ in range(_MEDIA_MAX):
            start, is_value = at + len(begin), True
            if begin.endswith(b":"):
                start = text.find(b'"', start) + 1
            else:  # the whole value has to be such a URL, and not a text with one in it
                opened = text.rfind(b'"', 0, at)
                is_value = text.startswith(b'"data:', opened) and text[opened - 1 : opened] != b"\\"
            end = text.find(b'"', start)
            if at < 0 or not start or end < 0:
                break
            if is_value and end - start > _MEDIA_BYTES and _BASE64.match(text, start):
                size += end - start
                counted += _MEDIA_BYTES
            at = text.find(begin, end)
    return size, counted
