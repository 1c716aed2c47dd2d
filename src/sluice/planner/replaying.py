"""What came of recorded traffic, counted as a simulation counts, and its replay.

``outcome_of`` judges what the journal says by the targets of a fleet, so that recorded and replayed
figures mean the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from sluice.config.sections import SloSection
from sluice.core.admission import NS_PER_S
from sluice.core.events import Ended
from sluice.core.request import EndReason, PhaseTimes, Usage
from sluice.planner.outcome import Counting, Life, Outcome
from sluice.planner.recorded import Recorded, RecordedRequest
from sluice.planner.simulation import SimulatedFleet, SimulatedPool
from sluice.workload.asks import Ask


@dataclass(frozen=True, slots=True)
class RecordedTraffic:
    """Recorded requests with the wishes of their own that they had beside those of ``classes``."""

    recorded: Recorded
    classes: Mapping[str, SloSection]

    def asks(self, seed: int) -> Iterator[Ask]:
        """See ``Workload``."""
        for ask in self.recorded.asks(seed):
            section = self.classes.get(ask.slo_class, SloSection())
            e2e_ns = None if section.e2e_s is None else round(section.e2e_s * NS_PER_S)
            degrades = bool({"shorten", "smaller"} & set(section.overload))
            yield replace(
                ask,
                tier=None if ask.tier == section.tier else ask.tier,
                deadline_ns=None if ask.deadline_ns == e2e_ns else ask.deadline_ns,
                may_degrade=ask.may_degrade or not degrades,
            )


def outcome_of(traffic: RecordedTraffic, fleet: SimulatedFleet) -> Outcome:
    """What the journal says about the requests, by the targets of this fleet's classes.

    Requests whose ending is not in the journal are left out.
    """
    requests = traffic.recorded.requests
    counting, pools = Counting(len(requests)), fleet.by_model
    last_ns = 0
    for ask, request in zip(traffic.asks(0), requests, strict=True):
        pool = pools.get(ask.model)
        if pool is None:
            continue
        ended_ns = _count(counting, pool, ask, request)
        last_ns = max(last_ns, ended_ns)
    outcome = counting.outcome
    outcome.arriving_s = (requests[-1].arrived.t_ns - requests[0].arrived.t_ns) / NS_PER_S
    outcome.counted_s = outcome.simulated_s = last_ns / NS_PER_S
    outcome.replica_hours = len(traffic.recorded.replicas) * outcome.simulated_s / 3600
    return outcome


def _count(counting: Counting, pool: SimulatedPool, ask: Ask, request: RecordedRequest) -> int:
    """Count one; returns when it was over."""
    made = pool.request(ask, ask.at_ns, ())
    began_ns = made.arrived_ns
    life = Life(ask, made, ask.model, degraded=request.degraded)
    if request.rejected is not None:
        counting.refused(life, request.rejected.reason)
        return began_ns + request.rejected.t_ns - request.arrived.arrived_ns
    ended = request.ended
    if ended is None:
        return 0
    phases = PhaseTimes(
        ended.retrieval_ns, ended.admission_ns, ended.queue_ns, ended.prefill_ns, ended.decode_ns,
        ended.preempted_ns,
    )  # fmt: skip
    usage = Usage(ended.prompt_tokens, ended.cached_tokens, ended.completion_tokens)
    ended_ns = began_ns + ended.t_ns - ended.arrived_ns
    if ended.ttft_ns is not None:
        life.first_ns, life.first_tokens = began_ns + ended.ttft_ns, 1
    if ended.reason == EndReason.CANCELLED:
        counting.left(life, ended_ns)
        return ended_ns
    counting.outcome.preemptions += ended.preemptions
    counting.ended(
        life,
        Ended(ended.id, EndReason(ended.reason), usage, phases),
        ended_ns,
        tpot_ns=ended.tpot_ns,
    )
    return ended_ns
