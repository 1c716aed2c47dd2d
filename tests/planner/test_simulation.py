"""Simulated fleets: what is counted, what goes wrong, and what must hold whatever the figures."""

import gc
import tracemalloc
from dataclasses import replace
from itertools import pairwise

import pytest

from sluice.cluster.classes import ServiceClasses
from sluice.config.sections import SloSection
from sluice.core.events import Arrived
from sluice.core.limits import TenantLimits
from sluice.planner.estimate import Targets
from sluice.planner.faults import fault_named
from sluice.planner.outcome import Outcome
from sluice.planner.simulation import SimulatedPool, Simulation, Span, simulate
from sluice.runtime.recording import Entry
from sluice.runtime.replay import replay
from sluice.telemetry.journal import JournalReader
from sluice.telemetry.journal_file import JournalFile
from sluice.telemetry.records import PolicyRecord, RequestEnded, RequestRejected
from sluice.workload.asks import BadWorkload
from sluice.workload.lengths import lengths_of
from sluice.workload.mixes import Mix, shares_of
from sluice.workload.synthetic import Sessions, Synthetic
from tests.planner.simulated import CHAT, GPU, LIMITS, TARGETS, fleet_of, played

SEEDS = [1, 2]


def sums_up(outcome: Outcome) -> bool:
    whole = outcome.whole
    return whole.requests == whole.e2e_s.count + whole.refused + whole.failed + whole.left


def test_below_its_capacity_a_fleet_meets_its_targets():
    outcome = played(20.0)
    assert outcome.attainment == 1.0
    assert outcome.goodput_rps == pytest.approx(20.0, rel=0.2)
    assert outcome.whole.requests == 300
    assert 0.007 < outcome.whole.tpot_s.quantile(0.5) < 0.02
    assert outcome.whole.ttft_s.quantile(0.5) < outcome.whole.e2e_s.quantile(0.5)
    assert outcome.replica_hours == pytest.approx(outcome.simulated_s / 3600)
    assert sums_up(outcome)


def test_beyond_its_capacity_a_fleet_refuses_and_what_it_takes_is_good():
    outcome = played(200.0)
    assert outcome.whole.refused > 100
    assert sum(outcome.reasons.values()) == outcome.whole.refused
    assert outcome.goodput_rps > 30.0
    assert sums_up(outcome)


def test_what_is_drawn_is_what_is_answered():
    outcome = played(10.0, 50, lengths=lengths_of(100, 7))
    assert outcome.whole.output_tokens == 50 * 7
    # the first of 7 tokens is not in the time per token of the others
    assert outcome.whole.tpot_s.count == 50
    assert played(10.0, 50, lengths=lengths_of(100, 1)).whole.tpot_s.count == 0


def test_the_warm_up_is_played_and_not_counted():
    outcome = played(20.0, 300, warm_up=100)
    assert outcome.whole.requests == 200
    assert [requests for requests, _ in outcome.batches] == [10] * 20
    assert outcome.arriving_s == pytest.approx(200 / 20.0, rel=0.3)


class Taken:
    """A workload that notes how many of its requests were taken."""

    def __init__(self, inner):
        self.inner, self.taken = inner, 0

    def asks(self, seed):
        for ask in self.inner.asks(seed):
            self.taken += 1
            yield ask


def with_a_long_queue(fleet):
    (pool,) = fleet.pools
    limits = replace(pool.limits, queue_places_max=100_000)
    return replace(fleet, pools=(replace(pool, limits=limits),))


def test_requests_go_on_behind_the_counted_ones_until_these_have_ended(tmp_path):
    taken = []
    for journal in (None, JournalFile(tmp_path / "j", "simulation")):
        workload = Taken(Synthetic(20.0, CHAT))
        outcome = simulate(workload, fleet_of(), seed=1, span=Span(100), journal=journal)
        assert outcome.whole.requests == 100
        assert sums_up(outcome)
        taken.append(workload.taken)
    assert 102 < taken[0] < 130  # the last one takes about half a second
    assert taken[1] == 100


def test_goodput_counts_the_time_until_the_last_ending():
    fleet = with_a_long_queue(fleet_of(targets=Targets(100.0, 1.0)))
    outcome = played(2000.0, 200, fleet=fleet)
    assert outcome.attainment == 1.0
    assert outcome.counted_s > 10 * outcome.arriving_s
    assert outcome.goodput_rps == pytest.approx(200 / outcome.counted_s)
    assert outcome.goodput_rps < 100.0


def test_a_queue_that_grows_is_told_from_one_that_does_not():
    fleet = with_a_long_queue(fleet_of(targets=None))
    assert played(80.0, 600, fleet=fleet).queue_grows
    assert not played(20.0, 600, fleet=fleet).queue_grows


