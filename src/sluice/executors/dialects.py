"""What differs between the engines behind one OpenAI-shaped API: one table, nothing else.

Read by the client that calls them (``remote.py``), by what reads their metrics (``scrape.py``) and
by whoever has to say a priority or an id in an engine's own terms. Names of metrics are as they are
exposed, newest first: the first that is found counts, so that older versions are understood too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from sluice.executors.stream import OverloadKind


class PriorityOrder(StrEnum):
    """Which number of a request's ``priority`` field is the more urgent."""

    LOWER_FIRST = "lower_first"
    HIGHER_FIRST = "higher_first"
    UNKNOWN_FIELD = "unknown_field"  # the engine has no priorities


@dataclass(frozen=True, slots=True)
class MetricNames:
    """Prometheus names of gauges and counters; empty where the engine has none.

    Samples of one name (per data-parallel rank, per model) are added up, except for ``kv_use``,
    of which the fullest counts.
    """

    waiting: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    kv_use: tuple[str, ...] = ()
    counters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AbortRoute:
    """How a request is stopped by its id.

    ``paths`` are tried in order; one that answers 404 or 405 is not asked again. The id goes into
    ``field`` of a JSON object. An engine that derives its own ids from ours gets a list
    of all ``spellings`` that the id may have there; unknown ones are ignored.
    """

    paths: tuple[str, ...]
    field: str
    spellings: tuple[str, ...] = ()

    def body(self, request_id: str) -> dict[str, str | list[str]]:
        """What to post."""
        if not self.spellings:
            return {self.field: request_id}
        return {self.field: [spelling.format(request_id) for spelling in self.spellings]}


@dataclass(frozen=True, slots=True)
class SleepRoutes:
    """How an engine is told to free the memory of its GPU and to take it back.

    ``state`` answers a JSON object whose ``field`` says whether it sleeps.
    """

    sleep: str
    wake: str
    state: str
    field: str


@dataclass(frozen=True, slots=True)
class OverloadSign:
    """An answer that means: not at this time. ``words`` must occur in the body if given."""

    status: int
    kind: OverloadKind = OverloadKind.BUSY
    words: bytes = b""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One engine.

    ``id_header`` and ``id_field`` say how a request is given its id, ``abort`` how it is stopped
    by that id; all engines also stop when the socket closes. ``overload`` is read from its
    beginning: the first sign that an answer bears tells what it lacks. ``limits_path`` tells how
    much the engine holds, where its list of models does not.
    """

    name: str
    health_path: str
    metrics_path: str | None
    metrics: MetricNames = MetricNames()
    priority: PriorityOrder = PriorityOrder.UNKNOWN_FIELD
    id_header: str | None = None
    id_field: str | None = None
    abort: AbortRoute | None = None
    overload: tuple[OverloadSign, ...] = ()
    limits_path: str | None = None
    sleep: SleepRoutes | None = None

    def priority_value(self, tier: int) -> int | None:
        """The engine's number for one of our tiers, of which 0 is the most urgent."""
        match self.priority:
            case PriorityOrder.LOWER_FIRST:
                return tier
            case PriorityOrder.HIGHER_FIRST:
                return -tier
            case PriorityOrder.UNKNOWN_FIELD:
                return None

    def overload_kind(self, status: int, body: bytes) -> OverloadKind | None:
        """What a refusal lacks; ``None`` if the answer is not about load."""
        for sign in self.overload:
            if sign.status == status and sign.words in body:
                return sign.kind
        return None


# Every engine may stand behind a proxy that limits rates, and 503 is the usual word for `not now`.
_ANY = (OverloadSign(429), OverloadSign(503))


def _times(**histograms: str) -> dict[str, tuple[str, ...]]:
    """Sum and count of the seconds that requests spent in each stage of the engine."""
    return {
        f"{stage}_{ours}": (f"{name}_{theirs}",)
        for stage, name in histograms.items()
        for ours, theirs in (("s", "sum"), ("count", "count"))
    }


