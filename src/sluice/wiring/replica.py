"""The composition root of a replica process: ``python -m sluice.wiring.replica BOOT FD``.

``BOOT`` is a ``ReplicaBoot`` as JSON, ``FD`` the file descriptor of the channel to the gateway. The
process loads its model, says so, serves until it is drained or its channel closes, and exits.
"""

import logging
import signal
import socket
import sys
from pathlib import Path

from sluice.cluster.channel import ChannelClosed, ReplicaChannel
from sluice.config.sections import SEQUENCES_MAX_DEFAULT
from sluice.core.costmodel import Coefficients, LinearCostModel
from sluice.core.errors import ModelLoadError
from sluice.executors.base import StepError, StepExecutor
from sluice.executors.openvino import OpenVinoExecutor
from sluice.executors.openvino_settings import EngineSettings
from sluice.runtime.calibration import calibrate
from sluice.runtime.clock import monotonic_ns
from sluice.runtime.messages import LoadFailed
from sluice.runtime.model_folder import ModelFolder, read_model_folder
from sluice.runtime.outputs import TextOutputs
from sluice.runtime.prepare import hold
from sluice.runtime.tokenizing import Tokenizer
from sluice.telemetry import log
from sluice.wiring.boot import ReplicaBoot
from sluice.wiring.replica_life import Loaded, live

_log = logging.getLogger("sluice.wiring.replica")  # as a program its name is __main__


def main() -> None:
    """Run the process that ``sys.argv`` describes."""
    boot = ReplicaBoot.from_json(sys.argv[1])
    folder = boot.folder
    if folder is None:
        raise ValueError(f"{boot.model} is simulated: its program is simulated_replica")
    channel = ReplicaChannel(socket.socket(fileno=int(sys.argv[2])))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway decides when to stop
    log.set_up(boot.replica_id)
    try:
        with hold(folder):
            run(boot, folder, channel)
    except ChannelClosed as closed:
        _log.info("replica %s ends: %s", boot.replica_id, closed)


def run(boot: ReplicaBoot, path: Path, channel: ReplicaChannel) -> None:
    """Load the model at ``path`` and serve. Raises ``ChannelClosed`` when the gateway is gone."""
    start_ns = monotonic_ns()
    try:
        folder = read_model_folder(path)
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
    live(boot, channel, Loaded(executor, limits, cost, outputs, start_ns))


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
            sequences_max=section.sequences_max or SEQUENCES_MAX_DEFAULT,
            threads=boot.threads,
        )
    )


if __name__ == "__main__":
    main()
