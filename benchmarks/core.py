"""How fast the policy is: time per ``Replica.handle(StepDone)``, steps per second in virtual time.

Run with ``python benchmarks/core.py``. One core is enough. Figures are medians over the steps.
"""

from random import Random
from statistics import median, quantiles
from time import perf_counter_ns, process_time_ns

from sluice.core.costmodel import Coefficients, FixedCostModel, LinearCostModel
from sluice.core.events import ReplicaEffect, ReplicaLimits, RunStep, StepDone, Submitted
from sluice.core.replica import Replica
from sluice.core.request import Request
from sluice.core.roster import BatchingLimits
from sluice.core.step import Plan, Sampled
from sluice.executors.simulated import SimulatedExecutor
from sluice.runtime.virtual import Stretching, VirtualDriver

STEPS = 400
REQUESTS = 2000


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


def virtual_run(stretch_steps_max: int) -> tuple[float, int, int, float]:
    """Processor seconds, events, steps and virtual seconds of a run of ``REQUESTS`` requests."""
    limits = BatchingLimits(4096, 32, 2048)
    random = Random(1)
    lengths: dict[str, int] = {}
    executor = SimulatedExecutor(
        ReplicaLimits(4096, 32, 2048, 32),
        Coefficients(),
        output_tokens=lambda sequence: lengths[sequence.request_id],
    )
    driver = VirtualDriver(end_tokens=frozenset({0}), stretching=Stretching(stretch_steps_max))
    driver.add("replica", Replica(limits, FixedCostModel(Coefficients())), executor)
    at_ns = 0
    for number in range(REQUESTS):
        at_ns += int(random.expovariate(2.0) * 1e9)
        prompt = tuple(range(number, number + random.randint(20, 400)))
        request = Request(f"r{number}", at_ns, prompt, 400, ttft_due_ns=at_ns + 2 * 10**9)
        lengths[request.id] = random.randint(10, 300)
        driver.submit(at_ns, "replica", request)
    began_ns = process_time_ns()
    driver.run()
    return (process_time_ns() - began_ns) / 1e9, driver.events, driver.steps, driver.now_ns / 1e9


def main() -> None:
    """Print the tables."""
    print("Replica.handle(StepDone), decode only, cost model refit included")
    print(f"{'rows':>6} {'median us':>10} {'p95 us':>8} {'us per row':>11}")
    for rows in (1, 4, 8, 16, 32):
        times_us = decode_step_us(rows)
        middle = median(times_us)
        high = quantiles(times_us, n=20)[-1]
        print(f"{rows:>6} {middle:>10.1f} {high:>8.1f} {middle / rows:>11.2f}")
    print(f"\nVirtual driver, one replica, {REQUESTS} requests, Poisson 2 per second")
    print(f"{'stretches':>10} {'cpu s':>8} {'events/s':>9} {'steps/s':>9} {'x real time':>12}")
    for name, steps_max in (("off", 0), ("on", 256)):
        cpu_s, events, steps, virtual_s = virtual_run(steps_max)
        speed = virtual_s / cpu_s
        rates = f"{events / cpu_s:>9.0f} {steps / cpu_s:>9.0f}"
        print(f"{name:>10} {cpu_s:>8.2f} {rates} {speed:>12.0f}")


if __name__ == "__main__":
    main()
