"""A classifier that fails costs no request; outcomes and drift are told as they should be."""

import asyncio
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sluice.cluster.auto_route import _REMEMBERED_MAX, AutoRoute, Classifier
from sluice.cluster.operated import Operated
from sluice.config.routes import RouteSection
from sluice.config.sections import ModelSection
from sluice.core.errors import InvalidRequest, Overloaded
from sluice.core.limits import RouteLimits, Way
from sluice.core.model_routes import Choice, Question, RouteView, Why
from sluice.runtime.generation import ModelCard, ToldOutcome
from tests.cluster.relay_rig import CHAT, MESSAGES, engine, relay

LIMITS = RouteLimits("auto", "small", "large", (0.5,), share=0.3)


class FakeDriver:
    def __init__(self) -> None:
        self.view = RouteView("auto", 0.5, 10, 0.3, 0.3, drifted=False)

    def choose(self, question: Question) -> Choice:
        way = Way.COMPLEX if (question.score or 0) > 0.5 else Way.SIMPLE
        return Choice("auto", way, way, Why.SCORE, question.score, 0.5)

    def route_view(self, route: str) -> RouteView:
        assert route == "auto"
        return self.view


class FakeObserver:
    def __init__(self) -> None:
        self.routes: list[str] = []
        self.changes: list[Any] = []
        self.outcomes = 0

    def routed(self, call_id: str, choice: Choice) -> None:
        self.routes.append(f"{call_id} {choice.model}")

    def outcome_told(self, route: str) -> None:
        assert route == "auto"
        self.outcomes += 1

    def changed(self, deployment: Any) -> None:
        self.changes.append(deployment.details)


class Kept:
    def __init__(self) -> None:
        self.rows: list[tuple[str, float | None, float | None]] = []

    def add(self, prompt: str, weak: float | None, strong: float | None) -> None:
        self.rows.append((prompt, weak, strong))


def made(score: Any, kept: Kept | None = None) -> Any:
    models: Any = {
        name: SimpleNamespace(card=ModelCard(name, 0, tokens))
        for name, tokens in (("small", 100), ("large", 900))
    }
    driver: Any = FakeDriver()
    observer: Any = FakeObserver()
    classifier = Classifier(score, lambda text: text[:8], kept)
    return AutoRoute(LIMITS, classifier, driver, models, observer), driver, observer


def tell(route: AutoRoute, outcome: ToldOutcome) -> None:
    asyncio.run(route.told(outcome))


def test_a_classifier_that_raises_is_logged_once_and_its_words_are_not(caplog):
    fails = [True]

    def score(text: str) -> float:
        if fails[0]:
            raise ValueError(f"cannot read {text}")
        return 0.25

    route, _, _ = made(score)
    assert [route.judge("secret") for _ in range(3)] == [(None, Why.FAILED)] * 3
    assert len(caplog.records) == 1
    assert "ValueError" in caplog.text
    assert "secret" not in caplog.text
    fails[0] = False
    assert route.judge("secret") == (0.25, Why.SCORE)


@pytest.mark.parametrize(
    ("score", "why"),
    [(None, Why.UNFAMILIAR), (float("nan"), Why.FAILED), (float("inf"), Why.FAILED)],
)
def test_a_score_that_is_none_says_why(score, why):
    assert made(lambda _: score)[0].judge("text") == (None, why)


def test_a_text_of_nothing_is_not_judged():
    assert made(lambda _: 0.9)[0].judge(" \n") == (None, Why.NO_TEXT)


def test_the_card_holds_what_the_wider_model_holds():
    card = made(lambda _: 0.0)[0].card
    assert (card.id, card.context_tokens_max) == ("auto", 900)


def test_an_outcome_by_id_is_about_the_model_that_answered():
    kept = Kept()
    route, _, observer = made(lambda _: 0.0, kept)
    route.choose(Question("auto", 0.1), "a", "a simple question")
    route.choose(Question("auto", 0.9), "b", "a complex question")
    tell(route, ToldOutcome(id="a", ok=1.0))
    tell(route, ToldOutcome(id="b", ok=0.0))
    tell(route, ToldOutcome(prompt="both of them", weak=1.0, strong=0.5))
    assert kept.rows == [("a simple", 1.0, None), ("a comple", None, 0.0), ("both of ", 1.0, 0.5)]
    assert (observer.routes, observer.outcomes) == (["a simple", "b complex"], 3)


def test_only_the_latest_requests_are_known_by_their_id():
    route, _, _ = made(lambda _: 0.0, Kept())
    for number in range(_REMEMBERED_MAX + 1):
        route.choose(Question("auto", 0.1), f"r{number}", "text")
    with pytest.raises(InvalidRequest, match="prompt instead"):
        tell(route, ToldOutcome(id="r0", ok=1.0))
    tell(route, ToldOutcome(id="r1", ok=1.0))


