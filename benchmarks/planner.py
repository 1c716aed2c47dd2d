"""How well the planner predicts what it has not seen, beside AIConfigurator.

Run with ``python -m benchmarks.planner FOLDER [--aic PYTHON]``; the folder holds the published
measurements and ``PYTHON`` is the interpreter of an environment with ``aiconfigurator``. Everything
is fitted again for every fold: coefficients, residual rows and the width of the band, and with
``--nested`` the covariance too (which properties matter how much), so that nothing has seen the
left-out rows but the form of the formula. Without it the covariance is the shipped one, which is
quicker and slightly kinder.

Held out in turn: whole curves (same model, engine, device, precision and layout; folds by a hash of
the name), whole (model, device), whole models, whole devices. Printed: median and p90 of the
absolute relative error, and how much of the left-out rows the 80 % band holds.
"""

import argparse
import json
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from benchmarks.planner_mlperf import print_mlperf
from sluice.planner.predict import Fitted, Point, StepModel, own_fit
from tools.planner_fit import fit_model, search_field
from tools.planner_rows import Measured, capacity_rows, closed_loop_rows, fold_of

# Of about 100 curves, so that few are left out together; a fit takes half a minute, and a search
# of the covariance one more.
FOLDS = 10
Covariance = Literal["shipped", "searched"]
TABLE = "{:<34}{:>6}{:>9}{:>9}{:>9}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One left-out row: the prediction, its band, and the truth, in the row's own unit."""

    row: Measured
    predicted: float
    inside: bool

    @property
    def error(self) -> float:
        """Absolute relative error."""
        return abs(self.predicted / self.row.value - 1.0)


def outcome(row: Measured, fit: Fitted) -> Outcome:
    """The row as the planner would predict it from this fit."""
    model = StepModel(row.deployment, row.case.engine_name, row.case.precision, fit)
    band = model.step(row.lengths, row.concurrency)
    if fit.kind == "capacity":
        devices = row.deployment.layout.devices
        speeds = [row.concurrency / devices / s for s in (band.estimate, band.high, band.low)]
    else:
        speeds = [band.estimate, band.low, band.high]
    return Outcome(row, speeds[0], speeds[1] <= row.value <= speeds[2])


def refits(
    rows: Sequence[Measured],
    kind: str,
    group: Callable[[Measured], str],
    folds: int | None,
    covariance: Covariance = "shipped",
) -> Iterator[tuple[Fitted, list[int]]]:
    """Fits without a fold of groups, and the places of its rows; each group is a fold of its own
    where ``folds`` is None."""
    saturated = kind == "capacity"
    members = defaultdict(list)
    for place, row in enumerate(rows):
        name = group(row)
        members[name if folds is None else str(fold_of(name, folds))].append(place)
    shipped = own_fit(kind)
    for places in members.values():
        out = set(places)
        kept = [row for place, row in enumerate(rows) if place not in out]
        field = replace(shipped.field, rows=())
        if covariance == "searched":
            field = search_field(kept, saturated=saturated)
        model = fit_model(kept, field, saturated=saturated)
        yield Fitted(kind, model.levels, model.field, shipped.date), places


def left_out(
    rows: Sequence[Measured], kind: str, group: Callable[[Measured], str]
) -> list[Outcome]:
    """Predictions of all rows from fits without their group."""
    return [
        outcome(rows[place], fit)
        for fit, places in refits(rows, kind, group, None)
        for place in places
    ]


