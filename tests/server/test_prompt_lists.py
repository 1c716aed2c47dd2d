"""Requests of several prompts: all are served together, or none, and none at a charge."""

import hashlib

import pytest

from sluice.config.sections import ServerSection, SloSection, TenantSection
from sluice.core.limits import TenantLimits
from tests.server.test_overload_page import KEY, SECTION, Busy, Start, complete, start

__all__ = ["start"]
BOTH = ServerSection(
    listen="127.0.0.1:0",
    tenant_key_digests=(
        *SECTION.tenant_key_digests,
        (hashlib.sha256(b"other-key").hexdigest(), "other"),
    ),
)
PROMPTS = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_more_prompts_than_places_can_never_be_served(start: Start):
    server, rig = start(slots=1, pool={"queue_places_max": 1})
    answer = complete(server, prompt=PROMPTS)
    assert (answer.status, answer.error["code"]) == (400, "too_many_prompts")
    assert answer.error["param"] == "prompt"
    assert "they take 3 places, and tiny has 2" in answer.error["message"]
    assert "retry-after" not in answer.headers
    assert rig.value("refusals_total", "tiny", "too_many_prompts") == 1
    assert complete(server, prompt=PROMPTS[:2]).status == 200


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"concurrency": 2}, "this account may have 2 at the same time"),
        ({"requests_per_minute": 2}, "this account may send 2 in a minute"),
        ({"tokens_per_minute": 38}, "they reserve 39 tokens, and this account may use 38 in a"),
    ],
)
def test_more_prompts_than_a_tenant_may_ever_have_are_refused_as_such(start: Start, limits, words):
    server, _ = start(
        SECTION,
        tenants=(TenantLimits("acme", **limits),),
        sections={"acme": TenantSection(**limits)},
    )
    answer = complete(server, KEY, prompt=PROMPTS)
    assert (answer.status, answer.error["code"]) == (400, "too_many_prompts")
    assert words in answer.error["message"]
    assert complete(server, KEY, prompt=PROMPTS[:2]).status == 200


@pytest.mark.parametrize("slots", [1, 2], ids=["the first waits", "the first starts"])
def test_a_refused_list_uses_up_nothing_of_its_tenant(start: Start, slots):
    server, rig = start(
        BOTH,
        slots=slots,
        pool={"queue_places_max": 2 - slots},
        tenants=(TenantLimits("acme", requests_per_minute=60, tokens_per_minute=6000),),
    )
    with Busy(server, key="other-key"):
        answer = complete(server, KEY, prompt=PROMPTS[:2])
        assert (answer.status, answer.error["code"]) == (429, "queue_full")
        assert answer.headers["x-ratelimit-remaining-requests"] == "60"
        assert answer.headers["x-ratelimit-remaining-tokens"] == "6000"
    server.eventually(lambda: rig.value("requests_in_flight", "tiny") == 0)


def test_a_list_that_is_served_counts_every_prompt(start: Start):
    server, _ = start(SECTION, slots=4, tenants=(TenantLimits("acme", requests_per_minute=60),))
    assert complete(server, KEY, prompt=PROMPTS).status == 200
    answer = complete(server, KEY)
    assert int(answer.headers["x-ratelimit-remaining-requests"]) == 60 - len(PROMPTS) - 1


def test_answers_that_may_be_shortened_count_as_such(start: Start):
    server, _ = start(
        SECTION,
        slots=4,
        slo={"short": SloSection(overload=("shorten", "queue"), shorten_tokens=2)},
        tenants=(TenantLimits("acme", tokens_per_minute=38),),
        sections={"acme": TenantSection(slo="short", tokens_per_minute=38)},
    )
    # What is refused here may be served at another time, when some answers are shortened.
    answer = complete(server, KEY, prompt=PROMPTS)
    assert (answer.status, answer.error["code"]) == (429, "tokens_per_minute")
    answer = complete(server, {**KEY, "x-sluice-degrade": "never"}, prompt=PROMPTS)
    assert (answer.status, answer.error["code"]) == (400, "too_many_prompts")
