"""The HTTP reference: tables from the code, the rules between them in words.

Called by ``tools.reference``. Routes, fields and ranges come from the server's own tables; a field
without a note here fails the run, and tests/architecture/test_docs.py finds codes without a row.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from sluice.core.request import TIER_MAX
from sluice.server.auth import Permission, permission_of
from sluice.server.limits import Limits
from sluice.server.options import LOGPROBS_MAX, RANGES, STOPS_MAX
from sluice.server.paths import NOT_SUPPORTED
from sluice.server.routes import routes
from sluice.server.structure import STRUCTURE_MAX
from sluice.server.wire import (
    ENTRIES_MAX,
    MESSAGES_MAX,
    TOKEN_IDS_MAX,
    ChatRequest,
    CompletionRequest,
    Options,
    ResponsesRequest,
)
from sluice.testing.operations import FakeOperations

_LIMITS = Limits()
_NUMBERS: Mapping[str, float] = {
    **asdict(_LIMITS),
    "MESSAGES_MAX": MESSAGES_MAX,
    "ENTRIES_MAX": ENTRIES_MAX,
    "TOKEN_IDS_MAX": TOKEN_IDS_MAX,
    "STRUCTURE_MAX": STRUCTURE_MAX,
    "TIER_MAX": TIER_MAX,
}
# Prose with the names of ``_NUMBERS`` in braces.
_RULES_FILE = Path(__file__).with_name("http_rules.md")

_KEYS = {
    Permission.OPEN: "none",
    Permission.METRICS: "none; with `metrics_open = false` an API key or the admin key",
    Permission.INFERENCE: "an API key, where keys are set",
    Permission.DASHBOARD: "none where there are no keys at all, else the admin key",
    Permission.ADMIN: "the admin key; closed without one",
}

_WHAT = {
    "/v1/chat/completions": "a chat completion, streamed or whole",
    "/v1/completions": "continues text, without a chat template",
    "/v1/responses": "a response, for text and function tools; nothing is stored",
    "/v1/feedback": "what became of an answer, for the next training of a route; see "
    "[routing](../routing.md)",
    "/v1/models": "the models and routes that can be asked for",
    "/v1/models/{id}": "one of them; `max_model_len` is the context that one request can get, "
    "where it is known",
    **dict.fromkeys(
        (
            "/v1/embeddings",
            "/v1/rerank",
            "/rerank",
            "/v1/score",
            "/score",
            "/tokenize",
            "/detokenize",
        ),
        "of remote engines, passed through to the one that has the model",
    ),
    "/health": "200 as long as the process answers",
    "/ready": "200 where calls can be served at this moment, else 503 with the reason",
    "/metrics": "[metrics](metrics.md) in Prometheus' text format",
    "/dashboard": "live charts of this server",
    "/dashboard/style.css": "part of the dashboard",
    "/dashboard/app.js": "part of the dashboard",
    "/dashboard/charts.js": "part of the dashboard",
    "/dashboard/data": "what the dashboard draws, as JSON: samples of the last 15 minutes "
    "(`model`, `since`, `window`)",
    "/dashboard/request": "the life of a request that the dashboard shows (`id`)",
    "/admin/replicas": "state of each replica",
    "/admin/scaling": "how many replicas of each model are to serve and why, and how long their "
    "starts took by stage",
    "/admin/scale": "lets so many `replicas` of a `model` serve; `null` leaves that to the load",
    "/admin/config": "every setting in force and where it comes from; secrets masked",
    "/admin/reload": "reads the settings again and applies what can change without a restart",
    "/admin/events": "notes what happened elsewhere (`what`, `details`), such as a rollout of an "
    "engine, in the journal",
    "/admin/replicas/{id}": "`/drain` gives a replica no more requests, `/undrain` uses it again",
}


@dataclass(frozen=True, slots=True)
class Code:
    """What a client finds in ``error.code`` and in ``x-sluice-reason``."""

    name: str
    status: str
    meaning: str
    advice: str


CODES = (
    Code("invalid_request", "400", "A parameter is missing, of the wrong type or out of its range.",
         "Change the field that `param` names."),
    Code("context_length_exceeded", "400", "The prompt, with `max_tokens`, is over the context.",
         "Shorten the prompt or lower `max_tokens`."),
    Code("too_many_choices", "400", "`n` is more than one replica can generate at once.",
         "Lower `n`, or send several requests."),
    Code("too_many_prompts", "400", "The list has more prompts than can ever be served at once.",
         "Send fewer prompts in one request."),
    Code("retrieval_failed", "503", "A pipeline could not retrieve in time, and its settings or "
         "`x-sluice-degrade: never` want no answer without that.",
         "Wait for `Retry-After`, or allow an answer without passages."),
    Code("headers_too_large", "431", "The request head is over `server.header_bytes_max`.",
         "Send fewer or shorter headers."),
    Code("invalid_api_key", "401", "No key was sent, or one that is not known.",
         "Send `Authorization: Bearer KEY`."),
    Code("permission_denied", "403", "The key does not carry the permission for this path.",
         "Use the other kind of key; set `server.admin_key_env` to open `/admin`."),
    Code("model_not_found", "404", "No model of that name is served.", "See `GET /v1/models`."),
    Code("invalid_settings", "400", "`/admin/reload`: the settings have mistakes; nothing was "
         "changed. `problems` lists all.", "Mend them; `sluice config check` finds the same."),
    Code("not_found", "404", "Nothing is served at this path.", "The message names what is there."),
    Code("method_not_allowed", "405", "The path takes another method.", "See `Allow`."),
    Code("body_too_slow", "408", f"The body was not complete within {_LIMITS.body_s_max:g} s.",
         "Send it at once."),
    Code("body_too_large", "413", "The body is over `server.body_bytes_max`.",
         "Send less, or raise the limit."),
    Code("queue_full", "429", "All places of the model are taken, or kept for clients that were "
         "told to come now.", "Wait for `Retry-After`."),
    Code("queue_tokens", "429", "The prompts that wait are over `queue_tokens_max`.",
         "Wait for `Retry-After`, or send a shorter prompt."),
    Code("no_free_place", "429", "It cannot start at once, and its class does not wait.",
         "Wait for `Retry-After`, or allow `queue` in the class's `overload`."),
    Code("gives_way", "429", "Beside it, another request would be late or without room.",
         "Wait for `Retry-After`."),
    Code("queue_bytes", "429", "The bodies that wait are over `queue_bytes_max`.",
         "Wait for `Retry-After`, or send a shorter request."),
    Code("predicted_late", "429", "The first token is predicted after the target of the class.",
         "Wait for `Retry-After`, or ask in a class with more time."),
    Code("deadline_infeasible", "429", "The answer is predicted to take longer than its deadline.",
         "Lower `max_tokens`, or allow more time."),
    Code("deadline_past", "429", "The deadline had passed when the request was looked at.",
         "Allow more time."),
    Code("queue_deadline", "429", "The request waited for its longest time, or to its deadline.",
         "Wait for `Retry-After`."),
    Code("requests_per_minute", "429", "The account is over its requests per minute.",
         "Wait for `Retry-After`; see `x-ratelimit-*`."),
    Code("tokens_per_minute", "429", "The account is over its tokens per minute, with all that the "
         "request may generate.", "Wait for `Retry-After`, or lower `max_tokens`."),
    Code("concurrency", "429", "The account has as many requests at a time as it may.",
         "Wait for one to end."),
    Code("deadline_expired", "429", "The deadline passed before the answer was complete.",
         "Ask for less, or allow more time."),
    Code("not_ready", "503", "No replica of the model is ready.", "Wait for `Retry-After`."),
    Code("not_held", "503", "No replica of the model is ready, and the start of one takes longer "
         "than requests are held (`autoscale.hold_max`).", "Wait for `Retry-After`."),
    Code("held_full", "503", "No replica of the model is ready, and as many requests as may are "
         "held until one is (`autoscale.hold_requests_max`).", "Wait for `Retry-After`."),
    Code("load_failed", "503", "The model could not be loaded.", "See the server's log."),
    Code("draining", "503", "The server is shutting down and admits nothing more.",
         "Send it to another server."),
    Code("shutting_down", "503", "The server was shut down before the answer was complete.",
         "Send it again."),
    Code("upstream_busy", "429", "The remote engine takes no more requests, and asks to be left "
         "alone for longer than the request may wait.", "Wait for `Retry-After`."),
    Code("engine_refused", "as the engine says", "A remote engine finds the request wrong. The "
         "body is its own.", "Change what it names."),
    Code("cancelled", "503", "The request was cancelled on the server's side.", "Send it again."),
    Code("bodies", "503", "Large bodies being received are over `server.bodies_bytes_max`.",
         "Wait for `Retry-After`."),
    Code("outcome_not_kept", "503", "`/v1/feedback`: the file of outcomes cannot be written.",
         "Send it again later; the server's log has the reason."),
    Code("connections", "503", "Too many connections are open.", "Close idle ones."),
    Code("model_not_loaded", "503", "The model could not be used.", "See the server's log."),
    Code("engine_error", "500, 502 or 504", "The engine failed, or no answer was complete within "
         "`server.request_max` (504).", "Send it again; see the server's log."),
    Code("replica_lost", "502", "The replica was lost after text had been sent, or twice.",
         "Send it again."),
    Code("internal_error", "500", "A bug in sluice.", "See the server's log under the request id."),
)  # fmt: skip


# Field: what it accepts where no range says so, its default, and what it does.
NOTES: Mapping[str, tuple[str, str, str]] = {
    "model": ("text", "required", "a name from `GET /v1/models`, exactly as it stands there"),
    "stream": ("true, false", "false", "answer as an event stream"),
    "stream_options": ("object", "none", "`include_usage`: a last chunk with token counts"),
    "max_tokens": ("", "", "most tokens of each choice; see below"),
    "max_completion_tokens": ("", "none", "the same; wins over `max_tokens`"),
    "max_output_tokens": ("", "rest of the context", "most tokens of the answer"),
    "temperature": ("", "1", "0 takes the most likely token each time"),
    "top_p": ("", "1", "smallest set of tokens with this probability"),
    "n": (f"1 to {_LIMITS.choices_max}", "1", "choices; see below"),
    "stop": (f"text or up to {STOPS_MAX} texts", "none", "stop strings; see below"),
    "seed": ("signed 64-bit", "none", "the same draws for the same request"),
    "presence_penalty": ("", "0", "lowers tokens that were generated"),
    "frequency_penalty": ("", "0", "lowers tokens by how often they were generated"),
    "logit_bias": (f"up to {TOKEN_IDS_MAX} token ids to -100 to 100", "none", "added to logits"),
    "user": ("text", "none", "accepted, changes nothing"),
    "service_tier": ("text", "auto", "name of an SLO class; see below"),
    "priority": ("", "of the class", "vendor extension: 0 is the most urgent; see below"),
    "top_k": ("", "0", "vendor extension: the k most likely tokens; -1 and 0 are all"),
    "min_p": ("", "0", "vendor extension: least probability, relative to the most likely token"),
    "repetition_penalty": ("", "1", "vendor extension: divides logits of tokens that occurred"),
    "ignore_eos": ("true, false", "false", "vendor extension: go on after the end token"),
    "min_tokens": ("", "0", "vendor extension: no end before so many tokens"),
    "stop_token_ids": (f"list of up to {TOKEN_IDS_MAX} token ids", "none",
                       "vendor extension: tokens that end the output"),
    "messages": (f"list of 1 to {MESSAGES_MAX}", "required",
                 "content is text or a list of text parts"),
    "logprobs": ("true, false", "false", "log-probabilities of the tokens"),
    "top_logprobs": ("", "0", "likely alternatives of each token"),
    "response_format": ("object", "text", "`text`, `json_object` or `json_schema`"),
    "tools": (f"list of up to {ENTRIES_MAX}", "none", "function tools"),
    "tool_choice": ("text or object", "auto", "`auto`, `none`, `required` or one function"),
    "parallel_tool_calls": ("true, false", "true", "accepted, changes nothing"),
    "functions": ("list", "none", "refused unless empty; use `tools`"),
    "modalities": ("list", "none", 'refused unless `["text"]`'),
    "chat_template_kwargs": ("object", "none", "vendor extension: variables of the template"),
    "prompt": ("text, token ids, or a list of these", "required", "what is continued; see below"),
    "echo": ("true, false", "false", "put the prompt in front; not with `logprobs` or token ids"),
    "suffix": ("text", "none", "refused unless empty"),
    "best_of": ("number", "n", "refused unless equal to `n`"),
    "input": ("text or list of items", "required", "messages, function calls and their outputs"),
    "instructions": ("text", "none", "becomes a system message in front"),
    "include": ("list", "none", "`message.output_text.logprobs` gives log-probabilities"),
    "text": ("object", "text", "`format`: `text`, `json_object` or `json_schema`"),
    "metadata": ("object of texts", "none", "repeated in the answer"),
    "store": ("true, false", "false", "true is refused; see below"),
    "background": ("true, false", "false", "true is refused"),
    "previous_response_id": ("text", "none", "refused"),
    "conversation": ("text or object", "none", "refused"),
    "truncation": ("text", "disabled", "refused unless `disabled`"),
}  # fmt: skip


# Fields that mean another thing on one route.
_SPECIAL: Mapping[tuple[type, str], tuple[str, str, str]] = {
    (CompletionRequest, "logprobs"): (
        f"0 to {LOGPROBS_MAX}",
        "none",
        "with likely alternatives",
    ),
    (ResponsesRequest, "prompt"): ("object", "none", "refused: no prompts are kept here"),
}


def http_lines() -> Iterator[str]:
    """The lines of the page."""
    yield from ("# HTTP", "", "OpenAI's API, as far as it is listed here.", "")
    yield from ("| method | path | what | key |", "|---|---|---|---|")
    yield from _routes()
    starts = ", ".join(f"`{path}`" for path in NOT_SUPPORTED)
    yield from ("", f"Models that run here do not have, answered with 404 or 400: {starts}.")
    yield from ("", "GET paths take HEAD too, all take OPTIONS. Paths are compared byte for byte.")
    yield from _fields("Fields of chat and text completions", Options, None)
    yield from _fields("Fields of `/v1/chat/completions`", ChatRequest, Options)
    yield from _fields("Fields of `/v1/completions`", CompletionRequest, Options)
    yield from _fields("Fields of `/v1/responses`", ResponsesRequest, None)
    rules = _RULES_FILE.read_text(encoding="utf-8").format_map(_NUMBERS)
    yield from ("", *rules.splitlines())
    yield from ("", "## Codes", "")
    yield 'Errors have the body `{"error": {"message", "type", "param", "code"}}`; refusals by'
    yield "admission also `measured` and `threshold`. The code is in `x-sluice-reason` as well."
    yield from ("", "| code | status | meaning | what to do |", "|---|---|---|---|")
    for code in CODES:
        yield f"| `{code.name}` | {code.status} | {code.meaning} | {code.advice} |"


def _routes() -> Iterator[str]:
    served = routes(FakeOperations(), remote=True)
    beginning = {path + b"{id}": route for path, route in served.beginning.items()}
    for raw_path, route in {**served.exact, **beginning}.items():
        path, method = raw_path.decode(), route.method
        yield f"| {method} | `{path}` | {_WHAT[path]} | {_KEYS[permission_of(path.encode())]} |"


def _fields(title: str, kind: type[msgspec.Struct], without: type | None) -> Iterator[str]:
    left_out = {field.name for field in msgspec.structs.fields(without)} if without else set()
    yield from ("", f"## {title}", "", "| field | accepted | default | meaning |")
    yield "|---|---|---|---|"
    for field in msgspec.structs.fields(kind):
        if field.name not in left_out:
            note = _SPECIAL.get((kind, field.name), NOTES[field.name])
            accepted, default, meaning = note
            accepted = accepted or f"{RANGES[field.name]}"
            default = default or "see below"
            yield f"| `{field.name}` | {accepted} | {default} | {meaning} |"
