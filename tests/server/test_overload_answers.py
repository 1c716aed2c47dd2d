"""What clients are told under overload: refusals, degraded answers, classes and tenants."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import openai
import pytest

from sluice.config.load import digest
from sluice.config.sections import ServerSection
from sluice.core.errors import Overloaded
from sluice.core.request import Rung
from sluice.core.tenants import Allowance, Quota
from sluice.runtime.generation import Call, ChoiceEnded, Delta, Terms
from sluice.testing.gateway import (
    FakeGateway,
    Hold,
    Script,
    Step,
    finished,
    refuse,
    speak,
    usage,
)
from sluice.testing.served import Served
from tests.server.conversations import QUESTION, client_of
from tests.server.wire_client import CHAT, MESSAGES, Answer
from tests.server.wire_client import post as send

DEGRADED = Terms("gold", (Rung.SHORTEN, Rung.SMALLER), 2, "tiny")


def post(server: Served, body: Any, path: str = CHAT, headers: Mapping[str, str] = {}) -> Answer:
    return send(server, path, body, headers)


def full(retry_after_s: float | None = 2.4, *, should_retry: bool = True) -> Overloaded:
    error = Overloaded(
        "The queue of tiny is full.", status=429, reason="queue_full", measured=65, threshold=64,
        retry_after_s=retry_after_s,
    )  # fmt: skip
    error.should_retry = should_retry
    return error


def cut_short(call: Call) -> Script:
    """Two tokens from the smaller model, as a degraded answer."""
    steps: list[Step] = [Delta(0, "Hi", 1), Delta(0, " there", 1), ChoiceEnded(0, "length")]
    return Script(
        [*steps, finished(counts=usage(7, 2))], model="small", replica="small-0", terms=DEGRADED
    )


# -------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("late", [False, True], ids=["at the door", "after a wait"])
def test_a_refusal_tells_when_to_come_back_and_what_was_measured(serve_app, stream, late):
    script = Script((), waits=(full(),)) if late else refuse(full())
    server = serve_app(FakeGateway(lambda call: script))
    with (
        client_of(f"{server.url}/v1", "none") as client,
        pytest.raises(openai.RateLimitError) as caught,
    ):
        client.chat.completions.create(model="tiny", messages=QUESTION, stream=stream)
    headers = caught.value.response.headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("3", "2400")
    assert headers["x-should-retry"] == "true"
    assert headers["x-sluice-reason"] == "queue_full; measured=65; threshold=64"
    assert isinstance(caught.value.body, dict)
    assert (caught.value.body["measured"], caught.value.body["threshold"]) == (65, 64)
    assert caught.value.code == "queue_full"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (full(0.0), ("1", "1", "true")),
        (full(0.0001), ("1", "1", "true")),
        (full(120.0, should_retry=False), ("120", "120000", "false")),
        (full(None), (None, None, "false")),
        (full(float("inf")), (None, None, "false")),
    ],
)
def test_the_wait_is_at_least_one_second_and_retrying_is_advised_where_it_can_help(
    serve_app, error, expected
):
    server = serve_app(FakeGateway(lambda call: refuse(error)))
    answer = post(server, {"model": "tiny", "messages": MESSAGES})
    names = ("retry-after", "retry-after-ms", "x-should-retry")
    assert tuple(answer.headers.get(name) for name in names) == expected


def test_the_official_client_retries_as_told_and_succeeds(serve_app):
    answers = iter([refuse(full(0.001)), None])

    def script(call: Call) -> Script:
        return next(answers) or speak(call, "Hello")

    gateway = FakeGateway(script)
    server = serve_app(gateway)
    with client_of(f"{server.url}/v1", "none").with_options(max_retries=2) as client:
        assert client.chat.completions.create(model="tiny", messages=QUESTION).choices
    assert len(gateway.recorded.calls) == 2


def test_the_official_client_does_not_retry_where_it_is_told_not_to(serve_app):
    gateway = FakeGateway(lambda call: refuse(full(120.0, should_retry=False)))
    server = serve_app(gateway)
    with (
        client_of(f"{server.url}/v1", "none").with_options(max_retries=2) as client,
        pytest.raises(openai.RateLimitError),
    ):
        client.chat.completions.create(model="tiny", messages=QUESTION)
    assert len(gateway.recorded.calls) == 1


def test_a_client_that_leaves_before_a_replica_has_its_call_cancels_it(serve_app):
    never = asyncio.Event()
    gateway = FakeGateway(lambda call: Script((), waits=(Hold(never),)))
    server = serve_app(gateway)
    with (
        client_of(f"{server.url}/v1", "none").with_options(timeout=0.2) as client,
        pytest.raises(openai.APITimeoutError),
    ):
        client.chat.completions.create(model="tiny", messages=QUESTION)
    server.eventually(lambda: gateway.recorded.cancelled == ["call0001"])


# ------------------------------------------------------------------------------ degraded answers


def test_a_degraded_answer_says_so_in_headers_and_usage(serve_app):
    server = serve_app(FakeGateway(cut_short))
    with client_of(f"{server.url}/v1", "none") as client:
        raw = client.chat.completions.with_raw_response.create(model="tiny", messages=QUESTION)
        answer = raw.parse()
        assert raw.headers["x-sluice-degraded"] == "shorten, smaller"
        assert raw.headers["x-sluice-model"] == answer.model == "small"
        assert answer.choices[0].finish_reason == "length"
        assert answer.to_dict()["service_tier"] == "gold"
        assert answer.usage is not None
        assert answer.usage.model_extra == {
            "sluice": {
                "degraded": ["shorten", "smaller"], "output_tokens_max": 2, "model_asked": "tiny",
            }
        }  # fmt: skip


def test_a_degraded_stream_says_so_before_its_first_text_and_in_its_usage(serve_app):
    server = serve_app(FakeGateway(cut_short))
    with (
        client_of(f"{server.url}/v1", "none") as client,
        client.chat.completions.with_streaming_response.create(
            model="tiny", messages=QUESTION, stream=True, stream_options={"include_usage": True}
        ) as raw,
    ):
        assert raw.headers["x-sluice-degraded"] == "shorten, smaller"
        events = [line[6:] for line in raw.iter_lines() if line.startswith("data: {")]
    chunks = [json.loads(event) for event in events]
    assert {(chunk["model"], chunk["service_tier"]) for chunk in chunks} == {("small", "gold")}
    assert chunks[-1]["usage"]["sluice"]["degraded"] == ["shorten", "smaller"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/completions", {"prompt": ["x", "y"]}),
        ("/v1/responses", {"input": "x"}),
    ],
)
def test_other_routes_disclose_degrading_too(serve_app, path, body):
    server = serve_app(FakeGateway(cut_short))
    answer = post(server, {"model": "tiny", **body}, path)
    assert answer.headers["x-sluice-degraded"] == "shorten, smaller"
    assert answer.headers["x-sluice-model"] == "small"
    told = json.loads(answer.body)
    assert told["usage"]["sluice"]["degraded"] == ["shorten", "smaller"]
    if path == "/v1/responses":
        assert told["service_tier"] == "gold"


def test_several_prompts_disclose_what_any_of_them_had_to_take(serve_app):
    def script(call: Call) -> Script:
        said = speak(call, "a")
        if call.id.endswith("-1"):
            return replace(said, model="small", terms=Terms("", (Rung.SMALLER,), None, "tiny"))
        return said

    server = serve_app(FakeGateway(script))
    answer = post(server, {"model": "tiny", "prompt": ["x", "y"]}, "/v1/completions")
    assert answer.headers["x-sluice-model"] == "tiny, small"
    assert answer.headers["x-sluice-degraded"] == "smaller"


def test_an_answer_as_asked_has_nothing_to_disclose(serve_app):
    server = serve_app(FakeGateway())
    answer = post(server, {"model": "tiny", "messages": MESSAGES})
    assert "x-sluice-degraded" not in answer.headers
    told = json.loads(answer.body)
    assert "sluice" not in told["usage"]
    assert told["service_tier"] == "default"


# ----------------------------------------------------------------------------- what callers ask


def test_the_call_holds_what_the_client_asked_for(serve_app):
    gateway = FakeGateway()
    server = serve_app(gateway)
    with client_of(f"{server.url}/v1", "none") as client:
        client.chat.completions.create(
            model="tiny",
            messages=QUESTION,
            service_tier="flex",
            extra_body={"priority": 0},
            extra_headers={"x-sluice-degrade": "never", "x-sluice-slo": "gold"},
        )
        client.responses.create(model="tiny", input="x", service_tier="flex")
    call, plain = gateway.recorded.calls
    assert (call.service_tier, call.priority, call.slo_class) == ("flex", 0, "gold")
    assert not call.may_degrade
    assert (plain.service_tier, plain.priority, plain.may_degrade) == ("flex", None, True)


@pytest.mark.parametrize("priority", [-1, 10, 1.5, "1", True])
def test_a_priority_that_is_no_tier_is_refused(serve_app, priority):
    server = serve_app(FakeGateway())
    answer = post(server, {"model": "tiny", "messages": MESSAGES, "priority": priority})
    assert (answer.status, answer.error["param"]) == (400, "priority")


@pytest.mark.parametrize("budget_ms", ["0", "-20", "1500"])
def test_a_budget_is_handed_on_even_where_it_is_used_up(serve_app, budget_ms):
    gateway = FakeGateway()
    server = serve_app(gateway)
    body = {"model": "tiny", "messages": MESSAGES}
    assert post(server, body, headers={"x-sluice-deadline-ms": budget_ms}).status == 200
    (call,) = gateway.recorded.calls
    assert call.deadline_ns is not None
    assert call.deadline_ns - call.arrived_ns == int(budget_ms) * 1_000_000


def test_a_client_that_sends_the_same_again_is_recognised(serve_app):
    gateway = FakeGateway()
    server = serve_app(gateway)
    long = "word " * 60_000
    for prompt in ("a", "a", "b", long, long, long[:-5] + "ward ", ["a", "a"]):
        assert post(server, {"model": "tiny", "prompt": prompt}, "/v1/completions").status == 200
    one, again, other, first, second, third, *pair = (
        call.likeness for call in gateway.recorded.calls
    )
    assert one == again
    assert first == second
    assert len({one, other, first, third, *pair, 0}) == 7


# --------------------------------------------------------------------------------------- tenants


def tenants_section(**more) -> ServerSection:
    return ServerSection(
        listen="127.0.0.1:0",
        tenant_key_digests=((digest("key-a"), "acme"), (digest("key-b"), "acme")),
        **more,
    )


def served_tenant(
    server: Served, gateway: FakeGateway, key: str | None, named: str | None = None
) -> str:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    if named is not None:
        headers["x-sluice-tenant"] = named
    answer = post(server, {"model": "tiny", "messages": MESSAGES}, headers=headers)
    assert answer.status == 200, answer.body
    return gateway.recorded.calls[-1].tenant


def test_a_tenant_is_known_by_each_of_its_keys(serve_app):
    gateway = FakeGateway()
    server = serve_app(gateway, tenants_section(api_key_digests=(digest("plain"),)))
    assert served_tenant(server, gateway, "key-a") == "acme"
    assert served_tenant(server, gateway, "key-b") == "acme"
    assert served_tenant(server, gateway, "plain") == f"key-{digest('plain')[:12]}"
    assert served_tenant(server, gateway, "plain", "acme") == f"key-{digest('plain')[:12]}"


def test_keys_of_tenants_alone_close_the_server_to_others(serve_app):
    server = serve_app(FakeGateway(), tenants_section())
    body = {"model": "tiny", "messages": MESSAGES}
    assert post(server, body).status == 401
    assert post(server, body, headers={"authorization": "Bearer other"}).status == 401


def test_the_header_names_the_tenant_only_where_it_is_trusted(serve_app):
    gateway = FakeGateway()
    section = tenants_section(api_key_digests=(digest("proxy"),), trust_tenant_header=True)
    server = serve_app(gateway, section)
    assert served_tenant(server, gateway, "proxy", "team/7") == "team/7"
    assert served_tenant(server, gateway, "key-a", "team/7") == "acme"
    answer = post(
        server,
        {"model": "tiny", "messages": MESSAGES},
        headers={"authorization": "Bearer proxy", "x-sluice-tenant": "a b"},
    )
    assert (answer.status, answer.error["param"]) == (400, "x-sluice-tenant")


def test_the_header_needs_no_key_where_none_is_set(serve_app):
    gateway = FakeGateway()
    trusting = serve_app(gateway, ServerSection(listen="127.0.0.1:0", trust_tenant_header=True))
    assert served_tenant(trusting, gateway, None, "team-7") == "team-7"
    plain = serve_app(gateway, ServerSection(listen="127.0.0.1:0"))
    assert served_tenant(plain, gateway, None, "team-7") == ""


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tenant_with_limits_is_told_what_is_left(serve_app, refused, stream):
    gateway = FakeGateway(lambda call: refuse(full()) if refused else speak(call, "Hello"))
    requests = Quota(600, 599, 100_000_001)
    gateway.allowances["acme"] = Allowance(requests, Quota(20_000, 0, 60_000_000_000))
    server = serve_app(gateway, tenants_section())
    body = {"model": "tiny", "messages": MESSAGES, "stream": stream}
    answer = post(server, body, headers={"authorization": "Bearer key-a"})
    assert answer.status == (429 if refused else 200)
    told = {k: v for k, v in answer.headers.items() if k.startswith("x-ratelimit-")}
    assert told == {
        "x-ratelimit-limit-requests": "600",
        "x-ratelimit-remaining-requests": "599",
        "x-ratelimit-reset-requests": "0.101s",
        "x-ratelimit-limit-tokens": "20000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "60s",
    }


def test_limits_that_do_not_exist_are_not_told(serve_app):
    gateway = FakeGateway()
    gateway.allowances["acme"] = Allowance(Quota(600, 599, 0), None)
    server = serve_app(gateway, tenants_section(api_key_digests=(digest("plain"),)))
    body = {"model": "tiny", "messages": MESSAGES}
    some = post(server, body, headers={"authorization": "Bearer key-a"}).headers
    none = post(server, body, headers={"authorization": "Bearer plain"}).headers
    assert "x-ratelimit-limit-requests" in some
    assert not [name for name in some if name.endswith("-tokens")]
    assert not [name for name in none if name.startswith("x-ratelimit-")]
