"""What vLLM, SGLang, TGI, llama-server and vendors put on the wire, for scripted upstreams.

Shapes, names and statuses follow the engines' own code and answers; values are made up. Each
engine is one ``EngineAnswers``: streams and whole answers for given pieces of text, refusals, error
events, health and metrics.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from sluice.testing.upstream import Received, Script, stream, whole

_ID = "chatcmpl-7f3a"
_CREATED_S = 1_796_055_633
PROMPT_TOKENS = 12
DONE = b"data: [DONE]\n\n"

Json = dict[str, Any]


def event(fields: Json) -> bytes:
    """One event."""
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"


def delta(content: Json, finish: str | None = None, index: int = 0, **more: Any) -> bytes:
    """One chunk of a chat completion."""
    choice = {"index": index, "delta": content, "logprobs": None, "finish_reason": finish}
    return event({**_stamp("chat.completion.chunk"), "choices": [choice], **more})


def usage(completion_tokens: int) -> Json:
    """Usage of an answer."""
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": completion_tokens,
        "total_tokens": PROMPT_TOKENS + completion_tokens,
    }


def usage_event(completion_tokens: int, **more: Any) -> bytes:
    """The event that ends a stream with ``include_usage``."""
    fields = {"choices": [], "usage": usage(completion_tokens), **more}
    return event({**_stamp("chat.completion.chunk"), **fields})


def _stamp(kind: str) -> Json:
    return {"id": _ID, "object": kind, "created": _CREATED_S, "model": "m"}


def _chat_events(pieces: Sequence[str], opening: Json, ending: Json) -> list[bytes]:
    """Role, pieces, finish, usage, terminator."""
    events = [delta(opening), *(delta({"content": piece}) for piece in pieces)]
    return [*events, delta(ending, "stop"), usage_event(len(pieces)), DONE]


def _chat_body(pieces: Sequence[str], **more: Any) -> bytes:
    message = {"role": "assistant", "content": "".join(pieces)}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    fields = {"choices": [choice], "usage": usage(len(pieces)), **more}
    return msgspec.json.encode({**_stamp("chat.completion"), **fields})


def error_body(message: str, kind: str, code: int | str | None) -> bytes:
    """OpenAI's form of an error."""
    fields = {"message": message, "type": kind, "param": None, "code": code}
    return msgspec.json.encode({"error": fields})


@dataclass(frozen=True, slots=True)
class EngineAnswers:
    """What one engine answers.

    ``overloaded`` refuses for want of room, ``loading`` while the model is being loaded (empty
    where the engine then listens to nobody), ``wrong_request`` what can never be served.
    """

    events: Callable[[Sequence[str]], list[bytes]]
    body: Callable[[Sequence[str]], bytes]
    overloaded: Script
    wrong_request: Script
    error_event: bytes
    loading: Script = ()
    metrics: str = ""
    headers: tuple[tuple[str, str], ...] = ()

    def route(self, pieces: Sequence[str] = ("Hel", "lo", "!")) -> Callable[[Received], Script]:
        """A healthy engine that gives this answer to everyone."""

        def answer(request: Received) -> Script:
            if request.path in {"/health", "/v1/models"}:
                return whole(b"{}")
            if request.path == "/metrics":
                return whole(self.metrics.encode(), kind="text/plain; version=0.0.4")
            if b'"stream":true' in request.body.replace(b" ", b""):
                return stream(self.events(pieces))
            return whole(self.body(pieces), 200, *self.headers)

        return answer


