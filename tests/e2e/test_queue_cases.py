"""Cases D-06, D-07, D-22 and D-23 against a served model of one slot."""

import json
import os
import re
import select
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import pytest

from tests.e2e.clients import (
    COMPLETIONS,
    Answer,
    Stream,
    ask,
    at_once,
    complete,
    connected,
    flood,
    open_stream,
    raw_request,
)
from tests.e2e.processes import ServerProcess, eventually, rss_bytes

pytestmark = pytest.mark.model

JSON = {"content-type": "application/json"}


def idle(server: ServerProcess, model: str) -> bool:
    return server.metric("requests_in_flight", f"model={model}") == 0


def first_text_s(stream: Stream) -> float:
    """Seconds from sending to the first event; the rest is read."""
    stream.event()
    first = stream.times_s[0]
    stream.rest()
    return first


@contextmanager
def queued(server: ServerProcess, fields: Mapping[str, object]) -> Iterator[None]:
    """A request that waits, at the latest when it comes back as it was told to.

    The places of clients that were refused before are kept for them for a while.
    """
    for _ in range(4):
        with connected(server.target) as opened:
            opened.sendall(raw_request(COMPLETIONS, fields))
            if not select.select([opened], [], [], 1.0)[0]:
                yield
                return
            told = re.search(rb"retry-after-ms: (\d+)", opened.recv(65536))
        assert told is not None
        time.sleep(int(told[1]) / 1000)
    raise AssertionError("refused again and again")


@pytest.mark.parametrize("streaming", [False, True])
def test_d06_clients_that_leave_the_queue_cost_nothing(server: ServerProcess, streaming):
    before = server.metrics()
    running = open_stream(server.target, "one", "A tale:", max_tokens=60, ignore_eos=True)
    assert running.event()
    fields = {"model": "one", "prompt": "ghost " * 50, "max_tokens": 60, "stream": streaming}
    with (
        connected(server.target) as b,
        connected(server.target) as c,
        connected(server.target) as d,
    ):
        for ghost in (b, c, d):
            ghost.sendall(raw_request(COMPLETIONS, fields))
        with connected(server.target) as e:
            e.sendall(raw_request(COMPLETIONS, {**fields, "prompt": "last", "max_tokens": 1}))
            eventually(lambda: server.metric("requests_waiting", "model=one") == 4)
            for ghost in (b, c, d):
                ghost.close()
            eventually(lambda: server.metric("requests_waiting", "model=one") == 1, 1.0)
            running.rest()
            a_ended = time.monotonic()
            assert e.recv(65536).startswith(b"HTTP/1.1 200")
            assert time.monotonic() - a_ended < 0.55
    eventually(lambda: idle(server, "one"))
    after = server.metrics()

    def grown(name: str, more: str = "") -> float:
        return (
            after[f"sluice_{name}", f"model=one{more}"]
            - before[f"sluice_{name}", f"model=one{more}"]
        )

    assert grown("requests_ended_total", ",reason=cancelled") == 3
    assert grown("prompt_tokens_total") < 10  # of A and E only
    assert grown("prefill_seconds_count", ",slo_class=default") == 2


def test_d07_a_full_queue_refuses_at_once_and_costs_no_memory(
    server: ServerProcess, record_property
):
    def call() -> Answer:
        return complete(server.target, "bounded", "A tale:", max_tokens=30, ignore_eos=True)

    call()
    eventually(lambda: idle(server, "bounded"))
    answers = at_once([call] * 10)
    refused = [answer for answer in answers if answer.status == 429]
    assert sorted(answer.status for answer in answers) == [200] * 3 + [429] * 7
    for answer in refused:
        assert answer.seconds < 0.45
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.error["code"] == "queue_full"
        assert "queue_full" in answer.headers["x-sluice-reason"]
    eventually(lambda: idle(server, "bounded"))

    held = [
        open_stream(server.target, "bounded", "A tale:", max_tokens=1900, ignore_eos=True)
        for _ in range(1)
    ]
    # So short that their wait is over before the longest life of a request on a slow machine too.
    body = json.dumps({"model": "bounded", "prompt": "x", "max_tokens": 20}).encode()
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(queued(server, {**json.loads(body), "ignore_eos": True}))
        eventually(lambda: server.metric("requests_waiting", "model=bounded") == 2)
        request = ("POST", COMPLETIONS, body, JSON)
        assert set(flood(server.target, [request] * 1000)) == {429}
        before = rss_bytes(server.process.pid)
        start = time.monotonic()
        assert set(flood(server.target, [request] * 5000)) == {429}
        spent = time.monotonic() - start
        after = rss_bytes(server.process.pid)
    record_property("gateway_rss_mb", (before / 1e6, after / 1e6))
    record_property("refusals_per_s", 5000 / spent)
    assert after < before * 1.05
    for stream in held:
        stream.leave()
    eventually(lambda: idle(server, "bounded"))
    assert call().status == 200


