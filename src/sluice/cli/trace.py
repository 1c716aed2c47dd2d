"""``sluice trace``: one request's life, phase by phase.

Printing only: what is known about a request is put together in ``telemetry/life``.
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sluice.cli.console import plain_console
from sluice.cli.options import BadInput, json_option, print_json, settings_options
from sluice.config.load import load_settings
from sluice.config.sources import Override
from sluice.telemetry.journal import JournalLimits, JournalReader
from sluice.telemetry.life import Decision, Life, StepShare, find_life, nearest_ids
from sluice.telemetry.records import Retrieved

_LAG_S = JournalLimits().flush_s
_BAR_WIDTH = 40
# What stands before a bar: the longest phase, two times, a share, and the gaps between them.
_BAR_BESIDE = 42
_PIPE_WIDTH = 160
_STYLES = {
    "retrieval": "magenta",
    "admission": "cyan",
    "queue": "yellow",
    "prefill": "blue",
    "decode": "green",
    "preempted": "red",
}

_OUTCOMES = {
    "met": "inside the targets of its class",
    "missed": "missed a target of its class",
    "refused": "refused",
    "left": "its client left",
}

# A request without a class has no targets to be inside of.
_OF_CLASSES = ("met", "missed")

_STEPS_CAPTION = (
    "rows and prompt: tokens of other requests computed in the same steps; time: the median step; "
    "planned: its predicted time; free: KV blocks afterwards"
)

_EXAMPLES = """\b
Examples:
  sluice trace chatcmpl-4f0c2a
  sluice trace chatcmpl-4f0c2a --journal /var/lib/sluice/journal --json
