"""What the figures of a run mean: outcomes in, numbers out. Nothing is printed here."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, lgamma, log
from statistics import fmean, median

from benchmarks.load.facts import DOOR_S_MAX, quantile
from benchmarks.load.outcomes import Outcome, Run, Targets


@dataclass(frozen=True, slots=True)
class Goodput:
    """The counted part of a run, rates per second and shares of requests.

    ``good_tokens`` are prompt and output tokens of the good ones. ``met`` is the share of requests
    that were not refused and met their targets. ``refused_waiting`` is the share refused after a
    wait; ``refuse_s_p99`` is for the others. TTFT is as in ``first_tokens_s``.
    """

    offered: float
    good: float
    good_tokens: float
    met: float
    refused: float
    ttft_s_p50: float
    ttft_s_p99: float
    tpot_s_p99: float
    refused_waiting: float
    refuse_s_p99: float
    lag_s_p99: float


def goodput(run: Run, targets: Targets) -> Goodput:
    """The figures of a run with one kind of request."""
    counted = run.counted
    good = [one for one in counted if one.good(targets)]
    served = [one for one in counted if one.served]
    ttft_s = first_tokens_s(run, served)
    tpot_s = present(one.tpot_s for one in served)
    refused_s = present(one.refused_s for one in counted)
    at_door_s = [one for one in refused_s if one < DOOR_S_MAX]
    return Goodput(
        offered=len(counted) / run.counted_s,
        good=len(good) / run.counted_s,
        good_tokens=sum(one.prompt_tokens + one.tokens for one in good) / run.counted_s,
        met=len(good) / len(served) if served else 0.0,
        refused=1 - len(served) / len(counted) if counted else 0.0,
        ttft_s_p50=_quantile(ttft_s, 0.5),
        ttft_s_p99=_quantile(ttft_s, 0.99),
        tpot_s_p99=_quantile(tpot_s, 0.99),
        refused_waiting=(len(refused_s) - len(at_door_s)) / len(counted) if counted else 0.0,
        refuse_s_p99=_quantile(at_door_s, 0.99),
        lag_s_p99=_quantile([one.lag_s for one in run.outcomes], 0.99),
    )


def token_rate(run: Run) -> float:
    """Output tokens per second in the counted part."""
    tokens = 0.0
    for one in run.outcomes:
        if one.text_s:
            each = one.tokens / len(one.text_s) if one.whole else 1.0
            tokens += each * sum(run.from_s <= t_s < run.to_s for t_s in one.text_s)
    return tokens / run.counted_s


def growth(run: Run) -> float:
    """Median TTFT of the last third of a run over that of the first: near 1 for a level queue."""
    ttft_s = present(one.ttft_s for one in sorted(run.counted, key=lambda one: one.at_s))
    third = len(ttft_s) // 3
    return median(ttft_s[-third:]) / median(ttft_s[:third]) if third else 0.0


def gaps_s(run: Run, slo: str) -> list[float]:
    """Gaps between chunks that ended in the counted part, of one class of requests."""
    return [
        later - earlier
        for one in run.outcomes
        if one.slo == slo
        for earlier, later in zip(one.text_s, one.text_s[1:], strict=False)
        if run.from_s <= later < run.to_s
    ]


def first_tokens_s(run: Run, outcomes: Iterable[Outcome]) -> list[float]:
    """Times to first token of those that were not refused.

    One that had none when the run ended counts with what it had waited by then: left out, the
    requests that an engine never came to would make it look quick.
    """
    return [
        run.end_s - one.at_s if one.ttft_s is None else one.ttft_s
        for one in outcomes
        if one.served and one.at_s < run.end_s
    ]


def tokens_served(run: Run, tenant: str) -> int:
    """Output tokens that a tenant got in the counted part."""
    return sum(
        run.from_s <= t_s < run.to_s
        for one in run.outcomes
        if one.tenant == tenant
        for t_s in one.text_s
    )


def jain(shares: Sequence[float]) -> float:
    """Jain's index of fairness: 1 where all have the same, 1/n where one has everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 0.0


@dataclass(frozen=True, slots=True)
class Retries:
    """What became of clients that waited as told.

    ``told`` counts clients that were refused once and told when to come back within the run,
    ``first`` the share of them that were served at that retry. ``peak`` is the fullest second over
    the mean second, from the first retry to the last; ``peak_5s`` is that for five seconds.
    ``peak_poisson`` is what the same number of retries at random times would show in seconds.
    """

    refused: int
    told: int
    first: float
    peak: float
    peak_poisson: float
    peak_5s: float
    wait_s_p50: float
    wait_s_max: float
    per_second: tuple[int, ...]


def retries(run: Run) -> Retries:
    """Look at all retries of a run."""
    tries: dict[str, list[Outcome]] = {}
    for one in sorted(run.outcomes, key=lambda one: one.at_s):
        tries.setdefault(one.id.partition("~")[0], []).append(one)
    firsts = [them[1] for them in tries.values() if len(them) > 1]
    settled = [one for one in firsts if one.whole or one.status not in {0, 200}]
    at_s = [one.at_s for them in tries.values() for one in them[1:]]
    waits_s = present(them[0].retry_after_s for them in tries.values() if not them[0].served)
    return Retries(
        refused=sum(not them[0].served for them in tries.values()),
        told=len(settled),
        first=sum(one.status == 200 for one in settled) / len(settled) if settled else 0.0,
        peak=_peak(at_s, 1.0),
        peak_poisson=peak_poisson(_whole_bins(at_s, 1.0)),
        peak_5s=_peak(at_s, 5.0),
        wait_s_p50=_quantile(waits_s, 0.5),
        wait_s_max=max(waits_s, default=0.0),
        per_second=tuple(_bins(at_s, 1.0)),
    )


def _bins(at_s: Sequence[float], width_s: float) -> list[int]:
    if not at_s:
        return []
    counts = Counter(int((t_s - min(at_s)) / width_s) for t_s in at_s)
    return [counts[number] for number in range(max(counts) + 1)]


def _whole_bins(at_s: Sequence[float], width_s: float) -> list[int]:
    """The bins without the last one, which is cut off by the last retry."""
    bins = _bins(at_s, width_s)
    return bins[:-1] if len(bins) > 2 else bins


def _peak(at_s: Sequence[float], width_s: float) -> float:
    bins = _whole_bins(at_s, width_s)
    return max(bins) / fmean(bins) if bins else 0.0


def peak_poisson(bins: Sequence[int]) -> float:
    """Median of the fullest of so many bins over their mean, if what is in them came at random.

    Every bin is Poisson distributed then, and all of them are below ``n`` with the probability
    ``F(n)`` to the power of their number.
    """
    mean = fmean(bins) if bins else 0.0
    if not mean:
        return 0.0
    fullest, below = 0, exp(-mean)
    while below ** len(bins) < 0.5:
        fullest += 1
        below += exp(fullest * log(mean) - mean - lgamma(fullest + 1))
    return fullest / mean


def present(values: Iterable[float | None]) -> list[float]:
    """The values that are there."""
    return [value for value in values if value is not None]


def _quantile(values: Sequence[float], share: float) -> float:
    return quantile(values, share) if values else 0.0
