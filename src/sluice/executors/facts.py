"""What engines tell of themselves, from their list of models and their routes of limits.

``remote.py`` feeds the bodies in. What is absent or of another shape is unknown; nothing is refused.
"""

from collections.abc import Sequence

import msgspec

from sluice.executors.stream import EngineFacts


class _Meta(msgspec.Struct):
    n_ctx: int | None = None


class _Model(msgspec.Struct):
    id: str = ""
    max_model_len: int | None = None
    meta: _Meta | None = None


class _Generation(msgspec.Struct):
    n_ctx: int | None = None


class _Told(msgspec.Struct):
    """Members of ``/v1/models`` (all engines), ``/props`` (llama-server) and ``/info`` (TGI)."""

    data: list[_Model] | None = None
    default_generation_settings: _Generation | None = None
    total_slots: int | None = None
    max_total_tokens: int | None = None
    max_concurrent_requests: int | None = None


def read_facts(bodies: Sequence[bytes]) -> EngineFacts:
    """What the bodies say together; later ones win."""
    models: tuple[str, ...] = ()
    context: int | None = None
    sequences: int | None = None
    for body in bodies:
        try:
            told = msgspec.json.decode(body, type=_Told)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        for model in told.data or ():
            models = (*models, model.id)
            context = model.max_model_len or (model.meta and model.meta.n_ctx) or context
        generation = told.default_generation_settings
        context = (generation and generation.n_ctx) or told.max_total_tokens or context
        sequences = told.total_slots or told.max_concurrent_requests or sequences
    return EngineFacts(models, context, sequences)
