"""The composition root of the gateway process: settings to a gateway that can be served.

Models are fetched and prepared here, before any process is started; both report progress to the
caller, which decides how to show it.
"""

import os
import random
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial

from sluice.catalog.catalogue import Catalogue
from sluice.cluster.classes import ServiceClasses
from sluice.cluster.fleet_driver import FleetDriver, Launch
from sluice.cluster.gateway import LocalGateway
from sluice.cluster.local import Patience, ReplicaListener, ReplicaProcess
from sluice.cluster.observer import Observer
from sluice.cluster.served import ServedModel
from sluice.config.sections import CatalogueSection, JournalSection, ModelSection, TenantSection
from sluice.config.settings import Settings
from sluice.core.fleet import Fleet
from sluice.core.pools import PoolLimits
from sluice.core.tenants import TenantLimits
from sluice.executors.openvino_ir import prepare_ir
from sluice.runtime.clock import monotonic_ns, wall_s
from sluice.runtime.generation import ModelCard
from sluice.runtime.grammar_trial import GrammarTrial
from sluice.runtime.model_folder import read_model_folder
from sluice.runtime.prepare import prepare_model
from sluice.runtime.templates import ChatTemplate
from sluice.runtime.tokenizing import Tokenizer
from sluice.telemetry.metrics import Metrics
from sluice.wiring.boot import ReplicaBoot
from sluice.wiring.deployment import PreparedModel, deployment
from sluice.wiring.journal import open_journal

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
        found = catalogue.fetch(model.source, partial(progress, f"fetching {name}"))
        write_graph = partial(prepare_ir, progress=tell)
        path = prepare_model(found.path, section.prepared_dir, write_graph, tell)
        prepared.append(PreparedModel(name, model, read_model_folder(path)))
    return tuple(prepared)


def make_gateway(settings: Settings, models: tuple[PreparedModel, ...]) -> LocalGateway:
    """A gateway over replica processes, not started yet."""
    replicas = {
        f"{model.name}-{number}": model
        for model in models
        for number in range(model.section.replicas.min)
    }
    journal = open_journal(settings.journal, "gateway")
    metrics = Metrics(
        [model.name for model in models],
        slo_classes=list(settings.slo),
        buckets=settings.metrics.buckets,
        vllm_aliases=settings.metrics.vllm_aliases,
        journal_dropped=(lambda: journal.dropped) if journal is not None else (lambda: 0),
    )

    pools = [
        pool_limits(model.name, model.section, [one for one, of in replicas.items() if of is model])
        for model in models
    ]
    trial = GrammarTrial()
    served = {model.name: _served(model, settings, trial) for model in models}
    observer = Observer(metrics, journal, monotonic_ns, deployment(models))
    driver = FleetDriver(
        fleet=Fleet(pools, chance=random.SystemRandom(), tenants=tenant_limits(settings.tenants)),
        models=served,
        replicas={replica_id: model.name for replica_id, model in replicas.items()},
        launch=_launch(replicas, settings.journal),
        observer=observer,
        clock=monotonic_ns,
    )
    return LocalGateway(driver, served, observer)


def _launch(replicas: Mapping[str, PreparedModel], journal: JournalSection) -> Launch:
    """What makes the process of a replica by its id."""
    threads = _threads_each(len(replicas))

    def launch(replica_id: str, listener: ReplicaListener) -> ReplicaProcess:
        model = replicas[replica_id]
        boot = ReplicaBoot(
            replica_id=replica_id,
            model=model.name,
            folder=model.folder.path.absolute(),
            threads=model.section.threads or threads,
            section=model.section,
            journal=journal,
        )
        command = (sys.executable, "-m", "sluice.wiring.replica", boot.to_json())
        patience = Patience(model.section.load_s_max, model.section.silence_s_max)
        return ReplicaProcess(replica_id, command, listener, patience)

    return launch


def _threads_each(replicas: int) -> int | None:
    """Processor threads of one replica: all of one's own choice, or an equal share of several."""
    if replicas == 1:
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
        utilisation=section.utilisation,
        headroom=section.headroom,
        aging_ns=None if aging_s is None else round(aging_s * 1e9),
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


def _served(model: PreparedModel, settings: Settings, trial: GrammarTrial) -> ServedModel:
    card = ModelCard(
        id=model.name,
        created_s=int(wall_s()),
        context_tokens_max=model.context_tokens_max,
        fingerprint=model.fingerprint,
    )
    return ServedModel(
        card=card,
        tokenizer=Tokenizer.load(model.folder),
        template=ChatTemplate(model.folder.facts, lambda: datetime.now(UTC)),
        classes=ServiceClasses(settings.slo, settings.tenants, model.section.slo),
        new_id=lambda: f"call_{uuid.uuid4().hex[:24]}",
        trial=trial,
    )
