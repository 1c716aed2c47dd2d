"""All deployments that could answer a question, and which of them are worth a look.

Every accelerator, precision and tensor parallelism asked for is planned in closed form; the best is
the cheapest, the others kept are those that no cheaper one beats in time per token. Called by
``sluice plan`` before anything is simulated.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from sluice.planner.hardware import Accelerator
from sluice.planner.names import CannotPlan, NoFleet
from sluice.planner.plan import TENSOR_TRIED, Plan, plan, plan_with, price_of
from sluice.planner.question import Question, check

# What costs more than this many times the best is no alternative to it.
DEARER_MAX = 3.0
# What is not faster than this is no reason to pay more.
FASTER = 0.95


@dataclass(frozen=True, slots=True)
class Candidates:
    """The best plan, and others that cost more and answer faster, the cheapest first.

    ``refused`` are deployments that cannot do it, in words.
    """

    best: Plan
    others: tuple[Plan, ...]
    refused: tuple[str, ...]


def candidates(
    question: Question, accelerators: Sequence[Accelerator], precisions: Sequence[str | None]
) -> Candidates:
    """Plans on these accelerators in these precisions (None is each accelerator's usual one).

    Raises as ``plan`` does where none of them can do what is asked.
    """
    asked = [
        replace(question, accelerator=accelerator, precision=precision)
        for accelerator in accelerators
        for precision in precisions
    ]
    if question.points and len(asked) > 1:
        raise CannotPlan(
            "--calibrate is of one deployment: name one --gpu and one --precision with it"
        )
    for each in asked:
        check(each)
    found: list[Plan] = []
    refused: list[str] = []
    for each in asked:
        here = list(_plans(each))
        found += here
        if not here:
            refused.append(_refusal(each))
    if not found:
        raise NoFleet("; ".join(refused))
    rank = cost_rank(found)
    found.sort(key=rank)
    dearest = DEARER_MAX * rank(found[0])[0]
    near = [each for each in found if rank(each)[0] <= dearest]
    return Candidates(near[0], tuple(_faster(near)), tuple(refused))


def cost_rank(found: Sequence[Plan]) -> Callable[[Plan], tuple[float, float, int]]:
    """How these are ordered: by price where all have one, else by devices; then by speed."""
    priced = all(each.cost_usd_per_hour is not None for each in found)

    def rank(each: Plan) -> tuple[float, float, int]:
        cost = price_of(each) if priced else float(each.devices)
        return cost, _tpot_s(each), each.model.deployment.layout.tensor

    return rank


def _plans(question: Question) -> Iterator[Plan]:
    tried = TENSOR_TRIED if question.tensor is None else (question.tensor,)
    for tensor in tried:
        try:
            yield plan_with(question, tensor)
        except NoFleet:
            continue


def _refusal(question: Question) -> str:
    """Why there is no plan, in the words of the nearest."""
    try:
        plan(question)
    except NoFleet as error:
        return str(error)
    raise AssertionError("a plan was found where none was before")


def _faster(found: Sequence[Plan]) -> Iterator[Plan]:
    """Those that answer faster than everything cheaper."""
    least_s = _tpot_s(found[0])
    for each in found[1:]:
        if _tpot_s(each) < FASTER * least_s:
            least_s = _tpot_s(each)
            yield each


def _tpot_s(found: Plan) -> float:
    """The percentile of time per token at the rate that was asked for."""
    return found.at_forecast.tpot_s
