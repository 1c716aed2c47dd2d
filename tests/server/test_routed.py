"""Requests for a name that stands for two models: what is asked, what is told, what is kept."""

import json
from dataclasses import dataclass, field, replace

import pytest

from sluice.core.errors import Overloaded
from sluice.core.limits import Way
from sluice.core.model_routes import Choice, Question, Why
from sluice.core.request import Rung
from sluice.runtime.generation import Relaying, Terms, ToldOutcome
from sluice.testing.gateway import FakeGateway, refuse, speak
from tests.server.wire_client import post

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


@dataclass
class FakeRoute:
    """Scores by length; above 20 characters is complex."""

    questions: list[Question] = field(default_factory=list)
    judged: list[str] = field(default_factory=list)
    outcomes: list[ToldOutcome] = field(default_factory=list)
    would: Way | None = None
    others: list[tuple[str, str]] = field(default_factory=list)

    def judge(self, text: str) -> tuple[float | None, Why]:
        self.judged.append(text)
        return (len(text) / 100, Why.SCORE) if text else (None, Why.NO_TEXT)

    def choose(self, question: Question, call_id: str, text: str) -> Choice:
        self.questions.append(question)
        score = question.score or 0.0
        way = question.wanted or (Way.COMPLEX if score > 0.2 else Way.SIMPLE)
        model = {Way.SIMPLE: "small", Way.COMPLEX: "large"}[way]
        return Choice("auto", model, way, Why.SCORE, question.score, 0.2, self.would)

    def answered(self, call_id: str, model: str) -> None:
        self.others.append((call_id, model))

    async def told(self, outcome: ToldOutcome) -> None:
        self.outcomes.append(outcome)


@pytest.fixture
def route():
    return FakeRoute()


@pytest.fixture
def gateway(route):
    made = FakeGateway(models=("small", "large", "auto"))
    made.routes["auto"] = route
    return made


@pytest.fixture
def server(serve_app, gateway):
    return serve_app(gateway)


def said(*turns: str) -> list[dict[str, str]]:
    roles = ["user", "assistant"] * len(turns)
    return [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]


LONG = "A question that is longer than twenty characters."
BODIES = {
    CHAT: lambda text: {"messages": said(text)},
    TEXT: lambda text: {"prompt": text},
    RESPONSES: lambda text: {"input": text},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("text", "model", "way"), [("Hi", "small", "simple"), (LONG, "large", "complex")]
)
def test_each_api_is_answered_by_the_model_that_was_chosen(
    server, gateway, route, path, text, model, way
):
    answer = post(server, path, {"model": "auto", **BODIES[path](text)})
    assert answer.status == 200
    assert gateway.recorded.calls[-1].model == model
    assert route.judged == [text]
    assert answer.json()["model"] == model
    assert answer.headers["x-sluice-model"] == model
    assert answer.headers["x-sluice-route"] == "auto"
    assert answer.headers["x-sluice-route-way"] == way
    assert answer.headers["x-sluice-route-reason"] == "score"
    assert float(answer.headers["x-sluice-route-score"]) == pytest.approx(len(text) / 100)
    assert answer.headers["x-sluice-route-threshold"] == "0.2000"
    told = answer.json()["usage"]["sluice"]["route"]
    assert (told["name"], told["model"], told["way"], told["reason"]) == (
        "auto",
        model,
        way,
        "score",
    )


def test_a_stream_tells_it_too(server):
    answer = post(
        server, CHAT,
        {"model": "auto", "messages": said(LONG), "stream": True,
         "stream_options": {"include_usage": True}},
    )  # fmt: skip
    assert answer.headers["x-sluice-route-way"] == "complex"
    *_, last, _ = answer.events()
    assert last["usage"]["sluice"]["route"]["model"] == "large"


def test_a_refusal_tells_it_too(server, gateway):
    full = Overloaded(
        "full", status=429, reason="queue_full", measured=1, threshold=1, retry_after_s=1
    )
    gateway.script = lambda _: refuse(full)
    answer = post(server, CHAT, {"model": "auto", "messages": said("Hi")})
    assert (answer.status, answer.headers["x-sluice-route-way"]) == (429, "simple")


def test_a_route_is_told_where_another_model_answers(server, gateway, route):
    body = {"model": "auto", "messages": said(LONG)}
    post(server, CHAT, body)
    assert not route.others
    terms = Terms(degraded=(Rung.SMALLER,), model_asked="large")
    gateway.script = lambda call: replace(speak(call, "Hi"), model="small", terms=terms)
    answer = post(server, CHAT, body)
    assert answer.headers["x-sluice-model"] == "small"
    assert [(f"chatcmpl-{id_}", model) for id_, model in route.others] == [
        (answer.json()["id"], "small")
    ]


def test_a_prompt_in_any_script_is_counted_by_its_bytes(server, route):
    for text in ("word " * 60, "\u554f" * 300):
        post(server, CHAT, {"model": "auto", "messages": said(text)})
    assert [question.tokens for question in route.questions] == [101, 301]


def test_a_model_that_is_asked_for_by_its_name_is_not_routed(server, gateway, route):
    answer = post(server, CHAT, {"model": "small", "messages": said(LONG)})
    assert (answer.status, gateway.recorded.calls[-1].model) == (200, "small")
    assert "x-sluice-route" not in answer.headers
    assert "sluice" not in answer.json()["usage"]
    assert not route.judged


