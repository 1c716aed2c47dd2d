"""The composition root of the gateway process: settings to a gateway that can be served.

Models are fetched and prepared here, before any process is started; both report progress to the
caller, which decides how to show it.
"""

import math
import os
import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

from sluice.catalog.catalogue import Catalogue
from sluice.cluster.calls import AnyModel
from sluice.cluster.classes import ServiceClasses, targets_of
from sluice.cluster.fleet_driver import FleetDriver
from sluice.cluster.gateway import LocalGateway
from sluice.cluster.members import Launch
from sluice.cluster.observer import Observer
from sluice.cluster.placement.replica import Patience, PlacedReplica, ReplicaListener
from sluice.cluster.remote_model import RemoteModel
from sluice.cluster.served import ServedModel
from sluice.config.sections import CatalogueSection, ModelSection, TenantSection
from sluice.config.settings import Settings
from sluice.core.events import Reconfigured
from sluice.core.fleet import Fleet
from sluice.core.limits import PoolLimits, TenantLimits
from sluice.executors.openvino_ir import prepare_ir
from sluice.runtime.clock import monotonic_ns, wall_s
from sluice.runtime.generation import ModelCard
from sluice.runtime.grammar_trial import GrammarTrial
from sluice.runtime.model_folder import ModelFolder, read_model_folder
from sluice.runtime.prepare import prepare_model
from sluice.runtime.templates import ChatTemplate
from sluice.runtime.tokenizing import TextTokens, Tokenizer
from sluice.runtime.word_pieces import WordPieces
from sluice.telemetry.deployments import keep_deployment, last_deployment
from sluice.telemetry.metric_table import bounds_with_targets
from sluice.telemetry.metrics import Metrics
from sluice.telemetry.records import Deployment
from sluice.wiring.boot import ReplicaBoot
from sluice.wiring.defaults import models_of
from sluice.wiring.deployment import PreparedModel, deployment
from sluice.wiring.in_force import reloaded, started
from sluice.wiring.journal import open_journal
from sluice.wiring.placing import Placing, needs_of, placing
from sluice.wiring.remote import (
    RemoteIds,
    relaying,
    remote_deployment,
    remote_launches,
    remote_limits,
    remote_model,
)
from sluice.wiring.routes import LoadedRoutes, load_routes
from sluice.wiring.scaling import monday_ns, replica_names, scale_limits
from sluice.wiring.simulated import SimulatedModel, is_simulated, simulated_model

# The program of a replica process, of a model that is computed and of one that is simulated.
_PROGRAMS = ("sluice.wiring.replica", "sluice.wiring.simulated_replica")
# Called with what is being done, the bytes done and, if known, all bytes.
Progress = Callable[[str, int, int | None], None]


def prepare(
    models: Mapping[str, ModelSection], section: CatalogueSection, progress: Progress
) -> tuple[PreparedModel, ...]:
    """Fetch and convert what is not on this disk yet. Raises ``ModelLoadError``."""

    def tell(what: str) -> None:
        progress(what, 0, None)

    catalogue = Catalogue(section)
    prepared = []
    for name, model in models.items():
        if model.is_remote:
            continue
        if is_simulated(model):
            prepared.append(PreparedModel(name, model, simulated_model(model)))
            continue
        found = catalogue.fetch(model.source, partial(progress, f"fetching {name}"))
        write_graph = partial(prepare_ir, progress=tell)
        path = prepare_model(found.path, section.prepared_dir, write_graph, tell)
        prepared.append(PreparedModel(name, model, read_model_folder(path)))
    return tuple(prepared)


