"""Models that exist as a cost model only: ``sim:MODEL@GPUxN`` to limits and step times.

Read by the gateway, which checks the names and counts tokens, and by each replica process, which
takes the time that the steps of such hardware would take.
"""

import re
from dataclasses import dataclass, replace

import sluice
from sluice.config.sections import ModelSection
from sluice.core.errors import ModelLoadError
from sluice.core.events import ReplicaLimits
from sluice.planner.estimate import BATCH_MAX, Load
from sluice.planner.hardware import Accelerator
from sluice.planner.names import CannotPlan
from sluice.planner.plan import step_models
from sluice.planner.question import precision_of
from sluice.planner.replicas import ReplicaTimes, simulated_replica
from sluice.planner.steady import Lengths
from sluice.planner.tables import Tables, own_tables
from sluice.planner.work import Deployment, Layout, checked_layout
from sluice.runtime.model_folder import ModelFacts
from sluice.runtime.word_pieces import made_up_facts

PREFIX = "sim:"
# Where on its curve a deployment is asked how long steps take: a chat.
USUAL_LENGTHS = Lengths(1000.0, 200.0)


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """What a simulated model is: its facts, what a replica of it holds, and how long steps take."""

    facts: ModelFacts
    version: str
    limits: ReplicaLimits
    times: ReplicaTimes


def is_simulated(section: ModelSection) -> bool:
    """Whether the model of this section has no weights here."""
    return section.source.startswith(PREFIX)


def simulated_model(section: ModelSection, lengths: Lengths = USUAL_LENGTHS) -> SimulatedModel:
    """The model that the section's source names, for requests of these mean lengths.

    Raises ``ModelLoadError`` for a name that is not known, with the nearest, and where the model
    does not fit on the devices.
    """
    try:
        return _model(section, lengths)
    except CannotPlan as error:
        raise ModelLoadError(f"{section.source} cannot be simulated: {error}") from error


def _model(section: ModelSection, lengths: Lengths) -> SimulatedModel:
    model, at, device = section.source.removeprefix(PREFIX).rpartition("@")
    if not at or not model or not device:
        raise CannotPlan("write sim:MODEL@GPU or sim:MODEL@GPUxN, as in sim:llama-3.1-70b@h100x4")
    tables = own_tables()
    shape = tables.model(model)
    accelerator, count = _devices(tables, device)
    precision, formats = precision_of(shape, accelerator, None)
    deployment = Deployment(
        shape, accelerator, formats, checked_layout(shape, Layout(tensor=count))
    )
    load = Load(lengths, section.sequences_max or BATCH_MAX)
    replica = simulated_replica(step_models(deployment, "vllm", precision)[0], load)
    limits = replica.limits
    each = deployment.kv_bytes(float(limits.context_tokens_max)) / limits.context_tokens_max
    block_bytes = int(each * limits.block_size) * count
    blocks = limits.blocks_total
    if section.kv_bytes is not None:
        blocks = min(blocks, max(1, section.kv_bytes // block_bytes))
    trained = limits.context_tokens_max
    context = min(trained, section.context_tokens_max or trained)
    limits = replace(
        limits, context_tokens_max=context, blocks_total=blocks, block_bytes=block_bytes
    )
    facts = made_up_facts(shape.name, trained, shape.vocabulary)
    version = f"{section.source}/{precision}/{sluice.__version__}"
    return SimulatedModel(facts, version, limits, replica.times)


def _devices(tables: Tables, written: str) -> tuple[Accelerator, int]:
    """The device and how many: a name may itself end like a number of devices."""
    found = re.fullmatch(r"(.+)x(\d{1,4})", written)
    if found is None:
        return tables.accelerator(written), 1
    try:
        return tables.accelerator(written), 1
    except CannotPlan:
        return tables.accelerator(found[1]), int(found[2])
