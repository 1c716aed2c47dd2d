"""D-24: what the next hop is told, and ids that gateway and exporter find alike."""

import pytest

from sluice.telemetry.trace_context import (
    Parent,
    attempt_name,
    headers_for,
    is_in_share,
    parent_of,
    span_id_of,
    trace_id_of,
)

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GIVEN = f"00-{TRACE}-{SPAN}-01"
CALL = "0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        GIVEN.upper(),
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
    ],
)
def test_what_is_no_traceparent_counts_as_none(text):
    assert parent_of(text) is None


def test_a_traceparent_is_read_with_its_flag():
    assert parent_of(GIVEN) == Parent(int(TRACE, 16), int(SPAN, 16), sampled=True)
    unsampled = parent_of(f"00-{TRACE}-{SPAN}-00")
    assert unsampled is not None
    assert not unsampled.sampled
    assert parent_of(f"01-{TRACE}-{SPAN}-03-whatever") is not None, "a later version may say more"


def test_d24_an_engine_is_the_child_of_the_attempt_and_never_of_the_client():
    headers = (("traceparent", GIVEN), ("tracestate", "vendor=1"), ("x-other", "y"))
    first, second = (dict(headers_for(CALL, headers, number, 0.0)) for number in (1, 2))
    ids = []
    for number, made in ((1, first), (2, second)):
        version, trace, span, flags = made["traceparent"].split("-")
        assert (version, trace, flags) == ("00", TRACE, "01")
        assert int(span, 16) == span_id_of(CALL, attempt_name(number))
        assert made["tracestate"] == "vendor=1"
        assert made["x-other"] == "y"
        ids.append(span)
    assert len({*ids, SPAN}) == 3


def test_a_trace_that_nobody_began_has_the_id_of_the_call():
    (made,) = headers_for(CALL, (("tracestate", "of=nothing"),), 1, 1.0)
    assert made[0] == "traceparent"
    assert made[1].split("-")[1] == CALL
    assert made[1].endswith("-01")
    assert headers_for(CALL, (), 1, 0.0)[0][1].endswith("-00")
    assert trace_id_of("made-up", None) == trace_id_of("made-up", None) != 0


def test_a_share_is_a_share_of_traces():
    kept = sum(is_in_share(trace_id_of(f"call{n}", None), 0.1) for n in range(20_000))
    assert 1850 <= kept <= 2150
    assert is_in_share(0, 0.01)
    assert not is_in_share(0, 0.0)
    assert is_in_share(2**128 - 1, 1.0)