def test_a_batch_that_fills_is_no_queue_that_grows():
    filling = Outcome(waiting_at_half=100, waiting_at_end=400, queued_at_half=5, queued_at_end=9)
    assert not filling.queue_grows
    assert replace(filling, queued_at_end=60).queue_grows


def test_one_seed_gives_one_outcome_and_another_seed_another():
    a, b, c = (played(35.0, 150, seed=seed) for seed in (1, 1, 2))
    assert (a.whole.e2e_s.total, a.steps, a.batches) == (b.whole.e2e_s.total, b.steps, b.batches)
    assert a.whole.e2e_s.total != c.whole.e2e_s.total


def test_common_beginnings_of_conversations_come_from_the_cache():
    chats = Synthetic(10.0, lengths_of(200, 30), sessions=Sessions(5.0, 1.0, 512))
    with_cache, without = (
        simulate(chats, fleet, seed=1, span=Span(200))
        for fleet in (fleet_of(), _without_cache(fleet_of()))
    )
    assert with_cache.whole.ttft_s.total < 0.7 * without.whole.ttft_s.total


def _without_cache(fleet):
    (pool,) = fleet.pools
    return replace(
        fleet, pools=(replace(pool, batching=replace(pool.batching, prefix_cache=False)),)
    )


def test_clients_that_come_back_when_told_are_served_in_the_end():
    burst = {"rate": 90.0, "count": 200, "seed": 1}
    once, again = (played(**burst, retries=retries) for retries in (0, 3))
    assert once.whole.refused > 10
    assert once.whole.retries == 0
    assert again.whole.retries > 10
    assert again.whole.refused < once.whole.refused
    assert again.whole.met > once.whole.met
    assert sums_up(again)


def test_clients_that_come_back_waited_from_when_they_first_asked():
    again = played(90.0, 200, retries=3)
    assert again.whole.met_from_first < again.whole.met
    assert again.whole.attainment_from_first < again.attainment
    once = played(90.0, 200)
    assert once.whole.met_from_first == once.whole.met


def test_a_client_that_comes_back_asks_for_the_model_that_it_asked_for():
    chat = SloSection(ttft_s=0.4, tpot_s=0.06, overload=("smaller", "queue", "refuse"))
    workload = Synthetic(150.0, CHAT, mix=Mix(classes=shares_of("class", ["chat"])))
    fleet = two_models(chat=chat)
    seen: dict[str, str] = {}

    class Watched(Simulation):
        def fleet_event(self, event, now_ns, effects):
            if isinstance(event, Arrived) and "~" in event.request.id:
                seen.setdefault(event.request.id, event.model)
            super().fleet_event(event, now_ns, effects)

    Watched(fleet, 1, Span(200, retries=2), None).run(workload)
    assert len(seen) > 20
    assert set(seen.values()) == {"large"}


class Impatient:
    """Clients that leave half a second after they came."""

    def __init__(self, inner):
        self.inner = inner

    def asks(self, seed):
        return (replace(ask, leaves_ns=500_000_000) for ask in self.inner.asks(seed))


def test_clients_that_leave_are_counted_as_such_and_make_room():
    fleet = fleet_of(targets=Targets(5.0, 0.1))  # so that many wait
    workload = Synthetic(90.0, lengths_of(300, 40, 0.5))
    staying = simulate(workload, fleet, seed=1, span=Span(200))
    leaving = simulate(Impatient(workload), fleet, seed=1, span=Span(200))
    assert staying.whole.left == 0
    assert leaving.whole.left > 20
    longest_s, usual_s = leaving.whole.e2e_s.quantile(1.0), staying.whole.e2e_s.quantile(0.9)
    assert longest_s is not None
    assert usual_s is not None
    assert longest_s < 0.51 < usual_s
    assert sums_up(leaving)


# ---------------------------------------------------------------------- classes, tenants, models


def two_models(**classes: SloSection):
    """``large`` gives over to ``small``, which is three times as fast."""
    (pool,) = fleet_of().pools
    slow = replace(GPU, step_ns=21e6, token_ns=54e3, row_ns=60e3)
    pools = []
    for name, times in (("large", slow), ("small", GPU)):
        smaller = "small" if name == "large" else None
        limits = replace(pool.limits, model=name, replica_ids=(f"{name}-0",), smaller=smaller)
        pools.append(
            SimulatedPool(limits, pool.batching, times, ServiceClasses(classes, default=None))
        )
    return replace(fleet_of(), pools=tuple(pools))


