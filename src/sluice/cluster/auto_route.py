"""One name that stands for two models, as the HTTP server sees it: prompt to score to model.

Implements ``server.ports.AutoRoute``. Which model it is is the fleet's decision; here the
classifier is asked, its failures are borne, and metrics, journal and the file of outcomes are told.
No prompt is kept but of the latest requests, and only where outcomes are collected.
"""

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from sluice.cluster.calls import AnyModel
from sluice.cluster.fleet_driver import FleetDriver
from sluice.cluster.observer import Observer
from sluice.core.errors import InvalidRequest, Overloaded
from sluice.core.limits import RouteLimits, Way
from sluice.core.model_routes import Choice, Question, Why
from sluice.runtime.generation import ModelCard, ToldOutcome
from sluice.telemetry.records import Deployment

_log = logging.getLogger(__name__)

# What becomes of a threshold whose share has moved.
_FOLLOWS = "it is found anew from them"
_STAYS = "set share and follow, or find it anew by sluice route threshold"
_RETRY_AFTER_S = 60.0
# Requests of which an outcome can be told by their id.
_REMEMBERED_MAX = 2000


class Outcomes(Protocol):
    """Where outcomes are kept."""

    def add(self, prompt: str, weak: float | None, strong: float | None) -> None:
        """Keep one. Raises ``OSError`` where it cannot be written."""


def _not_kept(route: str) -> Overloaded:
    return Overloaded(
        f"The outcome was not kept: the file of the route {route} cannot be written; its operator "
        "finds the reason in the log.",
        status=503,
        reason="outcome_not_kept",
        measured=None,
        threshold=None,
        retry_after_s=_RETRY_AFTER_S,
    )


@dataclass(frozen=True, slots=True)
class Classifier:
    """What a route is served with beside its limits.

    ``score`` gives the score of a text, ``None`` for one that is unlike all that it knows. ``read``
    is the part of a text that it looks at. ``outcomes`` is ``None`` where none are collected.
    """

    score: Callable[[str], float | None]
    read: Callable[[str], str]
    outcomes: Outcomes | None = None


class AutoRoute:
    """One route. ``models`` are all models by name, ``limits`` those that the fleet holds to."""

    def __init__(
        self,
        limits: RouteLimits,
        classifier: Classifier,
        driver: FleetDriver,
        models: Mapping[str, AnyModel],
        observer: Observer,
    ) -> None:
        self.limits = limits
        self._classifier = classifier
        self._driver = driver
        self._models = models
        self._observer = observer
        self._remembered: OrderedDict[str, tuple[str, Way]] = OrderedDict()
        self._fails = self._drifts = self._unwritten = False

    def hold(self, limits: RouteLimits, classifier: Classifier) -> None:
        """Go by other limits and another classifier; requests stay known by their ids."""
        models = (limits.simple, limits.complex)
        if classifier.outcomes is None or models != (self.limits.simple, self.limits.complex):
            self._remembered.clear()
        self.limits, self._classifier = limits, classifier
        self._fails = False

    @property
    def card(self) -> ModelCard:
        """The route as a model that clients can ask for: it holds what the wider model holds."""
        pair = (self._models[self.limits.simple], self._models[self.limits.complex])
        widest = max((one.card for one in pair), key=lambda card: card.context_tokens_max)
        return replace(widest, id=self.limits.route, owned_by="sluice", fingerprint="")

    def judge(self, text: str) -> tuple[float | None, Why]:
        """The score of a text, or why there is none. May be called in any thread."""
        if not text.strip():
            return None, Why.NO_TEXT
        try:
            score = self._classifier.score(text)
        except Exception as error:  # noqa: BLE001 - boundary of one score: the request goes on
            if not self._fails:
                self._fails = True
                # The error's words may quote the prompt.
                name, default = type(error).__name__, self.limits.default
                words = "classifier of route %s failed (%s): requests go to the %s model"
                _log.error(words, self.limits.route, name, default)
            return None, Why.FAILED
        if score is None:
            return None, Why.UNFAMILIAR
        if not math.isfinite(score):
            return None, Why.FAILED
        self._fails = False
        return score, Why.SCORE

    def choose(self, question: Question, call_id: str, text: str) -> Choice:
        """The model for a request; ``text`` is what was judged of it."""
        choice = self._driver.choose(question)
        self._observer.routed(call_id, choice)
        self._tell_drift()
        if self._classifier.outcomes is not None and text:
            self._remembered[call_id] = (self._classifier.read(text), choice.way)
            if len(self._remembered) > _REMEMBERED_MAX:
                self._remembered.popitem(last=False)
        return choice

    def answered(self, call_id: str, model: str) -> None:
        """Another model than the chosen one answers a request: an outcome is about that one."""
        known = self._remembered.pop(call_id, None)
        ways = {self.limits.simple: Way.SIMPLE, self.limits.complex: Way.COMPLEX}
        if known is not None and model in ways:
            self._remembered[call_id] = (known[0], ways[model])

    async def told(self, outcome: ToldOutcome) -> None:
        """Keep what became of a prompt. Raises ``InvalidRequest`` where that cannot be used."""
        if self._classifier.outcomes is None:
            raise InvalidRequest(
                f"The route {self.limits.route} collects no outcomes; its operator sets "
                f"routes.{self.limits.route}.outcomes to a file.",
                param="route",
            )
        prompt, weak, strong = outcome.prompt, outcome.weak, outcome.strong
        if outcome.id:
            known = self._remembered.get(outcome.id)
            if known is None:
                raise InvalidRequest(
                    f"No request {outcome.id[:64]!r} is among the latest {_REMEMBERED_MAX} of "
                    "this route; send its prompt instead of its id.",
                    param="id",
                )
            prompt, way = known
            if outcome.ok is not None:
                weak, strong = (outcome.ok, None) if way is Way.SIMPLE else (None, outcome.ok)
        prompt = self._classifier.read(prompt)
        try:
            await asyncio.to_thread(self._classifier.outcomes.add, prompt, weak, strong)
        except OSError as error:
            self._tell_unwritten(error)
            raise _not_kept(self.limits.route) from error
        self._unwritten = False
        self._observer.outcome_told(self.limits.route)

    def _tell_unwritten(self, error: OSError) -> None:
        """Warn once until it works again: clients could fill the log."""
        if not self._unwritten:
            self._unwritten = True
            _log.warning("outcomes of route %s cannot be kept: %s", self.limits.route, error)

    def _tell_drift(self) -> None:
        """Warn once when the share of the complex model has moved, and say when it is back."""
        view = self._driver.route_view(self.limits.route)
        if view.drifted != self._drifts:
            self._drifts = view.drifted
            told = (
                f"route {view.route}: {view.share:.0%} of the latest {view.scores} requests are at "
                f"or above the threshold of {view.threshold:.4f}, and {view.share_meant:.0%} are "
                f"meant to be"
            )
            if view.drifted:
                follows = self.limits.follow and self.limits.share is not None
                _log.warning("%s; %s", told, _FOLLOWS if follows else _STAYS)
            else:
                _log.info("%s: near enough again", told)
            shares = {"share": f"{view.share:.3f}", "share_meant": f"{view.share_meant:.3f}"}
            details = {"route": view.route, **shares}
            self._observer.changed(Deployment(0, "route share", details))
