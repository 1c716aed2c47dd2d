"""The stimulus is what the plan says, and every latency counts from the planned time."""

import asyncio
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, pstdev

import pytest
import uvloop

from sluice.loadtest.measures import quantile
from sluice.loadtest.plan_file import read_plan, write_plan
from sluice.loadtest.plans import Addition, Traffic
from sluice.loadtest.texts import DrawnPrompts, Vocabulary
from sluice.loadtest.trial import CannotMeasure, ClosedLoop, Ending, Span
from sluice.testing.upstream import Close, ScriptedUpstream, Until, Wait, whole
from sluice.workload.arrivals import Constant, Poisson
from sluice.workload.asks import Ask, Part
from sluice.workload.lengths import lengths_of
from sluice.workload.synthetic import Synthetic
from tests.loadtest.rig import answer, asks_at, closed_plan, later, plan_of, play, played

pytestmark = pytest.mark.filterwarnings("error")


def traffic(arrivals):
    return Traffic(Synthetic(1.0, lengths_of(20, 2), arrivals))


def test_d27_constant_arrivals_do_not_drift():
    plan = traffic(Constant()).open_loop(200.0, Span(2.0, warm_s=0.0), seed=1)
    outcome = play(answer, plan)
    assert len(outcome.counted) == len(plan.asks) == 399
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
    plan = traffic(Poisson()).open_loop(100.0, Span(1.5, warm_s=0.0), seed=3)
    outcome = play(lambda request: later(answer(request), 0.3), plan)
    lags_s = sorted(one.lag_s for one in outcome.requests)
    assert lags_s[len(lags_s) // 2] < 0.005
    assert [one.number for one in outcome.requests] == [ask.number for ask in plan.asks]
    busy_s = sum(one.end_s - one.sent_s for one in outcome.requests if one.at_s < 1.5)
    assert busy_s == pytest.approx(len(plan.asks) * 0.3, rel=0.2)
    assert 25 <= outcome.client["in_flight_max"] <= 70


def test_a_stall_of_the_server_appears_with_its_full_mass():
    """The server answers nothing between 0.5 and 1.5 s. Of 200 requests/s over 2.5 s, those of that
    second wait for its end: two of five, from nothing to a second. A busy machine only adds."""
    began_s: list[float] = []

    def route(request):
        now_s = asyncio.get_running_loop().time()
        began_s.append(now_s)
        at_s = now_s - began_s[0]
        return later(answer(request), max(0.0, 1.5 - at_s) if at_s >= 0.5 else 0.0)

    outcome = play(route, plan_of(asks_at([n / 200 for n in range(500)])))
    stalled = [one for one in outcome.counted if 0.55 <= one.at_s < 1.45]
    assert all(one.ttft_s > 1.5 - one.at_s - 0.05 for one in stalled)
    ttft_s = [one.ttft_s for one in outcome.counted]
    assert quantile(ttft_s, 0.99) > 0.93
    assert quantile(ttft_s, 0.90) > 0.70, "a quarter of the stall's mass is above that"


def test_a_spike_and_an_adversary_are_added_for_their_time_with_texts_of_their_own():
    spike = Addition("spike", Synthetic(1.0, lengths_of(20, 2), Constant()), 50.0, 2.0, 1.0)
    other = Addition("adversary", Synthetic(1.0, lengths_of(9, 1)), 5.0, 0.0, 1e9, "adversary")
    plain = traffic(Constant())
    plan = replace(plain, additions=(spike, other)).open_loop(10.0, Span(5.0, warm_s=1.0), seed=1)
    assert [ask.number for ask in plan.asks] == list(range(len(plan.asks)))
    assert list(plan.asks) == sorted(plan.asks, key=lambda ask: ask.at_ns)
    texts = [part.text for ask in plan.asks for part in ask.prompt]
    assert len(set(texts)) == len(texts)
    ours = [ask for ask in plan.asks if not ask.tenant]
    within = [ask for ask in ours if 3.0e9 <= ask.at_ns < 4.0e9]
    assert (len(ours), len(within)) == (59 + 49, 10 + 49)
    theirs = [ask for ask in plan.asks if ask.tenant == "adversary"]
    assert all(ask.at_ns >= 1e9 and ask.prompt_tokens == 9 for ask in theirs)
    assert len(theirs) == pytest.approx(25, abs=15)


def test_texts_are_those_of_the_plan_in_length_and_beginning_and_new_for_each_salt():
    words = Vocabulary(("aa", "bb", "cc", "dd"), frame_tokens=5)
    long, short = Ask(0, 0, (Part(2, 60),), 1), Ask(1, 0, (Part(2, 40), Part(7, 9)), 1)
    prompts = DrawnPrompts(words, "one")
    assert len(prompts.text(long).split()) == 55
    assert len(prompts.text(short).split()) == 44
    assert prompts.text(long).split()[:35] == prompts.text(short).split()[:35]
    assert prompts.text(long) == DrawnPrompts(words, "one").text(long)
    assert prompts.text(long) != DrawnPrompts(words, "two").text(long)


def test_a_plan_is_the_same_after_it_was_written_and_read(tmp_path):
    for name in ("plan.jsonl", "plan.jsonl.gz"):
        plan = traffic(Poisson()).open_loop(20.0, Span(3.0), seed=5)
        write_plan(tmp_path / name, plan)
        assert read_plan(tmp_path / name) == plan
    (tmp_path / "other").write_text("{}")
    with pytest.raises(CannotMeasure, match="no plan"):
        read_plan(tmp_path / "other")


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


def test_a_client_of_a_closed_loop_that_is_refused_comes_back_when_it_was_told():
    refusal = whole(b"{}", 429, ("retry-after-ms", "200"))
    outcome = play(lambda _: refusal, closed_plan(clients=4, counted_s=0.7))
    begun = sorted(one.begun_s for one in outcome.requests)
    assert len(begun) == 16
    assert begun[4] >= 0.2


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
