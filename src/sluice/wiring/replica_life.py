"""The life of a replica, whatever computes its steps: load, say so, serve until it is told to end.

Made by the programs ``replica`` and ``simulated_replica``, for a process of one channel or for an
actor that outlives its gateway. Imports no engine: who simulates is not to pay for one.
"""

import gc
import logging
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Protocol

from sluice.cluster.channel import ChannelClosed, ReplicaChannel
from sluice.config.sections import CHUNK_TOKENS_MAX_DEFAULT, ModelSection
from sluice.core.costmodel import LinearCostModel
from sluice.core.errors import ModelLoadError
from sluice.core.events import ReplicaLimits
from sluice.core.replica import Replica
from sluice.core.roster import BatchingLimits, BatchingPolicy
from sluice.executors.base import StepExecutor
from sluice.runtime.clock import monotonic_ns
from sluice.runtime.messages import LoadFailed, Ready
from sluice.runtime.processors import processor_times
from sluice.runtime.realtime import ReplicaDriver
from sluice.runtime.recorder import Recorder
from sluice.runtime.sequence_texts import Outputs
from sluice.runtime.surroundings import Channel, Record, record_nothing
from sluice.telemetry import log
from sluice.wiring.boot import ReplicaBoot
from sluice.wiring.journal import open_journal

_log = logging.getLogger(__name__)


class WarmableOutputs(Outputs, Protocol):
    """Outputs that can make at leisure what the first requests would wait for."""

    def warm_up(self) -> None:
        """Make it; called once the replica is ready."""
        ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a replica runs on: a loaded executor, what it holds, and what is known of its speed.

    It took ``compile_ns`` to compile the model and to try what was compiled.
    """

    executor: StepExecutor
    limits: ReplicaLimits
    cost: LinearCostModel
    outputs: WarmableOutputs
    compile_ns: int = 0


class ReplicaLife:
    """One loaded model over all the gateways that it serves, one after another.

    ``load`` raises ``ModelLoadError``; ``holding`` is held from before it until ``close``.
    """

    def __init__(
        self,
        boot: ReplicaBoot,
        load: Callable[[ReplicaBoot], Loaded],
        holding: AbstractContextManager[None] | None = None,
    ) -> None:
        self._boot = boot
        self._load = load
        self._loaded: Loaded | None = None
        self._held = ExitStack()
        self._holding = holding or nullcontext()

    def live(self, channel: Channel, clock: Callable[[], int] = monotonic_ns) -> None:
        """Load what is not loaded, say that it is ready and serve until drained.

        ``clock`` is the gateway's, whose times requests carry. Raises what the channel raises
        where the gateway is gone; what it had asked for is forgotten then.
        """
        begun_ns, compile_ns = monotonic_ns(), 0
        if self._loaded is None:
            self._held.enter_context(self._holding)
            try:
                self._loaded = self._load(self._boot)
            except ModelLoadError as error:
                channel.send([LoadFailed(str(error))])
                return
            compile_ns = self._loaded.compile_ns
            # What is loaded stays: without it the collector would walk the vocabulary again and
            # again.
            gc.collect()
            gc.freeze()
        ready = Ready(self._loaded.limits, monotonic_ns() - begun_ns, compile_ns)
        self._serve(channel, clock, self._loaded, ready)

    def _serve(
        self, channel: Channel, clock: Callable[[], int], loaded: Loaded, ready: Ready
    ) -> None:
        boot = self._boot
        replica = Replica(batching_limits(boot.section, loaded.limits), loaded.cost)
        journal = open_journal(boot.journal, f"replica-{boot.replica_id}", clock)
        record: Record = record_nothing
        if journal is not None:
            key = secrets.token_bytes(32)
            recorder = Recorder(journal, boot.replica_id, key, processor_times)
            recorder.start(replica.limits, loaded.cost.state(), clock())
            record = recorder.record
        driver = ReplicaDriver(replica, loaded.executor, loaded.outputs, channel, clock, record)
        try:
            channel.send([ready])
            loaded.outputs.warm_up()
            driver.run()
        finally:
            driver.abandon()
            if journal is not None:
                journal.close()

    def close(self) -> None:
        """Release the model."""
        if self._loaded is not None:
            self._loaded.executor.close()
        self._held.close()


def run_process(life_of: Callable[[str], ReplicaLife]) -> None:
    """Live in this process over the one channel that its arguments name: ``BOOT FD``.

    ``BOOT`` is a ``ReplicaBoot`` as JSON, ``FD`` the file descriptor of the channel to the gateway.
    """
    boot_text, descriptor = sys.argv[1:]
    replica_id = ReplicaBoot.from_json(boot_text).replica_id
    channel = ReplicaChannel(socket.socket(fileno=int(descriptor)))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway decides when to stop
    log.set_up(replica_id)
    replica = life_of(boot_text)
    try:
        replica.live(channel)
    except ChannelClosed as closed:
        _log.info("replica %s ends: %s", replica_id, closed)
    finally:
        replica.close()


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