_VLLM_METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 7.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 3.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1200.0
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.79605e+09
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 400.0
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 1.0
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 5120.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 1.024e+03
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="m"} 0.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 9.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 1.5
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 9.0
"""

_SGLANG_METRICS = """\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m"} 7.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="m"} 3.0
# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="m"} 0.25
# TYPE sglang:cache_hit_rate gauge
sglang:cache_hit_rate{model_name="m"} 0.5
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{model_name="m"} 5120.0
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{model_name="m"} 1024.0
# TYPE sglang:cached_tokens_total counter
sglang:cached_tokens_total{model_name="m",source="device"} 300.0
sglang:cached_tokens_total{model_name="m",source="host"} 100.0
# TYPE sglang:num_retracted_requests_total counter
sglang:num_retracted_requests_total{model_name="m"} 1.0
"""

_TGI_METRICS = """\
# TYPE tgi_queue_size gauge
tgi_queue_size 3
# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 7
# TYPE tgi_batch_current_max_tokens gauge
tgi_batch_current_max_tokens 4096
# TYPE tgi_request_success counter
tgi_request_success 9
# TYPE tgi_request_failure counter
tgi_request_failure{err="overloaded"} 2
# TYPE tgi_request_skipped_tokens histogram
tgi_request_skipped_tokens_bucket{le="+Inf"} 9
tgi_request_skipped_tokens_sum 400
tgi_request_skipped_tokens_count 9
"""

_LLAMA_METRICS = """\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed, excluding cached tokens
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 5120
# HELP llamacpp:prompt_tokens_cached_total Number of prompt tokens reused from the cache
# TYPE llamacpp:prompt_tokens_cached_total counter
llamacpp:prompt_tokens_cached_total 400
# HELP llamacpp:tokens_predicted_total Number of generation tokens processed
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 1024
# HELP llamacpp:requests_processing Number of requests processing.
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 7
# HELP llamacpp:requests_deferred Number of requests deferred.
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 3
"""

_TIMINGS = {"cache_n": 0, "prompt_n": 12, "prompt_ms": 294.791, "predicted_ms": 58.929}


def _vllm_error(message: str, kind: str, code: int) -> bytes:
    return error_body(message, kind, code)


def _llama_events(pieces: Sequence[str]) -> list[bytes]:
    events = _chat_events(pieces, {"role": "assistant", "content": None}, {})
    return [*events[:-2], usage_event(len(pieces), timings=_TIMINGS), DONE]


def _llama_error(message: str, kind: str, code: int) -> bytes:
    return msgspec.json.encode({"error": {"code": code, "message": message, "type": kind}})


def _tgi_error(message: str, kind: str) -> bytes:
    return msgspec.json.encode({"error": message, "error_type": kind})


_VLLM = EngineAnswers(
    events=lambda pieces: _chat_events(pieces, {"role": "assistant", "content": ""}, {}),
    body=_chat_body,
    overloaded=whole(
        _vllm_error("The server's queue is full.", "ServiceUnavailableError", 503), 503
    ),
    wrong_request=whole(_vllm_error("max_tokens must be at least 1", "BadRequestError", 400), 400),
    error_event=b"data: " + _vllm_error("EngineCore died", "InternalServerError", 500) + b"\n\n",
    metrics=_VLLM_METRICS,
)

_SGLANG = EngineAnswers(
    events=lambda pieces: _chat_events(
        pieces, {"role": "assistant", "content": ""}, {"content": None}
    ),
    body=_chat_body,
    overloaded=whole(
        msgspec.json.encode(
            {"object": "error", "message": "The request queue is full.", "type": "", "code": 503}
        ),
        503,
    ),
    wrong_request=whole(
        msgspec.json.encode(
            {"object": "error", "message": "temperature must be 0 or more", "type": "", "code": 400}
        ),
        400,
    ),
    error_event=event({"error": {"message": "out of memory", "type": "abort", "code": 500}}),
    metrics=_SGLANG_METRICS,
)

_TGI = EngineAnswers(
    events=lambda pieces: _chat_events(
        pieces, {"role": "assistant", "content": ""}, {"role": "assistant", "content": ""}
    ),
    body=_chat_body,
    overloaded=whole(_tgi_error("Model is overloaded", "overloaded"), 429),
    wrong_request=whole(_tgi_error("`inputs` must have less than 1024 tokens", "validation"), 422),
    error_event=b"data: " + _tgi_error("Request failed during generation", "generation") + b"\n\n",
    metrics=_TGI_METRICS,
    headers=(
        ("x-compute-type", "gpu"),
        ("x-total-time", "310"),
        ("x-validation-time", "0"),
        ("x-queue-time", "40"),
        ("x-inference-time", "270"),
        ("x-time-per-token", "90"),
    ),
)

_LLAMA = EngineAnswers(
    events=_llama_events,
    body=lambda pieces: _chat_body(pieces, timings=_TIMINGS),
    overloaded=whole(_llama_error("no slot is free", "unavailable_error", 503), 503),
    wrong_request=whole(_llama_error("messages: an array", "invalid_request_error", 400), 400),
    error_event=b"data: "
    + _llama_error("Context size has been exceeded.", "server_error", 500)
    + b"\n\n",
    loading=whole(_llama_error("Loading model", "unavailable_error", 503), 503),
    metrics=_LLAMA_METRICS,
)

_OPENAI = EngineAnswers(
    events=lambda pieces: _chat_events(
        pieces, {"role": "assistant", "content": "", "refusal": None}, {}
    ),
    body=_chat_body,
    overloaded=whole(
        error_body("Rate limit reached", "requests", "rate_limit_exceeded"),
        429,
        ("retry-after", "20"),
        ("retry-after-ms", "19540"),
        ("x-ratelimit-limit-requests", "500"),
        ("x-ratelimit-remaining-requests", "0"),
        ("x-ratelimit-reset-requests", "19.54s"),
    ),
    wrong_request=whole(error_body("no such field", "invalid_request_error", None), 400),
    error_event=event({"error": {"message": "server had an error", "type": "server_error"}}),
)

ENGINE_ANSWERS: Mapping[str, EngineAnswers] = MappingProxyType(
    {
        "vllm": _VLLM,
        "sglang": _SGLANG,
        "tgi": _TGI,
        "llama-server": _LLAMA,
        "openai": _OPENAI,
    }
)
