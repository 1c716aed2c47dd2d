"""Routes for the operator, below ``/admin``: replicas, scaling, settings, reload, events.

Who may call them is decided in ``auth``: the admin key, which no API key is. What a change means is
the business of ``Operations``. No key, no prompt and no output is ever shown here.
"""

from typing import Annotated
from urllib.parse import unquote_to_bytes

import msgspec

from sluice.core.errors import ConfigError, InvalidRequest
from sluice.server.exchange import Exchange
from sluice.server.ports import Gateway, Operations, OperatorEvent
from sluice.server.problems import settings_refused, unknown_path
from sluice.server.sse import encode_json
from sluice.server.stamp import Stamp
from sluice.server.wire import Json, decode

REPLICAS_PREFIX = b"/admin/replicas/"


async def replicas(exchange: Exchange, gateway: Gateway, _stamp: Stamp) -> None:
    """``GET /admin/replicas``: state of each replica."""
    await exchange.reply(200, encode_json(_replicas(gateway)))


async def scaling(
    operations: Operations, exchange: Exchange, _gateway: Gateway, _stamp: Stamp
) -> None:
    """``GET /admin/scaling``: how many replicas of each model are to serve, why, and how long
    their starts took by stage."""
    await exchange.reply(200, operations.overview.scaling())


class _Pin(msgspec.Struct, forbid_unknown_fields=True):
    """Body of ``/admin/scale``."""

    model: str
    replicas: Annotated[int, msgspec.Meta(ge=0)] | None


_PIN = msgspec.json.Decoder(_Pin)


async def scale(
    operations: Operations, exchange: Exchange, _gateway: Gateway, _stamp: Stamp
) -> None:
    """``POST /admin/scale``: so many replicas of a model are to serve; ``null`` leaves that to the
    load again. Answers as ``/admin/scaling`` does."""
    pin = await exchange.understood(_pin_read)
    operations.pin_replicas(pin.model, pin.replicas)
    await exchange.reply(200, operations.overview.scaling())


def _pin_read(body: bytes) -> _Pin:
    try:
        return decode(_PIN, body)
    except InvalidRequest as error:
        raise InvalidRequest(
            'Send {"model": "small", "replicas": 3}, or null for replicas to leave their number to '
            f"the load. {error.message}",
            param=error.param,
        ) from None


async def settings(
    operations: Operations, exchange: Exchange, _gateway: Gateway, _stamp: Stamp
) -> None:
    """``GET /admin/config``: every setting in force and where it comes from; secrets masked."""
    entries = [
        {"key": one.key, "value": one.value, "origin": one.origin} for one in operations.settings()
    ]
    await exchange.reply(200, encode_json({"settings": entries}))


async def reload(
    operations: Operations, exchange: Exchange, _gateway: Gateway, _stamp: Stamp
) -> None:
    """``POST /admin/reload``: read the settings again and apply what can change while serving.

    A file with mistakes changes nothing; all of them are told.
    """
    try:
        reloaded = await operations.reload()
    except ConfigError as error:
        await exchange.refuse(settings_refused(error.problems))
        return
    body: Json = {
        "applied": list(reloaded.applied),
        "needs_restart": list(reloaded.needs_restart),
        "warnings": list(reloaded.warnings),
    }
    await exchange.reply(200, encode_json(body))


class _Event(msgspec.Struct, forbid_unknown_fields=True):
    """Body of ``/admin/events``."""

    what: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$")]
    details: Annotated[
        dict[
            Annotated[str, msgspec.Meta(min_length=1, max_length=64)],
            Annotated[str, msgspec.Meta(max_length=256)],
        ],
        msgspec.Meta(max_length=32),
    ] = {}


async def note_event(
    operations: Operations, exchange: Exchange, _gateway: Gateway, _stamp: Stamp
) -> None:
    """``POST /admin/events``: something happened that may explain a change, such as a rollout.

    The server notes its own starts and changed settings; this is for what it cannot see.
    """
    event = await exchange.understood(_event_read)
    operations.note(OperatorEvent(event.what, event.details))
    await exchange.reply(200, encode_json({"noted": event.what}))


_EVENT = msgspec.json.Decoder(_Event)


def _event_read(body: bytes) -> _Event:
    try:
        return decode(_EVENT, body)
    except InvalidRequest as error:
        raise InvalidRequest(
            'Send {"what": "rollout", "details": {"engine": "vllm 0.33"}}: a name of up to 64 '
            "lower-case letters, digits and any of _.- and, if wanted, up to 32 texts of up to 256 "
            f"characters by name. {error.message}",
            param=error.param,
        ) from None


async def move_replica(
    operations: Operations, exchange: Exchange, gateway: Gateway, _stamp: Stamp
) -> None:
    """``POST /admin/replicas/{id}/drain`` and ``/undrain``: give a replica no more, or again."""
    name, _, verb = exchange.path[len(REPLICAS_PREFIX) :].rpartition(b"/")
    replica_id = unquote_to_bytes(name).decode(errors="replace")
    known = {one.id for one in gateway.readiness().replicas}
    if verb not in {b"drain", b"undrain"} or replica_id not in known:
        there = ", ".join(sorted(known))
        message = f"Write /admin/replicas/ID/drain or /undrain with one of these ids: {there}."
        await exchange.refuse(unknown_path(message))
        return
    operations.drain_replica(replica_id, on=verb == b"drain")
    await exchange.reply(200, encode_json(_replicas(gateway)))


def _replicas(gateway: Gateway) -> Json:
    readiness = gateway.readiness()
    return {
        "ready": readiness.ready,
        "reason": readiness.reason,
        "replicas": [
            {
                "id": one.id,
                "model": one.model,
                "state": one.state,
                "error": one.error,
                "losses": one.losses,
                "starts_in_s": None if one.starts_in_s is None else round(one.starts_in_s, 1),
            }
            for one in readiness.replicas
        ],
    }
