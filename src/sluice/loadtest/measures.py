"""What the outcomes of a trial come to: rates, percentiles, endings, slices of time.

Membership goes by the planned time, and every request is followed to its end. Percentiles of
successes and, beside them, adjusted ones in which a failure took for ever. Percentiles are shown;
objectives are tested as shares.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import ceil, inf, isinf
from typing import Any

from sluice.loadtest.trial import (
    Ending,
    Metric,
    Objective,
    RequestOutcome,
    TrialOutcome,
    good,
)

PERCENTILES = (50, 90, 95, 99)
SLICES = 20
# A gap as long as this is a stall that a reader of the stream notices.
STALL_S = 0.5

Percentiles = Mapping[str, float | None]


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


def percentiles(values: Iterable[float]) -> Percentiles:
    """The usual ones and the largest; ``None`` of nothing, and where it is infinite."""
    ordered = sorted(values)
    if not ordered:
        return {**{f"p{each}": None for each in PERCENTILES}, "max": None}
    found = {f"p{each}": _ranked(ordered, each / 100) for each in PERCENTILES} | {
        "max": ordered[-1]
    }
    return {name: None if isinf(value) else value for name, value in found.items()}


def _ranked(ordered: Sequence[float], share: float) -> float:
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


def weighted_percentiles(pairs: Iterable[tuple[float, float]]) -> Percentiles:
    """Percentiles of values that each count as often as their weight says."""
    ordered = sorted(pairs)
    whole = sum(weight for _, weight in ordered)
    found: dict[str, float | None] = {f"p{each}": None for each in PERCENTILES}
    if whole <= 0.0:
        return {**found, "max": None}
    shares = list(PERCENTILES)
    passed = 0.0
    for value, weight in ordered:
        passed += weight
        while shares and passed >= shares[0] / 100 * whole * (1 - 1e-12):
            found[f"p{shares.pop(0)}"] = value
    return {**found, "max": ordered[-1][0]}


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


@dataclass(frozen=True, slots=True)
class Attained:
    """How an objective came out: of ``judged`` requests, ``missed`` did not meet it."""

    objective: Objective
    judged: int
    missed: int

    @property
    def share(self) -> float | None:
        """The share that missed it; ``None`` where it says something about no request."""
        return self.missed / self.judged if self.judged else None

    @property
    def met(self) -> bool:
        """Whether no larger share missed it than may."""
        return self.judged > 0 and self.missed <= self.objective.share_max * self.judged + 1e-9


def attained(requests: Sequence[RequestOutcome], objective: Objective) -> Attained:
    """Test an objective on requests."""
    verdicts = [verdict for one in requests if (verdict := objective.missed(one)) is not None]
    return Attained(objective, len(verdicts), sum(verdicts))


def figures(
    requests: Sequence[RequestOutcome], over_s: float, objectives: Sequence[Objective]
) -> dict[str, Any]:
    """The figures of requests that were planned within ``over_s`` seconds."""
    done = [one for one in requests if one.done]
    rate = 1.0 / over_s if over_s > 0.0 else 0.0
    failures = Counter(one.ending.value for one in requests if not one.done)
    return {
        "requests": len(requests),
        "planned_rps": len(requests) * rate,
        "sent_rps": sum(one.sent_s is not None for one in requests) * rate,
        "completed_rps": len(done) * rate,
        "good_rps": sum(good(one, objectives) for one in requests) * rate,
        "success_share": len(done) / len(requests) if requests else None,
        "failures": dict(sorted(failures.items())),
        "ttft_s": percentiles(_present(one.ttft_s for one in done)),
        "tpot_s": percentiles(_present(one.tpot_s for one in done)),
        "itl_s": percentiles(chain.from_iterable(one.gaps_s for one in done)),
        "itl_per_token_s": weighted_percentiles(per_token(done)),
        "e2e_s": percentiles(one.e2e_s for one in done),
        "adjusted": {
            "ttft_s": percentiles(_adjusted(requests, lambda one: one.ttft_s)),
            "e2e_s": percentiles(_adjusted(requests, lambda one: one.e2e_s)),
        },
        "stall_share": _share(done, lambda one: (one.gap_s_max or 0.0) > STALL_S),
        "tokens": tokens(done, rate),
    }


def per_token(requests: Iterable[RequestOutcome]) -> Iterable[tuple[float, float]]:
    """Gap over tokens of the later chunk, and how many tokens that is true of."""
    for one in requests:
        if one.gap_tokens:
            for gap_s, count in zip(one.gaps_s, one.gap_tokens, strict=True):
                yield gap_s / count, count


def _adjusted(
    requests: Iterable[RequestOutcome], value_of: Callable[[RequestOutcome], float | None]
) -> list[float]:
    values = (value_of(one) if one.done else inf for one in requests)
    return _present(values)


def _share(
    requests: Sequence[RequestOutcome], holds: Callable[[RequestOutcome], bool]
) -> float | None:
    return sum(holds(one) for one in requests) / len(requests) if requests else None


def tokens(done: Sequence[RequestOutcome], rate: float) -> dict[str, Any]:
    """Token counts by the server's usage; ``None`` for what it does not tell."""
    prompt = _present(one.prompt_tokens for one in done)
    cached = _present(one.cached_tokens for one in done)
    output = _present(one.output_tokens for one in done)
    chunks = sum(one.chunks for one in done if one.output_tokens is not None)
    reasoning = _present(one.reasoning_tokens for one in done)
    return {
        "prompt": sum(prompt) if prompt else None,
        "prompt_mean": sum(prompt) / len(prompt) if prompt else None,
        "cached": sum(cached) if cached else None,
        "cached_share": sum(cached) / sum(prompt) if cached and sum(prompt) else None,
        "output": sum(output) if output else None,
        "output_mean": sum(output) / len(output) if output else None,
        "output_per_s": sum(output) * rate if output else None,
        "reasoning": sum(reasoning) if reasoning else None,
        "per_chunk": sum(output) / chunks if output and chunks else None,
        "without_usage": sum(one.output_tokens is None for one in done),
    }


