"""What chunks and answers of all routes have in common: identity, token counts, probabilities.

Token counts of a degraded answer carry what was done to it, under ``sluice``, and those of an
answer whose model was chosen how.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from sluice.core.model_routes import Choice
from sluice.core.request import Usage
from sluice.runtime.generation import Terms, TextLogprob, TokenText
from sluice.server.ports import Generation
from sluice.server.wire import Json

_ID_PREFIXES = {
    "chat.completion": "chatcmpl-",
    "chat.completion.chunk": "chatcmpl-",
    "text_completion": "cmpl-",
    "response": "resp_",
}
# What ``service_tier`` says of a request of no class.
DEFAULT_TIER = "default"
_NO_TERMS = Terms()


@dataclass(frozen=True, slots=True)
class Sources:
    """Where time and identity come from.

    ``wall_s`` is Unix time, ``monotonic_ns`` the clock of ``Call.arrived_ns``; ``new_id`` makes an
    id that no other call has. ``version`` names the software in ``system_fingerprint``.
    """

    wall_s: Callable[[], float]
    monotonic_ns: Callable[[], int]
    new_id: Callable[[], str]
    version: str = ""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Identity of one answer. ``id`` is the call's; ``version`` names the software.

    ``fingerprints`` are those of the models, by name. ``terms`` are those on which it is answered.
    ``routed`` says how its model was chosen, where the name asked for stands for two.
    """

    id: str
    created_s: int
    model: str
    version: str
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    terms: Terms = _NO_TERMS
    routed: Choice | None = None

    def answered_by(self, generation: Generation) -> "Stamp":
        """The same stamp with the model that answers, which may not be the one asked for."""
        return replace(self, model=generation.model, terms=generation.terms)

    @property
    def service_tier(self) -> str:
        """The class that was served, in OpenAI's word."""
        return self.terms.slo_class or DEFAULT_TIER

    @property
    def fingerprint(self) -> str:
        """Changes when the software, the model or its numerics do: seeded answers may differ."""
        served = f"{self.version}/{self.model}/{self.fingerprints.get(self.model, '')}"
        return "fp_" + hashlib.sha256(served.encode()).hexdigest()[:12]

    def fields(self, kind: str) -> Json:
        """The common fields of an object of this kind."""
        fields: Json = {
            "id": _ID_PREFIXES[kind] + self.id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }
        if kind != "response":  # which has it among its settings
            fields["service_tier"] = self.service_tier
        return fields

    def usage(self, usage: Usage) -> Json:
        """Token counts in the shape of completions, with what was done to a degraded answer."""
        return {**usage_json(usage), **self.disclosure()}

    def disclosure(self) -> Json:
        """What was done to a degraded answer and how its model was chosen, to stand beside its
        token counts."""
        terms, told = self.terms, dict[str, Any]()
        if terms.disclosed:
            told["degraded"] = list(terms.disclosed)
            if terms.output_tokens_max is not None:
                told["output_tokens_max"] = terms.output_tokens_max
            if terms.model_asked:
                told["model_asked"] = terms.model_asked
        if self.routed is not None:
            told["route"] = route_json(self.routed)
        return {"sluice": told} if told else {}

    def head(self, kind: str) -> bytes:
        """The common fields as JSON, without the braces around them."""
        return msgspec.json.encode(self.fields(kind))[1:-1]


def route_json(choice: Choice) -> Json:
    """How a model was chosen, to stand beside token counts."""
    told: Json = {
        "name": choice.route,
        "model": choice.model,
        "way": choice.way,
        "reason": choice.why,
        "score": choice.score,
        "threshold": round(choice.threshold, 6),
    }
    return told if choice.would is None else {**told, "shadow": choice.would}


def usage_json(usage: Usage) -> Json:
    """Token counts in the shape of completions."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def logprobs_json(tokens: tuple[TokenText, ...]) -> list[Json]:
    """Log-probabilities in the shape of chat completions and responses."""
    return [
        {**_logprob_json(token.sampled), "top_logprobs": [_logprob_json(top) for top in token.top]}
        for token in tokens
    ]


def _logprob_json(logprob: TextLogprob) -> Json:
    return {"token": logprob.text, "logprob": logprob.logprob, "bytes": list(logprob.utf8)}
