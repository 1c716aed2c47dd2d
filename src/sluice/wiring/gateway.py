"""The composition root of the gateway process: settings to a gateway that can be served.

Models are fetched and prepared here, before any process is started; both report progress to the
caller, which decides how to show it.
"""

import os
import random
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from sluice.catalog.catalogue import Catalogue
from sluice.catalog.models import MODELS
from sluice.cluster.gateway import LocalGateway
from sluice.cluster.local import ReplicaProcess
from sluice.cluster.observer import Observer
from sluice.cluster.served import ServedModel
from sluice.config.sections import CatalogueSection, ModelSection
from sluice.config.settings import Settings
from sluice.core.fleet import Fleet
from sluice.core.pools import PoolLimits
from sluice.executors.openvino_ir import prepare_ir
from sluice.runtime.clock import monotonic_ns, wall_s
from sluice.runtime.generation import ModelCard
from sluice.runtime.model_folder import ModelFolder, read_model_folder
from sluice.runtime.prepare import prepare_model
from sluice.runtime.templates import ChatTemplate
from sluice.runtime.tokenizing import Tokenizer
from sluice.telemetry.metrics import Metrics
from sluice.wiring.boot import ReplicaBoot
from sluice.wiring.journal import open_journal

# A replica with work that says nothing for so long is hung: its steps aim at a tenth of a second.
_SILENCE_S_MAX = 60.0

# Called with what is being done, the bytes done and, if known, all bytes.
Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model that is on this disk in the form that replicas load."""

    name: str
    section: ModelSection
    folder: ModelFolder


def models_of(settings: Settings) -> Mapping[str, ModelSection]:
    """The models to serve: those of the settings, or the catalogue's first one."""
    if settings.models:
        return settings.models
    default = MODELS[0].name
    return {default: ModelSection(source=default)}


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
    threads = _threads_each(len(replicas))
    journal = open_journal(settings.journal, "gateway")
    metrics = Metrics(
        [model.name for model in models],
        buckets=settings.metrics.buckets,
        vllm_aliases=settings.metrics.vllm_aliases,
        journal_dropped=(lambda: journal.dropped) if journal is not None else (lambda: 0),
    )

    def launch(replica_id: str, gateway: LocalGateway) -> ReplicaProcess:
        model = replicas[replica_id]
        boot = ReplicaBoot(
            replica_id=replica_id,
            model=model.name,
            folder=model.folder.path.absolute(),
            threads=model.section.threads or threads,
            section=model.section,
            journal=settings.journal,
        )
        command = (sys.executable, "-m", "sluice.wiring.replica", boot.to_json())
        return ReplicaProcess(replica_id, command, gateway, _SILENCE_S_MAX)

    pools = [_pool_limits(model, replicas) for model in models]
    return LocalGateway(
        fleet=Fleet(pools, chance=random.SystemRandom()),
        models={model.name: _served(model, settings) for model in models},
        replicas={replica_id: model.name for replica_id, model in replicas.items()},
        launch=launch,
        observer=Observer(metrics, journal, monotonic_ns),
        clock=monotonic_ns,
    )


def _threads_each(replicas: int) -> int | None:
    """Processor threads of one replica: all of one's own choice, or an equal share of several."""
    if replicas == 1:
        return None
    return max(1, len(os.sched_getaffinity(0)) // replicas)


def _pool_limits(model: PreparedModel, replicas: Mapping[str, PreparedModel]) -> PoolLimits:
    return PoolLimits(
        model=model.name,
        replica_ids=tuple(one for one, of in replicas.items() if of is model),
        queue_places_max=model.section.queue_requests_max,
        queue_wait_ns_max=int(model.section.queue_wait_s_max * 1e9),
    )


def _served(model: PreparedModel, settings: Settings) -> ServedModel:
    facts = model.folder.facts
    context_tokens_max = facts.context_tokens_max
    if model.section.context_tokens_max is not None:
        context_tokens_max = min(context_tokens_max, model.section.context_tokens_max)
    return ServedModel(
        card=ModelCard(model.name, int(wall_s()), context_tokens_max),
        tokenizer=Tokenizer.load(model.folder),
        template=ChatTemplate(facts, lambda: datetime.now(UTC)),
        slo=settings.slo,
        new_id=lambda: f"call_{uuid.uuid4().hex[:24]}",
    )
