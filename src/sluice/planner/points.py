"""The user's own measurements: from words, a result of a load test, or a journal; and their use.

One point is the requests in one replica and the time of a step, which is the time between tokens.
A point overrides published figures; ``predict.py`` says how. Called for ``sluice plan
--calibrate``. Points of another deployment cannot be told from points of this one: the caller says
which it was.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import floor, isfinite, log, log2
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from sluice.config.units import parse_duration_s
from sluice.planner.estimate import Load, moment, places
from sluice.planner.measured import StepLoads
from sluice.planner.names import CannotPlan, chosen, shown_s
from sluice.planner.predict import Point, StepModel
from sluice.planner.steady import Lengths
from sluice.telemetry.journal import JournalReader
from sluice.telemetry.records import RequestEnded

_KEYS = ("rate", "concurrency", "tpot", "ttft")
_FORM = 'write it as "rate=2.1,tpot=31ms" or "concurrency=64,tpot=31ms,ttft=400ms", or give a file'
# A group of steps with about the same number of rows says something from so many on.
STEPS_MIN = 30
# What a lone prefill may take of what was predicted, at most and at least.
FIRST_TOKEN_FACTOR_MAX = 8.0


def points_of(text: str, lengths: Lengths) -> list[Point]:
    """The points that ``text`` gives or that the file or journal folder at this path holds.

    ``rate`` is that of one replica. Raises ``CannotPlan`` where it gives none, with the form.
    """
    path = Path(text)
    if "=" in text and not path.exists():
        return [_point_in_words(text, lengths)]
    if path.is_dir():
        return _points_of_journal(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CannotPlan(f"cannot read the calibration {text}: {error.strerror}; {_FORM}") from None
    except (ValueError, RecursionError) as error:
        raise CannotPlan(f"the calibration {text} is not JSON: {error}; {_FORM}") from None
    return _points_of_bench(document, lengths, text)


def calibrated(model: StepModel, load: Load, points: Sequence[Point]) -> StepModel:
    """The model through these points, with the time to the first token where they have it.

    Raises ``CannotPlan`` for a point with more requests than a replica holds.
    """
    for point in points:
        held, _ = places(model, replace(load, lengths=point.lengths or load.lengths))
        if point.concurrency > held:
            raise CannotPlan(
                f"the calibration has {point.concurrency:,.0f} requests in a replica, and "
                f"{held:,.0f} fit into it: give the rate of one replica and its --batch, or "
                f"correct --tp, --precision and the lengths"
            )
    found = model.calibrated(load.lengths, points)
    assert found.calibration is not None  # noqa: S101 - made in the line above
    factors = [
        _first_token_factor(found, load, point, point.ttft_s)
        for point in points
        if point.ttft_s is not None
    ]
    factor = fmean(factors) if factors else 1.0
    return replace(found, calibration=replace(found.calibration, first_token_factor=factor))


def _first_token_factor(model: StepModel, load: Load, point: Point, ttft_s: float) -> float:
    """How many times longer than predicted the own prefill takes: the waits are as predicted."""
    asked = replace(load, lengths=point.lengths or load.lengths)
    assert model.calibration is not None  # noqa: S101 - called for a calibrated model
    twice = replace(model, calibration=replace(model.calibration, first_token_factor=2.0))
    once_s, twice_s = (
        moment(each, asked, point.concurrency, 0.5, 1.0).ttft_s for each in (model, twice)
    )
    own_s = twice_s - once_s
    factor = (ttft_s - (once_s - own_s)) / own_s
    return min(max(factor, 1.0 / FIRST_TOKEN_FACTOR_MAX), FIRST_TOKEN_FACTOR_MAX)


def _point_in_words(text: str, lengths: Lengths) -> Point:
    values: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        key = chosen("part of --calibrate", name, _KEYS)
        if not equals or key in values:
            raise CannotPlan(f"--calibrate {text!r} has {key} {'twice' if equals else 'without ='}")
        try:
            values[key] = parse_duration_s(value) if key in {"tpot", "ttft"} else float(value)
        except ValueError as error:
            raise CannotPlan(f"--calibrate {key}: {error}") from None
    if ("rate" in values) == ("concurrency" in values) or "tpot" not in values:
        raise CannotPlan(
            f"--calibrate {text!r} needs tpot and one of rate and concurrency; {_FORM}"
        )
    return _checked(values, lengths, f"your calibration ({text})")


def _checked(values: Mapping[str, float], lengths: Lengths, source: str) -> Point:
    """The point of these positive numbers; requests in decode by Little's law where the rate is
    given."""
    for key, value in values.items():
        if not (isfinite(value) and value > 0):
            raise CannotPlan(f"{key} of {source} must be above 0, not {value:g}")
    step_s = values["tpot"]
    concurrency = values.get("concurrency", values.get("rate", 0.0) * lengths.output * step_s)
    return Point(max(concurrency, 1.0), step_s, values.get("ttft"), lengths, source)


def _points_of_bench(document: Any, lengths: Lengths, path: str) -> list[Point]:
    """Results of ``sluice bench`` at one rate, or each trial of a search, of one replica."""
    trials = document.get("trials") if isinstance(document, dict) else None
    found = []
    for result in trials or [document]:
        try:
            values = {
                "rate": float(result["completed_rps"]),
                "tpot": float(result["tpot_s"]["p50"]),
                "ttft": float(result["ttft_s"]["p50"]),
            }
        except (KeyError, TypeError, ValueError):
            continue
        found.append(_checked(values, lengths, f"your load test ({path})"))
    if not found:
        raise CannotPlan(
            f"{path} has no completed_rps, tpot_s.p50 and ttft_s.p50, as sluice bench writes "
            f"them; {_FORM}"
        )
    return found


def _points_of_journal(folder: Path) -> list[Point]:
    """Steps with about the same number of rows, each doubling a point.

    A step's time is seen by each of its rows, so steps count by their rows; what passes between
    two steps of a busy replica is part of it.
    """
    loads, ended = StepLoads(), []
    for entry in JournalReader(folder).entries():
        loads.take(entry.record)
        if isinstance(entry.record, RequestEnded) and entry.record.completion_tokens > 1:
            ended.append(entry.record)
    groups: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for replica in loads.replicas.values():
        for _, load, wall_ns in replica.samples:
            if load.decode_rows:
                groups[floor(log2(load.decode_rows))].append((load.decode_rows, wall_ns))
    groups = {key: steps for key, steps in groups.items() if len(steps) >= STEPS_MIN}
    if not groups or not ended:
        raise CannotPlan(
            f"the journal {folder} has no {STEPS_MIN} steps with about the same number of "
            f"requests, of requests that ended; {_FORM}"
        )
    prompt = fmean(record.prompt_tokens for record in ended)
    cached = fmean(record.cached_tokens for record in ended) / max(prompt, 1.0)
    output = fmean(record.completion_tokens for record in ended)
    variation = pstdev(record.completion_tokens for record in ended) / output
    lengths = Lengths(max(prompt, 1.0), output, min(cached, 0.99), variation)
    source = f"your journal ({folder}, {sum(map(len, groups.values())):,} steps)"
    found = []
    for steps in groups.values():
        rows = sum(rows for rows, _ in steps)
        concurrency = sum(each * each for each, _ in steps) / rows
        step_s = sum(each * ns for each, ns in steps) / rows / 1e9
        found.append(Point(concurrency, step_s, None, lengths, source))
    return sorted(found, key=lambda point: point.concurrency)


def surprises(model: StepModel, load: Load, points: Sequence[Point], times: float) -> list[str]:
    """Points that are ``times`` above or below what was expected without them, in words."""
    plain = replace(model, calibration=None)
    found = []
    for point in points:
        lengths = point.lengths or load.lengths
        expected = plain.step(lengths, point.concurrency).estimate
        if abs(log(point.step_s / expected)) > log(times):
            found.append(
                f"{point.source}: {shown_s(point.step_s)} per token with "
                f"{point.concurrency:.3g} requests in a replica, where {shown_s(expected)} was "
                f"expected; check its units and the deployment"
            )
    return found
