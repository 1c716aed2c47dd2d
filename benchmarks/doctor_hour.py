"""A journal of an hour of a busy gateway, for the time and memory that a diagnosis takes.

Records are those of eight replicas that sluice runs, with what replay needs, in the sizes of live
ones. Times come from a plain model: in the last sixth of it prompts are longer and waits too.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec

from sluice.core.costmodel import Coefficients, CostState
from sluice.core.events import StepDone
from sluice.core.request import SequenceId
from sluice.core.roster import BatchingLimits
from sluice.core.step import Sampled
from sluice.runtime.recording import PlanShape, ReplicaStart, RowShape
from sluice.telemetry import records
from sluice.telemetry.journal_file import JournalFile

NS = 1_000_000_000
RATE_RPS, REPLICAS = 100, 8
HURT_SHARE = 5 / 6
ROWS, STEP_NS = 20, 33_000_000


def write_hour(folder: Path, duration_s: int) -> tuple[int, int]:
    """Write so much of it; returns the numbers of requests and steps."""
    journal = JournalFile(folder, "gateway")
    limits = BatchingLimits(32768, 16, 8000, sequences_max=32)
    start = msgspec.msgpack.encode(
        ReplicaStart(limits, CostState(Coefficients(), Coefficients(), 1e4, 1.0))
    )
    for number in range(REPLICAS):
        name = f"chat-{number}"
        journal.append(records.PolicyRecord(0, name, "event", "ReplicaStart", start))
        journal.append(records.ReplicaChanged(1, name, "chat", "ready", "", 1, 32768, 16, 8000, 32))
    counts = [0, 0]
    steps = _steps()
    step = next(steps)
    for record in _requests(Random(1), duration_s):
        counts[0] += isinstance(record, records.RequestArrived)
        while step[0].t_ns <= record.t_ns:
            for each in step:
                journal.append(each)
            counts[1] += 1
            step = next(steps)
        journal.append(record)
    journal.close()
    return counts[0], counts[1]


def _requests(draw: Random, duration_s: int) -> Iterator[records.AnyRecord]:
    """Four records for each request, in order of its arrival."""
    for number in range(RATE_RPS * duration_s):
        at_ns = number * NS // RATE_RPS
        hurt = at_ns >= HURT_SHARE * duration_s * NS
        name, replica = f"chatcmpl-{number:024x}", f"chat-{number % REPLICAS}"
        prompt = int(draw.lognormvariate(6.0, 0.5) * (1.6 if hurt else 1.0))
        output = int(draw.lognormvariate(4.0, 0.5))
        queue_ns = int(draw.expovariate(1 / (0.2 if hurt else 0.03)) * NS)
        prefill_ns = prompt * 60_000
        ttft_ns, decode_ns = queue_ns + prefill_ns + 2_000_000, output * STEP_NS
        yield records.RequestArrived(
            at_ns + 1_000_000, name, "chat", at_ns, prompt, 2048, tenant=f"tenant-{number % 50}",
            slo_class="chat",
        )  # fmt: skip
        yield records.RequestDispatched(at_ns + 1_200_000, name, replica, 1)
        yield records.FirstToken(at_ns + ttft_ns, name, ttft_ns)
        yield records.RequestEnded(
            at_ns + ttft_ns + decode_ns, name, "chat", "stop", at_ns, replica, 1, prompt,
            prompt // 3, output, admission_ns=2_000_000, queue_ns=queue_ns,
            prefill_ns=prefill_ns, decode_ns=decode_ns, ttft_ns=ttft_ns, tpot_ns=STEP_NS,
        )  # fmt: skip


def _steps() -> Iterator[list[records.AnyRecord]]:
    """Steps of all replicas, each with the event and the plan that replay reads."""
    number = 0
    while True:
        at_ns = (number // REPLICAS) * STEP_NS + number % REPLICAS
        # The requests of about a second before, whichever they were.
        first = max(0, at_ns * RATE_RPS // NS - ROWS * REPLICAS)
        ids = [f"chatcmpl-{first + REPLICAS * row:024x}" for row in range(ROWS)]
        replica = f"chat-{number % REPLICAS}"
        done = StepDone(
            number, tuple(Sampled(SequenceId(one, 0), 7 * number % 50_000) for one in ids), STEP_NS
        )
        plan = PlanShape(
            number,
            STEP_NS,
            tuple(
                RowShape(SequenceId(one, 0), 1, 500, 32, 123_456_789, sample=True) for one in ids
            ),
        )
        yield [
            records.Step(
                at_ns, replica, number, STEP_NS, STEP_NS - 100_000 + number % 977,
                tuple((one, 0) for one in ids),
                (records.Chunk(ids[-1], 0, 200 + number % 57, 0),),
                blocks_free=7000 - number % 100, running=ROWS, waiting=number % 3,
            ),
            records.PolicyRecord(
                at_ns, replica, "event", "StepDone", msgspec.msgpack.encode(done)
            ),
            records.PolicyRecord(
                at_ns, replica, "effect", "PlanShape", msgspec.msgpack.encode(plan)
            ),
        ]  # fmt: skip
        number += 1
