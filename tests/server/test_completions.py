"""Text completions: several prompts, echo, old log-probabilities, and joined calls."""

import asyncio

import pytest
from openai.types import Completion

from sluice.core.errors import Overloaded
from sluice.core.request import EndReason
from sluice.runtime.generation import (
    ChoiceEnded,
    Delta,
    TextLogprob,
    TextPrompt,
    TokenPrompt,
    TokenText,
)
from sluice.testing.gateway import FakeGateway, Hold, Script, Step, finished, refuse, speak, usage
from tests.server.wire_client import Answer, post


@pytest.fixture(scope="module")
def gateway():
    return FakeGateway()


@pytest.fixture(scope="module")
def server(serve_module, gateway):
    return serve_module(gateway)


@pytest.fixture(autouse=True)
def fresh(gateway):
    gateway.recorded.calls.clear()
    gateway.recorded.cancelled.clear()
    gateway.script = lambda call: speak(call, " a", " b")


def complete(server, **fields) -> Answer:
    return post(server, "/v1/completions", {"model": "tiny", "prompt": "x", **fields})


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("one", [TextPrompt("one")]),
        (["one"], [TextPrompt("one")]),
        (["one", "two"], [TextPrompt("one"), TextPrompt("two")]),
        ([1, 2], [TokenPrompt((1, 2))]),
        ([[1, 2], [3]], [TokenPrompt((1, 2)), TokenPrompt((3,))]),
        (["one", [3]], [TextPrompt("one"), TokenPrompt((3,))]),
    ],
)
def test_each_prompt_is_a_call(server, gateway, prompt, asked):
    answer = complete(server, prompt=prompt, n=2).json()
    assert [call.prompt for call in gateway.recorded.calls] == asked
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(asked)))
    assert answer["usage"]["prompt_tokens"] == 7 * len(asked)
    assert len({call.id for call in gateway.recorded.calls}) == len(asked)


def test_without_max_tokens_sixteen_are_asked_for(server, gateway):
    complete(server)
    assert gateway.recorded.calls[0].output_tokens_max == 16


def test_choices_are_numbered_by_prompt_then_choice(server, gateway):
    def script(call):
        deltas = [Delta(n, f"{call.prompt.text}{n}", 1) for n in range(call.choices)]
        ends = [ChoiceEnded(n, "length" if n else "stop") for n in range(call.choices)]
        return Script([*deltas, *ends, finished(EndReason.LENGTH, usage(1, 2))])

    gateway.script = script
    asked = {"prompt": ["p", "q"], "n": 2}
    choices = complete(server, **asked).json()["choices"]
    assert [choice["text"] for choice in choices] == ["p0", "p1", "q0", "q1"]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "length"] * 2
    streamed = complete(server, **asked, stream=True, stream_options={"include_usage": True})
    *chunks, last, done = streamed.events()
    assert done == "[DONE]"
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 4)
    for index, text in enumerate(["p0", "p1", "q0", "q1"]):
        parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == text
        assert [part["finish_reason"] is None for part in parts] == [True, False]
    for chunk in [*chunks, last]:
        Completion.model_validate(chunk | {"choices": []}, strict=True)


def test_a_refusal_of_one_prompt_cancels_the_others(server, gateway):
    refused = Overloaded(
        "full", status=429, reason="queue_full", measured=1, threshold=1, retry_after_s=1
    )
    gateway.script = lambda call: refuse(refused) if call.prompt.text == "c" else speak(call, "x")
    assert complete(server, prompt=["a", "b", "c", "d"]).status == 429
    assert len(gateway.recorded.calls) == 3
    assert sorted(gateway.recorded.cancelled) == [call.id for call in gateway.recorded.calls[:2]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_of_one_prompt_ends_all(server, gateway, stream):
    never = asyncio.Event()

    def script(call):
        if call.prompt.text == "bad":
            return Script([finished(EndReason.FAILED, error="lost")])
        return Script([Hold(never)])

    gateway.script = script
    answer = complete(server, prompt=["good", "bad"], stream=stream)
    assert (answer.status, answer.error["message"]) == (502, "lost")
    assert gateway.recorded.cancelled == [gateway.recorded.calls[0].id]


def test_an_error_from_one_prompt_is_answered(server, gateway):
    gateway.script = lambda call: (
        Script([KeyError("x")]) if call.prompt.text == "b" else speak(call)
    )
    assert complete(server, prompt=["a", "b"]).status == 500
    assert complete(server, prompt=["a", "c"]).status == 200


def test_echo_puts_the_prompt_before_each_choice(server, gateway):
    gateway.script = lambda call: Script([Delta(0, "!", 1), ChoiceEnded(0, "stop"), finished()])
    assert complete(server, prompt="Hi", echo=True).json()["choices"][0]["text"] == "Hi!"
    texts = [
        e["choices"][0]["text"]
        for e in complete(server, prompt="Hi", echo=True, stream=True).events()[:-1]
    ]
    assert texts == ["Hi!", ""]
    gateway.script = lambda call: Script([ChoiceEnded(0, "stop"), finished()])
    assert (
        complete(server, prompt="Hi", echo=True, stream=True).events()[0]["choices"][0]["text"]
        == "Hi"
    )


def test_logprobs_have_the_old_shape(server, gateway):
    def token(text: str) -> TokenText:
        top = (TextLogprob("b", b"b", -0.5), TextLogprob("c", b"c", -2.0))
        return TokenText(TextLogprob(text, text.encode(), -0.25), top)

    steps: list[Step] = [
        Delta(0, "ab", 2, logprobs=(token("a"), token("b"))),
        Delta(0, "cd", 1, logprobs=(token("cd"),)),
        ChoiceEnded(0, "stop"),
        finished(),
    ]
    gateway.script = lambda call: Script(steps)
    told = complete(server, logprobs=2).json()["choices"][0]["logprobs"]
    assert told == {
        "tokens": ["a", "b", "cd"],
        "token_logprobs": [-0.25, -0.25, -0.25],
        "top_logprobs": [{"a": -0.25, "b": -0.5, "c": -2.0}, {"b": -0.5, "c": -2.0},
                         {"cd": -0.25, "b": -0.5, "c": -2.0}],
        "text_offset": [0, 1, 2],
    }  # fmt: skip
    streamed = complete(server, logprobs=2, stream=True).events()
    parts = [chunk["choices"][0]["logprobs"] for chunk in streamed[:-1]]
    assert [part["text_offset"] for part in parts if part] == [[0, 1], [2]]
    assert gateway.recorded.calls[0].sampling.logprobs_top == 2
