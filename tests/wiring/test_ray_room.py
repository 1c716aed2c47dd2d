"""What of the settings would fit on the machines of a cluster."""

from sluice.cluster.placement.ray_cluster import RayMachine
from sluice.config.sections import ModelSection, ReplicaNeeds, ReplicaRange
from sluice.config.settings import Settings
from sluice.wiring.placing import ray_room


def test_machines_of_one_address_count_each():
    """Several nodes of a cluster may run on one host."""
    machines = [RayMachine("10.0.0.1", cpus, 0.0, 1 << 30) for cpus in (1.0, 1.0, 0.0)]
    section = ModelSection(
        source="sim:llama-3.1-8b@h100",
        needs=ReplicaNeeds(cpus=1.0),
        replicas=ReplicaRange(min=3),
    )
    rooms, missing = ray_room(Settings(models={"m": section}), machines)
    assert rooms == {"m-0": "10.0.0.1", "m-1": "10.0.0.1"}
    (words,) = missing
    assert words.startswith("m-2 needs")
