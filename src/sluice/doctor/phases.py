"""Where the excess is: the mean time of slow requests in each phase, less what was usual.

Means of exclusive phases add up, percentiles do not, so shares of phases are of the mean excess of
the slowest. What they do not explain is told as unattributed.
"""

from dataclasses import dataclass

import numpy as np

from sluice.doctor.columns import Floats, Ints
from sluice.doctor.scene import Scene

BEFORE_FIRST = ("retrieval", "reading", "retries", "fleet_queue", "queue", "prefill")
AFTER_FIRST = ("decode", "preempted")


@dataclass(frozen=True, slots=True)
class Excess:
    """Seconds of each phase that slow requests spent beyond the usual; ``unattributed`` is left."""

    phases: dict[str, float]
    unattributed_s: float
    requests: int

    @property
    def largest(self) -> str:
        """The phase with the largest excess; empty where none has any."""
        name = max(self.phases, key=lambda phase: self.phases[phase], default="")
        return name if name and self.phases[name] > 0 else ""


@dataclass(frozen=True, slots=True)
class Held:
    """What the replica did while slow requests waited for their first token, in shares."""

    shares: dict[str, float]


def spans_of(scene: Scene) -> dict[str, Floats]:
    """Seconds of each request in each phase, as far as its records tell."""
    requests = scene.requests
    retrieval = np.nan_to_num(requests["retrieval_ns"])
    seen = requests["seen_ns"] - requests["arrived_ns"]
    fleet = np.maximum(0.0, requests["dispatched_ns"] - requests["seen_ns"])
    # Times before the last dispatch, of which the first wait and reading are told apart.
    before_last = np.nan_to_num(requests["admission_ns"]) - np.maximum(0.0, seen - retrieval)
    retried = (requests["full"] + requests["faults"]) > 0
    retries = np.where(retried, np.maximum(0.0, before_last - np.nan_to_num(fleet)), 0.0)
    engine = np.nan_to_num(requests["queue_ns"])
    spans = {
        "retrieval": retrieval,
        "reading": np.maximum(0.0, seen - retrieval),
        "retries": retries,
        "fleet_queue": np.nan_to_num(fleet),
        "queue": np.maximum(0.0, engine - _counted_twice(scene, fleet)),
        "prefill": np.nan_to_num(requests["prefill_ns"]),
        "decode": np.nan_to_num(requests["decode_ns"]),
        "preempted": np.nan_to_num(requests["preempted_ns"]),
    }
    return {name: values / 1e9 for name, values in spans.items()}


def excess_of(scene: Scene) -> Excess | None:
    """The excess of the slow requests of the incident; ``None`` where there are none."""
    tail = scene.tail
    if not len(tail) or not len(scene.before):
        return None
    spans, metric = spans_of(scene), scene.spike.metric
    names = {"ttft": BEFORE_FIRST, "tpot": AFTER_FIRST}.get(metric, (*BEFORE_FIRST, *AFTER_FIRST))
    usual = _usual(scene, tail)
    found = {name: float(spans[name][tail].mean() - spans[name][usual].mean()) for name in names}
    if metric == "tpot":
        tokens = np.maximum(1.0, np.nan_to_num(scene.requests["completion"]) - 1.0)
        found = {
            name: float(
                (spans[name][tail] / tokens[tail]).mean()
                - (spans[name][usual] / tokens[usual]).mean()
            )
            for name in names
        }
    whole = float(np.nanmean(scene.latency_s[tail]) - np.nanmean(scene.latency_s[usual]))
    return Excess(found, whole - sum(found.values()), len(tail))


def held_by(scene: Scene) -> Held | None:
    """What steps were doing while the slow requests waited on their replicas.

    Every nanosecond between dispatch and first token is charged: to prompts of others, to decode
    rows, to being slower than usual, or to nothing being computed.
    """
    if not scene.has_steps or not len(scene.tail):
        return None
    steps, requests = scene.steps, scene.requests
    coefficients = scene.speeds.coefficients
    expected = steps.measured_ns / np.maximum(0.2, scene.speeds.ratio)
    prompts = np.minimum(
        steps.measured_ns,
        coefficients.token_ns * steps.prefill + coefficients.chunk_context_ns * steps.chunk_context,
    )
    slow = np.maximum(0.0, steps.measured_ns - np.maximum(expected, prompts))
    parts = {
        "prefill": np.minimum(prompts, steps.measured_ns - slow),
        "slower steps": slow,
    }
    parts["decode"] = steps.measured_ns - parts["prefill"] - slow
    totals = dict.fromkeys((*parts, "nothing computed"), 0.0)
    first_ns = requests["arrived_ns"] + requests["ttft_ns"]
    for number in np.unique(steps.replica):
        mine = steps.replica == number
        rows = scene.tail[requests.names["replica"][scene.tail] == number]
        rows = rows[~np.isnan(first_ns[rows]) & ~np.isnan(requests["dispatched_ns"][rows])]
        if not len(rows):
            continue
        begin, end = requests["dispatched_ns"][rows], first_ns[rows]
        computed = 0.0
        for name, values in parts.items():
            spent = _spent(steps.end_ns[mine], steps.measured_ns[mine], values[mine], begin, end)
            totals[name] += spent
            computed += spent
        totals["nothing computed"] += max(0.0, float((end - begin).sum()) - computed)
    whole = sum(totals.values())
    return Held({name: value / whole for name, value in totals.items()}) if whole > 0 else None


def _spent(
    end_ns: Floats, measured_ns: Floats, values: Floats, begin: Floats, end: Floats
) -> float:
    """What of some time of steps lies between times, summed over them."""
    edges = np.stack((end_ns - measured_ns, end_ns), axis=1).ravel()
    edges = np.maximum.accumulate(edges)
    sums = np.stack((np.cumsum(values) - values, np.cumsum(values)), axis=1).ravel()
    return float((np.interp(end, edges, sums) - np.interp(begin, edges, sums)).sum())


def _counted_twice(scene: Scene, fleet: Floats) -> Floats:
    """The wait in the fleet is in the queue phase of replicas whose gateway tells it so."""
    requests = scene.requests
    life = requests["ended_ns"] - requests["arrived_ns"]
    told = sum(
        np.nan_to_num(requests[f"{name}_ns"])
        for name in ("retrieval", "admission", "queue", "prefill", "decode", "preempted")
    )
    before = np.nan_to_num(requests["admission_ns"] + requests["retrieval_ns"])
    seen = requests["seen_ns"] - requests["arrived_ns"]
    # The phases sum to the life, up to the way of the messages: with the wait or without it?
    inside = np.abs(told - life) < np.abs(told + np.nan_to_num(fleet) - life)
    # Admission ends at the dispatch where it holds the wait already.
    holds = before >= seen + 0.5 * np.nan_to_num(fleet)
    return np.where(inside & ~holds, np.nan_to_num(fleet), 0.0)


def _usual(scene: Scene, tail: Ints) -> Ints:
    """Requests of the baseline like the slow ones in length, where there are enough of those."""
    prompt = scene.requests["prompt"]
    low, high = np.quantile(prompt[tail], (0.05, 0.95))
    before = scene.before[~np.isnan(scene.latency_s[scene.before])]
    like = before[(prompt[before] >= low) & (prompt[before] <= high)]
    return like if len(like) >= 20 else before
