"""A plan as one JSON document, from which the other reports take their numbers.

Called by ``plan.py``; ``plan_report.py`` and ``plan_page.py`` word what is here. Nothing is
estimated.
"""

from typing import Any

from sluice.cli.plan_question import SlotsAnswer
from sluice.planner.candidates import Candidates
from sluice.planner.estimate import Moment
from sluice.planner.explain import explained, measured_with
from sluice.planner.knobs import knobs
from sluice.planner.plan import Plan
from sluice.planner.predict import Band

_GIB = 2.0**30


def document(found: Candidates) -> dict[str, Any]:
    """The best plan, and what is beside it."""
    best = found.best
    replica = best.replica
    return {
        **_deployed(best),
        "at_slo_rate": _latencies(best, replica.at_slo),
        "at_rate": _latencies(best, best.at_forecast),
        "replicas_low": best.replicas_low,
        "replicas_high": best.replicas_high,
        "planned_share_of_slo_rate": best.planned_share,
        "planned_share_without_spare": best.share_without_spare,
        "kv": {
            "bytes_per_token": best.kv_bytes_per_token,
            "tokens_max": replica.kv_tokens_max,
            "sequences_max": replica.sequences_max,
        },
        "binding": replica.binding,
        "prefill_share": replica.prefill_share,
        "measured_with": measured_with(best.model),
        "leaned_on": list(replica.residual.leaned_on),
        "notes": list(best.notes),
        "knobs": [{"change": each.change, "gain": each.gain} for each in knobs(best)],
        "alternatives": [
            {**_deployed(each), "at_rate": _latencies(each, each.at_forecast)}
            for each in found.others
        ],
        "refused": list(found.refused),
    }


def explanations(found: Plan) -> dict[str, dict[str, Any]]:
    """What each number of the document is, by its path in it."""
    return {
        each.path: {
            "value": each.value,
            "unit": each.unit,
            "formula": each.formula,
            "inputs": dict(each.inputs),
            "source": each.source,
        }
        for each in explained(found)
    }


def _deployed(found: Plan) -> dict[str, Any]:
    deployment, cost = found.model.deployment, found.cost_usd_per_hour
    return {
        "model": deployment.shape.name,
        "gpu": deployment.accelerator.name,
        "precision": found.model.precision,
        "tensor_parallel": deployment.layout.tensor,
        "data_parallel": deployment.layout.groups,
        "engine": found.model.engine_name,
        "per_replica": {
            "capacity_rps": _band(found.replica.capacity_rps),
            "slo_rps": _band(found.replica.slo_rps),
        },
        "replicas": found.replicas,
        "gpus": found.devices,
        "cost_usd_per_hour": None
        if cost is None
        else {"low": cost[0], "high": cost[1], "date": deployment.accelerator.price_date},
    }


def _latencies(found: Plan, at: Moment | None) -> dict[str, float]:
    """At the percentile that was asked for, retrieval included."""
    retrieval_s = found.question.targets.retrieval_s
    assert at is not None  # noqa: S101 - a plan without a rate is refused
    output = found.question.load.lengths.output
    return {
        "requests": at.concurrency,
        "ttft_s": at.ttft_s + retrieval_s,
        "tpot_s": at.tpot_s,
        "e2e_s": at.e2e_s(output) + retrieval_s,
    }


def _band(band: Band) -> dict[str, float]:
    return {"estimate": band.estimate, "low": band.low, "high": band.high}


def slots_document(found: SlotsAnswer) -> dict[str, Any]:
    """Whether parallel slots fit, line by line; bytes are those of one GPU."""
    verdict = found.verdict
    return {
        "model": found.model,
        "gpu": found.gpu,
        "gpus": found.gpus,
        "precision": found.precision,
        "fits": verdict.fits,
        "slots": verdict.slots.count,
        "context_tokens": verdict.slots.context_tokens,
        "request_tokens": verdict.slots.request_tokens,
        "sharing": verdict.slots.sharing,
        "kv_bytes_per_token": found.kv_bytes_per_token,
        "memory_gib": {name: value / _GIB for name, value in verdict.lines().items()},
        "slots_max": verdict.count_max,
        "request_tokens_max": verdict.request_tokens_max,
    }
