"""The plan of a fleet: which replicas, how many, and what they cost.

``plan`` answers a ``Question``; ``cli/plan.py`` asks and prints. Rates of one replica come from
``estimate.py``; headroom, utilisation and failures are allowed for here and nowhere else, and their
combined effect is stated so that nobody adds a third margin.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, inf

from sluice.planner.estimate import Moment, ReplicaEstimate, estimate, moment_at
from sluice.planner.floors import check_floors, no_rate
from sluice.planner.formats import Precision
from sluice.planner.names import CannotPlan, Indivisible, NoFleet
from sluice.planner.points import calibrated, surprises
from sluice.planner.predict import Band, Calibration, StepModel, own_fit
from sluice.planner.question import (
    Question,
    check,
    check_unit,
    precision_of,
    published_in_fp4,
)
from sluice.planner.work import Deployment, Layout, checked_layout

# The versions of which capacity was published, the newest first.
CAPACITY_ENGINES = ("trtllm-1.2", "trtllm-1.0", "trtllm-0.14")
TENSOR_TRIED = (1, 2, 4, 8)
# Fewer places than this make every request a large part of the batch.
SEQUENCES_FEW = 32
POOL_SHARE_FEW = 0.15
REPLICAS_MAX = 1_000_000
# A point this many times from the formula is more often a wrong unit than a slow engine.
SURPRISE = 3.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer: one replica and how many of it.

    ``at_forecast`` is a replica at its share of the rate that was asked for. ``simulation`` says
    what runs the SLO rate is from, where it is not from the closed form. ``saturated`` is the model
    that capacity is from, where it is another.
    """

    question: Question
    model: StepModel
    replica: ReplicaEstimate
    at_forecast: Moment
    replicas: int
    replicas_low: int
    replicas_high: int | None
    notes: tuple[str, ...]
    simulation: str = ""
    saturated: StepModel | None = None

    @property
    def devices(self) -> int:
        """Accelerators of the whole fleet."""
        return self.replicas * self.model.deployment.layout.devices

    @property
    def planned_rps_per_device(self) -> float:
        """Requests per second that one device is given."""
        rate = self.replica.slo_rps.estimate * self.question.utilisation
        return rate / self.model.deployment.layout.devices

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
        high = self.question.accelerator.usd_per_hour_high or low
        return low * self.devices, high * self.devices

    @property
    def planned_share(self) -> float:
        """Share of the fleet's SLO rate in use at the rate that was asked for.

        Both margins, whole replicas and those that may fail together make it.
        """
        return self.question.rate_rps / (self.replicas * self.replica.slo_rps.estimate)

    @property
    def may_fail(self) -> int:
        """Replicas that may fail at once and leave what the margins need."""
        of_zone = self.replicas // self.question.zones if self.question.zones > 1 else 0
        return max(self.question.spare, of_zone)

    @property
    def share_without_spare(self) -> float:
        """As ``planned_share``, with all replicas failed that may fail."""
        left = self.replicas - self.may_fail
        return self.question.rate_rps / (left * self.replica.slo_rps.estimate)


def plan(question: Question) -> Plan:
    """The fleet for a question.

    Raises ``NoFleet`` with the reason and the nearest possible for impossible demands, and
    ``CannotPlan`` for a question that is wrong by itself.
    """
    check(question)
    if question.tensor is not None:
        try:
            return plan_with(question, question.tensor)
        except NoFleet as error:
            raise _with_nearest(question, error) from None
    best: Plan | None = None
    refusal: CannotPlan | None = None
    for tensor in TENSOR_TRIED:
        try:
            found = plan_with(question, tensor)
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


def _with_nearest(question: Question, error: NoFleet) -> NoFleet:
    """The refusal, with the fewest devices per replica that do what was asked where there are."""
    assert question.tensor is not None  # noqa: S101 - asked only then
    for tensor in TENSOR_TRIED:
        if tensor <= question.tensor or f"--tp {tensor}" in str(error):
            continue
        try:
            plan_with(replace(question, points=()), tensor)
        except CannotPlan:
            continue
        return NoFleet(f"{error}; with --tp {tensor} it can be done")
    return error


