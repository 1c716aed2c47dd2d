"""An executor of a simulated fleet whose replica can be slow or stall, as faults or records say."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod

from sluice.core.batch import Stretch
from sluice.core.costmodel import Load, StepTimes
from sluice.core.events import ReplicaLimits
from sluice.core.step import Plan
from sluice.executors.base import Outcome
from sluice.executors.simulated import OutputTokens, SimulatedExecutor


@dataclass(slots=True, eq=False)
class Condition:
    """How a replica is at the moment. It outlives the processes of the replica.

    A step takes ``ratio`` times as long as ``times`` say, which changes from step to step. Faults
    at one time multiply, and stalls add up.
    """

    times: StepTimes
    ratio: Callable[[], float] | None = None
    stall_ns: int = 0
    factor: float = 1.0
    _slowed: list[float] = field(default_factory=list)

    def slow(self, factor: float) -> None:
        """Take ``factor`` times as long from now on."""
        self._slowed.append(factor)
        self.factor = prod(self._slowed)

    def recover(self, factor: float) -> None:
        """End one ``slow`` by this factor."""
        self._slowed.remove(factor)
        self.factor = prod(self._slowed)

    def stall(self, for_ns: int) -> None:
        """Let the next step take so much longer."""
        self.stall_ns += for_ns

    def predict_ns(self, load: Load) -> float:
        """See ``StepTimes``."""
        return self.times.predict_ns(load) * self.factor


class FaultyExecutor(SimulatedExecutor):
    """Computes at the speed that ``condition`` allows."""

    def __init__(
        self, limits: ReplicaLimits, condition: Condition, output_tokens: OutputTokens
    ) -> None:
        super().__init__(limits, condition, output_tokens=output_tokens, checked=False)
        self._condition = condition

    def run(self, plan: Plan) -> Outcome:
        """See ``StepExecutor``. A stall is over with one step."""
        outcome, condition = super().run(plan), self._condition
        if condition.ratio is not None:
            outcome = replace(outcome, duration_ns=int(outcome.duration_ns * condition.ratio()))
        if condition.stall_ns:
            outcome = replace(outcome, duration_ns=outcome.duration_ns + condition.stall_ns)
            condition.stall_ns = 0
        return outcome

    def foresee(self, plan: Plan, steps: int) -> Stretch:
        """See ``Foreseeing``. Steps that differ are taken one at a time."""
        return super().foresee(plan, steps if self._condition.ratio is None else 0)