VLLM = Dialect(
    name="vllm",
    health_path="/health",
    metrics_path="/metrics",
    metrics=MetricNames(
        waiting=("vllm:num_requests_waiting",),
        running=("vllm:num_requests_running",),
        kv_use=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        counters={
            "preemptions": ("vllm:num_preemptions_total",),
            "prompt_tokens": ("vllm:prompt_tokens_total",),
            "completion_tokens": ("vllm:generation_tokens_total",),
            "prefix_queries": (
                "vllm:prefix_cache_queries_total",
                "vllm:gpu_prefix_cache_queries_total",
            ),
            "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
            **_times(
                queue="vllm:request_queue_time_seconds",
                prefill="vllm:request_prefill_time_seconds",
                decode="vllm:request_decode_time_seconds",
            ),
        },
    ),
    priority=PriorityOrder.LOWER_FIRST,
    id_header="x-request-id",
    id_field="request_id",
    # The second path is that of older servers. The server puts the kind of answer before the id of
    # the header, and the number of the prompt behind it.
    abort=AbortRoute(
        paths=("/inference/v1/abort_requests", "/abort_requests"),
        field="request_ids",
        spellings=("chatcmpl-{}", "cmpl-{}-0"),
    ),
    overload=_ANY,
    # Level 1 keeps the weights in the memory of the host. The routes are there in a server that was
    # started with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode.
    sleep=SleepRoutes("/sleep?level=1", "/wake_up", "/is_sleeping", "is_sleeping"),
)

SGLANG = Dialect(
    name="sglang",
    health_path="/health",
    metrics_path="/metrics",
    metrics=MetricNames(
        waiting=("sglang:num_queue_reqs",),
        running=("sglang:num_running_reqs",),
        kv_use=("sglang:token_usage",),
        counters={
            "preemptions": ("sglang:num_retracted_requests_total",),
            "prompt_tokens": ("sglang:prompt_tokens_total",),
            "completion_tokens": ("sglang:generation_tokens_total",),
            "prefix_hits": ("sglang:cached_tokens_total",),
            # The stages after the queue are told by label; what comes to the same is this.
            **_times(
                queue="sglang:queue_time_seconds", first_token="sglang:time_to_first_token_seconds"
            ),
        },
    ),
    priority=PriorityOrder.HIGHER_FIRST,
    id_field="rid",
    abort=AbortRoute(paths=("/abort_request",), field="rid"),
    overload=_ANY,
)

TGI = Dialect(
    name="tgi",
    health_path="/health",
    metrics_path="/metrics",
    metrics=MetricNames(
        waiting=("tgi_queue_size",),
        running=("tgi_batch_current_size",),
        counters={
            "prefix_hits": ("tgi_request_skipped_tokens_sum",),
            **_times(queue="tgi_request_queue_duration"),
        },
    ),
    overload=_ANY,
    limits_path="/info",
)

LLAMA_SERVER = Dialect(
    name="llama-server",
    health_path="/health",
    metrics_path="/metrics",
    metrics=MetricNames(
        waiting=("llamacpp:requests_deferred",),
        running=("llamacpp:requests_processing",),
        counters={
            "prompt_tokens": ("llamacpp:prompt_tokens_total",),
            "completion_tokens": ("llamacpp:tokens_predicted_total",),
            "prefix_hits": ("llamacpp:prompt_tokens_cached_total",),
        },
    ),
    overload=(OverloadSign(503, OverloadKind.LOADING, b"oading model"), *_ANY),
    limits_path="/props",
)

OPENAI = Dialect(
    name="openai",
    # Vendors have no health route; their list of models costs nothing and needs the key.
    health_path="/v1/models",
    metrics_path=None,
    overload=(
        OverloadSign(429, OverloadKind.QUOTA, b"insufficient_quota"),
        OverloadSign(529),
        *_ANY,
    ),
)

DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {dialect.name: dialect for dialect in (VLLM, SGLANG, TGI, LLAMA_SERVER, OPENAI)}
)
