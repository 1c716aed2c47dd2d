"""What an OpenAI client does with a server, checked for what must hold whatever the model says.

Each conversation takes the address of a server (with ``/v1``), the name of a model and a key,
speaks through the official client, and asserts. The same ones run against the fake gateway and, end
to end, against a served model; nothing here depends on the text.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionChunk

QUESTION: Any = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": [{"type": "text", "text": "Name a colour of the sky."}]},
]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["blue", "grey"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"name": "set_colour", "description": "Sets a colour.", "parameters": SCHEMA}


def client_of(base_url: str, key: str, retries: int = 0) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key=key, max_retries=retries, timeout=120)


def joined(chunks: Iterable[ChatCompletionChunk], choice: int = 0) -> str:
    return "".join(
        part.delta.content or ""
        for chunk in chunks
        for part in chunk.choices
        if part.index == choice
    )


def check_chunks(chunks: Sequence[ChatCompletionChunk], choices: int = 1) -> None:
    """What holds for every chat stream."""
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    for choice in range(choices):
        parts = [p for chunk in chunks for p in chunk.choices if p.index == choice]
        assert parts[0].delta.role == "assistant"
        assert all(part.delta.role is None for part in parts[1:])
        assert [p.finish_reason is not None for p in parts] == [False] * (len(parts) - 1) + [True]


def chat_whole(base_url: str, model: str, key: str) -> None:
    with client_of(base_url, key) as client:
        answer = client.chat.completions.create(
            model=model, messages=QUESTION, max_tokens=8, temperature=0
        )
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == model
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in {"stop", "length"}
    usage = answer.usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 1 <= usage.completion_tokens <= 8
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens is not None


def chat_stream_equals_whole(base_url: str, model: str, key: str) -> None:
    with client_of(base_url, key) as client:
        options: Any = {"model": model, "messages": QUESTION, "max_tokens": 8, "temperature": 0}
        whole = client.chat.completions.create(**options)
        streamed = list(client.chat.completions.create(**options, stream=True))
    check_chunks(streamed)
    assert all(chunk.usage is None for chunk in streamed)
    assert joined(streamed) == whole.choices[0].message.content


def usage_is_the_same_streamed_and_whole(base_url: str, model: str, key: str) -> None:
    with client_of(base_url, key) as client:
        options: Any = {"model": model, "messages": QUESTION, "max_tokens": 6, "temperature": 0}
        whole = client.chat.completions.create(**options)
        streamed = list(
            client.chat.completions.create(
                **options, stream=True, stream_options={"include_usage": True}
            )
        )
    assert [chunk.usage is not None for chunk in streamed] == [False] * (len(streamed) - 1) + [True]
    last = streamed[-1]
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(last.usage, name) == getattr(whole.usage, name)


def several_choices(base_url: str, model: str, key: str) -> None:
    with client_of(base_url, key) as client:
        options: Any = {
            "model": model, "messages": QUESTION, "max_tokens": 5, "n": 2, "seed": 5,
        }  # fmt: skip
        whole = client.chat.completions.create(**options)
        streamed = list(
            client.chat.completions.create(
                **options, stream=True, stream_options={"include_usage": True}
            )
        )
    assert [choice.index for choice in whole.choices] == [0, 1]
    check_chunks(streamed, choices=2)
    usage = streamed[-1].usage
    assert usage is not None
    assert whole.usage is not None
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def stop_string_is_cut(base_url: str, model: str, key: str) -> None:
    with client_of(base_url, key) as client:
        options: Any = {"model": model, "messages": QUESTION, "max_tokens": 12, "temperature": 0}
        text = client.chat.completions.create(**options).choices[0].message.content or ""
        if len(text) < 4:
            pytest.skip("the model says too little to be stopped")
        stop = text[2:4]
        whole = client.chat.completions.create(**options, stop=[stop])
        streamed = list(client.chat.completions.create(**options, stop=stop, stream=True))
    assert whole.choices[0].message.content == text[: text.index(stop)]
    assert whole.choices[0].finish_reason == "stop"
    assert joined(streamed) == whole.choices[0].message.content


def length_is_cut(base_url: str, model: str, key: str) -> None:
    with client_of(base_url, key) as client:
        answer = client.chat.completions.create(
            model=model,
            messages=QUESTION,
            max_tokens=500,
            max_completion_tokens=2,
            extra_body={"ignore_eos": True},
        )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2


def logprobs(base_url: str, model: str, key: str) -> None:
    with client_of(base_url, key) as client:
        options: Any = {
            "model": model, "messages": QUESTION, "max_tokens": 4, "temperature": 0,
            "logprobs": True, "top_logprobs": 2,
        }  # fmt: skip
        whole = client.chat.completions.create(**options)
        streamed = list(client.chat.completions.create(**options, stream=True))
    told = whole.choices[0].logprobs
    assert told is not None
    assert told.content
    assert whole.usage is not None
    assert len(told.content) == whole.usage.completion_tokens
    for token in told.content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
    streamed_tokens = [
        token.token
        for chunk in streamed
        for part in chunk.choices
        if part.logprobs is not None
        for token in part.logprobs.content or []
    ]
    assert streamed_tokens == [token.token for token in told.content]


def json_schema(base_url: str, model: str, key: str) -> None:
    with client_of(base_url, key) as client:
        answer = client.chat.completions.create(
            model=model,
            messages=QUESTION,
            max_tokens=64,
            temperature=0,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "colour", "schema": SCHEMA, "strict": True},
            },
        )
    assert json.loads(answer.choices[0].message.content or "")["colour"] in {"blue", "grey"}


def parsed_by_the_client(base_url: str, model: str, key: str) -> None:
    """The client's own helpers put the stream together and parse it."""

    class Answer(pydantic.BaseModel):
        colour: Literal["blue", "grey"]

    with client_of(base_url, key) as client:
        with client.chat.completions.stream(
            model=model, messages=QUESTION, max_tokens=64, temperature=0, response_format=Answer
        ) as events:
            final = events.get_final_completion()
        parsed = client.responses.parse(
            model=model, input="Name a colour.", max_output_tokens=64, temperature=0,
            text_format=Answer,
        )  # fmt: skip
    message = final.choices[0].message
    assert message.parsed is not None
    assert message.parsed.colour in {"blue", "grey"}
    assert parsed.output_parsed is not None
    assert parsed.output_parsed.colour in {"blue", "grey"}


