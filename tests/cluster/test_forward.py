"""What is changed of a body on its way to an engine, and that all else keeps its bytes."""

import json
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.cluster.forward import Forward, Wording, body_for, understood, with_members
from sluice.core.request import Request, Rung
from sluice.executors.dialects import DIALECTS
from sluice.runtime.generation import Call, RawPrompt, SentBody, TextPrompt

members_of = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


def unread():
    raise AssertionError("nobody reads it here")


def forward(body, *, path="/v1/chat/completions", streamed=False, shows_usage=False, **request):
    raw = RawPrompt(path, SentBody(body, members_of(body), unread), streamed, shows_usage, ())
    told = Request("r-1", 0, (), **{"output_tokens_max": 9, **request})
    return Forward(told, raw, 0)


def sent(body, dialect="vllm", model="m", *, priority=False, **more):
    return body_for(forward(body, **more), Wording(DIALECTS[dialect], model, priority), "r-1")


def test_nothing_is_changed_where_nothing_must():
    body = b' {"model" : "m", "x": [ 1 ]}\n'
    assert sent(body) is body


@given(
    st.dictionaries(st.text(max_size=4), JSON, max_size=5),
    st.dictionaries(st.text(max_size=4), JSON, max_size=3),
)
def test_members_come_out_as_they_went_in_and_changes_beside_them(before, changes):
    body = json.dumps(before, ensure_ascii=False).encode()
    after = with_members(members_of(body), changes)
    expected = {**before, **changes}
    kept = {
        name: value for name, value in expected.items() if not (name in changes and value is None)
    }
    assert json.loads(after) == kept
    assert list(json.loads(after)) == list(kept)


def test_the_engines_name_takes_the_place_of_ours():
    assert sent(b'{"a":1,"model":"m","b":2}', model="w") == b'{"a":1,"model":"w","b":2}'


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_tokens": 50}, {"max_tokens": 9}),
        ({"max_completion_tokens": 50}, {"max_completion_tokens": 9}),
        (
            {"max_tokens": 5, "max_completion_tokens": 50},
            {"max_tokens": 9, "max_completion_tokens": 9},
        ),
        ({}, {"max_tokens": 9}),
    ],
)  # fmt: skip
def test_a_shortened_answer_has_a_lower_limit_by_the_name_that_was_sent(given, expected):
    body = json.dumps({"model": "m", **given}).encode()
    assert json.loads(sent(body, degraded=(Rung.SHORTEN,))) == {"model": "m", **expected}


def test_a_response_is_shortened_by_its_own_name():
    body = sent(b'{"model":"m"}', path="/v1/responses", degraded=(Rung.SHORTEN,))
    assert json.loads(body)["max_output_tokens"] == 9


def test_a_completion_is_shortened_by_the_name_that_engines_heed_there():
    body = b'{"model":"m","max_completion_tokens":50}'
    told = json.loads(sent(body, path="/v1/completions", degraded=(Rung.SHORTEN,)))
    assert told == {"model": "m", "max_completion_tokens": 9, "max_tokens": 9}


def test_usage_is_asked_for_beside_the_callers_options():
    body = b'{"model":"m","stream_options":{"vendor":1,"include_usage":false}}'
    options = json.loads(sent(body, streamed=True))["stream_options"]
    assert options == {"vendor": 1, "include_usage": True}


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/embeddings"])
def test_routes_without_stream_options_get_none(path):
    body = b'{"model":"m"}'
    assert sent(body, path=path, streamed=True) is body


def test_sglang_gets_its_id_in_the_body():
    assert json.loads(sent(b'{"model":"m"}', "sglang"))["rid"] == "r-1"
    assert json.loads(sent(b'{"model":"m","rid":"own"}', "sglang"))["rid"] == "own"


def test_an_engine_without_priorities_is_told_none():
    assert json.loads(sent(b'{"model":"m","priority":1}', "tgi", priority=True)) == {"model": "m"}


@pytest.mark.parametrize(
    ("tier", "kept"), [("default", True), ("flex", True), ("interactive", False)]
)
def test_a_class_of_ours_is_no_service_tier_of_the_engine(tier, kept):
    body = json.dumps({"model": "m", "service_tier": tier}).encode()
    assert ("service_tier" in json.loads(sent(body))) == kept


def test_members_that_cannot_be_decoded_are_the_engines_to_refuse():
    body = b'{"model":"m","service_tier":"\xff","stream_options":5}'
    assert sent(body, streamed=True).startswith(b'{"model":"m","service_tier":"\xff",')


def test_a_call_that_nobody_read_is_read_for_a_model_here():
    read_call = Call("r-1", "big", 0, TextPrompt("hi"))
    raw = replace(forward(b"{}").raw, sent=SentBody(b"{}", {}, lambda: read_call))
    call = Call("r-1", "small", 0, raw, slo_class="quick")
    coroutine = understood(call)
    with pytest.raises(StopIteration) as done:
        coroutine.send(None)
    assert done.value.value == replace(read_call, model="small", slo_class="quick", raw=raw)
