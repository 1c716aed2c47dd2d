"""Rate-limit headers of vendors in all their forms."""

import pytest

from sluice.core.quota import Left, QuotaLeft
from sluice.executors.ratelimits import quota_left
from sluice.testing.engine_answers import ENGINE_ANSWERS
from sluice.testing.upstream import raw_of

S = 1_000_000_000
DATE = ("date", "Mon, 30 Nov 2026 16:00:00 GMT")


def openai(resource: str, limit: str, remaining: str, reset: str) -> list[tuple[str, str]]:
    return [
        (f"x-ratelimit-limit-{resource}", limit),
        (f"x-ratelimit-remaining-{resource}", remaining),
        (f"x-ratelimit-reset-{resource}", reset),
    ]


def anthropic(resource: str, limit: str, remaining: str, reset: str) -> list[tuple[str, str]]:
    return [
        (f"anthropic-ratelimit-{resource}-limit", limit),
        (f"anthropic-ratelimit-{resource}-remaining", remaining),
        (f"anthropic-ratelimit-{resource}-reset", reset),
    ]


@pytest.mark.parametrize(
    ("reset", "expected_ns"),
    [
        ("1s", S),
        ("6m0s", 360 * S),
        ("120ms", 120_000_000),
        ("19.54s", 19_540_000_000),
        ("1h2m3.5s", 3723 * S + S // 2),
        ("1d", 86_400 * S),
        ("2m59.56s", 179 * S + 560_000_000),
        ("0s", 0),
        ("12", 12 * S),
    ],
)
def test_times_of_openais_family(reset, expected_ns):
    headers = tuple(openai("requests", "500", "7", reset))
    assert quota_left(headers) == QuotaLeft(Left(500, 7, expected_ns))


@pytest.mark.parametrize(
    ("reset", "expected_s"),
    [
        ("2026-11-30T16:00:12Z", 12),
        ("2026-11-30T17:00:12+01:00", 12),
        ("2026-11-30T15:59:00Z", 0),
    ],
)
def test_instants_are_taken_against_the_answers_own_date(reset, expected_s):
    headers = (DATE, *anthropic("tokens", "40000", "1000", reset))
    assert quota_left(headers) == QuotaLeft(tokens=Left(40_000, 1000, expected_s * S))


@pytest.mark.parametrize("reset", ["99999999h", "9" * 400 + "s", "9" * 400])
def test_no_limit_takes_longer_than_a_day_to_be_full_again(reset):
    told = quota_left(tuple(openai("requests", "500", "0", reset)))
    assert told in {None, QuotaLeft(Left(500, 0, 86_400 * S))}


@pytest.mark.parametrize("count", ["9" * 5000, "-1", "1e5", "٣"])
def test_counts_that_are_none_are_not_taken_for_one(count):
    assert quota_left(tuple(openai("requests", count, "1", "1s"))) is None


def test_both_resources_are_read():
    headers = (*openai("requests", "500", "499", "120ms"), *openai("tokens", "9000", "12", "6m0s"))
    both = quota_left(headers)
    assert both == QuotaLeft(Left(500, 499, 120_000_000), Left(9000, 12, 360 * S))


def test_less_than_nothing_is_nothing():
    headers = tuple(openai("tokens", "9000", "-120", "6m0s"))
    assert quota_left(headers) == QuotaLeft(tokens=Left(9000, 0, 360 * S))


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("content-type", "application/json")],
        openai("requests", "", "7", "1s"),
        openai("requests", "500", "7", "soon"),
        openai("requests", "500", "7", ""),
        openai("requests", "burst:100", "7", "1s"),
        openai("requests", "500", "1e3", "1s"),
        openai("requests", "٣", "7", "1s"),
        openai("requests", "500", "7", "1s1"),
        anthropic("requests", "50", "7", "2026-11-30T16:00:12Z"),  # no date to take it against
        [DATE, *anthropic("requests", "50", "7", "2026-11-30T16:00:12")],  # no zone
        [DATE, *anthropic("requests", "50", "7", "tomorrow")],
    ],
)
def test_what_cannot_be_read_counts_as_not_said(headers):
    assert quota_left(tuple(headers)) is None


def test_a_vendors_refusal_says_when_its_bucket_is_full():
    raw = raw_of(ENGINE_ANSWERS["openai"].overloaded).partition(b"\r\n\r\n")[0].decode()
    pairs = (line.partition(": ") for line in raw.split("\r\n")[1:])
    headers = tuple((name, value) for name, _, value in pairs)
    assert quota_left(headers) == QuotaLeft(Left(500, 0, 19_540_000_000))
