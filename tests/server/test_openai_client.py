"""The official client against the server: every conversation, typed errors, and retries."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import openai
import pytest

from sluice.config.load import digest
from sluice.config.sections import ServerSection
from sluice.core.errors import ContextExceeded, ExecutorError, Overloaded
from sluice.core.request import EndReason
from sluice.runtime.generation import (
    Call,
    ChoiceEnded,
    Delta,
    TextLogprob,
    TokenText,
    ToolCallDelta,
)
from sluice.testing.gateway import FakeGateway, Script, Step, finished, refuse, speak, usage
from tests.server.conversations import CONVERSATIONS, QUESTION, client_of

WORDS = ["It ", "is ", "blue", " or", " grey", ", mostly", "."]


def play(call: Call) -> Script:
    """Answer as a model would that obeys the call's limits and formats."""
    if call.output_format.kind == "json_schema":
        return speak(call, '{"colour"', ': "blue"}')
    if getattr(call.prompt, "tool_choice", "") == "required":
        pieces = (
            ToolCallDelta(0, "", id="call_1", name="set_colour"),
            ToolCallDelta(0, '{"colour": '),
            ToolCallDelta(0, '"grey"}'),
        )
        deltas = [Delta(0, "", 1, tool_calls=(piece,)) for piece in pieces]
        return Script([*deltas, ChoiceEnded(0, "tool_calls"), finished(counts=usage(9, 3))])
    words = WORDS[: call.output_tokens_max]
    steps: list[Step] = [
        Delta(choice, said, 1, logprobs=tuple(told(call, said)))
        for choice in range(call.choices)
        for said in cut(words, call.stop)
    ]
    complete = call.stop or words == WORDS
    steps += [ChoiceEnded(n, "stop" if complete else "length") for n in range(call.choices)]
    return Script([*steps, finished(counts=usage(9, len(words) * call.choices, cached=4))])


def cut(words: Sequence[str], stops: Sequence[str]) -> Iterator[str]:
    """The words up to the first stop string."""
    text = "".join(words)
    end = min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))
    for word in words:
        yield word[: max(end, 0)]
        end -= len(word)


def told(call: Call, word: str) -> Iterator[TokenText]:
    if call.sampling.logprobs_top is not None:
        top = [TextLogprob(f"{word}{n}", b"x", -0.5 - n) for n in range(call.sampling.logprobs_top)]
        yield TokenText(TextLogprob(word, word.encode(), -0.5), tuple(top))


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=lambda one: one.__name__)
def test_conversation(serve_app, conversation):
    gateway = FakeGateway(play)
    server = serve_app(gateway)
    conversation(f"{server.url}/v1", "tiny", "none")


def test_conversations_cancel_nothing_that_ended(serve_app):
    gateway = FakeGateway(play)
    server = serve_app(gateway)
    with client_of(f"{server.url}/v1", "none") as client:
        client.chat.completions.create(model="tiny", messages=QUESTION)
        list(client.chat.completions.create(model="tiny", messages=QUESTION, stream=True))
    assert len(gateway.recorded.ended) == 2
    assert gateway.recorded.cancelled == []


# --------------------------------------------------------------------------------- typed errors


@pytest.mark.parametrize(
    ("error", "raised", "code"),
    [
        (ContextExceeded("3000 > 2048"), openai.BadRequestError, "context_length_exceeded"),
        (
            Overloaded(
                "full", status=429, reason="queue_full", measured=2, threshold=2, retry_after_s=3
            ),
            openai.RateLimitError,
            "queue_full",
        ),
        (
            Overloaded(
                "no", status=503, reason="not_ready", measured=0, threshold=1, retry_after_s=9
            ),
            openai.InternalServerError,
            "not_ready",
        ),
        (ExecutorError("the engine failed"), openai.InternalServerError, "engine_error"),
    ],
)
def test_refusals_raise_the_type_that_clients_expect(serve_app, error, raised, code):
    server = serve_app(FakeGateway(lambda call: refuse(error)))
    with client_of(f"{server.url}/v1", "none") as client:
        for stream in (False, True):
            with pytest.raises(raised) as caught:
                client.chat.completions.create(model="tiny", messages=QUESTION, stream=stream)
            assert caught.value.code == code
            assert caught.value.response.headers["content-type"] == "application/json"
            assert caught.value.request_id


