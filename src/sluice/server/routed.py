"""Requests for a name that stands for two models: what is asked of it, and what is told.

``relay`` finds such a name in a body, before the request is read for a model, and has a model
chosen. What the classifier is shown is the last turn of the user. Nothing here refuses a request:
what is wrong with it is found when it is read. ``feedback`` is the route by which clients tell what
became of an answer.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from sluice.core.errors import InvalidRequest, ModelNotFound
from sluice.core.limits import Way
from sluice.core.model_routes import Choice, Question, Why
from sluice.runtime.generation import ToldOutcome
from sluice.server.exchange import Exchange
from sluice.server.ports import AutoRoute, Gateway
from sluice.server.problems import Headers, header_text
from sluice.server.sse import encode_json
from sluice.server.stamp import Stamp
from sluice.server.structure import has_too_much
from sluice.server.wire import decode

Members = Mapping[str, Any]

HEADER = b"x-sluice-route"
# A token has at least so many bytes of most texts in any script: what is counted may be more than
# there are.
_BYTES_PER_TOKEN = 3
_OUTPUT_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_IMAGES = ("image_url", "input_image", "image")
_ID_PREFIXES = ("chatcmpl-", "cmpl-", "resp_")
_value_of = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for a route: its question, the text that was judged, and its body."""

    question: Question
    text: str
    body: bytes


def asked_of(
    exchange: Exchange, routes: Mapping[str, AutoRoute], members: Members, body: bytes
) -> Asked | None:
    """The question of a request whose model is a route; ``None`` for any other one."""
    name = _value(members.get("model"))
    route = routes.get(name) if isinstance(name, str) else None
    if route is None or not isinstance(name, str):
        return None
    exchange.model = name
    # What has too much structure is refused where it is read, or not looked into by engines either.
    turns = [] if has_too_much(body) else list(_turns(members))
    text = next((one.text for one in reversed(turns) if one.role == "user"), "")
    score, why = route.judge(text)
    question = Question(
        route=name,
        score=score,
        unscored=why,
        wanted=_wanted(exchange),
        carries=tuple(_carried(members, turns)),
        tokens=_tokens(members, turns),
        earlier=_earlier(exchange.tenant, turns),
        conversation=_heard(exchange.tenant, turns),
    )
    return Asked(question, text, body)


def answered_by(exchange: Exchange, gateway: Gateway, choice: Choice, model: str) -> None:
    """Another model answers than the one that was chosen, as under overload."""
    route = gateway.routes.get(choice.route)
    if route is not None:
        route.answered(exchange.call_id, model)


def route_headers(choice: Choice) -> Headers:
    """What a client is told of the choice; the model that answers stands in ``x-sluice-model``."""
    told = [
        (HEADER, header_text(choice.route)),
        (HEADER + b"-way", choice.way.encode()),
        (HEADER + b"-reason", choice.why.encode()),
        (HEADER + b"-threshold", b"%.4f" % choice.threshold),
    ]
    if choice.score is not None:
        told.append((HEADER + b"-score", b"%.4f" % choice.score))
    if choice.would is not None:
        told.append((HEADER + b"-shadow", choice.would.encode()))
    return told


# ------------------------------------------------------------------------------ what was asked


@dataclass(frozen=True, slots=True)
class _Turn:
    """One message: who said it, its text, and whether it has images. ``rest`` stands for what else
    is in it."""

    role: str
    text: str
    has_image: bool
    rest: str


def _turns(members: Members) -> Iterator[_Turn]:
    """The messages of a chat, of a response, or the prompt of a completion."""
    for name in ("messages", "input", "prompt"):
        if name in members:
            value = _value(members[name])
            parts = value if isinstance(value, list) else [value]
            if name == "prompt":
                parts = ["\n".join(part for part in parts if isinstance(part, str))]
            yield from (_turn(part) for part in parts if isinstance(part, str | dict))
            return


def _turn(part: str | Mapping[str, Any]) -> _Turn:
    if isinstance(part, str):
        return _Turn("user", part, has_image=False, rest="")
    role, content = part.get("role"), part.get("content")
    pieces = content if isinstance(content, list) else [content]
    texts: list[str] = []
    images = False
    for piece in pieces:
        if isinstance(piece, str):
            texts.append(piece)
        elif isinstance(piece, dict):
            images = images or piece.get("type") in _IMAGES
            if isinstance(piece.get("text"), str):
                texts.append(piece["text"])
    others = {name: value for name, value in part.items() if name not in {"role", "content"}}
    return _Turn(str(role or ""), "\n".join(texts), images, repr(others) if others else "")


