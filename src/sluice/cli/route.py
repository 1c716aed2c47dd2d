"""``sluice route``: train and judge the classifier that tells simple prompts from complex ones.

``train``, ``eval``, ``score`` and ``threshold``: each parses, makes one call and prints.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np

from sluice.cli.options import BadInput, json_option, print_json
from sluice.cli.route_report import document, print_card, print_evaluation, write_plots
from sluice.cli.stages import Stages
from sluice.complexity.classifier import Card, Classifier
from sluice.complexity.evaluation import (
    CrossValidation,
    Evaluation,
    cross_validated,
    judged,
    scored,
)
from sluice.complexity.feedback import completed, read_feedback
from sluice.complexity.folds import seen_in
from sluice.complexity.measures import apgr_of, recovered, share_at, share_for, threshold_for
from sluice.complexity.model_file import (
    DEFAULT_NAME,
    BadModelFile,
    default_model,
    read_model,
    write_model,
)
from sluice.complexity.outcomes import BadOutcomes, Outcome, read_outcomes
from sluice.complexity.training import trained
from sluice.telemetry.journal import JournalReader
from sluice.telemetry.records import RequestRouted

# Older scores of a journal are of another traffic, perhaps.
_SCORES_MAX = 100_000

_EPILOG = """\b
Examples:
  sluice route eval outcomes.csv
  sluice route train outcomes.csv --out mine.route
  sluice route train outcomes.csv --feedback told.jsonl --out mine.route
  sluice route threshold outcomes.csv --model mine.route --share 30
  sluice route score "What is the capital of France?" --model mine.route

\b
DATA is CSV with the columns prompt, weak_ok, strong_ok, or one JSON object a line with prompt, weak
and strong, or with prompt and scores by model, of which --pair names two. Plain or gzipped.

