"""Fleet and replicas together in virtual time."""

import random
from collections import Counter

from sluice.core.costmodel import Coefficients, FixedCostModel
from sluice.core.events import Dispatch, End, Ended, Fail, Reject, ReplicaLimits, StartReplica
from sluice.core.fleet import Fleet
from sluice.core.limits import PoolLimits
from sluice.core.replica import Replica
from sluice.core.request import EndReason, Request
from sluice.core.roster import BatchingLimits
from sluice.executors.simulated import SimulatedExecutor
from sluice.runtime.virtual_fleet import SameStart, VirtualFleet
from sluice.testing.replicas import check_invariants

MS = 1_000_000
S = 1_000_000_000


class FleetRun:
    """A pool of simulated replicas of one model, and what came of each request."""

    def __init__(self, replicas=1, sequences=4, places=2, load_ns=0):
        names = tuple(f"m-{number}" for number in range(replicas))
        pools = [PoolLimits("m", names, places, 60 * S)]
        self.sequences = sequences
        self.replicas: dict[str, Replica] = {}
        self.outcomes: dict[str, str] = {}
        self.dispatched: Counter[str] = Counter()
        self.attempts: dict[str, int] = {}
        self.starts: list[int] = []
        self.fleet = VirtualFleet(
            Fleet(pools, chance=random.Random(1)),
            self.make,
            starting=SameStart(load_ns),
            watcher=self,
        )

    def make(self, replica_id):
        limits = BatchingLimits(1024, 32, 512, sequences_max=self.sequences)
        executor = SimulatedExecutor(ReplicaLimits(1024, 32, 512, self.sequences), Coefficients())
        self.replicas[replica_id] = Replica(limits, FixedCostModel(Coefficients()))
        return self.replicas[replica_id], executor

    def fleet_event(self, event, now_ns, effects):
        if isinstance(event, Ended):
            self.outcomes[event.request_id] = event.reason
        for effect in effects:
            if isinstance(effect, Reject):
                self.outcomes[effect.request_id] = f"{effect.status} {effect.reason}"
            elif isinstance(effect, Fail):
                self.outcomes[effect.request_id] = effect.reason
            elif isinstance(effect, Dispatch):
                self.dispatched[effect.replica_id] += 1
                self.attempts[effect.request_id] = effect.attempt
            elif isinstance(effect, StartReplica):
                self.starts.append(now_ns)

    def replica_event(self, replica_id, event, now_ns, effects):
        check_invariants(self.replicas[replica_id])
        assert all(e.reason is not EndReason.FAILED for e in effects if isinstance(e, End))

    def burst(self, count, at_ns=S, output=40, **fields):
        for number in range(count):
            prompt = tuple(range(1000 * number, 1000 * number + 50))
            self.fleet.arrive(at_ns, "m", Request(f"r{number}", at_ns, prompt, output, **fields))

    def run(self):
        self.fleet.run()
        return self


def test_d07_exactly_the_places_are_served_and_the_rest_is_told_so():
    run = FleetRun(sequences=1, places=2)
    run.burst(10)
    run.run()
    counts = Counter(run.outcomes.values())
    assert counts == {EndReason.LENGTH: 3, "429 queue_full": 7}


def test_two_replicas_share_a_burst():
    run = FleetRun(replicas=2, sequences=4, places=30)
    run.burst(16)
    run.run()
    assert set(run.outcomes.values()) == {EndReason.LENGTH}
    assert min(run.dispatched.values()) >= 6


def test_requests_of_a_lost_replica_are_served_by_the_other():
    run = FleetRun(replicas=2, sequences=4, places=30)
    run.burst(8, output=2)
    run.fleet.lose(S + 5 * MS, "m-0")  # before any first token
    run.run()
    assert set(run.outcomes.values()) == {EndReason.LENGTH}
    assert Counter(run.attempts.values()) == {1: 4, 2: 4}


def test_lost_replica_comes_back_and_serves_again():
    run = FleetRun(replicas=1, load_ns=2 * S)
    run.burst(2, at_ns=3 * S, output=400)
    run.fleet.lose(5 * S, "m-0")  # tokens were sent: these cannot be served again
    for number in range(3):
        at_ns = 20 * S + number
        run.fleet.arrive(at_ns, "m", Request(f"later{number}", at_ns, (1, 2, 3), 5))
    run.run()
    assert [run.outcomes[f"r{number}"] for number in range(2)] == [EndReason.FAILED] * 2
    assert [run.outcomes[f"later{number}"] for number in range(3)] == [EndReason.LENGTH] * 3
    assert len(run.starts) == 2


def test_same_events_give_the_same_run():
    def outcome():
        run = FleetRun(replicas=3, sequences=2, places=3)
        run.burst(25)
        run.fleet.lose(S + 200 * MS, "m-1")
        run.run()
        return run.outcomes, run.dispatched, run.fleet.driver.events, run.fleet.driver.now_ns

    assert outcome() == outcome()
