"""A request's life is put together from the records that concern it."""

from pathlib import Path

import msgspec
import pytest

from sluice.telemetry.journal import Clocks, Entry, JournalLimits, JournalReader, JournalWriter
from sluice.telemetry.life import Life, PhaseSpan, find_life, life_of, nearest_ids
from sluice.telemetry.records import (
    AnyRecord,
    Chunk,
    FirstToken,
    RequestArrived,
    RequestDispatched,
    RequestEnded,
    RequestRejected,
    Score,
    Step,
)

MS = 1_000_000


def arrived(name: str, at_ms: int) -> RequestArrived:
    """Arrived at ``at_ms``, read and tokenised 2 ms later."""
    return RequestArrived((at_ms + 2) * MS, name, "m", at_ms * MS, 96, 20, choices=2, tenant="acme")


def served(name: str = "r1") -> list[AnyRecord]:
    """A request that was dispatched twice, beside another one."""
    scores = (Score("a", 96, 96, 0), Score("b", 900, 300, 3))
    return [
        arrived("other", 90),
        arrived(name, 100),
        RequestDispatched(103 * MS, name, "b", 1),
        RequestDispatched(150 * MS, name, "a", 2, scores),
        Step(170 * MS, "a", 7, 19 * MS, 20 * MS, prefill=(Chunk(name, 0, 64, 0),)),
        Step(
            200 * MS, "a", 8, 21 * MS, 25 * MS,
            decode=(("other", 0),), prefill=(Chunk(name, 0, 32, 64), Chunk("x", 0, 16, 0)),
        ),
        FirstToken(201 * MS, name, 101 * MS),
        Step(
            220 * MS, "a", 9, 10 * MS, 11 * MS,
            decode=((name, 0), (name, 1), ("other", 0)), blocks_free=40,
        ),
        Step(230 * MS, "a", 10, 10 * MS, 9 * MS, decode=(("other", 0),)),
        RequestEnded(
            240 * MS, name, "m", "stop", 100 * MS, "a", 2, 96, 32, 4,
            admission_ns=3 * MS, queue_ns=47 * MS, prefill_ns=50 * MS, decode_ns=40 * MS,
            ttft_ns=101 * MS, tpot_ns=13 * MS,
        ),
    ]  # fmt: skip


def entries(records: list[AnyRecord]) -> list[Entry]:
    return [Entry(record.t_ns + 10**18, "x", record) for record in records]


def life(records: list[AnyRecord], name: str = "r1") -> Life:
    found = life_of(entries(records), name)
    assert found is not None
    return found


def test_times_count_from_arrival() -> None:
    found = life(served())
    assert found.arrived_wall_ns == 10**18 + 100 * MS
    assert (found.read_ns, found.ttft_ns) == (2 * MS, 101 * MS)
    assert [(d.at_ns, d.replica, d.attempt) for d in found.decisions] == [
        (3 * MS, "b", 1),
        (50 * MS, "a", 2),
    ]
    assert [score.replica for score in found.decisions[1].scores] == ["a", "b"]
    assert found.ending is not None
    assert (found.ending.at_ns, found.ending.reason, found.ending.attempts) == (140 * MS, "stop", 2)


def test_phases_are_laid_end_to_end_and_empty_ones_left_out() -> None:
    found = life(served())
    assert found.phases == [
        PhaseSpan("admission", 0, 3 * MS),  # type: ignore[arg-type]
        PhaseSpan("queue", 3 * MS, 47 * MS),  # type: ignore[arg-type]
        PhaseSpan("prefill", 50 * MS, 50 * MS),  # type: ignore[arg-type]
        PhaseSpan("decode", 100 * MS, 40 * MS),  # type: ignore[arg-type]
    ]


def test_steps_tell_own_tokens_from_those_beside_and_leave_out_steps_of_others() -> None:
    found = life(served())
    assert [share.step for share in found.steps] == [7, 8, 9]
    chunk, mixed, decode = found.steps
    assert (chunk.prefill_tokens, chunk.past_tokens, chunk.beside_decode_rows) == (64, 0, 0)
    assert (mixed.prefill_tokens, mixed.past_tokens) == (32, 64)
    assert (mixed.beside_decode_rows, mixed.beside_prefill_tokens) == (1, 16)
    assert (decode.decode_rows, decode.beside_decode_rows, decode.blocks_free) == (2, 1, 40)


def test_a_refusal_keeps_its_numbers_and_has_no_ending() -> None:
    refused = RequestRejected(104 * MS, "r1", "m", 429, "queue_full", 67, 66, 3.5)
    found = life([arrived("r1", 100), refused])
    (decision,) = found.decisions
    assert (decision.status, decision.reason, decision.retry_after_s) == (429, "queue_full", 3.5)
    assert (decision.measured, decision.threshold, decision.at_ns) == (67, 66, 4 * MS)
    assert found.ending is None


def test_of_two_requests_with_one_id_the_latest_is_shown() -> None:
    found = life([*served(), arrived("r1", 500)])
    assert (found.earlier, found.decisions, found.ending) == (1, [], None)


def test_an_unknown_id_has_no_life() -> None:
    assert life_of(entries(served()), "r") is None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for source in ("gateway", "a"):
        clocks = Clocks(lambda: 0, lambda: 10**18)
        writer = JournalWriter(tmp_path, source, clocks, JournalLimits(flush_s=60))
        for record in served("req-0001") + served("req-0002") + [arrived("zebra", 900)]:
            if isinstance(record, Step) == (source == "a"):
                writer.append(record)
                writer.flush()
        writer.close()
    return tmp_path


def test_a_life_is_found_in_a_journal_of_several_sources(folder: Path) -> None:
    found = find_life(JournalReader(folder), "req-0002")
    assert found is not None
    assert found.id == "req-0002"
    assert len(found.steps) == 3
    assert found.ending is not None


@pytest.mark.parametrize(
    "name", ["call-7", "chatcmpl-call-7", "cmpl-call-7", "resp_call-7", "mine"]
)
def test_a_life_is_found_by_every_name_that_clients_see(tmp_path: Path, name: str) -> None:
    clocks = Clocks(lambda: 0, lambda: 10**18)
    writer = JournalWriter(tmp_path, "gateway", clocks, JournalLimits(flush_s=60))
    first, second, *rest = served("call-7")
    for record in (first, msgspec.structs.replace(second, client_id="mine"), *rest):
        writer.append(record)
        writer.flush()
    writer.close()
    found = find_life(JournalReader(tmp_path), name)
    assert found is not None
    assert (found.id, found.client_id) == ("call-7", "mine")
    assert found.ending is not None
    assert nearest_ids(JournalReader(tmp_path), "min")[0] == ["mine"]


def test_ids_that_look_alike_are_named_and_the_latest(folder: Path) -> None:
    near, latest = nearest_ids(JournalReader(folder), "req-001")
    assert set(near) == {"req-0001", "req-0002"}
    assert latest[0] == "zebra"
    assert nearest_ids(JournalReader(folder), "zeb")[0] == ["zebra"]


@pytest.mark.parametrize("name", ["", "chatcmpl-", "cmpl-", "resp_"])
def test_no_id_is_not_the_id_of_requests_whose_clients_gave_none(tmp_path, name):
    clocks = Clocks(lambda: 0, lambda: 10**18)
    writer = JournalWriter(tmp_path, "gateway", clocks, JournalLimits(flush_s=60))
    for record in served():
        writer.append(record)
    writer.close()
    assert find_life(JournalReader(tmp_path), "r1") is not None
    assert find_life(JournalReader(tmp_path), name) is None