def test_d07_each_choice_takes_a_place(server: ServerProcess):
    """Three choices on one slot can never run together; the message says so."""
    answer = complete(server.target, "bounded", "x", n=3, max_tokens=2)
    assert (answer.status, answer.error["param"]) == (400, "n")
    assert "3" in answer.error["message"]
    assert "1" in answer.error["message"]


def test_d23_the_server_and_its_clients_agree_about_the_first_token(server: ServerProcess):
    before = server.metrics()

    def call() -> float:
        stream = open_stream(server.target, "one", "A tale:", max_tokens=10, ignore_eos=True)
        return first_text_s(stream)

    measured_s = at_once([call] * 9)
    after = server.metrics()
    name = "sluice_ttft_seconds"
    labels = "model=one,slo_class=default"
    count = after[f"{name}_count", labels] - before[f"{name}_count", labels]
    told_s = after[f"{name}_sum", labels] - before[f"{name}_sum", labels]
    assert count == 9
    assert told_s == pytest.approx(sum(measured_s), rel=0.03)
    queued_s = (
        after["sluice_queue_seconds_sum", labels] - before["sluice_queue_seconds_sum", labels]
    )
    assert queued_s > 0.8 * told_s


def test_d22_strangers_add_no_series_and_a_restart_lowers_no_counter(
    server: ServerProcess, record_property
):
    complete(server.target, "bounded", "x", max_tokens=3)
    ask(server.target, "GET", "/nothing")
    complete(server.target, "unknown", "x")
    before = server.metrics()
    requests = []
    for number in range(5000):
        body = json.dumps({"model": f"m{number}", "prompt": "x"}).encode()
        requests.append(("POST", COMPLETIONS, body, JSON))
        requests.append(("GET", f"/nothing/{number}", b"", {}))
    requests += [
        ("GET", "/v1/models", b"", {"authorization": f"Bearer sk-{number}"})
        for number in range(1000)
    ]
    half = len(requests) // 2
    scrapes = [before]
    statuses = flood(server.target, requests[:half])
    scrapes.append(server.metrics())
    killed = server.replica_of("bounded")
    os.kill(killed, signal.SIGKILL)
    statuses += flood(server.target, requests[half:])
    eventually(
        lambda: server.metric("replica_state", "model=bounded,replica=bounded-0,state=ready"), 60
    )
    assert complete(server.target, "bounded", "x", max_tokens=3).status == 200
    scrapes += [server.metrics() for _ in range(6)]
    scrape = ask(server.target, "GET", "/metrics")
    record_property("scrape_s_and_bytes", (scrape.seconds, len(scrape.body)))
    assert (statuses.count(404), statuses.count(200)) == (10_000, 1000)
    assert len(scrape.body) < 1_000_000
    assert scrape.seconds < 0.45
    assert len(scrapes[-1]) - len(before) <= 5
    assert scrapes[-1]["sluice_refusals_total", "model=other,reason=model_not_found"] >= 5000
    for earlier, later in pairwise(scrapes):
        fallen = [
            key
            for key, value in earlier.items()
            if key[0].startswith("sluice_")
            and key[0].endswith(("_total", "_count", "_sum", "_bucket"))
            and later.get(key, 0) < value
        ]
        assert fallen == []
