"""Engines that run elsewhere: what their own metrics say of where the time goes."""

import json
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest

from sluice.cli.main import run
from sluice.doctor.diagnosis import Verdict, Wanted, diagnose
from sluice.doctor.prometheus import range_path
from sluice.doctor.reading import read_journal
from sluice.doctor.scene import increase
from sluice.doctor.windows import Window
from sluice.telemetry import records
from tests.doctor.journals import S, written

SLOWER_FROM_S = 20.0


def asked(number, at_s, first_s, decode_s):
    """A request that an engine elsewhere answered."""
    at_ns, first_ns, decode_ns = int(at_s * S), int(first_s * S), int(decode_s * S)
    name = f"r{number}"
    return [
        records.RequestArrived(at_ns, name, "chat", at_ns, 100, 64),
        records.RequestDispatched(at_ns, name, "gpu-0", 1, remote=True),
        records.FirstToken(at_ns + first_ns, name, first_ns),
        records.RequestEnded(
            at_ns + first_ns + decode_ns, name, "chat", "stop", at_ns, "gpu-0", 1, 100, 0, 21,
            prefill_ns=first_ns, decode_ns=decode_ns, ttft_ns=first_ns, tpot_ns=decode_ns // 20,
        ),
    ]  # fmt: skip


class Engine:
    """Metrics of an engine over the requests of an incident."""

    def __init__(self):
        self.counters = dict.fromkeys(
            ("queue_s", "queue_count", "prefill_s", "prefill_count", "decode_s", "decode_count",
             "preemptions"), 0.0,
        )  # fmt: skip

    def served(self, queue_s, prefill_s, decode_s):
        for stage, seconds in (("queue", queue_s), ("prefill", prefill_s), ("decode", decode_s)):
            self.counters[f"{stage}_s"] += seconds
            self.counters[f"{stage}_count"] += 1

    def sample(self, at_s, waiting, kv_use):
        return records.EngineSampled(
            int(at_s * S), "gpu-0", "chat", waiting, 8.0, kv_use, dict(self.counters)
        )


def calm_then_queued(folder):
    """A journal without samples, and what a Prometheus has of its engine."""
    engine, found = Engine(), []
    points: dict[str, list[Any]] = {}
    names = {"queue_s": "request_queue_time_seconds_sum",
             "queue_count": "request_queue_time_seconds_count",
             "prefill_s": "request_prefill_time_seconds_sum",
             "prefill_count": "request_prefill_time_seconds_count"}  # fmt: skip
    for number in range(400):
        at_s = number * 0.1
        queue_s = 0.01 if at_s < SLOWER_FROM_S else 0.5 + 0.01 * (number * 31 % 40)
        prefill_s = 0.08 + 0.001 * (number * 7919 % 50)
        found += asked(number, at_s, queue_s + prefill_s, 0.4)
        engine.served(queue_s, prefill_s, 0.4)
        if number % 20 == 0:
            for ours, theirs in names.items():
                points.setdefault(f"vllm:{theirs}", []).append([at_s, str(engine.counters[ours])])
    series = [
        {"metric": {"__name__": name, "instance": "gpu-0:8000", "le": ""}, "values": values}
        for name, values in points.items()
    ]
    answer = {"status": "success", "data": {"resultType": "matrix", "result": series}}
    return written(folder, found), json.dumps(answer)


def incident(folder, *, queue_s=0.0, prefill_s=0.0, decode_s=0.0, restart=False, **more):
    """What a request loses in the incident, by stage; with samples every two seconds."""
    engine, found = Engine(), []
    for number in range(400):
        at_s = number * 0.1
        late = at_s >= SLOWER_FROM_S
        jitter = 0.001 * (number * 7919 % 50)
        stages = [0.01, 0.08 + jitter, 0.4 + jitter]
        if late:
            grown = 1 + 0.01 * (number * 31 % 40)
            stages = [
                usual + extra * grown
                for usual, extra in zip(stages, (queue_s, prefill_s, decode_s), strict=True)
            ]
            engine.counters["preemptions"] += more.get("preempted", 0)
        found += asked(number, at_s, stages[0] + stages[1], stages[2])
        engine.served(*stages)
        if restart and number == 300:
            engine = Engine()
        if number % 20 == 0:
            full = more.get("kv_use", 0.4) if late else 0.4
            found.append(engine.sample(at_s, 12.0 if late and queue_s else 0.5, full))
    journal = read_journal(written(folder, found))
    window = Window(SLOWER_FROM_S * S, 40.0 * S)
    return diagnose(journal, Wanted(incident=window))