def length_mismatches(outcome: TrialOutcome) -> dict[str, Any]:
    """How often prompts and answers have another length than was planned, by the server's count."""
    planned = {ask.number: ask for ask in outcome.plan.asks}
    prompt = output = counted = 0
    for one in outcome.counted:
        ask = planned.get(one.number)
        if ask is None or not one.done or one.prompt_tokens is None:
            continue
        counted += 1
        prompt += one.prompt_tokens != ask.prompt_tokens
        output += one.output_tokens != ask.output_tokens * one.choices
    return {
        "compared": counted,
        "prompt_share": prompt / counted if counted else None,
        "output_share": output / counted if counted else None,
    }


def slices(outcome: TrialOutcome, objectives: Sequence[Objective]) -> list[dict[str, Any]]:
    """The trial in equal parts of time, warm-up and tail included: what a mean over it hides."""
    end_s = outcome.stopped_s or outcome.plan.span.arriving_s
    width_s = end_s / SLICES
    parts: list[list[RequestOutcome]] = [[] for _ in range(SLICES)]
    for one in outcome.requests:
        if one.ending is not Ending.LEFT:
            parts[min(SLICES - 1, max(0, int(one.at_s / width_s)))].append(one)
    found = []
    for number, part in enumerate(parts):
        done = [one for one in part if one.done]
        ttft_s = percentiles(_present(one.ttft_s for one in done))
        found.append(
            {
                "from_s": number * width_s,
                "planned_rps": len(part) / width_s,
                "completed_rps": len(done) / width_s,
                "good_rps": sum(good(one, objectives) for one in part) / width_s,
                "refused_rps": sum(one.ending is Ending.REFUSED for one in part) / width_s,
                "failed_rps": sum(not one.done and one.ending is not Ending.REFUSED for one in part)
                / width_s,
                "ttft_s_p50": ttft_s["p50"],
                "ttft_s_p99": ttft_s["p99"],
                "gap_s_max": max(_present(one.gap_s_max for one in done), default=None),
                "in_flight": in_flight_at(outcome.requests, (number + 0.5) * width_s),
            }
        )
    return found


def in_flight_at(requests: Iterable[RequestOutcome], at_s: float) -> int:
    """Requests that were sent and had not ended at a time."""
    return sum(one.sent_s is not None and one.sent_s <= at_s < one.end_s for one in requests)


def lag_curve(requests: Iterable[RequestOutcome]) -> list[tuple[float, float]]:
    """Shares of requests and how late the client took these up at most."""
    lags_s = sorted(_present(one.lag_s for one in requests))
    shares = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)
    return [(share, _ranked(lags_s, share)) for share in shares] if lags_s else []


def name_of(objective: Objective) -> str:
    """An objective in words, as ``p95 TTFT ≤ 1 s``."""
    words = {Metric.TTFT: "TTFT", Metric.TPOT: "TPOT", Metric.E2E: "e2e", Metric.GAP: "gap"}
    limit_s = objective.limit_s
    limit = f"{limit_s:g} s" if limit_s >= 1.0 else f"{1e3 * limit_s:g} ms"
    return f"p{objective.percentile:g} {words[objective.metric]} ≤ {limit}"