def test_a_wrong_key_raises_authentication_error(serve_app):
    section = ServerSection(listen="127.0.0.1:0", api_key_digests=(digest("right"),))
    gateway = FakeGateway()
    server = serve_app(gateway, section)
    with (
        client_of(f"{server.url}/v1", "wrong") as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.chat.completions.create(model="tiny", messages=QUESTION)
    with client_of(f"{server.url}/v1", "right") as client:
        assert client.chat.completions.create(model="tiny", messages=QUESTION).choices
    assert gateway.recorded.calls[0].tenant == f"key-{digest('right')[:12]}"


@pytest.mark.parametrize("reason", [EndReason.FAILED, EndReason.SHUTDOWN, EndReason.EXPIRED])
def test_a_failure_after_text_is_an_error_event_without_an_end(serve_app, reason):
    steps: list[Step] = [Delta(0, "Half", 1), finished(reason, error="the replica was lost")]
    server = serve_app(FakeGateway(lambda call: Script(steps)))
    seen: list[openai.types.chat.ChatCompletionChunk] = []
    with client_of(f"{server.url}/v1", "none") as client:
        chunks = client.chat.completions.create(model="tiny", messages=QUESTION, stream=True)
        with pytest.raises(openai.APIError, match="the replica was lost"):
            seen.extend(chunks)
    assert [chunk.choices[0].finish_reason for chunk in seen] == [None, None]


@pytest.mark.parametrize(
    ("reason", "status"),
    [(EndReason.FAILED, 502), (EndReason.SHUTDOWN, 503), (EndReason.EXPIRED, 429)],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_text_has_a_status(serve_app, reason, status, stream):
    steps: list[Step] = [Delta(0, "", 1), finished(reason, error="told why")]
    server = serve_app(FakeGateway(lambda call: Script(steps)))
    with (
        client_of(f"{server.url}/v1", "none") as client,
        pytest.raises(openai.APIStatusError) as caught,
    ):
        client.chat.completions.create(model="tiny", messages=QUESTION, stream=stream)
    assert caught.value.status_code == status
    assert "told why" in caught.value.message


def test_a_failed_response_stream_ends_with_response_failed(serve_app):
    steps: list[Step] = [Delta(0, "Half", 1), finished(EndReason.FAILED, error="lost")]
    server = serve_app(FakeGateway(lambda call: Script(steps)))
    with client_of(f"{server.url}/v1", "none") as client:
        events = list(client.responses.create(model="tiny", input="x", stream=True))
    assert events[-1].type == "response.failed"
    error = events[-1].response.error
    assert error is not None
    assert error.message == "lost"


# -------------------------------------------------------------------------------------- retries


def attempts(serve_app, retry_after_s: float | None) -> FakeGateway:
    refused = Overloaded(
        "full", status=429, reason="queue_full", measured=2, threshold=2,
        retry_after_s=retry_after_s,
    )  # fmt: skip
    answers = iter([refuse(refused), refuse(refused)])
    gateway = FakeGateway(lambda call: next(answers, None) or speak(call, "At last"))
    server = serve_app(gateway)
    with client_of(f"{server.url}/v1", "none", retries=2) as client:
        client.chat.completions.create(model="tiny", messages=QUESTION)
    return gateway


def test_the_client_retries_after_the_milliseconds_it_was_told(serve_app):
    gateway = attempts(serve_app, 0.02)
    arrivals = [call.arrived_ns for call in gateway.recorded.calls]
    assert len(arrivals) == 3
    # Its own back-off would be 0.5 s or more.
    assert all(0.02e9 <= b - a < 0.4e9 for a, b in pairwise(arrivals))


def test_the_client_does_not_retry_when_told_that_it_cannot_help(serve_app):
    with pytest.raises(openai.RateLimitError) as caught:
        attempts(serve_app, None)
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert "retry-after" not in caught.value.response.headers
