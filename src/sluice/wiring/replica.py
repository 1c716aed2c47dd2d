"""The composition root of a replica process: ``python -m sluice.wiring.replica BOOT FD``.

``BOOT`` is a ``ReplicaBoot`` as JSON, ``FD`` the file descriptor of the channel to the gateway. The
process loads its model, says so, serves until it is drained or its channel closes, and exits.
"""

import logging
import signal
import socket
import sys
from contextlib import nullcontext

from sluice.cluster.channel import ChannelClosed, ReplicaChannel
from sluice.config.sections import SEQUENCES_MAX_DEFAULT
from sluice.core.costmodel import Coefficients, LinearCostModel
from sluice.core.errors import ModelLoadError
from sluice.executors.base import StepError, StepExecutor
from sluice.executors.openvino import OpenVinoExecutor
from sluice.executors.openvino_settings import EngineSettings
from sluice.runtime.calibration import calibrate
from sluice.runtime.clock import monotonic_ns
from sluice.runtime.model_folder import ModelFolder, read_model_folder
from sluice.runtime.outputs import TextOutputs
from sluice.runtime.prepare import hold
from sluice.runtime.tokenizing import Tokenizer
from sluice.telemetry import log
from sluice.wiring.boot import ReplicaBoot
from sluice.wiring.replica_life import Loaded, ReplicaLife

_log = logging.getLogger("sluice.wiring.replica")  # as a program its name is __main__


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
    folder = boot.folder
    return ReplicaLife(boot, load, nullcontext() if folder is None else hold(folder))


def load(boot: ReplicaBoot) -> Loaded:
    """The model in the boot's folder. Raises ``ModelLoadError``."""
    if boot.folder is None or not boot.folder.is_dir():
        raise ModelLoadError(
            f"{boot.model} is not on this machine: there is no folder {boot.folder}; keep "
            "catalogue.cache_dir on a file system that all machines share"
        )
    folder = read_model_folder(boot.folder)
    executor = make_executor(boot, folder)
    cost = LinearCostModel(Coefficients())
    begun_ns = monotonic_ns()
    try:
        limits = executor.load()
        calibrate(executor, limits, cost)
    except StepError as error:
        raise ModelLoadError(f"{boot.model} is loaded and cannot be computed: {error}") from error
    compile_ns = monotonic_ns() - begun_ns
    return Loaded(executor, limits, cost, TextOutputs(Tokenizer.load(folder)), compile_ns)


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
