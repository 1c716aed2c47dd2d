"""Events are found wherever the bytes are cut, and nothing is held without bound."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.executors.answers import StreamReader
from sluice.executors.dialects import VLLM
from sluice.executors.event_stream import EventCutter, EventTooLong, payload_of
from sluice.executors.faults import Source
from sluice.executors.stream import Chunk, UsageEvents
from sluice.testing.engine_answers import DONE, ENGINE_ANSWERS, delta, event

EVENTS_MAX = 10_000
LINE_ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
LINES = st.sampled_from([b"data: a", b"data:b", b"data: \xc3\xa4", b": c", b"event: d", b"id"])


@st.composite
def streams(draw):
    """Events with mixed line ends; a CR before an LF of another line would be one line end."""
    text = b""
    for _ in range(draw(st.integers(1, 4))):
        end = draw(LINE_ENDS)
        lines = draw(st.lists(LINES, min_size=1, max_size=3))
        text += end.join(lines) + end + end
    return text


def cut_at(text, positions):
    edges = [0, *sorted({p % (len(text) + 1) for p in positions}), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def events_of(pieces):
    cutter = EventCutter(EVENTS_MAX)
    events = [event for piece in pieces for event in cutter.feed(piece)]
    return events, cutter.rest()


@given(streams(), st.lists(st.integers(0, 1000), max_size=8))
def test_the_bytes_of_the_events_are_the_bytes_that_came_wherever_they_are_cut(text, positions):
    events, rest = events_of(cut_at(text, positions))
    at_once, rest_at_once = events_of([text])
    assert b"".join(events) + rest == text
    assert [payload_of(event) for event in events] == [payload_of(event) for event in at_once]
    assert rest == rest_at_once


@pytest.mark.parametrize("name", ENGINE_ANSWERS)
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_a_stream_means_the_same_cut_at_any_byte(name, line_end):
    whole = b"".join(ENGINE_ANSWERS[name].events(["ä", "b"])).replace(b"\n", line_end)
    for at in range(len(whole) + 1):
        reader = StreamReader(Source("up", VLLM), UsageEvents.AS_SENT, EVENTS_MAX)
        out = [*reader.feed(whole[:at]), *reader.feed(whole[at:])]
        chunks = [chunk for chunk in out if isinstance(chunk, Chunk)]
        assert chunks == out
        assert b"".join(chunk.raw for chunk in chunks) == whole
        assert sum(chunk.tokens for chunk in chunks) == 2
        assert (reader.tokens, reader.ended, chunks[-1].last) == (2, True, True)


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (b"data: a\n\n", ("", b"a")),
        (b"data:a\n\n", ("", b"a")),
        (b"data: a\r\n\r\n", ("", b"a")),
        (b"data: a\ndata: b\n\n", ("", b"a\nb")),
        (b"event: x\ndata: a\n\n", ("x", b"a")),
        (b"error: {}\n\n", ("error", b"{}")),
        (b": ping\n\n", ("", None)),
        (b"\n\n", ("", None)),
        (b"data\n\n", ("", b"")),
    ],
)
def test_fields_of_an_event_are_read_as_the_standard_says(event, expected):
    assert payload_of(event) == expected


def test_an_event_without_an_end_is_bounded():
    cutter = EventCutter(EVENTS_MAX)
    for _ in range(EVENTS_MAX // 7):
        assert cutter.feed(b"data: x") == []
    with pytest.raises(EventTooLong):
        cutter.feed(b"data: x")
    assert cutter.rest() == b""


def test_a_long_event_in_small_pieces_is_searched_once(monkeypatch):
    """Time grows with the bytes and not with their square."""
    cutter, searched = EventCutter(10_000_000), []

    def event_ends(buffer, begin):
        searched.append(len(buffer) - begin)
        return ()

    monkeypatch.setattr("sluice.executors.event_stream._event_ends", event_ends)
    for _ in range(1000):
        cutter.feed(b"x" * 100)
    assert sum(searched) <= 1000 * 104


ROLE = delta({"role": "assistant", "content": ""})
USED = {"prompt_tokens": 1, "completion_tokens": 4}
STREAMS = {
    "plain": [ROLE, delta({"content": "a"}), delta({"content": "b"}), delta({}, "stop"), DONE],
    "text with the finish": [ROLE, delta({"content": "a"}), delta({"content": "b"}, "stop"), DONE],
    "usage null": [ROLE, delta({"content": "a"}, usage=None), delta({}, "stop", usage=None), DONE],
    "usage in each": [
        ROLE,
        delta({"content": "a"}, usage=USED),
        delta({}, "stop", usage=USED),
        DONE,
    ],
    "text first": [delta({"content": "a"}), delta({"content": "b"}), DONE],
    "text behind a finish": [delta({"content": "a"}, "stop"), delta({"content": "b"}), DONE],
    "tool calls beside text": [ROLE, delta({"content": "a", "tool_calls": [{}, {}]}), DONE],
    "two choices": [ROLE, event({"choices": [{"delta": {"content": "a"}}, {"index": 1}]}), DONE],
    "times": [ROLE, delta({"content": "a"}, timings={"prompt_ms": 1.0}), delta({}, "stop"), DONE],
    "error beside text": [ROLE, delta({"content": "a"}, error={"message": "no"}), DONE],
    "no JSON": [ROLE, delta({"content": "a"}), b"data: {\n\n", DONE],
    "a comment before a line": [
        ROLE,
        b": ping\n",
        delta({"content": "a"}),
        delta({}, "stop"),
        DONE,
    ],
}


def reading_of(pieces, usage_events):
    reader = StreamReader(Source("up", VLLM), usage_events, EVENTS_MAX)
    out = [item for piece in pieces for item in reader.feed(piece)] + reader.end()
    chunks = [item for item in out if isinstance(item, Chunk)]
    faults = [(type(item), str(item)) for item in out if not isinstance(item, Chunk)]
    raw = b"".join(chunk.raw for chunk in chunks)
    finishes = [finish for chunk in chunks for finish in chunk.finishes]
    tokens = sum(chunk.tokens for chunk in chunks)
    counts = (tokens, reader.tokens, reader.characters, reader.activity)
    return raw, finishes, counts, reader.usage, reader.times, faults, chunks[-1].last


@pytest.mark.parametrize("usage_events", UsageEvents)
@pytest.mark.parametrize("name", STREAMS)
def test_events_mean_the_same_one_by_one_and_all_together(name, usage_events):
    """The short way of the usual event and the long way of all others agree."""
    events = STREAMS[name]
    assert reading_of(events, usage_events) == reading_of([b"".join(events)], usage_events)


def test_usage_text_within_the_output_is_left_alone():
    """Only the usage object itself is taken out, not the same words in what the model says."""
    said = '"usage":{"prompt_tokens":1,"completion_tokens":2}'
    used = {"prompt_tokens": 1, "completion_tokens": 2}
    reader = StreamReader(Source("up", VLLM), UsageEvents.NONE, EVENTS_MAX)
    (chunk,) = reader.feed(delta({"content": said}, usage=used))
    assert isinstance(chunk, Chunk)
    assert chunk.raw == delta({"content": said}, usage=None)
    (chunk,) = reader.feed(delta({}, x_vendor={"usage": used}, usage=used))
    assert isinstance(chunk, Chunk)
    assert chunk.raw == delta({}, x_vendor={"usage": used}, usage=None)
