"""Calls in numbers, for engines that tokenise themselves."""

import asyncio
import json

import msgspec
import pytest

from sluice.cluster.classes import ServiceClasses
from sluice.cluster.remote_model import BLOCK_TOKENS, CONTEXT_TOKENS_UNKNOWN, RemoteModel
from sluice.core.events import ReplicaLimits
from sluice.runtime.generation import Call, ModelCard, RawPrompt, SentBody

members_of = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def model(context=4096, sequences=8):
    made = RemoteModel(ModelCard("big", 0, context), ServiceClasses({}))
    made.limits = ReplicaLimits(context, BLOCK_TOKENS, sequences * 16, sequences)
    return made


def unread():
    raise AssertionError("nobody reads it here")


def submitted(of, fields, *, path="/v1/chat/completions", **call):
    body = json.dumps(fields).encode()
    raw = RawPrompt(path, SentBody(body, members_of(body), unread), False, False, ())
    return asyncio.run(of.submit(Call("r", "big", 0, raw, **call)))


def messages(text):
    return {"messages": [{"role": "user", "content": text}]}


def test_tokens_are_estimated_from_bytes_and_learned_from_usage():
    of = model()
    before = submitted(of, messages("x" * 4000))
    assert 900 < before.request.prompt_tokens < 1100
    for _ in range(100):
        of.learn(before.text_bytes, 500)
    assert 450 < submitted(of, messages("x" * 4000)).request.prompt_tokens < 550


def test_what_a_call_would_be_is_what_it_becomes():
    of, body = model(), json.dumps(messages("word " * 2000)).encode()
    raw = RawPrompt(
        "/v1/chat/completions", SentBody(body, members_of(body), unread), False, False, ()
    )
    call = Call("r", "big", 0, raw)
    assert of.request_of(call) == asyncio.run(of.submit(call)).request
    assert len(of.request_of(call).prefixes) > 5


def picture(url):
    parts = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": url}]
    return {"messages": [{"role": "user", "content": parts}]}


BASE64 = "iVBORw0KGgo/" * 80_000
SOUND = {"type": "input_audio", "input_audio": {"data": BASE64, "format": "wav"}}
MEDIA = {
    "a picture": picture({"url": f"data:image/png;base64,{BASE64}"}),
    "escaped slashes": picture({"url": "data:image\\/png;base64," + "iVBOR\\/w0" * 99_999}),
    "sound": {"messages": [{"role": "user", "content": [SOUND]}]},
}


@pytest.mark.parametrize("name", MEDIA)
def test_a_picture_counts_by_no_means_as_text(name):
    asked = submitted(model(10**6), MEDIA[name])
    assert 900 < asked.request.prompt_tokens < 1300


def test_text_that_quotes_a_picture_counts_as_text():
    quoted = json.dumps({"url": f"data:image/png;base64,{BASE64}"})
    asked = submitted(model(10**6), messages(f"What is this? {quoted}"))
    assert asked.request.prompt_tokens > 200_000


@pytest.mark.parametrize("told", [12, 10**9])
def test_one_answer_moves_the_estimates_a_little_whatever_it_tells(told):
    of = model(10**6)
    for _ in range(200):
        of.learn(4000, 1000)
    of.learn(10**6, told)
    estimate = submitted(of, messages("x" * 4000)).request.prompt_tokens
    assert 900 < estimate < 1300


def test_a_picture_teaches_nothing_about_text():
    of = model(10**6)
    asked = submitted(of, MEDIA["a picture"])
    for _ in range(100):
        of.learn(asked.text_bytes, 900)
    assert 900 < submitted(of, messages("x" * 4000)).request.prompt_tokens < 1100


def test_where_the_context_is_unknown_one_prompt_counts_for_no_more_than_the_longest_in_use():
    of = RemoteModel(ModelCard("big", 0, CONTEXT_TOKENS_UNKNOWN), ServiceClasses({}))
    assert submitted(of, messages("x" * 4_000_000)).request.prompt_tokens == 262_144


def test_an_estimate_refuses_nothing():
    """The engine knows; here it only counts as one that fills the context."""
    request = submitted(model(context=100), messages("x" * 40_000), output_tokens_max=50).request
    assert request.prompt_tokens + request.output_tokens_max <= 100
    assert request.output_tokens_max == 1


def test_without_a_limit_some_output_is_counted_on_and_not_the_whole_context():
    assert submitted(model(context=100_000), messages("x")).request.output_tokens_max == 4096


def test_what_generates_nothing_counts_no_output():
    request = submitted(model(), {"input": "x"}, path="/v1/embeddings").request
    assert request.output_tokens_max == 1


def test_more_choices_than_run_together_are_no_reason_to_refuse():
    assert submitted(model(sequences=2), messages("x"), choices=5).request.choices == 2


def test_prompts_that_begin_alike_have_the_same_first_blocks():
    of = model()
    system = {"role": "system", "content": "rule " * 1000}
    first = submitted(of, {"messages": [system, {"role": "user", "content": "a"}]}).request.prefixes
    second = submitted(
        of, {"messages": [system, {"role": "user", "content": "b"}]}
    ).request.prefixes
    other = submitted(of, messages("else " * 1000)).request.prefixes
    assert first[:4] == second[:4]
    assert first[0] != other[0]


def test_the_same_text_on_another_route_is_another_prompt():
    of, fields = model(), messages("x" * 3000)
    chat = submitted(of, fields).request.prefixes
    assert chat[0] != submitted(of, fields, path="/tokenize").request.prefixes[0]


@pytest.mark.parametrize("size", [400_000])
def test_only_the_beginning_of_a_long_prompt_is_hashed(size):
    assert len(submitted(model(10**6), messages("x" * size)).request.prefixes) == 64


def test_no_more_of_a_prompt_counts_as_cached_than_it_has_tokens():
    request = submitted(model(), messages("x" * 400_000)).request
    assert len(request.prefixes) * BLOCK_TOKENS <= request.prompt_tokens


def test_the_context_is_the_one_that_replicas_tell():
    of = RemoteModel(ModelCard("big", 0, 1000), ServiceClasses({}))
    assert of.card.context_tokens_max == 1000
    of.limits = ReplicaLimits(200, BLOCK_TOKENS, 4, 1)
    assert of.card.context_tokens_max == 200
    assert of.holds(200)
    assert not of.holds(201)
