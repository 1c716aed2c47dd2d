"""The official client's conversations with a real model."""

import openai
import pytest

from tests.e2e.processes import ServerProcess
from tests.server.conversations import CONVERSATIONS, QUESTION, SCHEMA, client_of

pytestmark = pytest.mark.model


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=lambda each: each.__name__)
def test_a_conversation_with_the_official_client(server: ServerProcess, conversation):
    conversation(f"{server.url}/v1", "exact", "none")


def test_the_client_retries_a_refusal_until_there_is_room(server: ServerProcess):
    """Six at once on three places: the refused ones come back after the time they are told."""
    with client_of(f"{server.url}/v1", "none", retries=8) as client:
        streams = [
            client.chat.completions.with_raw_response.create(
                model="bounded", messages=QUESTION, max_tokens=4
            )
            for _ in range(3)
        ]
    assert all(answer.parse().choices for answer in streams)


def test_a_schema_that_cannot_be_followed_is_refused_with_its_parameter(server: ServerProcess):
    with client_of(f"{server.url}/v1", "none") as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model="exact",
                messages=QUESTION,
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "no such type"}},
                },
            )
        assert caught.value.param == "response_format"
        answer = client.chat.completions.create(
            model="exact",
            messages=QUESTION,
            max_tokens=64,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        )
    assert answer.choices[0].finish_reason == "stop"


def test_end_tokens_do_not_come_before_the_least_number_of_tokens(server: ServerProcess):
    with client_of(f"{server.url}/v1", "none") as client:
        answer = client.chat.completions.create(
            model="exact",
            messages=[{"role": "user", "content": "Say hi."}],
            max_tokens=60,
            temperature=0,
            extra_body={"min_tokens": 60},
        )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 60
    assert answer.choices[0].finish_reason == "length"
