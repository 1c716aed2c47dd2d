"""What the journal holds of calls and deployments: text only where it is asked for, and bounded."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sluice.cluster import timings
from sluice.core.errors import Overloaded
from sluice.telemetry.journal import Clocks, JournalLimits, JournalWriter
from sluice.telemetry.records import Deployment, RequestArrived, RequestRejected, RequestText
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
        assert rig.gateway._observer._timings == {}

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
