"""A small simulated fleet for the tests of simulations."""

from dataclasses import replace

from sluice.core.costmodel import Coefficients
from sluice.core.events import ReplicaLimits
from sluice.planner.estimate import Targets
from sluice.planner.replicas import SimulatedReplica
from sluice.planner.simulation import Span, one_model_fleet, simulate
from sluice.workload.lengths import lengths_of
from sluice.workload.synthetic import Synthetic

# Of the order of an 8B model on a large GPU, which takes about 40 of these requests per second.
GPU = Coefficients(7e6, 18e3, 20e3, 45.0, 0.3)
LIMITS = ReplicaLimits(8192, 64, 2000, 32)
CHAT = lengths_of(300, 40, 0.5)
TARGETS = Targets(0.3, 0.025)


def fleet_of(replicas=1, targets=TARGETS, coefficients=GPU, limits=LIMITS, **changes):
    fleet = one_model_fleet(SimulatedReplica(limits, coefficients), replicas, targets)
    return replace(fleet, **changes)


def played(rate=20.0, count=300, seed=1, lengths=CHAT, fleet=None, **span):
    fleet = fleet_of() if fleet is None else fleet
    return simulate(Synthetic(rate, lengths), fleet, seed=seed, span=Span(count, **span))
