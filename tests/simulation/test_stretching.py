"""A fleet that hears of its replicas less often: the same requests, the same log, nothing kept."""

import gc
from random import Random
from statistics import mean

import pytest

from sluice.core.costmodel import Coefficients, FixedCostModel
from sluice.core.events import Ended, ReplicaLost
from sluice.core.fleet import Fleet
from sluice.core.limits import PoolLimits
from sluice.core.replica import Replica
from sluice.core.request import EndReason, Request
from sluice.core.roster import BatchingLimits
from sluice.executors.simulated import SimulatedExecutor
from sluice.runtime.virtual import AT_ONCE, STEP_BY_STEP, Stretching
from sluice.runtime.virtual_fleet import VirtualFleet

MS, S = 1_000_000, 1_000_000_000
GPU = Coefficients(7e6, 18e3, 20e3, 45.0, 0.3)
LIMITS = BatchingLimits(1280, 64, 400, sequences_max=64, chunk_tokens_max=1024)
NAMES = ("m-0", "m-1", "m-2", "m-3")
QUIET = Stretching(silence_ns_max=100 * MS)
SEEDS = pytest.mark.parametrize("seed", [1, 2], ids=lambda seed: f"seed{seed}")


class Log:
    """Every event with its time and effects, of fleet and replicas."""

    def __init__(self):
        self.lines = []
        self.phases = []
        self.ends = {}

    def fleet_event(self, event, now_ns, effects):
        self.lines.append((now_ns, "fleet", repr(event), repr(effects)))
        if isinstance(event, Ended):
            self.ends[event.request_id] = event.reason
            self.phases.append(event.phases)

    def replica_event(self, replica_id, event, now_ns, effects):
        self.lines.append((now_ns, replica_id, repr(event), repr(effects)))


class Silent:
    """Keeps nothing."""

    def fleet_event(self, event, now_ns, effects):
        pass

    def replica_event(self, replica_id, event, now_ns, effects):
        pass


def make(_):
    executor = SimulatedExecutor(LIMITS.replica, GPU, checked=False)
    return Replica(LIMITS, FixedCostModel(GPU)), executor


def arrivals(seed, count, rate=60.0):
    random, at_ns = Random(seed), S
    for number in range(count):
        at_ns += int(random.expovariate(rate) * S)
        first, tokens = number * 1000, random.randint(50, 900)
        prompt = tuple(range(first, first + tokens))
        yield at_ns, "m", Request(
            f"r{number}", at_ns, prompt, random.randint(5, 150),
            ttft_due_ns=at_ns + 2 * S, tpot_ns=60 * MS,
        )  # fmt: skip


def run(seed, stretching, watcher, count=80):
    fleet = Fleet([PoolLimits("m", NAMES)], chance=Random(seed))
    virtual = VirtualFleet(fleet, make, watcher=watcher, stretching=stretching)
    virtual.feed(arrivals(seed, count))
    virtual.run()
    return virtual


@SEEDS
@pytest.mark.parametrize("stretching", [STEP_BY_STEP, AT_ONCE, QUIET], ids=["step", "all", "quiet"])
def test_two_runs_with_one_seed_have_identical_logs(seed, stretching):
    logs = [Log(), Log()]
    for log in logs:
        run(seed, stretching, log)
    assert logs[0].lines == logs[1].lines


@SEEDS
def test_a_fleet_that_hears_less_serves_all_the_same_as_fast(seed):
    logs = {}
    for name, stretching in (("step", STEP_BY_STEP), ("quiet", QUIET)):
        logs[name] = log = Log()
        run(seed, stretching, log)
        assert set(log.ends.values()) == {EndReason.LENGTH}
        assert len(log.ends) == 80
    assert len(logs["quiet"].lines) < len(logs["step"].lines) / 3

    def mean_ns(name, phase):
        return mean(getattr(phases, phase) for phases in logs[name].phases)

    for phase in ("prefill_ns", "decode_ns"):
        assert mean_ns("quiet", phase) == pytest.approx(mean_ns("step", phase), rel=0.02)


def test_a_replica_that_is_lost_in_a_stretch_takes_its_requests_with_it():
    fleet = Fleet([PoolLimits("m", NAMES[:1])], chance=Random(1))
    log = Log()
    virtual = VirtualFleet(fleet, make, watcher=log, stretching=QUIET)
    virtual.feed(iter([(S, "m", Request("r", S, tuple(range(50)), 150))]))
    virtual.lose(S + 500 * MS, "m-0")
    virtual.run()
    lost = [line for line in log.lines if line[2].startswith(ReplicaLost.__name__)]
    assert len(lost) == 1
    assert "its replica was lost after" in lost[0][3]
    assert not log.ends


def test_nothing_is_kept_of_requests_that_are_over():
    def objects_held(count):
        virtual = run(1, QUIET, Silent(), count)
        gc.collect()
        held = len(gc.get_objects())
        assert virtual.driver.now_ns > S
        return held

    few, many = objects_held(250), objects_held(500)
    # What is learnt (lengths, prefixes) has bounds of its own and is full by then.
    assert many - few < 300
