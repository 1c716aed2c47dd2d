"""Routes that are not generations: models, liveness, readiness, metrics."""

from urllib.parse import unquote_to_bytes

from sluice.core.errors import ModelNotFound
from sluice.runtime.generation import ModelCard
from sluice.server.exchange import Exchange
from sluice.server.ports import Gateway
from sluice.server.sse import encode_json
from sluice.server.stamp import Stamp
from sluice.server.wire import Json

MODELS_PREFIX = b"/v1/models/"
_READY_RETRY_S = b"1"


async def list_models(exchange: Exchange, gateway: Gateway, _stamp: Stamp) -> None:
    """``GET /v1/models``."""
    cards = [_card_json(card) for card in gateway.models()]
    await exchange.reply(200, encode_json({"object": "list", "data": cards}))


async def one_model(exchange: Exchange, gateway: Gateway, _stamp: Stamp) -> None:
    """``GET /v1/models/{id}``; ids may hold slashes, written as they are or as ``%2F``."""
    asked = unquote_to_bytes(exchange.path[len(MODELS_PREFIX) :])
    for card in gateway.models():
        if card.id.encode() == asked:
            await exchange.reply(200, encode_json(_card_json(card)))
            return
    told = asked[:100].decode(errors="replace")
    raise ModelNotFound(f"No model is called {told!r} here; see /v1/models.", param="model")


async def health(exchange: Exchange, _gateway: Gateway, _stamp: Stamp) -> None:
    """``GET /health``: the process answers. Says nothing about models; see ``/ready``."""
    await exchange.reply(200, b'{"status":"ok"}')


async def ready(exchange: Exchange, gateway: Gateway, _stamp: Stamp) -> None:
    """``GET /ready``: 200 where calls are taken at this moment, else 503 with the reason.

    Models that no replica serves are told with the time until one does, and whether calls wait.
    """
    readiness = gateway.readiness()
    told: Json = {"ready": readiness.ready, "reason": readiness.reason}
    if readiness.absent:
        told["absent"] = [
            {
                "model": one.model,
                "ready_in_s": None if one.ready_in_s is None else round(one.ready_in_s, 1),
                "requests": "held" if one.held else "refused",
            }
            for one in readiness.absent
        ]
    if readiness.ready:
        await exchange.reply(200, encode_json(told))
    else:
        await exchange.reply(503, encode_json(told), [(b"retry-after", _READY_RETRY_S)])


async def metrics(exchange: Exchange, gateway: Gateway, _stamp: Stamp) -> None:
    """``GET /metrics``: Prometheus exposition."""
    body, content_type = gateway.metrics()
    await exchange.reply(200, body, content_type=content_type.encode())


def _card_json(card: ModelCard) -> Json:
    told: Json = {
        "id": card.id,
        "object": "model",
        "created": card.created_s,
        "owned_by": card.owned_by,
    }
    if card.context_known:
        told["max_model_len"] = card.context_tokens_max
    return told
