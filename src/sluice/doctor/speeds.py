"""How long steps take at the usual speed, and how far each step of a journal is from it.

Fitted to the steps of the baseline, in the terms of the cost model; ``world`` makes replicas of it,
and checks ask it which steps are slow for what is in them.
"""

from dataclasses import dataclass

import numpy as np

from sluice.core.costmodel import TYPICAL, Coefficients, nonnegative_least_squares
from sluice.doctor.columns import Floats, Ints, Journal, Mask
from sluice.doctor.windows import Windows

# Steps and seconds over which a speed is the mean, and what it must change by to be another one.
_BIN_STEPS = 25
_BIN_S_MIN = 1.0
_FACTOR_STEP = 0.04
# A step this much beyond its prediction was stalled: it says nothing of the usual speed.
_RATIO_MAX = 3.0
_STEPS_MIN = 60
# So many times the most of any usual step is more than the fit to these can tell of.
_BEYOND = 1.1
_BEYOND_STEPS_MIN = 10


@dataclass(frozen=True, eq=False, slots=True)
class Speeds:
    """How long steps take: coefficients of the usual speed, and what each step took of it.

    ``wall_ns`` are times with the pause before, ``expected_ns`` what the coefficients say.
    """

    coefficients: Coefficients
    replica: Ints
    end_ns: Floats
    wall_ns: Floats
    expected_ns: Floats

    @property
    def ratio(self) -> Floats:
        """How many times the usual each step took."""
        return self.wall_ns / self.expected_ns

    @classmethod
    def of(cls, journal: Journal, windows: Windows) -> "Speeds":
        """Fitted to the steps of the baseline, or to all where there are too few.

        Steps of the incident with more in them than any of the baseline say how time grows from
        there on, less what their replica is slower at the work that it had before too: a fit
        that has seen short prompts alone can be many times off for long ones.
        """
        steps = journal.steps
        features, wall_ns = step_features(journal)
        usual = (steps.end_ns >= windows.baseline.start_ns) & (
            steps.end_ns < windows.baseline.end_ns
        )
        if np.count_nonzero(usual) < _STEPS_MIN:
            usual = np.ones(len(steps), dtype=bool)
        coefficients = fitted(features[usual], wall_ns[usual])
        ratio = wall_ns / predicted(coefficients, features)
        kept = usual & (ratio < _RATIO_MAX) & (ratio > 1 / _RATIO_MAX)
        if np.count_nonzero(kept) >= _STEPS_MIN:
            coefficients = fitted(features[kept], wall_ns[kept])
        else:
            kept = usual
        beyond = (
            np.any(features > _BEYOND * features[kept].max(axis=0, initial=0.0), axis=1) & ~usual
        )
        if np.count_nonzero(beyond) >= _BEYOND_STEPS_MIN:
            ratio = wall_ns / predicted(coefficients, features)
            known = ~usual & ~beyond & (steps.end_ns >= windows.incident.start_ns)
            slower = _medians(ratio, steps.replica, known)
            kept = kept | beyond
            coefficients = fitted(features[kept], (wall_ns / np.where(beyond, slower, 1.0))[kept])
        expected_ns = predicted(coefficients, features)
        return cls(coefficients, steps.replica, steps.end_ns, wall_ns, expected_ns)

    def factors(self, replica: int, began_ns: float) -> tuple[tuple[float, float], ...]:
        """The ratio of a replica over time, by bins; what is alike is one entry."""
        mine = (self.replica == replica) & (self.end_ns >= began_ns)
        times = (self.end_ns[mine] - began_ns) / 1e9
        wall_ns, expected_ns = self.wall_ns[mine], self.expected_ns[mine]
        found = [(0.0, 1.0)]
        start = 0
        while start < len(times):
            end = max(start + _BIN_STEPS, int(np.searchsorted(times, times[start] + _BIN_S_MIN)))
            factor = float(wall_ns[start:end].sum() / expected_ns[start:end].sum())
            if abs(factor - found[-1][1]) > _FACTOR_STEP:
                found.append((1e9 * float(times[start]), factor))
            start = end
        return tuple(found)


def _medians(ratio: Floats, replica: Ints, known: Mask) -> Floats:
    """The median ratio of each step's replica among the known steps; 1 where these are few."""
    found = np.ones(len(ratio))
    for number in np.unique(replica):
        mine = known & (replica == number)
        if np.count_nonzero(mine) >= _BIN_STEPS:
            found[replica == number] = np.median(ratio[mine])
    return found


def step_features(journal: Journal) -> tuple[Floats, Floats]:
    """What was in each step in the terms of the cost model, and its wall time with its pause."""
    steps = journal.steps
    block_size = max((change.block_size for change in journal.replicas), default=1)
    context = np.where(steps.rows > 0, steps.kv_blocks * block_size, 0.0)
    features = np.stack(
        (
            np.ones(len(steps)),
            steps.rows + steps.prefill,
            steps.rows,
            context,
            steps.chunk_context,
        ),
        axis=1,
    )
    return features, steps.measured_ns + steps.pause_ns


def fitted(features: Floats, wall_ns: Floats) -> Coefficients:
    """Coefficients by non-negative least squares of relative errors."""
    scaled = features / np.array(TYPICAL) * 1e6 / wall_ns[:, None]
    gram = scaled.T @ scaled + 1e-9 * np.eye(len(TYPICAL))
    moment = scaled.sum(axis=0)
    found = [1.0] * len(TYPICAL)
    for _ in range(20):  # each call goes as far as predictions can tell, from a better start
        found = nonnegative_least_squares(gram.tolist(), moment.tolist(), found)
    return Coefficients(*(ms * 1e6 / typical for ms, typical in zip(found, TYPICAL, strict=True)))


def predicted(coefficients: Coefficients, features: Floats) -> Floats:
    """What the coefficients say of steps."""
    weights = np.array(
        (
            coefficients.step_ns,
            coefficients.token_ns,
            coefficients.row_ns,
            coefficients.decode_context_ns,
            coefficients.chunk_context_ns,
        )
    )
    found: Floats = np.maximum(1.0, features @ weights)
    return found
