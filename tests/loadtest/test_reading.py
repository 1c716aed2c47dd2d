"""Times and tokens of chunks, from given receipts."""

import pytest

from sluice.loadtest.connection import Call
from sluice.loadtest.measures import per_token, percentiles, weighted_percentiles
from sluice.loadtest.reading import reason_in
from sluice.loadtest.trial import Ending
from sluice.testing.engine_answers import DONE, delta, event
from tests.loadtest.rig import asks_at

MS = 1_000_000
HEAD = [(b"Content-Type", b"text/event-stream")]


def outcome_of(receipts):
    """The outcome of events with their times in ms."""
    (ask,) = asks_at([0.0])
    call = Call(ask, 0, b"", 0)
    call.sent_ns = 0
    call.head(1, 200, HEAD)
    for at_ms, piece in receipts:
        call.body(round(at_ms * MS), piece)
    call.complete(round(receipts[-1][0] * MS))
    return call.outcome(0)


def usage(tokens):
    return {"prompt_tokens": 9, "completion_tokens": tokens}


def d28_times():
    at_ms = 200.0
    yield at_ms
    for number in range(1, 26):
        at_ms += 1500.0 if number == 13 else 40.0
        yield at_ms


@pytest.mark.parametrize("counted", ["in the end", "chunk by chunk"])
def test_d28_several_tokens_per_chunk(counted):
    receipts = []
    for number, at_ms in enumerate(d28_times()):
        more = {"usage": usage(1 + 4 * number)} if counted == "chunk by chunk" else {}
        receipts.append((at_ms, delta({"content": "x"}, **more)))
    end_ms = receipts[-1][0]
    receipts.append((end_ms, delta({}, "stop")))
    receipts.append((end_ms, event({"choices": [], "usage": usage(101)})))
    receipts.append((end_ms, DONE))
    one = outcome_of(receipts)
    assert one.tpot_s == pytest.approx(2.46 / 100, abs=1e-6)
    tokens = weighted_percentiles(per_token([one]))
    assert tokens["p50"] == pytest.approx(0.010)
    assert tokens["p99"] == pytest.approx(0.375)
    chunks = percentiles(one.gaps_s)
    assert chunks["p50"] == pytest.approx(0.040)
    assert chunks["max"] == pytest.approx(1.5)


def test_d28_gaps_of_two_choices_are_measured_apart_and_both_are_counted():
    receipts = [
        (100 + 20 * number, delta({"content": "x"}, index=number % 2)) for number in range(20)
    ]
    end_ms = receipts[-1][0]
    receipts += [(end_ms, delta({}, "stop", index=index)) for index in (0, 1)]
    receipts += [(end_ms, event({"choices": [], "usage": usage(20)})), (end_ms, DONE)]
    one = outcome_of(receipts)
    assert list(one.gaps_s) == pytest.approx([0.040] * 18)
    assert (one.output_tokens, one.chunks, len(one.gaps_s)) == (20, 20, 18)
    assert sum(one.gap_tokens) == pytest.approx(18)


def test_events_that_came_in_one_piece_have_one_time():
    pieces = delta({"content": "a"}) + delta({"content": "b"}) + delta({}, "stop") + DONE
    one = outcome_of([(50, pieces)])
    assert list(one.gaps_s) == [0.0]
    assert one.first_s == one.last_s == one.end_s


def test_events_cut_anywhere_are_read_the_same():
    raw = b"".join([delta({"content": "a"}), delta({"content": "b"}, "stop"), DONE])
    whole = outcome_of([(50, raw)])
    for at in range(1, len(raw)):
        parted = outcome_of([(50, raw[:at]), (60, raw[at:])])
        assert (parted.chunks, parted.ending, parted.finish) == (2, Ending.DONE, "stop")
        assert whole.chunks == 2


def test_a_stream_that_ends_with_its_finish_needs_no_terminator():
    one = outcome_of([(50, delta({"content": "a"})), (60, delta({}, "stop"))])
    assert one.done
    unfinished = outcome_of([(50, delta({"content": "a"})), (60, delta({"content": "b"}))])
    assert unfinished.ending is Ending.TRUNCATED


def test_a_choice_without_finish_is_truncated_though_another_has_one():
    receipts = [(50, delta({"content": "a"}, index=index)) for index in (0, 1)]
    one = outcome_of([*receipts, (60, delta({}, "stop", index=0))])
    assert one.ending is Ending.TRUNCATED


def test_tool_calls_are_output():
    call = [{"index": 0, "function": {"name": "f", "arguments": "{"}}]
    one = outcome_of([(50, delta({"tool_calls": call})), (60, delta({}, "tool_calls")), (60, DONE)])
    assert (one.chunks, one.first_s) == (1, pytest.approx(0.05))


@pytest.mark.parametrize(
    "hostile",
    [
        b'{"usage": {"prompt_tokens": -5, "completion_tokens": 1}}',
        b'{"usage": {"prompt_tokens": 1, "completion_tokens": 18446744073709551615}}',
        b'{"x": ' + b"[" * 100_000,
        b'{"error": ' + b"[" * 100_000,
    ],
    ids=lambda hostile: repr(hostile[:40]),
)
def test_what_no_server_can_mean_ends_the_answer_as_garbage(hostile):
    found = outcome_of(
        [(10, delta({"content": "a"})), (20, b"data: " + hostile + b"\n\n"), (30, DONE)]
    )
    assert found.ending is Ending.GARBAGE
    assert found.output_tokens is None


def test_an_error_body_of_any_depth_has_a_reason():
    assert reason_in(b"[" * 100_000).startswith("[[[")
