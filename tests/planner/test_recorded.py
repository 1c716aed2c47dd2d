"""Recorded traffic as a workload: what a journal tells, and what it leaves open."""

import msgspec
import pytest

from sluice.core.events import Submitted
from sluice.core.request import Request
from sluice.planner.recorded import BLOCK_TOKENS, read_recorded
from sluice.planner.replaying import RecordedTraffic
from sluice.telemetry.journal_file import JournalFile
from sluice.telemetry.records import (
    PolicyRecord,
    ReplicaChanged,
    RequestArrived,
    RequestEnded,
    RequestRejected,
    RequestRouted,
)
from sluice.workload.asks import BadWorkload

MS = 1_000_000
READY = ReplicaChanged(0, "m-0", "m", "ready", "", 1, 4096, 32, 512, 8)


def arrived(number, prompt=100, tier=1, slo_class="chat"):
    at_ns = 1000 * MS + 100 * MS * number
    return RequestArrived(
        at_ns + MS, f"r{number}", "m", at_ns, prompt, 64, tier=tier, slo_class=slo_class,
        overload=("queue", "refuse"),
    )  # fmt: skip


def ended(number, reason="stop", tokens=20):
    at_ns = 1000 * MS + 100 * MS * number
    return RequestEnded(
        at_ns + 900 * MS, f"r{number}", "m", reason, at_ns, "m-0", 1, 100, 0, tokens
    )


def submitted(number, prompt, **fields):
    at_ns = 1000 * MS + 100 * MS * number
    request = Request(f"r{number}", at_ns, prompt, 64, slo_class="chat", **fields)
    payload = msgspec.msgpack.encode(Submitted(request))
    return PolicyRecord(at_ns + 2 * MS, "m-0", "event", "Submitted", payload)


def read(folder, *records):
    journal = JournalFile(folder, "test")
    for record in (READY, *records):
        journal.append(record)
    journal.close()
    return read_recorded(folder)


def test_requests_come_as_they_did_and_are_as_long_as_they_were(tmp_path):
    recorded = read(tmp_path, arrived(0), arrived(1, 50), ended(0), ended(1, "length", 64))
    first, second = recorded.asks(1)
    assert (first.at_ns, second.at_ns, first.read_ns) == (0, 100 * MS, MS)
    assert [ask.prompt_tokens for ask in (first, second)] == [100, 50]
    assert [ask.output_tokens for ask in (first, second)] == [20, 64]
    assert second.slo_class == "chat"
    assert recorded.models["m"][0].limits.blocks_total == 512


def test_what_is_not_known_is_drawn_from_others_of_the_class(tmp_path):
    recorded = read(
        tmp_path,
        arrived(0),
        arrived(1, 0),  # refused before it was tokenised
        arrived(2, 70, slo_class="batch"),
        ended(0, tokens=33),
        RequestRejected(1200 * MS, "r1", "m", 429, "queue_full", 1.0, 1.0),
        ended(2, tokens=55),
    )
    asks = list(recorded.asks(1))
    assert (asks[1].prompt_tokens, asks[1].output_tokens) == (100, 33)
    assert (asks[2].prompt_tokens, asks[2].output_tokens) == (70, 55)


def test_a_request_for_a_route_is_played_at_the_model_that_was_chosen(tmp_path):
    ways = {"m": "simple", "large": "complex"}
    records = []
    for number, model in enumerate(("m", "large", "m")):
        came = msgspec.structs.replace(arrived(number), model=model)
        way = ways[model]
        records += [
            RequestRouted(came.t_ns - MS, came.id, "auto", model, way, "score", 0.4, 0.5),
            came,
            msgspec.structs.replace(ended(number), model=model),
        ]
    recorded = read(
        tmp_path, msgspec.structs.replace(READY, replica="l-0", model="large"), *records
    )
    assert [ask.model for ask in recorded.asks(1)] == ["m", "large", "m"]
    assert list(recorded.models) == ["m", "large"]


