"""The plan of a fleet: which replicas, how many, what they cost, and what would help.

``plan`` answers a ``Question``; ``cli/plan.py`` asks and prints. Rates of one replica come from
``estimate.py``; headroom and utilisation are applied here and nowhere else, and their combined
effect is stated so that nobody adds a third margin.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, isfinite

from sluice.planner.estimate import Load, ReplicaEstimate, Targets, estimate
from sluice.planner.formats import PRECISIONS, Precision, precision_named
from sluice.planner.hardware import Accelerator
from sluice.planner.names import CannotPlan, Indivisible, NoFleet, chosen
from sluice.planner.predict import StepModel, own_fit
from sluice.planner.shapes import ModelShape
from sluice.planner.work import Deployment, Layout, checked_layout

ENGINES = ("vllm", "sglang", "trtllm")
# The versions of which capacity was published, the newest first.
CAPACITY_ENGINES = ("trtllm-1.2", "trtllm-1.0", "trtllm-0.14")
TENSOR_TRIED = (1, 2, 4, 8)
# Fewer places than this make every request a large part of the batch.
SEQUENCES_FEW = 32
POOL_SHARE_FEW = 0.15
REPLICAS_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class Question:
    """What a plan is asked for. ``tensor`` None tries the usual ones and takes the fewest devices.

    ``headroom`` is how much more than ``rate_rps`` may come, ``utilisation`` the share of the SLO
    rate that a replica is given; ``spare`` replicas may fail.
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
    file_bytes: float | None = None
    beside: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Knob:
    """A change, and the SLO rate per device that it gives, as a factor of the plan's."""

    change: str
    gain: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer: one replica and how many of it."""

    question: Question
    model: StepModel
    replica: ReplicaEstimate
    replicas: int
    replicas_low: int
    replicas_high: int | None
    notes: tuple[str, ...]

    @property
    def devices(self) -> int:
        """Accelerators of the whole fleet."""
        return self.replicas * self.model.deployment.layout.devices

    @property
    def kv_bytes_per_token(self) -> float:
        """KV bytes of one more token on all devices of a group together."""
        deployment = self.model.deployment
        per_device = deployment.kv_bytes(1.0) - deployment.kv_bytes(0.0)
        return per_device * deployment.layout.tensor

    @property
    def cost_usd_per_hour(self) -> tuple[float, float] | None:
        """Lowest and highest price of the fleet, None where the table has no price."""
        low = self.question.accelerator.usd_per_hour_low
        if low is None:
            return None
        return low * self.devices, (self.question.accelerator.usd_per_hour_high or low) * (
            self.devices
        )

    @property
    def planned_share(self) -> float:
        """Share of the fleet's SLO rate in use at the rate that was asked for.

        Both margins, whole replicas and those that may fail together make it.
        """
        return self.question.rate_rps / (self.replicas * self.replica.slo_rps.estimate)

    @property
    def share_without_spare(self) -> float:
        """As ``planned_share``, with all replicas failed that may fail."""
        left = self.replicas - self.question.spare
        return self.question.rate_rps / (left * self.replica.slo_rps.estimate)


def plan(question: Question) -> Plan:
    """The fleet for a question.

    Raises ``NoFleet`` with the reason and the nearest possible for impossible demands, and
    ``CannotPlan`` for a question that is wrong by itself.
    """
    _check(question)
    tried = (question.tensor,) if question.tensor is not None else TENSOR_TRIED
    best: Plan | None = None
    refusal: CannotPlan | None = None
    for tensor in tried:
        try:
            found = _plan_of(question, tensor)
        except CannotPlan as error:
            # The last one is the largest replica: the nearest to what was asked. That a model
            # cannot be divided so far says less than why it needs to be.
            if refusal is None or not isinstance(error, Indivisible):
                refusal = error
            continue
        if best is None or found.devices < best.devices:
            best = found
    if best is None:
        assert refusal is not None  # noqa: S101 - something was tried
        raise refusal
    return best


def knobs(plan_found: Plan) -> list[Knob]:
    """Changes of one thing each that raise the SLO rate per device, the largest gain first."""
    base = plan_found.replica.slo_rps.estimate / plan_found.model.deployment.layout.devices
    found = []
    for change, question in _changed(plan_found):
        try:
            other = _plan_of(question, question.tensor or 1)
        except CannotPlan:
            continue
        rate = other.replica.slo_rps.estimate / other.model.deployment.layout.devices
        if rate > 1.02 * base:
            found.append(Knob(change, rate / base))
    return sorted(found, key=lambda knob: -knob.gain)


def _changed(found: Plan) -> Iterator[tuple[str, Question]]:
    deployment = found.model.deployment
    asked = replace(found.question, tensor=deployment.layout.tensor)
    yield (
        f"tensor parallelism {2 * deployment.layout.tensor}",
        replace(asked, tensor=2 * deployment.layout.tensor),
    )
    fixed = published_in_fp4(asked.shape)
    for name in ("fp8", "fp4"):
        peak = asked.accelerator.fp8_tflops if name == "fp8" else asked.accelerator.fp4_tflops
        if peak is not None and name != found.model.precision and not fixed:
            yield (
                f"weights in {name}",
                replace(asked, precision=name, kv_format=None, file_bytes=None),
            )
    lengths = asked.load.lengths
    shorter = replace(lengths, output=0.75 * lengths.output)
    yield "output shorter by a quarter", replace(asked, load=replace(asked.load, lengths=shorter))
    cached = replace(lengths, cached=1.0 - 0.5 * (1.0 - lengths.cached))
    yield (
        "half of the computed prompt from the prefix cache",
        replace(asked, load=replace(asked.load, lengths=cached)),
    )
    targets = asked.targets
    yield (
        "TPOT target half as long again",
        replace(asked, targets=replace(targets, tpot_s=1.5 * targets.tpot_s)),
    )
    yield (
        "TTFT target twice as long",
        replace(asked, targets=replace(targets, ttft_s=2 * targets.ttft_s)),
    )


def _plan_of(question: Question, tensor: int) -> Plan:
    layout = checked_layout(question.shape, Layout(tensor, question.groups))
    name = question.precision or default_precision(question.accelerator)
    if published_in_fp4(question.shape):
        name = "fp4"
    precision = precision_for(question.shape, name, question.kv_format)
    _check_unit(question.accelerator, precision)
    deployment = Deployment(
        question.shape,
        question.accelerator,
        precision,
        layout,
        question.file_bytes,
        question.beside,
    )
    model, saturated, notes = step_models(deployment, question.engine_name, name)
    found = estimate(model, question.load, question.targets, saturated=saturated)
    planned = question.rate_rps * (1.0 + question.headroom) / question.utilisation
    if found.slo_rps.estimate <= 0.0:
        raise NoFleet(
            f"no rate meets the targets on {layout.devices} x {question.accelerator.name}: at one "
            f"request the percentile is already above them; relax {found.binding} or use more "
            f"tensor parallelism"
        )

    def replicas_at(rate: float) -> int | None:
        needed = None if rate <= 0 else ceil(planned / rate) + question.spare
        return None if needed is None or needed > REPLICAS_MAX else needed

    replicas = replicas_at(found.slo_rps.estimate)
    if replicas is None:
        raise NoFleet(
            f"more than {REPLICAS_MAX:,} replicas would be needed: one serves "
            f"{found.slo_rps.estimate:.3g} req/s within the targets"
        )
    least = replicas_at(found.slo_rps.high) or replicas
    return Plan(
        question=question,
        model=model,
        replica=found,
        replicas=replicas,
        replicas_low=least,
        replicas_high=replicas_at(found.slo_rps.low),
        notes=(*notes, *_warnings(found, question, precision)),
    )


def step_models(
    deployment: Deployment, engine: str, precision: str
) -> tuple[StepModel, StepModel | None, tuple[str, ...]]:
    """The step model for latencies, the one for capacity where it differs, and what to say."""
    online, offline = own_fit("closed_loop"), own_fit("capacity")
    architecture = deployment.accelerator.architecture
    known = [name for name in CAPACITY_ENGINES if f"{name}/{architecture}" in offline.levels.levels]
    capacity_engine = known[0] if known else CAPACITY_ENGINES[0]
    saturated = StepModel(deployment, capacity_engine, precision, offline)
    model = StepModel(deployment, engine, precision, online)
    if not online.knows(architecture) and known:
        note = (
            f"no published latencies on {architecture}: latencies are calculated with the "
            f"coefficients of {capacity_engine} at full load"
        )
        return saturated, None, (note,)
    if engine == "trtllm":
        return model, saturated, ()
    return model, None, ()


def _warnings(found: ReplicaEstimate, question: Question, precision: Precision) -> Iterator[str]:
    if precision.activations == "fp8" and question.accelerator.fp8_tflops is None:
        yield f"{question.accelerator.name} has no FP8 units: the weights are multiplied in 16 bits"
    if found.sequences_max < SEQUENCES_FEW:
        yield (
            f"only {found.sequences_max} requests fit the KV pool at once: the rate is starved of "
            f"memory, and small errors in it are large errors in the rate"
        )
    if found.budget.pool_bytes < POOL_SHARE_FEW * found.budget.device_bytes:
        yield "less than 15 % of the memory is left for KV: more devices per replica may pay"
    if question.shape.approximate is not None:
        yield f"approximate in the model's shape: {question.shape.approximate}"
    if question.accelerator.verified == "no":
        yield f"the figures of {question.accelerator.name} are not verified"


def default_precision(accelerator: Accelerator) -> str:
    """FP8 where the device multiplies it, else 16 bits."""
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


def _check_unit(accelerator: Accelerator, precision: Precision) -> None:
    """Refuse values of four bits where nothing multiplies them."""
    if precision.activations == "fp4" and accelerator.fp4_tflops is None:
        wider = "int4 or bf16" if accelerator.fp8_tflops is None else "fp8 or int4"
        raise NoFleet(
            f"{accelerator.name} has no FP4 units (architecture {accelerator.architecture}): ask "
            f"for {wider}, or for a GPU that has them"
        )


def _check(question: Question) -> None:
    """Refuse what is not a positive, possible number."""
    lengths, targets = question.load.lengths, question.targets
    for what, value, high in (
        ("rate", question.rate_rps, 1e7),
        ("input", lengths.prompt, 1e8),
        ("output", lengths.output, 1e8),
        ("TTFT", targets.ttft_s, 86400.0),
        ("TPOT", targets.tpot_s, 3600.0),
    ):
        if not isfinite(value) or not 0.0 < value <= high:
            raise CannotPlan(f"{what} must be above 0 and at most {high:g}, not {value:g}")
    if lengths.prompt < 1 or lengths.output < 1:
        raise CannotPlan("input and output must be at least 1 token")
    if not 50.0 <= targets.percentile < 100.0:
        raise CannotPlan(f"percentile must be 50 to below 100, not {targets.percentile:g}")
    if not 0.0 <= lengths.cached < 1.0:
        raise CannotPlan(f"the cached share must be 0 to below 1, not {lengths.cached:g}")
    if not 0.0 < question.utilisation <= 1.0:
        raise CannotPlan(f"utilisation must be above 0 and at most 1, not {question.utilisation:g}")
    if not 0.0 <= question.headroom <= 10.0:
        raise CannotPlan(f"headroom must be 0 to 10, not {question.headroom:g}")
    if question.spare < 0:
        raise CannotPlan(f"spare replicas must be 0 or more, not {question.spare}")
    chosen("engine", question.engine_name, ENGINES)
    longest = question.shape.context_tokens_max
    if longest is not None and lengths.prompt + lengths.output > longest:
        raise NoFleet(
            f"input and output are {lengths.prompt + lengths.output:.0f} tokens together, and "
            f"{question.shape.name} takes {longest:,}; shorten them to that"
        )
