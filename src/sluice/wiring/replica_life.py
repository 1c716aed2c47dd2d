"""The life of a replica process after its executor is loaded, whatever computes its steps.

Called by the programs ``replica`` and ``simulated_replica``. Imports no engine: a process that
simulates is not to pay for one.
"""

import gc
import secrets
from dataclasses import dataclass
from typing import Protocol

from sluice.cluster.channel import ReplicaChannel
from sluice.config.sections import CHUNK_TOKENS_MAX_DEFAULT, ModelSection
from sluice.core.costmodel import LinearCostModel
from sluice.core.events import ReplicaLimits
from sluice.core.replica import Replica
from sluice.core.roster import BatchingLimits, BatchingPolicy
from sluice.executors.base import StepExecutor
from sluice.runtime.clock import monotonic_ns
from sluice.runtime.messages import Ready
from sluice.runtime.realtime import ReplicaDriver
from sluice.runtime.recorder import Recorder
from sluice.runtime.sequence_texts import Outputs
from sluice.runtime.surroundings import Record, record_nothing
from sluice.wiring.boot import ReplicaBoot
from sluice.wiring.journal import open_journal


class WarmableOutputs(Outputs, Protocol):
    """Outputs that can make at leisure what the first requests would wait for."""

    def warm_up(self) -> None:
        """Make it; called once the replica is ready."""
        ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a replica runs on: a loaded executor, what it holds, and what is known of its speed.

    ``start_ns`` is when the process began to load it.
    """

    executor: StepExecutor
    limits: ReplicaLimits
    cost: LinearCostModel
    outputs: WarmableOutputs
    start_ns: int


def live(boot: ReplicaBoot, channel: ReplicaChannel, loaded: Loaded) -> None:
    """Say that it is ready and serve until drained; raises ``ChannelClosed`` without a gateway."""
    cost, outputs = loaded.cost, loaded.outputs
    replica = Replica(batching_limits(boot.section, loaded.limits), cost)
    journal = open_journal(boot.journal, f"replica-{boot.replica_id}")
    record: Record = record_nothing
    if journal is not None:
        recorder = Recorder(journal, boot.replica_id, secrets.token_bytes(32))
        recorder.start(replica.limits, cost.state(), monotonic_ns())
        record = recorder.record
    driver = ReplicaDriver(replica, loaded.executor, outputs, channel, monotonic_ns, record)
    # What is loaded stays: without it the collector would walk the vocabulary again and again.
    gc.collect()
    gc.freeze()
    channel.send([Ready(loaded.limits, monotonic_ns() - loaded.start_ns)])
    outputs.warm_up()
    try:
        driver.run()
    finally:
        if journal is not None:
            journal.close()
        loaded.executor.close()


def batching_limits(section: ModelSection, limits: ReplicaLimits) -> BatchingLimits:
    """How the replica batches, from its settings and what its executor can hold."""
    return BatchingLimits(
        context_tokens_max=limits.context_tokens_max,
        block_size=limits.block_size,
        blocks_total=limits.blocks_total,
        sequences_max=limits.sequences_max,
        chunk_tokens_max=section.prefill_chunk_tokens_max or CHUNK_TOKENS_MAX_DEFAULT,
        step_ns_max=int(section.step_s_max * 1e9),
        policy=BatchingPolicy(section.policy),
        static_sequences=section.static_batch,
        prefix_cache=section.prefix_cache,
        prefill_share=section.prefill_share,
        kv_headroom=section.kv_headroom,
    )
