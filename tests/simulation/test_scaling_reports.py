"""Reports of autoscalers that cascade, flap or cut answers off, played on a fleet in virtual time.

Each test is named after the report whose symptom must not show.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.cluster.classes import ServiceClasses
from sluice.config.sections import SloSection
from sluice.core.admission import NS_PER_S
from sluice.core.costmodel import Coefficients
from sluice.core.limits import Peak, PoolLimits, ScaleLimits
from sluice.core.roster import BatchingLimits
from sluice.planner.outcome import Outcome
from sluice.planner.simulation import SimulatedFleet, SimulatedPool, Span, simulate
from sluice.runtime.virtual_fleet import LaterStart
from sluice.workload.asks import Ask, Part, own_text

SEATS, PROMPT, OUTPUT = 4, 400, 100
TIMES = Coefficients(50e6, 1e6, 2.5e6, 0.0, 0.0)
# What a request takes of a replica that is full: 0.4 s of prefill, 25 tokens' steps of 60 ms.
WORK_S = 1.9


@dataclass(frozen=True)
class Steps:
    """``parts`` are seconds and the replicas that their requests keep busy; ``even`` ones come at
    equal distances."""

    parts: tuple[tuple[float, float], ...]
    even: bool = True
    prompt: int = PROMPT

    def asks(self, seed: int) -> Iterator[Ask]:
        draw, number, begin_s = Random(seed), 0, 0.0
        for span_s, busy in self.parts:
            at_s = begin_s
            while busy:
                gap_s = WORK_S / busy
                at_s += gap_s if self.even else draw.expovariate(1.0 / gap_s)
                if at_s >= begin_s + span_s:
                    break
                prompt = (Part(own_text(number), self.prompt),)
                yield Ask(number, round(at_s * NS_PER_S), prompt, OUTPUT)
                number += 1
            begin_s += span_s


def played(load: Steps, cold_s: float = 60.0, *, seed: int = 1, **limits: Any) -> Outcome:
    scale = ScaleLimits(replicas_max=20, start_ns=round(cold_s * NS_PER_S), **limits)
    pool = SimulatedPool(
        PoolLimits("m", tuple(f"m-{number}" for number in range(20)), scale=scale),
        BatchingLimits(4096, 16, 4096, sequences_max=SEATS, step_ns_max=NS_PER_S),
        TIMES,
        ServiceClasses({"chat": SloSection(ttft_s=5.0, tpot_s=0.2)}, default="chat"),
    )
    fleet = SimulatedFleet((pool,), starting=LaterStart(round(cold_s * NS_PER_S)))
    requests = sum(1 for _ in load.asks(seed))
    return simulate(load, fleet, seed=seed, span=Span(requests))


def numbers(outcome: Outcome) -> list[int]:
    return [one.number for one in outcome.scalings]


def test_aibrix_2670_a_step_is_answered_once_and_not_again_while_replicas_load():
    outcome = played(Steps(((120, 1.0), (900, 4.0))), cold_s=180)
    # 4 busy at 0.85, a margin for what was not foreseen, and what users feel: not 16.
    assert max(numbers(outcome)) <= 12


def test_aibrix_593_the_fleet_comes_down_again_after_a_peak():
    outcome = played(Steps(((300, 3.0), (2700, 0.5))), cold_s=30)
    assert max(numbers(outcome)) >= 3
    assert numbers(outcome)[-1] <= 2


def test_keda_2900_3674_aibrix_553_kthena_1589_going_down_cuts_no_answer_off():
    outcome = played(Steps(((300, 3.0), (1500, 0.5)), even=False), cold_s=30)
    assert outcome.whole.failed == 0
    assert any(after < before for before, after in pairwise(numbers(outcome)))


def test_dynamo_9294_one_and_a_half_replicas_of_load_keep_two():
    outcome = played(Steps(((1800, 1.5),)), cold_s=30, replicas_min=1)
    settled = [one.number for one in outcome.scalings if one.at_s > 300]
    assert all(number >= 2 for number in settled)
    assert outcome.direction_changes <= 2


def test_d16_half_an_hour_of_steady_load_has_one_decision_each_way_at_most():
    outcome = played(Steps(((1800, 1.2),)), cold_s=30)
    steps = [after - before for before, after in pairwise(numbers(outcome))]
    assert len([step for step in steps if step > 0]) <= 1
    assert len([step for step in steps if step < 0]) <= 1


def test_ray_46497_one_quiet_minute_takes_nothing_away():
    outcome = played(Steps(((600, 3.0), (60, 0.0), (300, 3.0))), cold_s=30)
    after = [one.number for one in outcome.scalings if 600 <= one.at_s <= 700]
    assert all(number >= 4 for number in after)  # what 3 busy replicas need at 0.85


def test_ray_llm_133_kserve_3561_the_same_requests_with_longer_prompts_need_more():
    short = played(Steps(((600, 2.0),)), cold_s=30)
    long = played(Steps(((600, 2.0),), prompt=3 * PROMPT), cold_s=30)
    assert max(numbers(long)) > max(numbers(short))


def test_llm_d_1321_a_warm_replica_takes_a_burst_that_a_cold_start_misses():
    burst = Steps(((300, 0.6), (120, 1.8)))
    cold, warm = (played(burst, cold_s=300, warm=count) for count in (0, 1))
    assert warm.attainment > cold.attainment


RAMP = Steps(tuple((60.0, 1.0 + 0.3 * minute) for minute in range(10)))


def test_llm_d_1071_on_a_ramp_what_is_ordered_ahead_has_more_in_time_than_what_follows():
    ahead, following = (played(RAMP, cold_s=120, quantile=share) for share in (0.9, 0.0))
    assert ahead.attainment > following.attainment


def test_dynamo_14238_under_steady_load_the_forecast_costs_hardly_more_than_the_last_value():
    load = Steps(((900, 1.5),), even=False)
    forecast, last = (played(load, cold_s=60, quantile=share) for share in (0.9, 0.0))
    assert forecast.replica_hours <= 1.25 * last.replica_hours
    assert forecast.attainment >= last.attainment


@pytest.mark.parametrize("seed", [1, 2])
def test_inference_sim_744_chance_makes_no_waves(seed):
    outcome = played(Steps(((1800, 2.0),), even=False), cold_s=60, seed=seed)
    assert outcome.direction_changes <= 6


@settings(max_examples=8, deadline=None)
@given(
    parts=st.lists(
        st.tuples(st.sampled_from([60.0, 240.0]), st.sampled_from([0.0, 0.5, 2.0, 5.0])),
        min_size=1,
        max_size=4,
    ),
    warm=st.integers(0, 2),
    least=st.integers(1, 3),
)
def test_numbers_stay_within_bounds_and_every_request_ends_once(parts, warm, least):
    peak = Peak(60 * NS_PER_S, 200 * NS_PER_S, 86_400 * NS_PER_S, 4)
    load = Steps(tuple(parts), even=False)
    requests = sum(1 for _ in load.asks(1))
    if not requests:
        return
    outcome = played(load, cold_s=30, replicas_min=least, warm=warm, peaks=(peak,))
    assert all(least <= number <= 20 for number in numbers(outcome))
    under_peak = [one.number for one in outcome.scalings if 60 <= one.at_s < 200]
    assert all(number >= 4 for number in under_peak)
    whole = outcome.whole
    assert whole.requests == requests
    assert whole.failed == 0