def plan_with(question: Question, tensor: int, calibration: Calibration | None = None) -> Plan:
    """The plan with this tensor parallelism; ``calibration`` is one that another plan found, and
    is taken where the question has no points of its own. Raises as ``plan`` does."""
    model, saturated, notes = _models(question, tensor, calibration)
    check_floors(model, question.load, question.targets)
    found = estimate(model, question.load, question.targets, saturated=saturated)
    if found.slo_rps.estimate <= 0.0:
        raise no_rate(model, question.load, question.targets, found.binding)
    replicas = _replicas_needed(question, found.slo_rps.estimate)
    return Plan(
        question=question,
        model=model,
        replica=found,
        at_forecast=moment_at(
            model,
            question.load,
            question.rate_rps / replicas,
            question.targets.percentile / 100.0,
        ),
        replicas=replicas,
        replicas_low=_replicas_at(question, found.slo_rps.high) or replicas,
        replicas_high=_replicas_at(question, found.slo_rps.low),
        notes=(*notes, *_warnings(found, question, model.deployment.precision)),
        saturated=saturated,
    )


def _models(
    question: Question, tensor: int, calibration: Calibration | None
) -> tuple[StepModel, StepModel | None, tuple[str, ...]]:
    """As ``step_models``, with the settings of the engine and the points of the question."""
    deployment, name = deployment_of(question, tensor)
    plain, saturated, notes = step_models(deployment, question.engine_name, name)

    def tuned(model: StepModel) -> StepModel:
        return replace(
            model, chunk_tokens=question.chunk_tokens, memory_share=question.memory_share
        )

    model = replace(tuned(plain), calibration=calibration)
    if question.points:
        model = calibrated(model, question.load, question.points)
        notes = (*notes, *surprises(model, question.load, question.points, SURPRISE))
    if model.calibration is not None or saturated is None:
        # What was measured here says more about saturation than other fleets that were saturated.
        return model, None, notes
    return model, tuned(saturated), notes


def with_slo_rate(found: Plan, slo_rps: Band, simulation: str) -> Plan:
    """The plan with the SLO rate of a replica that a simulation found, described in words.

    Raises ``NoFleet`` where too many replicas would be needed.
    """
    replicas = _replicas_needed(found.question, slo_rps.estimate)
    question, model = found.question, found.model
    share = question.targets.percentile / 100.0
    at_slo = moment_at(model, question.load, slo_rps.estimate, share)
    return replace(
        found,
        replica=replace(found.replica, slo_rps=slo_rps, at_slo=at_slo),
        at_forecast=moment_at(model, question.load, question.rate_rps / replicas, share),
        replicas=replicas,
        replicas_low=_replicas_at(question, slo_rps.high) or replicas,
        replicas_high=_replicas_at(question, slo_rps.low),
        simulation=simulation,
    )


def deployment_of(question: Question, tensor: int) -> tuple[Deployment, str]:
    """What one replica is, and the name of its precision."""
    layout = checked_layout(question.shape, Layout(tensor, question.groups))
    name, precision = precision_of(
        question.shape, question.accelerator, question.precision, question.kv_format
    )
    check_unit(question.accelerator, precision)
    deployment = Deployment(
        question.shape,
        question.accelerator,
        precision,
        layout,
        question.file_bytes,
        question.beside,
    )
    return deployment, name


def _replicas_at(question: Question, rate: float) -> int | None:
    """Replicas for this SLO rate of one, with those that may fail; None where they are too many."""
    if rate <= 0.0 or question.planned_rps / rate > REPLICAS_MAX:
        return None
    needed = ceil(question.planned_rps / rate)
    zones = question.zones
    if zones == 1:
        return needed + question.spare
    # As many in each zone as leave what is needed when one zone is gone.
    return zones * max(ceil(needed / (zones - 1)), ceil((needed + question.spare) / zones))


def _replicas_needed(question: Question, rate: float) -> int:
    """As ``_replicas_at``; raises ``NoFleet`` where they are too many."""
    replicas = _replicas_at(question, rate)
    if replicas is None:
        raise NoFleet(
            f"more than {REPLICAS_MAX:,} replicas would be needed: one serves {rate:.3g} req/s "
            f"within the targets"
        )
    return replicas


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
    asked = question.precision
    if published_in_fp4(question.shape) and asked not in {None, "fp4", "nvfp4", "mxfp4"}:
        yield f"{question.shape.name} is published in MXFP4 only: planned so, and not in {asked}"
    if precision.activations == "fp8" and question.accelerator.fp8_tflops is None:
        yield f"{question.accelerator.name} has no FP8 units: the weights are multiplied in 16 bits"
    if precision.weights == "mxfp4" and question.accelerator.fp4_tflops is None:
        yield f"{question.accelerator.name} has no FP4 units: the weights are multiplied in 16 bits"
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


def price_of(found: Plan) -> float:
    """What plans are compared by: the lowest price, or infinity where the table has none."""
    cost = found.cost_usd_per_hour
    return inf if cost is None else cost[0]
