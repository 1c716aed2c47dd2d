"""What chunks and answers of all routes have in common: identity, token counts, probabilities."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from sluice.core.request import Usage
from sluice.runtime.generation import TextLogprob, TokenText
from sluice.server.wire import Json

_ID_PREFIXES = {
    "chat.completion": "chatcmpl-",
    "chat.completion.chunk": "chatcmpl-",
    "text_completion": "cmpl-",
    "response": "resp_",
}


@dataclass(frozen=True, slots=True)
class Stamp:
    """Identity of one answer. ``id`` is the call's; ``version`` names the software.

    ``fingerprints`` are those of the models, by name.
    """

    id: str
    created_s: int
    model: str
    version: str
    fingerprints: Mapping[str, str] = field(default_factory=dict)

    def with_model(self, model: str) -> "Stamp":
        """The same stamp for the model that answers, which may not be the one asked for."""
        return replace(self, model=model)

    @property
    def fingerprint(self) -> str:
        """Changes when the software, the model or its numerics do: seeded answers may differ."""
        served = f"{self.version}/{self.model}/{self.fingerprints.get(self.model, '')}"
        return "fp_" + hashlib.sha256(served.encode()).hexdigest()[:12]

    def fields(self, kind: str) -> Json:
        """The common fields of an object of this kind."""
        return {
            "id": _ID_PREFIXES[kind] + self.id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def head(self, kind: str) -> bytes:
        """The common fields as JSON, without the braces around them."""
        return msgspec.json.encode(self.fields(kind))[1:-1]


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
