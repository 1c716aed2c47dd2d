"""The whole tree of settings, and what must hold between them.

Seen by wiring, the command line and the loader only: components take their own section. What one
value may be stands in its type (``sections``); here stands what two values may be together.
"""

import ipaddress
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from sluice.config.autoscale import AutoscaleSection, schedule_problems
from sluice.config.pipeline_sections import (
    DocumentsSection,
    PipelineSection,
    pipeline_conflicts,
)
from sluice.config.routes import RouteSection, route_problems, shared_files
from sluice.config.sections import (
    SEQUENCES_MAX_DEFAULT,
    CatalogueSection,
    JournalSection,
    MetricsSection,
    ModelSection,
    PlacementSection,
    ServerSection,
    SloSection,
    TenantSection,
)
from sluice.config.tracing import TracingSection
from sluice.config.units import format_duration, listen_address
from sluice.config.upstreams import contradictions

# What ``service_tier`` says for the default class.
RESERVED_CLASSES = ("auto", "default")


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that can be set. An empty ``models`` means the catalogue's default model."""

    server: ServerSection = field(default_factory=ServerSection)
    """Where the API listens and who may call it."""

    models: Mapping[str, ModelSection] = field(default_factory=dict)
    """Models by the name that clients ask for: one table ``[models.NAME]`` each. With none,
    ``sluice serve`` serves the catalogue's default model."""

    routes: Mapping[str, RouteSection] = field(default_factory=dict)
    """Names that stand for two models: one table ``[routes.NAME]`` each. Simple prompts go to the
    one and complex ones to the other."""

    slo: Mapping[str, SloSection] = field(default_factory=dict)
    """Classes of requests by name: one table ``[slo.NAME]`` each, with the targets and what becomes
    of requests under overload."""

    tenants: Mapping[str, TenantSection] = field(default_factory=dict)
    """Customers by name: one table ``[tenants.NAME]`` each, with their keys, limits and shares."""

    pipelines: Mapping[str, PipelineSection] = field(default_factory=dict)
    """Pipelines by the name that clients ask for: one table ``[pipelines.NAME]`` each. Passages of
    documents are retrieved before a model answers."""

    documents: DocumentsSection = field(default_factory=DocumentsSection)
    """What the embedded retriever searches."""

    placement: PlacementSection = field(default_factory=PlacementSection)
    """Where replicas run."""

    autoscale: AutoscaleSection = field(default_factory=AutoscaleSection)
    """How the number of replicas follows the load, for models with a range of them."""

    journal: JournalSection = field(default_factory=JournalSection)
    """The record that traces and replay read."""

    metrics: MetricsSection = field(default_factory=MetricsSection)
    """Prometheus metrics."""

    tracing: TracingSection = field(default_factory=TracingSection)
    """Spans of requests for an OpenTelemetry collector."""

    catalogue: CatalogueSection = field(default_factory=CatalogueSection)
    """Where models are fetched from and kept."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """Settings that are fine alone and wrong together. The first key is the one to change."""

    keys: tuple[tuple[str, ...], ...]
    message: str


def conflicts(settings: Settings) -> Iterator[Conflict]:
    """Everything that does not fit together."""
    yield from _server_conflicts(settings.server)
    for name, model in settings.models.items():
        yield from _model_conflicts(name, model)
    yield from _route_conflicts(settings)
    for words in schedule_problems(settings.autoscale, frozenset(settings.models)):
        yield Conflict((("autoscale", "schedules"),), words)
    for name, slo in settings.slo.items():
        yield from _slo_conflicts(name, slo)
    for name, pipeline in settings.pipelines.items():
        if name in settings.routes:
            words = f"there is a route called {name} as well; give the pipeline another name"
            yield Conflict((("pipelines", name),), words)
        for key, message in pipeline_conflicts(name, pipeline, settings.models):
            yield Conflict((("pipelines", name, key),), message)
    yield from _unknown_names(settings)
    yield from _circles(settings.models)
    yield from _tracing_conflicts(settings)
    for metric, bounds in settings.metrics.buckets.items():
        rising = all(low < high for low, high in itertools.pairwise(bounds))
        if not bounds or not rising or not all(0 < bound < math.inf for bound in bounds):
            yield Conflict(
                (("metrics", "buckets", metric),), "bucket bounds must be positive and rising"
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``. Names other than ``localhost`` count as
    open."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _tracing_conflicts(settings: Settings) -> Iterator[Conflict]:
    endpoint = settings.tracing.endpoint
    if endpoint is None:
        return
    here = ("tracing", "endpoint")
    if not endpoint.startswith(("http://", "https://")):
        words = f"{endpoint} is no address; write http://HOST:PORT or https://HOST:PORT"
        yield Conflict((here,), words)
    if not settings.journal.enabled:
        words = "spans are made from the journal; leave journal.enabled true"
        yield Conflict((here, ("journal", "enabled")), words)


def _server_conflicts(server: ServerSection) -> Iterator[Conflict]:
    listen, files = ("server", "listen"), (server.tls_cert_file, server.tls_key_file)
    if (files[0] is None) != (files[1] is None):
        yield Conflict(
            (("server", "tls_cert_file"), ("server", "tls_key_file")),
            "tls_cert_file and tls_key_file go together; set both or neither",
        )
    try:
        host, _ = listen_address(server.listen)
    except ValueError as error:
        yield Conflict((listen,), str(error))
        return
    keys = server.api_key_digests or server.tenant_key_digests
    if not (is_loopback(host) or keys or server.allow_unauthenticated):
        yield Conflict(
            (listen, ("server", "allow_unauthenticated"), ("server", "api_key_file")),
            f"{server.listen} can be reached from other machines and no API key is set; put keys "
            f"into ${server.api_keys_env} or server.api_key_file, listen on 127.0.0.1, or say "
            "server.allow_unauthenticated = true",
        )


def _model_conflicts(name: str, model: ModelSection) -> Iterator[Conflict]:
    here = ("models", name)
    for key, message in contradictions(name, model):
        yield Conflict(((*here, key),), message)
    replicas = model.replicas
    if replicas.max is not None and replicas.min > replicas.max:
        yield Conflict(
            ((*here, "replicas", "min"), (*here, "replicas", "max")),
            f"min = {replicas.min} is above max = {replicas.max}",
        )
    elif replicas.max is None and (replicas.warm or not replicas.min):
        key = "warm" if replicas.warm else "min"
        yield Conflict(
            ((*here, "replicas", key), (*here, "replicas", "max")),
            f"{key} = {getattr(replicas, key)} needs max, the most replicas that may run",
        )
    sequences_max = model.sequences_max or SEQUENCES_MAX_DEFAULT
    if model.policy == "static" and model.static_batch > sequences_max:
        yield Conflict(
            ((*here, "static_batch"), (*here, "sequences_max")),
            f"static_batch = {model.static_batch} can never be reached with "
            f"sequences_max = {sequences_max}",
        )


def _route_conflicts(settings: Settings) -> Iterator[Conflict]:
    for name, route in settings.routes.items():
        for key, message in route_problems(name, route, settings.models):
            yield Conflict((("routes", name, key) if key else ("routes", name),), message)
    for name, owner in shared_files(settings.routes):
        words = f"routes.{owner} writes to this file; give each route one of its own"
        yield Conflict((("routes", name, "outcomes"), ("routes", owner, "outcomes")), words)


def _slo_conflicts(name: str, slo: SloSection) -> Iterator[Conflict]:
    here = ("slo", name)
    if name in RESERVED_CLASSES:
        words = f"{name} means the default class in service_tier; give the class another name"
        yield Conflict((here,), words)
    ladder = slo.overload
    if len(set(ladder)) < len(ladder):
        yield Conflict(((*here, "overload"),), "each rung may stand once")
    if "refuse" in ladder[:-1]:
        yield Conflict(((*here, "overload"),), "nothing can come after refuse")
    if slo.e2e_s is not None and slo.ttft_s is not None and slo.e2e_s < slo.ttft_s:
        yield Conflict(
            ((*here, "e2e"), (*here, "ttft")),
            f"e2e = {format_duration(slo.e2e_s)} is below ttft = {format_duration(slo.ttft_s)}: "
            "the whole answer cannot come before its first token",
        )


def _circles(models: Mapping[str, ModelSection]) -> Iterator[Conflict]:
    """Models that stand in for one another: each circle once, at its first model."""
    told: set[str] = set()
    for name in models:
        way = [name]
        following = models[name].smaller
        while following is not None and following in models and following not in way:
            way.append(following)
            following = models[following].smaller
        if following == name and len(way) > 1 and told.isdisjoint(way):
            told.update(way)
            words = " -> ".join([*way, name])
            yield Conflict(
                (("models", name, "smaller"),), f"goes in a circle: {words}; leave one of them out"
            )


def _unknown_names(settings: Settings) -> Iterator[Conflict]:
    """Settings that name a model or a class which is not there."""
    for name, model in settings.models.items():
        here = ("models", name)
        yield from _unknown((*here, "slo"), model.slo, settings.slo, "class")
        others = [other for other in settings.models if other != name]
        yield from _unknown((*here, "smaller"), model.smaller, others, "other model")
        for fallback in model.fallback:
            yield from _unknown((*here, "fallback"), fallback, others, "other model")
    for name, tenant in settings.tenants.items():
        yield from _unknown(("tenants", name, "slo"), tenant.slo, settings.slo, "class")


def _unknown(
    key: tuple[str, ...], name: str | None, known: Iterable[str], what: str
) -> Iterator[Conflict]:
    if name is not None and name not in known:
        told = ", ".join(sorted(known)) or "none"
        yield Conflict((key,), f'there is no {what} "{name}"; configured: {told}')