def test_classes_and_tenants_and_models_are_counted_apart():
    classes = {"chat": SloSection(ttft_s=0.5, tpot_s=0.05, tier=0), "batch": SloSection(tier=5)}
    mix = Mix(
        shares_of("model", ["large", "small"]),
        shares_of("class", ["chat=2", "batch=1"]),
        shares_of("tenant", ["a", "b"]),
    )
    workload = Synthetic(30.0, CHAT, mix=mix)
    outcome = simulate(workload, two_models(**classes), seed=1, span=Span(300))
    assert set(outcome.classes) == {"chat", "batch"}
    assert set(outcome.tenants) == {"a", "b"}
    for groups in (outcome.classes, outcome.tenants, outcome.models):
        assert sum(tally.requests for tally in groups.values()) == 300
    assert outcome.classes["chat"].requests == pytest.approx(200, rel=0.15)


def test_a_ladder_shortens_and_hands_over_to_the_smaller_model():
    chat = SloSection(
        ttft_s=0.4, tpot_s=0.06, overload=("smaller", "queue", "refuse"), shorten_tokens=16
    )
    mix = Mix(shares_of("model", ["large"]), shares_of("class", ["chat"]))
    workload = Synthetic(60.0, CHAT, mix=mix, output_tokens_max=400)
    outcome = simulate(workload, two_models(chat=chat), seed=1, span=Span(300))
    assert outcome.models["small"].degraded > 20
    plain = replace(chat, overload=("queue", "refuse"))
    refusing = simulate(workload, two_models(chat=plain), seed=1, span=Span(300))
    assert refusing.whole.degraded == 0
    assert outcome.whole.met > refusing.whole.met
    shorter = replace(chat, overload=("shorten", "queue", "refuse"))
    cut = simulate(workload, two_models(chat=shorter), seed=1, span=Span(300))
    assert cut.whole.degraded > 0


def test_a_tenant_has_no_more_than_its_limit():
    fleet = replace(fleet_of(), tenants=(TenantLimits("a", requests_per_minute=60),))
    workload = Synthetic(20.0, CHAT, mix=Mix(tenants=shares_of("tenant", ["a", "b"])))
    outcome = simulate(workload, fleet, seed=1, span=Span(300))
    assert outcome.tenants["a"].met <= 60 + 15
    assert outcome.tenants["b"].refused == 0
    assert outcome.reasons["requests_per_minute"] > 50


def test_a_model_that_no_pool_has_is_told():
    workload = Synthetic(20.0, CHAT, mix=Mix(shares_of("model", ["huge"])))
    with pytest.raises(BadWorkload, match="'huge'; models are model"):
        simulate(workload, fleet_of(), seed=1, span=Span(3))


# ----------------------------------------------------------------------------------------- faults


def with_faults(*texts, replicas=2, load_ns=0):
    fleet = fleet_of(replicas, load_ns=load_ns)
    return replace(fleet, faults=tuple(fault_named(text, fleet.replica_ids) for text in texts))


def test_a_lost_replica_costs_requests_and_hours_until_it_is_back():
    whole, lost, gone = (
        played(60.0, 300, fleet=with_faults(*faults, load_ns=10**9))
        for faults in ((), ("replica-lost@2s",), ("replica-gone@2s",))
    )
    assert whole.attainment == 1.0
    assert lost.whole.failed > 0
    assert gone.attainment <= lost.attainment < 1.0
    assert gone.replica_hours < lost.replica_hours < whole.replica_hours
    assert sums_up(lost)
    assert sums_up(gone)


def test_a_slow_replica_slows_what_runs_on_it_and_only_then():
    plain, slow = (
        played(30.0, 300, fleet=with_faults(*f)) for f in ((), ("replica-slow@3s:x=4,for=3s",))
    )
    assert slow.whole.tpot_s.quantile(0.99) > 2 * plain.whole.tpot_s.quantile(0.99)
    assert slow.whole.tpot_s.quantile(0.5) < 1.5 * plain.whole.tpot_s.quantile(0.5)


def test_a_stall_is_seen_by_those_who_stream_then():
    plain, stalled = (
        played(20.0, 200, fleet=with_faults(*f, replicas=1))
        for f in ((), ("replica-stall@5s:for=2s",))
    )
    assert plain.whole.e2e_s.quantile(1.0) < 2.0 < stalled.whole.e2e_s.quantile(1.0)
    assert stalled.whole.e2e_s.quantile(0.5) < 1.2 * plain.whole.e2e_s.quantile(0.5)


# ---------------------------------------------------------------------------------------- journal


