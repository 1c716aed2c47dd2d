"""The gateway benchmark counts what happens: mock engines, load driver, tables, policy bench."""

import socket
import threading
from contextlib import suppress

import pytest

from benchmarks.relay import policy
from benchmarks.relay.programs import Group, Load, Programs
from benchmarks.relay.scenarios import Bench, prepare
from benchmarks.relay.systems import System, free_ports
from benchmarks.relay.tables import Column, table, targets, values


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    made = Programs(tmp_path_factory.mktemp("relay"))
    prepare(made)
    return made


@pytest.fixture
def engines(programs):
    ports = free_ports(2)
    programs.start_upstream(ports)
    yield ports
    programs.stop()


def drive(programs: Programs, port: int, load: Load):
    return Bench(programs, {}).run(System("direct", port), load)


def test_every_event_of_every_stream_is_seen_and_timed(programs, engines):
    run = drive(programs, engines[0], Load((Group(3, "first"),), 0.3, 0.05, requests_max=60))
    seen = run.groups[0]
    assert seen["errors"] == 0
    assert seen["answers"] > 0
    # Streams of four events that were under way at either end are counted in part.
    assert abs(seen["events"] - 4 * seen["answers"]) <= 4 * 3
    assert 0 < seen["first"]["p50"] <= seen["first"]["max"]
    assert 0 < seen["event"]["p50"] < 1e9


def test_steps_of_an_engine_are_a_gap_apart(programs, engines):
    run = drive(programs, engines[1], Load((Group(2, "paced"),), 0.25, 0.05))
    assert 10e6 < run.groups[0]["gap"]["p50"] < 30e6


def test_a_rate_is_held_and_waiting_counts_from_when_a_request_was_due(programs, engines):
    run = drive(programs, engines[0], Load((Group(4, "small", rate=200), Group(1, "large")), 0.3))
    small, large = run.groups
    assert 40 <= small["answers"] <= 80
    assert large["answers"] > 0
    assert small["errors"] == large["errors"] == 0


def test_answers_that_are_none_count_as_errors_and_not_as_answers(programs):
    refusal = b"HTTP/1.1 503 Gone\r\ncontent-length: 0\r\n\r\n"

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, suppress(ConnectionResetError):
            while connection.recv(65536):
                connection.sendall(refusal)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        port = listener.getsockname()[1]
        run = drive(programs, port, Load((Group(1, "small"),), 5, 0, requests_max=5))
        thread.join()
    assert (run.groups[0]["answers"], run.groups[0]["errors"]) == (0, 5)
    assert run.groups[0]["status"] == 503


ROUNDS = {
    "direct": [{"whole_us": 10.0}, {"whole_us": 30.0}],
    "sluice": [{"whole_us": 110.0}, {"whole_us": 531.0}],
}


def test_what_is_added_is_taken_within_a_round():
    assert values(ROUNDS, "sluice", Column("", "whole_us", added=True)) == [100.0, 501.0]
    assert values(ROUNDS, "direct", Column("", "whole_us", added=True)) == []


def test_tables_show_medians_and_say_what_does_not_hold():
    assert "| sluice | 300 (100–501) |" in table("one", ROUNDS)
    assert "| one: whole µs added | ≤ 400 | 300 | yes |" in targets({"one": ROUNDS})
    late = {**ROUNDS, "sluice": [{"whole_us": 511.0}, {"whole_us": 531.0}]}
    assert "| 501 | no |" in targets({"one": late})


def test_no_request_of_the_policy_bench_is_refused(monkeypatch):
    monkeypatch.setattr(policy, "_REQUESTS", 20)
    monkeypatch.setattr(policy, "_REPEATS", 1)
    for case in policy.CASES:
        assert policy.life_us(case, 1)[0] > 0
