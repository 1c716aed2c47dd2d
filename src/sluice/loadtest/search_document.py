"""What a search found as plain values, beside ``document.py`` for its trials."""

from collections.abc import Mapping, Sequence
from typing import Any

from sluice.loadtest.capacity import little_holds, rungs
from sluice.loadtest.search import Found, Search

Json = Mapping[str, Any]


def search_document(search: Search) -> dict[str, Any]:
    """Capacity, SLO rate, what binds, and how it was found; valid at any moment of a search."""
    found, question = search.found(), search.question
    best, slo, capacity = found.throughput, found.slo, found.capacity
    return {
        "valid": best is not None and (not question.objectives or slo is not None),
        "complete": search.next is None and search.stopped is None,
        "capacity_rps": {
            "low": capacity.low_rps,
            "high": capacity.high_rps,
            "closed_loop": None
            if best is None
            else {
                "estimate": best.estimate_rps,
                "low": best.low_rps,
                "high": best.high_rps,
                "concurrency": best.concurrency,
            },
            "metastable": capacity.metastable,
        },
        "slo_rps": None
        if slo is None
        else {
            "estimate": slo.estimate_rps,
            "low": slo.low_rps,
            "high": slo.high_rps,
            "certified": slo.certified_rps,
            "resolved": slo.resolved,
        },
        "binding": None if slo is None else slo.binding,
        "fit": _fit(found),
        "client_rps": question.client_rps,
        "budget_s": question.budget_s,
        "spent_s": found.spent_s,
        "search_notes": list(found.notes),
        "search_trials": _trials(search),
    }


def _fit(found: Found) -> Json:
    """Each objective by itself: where its limit would be, and how much counts depend on each
    other."""
    if found.fit is None:
        return {}
    return {
        name: {
            "estimate": one.posterior.quantile(0.5),
            "low": one.posterior.quantile(0.05),
            "high": one.posterior.quantile(0.95),
            "dispersion": one.dispersion,
            "steepness": one.steepness,
            "binds": found.fit.binding[name],
        }
        for name, one in found.fit.responses.items()
    }


def _trials(search: Search) -> Sequence[Json]:
    """What the search read from each trial."""
    steady = {id(one) for one in rungs(search.samples) if little_holds(one)}
    return [
        {
            "stage": stage.value,
            "rate_rps": one.rate_rps or None,
            "concurrency": one.concurrency,
            "valid": one.valid,
            "trend": one.trend.value if one.rate_rps else None,
            "steady": id(one) in steady if one.concurrency else None,
            "completed_rps": one.completed_rps,
            "missed": {
                name: {"requests": one.count(name).requests, "missed": one.count(name).missed}
                for name in one.counts
            },
            "took_s": one.took_s,
        }
        for stage, one in zip(search.stages, search.samples, strict=True)
    ]