def make_gateway(
    settings: Settings, models: tuple[PreparedModel, ...], ids: RemoteIds
) -> LocalGateway:
    """A gateway over replica processes and remote engines, not started yet.

    ``models`` are those that run here. ``ids`` name the replicas of remote models, and are the same
    for ``reconfigure``.
    """
    ids.addresses.look(settings)
    settings = ids.addresses.resolved(settings)
    sections = models_of(settings)
    here = {model.name: model for model in models}
    processes = {
        replica_id: model
        for model in models
        for replica_id in replica_names(model.name, model.section)
    }
    trial = GrammarTrial()
    served: dict[str, AnyModel] = {}
    places = placing(settings.placement)
    launches: dict[str, Launch] = dict.fromkeys(processes, _launch(processes, settings, places))
    model_of = {replica_id: model.name for replica_id, model in processes.items()}
    for name, section in sections.items():
        if section.is_remote:
            remote = remote_model(name, section, settings)
            engines = remote_launches(ids.of(name, section), section, remote, places)
            served[name] = remote
            launches |= engines
            model_of |= dict.fromkeys(engines, name)
        else:
            served[name] = _served(here[name], settings, trial)
    routes = load_routes(settings)
    told = deployment(models) | remote_deployment(sections)
    observer = _observer(settings, list(sections), _started(settings, models, told))
    fleet = Fleet(
        pools_of(settings, model_of),
        chance=random.SystemRandom(),
        tenants=tenant_limits(settings.tenants),
        routes=tuple(routes.limits.values()),
    )
    driver = FleetDriver(
        fleet=fleet,
        models=served,
        replicas=model_of,
        launch=lambda replica_id, listener: launches[replica_id](replica_id, listener),
        observer=observer,
        clock=monotonic_ns,
    )
    gateway = LocalGateway(driver, served, observer, relaying(sections))
    gateway.routes = gateway.operated.routes(routes.limits, routes.classifiers)
    return gateway


def pools_of(settings: Settings, model_of: Mapping[str, str]) -> tuple[PoolLimits, ...]:
    """What the fleet holds to for each model; ``model_of`` are the models of replicas."""
    monday = monday_ns(monotonic_ns(), wall_s())
    return tuple(
        replace(
            pool_limits(name, section, [one for one, of in model_of.items() if of == name]),
            scale=scale_limits(name, section, settings.autoscale, monday),
        )
        for name, section in models_of(settings).items()
    )


def _started(
    settings: Settings, models: Sequence[PreparedModel], told: Mapping[str, str]
) -> Deployment:
    """What begins, with what is different from the last run that wrote to the same journal."""
    folder = settings.journal.dir if settings.journal.enabled else None
    now = started(settings, models, told, None if folder is None else last_deployment(folder))
    if folder is not None:
        keep_deployment(folder, now.settings)
    return now


def _observer(settings: Settings, models: Sequence[str], told: Deployment) -> Observer:
    journal = open_journal(settings.journal, "gateway")
    metrics = Metrics(
        models,
        slo_classes=list(settings.slo),
        buckets=bounds_with_targets(settings.metrics.buckets, _targets_by_metric(settings)),
        vllm_aliases=settings.metrics.vllm_aliases,
        journal_dropped=(lambda: journal.dropped) if journal is not None else (lambda: 0),
    )
    observer = Observer(metrics, journal, monotonic_ns, told)
    observer.know_classes(targets_of(settings.slo))
    return observer


def _targets_by_metric(settings: Settings) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for one in targets_of(settings.slo):
        for target, seconds in one.seconds.items():
            found.setdefault(f"sluice_{target}_seconds", []).append(seconds)
    return found


def _launch(replicas: Mapping[str, PreparedModel], settings: Settings, places: Placing) -> Launch:
    """What makes a replica by its id, in the place that it has."""
    shared = _threads_each(len(replicas)) if settings.placement.kind == "local" else None

    def launch(replica_id: str, listener: ReplicaListener) -> PlacedReplica:
        model = replicas[replica_id]
        section = model.section
        needs = needs_of(section, model.path)
        threads = section.threads or (math.ceil(needs.cpus) if needs.cpus else shared)
        boot = ReplicaBoot(
            replica_id=replica_id,
            model=model.name,
            folder=model.path,
            threads=threads,
            section=section,
            journal=settings.journal,
        )
        patience = Patience(section.load_s_max, section.silence_s_max)
        there = places.replica(boot, _PROGRAMS[model.is_simulated], needs)
        return PlacedReplica(replica_id, there, listener, patience)

    return launch


