"""The stimulus is what the plan says, and every latency counts from the planned time."""

import asyncio
from itertools import pairwise
from statistics import fmean, pstdev

import pytest
import uvloop

from sluice.loadtest.measures import percentiles
from sluice.loadtest.plans import Traffic
from sluice.loadtest.trial import ClosedLoop, Ending, Span
from sluice.testing.upstream import Close, ScriptedUpstream, Until, Wait
from sluice.workload.arrivals import Constant, Poisson
from sluice.workload.lengths import lengths_of
from sluice.workload.synthetic import Synthetic
from tests.loadtest.rig import answer, asks_at, closed_plan, later, plan_of, play, played

pytestmark = pytest.mark.filterwarnings("error")


def traffic(arrivals):
    return Traffic(Synthetic(1.0, lengths_of(20, 2), arrivals))


def test_d27_constant_arrivals_do_not_drift():
    plan = traffic(Constant()).open_loop(200.0, Span(3.0, warm_s=0.0), seed=1)
    outcome = play(answer, plan)
    assert len(outcome.counted) == len(plan.asks) == 599
    assert all(one.done for one in outcome.counted)
    # A machine that is busy delays some; a client that drifts delays all that come last.
    assert min(one.lag_s for one in outcome.counted[-50:]) < 0.005
    first, last = outcome.counted[0], min(outcome.counted[-50:], key=lambda one: one.lag_s)
    rate = (last.number - first.number) / (last.sent_s - first.sent_s)
    assert 199 <= rate <= 201


def test_d27_poisson_plans_of_a_seed_are_identical_and_have_its_law():
    span = Span(50.0, warm_s=0.0)
    one, two = (traffic(Poisson()).open_loop(200.0, span, seed=7) for _ in range(2))
    assert one.asks == two.asks
    times_s = [ask.at_ns / 1e9 for ask in one.asks]
    gaps_s = [b - a for a, b in pairwise(times_s)]
    assert fmean(gaps_s) == pytest.approx(1 / 200, rel=0.03)
    assert 0.9 < pstdev(gaps_s) / fmean(gaps_s) < 1.1


@pytest.mark.parametrize("arrivals", [Constant(), Poisson()], ids=["constant", "poisson"])
def test_d27_rates_below_one_are_kept(arrivals):
    plans = [traffic(arrivals).open_loop(0.4, Span(60.0, warm_s=0.0), seed) for seed in range(40)]
    counts = [len(plan.asks) for plan in plans]
    if isinstance(arrivals, Constant):
        assert set(counts) == {23}  # of 24, the last is due as the trial ends
    assert fmean(counts) == pytest.approx(24, abs=2)


def test_stimulus_times_follow_the_plan_and_so_do_requests_in_flight():
    """Answers take 0.3 s at 100/s: by Little's law 30 are in flight."""
    plan = traffic(Poisson()).open_loop(100.0, Span(2.0, warm_s=0.0), seed=3)
    outcome = play(lambda request: later(answer(request), 0.3), plan)
    lags_s = sorted(one.lag_s for one in outcome.requests)
    assert lags_s[len(lags_s) // 2] < 0.005
    assert [one.number for one in outcome.requests] == [ask.number for ask in plan.asks]
    busy_s = sum(one.end_s - one.sent_s for one in outcome.requests if one.at_s < 2.0)
    assert busy_s / 2.0 == pytest.approx(len(plan.asks) / 2.0 * 0.3, rel=0.2)
    assert 25 <= outcome.client["in_flight_max"] <= 70


def test_a_stall_of_the_server_appears_with_its_full_mass():
    """The server answers nothing between 1.0 and 2.0 s. Of 100 requests/s over 4 s, those of that
    second wait: a quarter of all, from nothing to a second, evenly."""
    began_s: list[float] = []

    def route(request):
        now_s = asyncio.get_running_loop().time()
        began_s.append(now_s)
        at_s = now_s - began_s[0]
        return later(answer(request), max(0.0, 2.0 - at_s) if at_s >= 1.0 else 0.0)

    outcome = play(route, plan_of(asks_at([n / 100 for n in range(400)])))
    ttft_s = [one.ttft_s for one in outcome.counted]
    assert percentiles(ttft_s)["p99"] == pytest.approx(0.96, abs=0.1)
    assert percentiles(ttft_s)["p90"] == pytest.approx(0.60, abs=0.1)
    assert sum(wait_s > 0.1 for wait_s in ttft_s) == pytest.approx(90, abs=15)


def test_a_closed_loop_keeps_so_many_in_flight_and_goes_on_beyond_its_asks():
    plan = closed_plan(clients=5, counted_s=0.6, asks=10)
    most = [0]
    now = [0]

    def route(request):
        now[0] += 1
        most[0] = max(most[0], now[0])
        yield Wait(0.02)
        yield from answer(request)
        now[0] -= 1

    outcome = play(route, plan)
    assert most[0] == 5
    assert len(outcome.requests) > 60
    assert len({one.number for one in outcome.requests}) == len(outcome.requests)


def test_a_closed_loop_of_one_round_ends_with_its_last_request():
    plan = closed_plan(clients=3, counted_s=60.0, asks=7)
    plan = type(plan)(ClosedLoop(3, once=True), plan.span, plan.asks, plan.seed)
    outcome = play(answer, plan)
    assert sorted(one.number for one in outcome.requests) == list(range(7))


def test_connections_are_reused_and_one_closed_meanwhile_is_no_failure():
    """Each connection is closed a moment after its second answer, as idle ones are."""
    served: dict[int, int] = {}

    def route(request):
        number = sum(served.values())
        served[0] = number + 1
        yield from answer(request)
        if number % 2:
            yield Close()

    outcome = play(route, plan_of(asks_at([0.03 * n for n in range(20)])))
    assert {one.ending for one in outcome.requests} == {Ending.DONE}
    assert outcome.client["connections"] < 20


def test_stopping_leaves_what_runs_and_counts_only_what_was_reached():
    async def run():
        never = asyncio.Event()

        def route(request):
            yield Until(never)

        async with ScriptedUpstream(route) as upstream:
            loop = asyncio.get_running_loop()
            stop_s = loop.time() + 0.4
            plan = plan_of(asks_at([n / 100 for n in range(1000)]))
            return await played(upstream.port, plan, lambda: loop.time() > stop_s)

    outcome = uvloop.run(run())
    assert outcome.stopped_s == pytest.approx(0.35, abs=0.2)
    assert outcome.counted_s == outcome.stopped_s
    assert {one.ending for one in outcome.requests} == {Ending.LEFT}
    assert 10 < len(outcome.requests) < 80
    assert outcome.counted == []
