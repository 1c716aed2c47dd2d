"""From a journal to a diagnosis: is there a spike, where is the excess, and what explains it.

``diagnose`` is called by the command and by whoever watches. It runs the steps in order; each is in
a module of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from sluice.doctor.causes import CAUSES, Cause
from sluice.doctor.columns import Journal
from sluice.doctor.courses import course_of
from sluice.doctor.engines import Engines, Told
from sluice.doctor.phases import Excess, Held, excess_of, held_by
from sluice.doctor.scene import Finding, Scene
from sluice.doctor.shares import NONE, Share, Shares, shares_of
from sluice.doctor.spike import METRICS, Spike, latency_of, spike_of
from sluice.doctor.windows import Window, Windows, windows_of
from sluice.doctor.world import World, world_of

CONFIRMED_SHARE_MIN = 0.20
_LIKELY_SHARE_MIN = 0.15
_RULED_OUT_HIGH = 0.10
_EXAMPLES = 3


class Verdict(StrEnum):
    """What is said of a cause, the surest first."""

    CONFIRMED = "confirmed"
    LIKELY = "likely"
    POSSIBLE = "possible"
    CANNOT_TELL = "cannot tell"
    RULED_OUT = "ruled out"


@dataclass(frozen=True, slots=True)
class Judged:
    """One cause: what is said of it and why."""

    name: str
    title: str
    verdict: Verdict
    share: Share | None
    evidence: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    missing: str = ""
    next_look: str = ""


@dataclass(frozen=True, eq=False, slots=True)
class Diagnosis:
    """All that was found. ``missing`` are signals without which some causes cannot be judged.

    ``stages`` are mean times inside engines elsewhere, as these tell them.
    """

    windows: Windows
    spike: Spike
    spikes: tuple[Spike, ...]
    causes: tuple[Judged, ...]
    excess: Excess | None
    held: Held | None
    shares: Shares
    refused: tuple[float, float]
    examples: tuple[str, ...]
    missing: tuple[str, ...]
    problems: tuple[str, ...]
    stages: Mapping[str, Told] = field(default_factory=dict)

    @property
    def found(self) -> tuple[Judged, ...]:
        """Causes that are more than ruled out or unknown."""
        told = (Verdict.CONFIRMED, Verdict.LIKELY, Verdict.POSSIBLE)
        return tuple(cause for cause in self.causes if cause.verdict in told)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be looked at: a metric (``None`` for the one that moved most), and windows."""

    metric: str | None = None
    percentile: float = 99.0
    incident: Window | None = None
    baseline: Window | None = None
    seed: int = 1


def diagnose(journal: Journal, wanted: Wanted) -> Diagnosis:
    """Diagnose a journal."""
    requests = journal.requests
    looked_at = latency_of(requests, wanted.metric or "ttft")
    if wanted.metric is None and np.all(np.isnan(looked_at)):
        looked_at = latency_of(requests, "e2e")
    windows = windows_of(requests, looked_at, wanted.incident, wanted.baseline)
    masks = windows.baseline.of(requests), windows.incident.of(requests)
    metrics = METRICS if wanted.metric is None else (wanted.metric,)
    spikes = tuple(
        spike_of(requests, masks, metric, wanted.percentile, wanted.seed) for metric in metrics
    )
    spike = max(spikes, key=_weight)
    refused = tuple(float(np.mean(requests["rejected"][mask] > 0)) if mask.any() else 0.0
                    for mask in masks)  # fmt: skip
    scene = Scene(journal, windows, spike, wanted.seed)
    if not spike.confirmed:
        return Diagnosis(
            windows, spike, spikes, (), None, None, NONE, (refused[0], refused[1]), (), (),
            _problems(journal),
        )  # fmt: skip
    findings = {name: cause.check(scene) for name, cause in CAUSES.items()}
    shares = shares_of(scene, findings, _world(scene, findings))
    excess = excess_of(scene)
    causes = [
        _judged(name, CAUSES[name], _with_course(scene, found), shares, excess)
        for name, found in findings.items()
    ]
    if not shares.usable:
        causes = _without_replay(causes, findings, excess)
    causes.sort(key=_rank)
    missing = tuple(dict.fromkeys(found.missing for found in findings.values() if found.missing))
    return Diagnosis(
        windows, spike, spikes, tuple(causes), excess, held_by(scene), shares,
        (refused[0], refused[1]), _examples(scene), missing, _problems(journal),
        Engines(scene).stages(),
    )  # fmt: skip


