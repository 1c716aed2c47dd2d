"""Results as plain values: one document for JSON, for comparing, and for all reports.

What the figures mean is decided in ``measures.py``; here is only their arrangement, and what a
reader needs to judge or repeat a run.
"""

import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any, assert_never

from sluice import __version__
from sluice.loadtest.measures import (
    attained,
    figures,
    lag_curve,
    length_mismatches,
    name_of,
    slices,
)
from sluice.loadtest.trial import (
    ClosedLoop,
    Ending,
    Objective,
    OpenLoop,
    RequestOutcome,
    TrialOutcome,
)

# How tokens of chunks that hold several are counted; said in every report.
CHUNK_RULE = (
    "itl_s are gaps between chunks of one choice. itl_per_token_s divides each gap by the tokens "
    "of its later chunk and counts it once for each of them: tokens as the server counts them "
    "chunk by chunk, else its count of the answer less one for the first chunk, in equal parts."
)


def trial_document(
    outcome: TrialOutcome, objectives: Sequence[Objective], failures_max: float
) -> dict[str, Any]:
    """One trial. Figures are those of the requests planned within the counted part."""
    counted = outcome.counted
    found = figures(counted, outcome.counted_s, objectives)
    judged = [attained(counted, objective) for objective in objectives]
    failed = sum(not one.done for one in counted)
    meets = all(each.met for each in judged) and failed <= failures_max * len(counted)
    return {
        **load_of(outcome),
        **found,
        "failed": failed,
        "failures_max": failures_max,
        "schedule_lag_p99_s": outcome.client.get("lag_s_p99"),
        "objectives": [
            {
                "objective": name_of(each.objective),
                "metric": each.objective.metric.value,
                "limit_s": each.objective.limit_s,
                "percentile": each.objective.percentile,
                "judged": each.judged,
                "missed": each.missed,
                "missed_share": each.share,
                "missed_share_max": each.objective.share_max,
                "met": each.met,
            }
            for each in judged
        ],
        "meets_slo": bool(counted) and meets if outcome.valid else None,
        "valid": outcome.valid,
        "void": None
        if outcome.void is None
        else {"cause": outcome.void.cause.value, "detail": outcome.void.detail},
        "left": sum(one.ending is Ending.LEFT for one in outcome.requests),
        "lengths": length_mismatches(outcome),
        "by_tenant": _by(counted, "tenant", outcome.counted_s, objectives),
        "by_class": _by(counted, "slo_class", outcome.counted_s, objectives),
        "errors": _errors(counted),
        "client": dict(outcome.client),
        "server": dict(outcome.server),
        "limited_by": limited_by(outcome),
        "lag_curve": lag_curve(counted),
        "slices": slices(outcome, objectives),
        "began_unix_s": outcome.began_unix_s,
        "took_s": outcome.took_s,
        "stopped_s": outcome.stopped_s,
    }


def load_of(outcome: TrialOutcome) -> dict[str, Any]:
    """What was asked of the server."""
    plan = outcome.plan
    match plan.load:
        case OpenLoop(rate_rps):
            load: dict[str, Any] = {"mode": "open", "rate_rps": rate_rps, "concurrency": None}
        case ClosedLoop(concurrency):
            load = {"mode": "closed", "rate_rps": None, "concurrency": concurrency}
        case unknown:
            assert_never(unknown)
    return {
        **load,
        "seed": plan.seed,
        "warm_up_s": plan.span.warm_s,
        "counted_s": outcome.counted_s,
        "patience_s": plan.span.patience_s,
    }


def _by(
    counted: Sequence[RequestOutcome],
    group: str,
    over_s: float,
    objectives: Sequence[Objective],
) -> dict[str, Any]:
    """Figures of each tenant or class, where there are several."""
    names = sorted({getattr(one, group) for one in counted})
    if len(names) < 2:
        return {}
    return {
        name or "none": figures(
            [one for one in counted if getattr(one, group) == name], over_s, objectives
        )
        for name in names
    }


def _errors(counted: Sequence[RequestOutcome]) -> list[dict[str, Any]]:
    """The commonest failures in the server's own words, with what it says about coming back."""
    seen: dict[tuple[str, int | None, str], list[float | None]] = {}
    for one in counted:
        if not one.done:
            key = (one.ending.value, one.status, one.reason)
            seen.setdefault(key, []).append(one.retry_after_s)
    commonest = sorted(seen.items(), key=lambda pair: -len(pair[1]))[:10]
    return [
        {
            "ending": ending,
            "status": status,
            "reason": reason,
            "count": len(waits_s),
            "with_retry_after": sum(wait_s is not None for wait_s in waits_s),
            "retry_after_s_max": max((w for w in waits_s if w is not None), default=None),
        }
        for (ending, status, reason), waits_s in commonest
    ]


def limited_by(outcome: TrialOutcome) -> list[str]:
    """What the server's own figures say held requests back, most telling first, in words."""
    server, found = outcome.server, list[str]()
    refused = {k.removeprefix("refused."): v for k, v in server.items() if k.startswith("refused.")}
    for reason, count in sorted(refused.items(), key=lambda pair: -pair[1]):
        if count:
            found.append(f"admission refused {count:,.0f} requests: {reason}")
    if server.get("preemptions"):
        found.append(f"{server['preemptions']:,.0f} preemptions: sequences lost their KV blocks")
    if server.get("kv_use_max", 0.0) > 0.9:
        found.append(f"KV memory was {server['kv_use_max']:.0%} full")
    phases = {k.removeprefix("phase_s."): v for k, v in server.items() if k.startswith("phase_s.")}
    whole = sum(phases.values())
    if whole > 0.0:
        parts = sorted(phases.items(), key=lambda pair: -pair[1])
        shares = ", ".join(f"{name} {value / whole:.0%}" for name, value in parts if value)
        found.append(f"the life of requests was {shares}")
    if server.get("waiting_mean", 0.0) >= 1.0:
        found.append(f"{server['waiting_mean']:.1f} requests waited in the server on average")
    return found


def manifest(
    arguments: Sequence[str], asked: Mapping[str, Any], server: Mapping[str, Any]
) -> dict[str, Any]:
    """What is needed to judge and repeat a run. Keys are no part of it."""
    return {
        "sluice": __version__,
        "arguments": list(arguments),
        "asked": dict(asked),
        "endpoint": dict(server),
        "client_host": {
            "system": platform.platform(),
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "load_average": os.getloadavg()[0],
        },
        "chunk_rule": CHUNK_RULE,
    }
