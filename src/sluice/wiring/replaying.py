"""A journal and settings to the fleet that replays it.

Where the settings name hardware (``sim:…``) the fleet has that; else replicas have what the journal
says of them: limits, what they knew of their speed when they started, and the speed of their steps.
"""

from dataclasses import fields, replace
from typing import Any

from sluice.cluster.classes import ServiceClasses
from sluice.config.load import Loaded
from sluice.config.schema import keys_of
from sluice.config.sections import ModelSection, SloSection
from sluice.config.settings import Settings
from sluice.core.errors import ConfigError
from sluice.core.events import ReplicaLimits
from sluice.core.roster import BatchingLimits
from sluice.planner.recorded import Recorded, RecordedReplica
from sluice.planner.simulation import SimulatedFleet, SimulatedPool
from sluice.planner.steady import Lengths
from sluice.wiring.gateway import pool_limits, tenant_limits
from sluice.wiring.replica_life import batching_limits
from sluice.wiring.simulated import is_simulated
from sluice.wiring.simulation import check, simulated_pool


def settings_of(recorded: Recorded, loaded: Loaded) -> Settings:
    """The settings with the models, replicas and classes of the journal where they name none."""
    settings = loaded.settings
    models = dict(settings.models)
    for name, replicas in recorded.models.items():
        section = models.get(name, ModelSection(source=name))
        if ("models", name, "replicas", "min") not in loaded.origins:
            section = replace(section, replicas=replace(section.replicas, min=len(replicas)))
        models[name] = section
    classes = dict(settings.slo)
    for name, was in recorded.classes.items():
        given = {
            key.field: getattr(settings.slo[name], key.field)
            for written, key in keys_of(SloSection).items()
            if ("slo", name, written) in loaded.origins
        }
        classes[name] = replace(was, **given)
    for name in recorded.classes_named - classes.keys():
        classes[name] = SloSection()
    return replace(settings, models=models, slo=classes)


def replay_fleet(
    recorded: Recorded, before: Settings, after: Settings, load_ns: int
) -> SimulatedFleet:
    """The fleet of the journal with what is different ``after`` from ``before``.

    Raises ``ConfigError`` and ``ModelLoadError``.
    """
    check(after, known=frozenset(recorded.models))
    lengths = Lengths(*recorded.mean_tokens())
    pools = []
    for name, section in after.models.items():
        if is_simulated(section):
            pools.append(simulated_pool(name, section, after, lengths))
        else:
            replica = recorded.models[name][0]
            was = before.models.get(name, section)
            pools.append(_recorded_pool(replica, was, section, after, recorded.began_ns))
    return SimulatedFleet(tuple(pools), tuple(tenant_limits(after.tenants)), load_ns)


def _recorded_pool(
    replica: RecordedReplica,
    before: ModelSection,
    after: ModelSection,
    settings: Settings,
    began_ns: int,
) -> SimulatedPool:
    """The pool of a model as it was, with what is different ``after``."""
    name, speed = replica.model, replica.speed
    if speed is None:
        problem = (
            f"the journal has too few steps of {name} to know how fast it is; record more, or say "
            f"which hardware: --set models.{name}.source=sim:MODEL@GPUxN"
        )
        raise ConfigError((problem,))
    replica_ids = [f"{name}-{number}" for number in range(after.replicas.min)]
    return SimulatedPool(
        pool_limits(name, after, replica_ids),
        _batching(replica, before, after),
        speed,
        ServiceClasses(settings.slo, settings.tenants, after.slo),
        lambda after_ns: speed.ratio(began_ns + after_ns),
        replica.cost,
    )


def _batching(
    replica: RecordedReplica, before: ModelSection, after: ModelSection
) -> BatchingLimits:
    """As recorded, with what the settings change."""
    was = batching_limits(before, _limits(replica.limits, before))
    will = batching_limits(after, _limits(replica.limits, after))
    changed: dict[str, Any] = {
        field.name: getattr(will, field.name)
        for field in fields(BatchingLimits)
        if getattr(will, field.name) != getattr(was, field.name)
    }
    return replace(replica.batching or was, **changed)


def _limits(limits: ReplicaLimits, section: ModelSection) -> ReplicaLimits:
    """What the replica holds where the section bounds it further."""
    return replace(
        limits,
        sequences_max=section.sequences_max or limits.sequences_max,
        context_tokens_max=min(
            limits.context_tokens_max, section.context_tokens_max or limits.context_tokens_max
        ),
    )
