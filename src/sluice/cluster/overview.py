"""What a person wants to see of a running gateway, as one JSON document: see ``docs/dashboard.md``.

``wiring`` lets it take a sample every few seconds; the dashboard and ``sluice top`` ask for the
document. It reads what the observer and the fleet know and decides nothing. No text of a request is
in it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

import sluice
from sluice.cluster.observer import Observer
from sluice.core.breaker import BreakerState
from sluice.core.fleet_replica import ReplicaView
from sluice.core.pool_view import PoolView
from sluice.core.scaling import Decision
from sluice.telemetry.recent import Order, Over
from sluice.telemetry.records import (
    Deployment,
    FleetScaled,
    ReplicaChanged,
    RequestDegraded,
    RequestEnded,
    RequestRefused,
    RequestRejected,
)
from sluice.telemetry.timeline import ALL, INTERVAL_S, SAMPLES_MAX, Timeline, shown_state

_SLOWEST_MAX = 20


@dataclass(frozen=True, slots=True)
class Clocks:
    """Monotonic nanoseconds, and Unix time in nanoseconds."""

    monotonic_ns: Callable[[], int]
    wall_ns: Callable[[], int]


class Overview:
    """See ``server.ports.Overview``. ``pools`` gives the fleet's view at the moment."""

    def __init__(
        self, observer: Observer, pools: Callable[[], Sequence[PoolView]], clocks: Clocks
    ) -> None:
        self._observer = observer
        self._pools = pools
        self._clocks = clocks
        self._timeline = Timeline(observer.metrics, clocks.monotonic_ns())
        # Times of records stay where they are told, whatever becomes of the wall clock.
        self._offset_ns = clocks.wall_ns() - clocks.monotonic_ns()

    @property
    def interval_s(self) -> float:
        """How often ``sample`` is to be called."""
        return INTERVAL_S

    def sample(self) -> None:
        """Note what happened since the last time."""
        now_ns = self._clocks.monotonic_ns()
        self._timeline.sample(now_ns, self._wall_s(now_ns), self._pools(), self._observer.stages())

    def document(self, model: str, since_s: float, window_s: float) -> bytes:
        """All of it for a model, or for all (``""``): samples after ``since_s`` (Unix time), and
        lists of the last ``window_s``."""
        now_ns = self._clocks.monotonic_ns()
        pools = self._pools()
        recent, since_ns = self._observer.recent, now_ns - round(window_s * 1e9)

        def slowest(order: Order) -> list[dict[str, Any]]:
            found = recent.slowest(since_ns, order, _SLOWEST_MAX, model)
            return [self._told(one) for one in found]

        return msgspec.json.encode(
            {
                "version": sluice.__version__,
                "now_s": self._wall_s(now_ns),
                "interval_s": INTERVAL_S,
                "samples_max": SAMPLES_MAX,
                "models": [pool.model for pool in pools],
                "model": model,
                "classes": [asdict(one) for one in self._observer.metrics.targets],
                "samples": self._timeline.since(model, since_s),
                "scaling": self._scaling([one for one in pools if model in {ALL, one.model}]),
                "replicas": [
                    _replica(one, now_ns) | {"start_s": self._start_s(one.id)}
                    for pool in pools
                    for one in pool.replicas
                    if model in {ALL, pool.model}
                ],
                "slowest": {"e2e": slowest("e2e"), "ttft": slowest("ttft")},
                "refused": [self._refused(one) for one in self._latest(recent.refused, model)],
                "degraded": [self._told(one) for one in self._latest(recent.degraded, model)],
                "changes": [self._change(one) for one in reversed(recent.changes)],
            }
        )

    def scaling(self) -> bytes:
        """How many replicas there are to be, and why; how long starts took. For all models."""
        pools = self._pools()
        starts = {one.id: self._start_s(one.id) for pool in pools for one in pool.replicas}
        return msgspec.json.encode({"models": self._scaling(pools), "last_start_s": starts})

    def _scaling(self, pools: Sequence[PoolView]) -> list[dict[str, Any]]:
        return [_scaling(pool, pool.scaling) for pool in pools if pool.scaling is not None]

    def _start_s(self, replica_id: str) -> dict[str, float]:
        """Seconds by stage of the last cold start of a replica."""
        stages = self._observer.starts.last.get(replica_id, {})
        return {stage: round(taken_ns / 1e9, 3) for stage, taken_ns in stages.items()}

    def request(self, request_id: str) -> bytes | None:
        """The life of a request that the document names, ``None`` for one that is forgotten."""
        over = self._observer.recent.find(request_id)
        return None if over is None else msgspec.json.encode(asdict(over.life(self._offset_ns)))

    def _wall_s(self, at_ns: int) -> float:
        return round((at_ns + self._offset_ns) / 1e9, 3)

    def _latest(self, records: Any, model: str) -> list[Any]:
        return [
            one
            for one in reversed(records)
            if model in {ALL, one.arrived.model if isinstance(one, Over) else one.model}
        ]

    def _told(self, over: Over) -> dict[str, Any]:
        arrived, last = over.arrived, over.last
        told: dict[str, Any] = {
            "id": arrived.id,
            "client_id": arrived.client_id,
            "model": arrived.model,
            "slo_class": arrived.slo_class,
            "tenant": arrived.tenant,
            "at_s": self._wall_s(arrived.arrived_ns),
            "prompt_tokens": arrived.prompt_tokens,
            "rungs": [one.rung for one in over.records if isinstance(one, RequestDegraded)],
        }
        if isinstance(last, RequestEnded):
            told |= {
                "model": last.model,
                "reason": last.reason,
                "replica": last.replica,
                "completion_tokens": last.completion_tokens,
                "e2e_s": (last.t_ns - last.arrived_ns) / 1e9,
                "ttft_s": None if last.ttft_ns is None else last.ttft_ns / 1e9,
                "tpot_s": None if last.tpot_ns is None else last.tpot_ns / 1e9,
                "phases": phases_of(last),
            }
        return told

    def _refused(self, one: Over | RequestRefused) -> dict[str, Any]:
        if isinstance(one, RequestRefused):
            return {
                "id": one.id,
                "model": one.model,
                "at_s": self._wall_s(one.t_ns),
                "status": one.status,
                "reason": one.reason,
            }
        last = one.last
        assert isinstance(last, RequestRejected)
        return {
            **self._told(one),
            "at_s": self._wall_s(last.t_ns),
            "status": last.status,
            "reason": last.reason,
            "measured": last.measured,
            "threshold": last.threshold,
            "retry_after_s": last.retry_after_s,
        }

    def _change(self, change: Deployment | ReplicaChanged | FleetScaled) -> dict[str, Any]:
        told: dict[str, Any] = {"at_s": self._wall_s(change.t_ns)}
        if isinstance(change, Deployment):
            changed = {key: [one.before, one.after] for key, one in change.changed.items()}
            return told | {"what": change.what, "details": change.details, "changed": changed}
        if isinstance(change, FleetScaled):
            what = f"{change.model} is to have {change.number} replicas, not {change.before}"
            return told | {"what": what, "details": {"for": change.reason.replace("_", " ")}}
        details = {"error": change.error} if change.error else {}
        return told | {"what": f"{change.replica} {change.state}", "details": details}


