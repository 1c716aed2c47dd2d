"""Writes what a replica decides to the journal: the facts of each step, and all that replay needs.

Called by the live driver after every event. It reads events and effects and changes nothing; what a
record looks like is in ``telemetry.records``, how events become plain records in ``recording``.
"""

from collections.abc import Callable, Sequence

from sluice.core.costmodel import CostState
from sluice.core.events import (
    ReplicaEffect,
    ReplicaEvent,
    Report,
    RunStep,
    StepDone,
    StepFailed,
)
from sluice.core.roster import BatchingLimits
from sluice.core.step import Plan, Row
from sluice.runtime.processors import ProcessorTimes
from sluice.runtime.recording import Entry, ReplicaRecording
from sluice.telemetry import records
from sluice.telemetry.journal_file import Journal

# Between two looks at what the process has of the processors.
_HOST_NS = 2_000_000_000


class Recorder:
    """Records one replica. ``key`` hides token ids; see ``recording``.

    ``processors`` tells the times of this process, where anybody wants to know of its host.
    """

    def __init__(
        self,
        journal: Journal,
        replica_id: str,
        key: bytes,
        processors: Callable[[], ProcessorTimes | None] = lambda: None,
    ) -> None:
        self._processors = processors
        self._looked_ns: int | None = None
        self._journal = journal
        self._replica_id = replica_id
        self._recording = ReplicaRecording(key)
        self._plan: Plan | None = None

    def start(self, limits: BatchingLimits, cost: CostState, now_ns: int) -> None:
        """Record what the replica is made of; comes before all else."""
        self._append(self._recording.start(limits, cost, now_ns))

    def record(self, event: ReplicaEvent, now_ns: int, effects: Sequence[ReplicaEffect]) -> None:
        """Record an event, when it came, and what was decided."""
        for entry in self._recording.record(event, now_ns, effects):
            self._append(entry)
        if isinstance(event, StepDone | StepFailed):
            self._record_step(event, now_ns, effects)
            self._record_host(now_ns)
        for effect in effects:
            if isinstance(effect, RunStep):
                self._plan = effect.plan

    def _record_host(self, now_ns: int) -> None:
        if self._looked_ns is not None and now_ns - self._looked_ns < _HOST_NS:
            return
        self._looked_ns = now_ns
        times = self._processors()
        if times is not None:
            self._journal.append(
                records.HostSampled(now_ns, self._replica_id, times.used_ns, times.waited_ns)
            )

    def _append(self, entry: Entry) -> None:
        self._journal.append(
            records.PolicyRecord(
                entry.t_ns, self._replica_id, entry.role, entry.name, entry.payload
            )
        )

    def _record_step(
        self,
        event: StepDone | StepFailed,
        now_ns: int,
        effects: Sequence[ReplicaEffect],
    ) -> None:
        plan = self._plan
        if plan is None or plan.step != event.step:
            return
        report = next((effect for effect in effects if isinstance(effect, Report)), None)
        self._journal.append(
            records.Step(
                now_ns,
                self._replica_id,
                plan.step,
                plan.predicted_ns,
                event.duration_ns if isinstance(event, StepDone) else 0,
                tuple(row.sequence for row in plan.rows if _is_decode(row)),
                tuple(
                    records.Chunk(*row.sequence, len(row.tokens), row.past_tokens)
                    for row in plan.rows
                    if not _is_decode(row)
                ),
                blocks_free=0 if report is None else report.blocks_free,
                running=0 if report is None else report.running,
                waiting=0 if report is None else report.waiting,
                error=event.error if isinstance(event, StepFailed) else "",
            )
        )


def _is_decode(row: Row) -> bool:
    return row.sample and len(row.tokens) == 1 and row.past_tokens > 0
