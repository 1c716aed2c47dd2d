"""Under more load than it can serve, a fleet keeps the promises that it makes."""

from dataclasses import replace

import pytest

from sluice.core.door import late_whatever
from sluice.core.events import Cancelled, ReplicaReported
from tests.simulation.overload import GPU, TTFT_NS, Overload, S, peak_over_mean, quantile

# What one replica serves of these requests within their targets, in requests per second.
CAPACITY = 2.4
WARM_S = 10


def steady(seed, load, to_s=60, **options):
    """Poisson arrivals at so many times the capacity."""
    run = Overload(seed, **options)
    run.poisson(load * CAPACITY, 1, to_s)
    return run.run()


@pytest.mark.parametrize("seed", [1, 2])
def test_goodput_stays_at_its_peak_however_much_is_asked_for(seed):
    loads = (0.8, 1.0, 1.5, 2, 4)
    goodput = {load: steady(seed, load, to_s=150).goodput(WARM_S, 148) for load in loads}
    peak = max(goodput[0.8], goodput[1.0])
    assert peak > 0.75 * CAPACITY
    assert min(goodput[load] for load in (1.5, 2, 4)) >= 0.95 * peak, goodput


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_at_twice_the_capacity_what_is_dispatched_is_on_time(seed):
    run = steady(seed, 2.0, to_s=120)
    served = run.served()
    assert len(served) > 240
    assert sum(call.good for call in served) >= 0.99 * len(served)
    assert run.preemptions == 0


class Foreseeing(Overload):
    """Asks before each arrival whether it would be late whatever its prompt is."""

    def __init__(self, seed, **options):
        super().__init__(seed, **options)
        self.foreseen: dict[str, bool] = {}

    def ask(self, call):
        request = replace(
            call.request,
            arrived_ns=self.fleet.driver.now_ns,
            ttft_due_ns=self.fleet.driver.now_ns + TTFT_NS,
        )
        least = replace(request, prompt=(), output_tokens_max=1)
        number = self.core._arrivals + 1
        refusal = late_whatever(self.core._pools["m"], least, number, self.fleet.driver.now_ns)
        self.foreseen[call.name] = refusal is not None
        super().ask(call)


@pytest.mark.parametrize("seed", [1, 2])
def test_what_is_foreseen_to_be_late_without_its_prompt_is_refused_with_it(seed):
    run = Foreseeing(seed)
    for number in range(300):
        at_ns = S + round(number * S / (3 * CAPACITY))
        prompt = run.random.choice((10, 40, 80))
        run.call(at_ns, prompt, 100, likeness=1 + number)
    run.run()
    foreseen = [call for call in run.calls.values() if run.foreseen[call.name]]
    assert {call.outcome for call in foreseen} == {"429 predicted_late"}
    late = [call for call in run.calls.values() if call.outcome == "429 predicted_late"]
    assert len(foreseen) > 0.5 * len(late) > 50


@pytest.mark.parametrize("seed", [1, 2])
def test_a_short_kv_pool_causes_no_preemption_under_overload(seed):
    run = steady(seed, 2.0, blocks=96)
    assert run.preemptions == 0
    served = run.served()
    assert sum(call.good for call in served) >= 0.98 * len(served) > 50


@pytest.mark.parametrize("seed", [1, 2])
def test_clients_that_wait_as_told_succeed_after_a_spike(seed):
    run = Overload(seed, replicas=2)
    run.poisson(0.6 * 2 * CAPACITY, 1, 120, retries=9)
    run.poisson(1.4 * 2 * CAPACITY, 20, 40, retries=9)
    run.run()
    check_retries(run)


@pytest.mark.parametrize("seed", [1, 2])
def test_clients_that_wait_as_told_succeed_under_lasting_overload(seed):
    run = Overload(seed, replicas=2)
    run.poisson(1.3 * 2 * CAPACITY, 1, 90, retries=9)
    run.run()
    check_retries(run)


def check_retries(run):
    retried = [call for call in run.calls.values() if call.tries > 1]
    assert len(retried) > 100
    at_first = [call for call in retried if call.tries == 2 and call.first_ns is not None]
    assert len(at_first) >= 0.9 * len(retried)
    assert peak_over_mean(run.retries_ns, 5) < 1.5
    served = run.served()
    assert sum(call.good for call in served) >= 0.98 * len(served)


