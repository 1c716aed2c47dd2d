"""What a plan is asked for, and which questions are wrong by themselves.

``cli/plan_question.py`` makes a ``Question`` from options, ``plan.py`` answers it. Whether a fleet
can do what is asked is not decided here: only that each number is one, that the parts agree with
each other, and that names are known.
"""

from dataclasses import dataclass
from math import isfinite

from sluice.planner.estimate import Load, Targets
from sluice.planner.formats import PRECISIONS, Precision, precision_named
from sluice.planner.hardware import Accelerator
from sluice.planner.memory import MEMORY_SHARE
from sluice.planner.names import CannotPlan, NoFleet, chosen, shown_s
from sluice.planner.predict import Point
from sluice.planner.shapes import ModelShape
from sluice.planner.steady import CHUNK_TOKENS_MAX

ENGINES = ("vllm", "sglang", "trtllm")


@dataclass(frozen=True, slots=True)
class Question:
    """What a plan is asked for. ``tensor`` None tries the usual ones and takes the fewest devices.

    ``headroom`` is how much more than ``rate_rps`` may come, ``utilisation`` the share of the SLO
    rate that a replica is given. ``spare`` replicas may fail, or one of ``zones`` over which they
    are spread evenly. ``points`` were measured on exactly this deployment. ``smaller`` is a model
    that could answer instead, for the advice only.
    """

    shape: ModelShape
    accelerator: Accelerator
    rate_rps: float
    load: Load
    targets: Targets
    precision: str | None = None
    kv_format: str | None = None
    tensor: int | None = None
    groups: int = 1
    engine_name: str = "vllm"
    headroom: float = 0.3
    utilisation: float = 0.75
    spare: int = 0
    zones: int = 1
    chunk_tokens: float = CHUNK_TOKENS_MAX
    memory_share: float = MEMORY_SHARE
    file_bytes: float | None = None
    beside: tuple[tuple[str, float], ...] = ()
    points: tuple[Point, ...] = ()
    smaller: ModelShape | None = None

    @property
    def planned_rps(self) -> float:
        """The SLO rate that the fleet must have, before allowing for failures."""
        return self.rate_rps * (1.0 + self.headroom) / self.utilisation


def check(question: Question) -> None:
    """Raises ``CannotPlan`` where a number is not a possible one or two parts contradict."""
    _check_ranges(question)
    _check_targets(question.targets)
    lengths, shape = question.load.lengths, question.shape
    chosen("engine", question.engine_name, ENGINES)
    if question.groups > 1 and shape.experts is None:
        raise CannotPlan(
            f"--dp {question.groups} shares experts between groups, and {shape.name} has none: "
            f"leave it out, the plan adds replicas by itself"
        )
    if question.points and question.tensor is None:
        raise CannotPlan(
            "--calibrate needs --tp: a point was measured with one tensor parallelism and says "
            "nothing about others"
        )
    longest = shape.context_tokens_max
    if longest is not None and lengths.prompt + lengths.output > longest:
        raise NoFleet(
            f"input and output are {lengths.prompt + lengths.output:.0f} tokens together, and "
            f"{shape.name} takes {longest:,}; shorten them to that"
        )


def _check_ranges(question: Question) -> None:
    lengths = question.load.lengths
    for what, value, high in (
        ("rate", question.rate_rps, 1e7),
        ("input", lengths.prompt, 1e8),
        ("output", lengths.output, 1e8),
        ("batch", float(question.load.batch_max), 1e6),
        ("chunk", question.chunk_tokens, 1e6),
        ("utilisation", question.utilisation, 1.0),
        ("memory share", question.memory_share, 1.0),
    ):
        if not isfinite(value) or not 0.0 < value <= high:
            raise CannotPlan(f"{what} must be above 0 and at most {high:g}, not {value:g}")
    for what, value, high in (
        ("headroom", question.headroom, 10.0),
        ("output variation", lengths.output_variation, 10.0),
        ("spare replicas", float(question.spare), 1e6),
    ):
        if not isfinite(value) or not 0.0 <= value <= high:
            raise CannotPlan(f"{what} must be 0 to {high:g}, not {value:g}")
    if lengths.prompt < 1 or lengths.output < 1:
        raise CannotPlan("input and output must be at least 1 token")
    if question.chunk_tokens < 16:
        raise CannotPlan(f"chunk must be at least 16 tokens, not {question.chunk_tokens:g}")
    if not 0.0 <= lengths.cached < 1.0:
        raise CannotPlan(f"the cached share must be 0 to below 1, not {lengths.cached:g}")
    if not 1 <= question.zones <= 100:
        raise CannotPlan(f"zones must be 1 to 100, not {question.zones}")


def _check_targets(targets: Targets) -> None:
    for what, value, high in (
        ("TTFT", targets.ttft_s, 86400.0),
        ("TPOT", targets.tpot_s, 3600.0),
        ("end-to-end", targets.e2e_s, 864000.0),
    ):
        if value is not None and not (isfinite(value) and 0.0 < value <= high):
            raise CannotPlan(f"{what} must be above 0 and at most {high:g} s, not {value:g}")
    if not (isfinite(targets.retrieval_s) and 0.0 <= targets.retrieval_s <= 86400.0):
        raise CannotPlan(f"retrieval must be 0 s to 86400 s, not {targets.retrieval_s:g}")
    if not 50.0 <= targets.percentile < 100.0:
        raise CannotPlan(f"percentile must be 50 to below 100, not {targets.percentile:g}")
    if targets.e2e_s is not None and targets.e2e_s < targets.ttft_s:
        raise CannotPlan(
            f"the end-to-end target {shown_s(targets.e2e_s)} is shorter than the TTFT target "
            f"{shown_s(targets.ttft_s)}, which is a part of it; lower the TTFT target to at most "
            f"that"
        )


def default_precision(shape: ModelShape, accelerator: Accelerator) -> str:
    """That of quantised weights, else FP8 where the device multiplies it, else 16 bits."""
    if shape.published is not None:
        return shape.published
    return "fp8" if accelerator.fp8_tflops is not None else "bf16"


def published_in_fp4(shape: ModelShape) -> bool:
    """Whether the model's weights are published in MXFP4 and in nothing else."""
    return shape.name.startswith("gpt-oss")


def precision_for(shape: ModelShape, name: str, kv_format: str | None = None) -> Precision:
    """The formats of a precision for this model."""
    chosen("precision", name, PRECISIONS)
    if published_in_fp4(shape):
        name = "mxfp4"
    return precision_named(name, kv_format)


def precision_of(
    shape: ModelShape, accelerator: Accelerator, asked: str | None, kv_format: str | None = None
) -> tuple[str, Precision]:
    """The name of the precision to plan in, and its formats: the usual one where none is asked
    for, and that of the published weights where there is no other."""
    name = "fp4" if published_in_fp4(shape) else asked or default_precision(shape, accelerator)
    return name, precision_for(shape, name, kv_format)


def check_unit(accelerator: Accelerator, precision: Precision) -> None:
    """Refuse values of four bits where nothing multiplies them."""
    if precision.activations == "fp4" and accelerator.fp4_tflops is None:
        wider = "int4 or bf16" if accelerator.fp8_tflops is None else "fp8 or int4"
        raise NoFleet(
            f"{accelerator.name} has no FP4 units (architecture {accelerator.architecture}): ask "
            f"for {wider}, or for a GPU that has them"
        )
