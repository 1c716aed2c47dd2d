"""Names that stand for two models: their settings, and what of them cannot be.

Called by ``settings`` for the checks and by wiring. What a request for such a name becomes is
decided in ``core/model_routes.py``.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from sluice.config.sections import Bytes, Range, Seconds

Percent = Annotated[float, Range(low=0, high=100, low_excluded=True)]


@dataclass(frozen=True, slots=True)
class RouteSection:
    """A name that clients can ask for as a model, ``[routes.NAME]``, and that stands for two.

    A classifier reads the prompt and scores it; a score at or above the threshold goes to the
    complex model. Give one of ``share`` and ``threshold``.
    """

    simple: str
    """The model for simple prompts: the name of a ``[models.NAME]`` table."""

    complex: str
    """The model for complex prompts: another one."""

    share: Percent | None = None
    """Percentage of requests that the complex model may get by their score. The threshold follows
    from it, by what the classifier gave to prompts that it did not know, and later by the scores of
    the traffic itself."""

    follow: bool = True
    """Whether the threshold of a ``share`` is found anew from the scores of the latest thousand
    requests, after two hundred of them. Without it the threshold stays, and a warning says when the
    share has moved."""

    threshold: Annotated[float | None, Range(low=0, high=1)] = None
    """Score from which on a request goes to the complex model, as ``sluice route threshold`` finds
    it. It is neither a share nor a probability to choose by taste."""

    classifier: Path | None = None
    """File that ``sluice route train`` wrote. Unset: the one that comes with sluice. It is read
    again with the settings."""

    default: Literal["simple", "complex"] = "complex"
    """Which of the two answers where there is no score: the classifier failed, the text is unlike
    anything that it knows, or there is no text."""

    rules: tuple[Literal["tools", "images"], ...] = ("tools", "images")
    """What goes to the complex model whatever its score is. A prompt that only one of the models
    can hold goes to that one always."""

    sticky: Literal["upward", "both", "off"] = "upward"
    """What earlier turns of a conversation decide. ``upward``: once at the complex model it stays
    there. ``both``: it stays where it began, also at the simple one. ``off``: each turn by itself.
    A turn is known by the messages before it."""

    spill: Annotated[float, Range(low=0, high=1)] = 0.5
    """The largest part of the complex model's share that goes to the simple one under load, before
    anything is refused. 0 keeps the threshold where it is."""

    spill_wait_s: Seconds | None = None
    """Wait at the complex model at which all of ``spill`` is moved; less wait moves less. Unset:
    half of the ``ttft`` of that model's class, else one second."""

    shadow: bool = False
    """Whether the route only records: the default model answers all, and journal and metrics tell
    which one would have."""

    outcomes: Path | None = None
    """File to which ``POST /v1/feedback`` adds outcomes, for ``sluice route train``. They hold the
    part of each prompt that the classifier reads. Unset: outcomes are refused, and no prompt is
    kept."""

    outcomes_bytes_max: Bytes = 64 * 1024**2
    """Size of that file and the one before it, together. The oldest outcomes go first."""


def route_problems(
    name: str, route: RouteSection, models: Collection[str]
) -> Iterator[tuple[str, str]]:
    """What is wrong with a route, each with the setting to change."""
    known = ", ".join(sorted(models)) or "none"
    if name in models:
        yield "", f"{name} is the name of a model too; give the route another name"
    for setting, model in (("simple", route.simple), ("complex", route.complex)):
        if model not in models:
            yield setting, f'there is no model "{model}"; configured: {known}'
    if route.simple == route.complex:
        yield "complex", f'"{route.simple}" is the simple model already; name another one'
    if route.share is not None and route.threshold is not None:
        yield "threshold", "goes with no share: the threshold follows from that; leave one out"
    if route.share is None and route.threshold is None:
        yield (
            "share",
            "is missing: which percentage of requests may the complex model get, for example 30",
        )
    if len(set(route.rules)) < len(route.rules):
        yield "rules", "each rule may stand once"


def shared_files(routes: Mapping[str, RouteSection]) -> Iterator[tuple[str, str]]:
    """Routes that write their outcomes to the file of another one, with that one's name."""
    owners: dict[Path, str] = {}
    for name, route in routes.items():
        if route.outcomes is not None:
            owner = owners.setdefault(route.outcomes, name)
            if owner != name:
                yield name, owner
