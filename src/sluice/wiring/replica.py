"""The composition root of a replica process: ``python -m sluice.wiring.replica BOOT FD``.

``BOOT`` is a ``ReplicaBoot`` as JSON, ``FD`` the file descriptor of the channel to the gateway. The
process loads its model, says so, serves until it is drained or its channel closes, and exits.
"""

from contextlib import nullcontext

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
from sluice.wiring.boot import ReplicaBoot
from sluice.wiring.replica_life import Loaded, ReplicaLife, run_process


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
    run_process(life_of)
