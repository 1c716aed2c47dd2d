"""How one request is answered: by a model that batches here, or passed through to a remote engine.

``chat``, ``completions`` and ``responses`` bring a ``Surface`` that reads a request and shapes what
is generated here; ``forward`` serves the routes that only engines have. For a remote engine the
body is decoded once and no deeper than its members, its bytes go on as they came, and so do those
of the answer. Under overload a call may change sides before anything is sent, which is why what
answers is asked of the generation and not of the request.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from sluice.core.errors import InternalError, InvalidRequest, ModelNotFound
from sluice.core.model_routes import Choice
from sluice.runtime.generation import Call, Finished, OutputFormat, RawPrompt, Relaying, SentBody
from sluice.server.exchange import Exchange
from sluice.server.merged import generating
from sluice.server.options import call_for, check_ranges
from sluice.server.ports import Gateway, Generation, Relay
from sluice.server.problems import Headers, unfinished
from sluice.server.routed import Asked, answered_by, asked_of, route_headers
from sluice.server.sources import tell_sources
from sluice.server.sse import answer_headers
from sluice.server.stamp import Stamp

Reading = TypeVar("Reading")
Members = Mapping[str, Any]

# What goes along upstream of a client's headers: the trace that its call belongs to.
_TRACE_HEADERS = (b"traceparent", b"tracestate")
_OUTPUT_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_TEXT = OutputFormat()
# Finding the members of a larger body would hold up the event loop: it takes about a millisecond.
_GLANCED_BYTES_MAX = 1024**2
_members_of = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_value_of = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True)
class Surface(Generic[Reading]):
    """One route over models that batch here.

    ``understand`` reads and checks a body; ``answer`` sends what is generated for it. Where nothing
    ``streams``, a member ``stream`` means nothing.
    """

    understand: Callable[[Exchange, bytes], tuple[Reading, list[Call]]]
    answer: Callable[[Exchange, Generation, Stamp, Reading], Awaitable[None]]
    streams: bool = True


@dataclass(frozen=True, slots=True)
class _Heard(Generic[Reading]):
    """A request as far as it was read.

    ``asked`` is ``None`` where only its members were; ``raw`` is kept where an engine may get it.
    """

    calls: list[Call]
    asked: Reading | None = None
    raw: RawPrompt | None = None


@dataclass(frozen=True, slots=True)
class _Known:
    """The members of any body that concern us and not only the engine."""

    model: str
    service_tier: str | None
    priority: int | None


async def serve_call(
    exchange: Exchange, gateway: Gateway, stamp: Stamp, surface: Surface[Reading]
) -> None:
    """Answer one request, by whoever answers for its model in the end."""
    relaying = gateway.relaying
    read: Callable[[bytes], Asked | _Heard[Reading]]
    read = partial(_read, exchange, surface, relaying)
    if gateway.routes:
        read = partial(_asked_or_read, exchange, surface, gateway)
    glance = partial(_glance, exchange, surface, relaying) if relaying.always else None
    heard = await exchange.understood(read, glance)
    if isinstance(heard, Asked):
        route = gateway.routes.get(heard.question.route)
        if route is None:  # the settings were read again meanwhile
            raise ModelNotFound(f"The model '{exchange.model}' is gone.", param="model")
        choice = route.choose(heard.question, exchange.call_id, heard.text)
        stamp = replace(stamp, routed=choice)
        exchange.standing = partial(_standing, exchange.standing, choice)
        again = partial(_read_for, exchange, surface, relaying, choice.model)
        heard = await exchange.read_again(heard.body, again)
    async with generating(exchange, gateway, heard.calls) as generation:
        asked, raw = heard.asked, heard.raw
        if stamp.routed is not None and generation.terms.model_asked:
            answered_by(exchange, gateway, stamp.routed, generation.model)
        if generation.terms.retrieval is not None:
            tell_sources(exchange, generation.terms.retrieval)
        if raw is not None and generation.relay is not None:
            await pass_on(exchange, generation, generation.relay, streamed=raw.streamed)
            return
        if raw is not None and asked is None:
            asked, _ = await exchange.read_again(raw.body, partial(surface.understand, exchange))
        if asked is None:
            raise InternalError("a request was handed over that nobody has read")
        await surface.answer(exchange, generation, stamp.answered_by(generation), asked)


async def forward(exchange: Exchange, gateway: Gateway, _stamp: Stamp) -> None:
    """Answer a request that only remote engines can answer."""
    heard = await exchange.understood(partial(_read_for_engine, exchange, gateway))
    async with generating(exchange, gateway, heard.calls) as generation:
        if generation.relay is None or heard.raw is None:
            raise InternalError(f"{generation.model} was given what only an engine can answer")
        await pass_on(exchange, generation, generation.relay, streamed=False)


async def pass_on(
    exchange: Exchange, generation: Generation, relay: Relay, *, streamed: bool
) -> None:
    """Answer with the bytes of a remote engine. Raises what an ending without an answer means."""
    async for part, is_last in relay:
        if not streamed:
            kind = relay.content_type.encode("latin-1") or b"application/json"
            await exchange.reply(200, part, answer_headers(generation), kind)
            return
        if not exchange.started:
            await exchange.open_stream(answer_headers(generation))
        if is_last:
            await exchange.close_stream(part)
            return
        await exchange.write(part)
    async for piece in generation:
        if isinstance(piece, Finished):
            raise unfinished(piece)
    raise InternalError("a relay ended without a word on why")


# --------------------------------------------------------------------------------------- reading


def _read(
    exchange: Exchange,
    surface: Surface[Reading],
    relaying: Relaying,
    body: bytes,
    model: str | None = None,
) -> _Heard[Reading]:
    """A request for a model that batches here, kept where a remote engine may get it, or a large
    one for an engine. ``model`` replaces the one that it names."""
    if len(body) > _GLANCED_BYTES_MAX and relaying.always and model is None:
        heard = _members_read(exchange, surface, relaying, body)
        if heard is not None:
            return heard
    asked, calls = surface.understand(exchange, body)
    if model is not None:
        exchange.model = model
        calls = [replace(call, model=model) for call in calls]
    if len(calls) > 1 or exchange.model not in relaying.degraded:
        return _Heard(calls, asked)
    raw = _raw(exchange, _members_of(body), body, surface)
    return _Heard([replace(calls[0], raw=raw)], asked, raw)


def _asked_or_read(
    exchange: Exchange, surface: Surface[Reading], gateway: Gateway, body: bytes
) -> Asked | _Heard[Reading]:
    """A request for a route, of which a model is yet to be chosen, or any other one."""
    try:
        members = _members_of(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        members = {}  # for the reader to find wrong
    asked = asked_of(exchange, gateway.routes, members, body)
    return asked or _read(exchange, surface, gateway.relaying, body)


def _read_for(
    exchange: Exchange, surface: Surface[Reading], relaying: Relaying, model: str, body: bytes
) -> _Heard[Reading]:
    """A request for a route, as one for the model that was chosen."""
    if model in relaying.always:
        heard = _members_read(exchange, surface, relaying, body, model)
        if heard is not None:
            return heard
    return _read(exchange, surface, relaying, body, model)


def _standing(before: Callable[[], Headers], choice: Choice) -> Headers:
    return [*before(), *route_headers(choice)]


def _glance(
    exchange: Exchange, surface: Surface[Reading], relaying: Relaying, body: bytes
) -> _Heard[Reading] | None:
    """A request for a remote engine that is read in no time; ``None`` for any other."""
    if len(body) > _GLANCED_BYTES_MAX:
        return None
    return _members_read(exchange, surface, relaying, body)


def _members_read(
    exchange: Exchange,
    surface: Surface[Reading],
    relaying: Relaying,
    body: bytes,
    chosen: str | None = None,
) -> _Heard[Reading] | None:
    """A request for a remote engine; ``None`` for any other, or one that cannot be read so.

    ``chosen`` is the model, where it is not the one that the body names."""
    try:
        members = _members_of(body)
        model = chosen or _value_of(members["model"])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError):
        return None
    if not isinstance(model, str) or model not in relaying.always:
        return None
    exchange.model = model
    raw = _raw(exchange, members, body, surface)
    return _Heard([_call(exchange, members, raw)], None, raw)


def _read_for_engine(exchange: Exchange, gateway: Gateway, body: bytes) -> _Heard[None]:
    heard = _members_read(exchange, _NOTHING_HERE, gateway.relaying, body)
    if heard is not None:
        # Another model's vectors, scores or token ids are of no use to who asked for this one's.
        return replace(heard, calls=[replace(heard.calls[0], may_degrade=False)])
    try:
        model = _value_of(_members_of(body)["model"])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError):
        model = None
    if not isinstance(model, str):
        raise InvalidRequest("The body must be a JSON object with a model.", param="model")
    exchange.model = model
    if any(card.id == model for card in gateway.models()):
        path = exchange.path.decode("latin-1")
        raise InvalidRequest(f"{model} has no {path}: it generates text.", param="model")
    raise ModelNotFound(f"The model '{model}' does not exist here.", param="model")


def _nothing_here(_exchange: Exchange, _body: bytes) -> tuple[None, list[Call]]:
    raise InvalidRequest("No model that runs here answers this.", param="model")


async def _no_answer(_exchange: Exchange, _generation: Generation, _stamp: Stamp, _: None) -> None:
    raise InternalError("no model that runs here answers this")


_NOTHING_HERE: Surface[None] = Surface(_nothing_here, _no_answer, streams=False)


def _raw(exchange: Exchange, members: Members, body: bytes, surface: Surface[Any]) -> RawPrompt:
    options = _member(members, "stream_options", dict) if "stream_options" in members else None
    headers: tuple[tuple[str, str], ...] = ()
    if not exchange.fields.keys().isdisjoint(_TRACE_HEADERS):
        headers = tuple(
            (name.decode(), value.decode("latin-1"))
            for name in _TRACE_HEADERS
            for value in exchange.header_values(name)
        )

    def understand() -> Call:
        _, calls = surface.understand(exchange, body)
        if len(calls) > 1:
            raise InvalidRequest("Several prompts are not given to another model.", param="prompt")
        return calls[0]

    return RawPrompt(
        path=exchange.path.decode("latin-1"),
        sent=SentBody(body, members, understand),
        streamed=surface.streams and _is_streamed(members),
        shows_usage=options is not None and options.get("include_usage") is True,
        headers=headers,
    )


def _call(exchange: Exchange, members: Members, raw: RawPrompt) -> Call:
    """The call of a request that the engine checks itself: what is wrong with it is told there."""
    known = _Known(
        model=exchange.model,
        service_tier=_member(members, "service_tier", str) if "service_tier" in members else None,
        priority=_member(members, "priority", int) if "priority" in members else None,
    )
    if known.priority is not None:
        check_ranges(known)
    output_tokens_max: int | None = None
    for name in _OUTPUT_LIMITS:
        limit = _member(members, name, int) if name in members else None
        # Which of several an engine follows is not known; its tenant answers for the largest.
        if limit is not None and limit > (output_tokens_max or 0):
            output_tokens_max = limit
    choices = 1
    if "n" in members or "prompt" in members:
        choices = max(1, _member(members, "n", int) or 1) * _prompts(members)
        if choices > exchange.limits.choices_max:
            raise InvalidRequest(
                f"The request has {choices} choices, its prompts times n; the limit is "
                f"{exchange.limits.choices_max} in one request.",
                param="n",
            )
    return call_for(
        exchange, known, raw, _TEXT, choices=choices, output_tokens_max=output_tokens_max
    )


def _is_streamed(members: Members) -> bool:
    """Whether a stream is asked for. Raises ``InvalidRequest`` where engines may differ on that."""
    if "stream" not in members:
        return False
    asked = _member(members, "stream", bool)
    if asked is None and bytes(members.get("stream", b"null")) != b"null":
        raise InvalidRequest("stream must be true or false.", param="stream")
    return asked is True


def _prompts(members: Members) -> int:
    """How many prompts a text completion has."""
    prompt = members.get("prompt")
    if prompt is None or bytes(memoryview(prompt)[:1]) != b"[":
        return 1
    parts = _member(members, "prompt", list) or [""]
    return 1 if all(isinstance(part, int) for part in parts) else len(parts)


def _member(members: Members, name: str, kind: type) -> Any:
    """The value of a member that has this type, else ``None``."""
    raw = members.get(name)
    if raw is None:
        return None
    try:
        value = _value_of(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # for the engine to find wrong
    return value if type(value) is kind else None