\b
Exit codes: 0 done, 2 bad input.
"""


_pair_option = click.option(
    "--pair",
    "pairs",
    metavar="WEAK:STRONG",
    multiple=True,
    help="The two models of a file with scores: one for all files, or one for each in order, "
    "where - stands for a file that has one pair only.",
)
_model_option = click.option(
    "--model",
    metavar="FILE",
    default=None,
    help="A file that sluice route train wrote, or: default, the one that comes with sluice.",
)


@click.group(epilog=_EPILOG)
def command() -> None:
    """Train and judge the classifier that routes simple prompts to a small model."""


@command.command(
    epilog="\b\nExample:\n  sluice route train outcomes.csv --out mine.route --note 'support desk'",
    short_help="Train a classifier on outcomes of two models.",
)
@click.argument("files", metavar="[DATA]...", nargs=-1, type=click.Path(path_type=Path))
@_pair_option
@click.option(
    "--feedback",
    "told",
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Outcomes that a server was told, by the file of routes.NAME.outcomes.",
)
@click.option(
    "--out",
    required=True,
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File for the classifier, as --model and routes.NAME.classifier take it.",
)
@click.option("--name", help="Name on the card. Default: that of the file.")
@click.option("--note", "notes", multiple=True, help="A line for the card.")
@json_option
def train(*, as_json: bool, **asked: Any) -> None:
    """Train a classifier on outcomes of two models, and judge it by cross-validation.

    Rows of several files are learned together. Of feedback that tells of one model only, what the
    other would have done is taken from the mean of rows in which both are known; it is learned from
    and not judged on. The file holds weights and hashes, no text.
    """
    if not asked["files"] and not asked["told"]:
        raise click.UsageError("give DATA, --feedback or both")
    outcomes, further = _with_feedback(_outcomes(asked["files"], asked["pairs"]), asked["told"])
    found = _cross_validated(outcomes, further)
    quality, length = found.evaluation.quality.apgr, found.evaluation.baselines["length"].apgr
    card = Card(
        name=asked["name"] or asked["out"].stem,
        trained_on=(
            *(_source(file, pair) for file, pair in _paired(asked)),
            *(f"feedback {file.name}" for file in asked["told"]),
        ),
        rows=len(outcomes) + len(further),
        questions=found.evaluation.questions,
        rescued=float(np.mean([one.rescue for one in outcomes])),
        apgr=(quality.value, quality.low, quality.high),
        length_apgr=(length.value, length.low, length.high),
        notes=asked["notes"],
    )
    try:
        bytes_written = write_model(trained(found.rows, found.held_out, card), asked["out"])
    except OSError as error:
        raise BadInput(f"cannot write {asked['out']}: {error.strerror}") from None
    if as_json:
        print_json({"bytes": bytes_written, "card": asdict(card), **document(found.evaluation)})
        return
    print_evaluation(found.evaluation)
    click.echo(f"wrote {asked['out']}, {bytes_written:,} bytes")


@command.command(
    name="eval",
    epilog="\b\nExample:\n  sluice route eval outcomes.csv --plots plots --json",
    short_help="Judge training, or a trained classifier.",
)
@click.argument(
    "files", metavar="DATA...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@_pair_option
@click.option(
    "--also",
    "also",
    metavar="FILE[@WEAK:STRONG]",
    multiple=True,
    help="Outcomes to train on as well, for cross-validation; never of a question being judged.",
)
@_model_option
@click.option(
    "--plots",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for cost-quality.svg and calibration.svg.",
)
@json_option
def evaluate(*, as_json: bool, **asked: Any) -> None:
    """Judge training on DATA by cross-validation, or with --model a trained classifier.

    Questions are never split over folds. Random order, prompt length and the nearest known prompts
    are judged beside it; intervals are 95 %, by bootstrap over questions.
    """
    outcomes = _outcomes(asked["files"], asked["pairs"])
    found: Evaluation
    if asked["model"] is None:
        further = [one for text in asked["also"] for one in _further(text)]
        found = _cross_validated(outcomes, further).evaluation
    elif asked["also"]:
        raise click.UsageError("--also is for training; a model of --model is trained already")
    else:
        found = _judged(outcomes, _model(asked["model"]))
    if asked["plots"] is not None:
        try:
            write_plots(found, asked["plots"])
        except OSError as error:
            raise BadInput(f"cannot write to {asked['plots']}: {error.strerror}") from None
    if as_json:
        print_json(document(found))
    else:
        print_evaluation(found)


@command.command(
    epilog="\b\nExample:\n  sluice route score 'Prove that there is no largest prime.'",
    short_help="Score a prompt, or show a classifier's card.",
)
@click.argument("text", required=False)
@_model_option
@click.option("--card", "with_card", is_flag=True, help="Show the model's card instead.")
@json_option
def score(*, text: str | None, model: str | None, with_card: bool, as_json: bool) -> None:
    """The probability that the strong model rescues the answer to TEXT, or to standard input.

    It is calibrated on the outcomes that the model was trained on; on other traffic it is an order.
    """
    classifier = _model(model or DEFAULT_NAME)
    if with_card:
        if as_json:
            print_json(asdict(classifier.card))
        else:
            print_card(classifier.card)
        return
    # Any bytes have a score in serving, and have it here.
    prompt = sys.stdin.buffer.read().decode("utf-8", "replace") if text is None else text
    found = classifier.score(prompt)
    if as_json:
        print_json({"probability": found, "model": classifier.card.name})
    else:
        click.echo(f"{found:.4f}")


@command.command(
    epilog="\b\nExamples:\n  sluice route threshold outcomes.csv --share 30\n"
    "  sluice route threshold outcomes.csv --recover 80\n"
    "  sluice route threshold --scores scores.txt --share 30\n"
    "  sluice route threshold --journal ~/.local/state/sluice/journal --route auto --share 30",
    short_help="Find the threshold for a budget or a quality.",
)
@click.argument("files", metavar="[DATA]...", nargs=-1, type=click.Path(path_type=Path))
@_pair_option
@click.option(
    "--scores",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Recorded scores of traffic, one a line, in place of DATA.",
)
@click.option(
    "--journal",
    type=click.Path(path_type=Path, file_okay=False),
    help="Journal of a server, whose latest scores are taken; with --route.",
)
@click.option("--route", "route_name", metavar="NAME", help="The route whose scores are taken.")
@click.option("--share", type=float, metavar="PERCENT", help="Calls for the strong model.")
@click.option("--recover", type=float, metavar="PERCENT", help="Of the strong model's gain.")
@_model_option
@json_option
def threshold(*, as_json: bool, **asked: Any) -> None:
    """The threshold for a budget (--share) or for a quality (--recover).

    A prompt whose score is at or above the threshold goes to the strong model. The number is a cut
    through the scores of the prompts given: it is not a probability to choose by taste, and not a
    share. Other traffic has other scores, and the same threshold sends another share of it: find it
    again on recorded scores of your own.
    """
    if (asked["share"] is None) == (asked["recover"] is None):
        raise click.UsageError("give one of --share and --recover")
    wanted = asked["share"] if asked["recover"] is None else asked["recover"]
    if not 0.0 < wanted <= 100.0:
        raise click.UsageError(f"a percentage above 0 and up to 100 is wanted, not {wanted:g}")
    sources = [bool(asked["files"]), asked["scores"] is not None, asked["journal"] is not None]
    if sum(sources) != 1:
        raise click.UsageError("give one of DATA, --scores and --journal")
    if (asked["journal"] is None) != (asked["route_name"] is None):
        raise click.UsageError("--journal and --route go together")
    if not asked["files"]:
        if asked["recover"] is not None:
            raise click.UsageError("--recover needs DATA: scores alone do not tell who was right")
        scores = (
            _routed_scores(asked["journal"], asked["route_name"])
            if asked["scores"] is None
            else _recorded(asked["scores"])
        )
        found = _threshold_of_scores(scores, wanted / 100)
    else:
        outcomes = _outcomes(asked["files"], asked["pairs"])
        found = _threshold_of_outcomes(outcomes, asked)
    if as_json:
        print_json(found)
        return
    for name, value in found.items():
        click.echo(f"{name:20}{value:.6g}")


def _threshold_of_scores(scores: Sequence[float], share: float) -> dict[str, float]:
    numbers = np.array(scores)
    cut = threshold_for(numbers, share)
    return {"threshold": cut, "share_percent": 100 * share_at(numbers, cut), "prompts": len(scores)}


def _threshold_of_outcomes(
    outcomes: Sequence[Outcome], asked: Mapping[str, Any]
) -> dict[str, float]:
    classifier = _model(asked["model"] or DEFAULT_NAME)
    with Stages() as stages:
        scores = scored([one.prompt for one in outcomes], classifier, stages.at)
    gains = np.array([one.gain for one in outcomes])
    if gains.sum() <= 0.0:
        raise BadInput("the strong model is not better than the weak one on these rows")
    if asked["recover"] is None:
        share = asked["share"] / 100
    else:
        share = share_for(scores, gains, asked["recover"] / 100)
    found = _threshold_of_scores(scores.tolist(), share)
    at = np.interp(share_at(scores, found["threshold"]), *recovered(scores, gains))
    seen = int(seen_in(outcomes, classifier.trained_on).sum())
    if seen:
        click.echo(
            f"warning: {seen} of {len(outcomes)} prompts are among those that the model was "
            f"trained on; its scores of other prompts lie closer together",
            err=True,
        )
    return {**found, "recovered_percent": 100 * float(at), "apgr": apgr_of(scores, gains)}


def _routed_scores(journal: Path, route: str) -> list[float]:
    """The latest scores that a server recorded for a route."""
    if not journal.is_dir():
        raise BadInput(f"there is no journal at {journal}")
    records = (one.record for one in JournalReader(journal).entries(containing="RequestRouted"))
    scores = [
        one.score
        for one in records
        if isinstance(one, RequestRouted) and one.route == route and one.score is not None
    ]
    if not scores:
        raise BadInput(f"{journal} has no scores of a route {route}")
    return scores[-_SCORES_MAX:]


def _recorded(path: Path) -> list[float]:
    try:
        lines = path.read_text(encoding="utf-8").split()
        scores = [float(line) for line in lines]
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise BadInput(f"{path}: not one number a line: {error}") from None
    if not scores or not np.isfinite(scores).all():
        raise BadInput(f"{path} has no scores, or some that are not finite")
    return scores


def _cross_validated(outcomes: Sequence[Outcome], further: Sequence[Outcome]) -> CrossValidation:
    try:
        with Stages() as stages:
            return cross_validated(outcomes, further, stages.at)
    except BadOutcomes as error:
        raise BadInput(str(error)) from None


def _judged(outcomes: Sequence[Outcome], classifier: Classifier) -> Evaluation:
    try:
        with Stages() as stages:
            return judged(outcomes, classifier, stages.at)
    except BadOutcomes as error:
        raise BadInput(str(error)) from None


def _outcomes(files: Sequence[Path], pairs: Sequence[str]) -> list[Outcome]:
    found: list[Outcome] = []
    try:
        for file, pair in _paired({"files": files, "pairs": pairs}):
            found += read_outcomes(file, pair)
    except BadOutcomes as error:
        raise BadInput(str(error)) from None
    return found


def _with_feedback(
    outcomes: list[Outcome], told: Sequence[Path]
) -> tuple[list[Outcome], list[Outcome]]:
    """Rows in which both outcomes are known, and rows of which one is expected."""
    try:
        read = [read_feedback(file) for file in told]
        for file, each in zip(told, read, strict=True):
            if each.torn:
                click.echo(f"warning: {file}: {each.torn} torn lines were left out", err=True)
        known = [*outcomes, *(one for each in read for one in each.whole)]
        return known, [row for each in read for row in completed(each.halves, known)]
    except BadOutcomes as error:
        raise BadInput(str(error)) from None


def _paired(asked: Mapping[str, Any]) -> list[tuple[Path, tuple[str, str] | None]]:
    """Each file with the pair that is asked for of it."""
    files, pairs = asked["files"], [_pair(text) for text in asked["pairs"]]
    if len(pairs) <= 1:
        return [(file, pairs[0] if pairs else None) for file in files]
    if len(pairs) != len(files):
        raise click.UsageError(
            f"{len(pairs)} times --pair for {len(files)} files: one, or one each"
        )
    return list(zip(files, pairs, strict=True))


def _pair(text: str) -> tuple[str, str] | None:
    """``-`` is for a file, among others, that has only one pair."""
    if text == "-":
        return None
    weak, colon, strong = text.partition(":")
    if not colon or not weak or not strong or weak == strong:
        raise click.UsageError(f"--pair is WEAK:STRONG, two different models, not {text!r}")
    return weak, strong


def _further(text: str) -> list[Outcome]:
    path, _, pair = text.partition("@")
    return _outcomes([Path(path)], [pair] if pair else [])


def _source(file: Path, pair: tuple[str, str] | None) -> str:
    return file.name if pair is None else f"{file.name}, {pair[0]} and {pair[1]}"


def _model(name: str) -> Classifier:
    try:
        return default_model() if name == DEFAULT_NAME else read_model(Path(name))
    except BadModelFile as error:
        raise BadInput(str(error)) from None