def test_the_client_may_name_the_way(server, gateway):
    body = {"model": "auto", "messages": said(LONG)}
    post(server, CHAT, body, {"x-sluice-route": "simple"})
    assert gateway.recorded.calls[-1].model == "small"
    wrong = post(server, CHAT, body, {"x-sluice-route": "tiny"})
    assert (wrong.status, wrong.error["param"]) == (400, "x-sluice-route")


def test_what_the_rules_need_is_found(server, route):
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    content = [{"type": "text", "text": "What is this?"}, picture]
    post(
        server, CHAT,
        {"model": "auto", "messages": [{"role": "user", "content": content}], "tools": [tool],
         "max_tokens": 300},
    )  # fmt: skip
    (question,) = route.questions
    assert question.carries == (Why.TOOLS, Why.IMAGES)
    assert route.judged == ["What is this?"]
    assert 300 < question.tokens < 320


def test_a_later_turn_names_the_turn_before(server, route):
    for turns in (["one"], ["one", "Hello.", "two"], ["another", "Hello.", "two"]):
        post(server, CHAT, {"model": "auto", "messages": said(*turns)})
    first, second, other = route.questions
    assert first.earlier is None
    assert second.earlier == first.conversation != second.conversation
    assert other.earlier not in {first.conversation, second.conversation}
    assert route.judged == ["one", "two", "two"]


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": 7},
        {"messages": [7, None, "x"]},
        {"messages": [{"role": "user", "content": {"a": 1}}]},
        {"messages": [{"role": ["x"], "content": [1, {"type": []}, {"text": 5}]}]},
        {"messages": [{"role": "user", "content": "Hi"}], "tools": "x", "max_tokens": "y"},
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": -3},
        {},
    ],
)
def test_what_is_wrong_with_a_request_is_told_as_always(server, fields):
    assert post(server, CHAT, {"model": "auto", **fields}).status == 400


@pytest.mark.parametrize("model", [7, None, ["auto"], {"auto": 1}])
def test_a_model_that_is_no_text_is_no_route(server, model):
    assert post(server, CHAT, {"model": model, "messages": said("Hi")}).status == 400


def test_token_ids_have_no_text_and_are_answered(server, gateway, route):
    assert post(server, TEXT, {"model": "auto", "prompt": [1, 2, 3]}).status == 200
    assert (route.judged, route.questions[0].score) == ([""], None)
    assert gateway.recorded.calls[-1].model == "small"


def test_several_prompts_go_to_one_model(server, gateway):
    answer = post(server, TEXT, {"model": "auto", "prompt": ["Hi", LONG]})
    assert answer.status == 200
    assert [call.model for call in gateway.recorded.calls] == ["large", "large"]


def test_a_large_body_is_read_in_a_thread_and_routed(server, gateway, route):
    answer = post(server, CHAT, {"model": "auto", "messages": said("x" * 300_000)})
    assert (answer.status, gateway.recorded.calls[-1].model) == (200, "large")
    assert len(route.judged[0]) == 300_000


def test_a_remote_model_gets_the_bytes_as_they_came(serve_app, gateway):
    gateway.relaying = Relaying(frozenset({"large"}))
    server = serve_app(gateway)
    body = json.dumps({"model": "auto", "messages": said(LONG), "odd": [1.50]}).encode()
    gateway.script = lambda call: speak(call, call.prompt.body.decode())
    answer = post(server, CHAT, body)
    (call,) = gateway.recorded.calls
    assert (call.model, call.prompt.body) == ("large", body)
    assert answer.headers["x-sluice-route-way"] == "complex"


def test_a_route_that_goes_while_its_request_is_read_is_not_found(server, gateway, route):
    route.judge = lambda _: (gateway.routes.clear(), Why.FAILED)
    answer = post(server, CHAT, {"model": "auto", "messages": said("Hi")})
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")


def test_a_shadow_is_told(server, route):
    route.would = Way.COMPLEX
    answer = post(server, CHAT, {"model": "auto", "messages": said("Hi")})
    assert answer.headers["x-sluice-route-shadow"] == "complex"
    assert answer.json()["usage"]["sluice"]["route"]["shadow"] == "complex"


def test_outcomes_are_told_by_id_or_by_prompt(server, route):
    for fields in (
        {"id": "chatcmpl-abc", "ok": True},
        {"prompt": "What is 2+2?", "simple_ok": 1, "complex_ok": 0.5},
    ):
        answer = post(server, "/v1/feedback", {"route": "auto", **fields})
        assert (answer.status, answer.json()["kept"]) == (200, True)
    assert route.outcomes == [
        ToldOutcome(id="abc", ok=1.0),
        ToldOutcome(prompt="What is 2+2?", weak=1.0, strong=0.5),
    ]


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"route": "auto", "id": "x"}, 400, "ok"),
        ({"route": "auto", "ok": True}, 400, "id"),
        ({"route": "auto", "id": "x", "prompt": "y", "ok": True}, 400, "id"),
        ({"route": "auto", "prompt": "y", "ok": True}, 400, "ok"),
        ({"route": "auto", "prompt": "y", "simple_ok": 2}, 400, "simple_ok"),
        ({"route": "auto", "prompt": "y", "simple_ok": "yes"}, 400, "simple_ok"),
        ({"route": "nope", "prompt": "y", "simple_ok": 1}, 404, "route"),
        ({"prompt": "y", "simple_ok": 1}, 400, "route"),
    ],
)
def test_an_outcome_that_says_nothing_is_refused(server, route, fields, status, param):
    answer = post(server, "/v1/feedback", fields)
    assert (answer.status, answer.error["param"]) == (status, param)
    assert not route.outcomes