def _carried(members: Members, turns: list[_Turn]) -> Iterator[Why]:
    tools = _value(members.get("tools"))
    if isinstance(tools, list) and tools:
        yield Why.TOOLS
    if any(turn.has_image for turn in turns):
        yield Why.IMAGES


def _tokens(members: Members, turns: list[_Turn]) -> int:
    """About the most tokens that prompt and output take together."""
    limits = [_value(members.get(name)) for name in _OUTPUT_LIMITS]
    output = max((limit for limit in limits if isinstance(limit, int)), default=1)
    instructions = _value(members.get("instructions"))
    texts = [text for turn in turns for text in (turn.text, turn.rest)]
    texts += [instructions] if isinstance(instructions, str) else []
    size = sum(len(text.encode("utf-8", "replace")) for text in texts)
    return size // _BYTES_PER_TOKEN + max(1, output)


def _heard(tenant: str, turns: list[_Turn]) -> int | None:
    """A number for all that was said."""
    if not turns:
        return None
    return hash((tenant, *((turn.role, turn.text, turn.rest) for turn in turns)))


def _earlier(tenant: str, turns: list[_Turn]) -> int | None:
    """The number of the turn before: all that was said before the model's latest answer."""
    answers = [number for number, turn in enumerate(turns) if turn.role == "assistant"]
    return _heard(tenant, turns[: answers[-1]]) if answers else None


def _wanted(exchange: Exchange) -> Way | None:
    asked = exchange.header(HEADER)
    if asked is None:
        return None
    try:
        return Way(asked.lower())
    except ValueError:
        message = 'x-sluice-route must be "simple" or "complex"; leave it out to have one chosen.'
        raise InvalidRequest(message, param="x-sluice-route") from None


def _value(raw: Any) -> Any:
    """A member decoded; ``None`` where it is absent or cannot be."""
    try:
        return None if raw is None else _value_of(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


# ---------------------------------------------------------------------------------- feedback


class _Feedback(msgspec.Struct, forbid_unknown_fields=True):
    """The body of ``POST /v1/feedback``."""

    route: str
    id: str = ""
    prompt: str = ""
    ok: float | bool | None = None
    simple_ok: float | bool | None = None
    complex_ok: float | bool | None = None


_FEEDBACK = msgspec.json.Decoder(_Feedback)


async def feedback(exchange: Exchange, gateway: Gateway, _stamp: Stamp) -> None:
    """``POST /v1/feedback``: what became of an answer, for the next training of a route."""
    told, name = await exchange.understood(_outcome)
    route = gateway.routes.get(name)
    if route is None:
        known = ", ".join(sorted(gateway.routes)) or "none"
        raise ModelNotFound(f"There is no route {name[:64]!r}; routes: {known}.", param="route")
    await route.told(told)
    await exchange.reply(200, encode_json({"object": "feedback", "route": name, "kept": True}))


def _outcome(body: bytes) -> tuple[ToldOutcome, str]:
    request = decode(_FEEDBACK, body)
    values = {name: getattr(request, name) for name in ("ok", "simple_ok", "complex_ok")}
    for name, value in values.items():
        if value is not None and not 0 <= value <= 1:
            raise InvalidRequest(f"{name} must be true, false, or 0 to 1.", param=name)
    if bool(request.id) == bool(request.prompt.strip()):
        raise InvalidRequest("Give the id of a request or its prompt, one of the two.", param="id")
    if all(value is None for value in values.values()):
        raise InvalidRequest("Say what became of it: ok, simple_ok or complex_ok.", param="ok")
    if values["ok"] is not None and not request.id:
        message = (
            "ok is about the model that answered, which the id names; use simple_ok or complex_ok."
        )
        raise InvalidRequest(message, param="ok")
    id_ = request.id
    for prefix in _ID_PREFIXES:
        id_ = id_.removeprefix(prefix)
    ok, weak, strong = (None if one is None else float(one) for one in values.values())
    return ToldOutcome(id_, request.prompt, ok, weak, strong), request.route
