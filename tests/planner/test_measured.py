"""The speed of a replica from its journal: coefficients, pauses, and slow times."""

from random import Random

import pytest

from sluice.core.costmodel import Coefficients, Load
from sluice.planner.measured import STEPS_MIN, Sample, StepLoads, speed_of
from sluice.telemetry.records import Chunk, RequestArrived, Step

MS = 1_000_000
TRUE = Coefficients(5e6, 40e3, 300e3, 90.0, 2.0)


def samples(count, slow=1.0):
    random = Random(1)
    for number in range(count):
        rows = random.randrange(30)
        load = Load(rows, rows, rows * random.randrange(100, 2000))
        if number % 3 == 0:
            load = load.with_chunk(random.randrange(500), random.randrange(1, 300))
        factor = slow if number >= count // 2 else 1.0
        yield Sample(number * 50 * MS, load, TRUE.predict_ns(load) * factor)


def test_coefficients_are_recovered_from_steps():
    speed = speed_of(list(samples(400)))
    assert speed is not None
    for load in (Load(1, 1, 200), Load(20, 20, 30_000), Load(5, 5, 900).with_chunk(0, 200)):
        assert speed.predict_ns(load) == pytest.approx(TRUE.predict_ns(load), rel=0.02)


def test_a_slow_time_of_the_machine_is_slow_at_that_time():
    speed = speed_of(list(samples(400, slow=2.0)))
    assert speed is not None
    early, late = speed.ratio(50 * 50 * MS), speed.ratio(350 * 50 * MS)
    assert late / early == pytest.approx(2.0, rel=0.25)
    assert speed.ratio(10**15) == speed.ratio(399 * 50 * MS)


def test_few_steps_say_nothing():
    assert speed_of(list(samples(STEPS_MIN - 1))) is None


def test_loads_are_worked_out_and_short_pauses_belong_to_steps():
    loads = StepLoads()
    loads.take(RequestArrived(0, "r", "m", 0, 100, 50))
    steps = [
        Step(20 * MS, "m-0", 1, 0, 10 * MS, prefill=(Chunk("r", 0, 100, 0),)),
        Step(33 * MS, "m-0", 2, 0, 10 * MS, decode=(("r", 0),)),
        Step(300 * MS, "m-0", 3, 0, 10 * MS, decode=(("r", 0),)),
        Step(310 * MS, "m-0", 4, 0, 10 * MS, decode=(("r", 0),), error="broken"),
    ]
    for step in steps:
        loads.take(step)
    first, second, third = loads.replicas["m-0"].samples
    assert first.load == Load().with_chunk(0, 100)
    assert second.load == Load(1, 1, 101)
    assert third.load == Load(1, 1, 102)
    assert second.wall_ns == 13 * MS
    assert third.wall_ns == 10 * MS + (10 + 3) * MS // 2  # after an idle time: the usual pause
