"""Settings to a fleet that is simulated: the same settings that ``sluice serve`` takes."""

from collections.abc import Mapping
from dataclasses import replace

from sluice.cluster.classes import ServiceClasses
from sluice.config.sections import ModelSection
from sluice.config.settings import Settings, conflicts
from sluice.core.errors import ConfigError
from sluice.planner.simulation import SimulatedFleet, SimulatedPool
from sluice.planner.steady import CHUNK_TOKENS_MAX, Lengths
from sluice.wiring.gateway import pool_limits, tenant_limits
from sluice.wiring.replica_life import batching_limits
from sluice.wiring.scaling import replica_names, scale_limits
from sluice.wiring.simulated import is_simulated, simulated_model


def simulated_fleet(settings: Settings, lengths: Lengths, load_ns: int) -> SimulatedFleet:
    """The fleet of these settings for requests of these mean lengths.

    Raises ``ConfigError`` for settings that contradict each other and for models that cannot be
    simulated, and ``ModelLoadError`` for one that is not known or does not fit.
    """
    check(settings)
    return SimulatedFleet(
        tuple(
            simulated_pool(name, section, settings, lengths)
            for name, section in settings.models.items()
        ),
        tuple(tenant_limits(settings.tenants)),
        load_ns,
    )


def check(settings: Settings, known: frozenset[str] = frozenset()) -> None:
    """What must hold between the settings, but for those of the server.

    The speed of ``known`` models is known. Raises ``ConfigError``.
    """
    problems = [
        f"{'.'.join(conflict.keys[0])}: {conflict.message}"
        for conflict in conflicts(settings)
        if conflict.keys[0][0] != "server"
    ]
    if not settings.models:
        problems.append("no model is named: give --model and --gpu, or -c with [models.NAME]")
    problems += _not_simulated(settings.models, known)
    if problems:
        raise ConfigError(tuple(problems))


def _not_simulated(models: Mapping[str, ModelSection], known: frozenset[str]) -> list[str]:
    return [
        f"models.{name} is {section.source!r}, of which no speed is known; say which hardware: "
        f"--set models.{name}.source=sim:MODEL@GPUxN, as in sim:llama-3.1-8b@h100x1"
        for name, section in models.items()
        if not is_simulated(section) and name not in known
    ]


def simulated_pool(
    name: str, section: ModelSection, settings: Settings, lengths: Lengths
) -> SimulatedPool:
    """The pool of a model on the hardware that its source names. Raises ``ModelLoadError``."""
    model = simulated_model(section, lengths)
    if section.prefill_chunk_tokens_max is None:
        section = replace(section, prefill_chunk_tokens_max=CHUNK_TOKENS_MAX)
    limits = pool_limits(name, section, replica_names(name, section))
    return SimulatedPool(
        replace(limits, scale=scale_limits(name, section, settings.autoscale, 0)),
        batching_limits(section, model.limits),
        model.times,
        ServiceClasses(settings.slo, settings.tenants, section.slo),
    )