def test_an_outcome_is_about_the_model_that_answers_instead_of_the_chosen_one():
    kept = Kept()
    route, _, _ = made(lambda _: 0.0, kept)
    for call_id in ("a", "b", "c"):
        route.choose(Question("auto", 0.9), call_id, "text")
    route.answered("a", "small")
    route.answered("b", "another")
    tell(route, ToldOutcome(id="a", ok=0.0))
    tell(route, ToldOutcome(id="c", ok=1.0))
    assert kept.rows == [("text", 0.0, None), ("text", None, 1.0)]
    with pytest.raises(InvalidRequest):
        tell(route, ToldOutcome(id="b", ok=1.0))


def test_requests_stay_known_by_their_ids_when_settings_are_read_again():
    kept = Kept()
    route, driver, observer = made(lambda _: 0.0, kept)
    route.choose(Question("auto", 0.1), "a", "text")
    operated = Operated(driver, {}, observer)
    limits, classifier = replace(LIMITS, spill=0.1), Classifier(lambda _: 0.7, str.upper, kept)
    again = operated.routes({"auto": limits}, {"auto": classifier}, {"auto": route})["auto"]
    assert (again.limits, again.judge("x")) == (limits, (0.7, Why.SCORE))
    tell(again, ToldOutcome(id="a", ok=1.0))
    assert kept.rows == [("TEXT", 1.0, None)]
    # Where outcomes are no longer collected, no prompt is kept.
    again.hold(limits, Classifier(lambda _: 0.7, str))
    again.hold(limits, classifier)
    with pytest.raises(InvalidRequest):
        tell(again, ToldOutcome(id="a", ok=1.0))


def test_an_outcome_that_cannot_be_written_is_refused_and_logged_once(caplog):
    class Full(Kept):
        full = True

        def add(self, prompt: str, weak: float | None, strong: float | None) -> None:
            if self.full:
                raise OSError(28, "No space left on device")
            super().add(prompt, weak, strong)

    kept = Full()
    route, _, observer = made(lambda _: 0.0, kept)
    told = ToldOutcome(prompt="secret", weak=1.0)
    for _ in range(3):
        with pytest.raises(Overloaded, match="was not kept") as caught:
            tell(route, told)
        assert (caught.value.status, caught.value.reason) == (503, "outcome_not_kept")
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert "secret" not in caplog.text
    kept.full = False
    tell(route, told)
    assert (len(kept.rows), observer.outcomes) == (1, 1)


def test_without_a_file_nothing_is_kept_and_that_is_said():
    route, _, _ = made(lambda _: 0.0)
    route.choose(Question("auto", 0.1), "a", "text")
    with pytest.raises(InvalidRequest, match=r"routes\.auto\.outcomes"):
        tell(route, ToldOutcome(id="a", ok=1.0))


def test_d19_a_share_that_moved_is_warned_of_once_and_its_return_is_told(caplog):
    caplog.set_level(logging.INFO)
    route, driver, observer = made(lambda _: 0.0)
    for share, drifted in ((0.3, False), (0.6, True), (0.61, True), (0.32, False)):
        driver.view = RouteView("auto", 0.7, 200, share, 0.3, drifted=drifted)
        route.choose(Question("auto", 0.1), "a", "text")
    levels = [record.levelname for record in caplog.records]
    assert levels == ["WARNING", "INFO"]
    assert "60% of the latest 200" in caplog.text
    assert "30% are meant" in caplog.text
    assert "found anew from them" in caplog.text
    assert [one["share"] for one in observer.changes] == ["0.600", "0.320"]


def test_a_remote_engine_and_a_simulated_model_share_a_route():
    route = RouteSection(simple="tiny", complex="big", threshold=1.0, rules=("tools",))
    beside = {"tiny": ModelSection(source="sim:llama-3.1-8b@h100")}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    with relay(engine(), settings={"routes": {"auto": route}}, beside=beside) as rig:
        small = rig.post(CHAT, {"model": "auto", "messages": MESSAGES, "max_tokens": 3})
        assert (small.status, small.headers["x-sluice-model"]) == (200, "tiny")
        assert not rig.sent()
        body = {"model": "auto", "messages": MESSAGES, "tools": [tool], "odd": 1.5}
        large = rig.post(CHAT, body)
        assert (large.status, large.headers["x-sluice-route-reason"]) == (200, "tools")
        assert large.headers["x-sluice-model"] == "big"
        # The engine gets its own name for the model, and all else as it came.
        assert rig.sent_body() == {**body, "model": "weights"}
        rig.post(CHAT, {**body, "stream": True})
        assert rig.metric("routed_total", route="auto", way="complex") == 2
