"""The cost model learns this machine's speed within a bounded time, before anything is served."""

from dataclasses import astuple

from sluice.core.costmodel import Coefficients, LinearCostModel, Load
from sluice.core.events import ReplicaLimits
from sluice.executors.simulated import SimulatedExecutor
from sluice.runtime.calibration import SPENT_NS_MAX, calibrate
from sluice.testing.executors import FakeExecutor

LIMITS = ReplicaLimits(context_tokens_max=2048, block_size=16, blocks_total=128, sequences_max=4)
CHUNK = Load().with_chunk(0, 64)


def test_predictions_come_near_a_machine_of_another_speed():
    untaught = LinearCostModel(Coefficients())
    fast = Coefficients(*(value / 8 for value in astuple(Coefficients())))
    executor = SimulatedExecutor(LIMITS, fast)
    cost = LinearCostModel(Coefficients())
    calibrate(executor, LIMITS, cost)
    truth_ns = fast.predict_ns(CHUNK)
    assert abs(cost.step_ns(CHUNK) - truth_ns) < 0.6 * truth_ns
    assert abs(untaught.step_ns(CHUNK) - truth_ns) > 6 * truth_ns


def test_a_slow_machine_is_measured_by_fewer_steps():
    spent_ns = []

    def duration_ns(plan):
        spent_ns.append(plan.tokens * 8_000_000)
        return spent_ns[-1]

    executor = FakeExecutor(LIMITS, duration_ns=duration_ns)
    executor.load()
    calibrate(executor, LIMITS, LinearCostModel(Coefficients()))
    assert 2 <= len(spent_ns) < 8
    assert sum(spent_ns) <= SPENT_NS_MAX
    assert executor.open == {}


def test_a_small_pool_is_not_exceeded():
    small = ReplicaLimits(context_tokens_max=2048, block_size=4, blocks_total=10, sequences_max=4)
    executor = FakeExecutor(small)
    executor.load()
    calibrate(executor, small, LinearCostModel(Coefficients()))
    assert 0 < sum(plan.tokens for plan in executor.plans) <= 40
