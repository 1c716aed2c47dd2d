"""Several decode steps taken at once leave a replica exactly as one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.core.batch import Stretch
from sluice.core.costmodel import Coefficients, FixedCostModel, LinearCostModel
from sluice.core.errors import InternalError
from sluice.core.replica import Replica
from sluice.core.request import Request
from sluice.core.roster import BatchingLimits, BatchingPolicy
from sluice.executors.simulated import SimulatedExecutor
from sluice.runtime.virtual import STEP_BY_STEP, Stretching, VirtualDriver
from sluice.testing.executors import FakeExecutor
from sluice.testing.replicas import REPLICA_ID, ReplicaRun, executor_limits

MS = 1_000_000
COEFFICIENTS = Coefficients()


requests = st.lists(
    st.tuples(
        st.integers(0, 3000),  # arrival, ms
        st.integers(1, 40),  # prompt
        st.integers(1, 60),  # output limit
        st.sampled_from([1, 1, 2]),  # choices
        st.one_of(st.none(), st.integers(1, 60)),  # own length
        st.one_of(st.none(), st.integers(100, 4000)),  # deadline, ms after arrival
    ),
    min_size=1,
    max_size=12,
)


def run(limits, arrivals, *, learning, stretching):
    lengths = {f"r{number}": arrival[4] for number, arrival in enumerate(arrivals)}
    executor = SimulatedExecutor(
        executor_limits(limits), COEFFICIENTS, output_tokens=lambda s: lengths[s.request_id]
    )
    cost = LinearCostModel(COEFFICIENTS) if learning else FixedCostModel(COEFFICIENTS)
    done = ReplicaRun(limits, executor, cost, frozenset({0}), stretching=stretching)
    for length in range(1, 61):  # enough history for predictions, which change with every token
        done.replica.roster.lengths.observe(length)
    for number, (at_ms, prompt, output, choices, _, patience_ms) in enumerate(arrivals):
        done.submit(
            Request(
                f"r{number}",
                at_ms * MS,
                tuple(range(number % 3, number % 3 + prompt)),
                min(output, limits.context_tokens_max - prompt),
                choices,
                deadline_ns=None if patience_ms is None else (at_ms + patience_ms) * MS,
            ),
            at_ms * MS,
        )
    return done.run()


@given(
    requests,
    st.sampled_from(BatchingPolicy),
    st.integers(16, 60),
    st.integers(1, 6),
    st.booleans(),
    st.booleans(),
)
def test_stretches_equal_single_steps(arrivals, policy, blocks, sequences, prefix_cache, learning):
    limits = BatchingLimits(
        context_tokens_max=64,
        block_size=4,
        blocks_total=blocks,
        sequences_max=sequences,
        policy=policy,
        prefix_cache=prefix_cache,
        static_sequences=3,
    )
    single = run(limits, arrivals, learning=learning, stretching=STEP_BY_STEP)
    plans = {plan.step: (start_ns, plan) for start_ns, plan in single.steps}
    for silence_ns_max in (None, 200 * MS, 10_000 * MS):
        stretching = Stretching(silence_ns_max=silence_ns_max)
        at_once = run(limits, arrivals, learning=learning, stretching=stretching)
        assert at_once.ends == single.ends
        assert at_once.end_ns == single.end_ns
        assert at_once.driver.steps == single.driver.steps
        assert all(plans[plan.step] == (start_ns, plan) for start_ns, plan in at_once.steps)


def test_long_answers_are_taken_in_few_events():
    limits = BatchingLimits(context_tokens_max=4096, block_size=32, blocks_total=400)
    driver = VirtualDriver()
    executor = SimulatedExecutor(executor_limits(limits), COEFFICIENTS)
    driver.add(REPLICA_ID, Replica(limits, FixedCostModel(COEFFICIENTS)), executor)
    for number in range(8):
        driver.submit(0, REPLICA_ID, Request(f"r{number}", 0, tuple(range(50)), 2000))
    driver.run()
    assert driver.steps > 2000
    assert driver.events < 100


def test_stretch_beyond_the_horizon_is_refused():
    limits = BatchingLimits(context_tokens_max=64, block_size=4, blocks_total=60)
    replica_run = ReplicaRun(limits, FakeExecutor(executor_limits(limits)))
    replica_run.submit(Request("a", 0, (1, 2, 3), 10))
    replica_run.run(until_ns=15 * MS)
    replica = replica_run.replica
    assert replica.horizon() == 8  # one token came, one is being computed, the last ends it
    with pytest.raises(InternalError, match="horizon"):
        replica.skip(Stretch(((7,) * 9,), (MS,) * 9))