def _threads_each(replicas: int) -> int | None:
    """Processor threads of one replica: all of one's own choice, or an equal share of several."""
    if replicas <= 1:
        return None
    return max(1, len(os.sched_getaffinity(0)) // replicas)


def pool_limits(name: str, section: ModelSection, replica_ids: Sequence[str]) -> PoolLimits:
    """What the fleet holds to for one model, from its settings."""
    aging_s = section.aging_s
    return PoolLimits(
        model=name,
        replica_ids=tuple(replica_ids),
        queue_places_max=section.queue_requests_max,
        queue_wait_ns_max=round(section.queue_wait_s_max * 1e9),
        queue_tokens_max=section.queue_tokens_max,
        queue_bytes_max=section.queue_bytes_max,
        smaller=section.smaller,
        fallback=section.fallback,
        utilisation=section.utilisation,
        headroom=section.headroom,
        aging_ns=None if aging_s is None else round(aging_s * 1e9),
        weights=tuple(one.weight for one in section.urls),
        remote=remote_limits(section) if section.is_remote else None,
    )


def tenant_limits(tenants: Mapping[str, TenantSection]) -> list[TenantLimits]:
    """What the fleet holds to for each tenant, from its settings."""
    return [
        TenantLimits(
            name=name,
            requests_per_minute=section.requests_per_minute,
            tokens_per_minute=section.tokens_per_minute,
            concurrency=section.concurrency,
            weight=section.weight,
        )
        for name, section in tenants.items()
    ]


def _tokenizer(folder: ModelFolder | SimulatedModel) -> TextTokens:
    if isinstance(folder, SimulatedModel):
        return WordPieces(folder.facts)
    return Tokenizer.load(folder)


def _served(model: PreparedModel, settings: Settings, trial: GrammarTrial) -> ServedModel:
    card = ModelCard(
        id=model.name,
        created_s=int(wall_s()),
        context_tokens_max=model.context_tokens_max,
        fingerprint=model.fingerprint,
    )
    return ServedModel(
        card=card,
        tokenizer=_tokenizer(model.folder),
        template=ChatTemplate(model.folder.facts, lambda: datetime.now(UTC)),
        classes=ServiceClasses(settings.slo, settings.tenants, model.section.slo),
        new_id=lambda: f"call_{uuid.uuid4().hex[:24]}",
        trial=trial,
    )


def reconfigure(
    gateway: LocalGateway,
    settings: Settings,
    routes: LoadedRoutes | None,
    ids: RemoteIds,
    told: Mapping[str, str],
) -> None:
    """Let what settings say of models, routes, classes and tenants hold while requests run.

    ``routes`` are those of the settings, loaded, ``None`` where they are as before; ``ids`` are
    those that the gateway was made with.
    ``told`` are words for the journal, which gets what is different from before.
    """
    settings = ids.addresses.resolved(settings)
    sections = models_of(settings)
    model_of = {one.id: one.model for pool in gateway.pools() for one in pool.replicas}
    launches: dict[str, Launch] = {}
    for name, section in sections.items():
        served = gateway.served(name)
        if isinstance(served, RemoteModel):
            wanted = ids.of(name, section)
            model_of = {one: model for one, model in model_of.items() if model != name}
            model_of |= dict.fromkeys(wanted, name)
            launches |= remote_launches(wanted, section, served)
    held = {name: one.limits for name, one in gateway.routes.items()}
    limits = Reconfigured(
        pools_of(settings, model_of),
        tuple(tenant_limits(settings.tenants)),
        tuple((held if routes is None else routes.limits).values()),
    )
    classes = {
        name: ServiceClasses(settings.slo, settings.tenants, section.slo)
        for name, section in sections.items()
    }
    gateway.relaying = relaying(sections)
    gateway.operated.reconfigure(
        limits,
        classes,
        lambda one, listener: launches[one](one, listener),
        reloaded(gateway.operated.deployment, settings, told),
    )
    if routes is not None:
        gateway.routes = gateway.operated.routes(routes.limits, routes.classifiers, gateway.routes)
    if settings.journal.enabled:
        keep_deployment(settings.journal.dir, gateway.operated.deployment.settings)
