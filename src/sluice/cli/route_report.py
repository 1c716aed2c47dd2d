"""What ``sluice route`` found, as a JSON document, as a table, and as two plots.

Called by ``route.py``; computes nothing of its own.
"""

from collections.abc import Mapping
from pathlib import Path

import click

from sluice.cli.plots import Axes, lines
from sluice.complexity.classifier import Card
from sluice.complexity.evaluation import Evaluation
from sluice.complexity.measures import Estimate, Quality

CURVES, CALIBRATION = "cost-quality.svg", "calibration.svg"


def document(found: Evaluation) -> dict[str, object]:
    """Everything, for programs. CPT in percent of calls."""
    review, grouping = found.review, found.grouping
    return {
        **_quality(found.quality),
        "baselines": {name: _quality(each) for name, each in found.baselines.items()},
        "lead_over_length": _estimate(found.lead),
        "rows": review.rows,
        "questions": found.questions,
        "accuracy": {"weak": found.weak, "strong": found.strong},
        "calibration": {
            "brier": found.calibration.brier,
            "error": found.calibration.error,
            "bins": [
                {"rows": one.rows, "predicted": one.predicted, "observed": one.observed}
                for one in found.calibration.bins
            ],
        },
        "curves": {name: list(points) for name, points in found.curves.items()},
        "leakage": {
            "same_question": grouping.by_question,
            "same_passage": grouping.by_passage,
            "trained_on": found.seen,
        },
        "repeated": review.repeated,
        "contradicting": review.contradicting,
        "no_text": review.no_text,
        "warnings": warnings(found),
    }


def warnings(found: Evaluation) -> list[str]:
    """What a reader of the figures must know."""
    review, told = found.review, []
    if found.seen:
        told.append(
            f"{found.seen} of {review.rows} rows are among those that the model was trained on: "
            f"the figures are too good"
        )
    if found.lead.low <= 0.0:
        told.append(
            f"not shown to be better than prompt length: APGR {found.lead.value:+.3f} "
            f"[{found.lead.low:+.3f}, {found.lead.high:+.3f}]"
        )
    if review.contradicting:
        told.append(
            f"{review.contradicting} rows have other outcomes than an earlier row of their question"
        )
    if review.no_text:
        told.append(f"{review.no_text} prompts are mostly control characters")
    return told


def print_evaluation(found: Evaluation) -> None:
    """A table for people, and warnings on standard error."""
    grouping = found.grouping
    click.echo(
        f"{found.review.rows} rows of {found.questions} questions; right: weak model "
        f"{found.weak:.1%}, strong model {found.strong:.1%}"
    )
    together = grouping.by_question + grouping.by_passage
    if together:
        click.echo(
            f"kept in one fold: {grouping.by_question} rows that repeat a question, "
            f"{grouping.by_passage} that share a passage"
        )
    click.echo(f"{'':12}{'APGR':>21}{'CPT(50) %':>19}{'CPT(80) %':>19}")
    for name, each in {"classifier": found.quality, **found.baselines}.items():
        click.echo(
            f"{name:12}{_shown(each.apgr, 3):>21}{_shown(each.cpt50, 0):>19}"
            f"{_shown(each.cpt80, 0):>19}"
        )
    click.echo(
        f"over length {_shown(found.lead, 3):>21}   calibration error "
        f"{found.calibration.error:.3f}, Brier score {found.calibration.brier:.3f}"
    )
    for words in warnings(found):
        click.echo(f"warning: {words}", err=True)


def print_card(card: Card) -> None:
    """A model's card."""
    click.echo(f"model {card.name}")
    for name in card.trained_on:
        click.echo(f"  trained on {name}")
    click.echo(f"  {card.rows} rows of {card.questions} questions, {card.rescued:.1%} rescued")
    for words, each in (("APGR", card.apgr), ("APGR of length", card.length_apgr)):
        if each is not None:
            click.echo(f"  {words} {_shown(Estimate(*each), 3)} by cross-validation")
    for share in (10, 30, 50):
        if card.thresholds:
            click.echo(f"  threshold for {share} % strong calls: {card.thresholds[share - 1]:.4f}")
    for note in card.notes:
        click.echo(f"  {note}")


def write_plots(found: Evaluation, folder: Path) -> None:
    """Cost against quality, and probability against what came of it. Raises ``OSError``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CURVES).write_text(_curves(found.curves), encoding="utf-8")
    (folder / CALIBRATION).write_text(_calibration(found), encoding="utf-8")


def _curves(curves: Mapping[str, object]) -> str:
    axes = Axes("Cost and quality", "sent to the strong model, %", "gap recovered, %")
    series = {}
    for name, points in curves.items():
        assert isinstance(points, list)  # noqa: S101 - made by the evaluation
        last = len(points) - 1
        series[name] = [(100 * at / last, 100 * value) for at, value in enumerate(points)]
    return lines(axes, series)


def _calibration(found: Evaluation) -> str:
    axes = Axes("Calibration", "predicted rescue, %", "observed rescue, %")
    bins = found.calibration.bins
    most = max((one.predicted for one in bins), default=1.0)
    return lines(
        axes,
        {
            "found": [(100 * one.predicted, 100 * one.observed) for one in bins],
            "perfect": [(0.0, 0.0), (100 * most, 100 * most)],
        },
    )


def _quality(quality: Quality) -> dict[str, object]:
    return {
        "apgr": _estimate(quality.apgr),
        "cpt50": _estimate(quality.cpt50),
        "cpt80": _estimate(quality.cpt80),
    }


def _estimate(found: Estimate) -> dict[str, float]:
    return {"value": found.value, "low": found.low, "high": found.high}


def _shown(found: Estimate, digits: int) -> str:
    return f"{found.value:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"