def verdicts(found):
    return {each.name: each.verdict for each in found.causes}


def test_time_in_the_queue_of_an_engine_is_told_from_its_slowness(tmp_path):
    found = incident(tmp_path / "j", queue_s=0.5)
    assert (found.causes[0].name, found.causes[0].verdict) == ("engine_queue", Verdict.CONFIRMED)
    assert verdicts(found)["engine_slowdown"] is Verdict.RULED_OUT
    assert found.stages["queue"].after_s == pytest.approx(0.61, abs=0.02)
    assert any("queue 10 → 6" in line for line in found.causes[0].evidence)


def test_an_engine_that_computes_slower_is_called_that(tmp_path):
    found = incident(tmp_path / "j", prefill_s=0.4, decode_s=0.5)
    assert found.causes[0].name == "engine_slowdown"
    assert verdicts(found)["engine_queue"] is Verdict.RULED_OUT


def test_a_full_memory_is_the_cause_of_the_queue_before_it(tmp_path):
    found = incident(tmp_path / "j", queue_s=0.5, decode_s=0.3, kv_use=0.97, preempted=2)
    assert (found.causes[0].name, found.causes[0].verdict) == ("preemption", Verdict.CONFIRMED)
    assert any("KV memory in use: 40% → 97%" in line for line in found.causes[0].evidence)
    assert any("preemptions: 0.00 → 20.00 per second" in line for line in found.causes[0].evidence)
    assert verdicts(found)["engine_queue"] is not Verdict.CONFIRMED


def test_counters_that_begin_again_change_nothing_of_what_is_told(tmp_path):
    whole = incident(tmp_path / "a", queue_s=0.5)
    again = incident(tmp_path / "b", queue_s=0.5, restart=True)
    assert again.causes[0].name == "engine_queue"
    assert again.stages["queue"].after_s == pytest.approx(whole.stages["queue"].after_s, rel=0.1)


def test_what_a_counter_grew_by_counts_from_zero_where_it_went_back():
    assert increase(np.array([5.0, 7.0, 1.0, 3.0])) == 2 + 1 + 2
    assert increase(np.array([5.0])) == 0.0


def test_without_samples_the_missing_signal_is_named(tmp_path):
    found = []
    for number in range(400):
        first_s = 0.09 + 0.001 * (number * 7919 % 50) + (0.5 if number >= 200 else 0.0)
        found += asked(number, number * 0.1, first_s, 0.4)
    journal = read_journal(written(tmp_path / "j", found))
    told = diagnose(journal, Wanted(incident=Window(SLOWER_FROM_S * S, 40.0 * S)))
    assert verdicts(told)["engine_queue"] is Verdict.CANNOT_TELL
    assert any("metrics of engines elsewhere" in missing for missing in told.missing)


def test_metrics_of_engines_can_come_from_a_prometheus(tmp_path, capsys):
    folder, answer = calm_then_queued(tmp_path / "j")
    (tmp_path / "kept.json").write_text(answer)
    window = ("--window", "20s..40s", "--json")
    assert run(["doctor", str(folder), "--prometheus", str(tmp_path / "kept.json"), *window]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["causes"][0]["name"] == "engine_queue"
    assert shown["engine_stages"]["queue"]["after_s"] == pytest.approx(0.69, abs=0.03)


def test_a_prometheus_is_asked_for_the_time_of_the_journal():
    asked = urlsplit(range_path(Window(10.0 * S, 40.0 * S)))
    query = parse_qs(asked.query)
    assert asked.path == "/api/v1/query_range"
    assert (query["start"], query["end"], query["step"]) == (["10.000"], ["40.000"], ["2.000"])
    assert "vllm:request_queue_time_seconds_sum" in query["query"][0]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("nothing", "no answer of /api/v1/query_range"),
        ('{"status": "error", "error": "query timed out"}', "query timed out"),
        ('{"status": "success", "data": {"result": []}}', "no metrics of vLLM"),
    ],
)
def test_what_is_wrong_with_an_answer_is_said(tmp_path, capsys, answer, words):
    folder, _ = calm_then_queued(tmp_path / "j")
    (tmp_path / "kept.json").write_text(answer)
    assert run(["doctor", str(folder), "--prometheus", str(tmp_path / "kept.json")]) == 2
    assert words in capsys.readouterr().err
