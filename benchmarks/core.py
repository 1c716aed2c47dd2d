"""How fast the policy is: time per ``Replica.handle(StepDone)``, steps per second in virtual time.

Run with ``python benchmarks/core.py``. One core is enough. Figures are medians over the steps.
"""

from statistics import median, quantiles
from time import perf_counter_ns

from sluice.core.costmodel import Coefficients, LinearCostModel
from sluice.core.events import ReplicaEffect, RunStep, StepDone, Submitted
from sluice.core.replica import Replica
from sluice.core.request import Request
from sluice.core.roster import BatchingLimits
from sluice.core.step import Plan, Sampled

STEPS = 400


def planned(effects: list[ReplicaEffect]) -> Plan:
    """The plan among the effects."""
    return next(effect.plan for effect in effects if isinstance(effect, RunStep))


def decode_step_us(rows: int) -> list[float]:
    """Microseconds of each decode step with that many rows, targets set, cost model learning."""
    limits = BatchingLimits(context_tokens_max=8192, block_size=32, blocks_total=8192)
    replica = Replica(limits, LinearCostModel(Coefficients()))
    effects: list[ReplicaEffect] = []
    for number in range(rows):
        prompt = tuple(range(number, number + 100))
        request = Request(f"r{number}", 0, prompt, 2000, ttft_due_ns=10**9, tpot_ns=200_000_000)
        effects += replica.handle(Submitted(request), 0)
    plan, now_ns, times_us = planned(effects), 0, []
    for _ in range(STEPS + 40):
        now_ns += plan.predicted_ns
        sampled = tuple(Sampled(row.sequence, 7) for row in plan.rows if row.sample)
        event = StepDone(plan.step, sampled, plan.predicted_ns)
        began_ns = perf_counter_ns()
        effects = replica.handle(event, now_ns)
        took_ns = perf_counter_ns() - began_ns
        plan = planned(effects)
        times_us.append(took_ns / 1000)
    return times_us[-STEPS:]


def main() -> None:
    """Print the tables."""
    print("Replica.handle(StepDone), decode only, cost model refit included")
    print(f"{'rows':>6} {'median us':>10} {'p95 us':>8} {'us per row':>11}")
    for rows in (1, 4, 8, 16, 32):
        times_us = decode_step_us(rows)
        middle = median(times_us)
        high = quantiles(times_us, n=20)[-1]
        print(f"{rows:>6} {middle:>10.1f} {high:>8.1f} {middle / rows:>11.2f}")


if __name__ == "__main__":
    main()
