"""What each present cause explains: the share of the change of a percentile that goes without it.

Causes with a mechanism in the engine are taken out of the world, which is played again; those that
are spans of their own are subtracted. Where the play of what happened is not like it, replays say
nothing, and only what is subtracted has a share. Of several causes each gets the mean of what it
removes over all orders of taking them out (Shapley), since they work on each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import factorial

import numpy as np

from sluice.doctor.columns import Floats, Ints
from sluice.doctor.replaying import Played, Player
from sluice.doctor.scene import Finding, Scene
from sluice.doctor.spike import blocks_drawn
from sluice.doctor.world import World

# Causes played together at most; of more, those that remove least alone are played alone.
TOGETHER_MAX = 3
# A replay that is further off than the first confirms nothing, than the second says nothing. Near
# saturation an error of a few percent in speed is one of half a percentile.
CLOSE_MAX, MISFIT_MAX = 0.30, 1.0
_DRAWS = 200
_TAIL = 0.05
_ALONE_MIN = 0.10
# What shares are off beside what sampling explains, found with ``benchmarks/doctor.py``.
OFF = 0.10


@dataclass(frozen=True, slots=True)
class Share:
    """What of the change goes without a cause."""

    low: float
    share: float
    high: float


@dataclass(frozen=True, slots=True)
class Shares:
    """The share of each cause in ``of``; ``misfit`` is how far the replay is off, up or down: the
    percentile is so much more than the other one.

    ``replayed`` requests were played, 0 where spans alone were subtracted. Causes that it takes a
    replay to weigh are not in ``of`` where that is not ``usable``.
    """

    of: Mapping[str, Share]
    misfit: float | None
    replayed: int

    @property
    def close(self) -> bool:
        """Whether the replay is so like what happened that it can confirm a cause."""
        return self.misfit is None or self.misfit <= CLOSE_MAX

    @property
    def usable(self) -> bool:
        """Whether it is so like it that shares tell anything."""
        return self.misfit is None or self.misfit <= MISFIT_MAX


NONE = Shares({}, None, 0)


def shares_of(scene: Scene, findings: Mapping[str, Finding], world: World | None) -> Shares:
    """The shares of the findings that are present."""
    if world is not None and np.all(np.isnan(scene.latency_s[world.rows[world.judged]])):
        world = None
    present = {
        name: found
        for name, found in findings.items()
        if found.present and (found.span_s is not None or (found.remove and world is not None))
    }
    if not present or scene.spike.before_s is None:
        return NONE
    replays = any(found.remove is not None for found in present.values())
    trial = _Trial(scene, present, world if replays else None)
    misfit, replayed = trial.misfit, trial.replayed
    if misfit is not None and misfit > MISFIT_MAX:
        present = {name: found for name, found in present.items() if found.span_s is not None}
        if not present:
            return Shares({}, misfit, replayed)
        trial = _Trial(scene, present, None)
    alone = {name: trial.share((name,)) for name in present}
    leading = _leading(trial, present, alone)
    found = alone | trial.shapley(leading) if len(leading) > 1 else alone
    return Shares(found, misfit, replayed)


def _leading(
    trial: "_Trial", present: Mapping[str, Finding], alone: Mapping[str, Share]
) -> list[str]:
    """The causes that remove something, alone or where the others are gone already.

    What others bring about is left out where there are any of those.
    """
    upstream = [name for name in present if not present[name].downstream] or list(present)
    removes = {name: alone[name].share for name in upstream}
    if len(upstream) > 1:
        whole = trial.share(tuple(upstream)).share
        for name in upstream:
            others = tuple(other for other in upstream if other != name)
            removes[name] = max(removes[name], whole - trial.share(others).share)
    ranked = sorted(upstream, key=lambda name: -removes[name])
    return [name for name in ranked if removes[name] >= _ALONE_MIN][:TOGETHER_MAX]


class _Trial:
    """Worlds without some of the causes, each played once."""

    def __init__(self, scene: Scene, findings: Mapping[str, Finding], world: World | None) -> None:
        self._scene, self._findings = scene, findings
        self._metric = scene.spike.metric
        self._level = scene.spike.percentile / 100
        self._player = Player() if world is not None else None
        self._world = world
        self._played: dict[tuple[str, ...], Floats] = {}
        self.misfit: float | None = None
        self.replayed = 0 if world is None else len(world.rows)
        self._rows: Ints = scene.after
        if world is not None:
            # Of requests that were refused, or not answered yet, no more is known than that.
            seen = ~np.isnan(scene.latency_s[world.rows])
            self._places = np.flatnonzero(world.judged & seen)
            self._rows = world.rows[self._places]
        observed = scene.latency_s[self._rows]
        self._beside = np.zeros(len(self._rows))
        for found in findings.values():
            if found.span_s is not None and world is not None and not found.played:
                self._beside = self._beside + found.span_s[self._rows]
        self._factual = self._without(())
        if world is not None:
            answered_s = _quantile(observed, self._level)
            made_s = _quantile(self._factual, self._level)
            low_s, high_s = sorted((made_s, answered_s))
            self.misfit = high_s / max(low_s, 1e-9) - 1.0
        self._draws = blocks_drawn(len(self._rows), np.random.default_rng(scene.seed), _DRAWS)

    def _without(self, names: tuple[str, ...]) -> Floats:
        """Latencies of the rows without these causes; NaN for requests that would not have come."""
        key = tuple(sorted(names))
        found = self._played.get(key)
        if found is None:
            found = self._played[key] = self._latencies(key)
        return found

    def _latencies(self, names: tuple[str, ...]) -> Floats:
        edits = [self._findings[name].remove for name in names]
        found = self._scene.latency_s[self._rows]
        if self._world is not None and self._player is not None:
            world = self._world
            key = tuple(n for n, e in zip(names, edits, strict=True) if e is not None)
            if key != names and key in self._played:
                found = self._played[key].copy()
            else:
                for edit in edits:
                    if edit is not None:
                        world = edit(world)
                played: Played = self._player.play(world)
                found = played.of(self._metric)[self._places] + self._beside
                found = np.where(world.kept[self._places], found, np.nan)
        for name in names:
            span_s = self._findings[name].span_s
            if span_s is not None:
                found = np.maximum(0.0, found - span_s[self._rows])
        return found

    def share(self, names: tuple[str, ...]) -> Share:
        """What goes without these causes at once."""
        return self._around(self._removed(names), self._drawn(names))

    def shapley(self, names: Sequence[str]) -> dict[str, Share]:
        """What each removes, mean over all orders."""
        found = {}
        for name in names:
            others = [other for other in names if other != name]
            value = 0.0
            spread = np.zeros(len(self._draws))
            for size in range(len(others) + 1):
                weight = factorial(size) * factorial(len(names) - size - 1) / factorial(len(names))
                for beside in combinations(others, size):
                    value += weight * (self._removed((*beside, name)) - self._removed(beside))
                    spread += weight * (self._drawn((*beside, name)) - self._drawn(beside))
            found[name] = self._around(value, spread)
        return found

    def _removed(self, names: tuple[str, ...]) -> float:
        return self._removed_in(names, np.arange(len(self._rows)))

    def _removed_in(self, names: tuple[str, ...], rows: Ints) -> float:
        """The share of the change that goes, in some of the rows."""
        before_s = self._scene.spike.before_s or 0.0
        with_s = _quantile(self._factual[rows], self._level)
        without_s = _quantile(self._without(names)[rows], self._level)
        change_s = with_s - before_s
        least_s = 0.25 * max(self._scene.spike.change_s, 1e-9)
        return (with_s - without_s) / max(change_s, least_s)

    def _drawn(self, names: tuple[str, ...]) -> Floats:
        return np.array([self._removed_in(names, rows) for rows in self._draws])

    def _around(self, value: float, drawn: Floats) -> Share:
        low, high = np.quantile(drawn, (_TAIL, 1 - _TAIL))
        off = OFF + 0.5 * (self.misfit or 0.0)
        return Share(
            float(min(low, value) - off),
            float(value),
            float(max(high, value) + off),
        )


def _quantile(values: Floats, level: float) -> float:
    kept = values[~np.isnan(values)]
    return float(np.quantile(kept, level)) if len(kept) else 0.0