"""


@click.command(epilog=_EXAMPLES)
@click.argument("request_id", metavar="ID")
@click.option(
    "--journal",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the journal. Default: the one in the settings.",
)
@settings_options
@json_option
def command(
    request_id: str,
    folder: Path | None,
    config: Path | None,
    overrides: Sequence[Override],
    as_json: bool,
) -> None:
    """Show the life of the request ID (the answer's x-request-id header) phase by phase: what was
    decided and why, what was computed beside it, and how it ended."""
    if folder is None:
        folder = load_settings(config, overrides, secrets=False).settings.journal.dir
    if not folder.is_dir():
        raise BadInput(f"there is no journal folder {folder}")
    reader = JournalReader(folder)
    life = find_life(reader, request_id)
    for problem in reader.problems:
        click.echo(f"sluice: {problem}", err=True)
    if life is None:
        raise click.ClickException(_unknown(folder, request_id))
    if as_json:
        print_json(document(life))
    else:
        show(life, plain_console(width=None if sys.stdout.isatty() else _PIPE_WIDTH))


def document(life: Life) -> dict[str, Any]:
    """A life as plain values for JSON."""
    made: dict[str, Any] = msgspec.to_builtins(asdict(life))
    return made


def _unknown(folder: Path, request_id: str) -> str:
    near, latest = nearest_ids(JournalReader(folder), request_id)
    lag = f"it can lag behind by {_LAG_S:g} s"
    words = f"the journal in {folder} has no request '{request_id}' ({lag})."
    if near:
        return f"{words} Ids like it: {', '.join(near)}."
    if latest:
        return f"{words} The latest are: {', '.join(latest)}."
    return f"{words} It has no requests at all; is this the folder that the server writes to?"


# ---------------------------------------------------------------------------------- for people


def show(life: Life, console: Console) -> None:
    """Print a life as a waterfall with the facts behind it."""
    arrived = datetime.fromtimestamp(life.arrived_wall_ns / 1e9, tz=UTC)
    names = f"{life.client_id} ({life.id})" if life.client_id else life.id
    console.print(Text(f"{names}  {life.model}".rstrip(), style="bold"))
    asked = "refused before it became a call" if life.early else _asked(life)
    console.print(Text(f"arrived {arrived.isoformat(timespec='milliseconds')}; {asked}"))
    if life.earlier:
        console.print(Text(f"{life.earlier} earlier requests with this id are in the journal"))
    if life.retrieval is not None:
        console.print(Text(_retrieved(life.retrieval)))
    for decision in life.decisions:
        console.print(Text(_decided(decision)))
    if life.phases:
        console.print(_waterfall(life, min(_BAR_WIDTH, console.width - _BAR_BESIDE)))
    if life.steps:
        console.print(_steps(life.steps))
        console.print(Text(_STEPS_CAPTION))
    if not life.early:
        console.print(Text(_ended(life)))


def _asked(life: Life) -> str:
    parts = [f"{life.prompt_tokens:,} prompt tokens, at most {life.output_tokens_max:,} more"]
    if life.choices > 1:
        parts.append(f"{life.choices} choices")
    if life.tenant:
        parts.append(f"tenant {life.tenant}")
    if life.slo_class:
        parts.append(f"class {life.slo_class}")
    parts.append(f"tier {life.tier}")
    if life.overload:
        parts.append(f"ladder {' > '.join(life.overload)}")
    parts.append(f"read and tokenised in {_time(life.read_ns)}")
    return ", ".join(parts)


def _retrieved(made: Retrieved) -> str:
    budget = "" if made.budget_ns is None else f" of {_time(made.budget_ns)}"
    text = (
        f"{made.pipeline} retrieved {made.found:,} passages in {_time(made.duration_ns)}{budget}; "
        f"{len(made.sources):,} in the prompt, about {made.tokens:,} tokens"
    )
    if made.sources:
        text += f": {', '.join(made.sources)}"
    return f"{text}; {', '.join(made.rungs)}: {made.reason}" if made.rungs else text


def _decided(decision: Decision) -> str:
    at = f"+{_time(decision.at_ns)}"
    if decision.rung:
        return f"{at} {_degraded(decision)}"
    if decision.route:
        return f"{at} {_routed(decision)}"
    if decision.reason:
        retry = decision.retry_after_s
        again = "" if retry is None else f"; retry after {retry:.1f} s"
        numbers = _compared(decision)
        return f"{at} refused with {decision.status} {decision.reason}{numbers}{again}"
    if decision.error:
        return f"{at} attempt {decision.attempt} failed at {decision.replica}: {decision.error}"
    again = f" (attempt {decision.attempt})" if decision.attempt > 1 else ""
    text = f"{at} dispatched to {decision.replica}{again}"
    if decision.predicted_wait_ns is not None and decision.waited_ns is not None:
        predicted = _time(decision.predicted_wait_ns)
        text += f" after waiting {_time(decision.waited_ns)}, predicted {predicted}"
    scores = [
        f"{score.replica} {_number(score.score)} ({score.uncached_tokens:,} uncached tokens, "
        f"{score.places} places{'' if score.kv_fits else ', KV short'})"
        for score in decision.scores
    ]
    return f"{text}; scores, lowest wins: {', '.join(scores)}" if len(scores) > 1 else text


def _routed(decision: Decision) -> str:
    numbers = f"threshold {decision.threshold:.4f}"
    if decision.score is not None:
        numbers = f"score {decision.score:.4f}, {numbers}"
    return f"route {decision.route}: to {decision.model} ({decision.reason}; {numbers})"


def _degraded(decision: Decision) -> str:
    if decision.model:
        why = _compared(decision)
        return f"{decision.rung}: given to {decision.model}{why}"
    return f"{decision.rung}: at most {decision.output_tokens_max or 0:,} tokens"


def _compared(decision: Decision) -> str:
    """The numbers behind a decision, empty where it has none."""
    if not (decision.measured or decision.threshold):
        return ""
    unit = f" {decision.unit}" if decision.unit else ""
    return f": measured {_number(decision.measured)}, limit {_number(decision.threshold)}{unit}"


def _waterfall(life: Life, width: int) -> Table:
    """A row for each phase, with a bar of at most ``width`` characters over all of them."""
    table = Table(box=None, pad_edge=False)
    table.add_column("phase", no_wrap=True)
    for title in ("start", "time", "share"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    whole_ns = max(1, sum(span.duration_ns for span in life.phases))
    for span in life.phases:
        before = round(span.start_ns / whole_ns * width)
        until = round((span.start_ns + span.duration_ns) / whole_ns * width)
        share = f"{100 * span.duration_ns / whole_ns:.1f} %"
        thin = "" if share == "0.0 %" else "▏"
        bar = Text(" " * before + ("█" * (until - before) or thin), style=_STYLES[span.phase])
        table.add_row(span.phase, _time(span.start_ns), _time(span.duration_ns), share, bar)
    return table


def _steps(steps: Sequence[StepShare]) -> Table:
    """A row for each prefill chunk and each stretch of decode steps between them.

    Replicas are named where there were several. Fits into 80 columns where there was one.
    """
    several = len({share.replica for share in steps}) > 1
    table = Table(box=None, padding=(0, 1, 0, 0))
    if several:
        table.add_column("replica")
    table.add_column("computed")
    for title in ("at", "steps", "rows", "prompt", "time", "at most", "planned", "free"):
        table.add_column(title, justify="right", no_wrap=True)
    for stretch in _stretches(steps):
        cells = _stretch_row(stretch)
        named = (stretch[0].replica, *cells) if several else cells
        table.add_row(*(Text(cell) for cell in named))
    return table


def _stretches(steps: Sequence[StepShare]) -> list[list[StepShare]]:
    stretches: list[list[StepShare]] = []
    for share in steps:
        last = stretches[-1][-1] if stretches else None
        is_plain = not share.prefill_tokens and not share.error
        if (
            last is not None
            and is_plain
            and not last.prefill_tokens
            and not last.error
            and last.replica == share.replica
        ):
            stretches[-1].append(share)
        else:
            stretches.append([share])
    return stretches


def _stretch_row(stretch: Sequence[StepShare]) -> tuple[str, ...]:
    first, last = stretch[0], stretch[-1]
    beside_rows = [share.beside_decode_rows for share in stretch]
    beside_tokens = [share.beside_prefill_tokens for share in stretch]
    times = [share.measured_ns for share in stretch]
    if first.error:
        computed = f"failed: {first.error}"
    elif first.prefill_tokens:
        computed = f"prompt {first.past_tokens:,}–{first.past_tokens + first.prefill_tokens:,}"
    else:
        rows = sum(share.decode_rows for share in stretch)
        computed = f"{rows:,} tokens"
    return (
        computed,
        _time(first.at_ns),
        f"{len(stretch):,}",
        _range(beside_rows),
        _range(beside_tokens),
        _time(round(statistics.median(times))),
        _time(max(times)),
        _time(round(statistics.median(share.predicted_ns for share in stretch))),
        f"{last.blocks_free:,}",
    )


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def _number(value: float) -> str:
    """A measured number: whole ones in full, others to six digits."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.6g}"


def _ended(life: Life) -> str:
    first = "no token was sent"
    if life.ttft_ns is not None:
        first = f"first token after {_time(life.ttft_ns)}"
    ending = life.ending
    if ending is None:
        refused = any(decision.reason for decision in life.decisions)
        return (
            "refused"
            if refused
            else f"{first}; the journal has no ending: it still runs, was cut off, or ended less "
            f"than {_LAG_S:g} s ago, by which the journal can lag behind"
        )
    counts = f"{ending.prompt_tokens:,} prompt tokens ({ending.cached_tokens:,} cached)"
    parts = [
        first,
        f"ended with {ending.reason} after {_time(ending.at_ns)}",
        f"{counts}, {ending.completion_tokens:,} generated",
    ]
    if ending.outcome and (life.slo_class or ending.outcome not in _OF_CLASSES):
        parts.append(_OUTCOMES[ending.outcome])
    if ending.tpot_ns is not None:
        parts.append(f"{_time(ending.tpot_ns)} per token")
    if ending.preemptions:
        parts.append(f"preempted {ending.preemptions} times")
    if ending.attempts > 1:
        parts.append(f"{ending.attempts} attempts")
    if ending.error:
        parts.append(ending.error)
    return "; ".join(parts)


def _time(duration_ns: int) -> str:
    if abs(duration_ns) < 1_000_000:
        return f"{duration_ns / 1e3:.0f} µs"
    if abs(duration_ns) < 1_000_000_000:
        return f"{duration_ns / 1e6:.1f} ms"
    return f"{duration_ns / 1e9:.2f} s"
