"""What the journal holds of calls and deployments: text only where it is asked for, and bounded."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sluice.cluster import timings
from sluice.core.errors import ModelNotFound, Overloaded, RequestError
from sluice.core.events import Dispatch
from sluice.executors.stream import Gauges
from sluice.runtime.generation import Refused
from sluice.telemetry.journal import Clocks, JournalLimits, JournalReader, JournalWriter
from sluice.telemetry.records import (
    Deployment,
    EngineSampled,
    RequestArrived,
    RequestDispatched,
    RequestRefused,
    RequestRejected,
    RequestText,
)
from tests.cluster.rig import LIMITS, Rig, chat, in_virtual_time, pieces, text_of


@contextmanager
def journal_in(folder: Path, *, record_text: bool) -> Iterator[JournalWriter]:
    clocks = Clocks(lambda: 1, lambda: 1)
    journal = JournalWriter(folder, "gateway", clocks, JournalLimits(), record_text=record_text)
    try:
        yield journal
    finally:
        journal.close()


def recorded(journal: JournalWriter, kind: type) -> list[Any]:
    return [record for record in everything(journal) if isinstance(record, kind)]


def everything(journal: JournalWriter) -> list[Any]:
    assert journal.flush()
    return [entry.record for entry in JournalReader(journal._folder).entries()]


def test_prompt_and_output_are_recorded_where_the_operator_says_so(tmp_path):
    seen: list[str] = []

    async def work(journal: JournalWriter) -> None:
        rig = Rig(journal=journal)
        await rig.gateway.start()
        seen.append(text_of(await pieces(await rig.gateway.generate(chat(rig, "Hello there")))))

    with journal_in(tmp_path, record_text=True) as journal:
        in_virtual_time(lambda: work(journal))
        (text,) = recorded(journal, RequestText)
    assert "Hello there" in text.prompt
    assert text.output == seen[0]
    assert seen[0]


def test_no_text_is_recorded_otherwise(tmp_path):
    async def work(journal: JournalWriter) -> None:
        rig = Rig(journal=journal)
        await rig.gateway.start()
        await pieces(await rig.gateway.generate(chat(rig, "Hello there")))
        assert rig.observer._timings == {}

    with journal_in(tmp_path, record_text=False) as journal:
        in_virtual_time(lambda: work(journal))
        assert recorded(journal, RequestText) == []
        assert not any("Hello" in repr(record) for record in everything(journal))


def test_recorded_text_is_cut_at_a_length_and_told_by_choice(tmp_path, monkeypatch):
    monkeypatch.setattr(timings, "TEXT_CHARS_MAX", 12)

    async def work(journal: JournalWriter) -> None:
        rig = Rig(journal=journal)
        await rig.gateway.start()
        await pieces(await rig.generate(prompt=40, output=9, choices=2))

    with journal_in(tmp_path, record_text=True) as journal:
        in_virtual_time(lambda: work(journal))
        (text,) = recorded(journal, RequestText)
    assert len(text.prompt) == 12
    assert "[choice 0]" in text.output
    assert "[choice 1]" in text.output
    assert len(text.output) == 12 + len("[choice 0]\n\n[choice 1]\n")


def test_start_and_drain_of_a_deployment_are_recorded(tmp_path):
    async def work(journal: JournalWriter) -> None:
        rig = Rig(journal=journal)
        await rig.gateway.start()
        await rig.gateway.drain(1.0)

    with journal_in(tmp_path, record_text=False) as journal:
        in_virtual_time(lambda: work(journal))
        told = [(one.what, one.details) for one in recorded(journal, Deployment)]
    assert told == [("start", {"version": "1"}), ("drain", {"version": "1"})]


def test_a_refusal_before_tokenising_can_be_traced(tmp_path):
    async def work(journal: JournalWriter) -> None:
        rig = Rig(journal=journal)
        with pytest.raises(Overloaded):
            await rig.generate("early")

    with journal_in(tmp_path, record_text=True) as journal:
        in_virtual_time(lambda: work(journal))
        assert [one.id for one in recorded(journal, RequestArrived)] == ["early"]
        assert [one.reason for one in recorded(journal, RequestRejected)] == ["not_ready"]


def test_a_refusal_before_it_became_a_call_is_recorded_with_its_ids(tmp_path):
    async def work(journal: JournalWriter) -> None:
        rig = Rig(journal=journal)
        await rig.gateway.start()
        rig.gateway.refused(Refused("id-1", "mine", "made-up", 400, "invalid_request"))
        with pytest.raises(ModelNotFound):
            await rig.gateway.generate(replace(rig.call("id-2"), model="made-up"))

    with journal_in(tmp_path, record_text=False) as journal:
        in_virtual_time(lambda: work(journal))
        told = [
            (one.id, one.client_id, one.model, one.status, one.reason)
            for one in recorded(journal, RequestRefused)
        ]
    assert told == [
        ("id-1", "mine", "", 400, "invalid_request"),
        ("id-2", "", "", 404, "model_not_found"),
    ]


def test_a_flood_of_refusals_is_counted_whole_and_recorded_in_part(tmp_path):
    async def work(journal: JournalWriter) -> None:
        rig = Rig(journal=journal)
        for number in range(1000):
            rig.gateway.refused(Refused(f"id-{number}", "", "tiny", 400, "invalid_request"))
        await asyncio.sleep(1.5)
        rig.gateway.refused(Refused("later", "", "tiny", 400, "invalid_request"))
        exposition, _ = rig.gateway.metrics()
        line = 'sluice_refusals_total{model="tiny",reason="invalid_request"} 1001.0'
        assert line in exposition.decode()

    with journal_in(tmp_path, record_text=False) as journal:
        in_virtual_time(lambda: work(journal))
        names = [one.id for one in recorded(journal, RequestRefused)]
    assert names == [*(f"id-{number}" for number in range(20)), "later"]


# -------------------------------------------------------------------------------------- overload


@pytest.mark.parametrize(
    ("step_s", "output", "slo_class", "outcome"),
    [
        (0.01, 5, "quick", "met"),
        (0.08, 5, "quick", "missed"),  # 80 ms per token, of 50
        (0.6, 1, "quick", "missed"),  # 600 ms to the first, of 500
        (0.6, 5, "", "met"),  # no class, no target
    ],
)
def test_requests_are_counted_by_class_and_by_whether_they_met_its_targets(
    step_s, output, slo_class, outcome
):
    async def work() -> None:
        rig = Rig(step_s=lambda plan: step_s)
        await rig.gateway.start()
        await pieces(await rig.generate(output=output, slo_class=slo_class))
        counted = rig.counts("class_requests_total")
        assert counted == {("tiny", slo_class or "default", outcome): 1}
        rig.check_empty()

    in_virtual_time(work)


def test_refused_and_abandoned_requests_are_neither_met_nor_missed():
    async def work() -> None:
        rig = Rig(queue_places=1, limits=replace(LIMITS, sequences_max=1))
        await rig.gateway.start()
        streams = [await rig.generate(name, slo_class="quick") for name in ("a", "b")]
        with pytest.raises(Overloaded):
            await rig.generate("c", slo_class="quick")
        for stream in streams:
            stream.cancel()
        await rig.until(lambda: not len(rig.driver._calls))
        assert rig.counts("class_requests_total") == {
            ("tiny", "quick", "refused"): 1, ("tiny", "quick", "left"): 2,
        }  # fmt: skip

    in_virtual_time(work)


def test_a_request_that_can_never_run_counts_in_no_class():
    async def work() -> None:
        rig = Rig()
        await rig.gateway.start()
        with pytest.raises(RequestError):
            await rig.generate(prompt=10, output=10_000)
        assert rig.counts("class_requests_total") == {}

    in_virtual_time(work)


def test_predicted_and_actual_wait_are_measured_of_the_same_requests(tmp_path):
    async def work(journal: JournalWriter) -> None:
        rig = Rig(journal=journal)
        await rig.gateway.start()
        request = (await rig.gateway._models["tiny"].submit(rig.call())).request
        rig.observer.arrived(rig.call(), request, lambda tokens: "")
        await asyncio.sleep(2.0)
        rig.observer.dispatched(Dispatch("a", "tiny-0", 1, (), 3_000_000_000))
        assert rig.value("wait_predicted_seconds_sum") == 3.0
        assert rig.value("wait_actual_seconds_sum") == pytest.approx(2.0)
        # A second attempt says nothing about the prediction, nor does one that started at once.
        rig.observer.dispatched(Dispatch("a", "tiny-0", 2, (), 3_000_000_000))
        rig.observer.dispatched(Dispatch("a", "tiny-0", 1, (), None))
        assert rig.value("wait_actual_seconds_count") == 1

    with journal_in(tmp_path, record_text=False) as journal:
        in_virtual_time(lambda: work(journal))
        first, *_ = recorded(journal, RequestDispatched)
    assert (first.predicted_wait_ns, first.waited_ns) == (3_000_000_000, 2_000_000_000)


def test_of_what_an_engine_tells_of_its_load_a_part_is_recorded(tmp_path):
    async def work(journal: JournalWriter) -> None:
        rig = Rig(journal=journal)
        for second in range(6):
            gauges = Gauges(waiting=second, running=1, kv_use=None, counters={"queue_s": 0.5})
            rig.observer.sampled("big-0", "big", gauges)
            rig.observer.sampled("big-1", "big", gauges)
            await asyncio.sleep(1.0)

    with journal_in(tmp_path, record_text=False) as journal:
        in_virtual_time(lambda: work(journal))
        told = [one for one in recorded(journal, EngineSampled) if one.replica == "big-0"]
        both = recorded(journal, EngineSampled)
    assert [one.waiting for one in told] == [0, 2, 4]
    assert len(both) == 6
    assert (told[0].model, told[0].kv_use, told[0].counters) == ("big", None, {"queue_s": 0.5})
