"""Faults of a simulated fleet as text."""

import pytest

from sluice.planner.faults import Lost, Slow, Stall, fault_named
from sluice.planner.names import CannotPlan

S = 1_000_000_000
IDS = ("m-0", "m-1")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("replica-lost@60s", Lost(60 * S, "m-0")),
        ("replica-gone@1m:replica=m-1", Lost(60 * S, "m-1", permanent=True)),
        ("replica-slow@500ms:x=3,for=30s", Slow(S // 2, "m-0", 3.0, 30 * S)),
        ("replica-stall@2s:for=1s,replica=m-1", Stall(2 * S, "m-1", S)),
    ],
)
def test_a_text_names_a_fault(text, fault):
    assert fault_named(text, IDS) == fault


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("replica-lsot@60s", "did you mean replica-lost"),
        ("replica-lost", "has no time"),
        ("replica-lost@60", "has no unit"),
        ("replica-lost@60s:replica=m-7", "replicas are m-0, m-1"),
        ("replica-lost@60s:for=1s", "takes replica, not 'for=1s'"),
        ("replica-slow@60s:x=3", "needs a time"),
        ("replica-slow@60s:x=0,for=1s", "x of replica-slow must be"),
        ("replica-stall@60s:for=ever", "for of replica-stall"),
    ],
)
def test_a_text_that_names_none_is_refused_with_what_to_write(text, words):
    with pytest.raises(CannotPlan, match=words):
        fault_named(text, IDS)