def calibrated_outcomes(rows: Sequence[Measured], fit: Fitted) -> list[Outcome]:
    """Predictions of left-out rows from the middle one of the same curve and lengths."""
    members = defaultdict(list)
    for row in rows:
        members[row.curve, row.lengths].append(row)
    found = []
    for group in members.values():
        group.sort(key=lambda row: row.concurrency)
        middle = group[len(group) // 2]
        model = StepModel(
            middle.deployment, middle.case.engine_name, middle.case.precision, fit
        ).calibrated(middle.lengths, [Point(middle.concurrency, middle.value)])
        for row in group:
            if row is not middle:
                band = model.step(row.lengths, row.concurrency)
                found.append(Outcome(row, band.estimate, band.low <= row.value <= band.high))
    return found


def line(name: str, outcomes: Sequence[Outcome]) -> str:
    """One line of the table."""
    errors = [each.error for each in outcomes]
    inside = np.mean([each.inside for each in outcomes])
    return TABLE.format(
        name,
        len(errors),
        f"{np.median(errors):.1%}",
        f"{np.quantile(errors, 0.9):.1%}",
        f"{inside:.0%}",
    )


def print_outcomes(title: str, outcomes: Sequence[Outcome], *, groups: bool) -> None:
    """All rows, dense and expert models, and each model and engine where asked."""
    print(line(title, outcomes))
    print(line("  dense", [each for each in outcomes if each.row.dense]))
    print(line("  experts", [each for each in outcomes if not each.row.dense]))
    if not groups:
        return
    members = defaultdict(list)
    for each in outcomes:
        members[f"  {each.row.case.model}"].append(each)
        members[f"  {each.row.case.engine_name}/{each.row.case.architecture}"].append(each)
    for name in sorted(members):
        print(line(name, members[name]))


def aic_predictions(rows: Sequence[Measured], python: Path) -> list[float | None]:
    """Seconds per token by AIConfigurator, None where it has no answer."""
    cases = [
        {
            "model": row.published[0],
            "device": row.published[1],
            "engine": row.case.engine_name,
            "precision": row.case.precision,
            "prompt": row.lengths.prompt,
            "output": row.lengths.output,
            "concurrency": row.concurrency,
            "tensor": row.case.tensor,
            "data": row.case.groups,
            "experts": not row.dense,
        }
        for row in rows
    ]
    script = Path(__file__).with_name("planner_aic.py")
    done = subprocess.run(
        [python, script], input=json.dumps(cases), capture_output=True, text=True, check=True
    )
    answers = [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]
    return [answer.get("step_s") for answer in answers]


def print_beside_aic(outcomes: Sequence[Outcome], python: Path, count: int) -> None:
    """The same rows for both: a sample by hash, without the rows that it cannot answer."""
    ordered = sorted(outcomes, key=lambda each: fold_of("|".join(map(str, each.row.case)), 10**9))
    sample = ordered[:count]
    answers = aic_predictions([each.row for each in sample], python)
    both = [
        (each, answer) for each, answer in zip(sample, answers, strict=True) if answer is not None
    ]
    print(f"\nBeside AIConfigurator: {len(both)} of {count} sampled rows that it answers")
    for name, chosen in (
        ("all", both),
        ("dense", [pair for pair in both if pair[0].row.dense]),
        ("experts", [pair for pair in both if not pair[0].row.dense]),
    ):
        own = [each.error for each, _ in chosen]
        other = [abs(answer / each.row.value - 1.0) for each, answer in chosen]
        for tool, errors in (("planner, curve left out", own), ("AIConfigurator", other)):
            middle, high = np.median(errors), np.quantile(errors, 0.9)
            print(TABLE.format(f"{name}: {tool}", len(errors), f"{middle:.1%}", f"{high:.1%}", ""))


GROUPS: dict[str, Callable[[Measured], str]] = {
    "curve": lambda row: row.curve,
    "(model, device)": lambda row: row.pair,
    "model": lambda row: row.case.model,
    "device": lambda row: row.case.device,
}


def print_curves(rows: Sequence[Measured], kind: str, arguments: argparse.Namespace) -> None:
    """Left-out curves, alone and from one of their own points, and beside AIConfigurator."""
    covariance: Covariance = "searched" if arguments.nested else "shipped"
    curves: list[Outcome] = []
    measured: list[Outcome] = []
    for fit, places in refits(rows, kind, GROUPS["curve"], arguments.folds, covariance):
        out = [rows[place] for place in places]
        curves += [outcome(row, fit) for row in out]
        measured += calibrated_outcomes(out, fit) if kind == "closed_loop" else []
    print_outcomes("curve", curves, groups=True)
    if kind == "closed_loop":
        print_outcomes("curve, but one point of it", measured, groups=False)
        if arguments.aic:
            print_beside_aic(curves, arguments.aic, arguments.aic_rows)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--aic", type=Path, help="python of an environment with aiconfigurator")
    parser.add_argument("--aic-rows", type=int, default=200)
    parser.add_argument("--folds", type=int, default=FOLDS, help="of curves")
    parser.add_argument("--nested", action="store_true", help="search the covariance per fold")
    parser.add_argument("--left-out", choices=GROUPS, action="append", help="default: each in turn")
    parser.add_argument("--only", choices=("closed_loop", "capacity", "mlperf"))
    arguments = parser.parse_args()
    print(TABLE.format("left out", "rows", "median", "p90", "in band"))
    for kind, read in (("closed_loop", closed_loop_rows), ("capacity", capacity_rows)):
        if arguments.only not in {None, kind}:
            continue
        rows = read(arguments.folder)
        print(f"-- {'TPOT in closed loop' if kind == 'closed_loop' else 'offline capacity'}")
        for name in arguments.left_out or GROUPS:
            if name == "curve":
                print_curves(rows, kind, arguments)
            else:
                print_outcomes(name, left_out(rows, kind, GROUPS[name]), groups=False)
    if arguments.only in {None, "mlperf"}:
        print_mlperf(arguments.folder)


if __name__ == "__main__":
    main()
