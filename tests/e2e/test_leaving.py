"""A client that leaves at any moment: what it held is free as soon as the replica may notice."""

import json
import time
from collections.abc import Callable
from typing import TypeVar

import pytest

from sluice.telemetry.journal import JournalReader
from sluice.telemetry.records import RequestEnded, Step
from tests.e2e.clients import COMPLETIONS, complete, connected, open_stream, raw_request
from tests.e2e.processes import ServerProcess, eventually

pytestmark = pytest.mark.model

Kind = TypeVar("Kind")
# From the end of a step to the ending in the journal: messages between two busy processes.
NOTICED_S_MAX = 0.25
LABELS = "model=exact"


def empty(server: ServerProcess) -> bool:
    values = server.metrics()
    return all(
        values.get(("sluice_" + name, labels), 0) == 0  # a replica that never reported has none
        for name, labels in (
            ("requests_in_flight", LABELS),
            ("requests_running", LABELS),
            ("requests_waiting", LABELS),
            ("kv_blocks_used", f"{LABELS},replica=exact-0"),
        )
    )


def running(server: ServerProcess) -> bool:
    return server.metric("requests_running", LABELS) > 0


def generating(server: ServerProcess) -> Callable[[ServerProcess], bool]:
    tokens = server.metric("generated_tokens_total", LABELS)
    return lambda later: later.metric("generated_tokens_total", LABELS) > tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("moment", ["prefill", "decode"])
def test_a_client_that_leaves_frees_its_blocks_at_once(
    server: ServerProcess, moment, stream, record_property
):
    eventually(lambda: empty(server))
    prompt = [7 + i % 900 + 13 * stream for i in range(1800 if moment == "prefill" else 20)]
    fields = {
        "model": "exact", "prompt": prompt, "max_tokens": 200, "ignore_eos": True,
        "stream": stream,
    }  # fmt: skip
    reached = running if moment == "prefill" else generating(server)
    with connected(server.target) as opened:
        opened.sendall(raw_request(COMPLETIONS, fields))
        eventually(lambda: reached(server))
        left_ns = time.monotonic_ns()
    eventually(lambda: empty(server), 5.0)
    freed_s = (time.monotonic_ns() - left_ns) / 1e9
    endings = _written(server, RequestEnded, left_ns)
    steps_ns = [one.t_ns for one in _written(server, Step, left_ns) if one.replica == "exact-0"]
    cancelled = [one for one in endings if one.model == "exact"]
    assert [one.reason for one in cancelled] == ["cancelled"]
    record_property("cancel_to_free_s", (cancelled[0].t_ns - left_ns) / 1e9)
    # The step that ran when the client left, and one more if that ended before it was noticed.
    assert len(steps_ns) <= 2
    assert (cancelled[0].t_ns - max([left_ns, *steps_ns])) / 1e9 < NOTICED_S_MAX
    assert freed_s < 5.0
    assert (cancelled[0].decode_ns > 0) == (moment == "decode")


def _written(server: ServerProcess, kind: type[Kind], since_ns: int) -> list[Kind]:
    """Records of a kind since a time; waits for the first, as journals are flushed with a delay."""
    found: list[Kind] = []

    def look() -> bool:
        entries = JournalReader(server.journal).entries()
        records = [entry.record for entry in entries if isinstance(entry.record, kind)]
        found[:] = [one for one in records if one.t_ns > since_ns]
        return bool(found)

    eventually(look, 5.0, every_s=0.1)
    return found


@pytest.mark.parametrize("hard", [False, True], ids=["end", "reset"])
def test_a_stream_that_is_left_in_the_middle_frees_its_blocks(server: ServerProcess, hard):
    eventually(lambda: empty(server))
    stream = open_stream(server.target, "exact", "A tale:", max_tokens=500, ignore_eos=True)
    for _ in range(5):
        assert stream.event()
    stream.leave(hard=hard)
    eventually(lambda: empty(server), 5.0)


def test_a_client_that_leaves_within_its_body_holds_nothing(server: ServerProcess):
    whole = raw_request(COMPLETIONS, {"model": "exact", "prompt": "x " * 5000})
    before = server.metric("requests_total", LABELS)
    with connected(server.target) as opened:
        opened.sendall(whole[: len(whole) // 2])
    with connected(server.target) as opened:
        opened.sendall(whole)  # its text is tokenised on another thread
    eventually(lambda: empty(server))
    assert server.metric("requests_total", LABELS) - before <= 1


def test_a_reader_that_stalls_does_not_hold_up_another(server: ServerProcess):
    fields = {
        "model": "exact", "prompt": "A tale:", "max_tokens": 1500, "ignore_eos": True,
        "stream": True, "n": 2,
    }  # fmt: skip
    with connected(server.target) as opened:
        opened.sendall(raw_request(COMPLETIONS, fields))
        assert opened.recv(100)  # and no more
        eventually(lambda: running(server))
        for _ in range(2):
            assert complete(server.target, "exact", "Other", max_tokens=8).status == 200
    eventually(lambda: empty(server))


def test_the_text_that_a_stalled_reader_gets_in_the_end_is_whole(server: ServerProcess):
    options = {"max_tokens": 120, "ignore_eos": True}
    whole = complete(server.target, "exact", "A tale:", **options).text
    fields = {
        "model": "exact", "prompt": "A tale:", "temperature": 0, "stream": True, **options
    }  # fmt: skip
    with connected(server.target) as opened:
        opened.sendall(raw_request(COMPLETIONS, fields))
        eventually(lambda: running(server))
        eventually(lambda: empty(server))
        raw = b""
        while b"[DONE]" not in raw:
            raw += opened.recv(65536)
    lines = [line[6:] for line in raw.decode().split("\n") if line.startswith("data: {")]
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == whole
