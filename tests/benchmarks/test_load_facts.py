"""What is fitted to the steps of a journal."""

import random

import pytest

from benchmarks.load.facts import UNCALIBRATED, calibrate, speed_of
from sluice.core.costmodel import Coefficients, Load
from sluice.telemetry.records import Chunk, Record, ReplicaChanged, RequestArrived, Step

TRUTH = Coefficients(8e6, 0.4e6, 0.2e6, 1800.0, 400.0)


def steps(slower=1.0, count=400, begun_ns=0):
    """Steps of up to 32 rows, some with a chunk, as long as ``TRUTH`` says times ``slower``."""
    draw, now_ns, contexts = random.Random(1), begun_ns, dict.fromkeys(range(32), 0)
    records: list[Record] = [
        RequestArrived(now_ns, f"r{number}", "m", now_ns, 80, 10_000) for number in range(32)
    ]
    for step in range(count):
        rows = draw.randrange(1, 33)
        for row in range(rows):
            contexts[row] += 1
        load = Load(rows, rows, sum(80 + contexts[row] for row in range(rows)))
        chunk = draw.choice((0, 0, 64, 128))
        if chunk:
            load = load.with_chunk(0, chunk)
        took_ns = round(slower * TRUTH.predict_ns(load))
        now_ns += took_ns
        decode = tuple((f"r{row}", 0) for row in range(rows))
        prefill = (Chunk("new", 0, chunk, 0),) if chunk else ()
        records.append(Step(now_ns, "m-0", step, took_ns, took_ns, decode, prefill))
    return records, now_ns


def test_a_run_on_a_slower_machine_is_replayed_as_slow_as_it_was():
    records, end_ns = steps()
    ready = ReplicaChanged(0, "m-0", "m", "ready", "", 1, 4096, 32, 4096, 32)
    usual = calibrate([ready, *records])
    slow, slow_end_ns = steps(slower=1.5, begun_ns=end_ns)
    as_slow = usual.as_fast(speed_of(slow, end_ns, slow_end_ns))
    for load in (Load(8, 8, 1600), Load(32, 32, 6400).with_chunk(0, 128)):
        truth_ns = TRUTH.predict_ns(load)
        assert usual.coefficients.predict_ns(load) == pytest.approx(truth_ns, rel=0.03)
        assert as_slow.coefficients.predict_ns(load) == pytest.approx(1.5 * truth_ns, rel=0.03)


def test_a_run_with_few_steps_says_nothing_about_the_machine():
    records, end_ns = steps(count=50)
    assert speed_of(records, 0, end_ns) == {}
    assert UNCALIBRATED.as_fast({"preemptions": 0.0}) == UNCALIBRATED
