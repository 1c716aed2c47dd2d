"""Plans as files: what was sent when can be looked at, and sent again.

A line of JSON about the trial and one for each request, gzipped where the name ends with ``.gz``.
"""

import gzip
import zlib
from pathlib import Path
from typing import Any

import msgspec

from sluice.loadtest.trial import CannotMeasure, ClosedLoop, OpenLoop, Span, TrialPlan
from sluice.workload.asks import Ask, Part

_FORM = "sluice-plan-1"


class _Head(msgspec.Struct):
    form: str
    span: dict[str, float]
    seed: int
    salt: str
    rate_rps: float | None = None
    concurrency: int | None = None


def write_plan(path: Path, plan: TrialPlan) -> None:
    """Save a plan. Raises ``CannotMeasure``."""
    head = _Head(
        _FORM,
        msgspec.to_builtins(plan.span),
        plan.seed,
        plan.salt,
        plan.load.rate_rps if isinstance(plan.load, OpenLoop) else None,
        plan.load.concurrency if isinstance(plan.load, ClosedLoop) else None,
    )
    lines = [msgspec.json.encode(head), *(msgspec.json.encode(_short(ask)) for ask in plan.asks)]
    raw = b"\n".join((*lines, b""))
    try:
        path.write_bytes(gzip.compress(raw, 6) if path.suffix == ".gz" else raw)
    except OSError as error:
        raise CannotMeasure(f"cannot write the plan {path}: {error.strerror}") from None


def read_plan(path: Path) -> TrialPlan:
    """A plan as it was saved. Raises ``CannotMeasure``."""
    try:
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        first, *lines = raw.splitlines()
        head = msgspec.json.decode(first, type=_Head)
        asks = tuple(msgspec.json.decode(line, type=Ask) for line in lines)
        span = Span(**head.span)
    except OSError as error:
        raise CannotMeasure(f"cannot read the plan {path}: {error.strerror or error}") from None
    except (ValueError, TypeError, EOFError, zlib.error, RecursionError) as error:
        raise CannotMeasure(f"{path} is no plan that sluice bench wrote: {error}") from None
    if head.form != _FORM or not asks or not all(ask.prompt for ask in asks):
        raise CannotMeasure(f"{path} is no plan that sluice bench wrote")
    load = OpenLoop(head.rate_rps) if head.rate_rps is not None else None
    closed = ClosedLoop(head.concurrency or 1)
    return TrialPlan(load or closed, span, asks, head.seed, head.salt)


def _short(ask: Ask) -> dict[str, Any]:
    """The members that are not as they are by default."""
    whole = msgspec.to_builtins(ask)
    plain = msgspec.to_builtins(Ask(0, 0, (Part(0, 0),), 0))
    needed = ("number", "at_ns", "prompt", "output_tokens")
    return {name: value for name, value in whole.items() if name in needed or value != plain[name]}