def journal_of(folder, seed=1, **changes):
    fleet = replace(with_faults("replica-lost@2s", load_ns=10**9), **changes)
    journal = JournalFile(folder, "simulation")
    outcome = simulate(Synthetic(60.0, CHAT), fleet, seed=seed, span=Span(150), journal=journal)
    (segment,) = folder.iterdir()
    return outcome, segment


def test_two_runs_with_one_seed_write_equal_journals(tmp_path):
    first, second, other = (
        journal_of(tmp_path / name, seed)[1] for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes() != other.read_bytes()


def test_a_journal_has_every_ending_and_replays_to_the_same_plans(tmp_path):
    outcome, segment = journal_of(tmp_path / "a")
    reader = JournalReader(segment.parent)
    records = [entry.record for entry in reader.entries()]
    assert reader.problems == []
    ended = [one for one in records if isinstance(one, RequestEnded)]
    refused = [one for one in records if isinstance(one, RequestRejected)]
    assert len(ended) == outcome.whole.e2e_s.count + outcome.whole.failed
    assert len(refused) == outcome.whole.refused
    entries = [
        Entry(one.t_ns, one.role, one.name, one.payload)
        for one in records
        if isinstance(one, PolicyRecord) and one.owner == "model-1"
    ]
    replayed = replay(entries)
    assert replayed.difference is None
    assert replayed.steps > 100


def test_a_journal_has_the_ending_of_a_client_that_left_the_queue(tmp_path):
    fleet = fleet_of(targets=Targets(5.0, 0.1), limits=replace(LIMITS, sequences_max=2))
    workload, journal = Impatient(Synthetic(60.0, CHAT)), JournalFile(tmp_path, "simulation")
    outcome = simulate(workload, fleet, seed=1, span=Span(80), journal=journal)
    records = [entry.record for entry in JournalReader(tmp_path).entries()]
    ended = [one for one in records if isinstance(one, RequestEnded)]
    assert len(ended) == 80 - outcome.whole.refused
    assert sum(one.reason == "cancelled" for one in ended) == outcome.whole.left > 10


def test_a_folder_with_a_journal_is_not_written_to(tmp_path):
    journal_of(tmp_path / "a")
    with pytest.raises(FileExistsError, match="journal already"):
        JournalFile(tmp_path / "a", "simulation")


# ------------------------------------------------------------------------------------ metamorphic


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rate", [90.0])
def test_one_replica_more_never_lowers_goodput(rate, seed):
    good = [played(rate, 200, seed, fleet=fleet_of(count)).whole.met for count in (1, 2, 3)]
    assert good[1] >= good[0] - 3
    assert good[2] >= good[1] - 3


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rate", [60.0])
def test_tighter_targets_never_raise_goodput(rate, seed):
    tried = [Targets(0.6, 0.05), TARGETS, Targets(0.15, 0.025), Targets(0.15, 0.015)]
    good = [played(rate, 200, seed, fleet=fleet_of(targets=each)).whole.met for each in tried]
    for loose, tight in pairwise(good):
        assert tight <= loose + 0.03 * 200


@pytest.mark.parametrize("seed", SEEDS)
def test_longer_prompts_never_raise_goodput(seed):
    good = [
        played(60.0, 300, seed, lengths=lengths_of(prompt, 40)).whole.met
        for prompt in (100, 400, 1600)
    ]
    assert good[0] + 3 >= good[1] >= good[2] - 3


@pytest.mark.parametrize("seed", SEEDS)
def test_faster_steps_never_slow_requests(seed):
    fast = replace(GPU, step_ns=4e6, decode_context_ns=20.0)
    slow_run, fast_run = (
        played(25.0, 300, seed, fleet=fleet_of(coefficients=each)) for each in (GPU, fast)
    )
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        assert getattr(fast_run.whole, name).total <= getattr(slow_run.whole, name).total


class Weighed:
    """A workload that notes how much memory is held when some of its requests are taken."""

    def __init__(self, inner, numbers):
        self.inner, self.numbers, self.held = inner, numbers, []

    def asks(self, seed):
        for ask in self.inner.asks(seed):
            if ask.number in self.numbers:
                gc.collect()
                self.held.append(tracemalloc.get_traced_memory()[0])
            yield ask


def test_memory_does_not_grow_with_the_number_of_requests():
    fleet = fleet_of(limits=replace(LIMITS, blocks_total=50))
    workload = Weighed(Synthetic(10.0, lengths_of(64, 1)), (530, 780))
    tracemalloc.start()
    try:
        simulate(workload, fleet, seed=1, span=Span(781))
    finally:
        tracemalloc.stop()
    before, after = workload.held
    assert after - before < 100 * 250  # a request that is kept takes more than 100 bytes