def required_tool(base_url: str, model: str, key: str) -> None:
    with client_of(base_url, key) as client:
        options: Any = {
            "model": model, "messages": QUESTION, "max_tokens": 128, "temperature": 0,
            "tools": [{"type": "function", "function": TOOL}], "tool_choice": "required",
        }  # fmt: skip
        whole = client.chat.completions.create(**options)
        streamed = list(client.chat.completions.create(**options, stream=True))
    choice = whole.choices[0]
    # A model that goes on calling is cut by its limit.
    assert choice.finish_reason in {"tool_calls", "length"}
    calls: Any = choice.message.tool_calls
    assert calls
    assert calls[0].id
    assert calls[0].function.name == "set_colour"
    arguments = calls[0].function.arguments
    assert json.loads(arguments)["colour"] in {"blue", "grey"}
    check_chunks(streamed)
    pieces = [
        call
        for chunk in streamed
        for part in chunk.choices
        for call in part.delta.tool_calls or []
        if call.index == 0
    ]
    assert [piece.id is not None for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert "".join(p.function.arguments or "" for p in pieces if p.function) == arguments


def text_completion(base_url: str, model: str, key: str) -> None:
    with client_of(base_url, key) as client:
        options: Any = {
            "model": model, "prompt": ["The sky is", "Grass is"], "max_tokens": 3,
            "temperature": 0, "n": 2, "echo": True,
        }  # fmt: skip
        whole = client.completions.create(**options)
        streamed = list(client.completions.create(**options, stream=True))
    assert whole.object == "text_completion"
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert all(c.text.startswith("The sky is") for c in whole.choices[:2])
    assert all(c.text.startswith("Grass is") for c in whole.choices[2:])
    for choice in whole.choices:
        parts = [p for chunk in streamed for p in chunk.choices if p.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [p.finish_reason is not None for p in parts].count(True) == 1


def token_completion_with_logprobs(base_url: str, model: str, key: str) -> None:
    with client_of(base_url, key) as client:
        answer = client.completions.create(
            model=model, prompt=[[1, 2, 3]], max_tokens=3, temperature=0, logprobs=2
        )
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.tokens
    assert told.token_logprobs
    assert told.top_logprobs
    assert told.text_offset
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs)
    assert told.text_offset[0] == 0
    assert all(len(top) >= 1 for top in told.top_logprobs)


def response_whole(base_url: str, model: str, key: str) -> None:
    with client_of(base_url, key) as client:
        answer = client.responses.create(
            model=model, instructions="Be brief.", input="Name a colour.", max_output_tokens=8
        )
    assert answer.status in {"completed", "incomplete"}
    assert answer.output_text
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def response_stream(base_url: str, model: str, key: str) -> None:
    with client_of(base_url, key) as client:
        turns: Any = [
            {"role": "user", "content": "Name a colour."},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Blue."}]},
            {"type": "message", "role": "user", "content": "Another?"},
        ]
        events = list(
            client.responses.create(model=model, input=turns, max_output_tokens=8, stream=True)
        )
        with client.responses.stream(model=model, input=turns, max_output_tokens=8) as parsed:
            text = "".join(e.delta for e in parsed if e.type == "response.output_text.delta")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in {"response.completed", "response.incomplete"}
    last: Any = events[-1]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == last.response.output_text
    assert text


def response_with_schema(base_url: str, model: str, key: str) -> None:
    with client_of(base_url, key) as client:
        answer = client.responses.create(
            model=model,
            input="Name a colour.",
            temperature=0,
            max_output_tokens=64,
            text={"format": {"type": "json_schema", "name": "colour", "schema": SCHEMA}},
        )
    assert json.loads(answer.output_text)["colour"] in {"blue", "grey"}


def models_are_listed(base_url: str, model: str, key: str) -> None:
    with client_of(base_url, key) as client:
        assert model in [card.id for card in client.models.list()]
        card = client.models.retrieve(model)
        assert (card.id, card.object) == (model, "model")
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("no-such-model")
    assert caught.value.code == "model_not_found"


def wrong_requests_raise_typed_errors(base_url: str, model: str, key: str) -> None:
    with client_of(base_url, key) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=model, messages=QUESTION, temperature=3)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="no-such-model", messages=QUESTION)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as stored:
            client.responses.create(model=model, input="x", previous_response_id="resp_1")
        assert stored.value.param == "previous_response_id"
        assert client.chat.completions.create(model=model, messages=QUESTION, max_tokens=2).choices


CONVERSATIONS: Sequence[Callable[[str, str, str], None]] = (
    chat_whole,
    chat_stream_equals_whole,
    usage_is_the_same_streamed_and_whole,
    several_choices,
    stop_string_is_cut,
    length_is_cut,
    logprobs,
    json_schema,
    parsed_by_the_client,
    required_tool,
    text_completion,
    token_completion_with_logprobs,
    response_whole,
    response_stream,
    response_with_schema,
    models_are_listed,
    wrong_requests_raise_typed_errors,
)
