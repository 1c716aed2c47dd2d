"""What engines tell of themselves, from their list of models and their routes of limits.

``remote.py`` feeds the bodies in. What is absent or of another shape is unknown; nothing is
refused.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from sluice.executors.stream import EngineFacts


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
            context = model.context_tokens or (model.meta and model.meta.context_tokens) or context
        slots = told.slots
        context = (slots and slots.context_tokens) or told.total_tokens or context
        sequences = told.total_slots or told.requests or sequences
    return EngineFacts(models, context, sequences)
