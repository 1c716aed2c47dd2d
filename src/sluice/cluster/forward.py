"""A call on its way to a remote engine: what goes over the wire, and how its prompt is counted.

Made by ``remote_model`` when a call arrives, completed here for the replica that gets it. The
caller's bytes are forwarded: of the JSON object only those members are replaced that must differ,
and all others keep every byte.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from sluice.cluster.classes import OPENAI_TIERS, UNNAMED_TIERS
from sluice.core.request import Request, Rung
from sluice.executors.dialects import Dialect
from sluice.runtime.generation import Call, RawPrompt

# The members that say how long an output may get.
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
# The one that engines heed where there is one only.
_LIMIT_OF = {"/v1/completions": "max_tokens", "/v1/responses": "max_output_tokens"}
# Routes whose streams tell their usage only where ``stream_options`` asks for it.
_WITH_STREAM_OPTIONS = frozenset({"/v1/chat/completions", "/v1/completions"})
# Reading a larger body would hold up the event loop.
_INLINE_BYTES_MAX = 64 * 1024
_TIERS = frozenset({*UNNAMED_TIERS, *OPENAI_TIERS, None})
_encode = msgspec.json.encode


class Forward(msgspec.Struct, frozen=True):
    """What a remote replica is sent. ``text_bytes`` is the size of the prompt's text."""

    request: Request
    raw: RawPrompt
    text_bytes: int


async def understood(call: Call) -> Call:
    """The call for a model that batches here; it was not read so far. Raises ``RequestError``."""
    raw = call.prompt
    if not isinstance(raw, RawPrompt):
        return call
    if len(raw.body) > _INLINE_BYTES_MAX:
        read = await asyncio.to_thread(raw.sent.understand)
    else:
        read = raw.sent.understand()
    return replace(read, model=call.model, slo_class=call.slo_class, raw=raw)


class Wording(msgspec.Struct, frozen=True):
    """How one engine wants to be asked: the model's name there, and whether it has priorities."""

    dialect: Dialect
    model: str
    priority: bool = False


def body_for(forward: Forward, wording: Wording, attempt_id: str) -> bytes:
    """The body as this engine is to get it, with ``attempt_id`` where it takes ids in bodies."""
    raw, request = forward.raw, forward.request
    fields = raw.sent.fields
    changes: dict[str, Any] = {}
    if _text(fields.get("model")) != wording.model:
        changes["model"] = wording.model
    if Rung.SHORTEN in request.degraded:
        present = [name for name in _LIMITS if name in fields]
        # Chats have two names for it, and some engines refuse a request with both.
        heeded = _LIMIT_OF.get(raw.path) or (present or ["max_tokens"])[0]
        changes |= dict.fromkeys([*present, heeded], request.output_tokens_max)
    if raw.streamed and not raw.shows_usage and raw.path in _WITH_STREAM_OPTIONS:
        changes["stream_options"] = _stream_options(fields)
    id_field = wording.dialect.id_field
    if id_field and not wording.dialect.id_header and id_field not in fields:
        changes[id_field] = attempt_id
    if wording.priority:
        changes["priority"] = wording.dialect.priority_value(request.tier)
    elif "priority" in fields:
        changes["priority"] = None  # our tier, which the engine would take for its own
    if "service_tier" in fields and _text(fields["service_tier"]) not in _TIERS:
        changes["service_tier"] = None  # one of our classes
    return with_members(fields, changes) if changes else raw.sent.raw


def with_members(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> bytes:
    """The object of these undecoded members with some replaced or added, or left out (``None``).

    All others keep their bytes and their order.
    """
    parts: list[Any] = []
    for name, value in fields.items():
        if name not in changes:
            parts += (b",", _encode(name), b":", value)
        elif changes[name] is not None:
            parts += (b",", _encode(name), b":", _encode(changes[name]))
    for name, value in changes.items():
        if name not in fields and value is not None:
            parts += (b",", _encode(name), b":", _encode(value))
    parts[:1] = [b"{"]
    return b"".join((*parts, b"}"))


def _stream_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The caller's options with usage asked for."""
    given = _value(fields.get("stream_options"))
    return {**(given if isinstance(given, dict) else {}), "include_usage": True}


def _text(raw: Any) -> str | None:
    """A member that is text."""
    value = _value(raw)
    return value if isinstance(value, str) else None


def _value(raw: Any) -> Any:
    """A member decoded; ``None`` where it is absent or cannot be."""
    try:
        return None if raw is None else msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
