"""What the journal holds of calls and deployments: text only where it is asked for, and bounded."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sluice.cluster import timings
from sluice.core.errors import ModelNotFound, Overloaded
from sluice.runtime.generation import Refused
from sluice.telemetry.journal import Clocks, JournalLimits, JournalWriter
from sluice.telemetry.records import (
    Deployment,
    RequestArrived,
    RequestRefused,
    RequestRejected,
    RequestText,
)
from tests.cluster.rig import Rig, chat, in_virtual_time, pieces, text_of


@contextmanager
def journal_in(folder: Path, *, record_text: bool) -> Iterator[JournalWriter]:
    clocks = Clocks(lambda: 1, lambda: 1)
    journal = JournalWriter(folder, "gateway", clocks, JournalLimits(), record_text=record_text)
    try:
        yield journal
    finally:
        journal.close()


def recorded(journal: JournalWriter, kind: type) -> list[Any]:
    return [record for record in journal.recent() if isinstance(record, kind)]


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
        assert not any("Hello" in repr(record) for record in journal.recent())


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
