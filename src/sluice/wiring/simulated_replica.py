"""The composition root of a simulated replica's process.

``python -m sluice.wiring.simulated_replica BOOT FD``: arguments and conduct are those of
``replica``. It loads no engine and no tokenizer, so that a machine can run dozens of them.
"""

from dataclasses import replace

import msgspec

from sluice.core.costmodel import Coefficients, LinearCostModel
from sluice.executors.paced import PacedExecutor
from sluice.planner.steady import CHUNK_TOKENS_MAX
from sluice.runtime.calibration import calibrate
from sluice.runtime.clock import monotonic_ns, sleep_until
from sluice.runtime.word_pieces import ANSWER_VOCABULARY, MadeUpOutputs
from sluice.wiring.boot import ReplicaBoot
from sluice.wiring.replica_life import Loaded, ReplicaLife, run_process
from sluice.wiring.simulated import simulated_model


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
    run_process(life_of)
