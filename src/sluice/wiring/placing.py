"""Settings to placements: where a replica of a model runs, and what it takes there."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.cluster.placement.engine import PlaceEngine
from sluice.cluster.placement.local import LocalPlacement, Machine
from sluice.cluster.placement.placed import Needs, Place
from sluice.config.sections import ModelSection, PlacementSection
from sluice.config.settings import Settings
from sluice.core.errors import ConfigError
from sluice.runtime.clock import monotonic_ns
from sluice.wiring.boot import ReplicaBoot

if TYPE_CHECKING:
    from sluice.cluster.placement.ray_cluster import Program, RayMachine, RayPlacement


@dataclass(frozen=True, slots=True)
class Placing:
    """What finds places: for a replica, by its boot and the module that is its program, and for an
    engine, by the command that starts it."""

    replica: Callable[[ReplicaBoot, str, Needs], Place]
    engine: Callable[[Sequence[str], Needs], PlaceEngine]


def placing(section: PlacementSection) -> Placing:
    """What finds places. Raises ``ConfigError`` where that needs what is not installed."""
    if section.kind == "ray":
        return _on_ray(section)
    machine = LocalPlacement(Machine.this())

    def child(boot: ReplicaBoot, program: str, needs: Needs) -> Place:
        return partial(machine.place, (sys.executable, "-m", program, boot.to_json()), needs)

    def engine(command: Sequence[str], needs: Needs) -> PlaceEngine:
        return partial(machine.place_engine, command, needs)

    return Placing(child, engine)


def _on_ray(section: PlacementSection) -> Placing:
    cluster, program_of = ray_cluster(section)

    def actor(boot: ReplicaBoot, program: str, needs: Needs) -> Place:
        return partial(cluster.place, boot.replica_id, program_of(program, boot.to_json()), needs)

    def engine(command: Sequence[str], needs: Needs) -> PlaceEngine:
        return partial(cluster.place_engine, command, needs)

    return Placing(actor, engine)


def ray_cluster(section: PlacementSection) -> "tuple[RayPlacement, type[Program]]":
    """The cluster of the settings, not joined yet. Raises ``ConfigError`` without Ray."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            ('placement.kind: "ray" needs an extra that is not installed: pip install sluice[ray]',)
        )
    from sluice.cluster.placement import ray_cluster as on_ray  # noqa: PLC0415 - takes half a second

    terms = on_ray.RayTerms(section.ray_address, section.name, section.wait_s_max, section.keep_s)
    return on_ray.RayPlacement(terms, monotonic_ns), on_ray.Program


def needs_of(section: ModelSection, folder: Path | None) -> Needs:
    """What one replica of a model takes: as set, or of memory what it has to hold at least."""
    needs = section.needs
    memory_bytes = needs.memory_bytes
    if memory_bytes is None and folder is not None:
        weights = sum(one.stat().st_size for one in folder.glob("*.bin"))
        memory_bytes = weights + (section.kv_bytes or 0)
    return Needs(needs.cpus, needs.gpus, memory_bytes or 0)


def ray_room(
    settings: Settings, machines: Sequence["RayMachine"]
) -> tuple[dict[str, str], list[str]]:
    """Where the least replicas of each model would fit on empty machines, and what would not.

    The largest go first, each to the first machine that has room. A cluster may place them
    otherwise, may be in use, and may grow; so that something does not fit is no error.
    """
    wanted = [
        (needs_of(section, None), f"{name}-{number}")
        for name, section in settings.models.items()
        if section.start or not section.is_remote
        for number in range(section.replicas.min)
    ]
    free = [(one.address, [one.cpus, one.gpus, float(one.memory_bytes)]) for one in machines]
    rooms: dict[str, str] = {}
    missing: list[str] = []
    for needs, replica_id in sorted(wanted, key=lambda one: (-(one[0].cpus or 1.0), one[1])):
        asked = (1.0 if needs.cpus is None else needs.cpus, needs.gpus, float(needs.memory_bytes))
        for address, left in free:
            if all(want <= have for want, have in zip(asked, left, strict=True)):
                left[:] = [have - want for want, have in zip(asked, left, strict=True)]
                rooms[replica_id] = address
                break
        else:
            missing.append(
                f"{replica_id} needs {needs if needs.cpus is not None else '1 processors'}, and no "
                "machine has that left: add one, or lower models.NAME.needs or replicas.min"
            )
    return rooms, missing
