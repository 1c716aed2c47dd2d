"""The composition root of a replica process: ``python -m sluice.wiring.replica BOOT FD``.

``BOOT`` is a ``ReplicaBoot`` as JSON, ``FD`` the file descriptor of the channel to the gateway. The
process loads its model, says so, serves until it is drained or its channel closes, and exits.
"""

import gc
import logging
import secrets
import signal
import socket
import sys

from sluice.cluster.channel import ChannelClosed, ReplicaChannel
from sluice.config.sections import ModelSection
from sluice.core.costmodel import Coefficients, LinearCostModel
from sluice.core.errors import ModelLoadError
from sluice.core.events import ReplicaLimits
from sluice.core.replica import Replica
from sluice.core.roster import BatchingLimits, BatchingPolicy
from sluice.executors.base import StepError, StepExecutor
from sluice.executors.openvino import EngineSettings, OpenVinoExecutor
from sluice.runtime.calibration import calibrate
from sluice.runtime.clock import monotonic_ns
from sluice.runtime.messages import LoadFailed, Ready
from sluice.runtime.model_folder import ModelFolder, read_model_folder
from sluice.runtime.outputs import TextOutputs
from sluice.runtime.prepare import hold
from sluice.runtime.realtime import Record, ReplicaDriver, record_nothing
from sluice.runtime.recorder import Recorder
from sluice.runtime.tokenizing import Tokenizer
from sluice.telemetry import log
from sluice.wiring.boot import ReplicaBoot
from sluice.wiring.journal import open_journal

_log = logging.getLogger("sluice.wiring.replica")  # as a program its name is __main__


def main() -> None:
    """Run the process that ``sys.argv`` describes."""
    boot = ReplicaBoot.from_json(sys.argv[1])
    channel = ReplicaChannel(socket.socket(fileno=int(sys.argv[2])))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway decides when to stop
    log.set_up(boot.replica_id)
    try:
        with hold(boot.folder):
            run(boot, channel)
    except ChannelClosed as closed:
        _log.info("replica %s ends: %s", boot.replica_id, closed)


def run(boot: ReplicaBoot, channel: ReplicaChannel) -> None:
    """Load the model and serve. Raises ``ChannelClosed`` when the gateway is gone."""
    start_ns = monotonic_ns()
    try:
        folder = read_model_folder(boot.folder)
        executor = make_executor(boot, folder)
        limits = executor.load()
        cost = LinearCostModel(Coefficients())
        calibrate(executor, limits, cost)
    except ModelLoadError as error:
        channel.send([LoadFailed(str(error))])
        return
    except StepError as error:
        channel.send([LoadFailed(f"{boot.model} is loaded and cannot be computed: {error}")])
        return
    outputs = TextOutputs(Tokenizer.load(folder))
    replica = Replica(batching_limits(boot.section, limits), cost)
    journal = open_journal(boot.journal, f"replica-{boot.replica_id}")
    record: Record = record_nothing
    if journal is not None:
        recorder = Recorder(journal, boot.replica_id, secrets.token_bytes(32))
        recorder.start(replica.limits, cost.state(), monotonic_ns())
        record = recorder.record
    driver = ReplicaDriver(replica, executor, outputs, channel, monotonic_ns, record)
    # What is loaded stays: without it the collector would walk the vocabulary again and again.
    gc.collect()
    gc.freeze()
    channel.send([Ready(limits, monotonic_ns() - start_ns)])
    outputs.warm_up()
    try:
        driver.run()
    finally:
        if journal is not None:
            journal.close()
        executor.close()


def make_executor(boot: ReplicaBoot, folder: ModelFolder) -> StepExecutor:
    """The engine that the model's section asks for."""
    section = boot.section
    context_tokens_max = folder.facts.context_tokens_max
    if section.context_tokens_max is not None:
        context_tokens_max = min(context_tokens_max, section.context_tokens_max)
    return OpenVinoExecutor(
        EngineSettings(
            folder=folder.path,
            context_tokens_max=context_tokens_max,
            numerics=section.numerics,
            kv_bytes=section.kv_bytes,
            sequences_max=section.sequences_max,
            threads=boot.threads,
        )
    )


def batching_limits(section: ModelSection, limits: ReplicaLimits) -> BatchingLimits:
    """How the replica batches, from its settings and what its executor can hold."""
    return BatchingLimits(
        context_tokens_max=limits.context_tokens_max,
        block_size=limits.block_size,
        blocks_total=limits.blocks_total,
        sequences_max=limits.sequences_max,
        chunk_tokens_max=section.prefill_chunk_tokens_max,
        step_ns_max=int(section.step_s_max * 1e9),
        policy=BatchingPolicy(section.policy),
        static_sequences=section.static_batch,
        prefix_cache=section.prefix_cache,
        prefill_share=section.prefill_share,
        kv_headroom=section.kv_headroom,
    )


if __name__ == "__main__":
    main()
