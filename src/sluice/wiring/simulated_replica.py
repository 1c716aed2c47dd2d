"""The composition root of a simulated replica's process.

``python -m sluice.wiring.simulated_replica BOOT FD``: arguments and conduct are those of
``replica``. It loads no engine and no tokenizer, so that a machine can run dozens of them.
"""

import logging
import signal
import socket
import sys
from dataclasses import replace

import msgspec

from sluice.cluster.channel import ChannelClosed, ReplicaChannel
from sluice.core.costmodel import Coefficients, LinearCostModel
from sluice.executors.paced import PacedExecutor
from sluice.planner.steady import CHUNK_TOKENS_MAX
from sluice.runtime.calibration import calibrate
from sluice.runtime.clock import monotonic_ns, sleep_until
from sluice.runtime.word_pieces import ANSWER_VOCABULARY, MadeUpOutputs
from sluice.telemetry import log
from sluice.wiring.boot import ReplicaBoot
from sluice.wiring.replica_life import Loaded, ReplicaLife
from sluice.wiring.simulated import simulated_model

_log = logging.getLogger("sluice.wiring.simulated_replica")  # as a program its name is __main__


def main() -> None:
    """Run the process that ``sys.argv`` describes."""
    boot = ReplicaBoot.from_json(sys.argv[1])
    channel = ReplicaChannel(socket.socket(fileno=int(sys.argv[2])))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway decides when to stop
    log.set_up(boot.replica_id)
    replica = life_of(sys.argv[1])
    try:
        replica.live(channel)
    except ChannelClosed as closed:
        _log.info("replica %s ends: %s", boot.replica_id, closed)
    finally:
        replica.close()


def life_of(boot_text: str) -> ReplicaLife:
    """The life of the replica that the boot describes, before its model is loaded."""
    boot = ReplicaBoot.from_json(boot_text)
    chunk_tokens = boot.section.prefill_chunk_tokens_max or CHUNK_TOKENS_MAX
    section = replace(boot.section, prefill_chunk_tokens_max=chunk_tokens)
    return ReplicaLife(msgspec.structs.replace(boot, section=section), load)


def load(boot: ReplicaBoot) -> Loaded:
    """The model of the boot's section. Raises ``ModelLoadError``."""
    model = simulated_model(boot.section)
    executor = PacedExecutor(
        model.limits, model.times, ANSWER_VOCABULARY, monotonic_ns, sleep_until
    )
    cost = LinearCostModel(Coefficients())
    calibrate(executor.unpaced, model.limits, cost)
    return Loaded(executor, executor.load(), cost, MadeUpOutputs())


if __name__ == "__main__":
    main()
