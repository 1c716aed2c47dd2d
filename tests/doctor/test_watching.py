"""A doctor that watches: reads what was added, forgets what is old, and tells what is new once."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import numpy as np
import pytest

from sluice.cli.doctor_watch import Pulse, Raising, tell, watch
from sluice.cli.main import run
from sluice.core.errors import SluiceError
from sluice.doctor.alarm import Alarm, What
from sluice.doctor.diagnosis import Wanted, diagnose
from sluice.doctor.reading import read_journal
from sluice.doctor.tail import JournalTail
from sluice.doctor.windows import Window
from sluice.telemetry import records
from sluice.telemetry.journal import Clocks, JournalLimits, JournalWriter
from tests.doctor.journals import S, request, written


@pytest.fixture
def writer(tmp_path):
    clocks = Clocks(lambda: 0, lambda: 0)
    made = JournalWriter(tmp_path, "gateway", clocks, JournalLimits(queue_records_max=10**6))
    yield made
    made.close()


@pytest.fixture
def tail(tmp_path, writer):
    made = JournalTail(tmp_path, 60.0, lambda: 0)
    yield made
    made.close()


def write(writer, found):
    for record in sorted(found, key=lambda each: each.t_ns):
        writer.append(record)
    assert writer.flush()


def step(number, end_s, *chunks):
    return records.Step(
        int(end_s * S), "chat-0", number, S // 100, S // 90, (),
        tuple(records.Chunk(name, 0, 100, 0) for name in chunks), running=1,
    )  # fmt: skip


def some(numbers):
    return [
        record
        for number in numbers
        for record in (
            *request(number, number * 0.1),
            step(number, number * 0.1 + 0.05, f"r{number}"),
        )
    ]


def test_each_look_reads_what_was_added_and_knows_what_came_before(tmp_path, writer, tail):
    assert tail.look() is None
    write(writer, some(range(100)))
    assert len(tail.look().requests) == 100
    assert tail.records == 500
    write(writer, some(range(100, 130)))
    journal = tail.look()
    assert tail.records == 650
    whole = read_journal(tmp_path)
    assert journal.requests.ids == whole.requests.ids
    for name, values in whole.requests.numbers.items():
        np.testing.assert_array_equal(journal.requests[name], values, name)
    np.testing.assert_array_equal(journal.steps.chunk_request, whole.steps.chunk_request)
    np.testing.assert_array_equal(journal.steps.end_ns, whole.steps.end_ns)


def test_what_is_old_is_forgotten_and_the_rest_is_as_it_was(tmp_path, writer, tail):
    write(writer, some(range(700)))
    tail.look()
    write(writer, some(range(700, 1400)))
    journal = tail.look()
    # The last request came at 139.9 s, and a minute is remembered.
    assert journal.requests.ids == [f"r{number}" for number in range(799, 1400)]
    whole = read_journal(tmp_path)
    np.testing.assert_array_equal(journal.requests["ttft_ns"], whole.requests["ttft_ns"][799:])
    np.testing.assert_array_equal(journal.steps.end_ns, whole.steps.end_ns[799:])
    assert [journal.requests.ids[row] for row in journal.steps.chunk_request[:3]] == [
        "r799", "r800", "r801",
    ]  # fmt: skip
    # An ending of a request that was forgotten makes none of it.
    write(writer, request(0, 0.0)[-1:])
    assert len(tail.look().requests) == 601


def diagnosed(ttft_s, tmp_path, name):
    """A diagnosis of requests with such a time in the second half."""
    found = []
    for number in range(200):
        jitter = 0.001 * (number * 7919 % 50)
        found += request(number, number * 0.1, (ttft_s if number >= 100 else 0.1) + jitter)
    journal = read_journal(written(tmp_path / name, found))
    return diagnose(journal, Wanted(incident=Window(10.0 * S, 20.0 * S)))


def test_a_spike_is_told_once_when_it_begins_and_once_when_it_is_over(tmp_path):
    spike, calm = diagnosed(0.5, tmp_path, "spike"), diagnosed(0.1, tmp_path, "calm")
    alarm = Alarm()
    told = [alarm.heard(each) for each in (calm, spike, spike, calm, spike, calm, calm, spike)]
    assert [each and each.what for each in told] == [
        None, What.BEGAN, None, None, None, None, What.OVER, What.BEGAN,
    ]  # fmt: skip
    assert told[1] is not None
    details = told[1].details
    assert details["metric"] == "ttft_p99"
    assert (details["before"], details["after"]) == ("0.149 s", "0.549 s")
    assert details["since"].startswith("1970-01-01T00:00:10")


class Received:
    """A server on loopback that keeps what is posted."""

    def __init__(self):
        self.seen: list[Any] = []
        outer = self

        class Answering(BaseHTTPRequestHandler):
            def do_POST(self):
                length = int(self.headers["content-length"])
                body = json.loads(self.rfile.read(length))
                outer.seen.append((self.path, self.headers.get("authorization"), body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Answering)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def received():
    made = Received()
    yield made
    made.server.shutdown()
    made.server.server_close()


class Enough(SluiceError):
    """Ends a watch."""


def looks(number):
    """A sleep that lets a watch look so often."""
    left = iter(range(number - 1))

    def sleep(_):
        if next(left, None) is None:
            raise Enough

    return sleep


def test_a_finding_goes_to_the_server_and_to_the_webhook(tmp_path, writer, tail, received, capsys):
    found = []
    for number in range(200):
        slow = 0.4 if number >= 100 else 0.0
        jitter = 0.001 * (number * 7919 % 50)
        found += request(number, number * 0.1, 0.1 + slow + jitter)
    write(writer, found)
    to = Raising(received.url, f"{received.url}/hook", "secret")
    with pytest.raises(Enough):
        watch(
            tail,
            lambda journal: diagnose(journal, Wanted()),
            lambda found, _, notice: tell(found, notice, to, as_json=True),
            Pulse(as_json=True),
            1.0,
            looks(3),
        )
    (event_path, key, event), (hook_path, hook_key, hook) = received.seen
    assert (event_path, key) == ("/admin/events", "Bearer secret")
    assert event["what"] == "doctor.spike"
    assert event["details"]["metric"] in {"ttft_p99", "e2e_p99"}
    assert (hook_path, hook_key) == ("/hook", None)
    assert hook["event"] == "doctor.spike"
    assert hook["spike"]["confirmed"]
    events = [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()]
    assert events == ["doctor.spike", "doctor.look", "doctor.look", "doctor.look"]


def watched(tail, number, *, as_json):
    """Looks that find nothing to raise."""
    with pytest.raises(Enough):
        watch(
            tail,
            lambda journal: diagnose(journal, Wanted()),
            lambda *_: pytest.fail("nothing is to be raised"),
            Pulse(as_json=as_json, clock_ns=lambda: 0),
            1.0,
            looks(number),
        )


def test_while_all_is_well_a_watch_says_what_it_sees(writer, tail, capsys):
    watched(tail, 1, as_json=False)
    assert capsys.readouterr().err == "0 requests; no request is in the journal yet\n"
    write(writer, some(range(200)))
    watched(tail, 3, as_json=False)
    (line,) = capsys.readouterr().err.splitlines()  # looks that see the same are not repeated
    assert line.startswith("200 requests; No reliable change: TTFT p99 100.0 ms → 100.0 ms")
    watched(tail, 2, as_json=True)
    looks_seen = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["event"], each["requests"]) for each in looks_seen] == [("doctor.look", 200)] * 2
    assert looks_seen[0]["spike"]["confirmed"] is False


def test_a_watch_says_what_it_watches_and_where_findings_go(tmp_path, capsys):
    asked = {"watch": "30s", "window": "5m", "metric": None, "percentile": 99.0}
    to = Raising("http://127.0.0.1:8000", "https://me:secret@alerts.example/hook/secret")
    Pulse(as_json=False).began(tmp_path, asked, to)
    told = capsys.readouterr().err
    assert told.startswith(f"watching {tmp_path} every 30s: p99 of ttft, tpot, e2e in 5m")
    assert "findings go to http://127.0.0.1:8000 and https://alerts.example too" in told
    Pulse(as_json=True).began(tmp_path, asked, to)
    plain = json.loads(capsys.readouterr().out)
    assert (plain["event"], plain["every"]) == ("doctor.watching", "30s")
    assert plain["raised_to"] == ["http://127.0.0.1:8000", "https://alerts.example"]


def test_a_server_that_takes_no_event_is_told_and_watching_goes_on(tmp_path, capsys):
    spike = diagnosed(0.5, tmp_path, "spike")
    notice = Alarm().heard(spike)
    assert notice is not None
    tell(spike, notice, Raising("http://127.0.0.1:9"), as_json=True)
    assert "did not take the event" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--event", "http://127.0.0.1:8000"), "--event and --webhook go with --watch"),
        (("--watch", "30s", "--event", "gpu-1:8000"), "--event takes an address"),
        (("--watch", "30s", "--baseline", "1s..2s"), "leave out --baseline"),
        (("--watch", "10ms"), "--watch must be at least 1s"),
        (("--watch", "30s"), "there is no journal folder"),
    ],
)
def test_what_does_not_go_together_is_said(tmp_path, capsys, options, words):
    folder = tmp_path / "none" if words.startswith("there is no") else tmp_path
    assert run(["doctor", str(folder), *options]) == 2
    assert words in capsys.readouterr().err


def test_events_of_a_doctor_and_starts_without_differences_are_no_deployments(tmp_path):
    found = []
    for number in range(200):
        long = 400 if number >= 100 else 100
        at_ns, name = number * S // 10, f"r{number}"
        _, dispatched, first, ended = request(number, number * 0.1, 0.1 if number < 100 else 0.3)
        found += [
            records.RequestArrived(at_ns, name, "chat", at_ns, long, 64), dispatched, first, ended,
        ]  # fmt: skip
    at_ns = 10 * S
    changed = {"facts.m.template": records.Change("91ab", "77fe")}
    found += [
        records.Deployment(at_ns, "doctor.spike", {"cause": "longer_context"}),
        records.Deployment(at_ns + 1, "start", {"models": "m"}),
        records.Deployment(at_ns + 2, "start", {"models": "m"}, changed=changed),
    ]
    journal = read_journal(written(tmp_path / "j", found))
    told = diagnose(journal, Wanted(incident=Window(10.0 * S, 20.0 * S)))
    (cause,) = [each for each in told.causes if each.name == "longer_context"]
    deployed = [line for line in cause.evidence if line.startswith("deployed")]
    assert deployed == ["deployed at the time: facts.m.template: 91ab → 77fe"]