def _weight(spike: Spike) -> tuple[bool, float]:
    """Confirmed ones first, then by how many times the percentile grew, for sure."""
    before_s = spike.before_s or 0.0
    return spike.confirmed, (spike.low_s / before_s if before_s > 0 else 0.0)


def _world(scene: Scene, findings: Mapping[str, Finding]) -> World | None:
    if not any(found.present and found.remove for found in findings.values()):
        return None
    models = np.bincount(scene.requests.names["model"][scene.after])
    world = world_of(scene.journal, scene.windows, int(np.argmax(models)), scene.speeds)
    if world is not None and findings["imbalance"].present:
        world = world.changed(pinned=True)
    return world


def _with_course(scene: Scene, found: Finding) -> Finding:
    """The finding with what its timing and its dose say."""
    if not found.present or found.series is None:
        return found
    told, against = course_of(scene, found.series)
    return replace(found, evidence=(*found.evidence, *told), against=(*found.against, *against))


def _judged(
    name: str, cause: Cause, found: Finding, shares: Shares, excess: Excess | None
) -> Judged:
    share = shares.of.get(name)
    against = list(found.against)
    against += [f"it did not hold that {words}" for words, held in found.controls if not held]
    verdict = _verdict(found, share, shares)
    if found.present and found.remove is not None and not shares.close:
        rough = "its share is rough" if shares.usable else "none tells its share"
        against.append(f"a replay of what happened is {shares.misfit:.0%} off, so {rough}")
    if excess is not None and found.present and cause.phases and not _fits(cause, excess):
        against.append(f"the excess is in {excess.largest}, where this does not show")
        if verdict is Verdict.CONFIRMED:
            verdict = Verdict.LIKELY
    return Judged(
        name, cause.title, verdict, share, found.evidence, tuple(against), found.missing,
        found.next_look,
    )  # fmt: skip


def _without_replay(
    causes: Sequence[Judged], findings: Mapping[str, Finding], excess: Excess | None
) -> list[Judged]:
    """Where replays say nothing, the one cause whose mechanism moved is likely, if all fits."""
    moved = [
        cause
        for cause in causes
        if findings[cause.name].remove is not None and not findings[cause.name].downstream
    ]
    if len(moved) != 1 or excess is None or not _fits(CAUSES[moved[0].name], excess):
        return list(causes)
    if any(not held for _, held in findings[moved[0].name].controls):
        return list(causes)
    told = "of what can have such an effect in an engine only this moved"
    only = replace(moved[0], verdict=Verdict.LIKELY, evidence=(*moved[0].evidence, told))
    return [only if cause is moved[0] else cause for cause in causes]


def _verdict(found: Finding, share: Share | None, shares: Shares) -> Verdict:
    if found.missing:
        return Verdict.CANNOT_TELL
    if not found.present:
        return Verdict.RULED_OUT
    if share is None:
        return Verdict.POSSIBLE
    if share.high < _RULED_OUT_HIGH:
        return Verdict.RULED_OUT
    sure = all(held for _, held in found.controls) and not found.downstream
    if share.low >= CONFIRMED_SHARE_MIN and sure and (shares.close or found.remove is None):
        return Verdict.CONFIRMED
    return Verdict.LIKELY if share.share >= _LIKELY_SHARE_MIN else Verdict.POSSIBLE


def _fits(cause: Cause, excess: Excess) -> bool:
    """Whether a fair part of the excess is in its phases."""
    names = {"admission": ("reading", "retries")}
    mine = [other for phase in cause.phases for other in names.get(phase, (phase,))]
    total = sum(max(0.0, value) for value in excess.phases.values())
    inside = sum(max(0.0, excess.phases.get(name, 0.0)) for name in mine)
    return total <= 0 or inside >= 0.15 * total


def _rank(judged: Judged) -> tuple[int, float]:
    order = list(Verdict).index(judged.verdict)
    return order, -(judged.share.low if judged.share is not None else -np.inf)


def _examples(scene: Scene) -> tuple[str, ...]:
    """Typical slow requests, and the slowest."""
    tail = scene.tail[np.argsort(scene.latency_s[scene.tail])]
    if not len(tail):
        return ()
    middle = tail[len(tail) // 2 : len(tail) // 2 + _EXAMPLES]
    return tuple(dict.fromkeys(scene.requests.ids[row] for row in (*middle, tail[-1])))


def _problems(journal: Journal) -> tuple[str, ...]:
    found = list(journal.problems)
    if journal.duplicates:
        found.append(
            f"ids used before: {journal.duplicates:,}; each counts as a request of its own"
        )
    lost = sum(count for _, count in journal.gaps)
    if lost:
        found.append(f"{lost:,} records could not be written when they were made")
    return tuple(found)
