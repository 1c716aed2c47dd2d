"""Ranges of generation options and their translation into the runtime's values.

``priority`` is a tier: 0 is the most urgent, as in vLLM.

One table holds every numeric range. Called by the routes after decoding, which make their ``Call``
with ``call_for`` and ``with_options``; no message is read here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from sluice.core.errors import InvalidRequest
from sluice.core.request import TIER_MAX
from sluice.core.sampling import Sampling
from sluice.runtime.generation import (
    Call,
    ChatPrompt,
    OutputFormat,
    RawPrompt,
    TextPrompt,
    TokenPrompt,
)
from sluice.server.exchange import Exchange
from sluice.server.wire import Json, Options, ResponseFormat

STOPS_MAX = 4
LOGPROBS_MAX = 20
TOKENS_MAX = 2**31 - 1
_BIAS_MAX = 100.0
_SCHEMA_NAME_MAX = 64


@dataclass(frozen=True, slots=True)
class Range:
    """Inclusive bounds of a field; ``low_excluded`` leaves the lower bound itself out."""

    low: float
    high: float
    low_excluded: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.low_excluded else value >= self.low
        return above and value <= self.high

    def __str__(self) -> str:
        return f"{'more than ' if self.low_excluded else ''}{self.low:.10g} to {self.high:.10g}"


RANGES: Mapping[str, Range] = {
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, low_excluded=True),
    "min_p": Range(0, 1),
    "top_k": Range(-1, TOKENS_MAX),  # -1 and 0 both mean all
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(0, 100, low_excluded=True),
    "max_tokens": Range(1, TOKENS_MAX),
    "max_completion_tokens": Range(1, TOKENS_MAX),
    "max_output_tokens": Range(1, TOKENS_MAX),
    "min_tokens": Range(0, TOKENS_MAX),
    "top_logprobs": Range(0, LOGPROBS_MAX),
    "priority": Range(0, TIER_MAX),
}
_MILLISECONDS = re.compile(r"-?[0-9]{1,9}")
_SEEDS = range(-(2**63), 2**63)


class Addressed(Protocol):
    """What the bodies of all routes say about whom they are for, and how urgent they are."""

    @property
    def model(self) -> str: ...

    @property
    def service_tier(self) -> str | None: ...

    @property
    def priority(self) -> int | None: ...


def check_ranges(request: object) -> None:
    """Raise ``InvalidRequest`` for the first field of the request that is out of its range."""
    for name, allowed in RANGES.items():
        value = getattr(request, name, None)
        if value is not None and value not in allowed:
            raise InvalidRequest(f"{name} must be {allowed}; it was {_told(value)}.", param=name)


def check_options(request: Options, choices_max: int) -> None:
    """Check what chat and text completions share."""
    check_ranges(request)
    if request.n is not None and not 1 <= request.n <= choices_max:
        message = f"n must be 1 to {choices_max}; it was {_told(request.n)}."
        raise InvalidRequest(message, param="n")
    if request.seed is not None and request.seed not in _SEEDS:
        raise InvalidRequest("seed must be a signed 64-bit integer.", param="seed")
    if request.stream_options is not None and not request.stream:
        message = "stream_options needs stream to be true."
        raise InvalidRequest(message, param="stream_options")


def wants_usage(request: Options) -> bool:
    """Whether a stream is to end with token counts."""
    return request.stream_options is not None and bool(request.stream_options.include_usage)


# What the routes are called by OpenTelemetry.
_OPERATIONS = {
    b"/v1/chat/completions": "chat",
    b"/v1/responses": "chat",
    b"/v1/completions": "text_completion",
    b"/v1/embeddings": "embeddings",
}
_TRACE_BYTES_MAX = 512


def call_for(
    exchange: Exchange,
    request: Addressed,
    prompt: ChatPrompt | TextPrompt | TokenPrompt | RawPrompt,
    output_format: OutputFormat,
    *,
    choices: int = 1,
    output_tokens_max: int | None = None,
) -> Call:
    """A call with what all routes share: identity, prompt, and how urgent it is."""
    return Call(
        id=exchange.call_id,
        model=request.model,
        arrived_ns=exchange.arrived_ns,
        prompt=prompt,
        choices=choices,
        output_tokens_max=output_tokens_max,
        output_format=output_format,
        tenant=exchange.tenant,
        slo_class=exchange.header(b"x-sluice-slo") or "",
        service_tier=request.service_tier or "",
        priority=request.priority,
        may_degrade=_may_degrade(exchange),
        client_id=exchange.client_id,
        deadline_ns=_deadline_of(exchange),
        body_bytes=exchange.body_bytes,
        likeness=exchange.likeness,
        operation=_OPERATIONS.get(exchange.path, ""),
        traceparent=_trace_header(exchange, b"traceparent"),
        tracestate=_trace_header(exchange, b"tracestate"),
    )


def _trace_header(exchange: Exchange, name: bytes) -> str:
    """A header of a trace; one that is too long or was sent twice counts as none."""
    if name not in exchange.fields:
        return ""
    values = exchange.header_values(name)
    is_usable = len(values) == 1 and len(values[0]) <= _TRACE_BYTES_MAX
    return values[0].decode("latin-1").strip() if is_usable else ""


def with_options(
    call: Call, request: Options, output_tokens_max: int | None, logprobs_top: int | None
) -> Call:
    """The call with what chat and text completions share."""
    return replace(
        call,
        sampling=_sampling_of(request, logprobs_top),
        choices=request.n or 1,
        output_tokens_max=output_tokens_max,
        output_tokens_min=_output_tokens_min_of(request, output_tokens_max),
        stop=_stops_of(request.stop),
        stop_tokens=tuple(request.stop_token_ids or ()),
        ignore_end_token=bool(request.ignore_eos),
    )


def output_format_of(wanted: ResponseFormat | None) -> OutputFormat:
    """``response_format`` of a chat."""
    if wanted is None or wanted.type == "text":
        return OutputFormat()
    if wanted.type == "json_object":
        return OutputFormat("json_object")
    if wanted.type == "json_schema":
        if wanted.json_schema is None:
            message = "response_format.json_schema is missing."
            raise InvalidRequest(message, param="response_format.json_schema")
        return schema_format(wanted.json_schema, "response_format.json_schema")
    message = "response_format.type must be text, json_object or json_schema."
    raise InvalidRequest(message, param="response_format.type")


def schema_format(described: Json, param: str) -> OutputFormat:
    """A named JSON schema, ``{"name": …, "schema": {…}}``; ``param`` is where it was."""
    name, schema = described.get("name"), described.get("schema")
    if not isinstance(name, str) or not 1 <= len(name) <= _SCHEMA_NAME_MAX:
        message = f"{param}.name must be a string of 1 to {_SCHEMA_NAME_MAX} characters."
        raise InvalidRequest(message, param=f"{param}.name")
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param}.schema must be an object.", param=f"{param}.schema")
    return OutputFormat("json_schema", schema)


def _sampling_of(request: Options, logprobs_top: int | None) -> Sampling:
    """How tokens are chosen; absent fields take the defaults of ``Sampling``."""
    return Sampling(
        temperature=_or(request.temperature, 1.0),
        top_k=max(0, _or(request.top_k, 0)),
        top_p=_or(request.top_p, 1.0),
        min_p=_or(request.min_p, 0.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        logit_bias=_bias_of(request.logit_bias),
        seed=request.seed,
        logprobs_top=logprobs_top,
    )


def _stops_of(stop: str | list[str] | None) -> tuple[str, ...]:
    """Stop strings: at most four, none empty."""
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > STOPS_MAX:
        message = f"stop takes up to {STOPS_MAX} strings; there were {len(stops)}."
        raise InvalidRequest(message, param="stop")
    if "" in stops:
        raise InvalidRequest("A stop string must not be empty.", param="stop")
    return stops


def _output_tokens_min_of(request: Options, output_tokens_max: int | None) -> int:
    """``min_tokens``, checked against the maximum."""
    least = request.min_tokens or 0
    if output_tokens_max is not None and least > output_tokens_max:
        message = f"min_tokens is {least}, more than the {output_tokens_max} tokens allowed."
        raise InvalidRequest(message, param="min_tokens")
    return least


def _may_degrade(exchange: Exchange) -> bool:
    """Whether the client takes a shorter answer or one of a smaller model under overload."""
    if b"x-sluice-degrade" not in exchange.fields:
        return True
    asked = exchange.header(b"x-sluice-degrade")
    if asked not in {None, "never"}:
        message = 'x-sluice-degrade must be "never"; leave it out to allow what the class allows.'
        raise InvalidRequest(message, param="x-sluice-degrade")
    return asked is None


def _deadline_of(exchange: Exchange) -> int:
    """Instant after which the answer is worthless: the client's own, or the longest life.

    A client's budget may be used up, and so below zero, when it asks: admission refuses that.
    """
    life_s = exchange.limits.request_s_max
    if b"x-sluice-deadline-ms" in exchange.fields:
        asked = exchange.header(b"x-sluice-deadline-ms") or ""
        if not _MILLISECONDS.fullmatch(asked):
            message = "x-sluice-deadline-ms must be a whole number of milliseconds, what is left."
            raise InvalidRequest(message, param="x-sluice-deadline-ms")
        life_s = min(life_s, int(asked) / 1000)
    return exchange.arrived_ns + int(life_s * 1e9)


def _bias_of(bias: dict[str, float] | None) -> dict[int, float]:
    tokens: dict[int, float] = {}
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10) or int(key) > TOKENS_MAX:
            message = f"logit_bias keys must be token ids; one was {key[:40]!r}."
            raise InvalidRequest(message, param="logit_bias")
        if not -_BIAS_MAX <= value <= _BIAS_MAX:
            message = f"logit_bias values must be -100 to 100; that of {key} was {value:g}."
            raise InvalidRequest(message, param="logit_bias")
        tokens[int(key)] = value
    return tokens


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _told(value: float) -> str:
    """A number for a message, however long it is."""
    return f"{value:.10g}" if abs(value) < 10**15 else "far out of it"