def test_clients_that_never_come_back_cost_no_goodput():
    """Places told to clients that stay away are not kept for them."""
    patient, impatient = Overload(4), Overload(4)
    patient.poisson(2 * CAPACITY, 1, 70, retries=9)
    impatient.poisson(2 * CAPACITY, 1, 70, retries=0)
    goodput = impatient.run().goodput(WARM_S, 68)
    served = [c for c in patient.run(70).served() if c.good and c.ended_ns > WARM_S * S]
    assert goodput >= 0.95 * len(served) / 60
    assert impatient.core.pools(70 * S)[0].returning < 0.3


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_one_stalled_step_of_5_s_causes_refusals_for_seconds_not_minutes(seed):
    """At nine tenths of the capacity, where some are refused anyway."""
    calm, stalled = Overload(seed), Overload(seed)
    for run in (calm, stalled):
        run.poisson(0.9 * CAPACITY, 1, 110)
    stalled.stall_at_ns, stalled.stall_ns = 60 * S, 5 * S
    calm.run()
    stalled.run()
    assert stalled.stall_at_ns is None
    assert len(stalled.refused_ns) > len(calm.refused_ns)
    usual = len([at for at in calm.refused_ns if at > 75 * S])
    assert len([at for at in stalled.refused_ns if at > 75 * S]) <= usual + 5
    late = [c for c in stalled.served() if c.request.arrived_ns > 66 * S and not c.good]
    assert len(late) <= 2


@pytest.mark.parametrize("seed", [1, 2])
def test_a_tenant_that_sends_ten_times_its_share_does_not_delay_the_other(seed):
    """A quarter of the capacity against two and a half times all of it, on a fast machine."""
    capacity = 8.0
    alone, beside = (Overload(seed, coefficients=GPU, blocks=4096) for _ in range(2))
    for run in (alone, beside):
        run.poisson(0.25 * capacity, 1, 35, tenant="light", prompt=800)
    beside.poisson(2.5 * capacity, 1, 35, tenant="heavy", prompt=800)
    p99 = []
    for run in (alone.run(), beside.run()):
        calls = [c for c in run.between(WARM_S, 35) if c.request.tenant == "light"]
        assert all(call.good for call in calls)
        p99.append(quantile([call.ttft_ns for call in calls], 0.99))
    assert p99[1] <= 1.2 * p99[0]
    heavy = [c for c in beside.between(WARM_S, 35) if c.request.tenant == "heavy" and c.good]
    assert len(heavy) > 0.5 * capacity * 25


@pytest.mark.parametrize("ttft_ns", [1, 1_000_000_000 * S])
@pytest.mark.parametrize("tpot_ns", [1, 1_000_000_000 * S])
def test_absurd_targets_are_served_where_nothing_waits_and_break_nothing(ttft_ns, tpot_ns):
    run = Overload(1)
    run.poisson(3 * CAPACITY, 1, 20, ttft_due_ns=ttft_ns, tpot_ns=tpot_ns)
    run.run()
    assert len(run.served()) > 15
    assert run.core.requests == 0
    assert {call.outcome for call in run.calls.values()} <= {
        "stop", "length", "429 predicted_late", "429 queue_full", "429 queue_deadline",
    }  # fmt: skip


def test_all_clients_leave_at_once_and_the_next_one_is_served_at_once():
    run = Overload(1)
    run.poisson(4 * CAPACITY, 1, 20)
    run.run(20)
    for request_id in list(run.core._accepted):
        run.fleet.at(20 * S, Cancelled(request_id))
    last = run.call(21 * S, 100, 20)
    run.run()
    assert run.core.requests == 0
    assert last.good
    assert last.dispatched_ns == 21 * S


def test_replicas_that_report_no_more_are_served_on_own_counts():
    run = Overload(1)
    handle = run.core.handle

    def mute(event, now_ns):
        is_lost = isinstance(event, ReplicaReported) and now_ns >= 20 * S
        return [] if is_lost else handle(event, now_ns)

    vars(run.core)["handle"] = mute
    run.poisson(1.5 * CAPACITY, 1, 60)
    run.run()
    later = [call for call in run.served() if call.request.arrived_ns > 25 * S]
    assert len(later) > 20
    assert sum(call.good for call in later) >= 0.8 * len(later)


@pytest.mark.parametrize("jump_s", [-3600, 3600])
def test_a_clock_that_jumps_ends_waits_but_keeps_the_fleet_serving(jump_s):
    run = Overload(1)
    handle = run.core.handle

    def jumping(event, now_ns):
        seen_ns = now_ns + jump_s * S * (now_ns > 20 * S) + 7200 * S
        return [effect for effect in handle(event, seen_ns) if not hasattr(effect, "at_ns")]

    vars(run.core)["handle"] = jumping
    run.poisson(1.2 * CAPACITY, 1, 60, ttft_due_ns=None)
    run.run()
    later = [call for call in run.served() if call.request.arrived_ns > 30 * S]
    assert len(later) > 30


def test_ttft_includes_the_wait_in_the_fleet():
    run = steady(1, 2.0, to_s=40)
    waited = [c for c in run.served() if c.dispatched_ns > c.arrived_ns]
    assert waited
    assert max(call.ttft_ns for call in waited) > TTFT_NS / 2
