"""Simulated steps on the wall clock: they end when they should, whatever happens between them."""

import pytest

from sluice.core.costmodel import Coefficients
from sluice.core.events import ReplicaLimits
from sluice.core.request import SequenceId
from sluice.core.sampling import Sampling
from sluice.core.step import Plan, Row
from sluice.executors.paced import ANSWER_TOKENS, LAG_NS_MAX, PacedExecutor

MS = 1_000_000
TIMES = Coefficients(20e6, 0.0, 0.0, 0.0, 0.0)
LIMITS = ReplicaLimits(2048, 16, 64, 8)
SEQUENCE = SequenceId("r", 0)


class Clock:
    """A clock that moves when somebody sleeps, and by ``move``."""

    def __init__(self):
        self.now_ns = 1000 * MS

    def read(self):
        return self.now_ns

    def sleep_until(self, at_ns):
        self.now_ns = max(self.now_ns, at_ns)

    def move(self, ns):
        self.now_ns += ns


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def executor(clock):
    paced = PacedExecutor(LIMITS, TIMES, 64, clock.read, clock.sleep_until)
    paced.open_sequence(SEQUENCE, Sampling(temperature=0.0), (1, 2, 3))
    return paced


def step(past_tokens):
    return Plan(1, (Row(SEQUENCE, (1,), past_tokens, tuple(range(64)), sample=True),), 0)


def test_a_step_returns_when_its_predicted_time_is_over(executor, clock):
    assert executor.run(step(3)).duration_ns == 20 * MS
    assert clock.now_ns == 1020 * MS


def test_what_the_process_needs_between_steps_does_not_slow_them(executor, clock):
    executor.run(step(3))
    clock.move(15 * MS)
    assert executor.run(step(4)).duration_ns == 20 * MS
    assert clock.now_ns == 1040 * MS
    clock.move(30 * MS)  # longer than a step: the next ones make up for it
    executor.run(step(5))
    executor.run(step(6))
    assert clock.now_ns == 1080 * MS


def test_time_that_a_busy_machine_cannot_make_up_for_is_lost_and_told(executor, clock):
    executor.run(step(3))
    clock.move(LAG_NS_MAX + 7 * MS)
    assert executor.run(step(4)).duration_ns == 27 * MS
    for number in range(5, 9):  # no time is needed between these
        executor.run(step(number))
    assert clock.now_ns == (1020 + 7 + 5 * 20) * MS


def test_a_step_of_others_begins_when_it_is_asked_for(executor, clock):
    executor.run(step(3))
    clock.move(3 * MS)
    other = SequenceId("s", 0)
    executor.open_sequence(other, Sampling(temperature=0.0), (1, 2, 3))
    plan = Plan(2, (Row(other, (1,), 3, tuple(range(64)), sample=True),), 0)
    assert executor.run(plan).duration_ns == 20 * MS
    assert clock.now_ns == 1043 * MS


def test_answers_end_by_themselves_and_equal_requests_alike(executor):
    def length(number, seed, choice=0):
        sequence = SequenceId(f"r{number}", choice)
        executor.open_sequence(sequence, Sampling(seed=seed), (9, 8, 7))
        tokens = [executor.run(one(sequence, past)).sampled[0].token for past in range(2, 900)]
        executor.end_sequence(sequence)
        return tokens.index(0) + 1

    def one(sequence, past):
        return Plan(1, (Row(sequence, (1,), past, tuple(range(64)), sample=True),), 0)

    lengths = [length(number, seed) for number, seed in enumerate((1, 1, 2, 3, 4))]
    assert set(lengths) <= set(ANSWER_TOKENS)
    assert lengths[0] == lengths[1]
    assert len(set(lengths)) > 1
    assert len({length(number, 1, number) for number in range(4)}) > 1
