"""How long a step takes, from what is in it.

``T = step + token x tokens + row x decode_rows + decode_context x (sum of the decode rows'
contexts) + chunk_context x (sum over the chunk positions of their contexts)``. All coefficients are
at least zero, so the time never falls when work is added and chunk sizes can be found by bisection.

``core/batching.py`` asks for predictions, ``core/replica.py`` feeds measured steps back.
Predictions carry no margin; ``margin`` says by how much to multiply where being late matters.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence as Seq
from dataclasses import astuple, dataclass, field, replace
from math import ceil, fsum
from operator import mul
from typing import NamedTuple, Protocol


class Load(NamedTuple):
    """What is in a step, in the terms of the cost model.

    ``chunk_context_tokens`` adds up, over all positions of all chunks, how many tokens each
    position attends to (itself included).
    """

    tokens: int = 0
    decode_rows: int = 0
    decode_context_tokens: int = 0
    chunk_context_tokens: int = 0

    def with_chunk(self, past_tokens: int, tokens: int) -> "Load":
        """The load with a prefill chunk of ``tokens`` behind ``past_tokens`` added."""
        before, rows, decode_context, chunk_context = self
        chunk_context += tokens * past_tokens + tokens * (tokens + 1) // 2
        return Load(before + tokens, rows, decode_context, chunk_context)

    def without_rows(self, rows: int, context_tokens: int) -> "Load":
        """The load without so many of its decode rows, which attend to so many tokens in all."""
        tokens, decode_rows, context, chunk_context = self
        return Load(tokens - rows, decode_rows - rows, context - context_tokens, chunk_context)

    def steps_later(self, steps: int) -> "Load":
        """The load of the same decode rows so many steps after this one."""
        tokens, rows, context, chunk_context = self
        return Load(tokens, rows, context + steps * rows, chunk_context)


class CostModel(Protocol):
    """What the batching policy needs to know about the speed of its executor.

    One that never ``learns`` need not observe.
    """

    learns: bool

    @property
    def margin(self) -> float:
        """Factor of at least 1 that turns a prediction into one rarely exceeded."""

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens computed per second of steps with prefill, decode rows beside them."""

    def step_ns(self, load: Load) -> int:
        """Predicted duration, never falling with any part of the load."""

    def observe(self, load: Load, duration_ns: int) -> None:
        """Learn from a measured step."""


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Nanoseconds per unit of each part of a load; none is negative.

    The defaults are of the order of a 135M-parameter model on two CPU cores and are replaced by a
    measured calibration where there is one.
    """

    step_ns: float = 18e6
    token_ns: float = 0.45e6
    row_ns: float = 0.9e6
    decode_context_ns: float = 1500.0
    chunk_context_ns: float = 300.0

    def predict_ns(self, load: Load) -> float:
        """Duration of a step with this load."""
        tokens, rows, decode_context, chunk_context = load
        return (
            self.step_ns
            + self.token_ns * tokens
            + self.row_ns * rows
            + self.decode_context_ns * decode_context
            + self.chunk_context_ns * chunk_context
        )


def chunk_tokens_max(
    model: CostModel, load: Load, past_tokens: int, budget_ns: int, tokens_max: int
) -> int:
    """Largest chunk up to ``tokens_max`` that keeps ``margin`` x the step within the budget."""
    limit_ns = budget_ns / model.margin

    def exceeds(tokens: int) -> bool:
        return model.step_ns(load.with_chunk(past_tokens, tokens)) > limit_ns

    if not exceeds(tokens_max):
        return tokens_max
    return bisect_left(range(1, tokens_max), x=True, key=exceeds)


class StepTimes(Protocol):
    """How long steps take: ``Coefficients``, or what is known of hardware that is not here."""

    def predict_ns(self, load: Load) -> float:
        """Duration of a step, never falling with any part of the load."""


class FixedCostModel:
    """Times that are taken as true: what a simulated executor runs on.

    The speed of prefill is that of a lone chunk of ``chunk_tokens``.
    """

    learns = False

    def __init__(self, times: StepTimes, *, chunk_tokens: int = 128) -> None:
        self._times = times
        self.prefill_tokens_per_s = nominal_prefill_tokens_per_s(times, chunk_tokens)

    @property
    def margin(self) -> float:
        """Always 1: the prediction is the outcome."""
        return 1.0

    def step_ns(self, load: Load) -> int:
        return int(self._times.predict_ns(load))

    def observe(self, load: Load, duration_ns: int) -> None:
        """Learn nothing."""


def nominal_prefill_tokens_per_s(times: StepTimes, chunk_tokens: int = 128) -> float:
    """Speed of a lone chunk: a first guess before anything was measured."""
    return chunk_tokens * 1e9 / max(1.0, times.predict_ns(Load().with_chunk(0, chunk_tokens)))


# A typical step. Dividing features by it brings the normal equations to one scale.
TYPICAL = (1.0, 100.0, 8.0, 4000.0, 20000.0)
FORGET = 0.99  # per step of the same kind: a memory of about 100 steps
PRIOR_STEPS = 1.0  # weight of the seed, in steps; decides only what the steps leave open
RATIO_MAX = 3.0  # a stalled machine's step counts as this many times its prediction
RATIOS_KEPT = 128
RATIOS_MIN = 20  # below this many the p95 would be the maximum, which one stall would own
MARGIN_FIRST = 1.2
REFIT_STEPS = 16
SWEEPS_MAX = 100
RATE_FORGET = 0.98


@dataclass(slots=True)
class CostState:
    """Everything a ``LinearCostModel`` has learnt, as plain numbers that can be stored.

    ``gram`` and ``moment`` are the normal equations of steps without and with prefill.
    """

    seed: Coefficients
    coefficients: Coefficients
    rate_tokens: float
    rate_s: float
    gram: list[list[float]] = field(default_factory=lambda: [[0.0] * 25, [0.0] * 25])
    moment: list[list[float]] = field(default_factory=lambda: [[0.0] * 5, [0.0] * 5])
    ratios: list[float] = field(default_factory=list)
    observed: int = 0

    def copy(self) -> "CostState":
        """An independent copy."""
        return replace(self, gram=[*self.gram], moment=[*self.moment], ratios=[*self.ratios])


class LinearCostModel:
    """Refits the coefficients to measured steps by non-negative least squares with forgetting.

    Errors are weighed relative to the prediction. Steps with and without prefill are summed and
    forgotten apart, so a long stretch of decoding does not erase what is known about prefill.
    """

    learns = True

    def __init__(self, seed: Coefficients, state: CostState | None = None) -> None:
        if state is None:
            # A millisecond at the nominal speed: any measured step outweighs it.
            state = CostState(seed, seed, nominal_prefill_tokens_per_s(seed) * 1e-3, 1e-3)
        self._learnt = state.copy()
        self._ratios_sorted = sorted(state.ratios)

    def state(self) -> CostState:
        """What was learnt so far; a model made with it continues from here."""
        return self._learnt.copy()

    @property
    def coefficients(self) -> Coefficients:
        """The coefficients in use."""
        return self._learnt.coefficients

    @property
    def margin(self) -> float:
        """Running 95th percentile of measured over predicted, kept between 1 and 2."""
        ratios = self._ratios_sorted
        if len(ratios) < RATIOS_MIN:
            return MARGIN_FIRST
        return min(2.0, max(1.0, ratios[ceil(0.95 * len(ratios)) - 1]))

    @property
    def prefill_tokens_per_s(self) -> float:
        return self._learnt.rate_tokens / self._learnt.rate_s

    def step_ns(self, load: Load) -> int:
        return int(self._learnt.coefficients.predict_ns(load))

    def observe(self, load: Load, duration_ns: int) -> None:
        """Add one measured step; refits every few steps."""
        learnt = self._learnt
        predicted_ns = max(1.0, learnt.coefficients.predict_ns(load))
        ratio = duration_ns / predicted_ns
        self._keep_ratio(ratio)
        ratio = min(RATIO_MAX, max(1 / RATIO_MAX, ratio))
        prefill_tokens = load.tokens - load.decode_rows
        if prefill_tokens:
            learnt.rate_tokens = RATE_FORGET * learnt.rate_tokens + prefill_tokens
            learnt.rate_s = RATE_FORGET * learnt.rate_s + ratio * predicted_ns / 1e9
        scale = 1e6 / predicted_ns  # milliseconds keep the sums near 1
        features = [
            feature / typical * scale for feature, typical in zip((1, *load), TYPICAL, strict=True)
        ]
        kind = 1 if prefill_tokens else 0
        products = [a * b for a in features for b in features]
        gram, moment = learnt.gram, learnt.moment
        gram[kind] = [FORGET * a + b for a, b in zip(gram[kind], products, strict=True)]
        moment[kind] = [FORGET * a + ratio * b for a, b in zip(moment[kind], features, strict=True)]
        learnt.observed += 1
        if learnt.observed % REFIT_STEPS == 0 or learnt.observed in (2, 4, 8):
            self._refit()

    def _keep_ratio(self, ratio: float) -> None:
        ratios = self._learnt.ratios
        if len(ratios) == RATIOS_KEPT:
            del self._ratios_sorted[bisect_left(self._ratios_sorted, ratios.pop(0))]
        ratios.append(ratio)
        insort(self._ratios_sorted, ratio)

    def _refit(self) -> None:
        units_ms = in_units(self._learnt.seed)
        prior = PRIOR_STEPS / max(1e-6, fsum(units_ms)) ** 2
        gram = [a + b for a, b in zip(*self._learnt.gram, strict=True)]
        moment = [a + b for a, b in zip(*self._learnt.moment, strict=True)]
        for index, unit_ms in enumerate(units_ms):
            gram[index * 6] += prior
            moment[index] += prior * unit_ms
        rows = [gram[start : start + 5] for start in range(0, 25, 5)]
        fitted = nonnegative_least_squares(rows, moment, in_units(self._learnt.coefficients))
        self._learnt.coefficients = Coefficients(
            *(unit_ms * 1e6 / typical for unit_ms, typical in zip(fitted, TYPICAL, strict=True))
        )


def in_units(coefficients: Coefficients) -> list[float]:
    """Milliseconds of each part in a typical step: the scale on which coefficients are fitted."""
    return [
        coefficient * typical / 1e6
        for coefficient, typical in zip(astuple(coefficients), TYPICAL, strict=True)
    ]


def nonnegative_least_squares(
    gram: Seq[Seq[float]], moment: Seq[float], start: Seq[float]
) -> list[float]:
    """Minimise ``x'Gx - 2m'x`` over ``x >= 0`` for a positive definite ``G``, from ``start``.

    Sums are exact, as what ``sum`` makes of floats depends on the version of Python. Coordinate
    descent with projection: each variable in turn goes to its best value that is not
    negative. What is left open after ``SWEEPS_MAX`` rounds makes no difference to predictions.
    """
    solution = [max(0.0, x) for x in start]
    for _ in range(SWEEPS_MAX):
        largest = 0.0
        for index, row in enumerate(gram):
            slope = moment[index] - fsum(map(mul, row, solution))
            value = max(0.0, solution[index] + slope / row[index])
            largest = max(largest, abs(value - solution[index]))
            solution[index] = value
        if largest <= 1e-6 * max(solution):
            break
    return solution
