"""What engines tell of themselves, from their list of models and their routes of limits.

``remote.py`` feeds the bodies in. What is absent, of another shape or no count is unknown;
nothing is refused.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from sluice.executors.stream import EngineFacts

# Beyond it no engine has a context or places.
_COUNT_MAX = 2**31 - 1


def _named(name: str) -> Any:
    """A member with the engine's own name, absent by default."""
    return msgspec.field(name=name, default=None)


class _Meta(msgspec.Struct):
    context_tokens: int | None = _named("n_ctx")


class _Model(msgspec.Struct):
    id: str = ""
    context_tokens: int | None = _named("max_model_len")
    meta: _Meta | None = None


class _Told(msgspec.Struct):
    """Members of ``/v1/models`` (all engines), ``/props`` (llama-server) and ``/info`` (TGI)."""

    models: list[_Model] | None = _named("data")
    slots: _Meta | None = _named("default_generation_settings")
    total_slots: int | None = None
    total_tokens: int | None = _named("max_total_tokens")
    requests: int | None = _named("max_concurrent_requests")


def read_facts(bodies: Sequence[bytes]) -> EngineFacts:
    """What the bodies say together; later ones win."""
    models: tuple[str, ...] = ()
    context: int | None = None
    sequences: int | None = None
    for body in bodies:
        try:
            told = msgspec.json.decode(body, type=_Told)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        for model in told.models or ():
            models = (*models, model.id)
            context = _first(model.context_tokens, _tokens(model.meta), context)
        context = _first(_tokens(told.slots), told.total_tokens, context)
        sequences = _first(told.total_slots, told.requests, sequences)
    return EngineFacts(models, context, sequences)


def _tokens(meta: _Meta | None) -> int | None:
    return None if meta is None else meta.context_tokens


def _first(*counts: int | None) -> int | None:
    """The first that can be a count of something that is there."""
    return next((one for one in counts if one is not None and 0 < one <= _COUNT_MAX), None)