def test_a_client_that_left_leaves_again(tmp_path):
    recorded = read(tmp_path, arrived(0), arrived(1), ended(0), ended(1, "cancelled", 3))
    _, second = recorded.asks(1)
    assert second.leaves_ns == 899 * MS  # after it came to the fleet
    assert second.output_tokens == 20


def test_an_answer_that_was_cut_off_would_have_been_longer(tmp_path):
    recorded = read(
        tmp_path,
        *(arrived(number) for number in range(8)),
        *(ended(number, tokens=5 + 10 * number) for number in range(6)),
        ended(6, "cancelled", 30),
        ended(7, "cancelled", 60),
    )
    drawn = {tuple(ask.output_tokens for ask in recorded.asks(seed))[6:] for seed in range(40)}
    assert {longer for longer, _ in drawn} == {35, 45, 55}
    assert {longest for _, longest in drawn} == {61}  # none was longer


def test_common_beginnings_become_shared_parts(tmp_path):
    common = tuple(range(2 * BLOCK_TOKENS))
    prompts = [(*common, *range(1000 * n, 1000 * n + 36)) for n in (1, 2)]
    recorded = read(
        tmp_path,
        *(record for n in (0, 1) for record in (arrived(n), submitted(n, prompts[n]), ended(n))),
    )
    first, second = recorded.asks(1)
    assert first.prompt[:2] == second.prompt[:2]
    assert first.prompt[2] != second.prompt[2]
    assert first.prompt_tokens == second.prompt_tokens == 100


def test_targets_of_classes_and_own_wishes_of_clients_are_told_apart(tmp_path):
    targets = {"tpot_ns": 50 * MS, "quantile": 0.9, "tier": 1}
    records = [
        record
        for n, tier in ((0, 1), (1, 0))
        for record in (
            arrived(n, tier=tier),
            submitted(n, (1,), ttft_due_ns=2000 * MS + 100 * MS * n, **targets),
            ended(n),
        )
    ]
    recorded = read(tmp_path, *records)
    chat = recorded.classes["chat"]
    assert (chat.ttft_s, chat.tpot_s, chat.percentile, chat.tier) == (1.0, 0.05, 90.0, 1)
    usual, urgent = RecordedTraffic(recorded, recorded.classes).asks(1)
    assert (usual.tier, urgent.tier) == (None, 0)
    assert usual.may_degrade


def test_entries_of_another_version_are_left_out_and_told(tmp_path):
    odd = PolicyRecord(1200 * MS, "m-0", "event", "Submitted", b"\x81")
    recorded = read(tmp_path, arrived(0), arrived(1), odd, ended(0), ended(1))
    (problem,) = recorded.problems
    assert "another version of sluice wrote were left out (1)" in problem
    assert len(list(recorded.asks(1))) == 2


def test_a_journal_without_a_replica_cannot_be_replayed(tmp_path):
    journal = JournalFile(tmp_path, "test")
    for record in (arrived(0), arrived(1)):
        journal.append(record)
    journal.close()
    with pytest.raises(BadWorkload, match="2 requests and 0 replicas"):
        read_recorded(tmp_path)


def test_records_that_make_no_sense_are_left_out_and_told(tmp_path):
    change = msgspec.structs.replace
    recorded = read(
        tmp_path,
        arrived(0), arrived(1), ended(0),
        change(arrived(2), choices=0),
        change(arrived(3), prompt_tokens=-5),
        ended(1, "teleported"),
        ended(1, tokens=-20),
        change(READY, replica="m-1", blocks_total=-1),
        change(READY, replica="m-2", blocks_total=2**60),
    )  # fmt: skip
    assert [one.arrived.id for one in recorded.requests] == ["r0", "r1"]
    assert list(recorded.replicas) == ["m-0"]
    assert recorded.mean_tokens() == (100, 20)
    assert "6 records that make no sense were left out" in recorded.problems