def phases_of(ended: RequestEnded) -> Mapping[str, float]:
    """Seconds in each phase that took any time."""
    phases = {
        "retrieval": ended.retrieval_ns,
        "admission": ended.admission_ns,
        "queue": ended.queue_ns,
        "prefill": ended.prefill_ns,
        "decode": ended.decode_ns,
        "preempted": ended.preempted_ns,
    }
    return {phase: spent_ns / 1e9 for phase, spent_ns in phases.items() if spent_ns}


def _scaling(pool: PoolView, decision: Decision) -> dict[str, Any]:
    """One model whose replicas follow its load: the last decision, and what it was made of."""
    absence = pool.absence
    return {
        "model": pool.model,
        "wanted": decision.number,
        "loaded": decision.loaded,
        "needed": decision.needed,
        "most": decision.most,
        "short_of": decision.short_of,
        "reason": decision.reason,
        "terms": dict(decision.terms),
        "serving": sum(one.is_serving for one in pool.replicas),
        "start_expected_s": decision.start_ns / 1e9,
        "wake_expected_s": decision.wake_ns / 1e9,
        "ready_in_s": (absence.ready_in_ns or 0) / 1e9 if absence else 0.0,
        "requests_held": bool(absence and absence.held),
    }


def _replica(replica: ReplicaView, now_ns: int) -> dict[str, Any]:
    report, start_ns = replica.report, replica.start_ns
    told: dict[str, Any] = {
        "id": replica.id,
        "model": replica.model,
        "state": shown_state(replica),
        "error": replica.error,
        "requests": replica.requests,
        "places": replica.places,
        "seats": replica.seats,
        "losses": replica.losses,
        "starts_in_s": None if start_ns is None else max(0, start_ns - now_ns) / 1e9,
        "breaker_open": replica.breaker is BreakerState.OPEN,
    }
    if report is not None:
        told |= {
            "running": report.running,
            "waiting": report.waiting,
            "kv_used": report.blocks_total - report.blocks_free,
            "kv_max": report.blocks_total,
            "step_s": report.step_ns / 1e9,
            "report_age_s": (replica.report_age_ns or 0) / 1e9,
        }
    return told
