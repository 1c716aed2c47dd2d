"""Recording and replay of a replica: equal plans, hidden tokens, first difference."""

from dataclasses import replace
from random import Random

import msgspec
import pytest

from sluice.core.costmodel import Coefficients, LinearCostModel
from sluice.core.events import (
    Cancelled,
    End,
    SequenceEnded,
    StepDone,
    Submitted,
)
from sluice.core.request import EndReason, PhaseTimes, Request, SequenceId, Usage
from sluice.core.roster import BatchingLimits
from sluice.core.sampling import Sampling
from sluice.core.step import Sampled
from sluice.runtime.recording import ReplicaRecording, ReplicaStart, read_entry
from sluice.runtime.replay import replay
from sluice.testing.replicas import ReplicaRun

MS = 1_000_000
LIMITS = BatchingLimits(400, 4, 40, sequences_max=5)
SECRET = tuple(range(500, 530))


def recorded(seed, limits=LIMITS, key=b"k" * 32):
    """The entries of a busy run: shared prefixes, choices, cancels, preemptions."""
    random = Random(seed)
    cost = LinearCostModel(Coefficients())
    recording = ReplicaRecording(key)
    entries = [recording.start(limits, cost.state(), 0)]
    run = ReplicaRun(limits, cost=cost)
    for number in range(25):
        at_ns = random.randint(0, 2000) * MS
        prompt = SECRET[: random.randint(1, 30)] + tuple(random.choices(range(3), k=5))
        choices = random.choice([1, 1, 2])
        request = Request(f"r{number}", at_ns, prompt, random.randint(1, 50), choices)
        run.submit(request, at_ns, Sampling(seed=number))
        if number % 5 == 0:
            run.cancel(request.id, at_ns + random.randint(1, 300) * MS)
    run.run()
    for now_ns, event, effects in run.events:
        entries += recording.record(event, now_ns, effects)
    return entries


@pytest.mark.parametrize("seed", range(5))
def test_replay_gives_the_same_plans_and_endings(seed):
    entries = recorded(seed)
    result = replay(entries)
    assert result.difference is None
    assert result.steps == sum(entry.name == "PlanShape" for entry in entries) > 50


def test_tokens_do_not_leave_the_process():
    entries = recorded(1)
    seen = set()
    for entry in entries:
        value = msgspec.to_builtins(read_entry(entry))
        seen.update(value.get("request", {}).get("prompt", ()))
        seen.update(token for _, token, _ in value.get("sampled", ()))
    assert len(seen) > 100
    # Any real token here is below 5000; pseudonyms are spread over 24 bits.
    assert sum(token < 5000 for token in seen) < len(seen) / 50


def test_pseudonyms_keep_equality_of_prefixes_under_one_key_only():
    def prompts(key):
        return {
            value.request.id: value.request.prompt
            for value in map(read_entry, recorded(2, key=key))
            if isinstance(value, Submitted)
        }

    first, other = prompts(b"a" * 32), prompts(b"b" * 32)
    assert first["r1"][0] == first["r2"][0]
    assert len({prompt[:1] for prompt in first.values()} & {p[:1] for p in other.values()}) == 0


def test_equal_tokens_get_different_pseudonyms_at_each_place():
    recording = ReplicaRecording(b"k" * 32)
    entry = recording.record(Submitted(Request("a", 0, (7,) * 50, 3)), 0, [])[0]
    value = read_entry(entry)
    assert isinstance(value, Submitted)
    assert len(set(value.request.prompt)) == 50


def test_a_recording_keeps_nothing_of_requests_that_are_over():
    recording = ReplicaRecording(b"k" * 32)
    first, second = SequenceId("a", 0), SequenceId("a", 1)
    recording.record(Submitted(Request("a", 0, (7,), 3, 2)), 0, [])
    recording.record(StepDone(0, (), 1), 1, [SequenceEnded(first, EndReason.STOP)])
    end = End("a", EndReason.CANCELLED, Usage(1, 0, 1), PhaseTimes(), 0)
    recording.record(Cancelled("a"), 2, [end])
    # The step that ran when the client left.
    recording.record(StepDone(1, (Sampled(second, 9),), 1), 3, [])
    assert not recording._chains
    assert not recording._choices


def test_first_difference_is_found():
    entries = recorded(3)
    start = read_entry(entries[0])
    assert isinstance(start, ReplicaStart)
    changed = ReplicaRecording(b"").start(replace(start.limits, sequences_max=2), start.cost, 0)
    result = replay([changed, *entries[1:]])
    assert result.difference is not None
    assert result.difference.recorded != result.difference.replayed
    assert 0 < result.difference.events < 200


def test_decision_that_was_not_recorded_is_a_difference():
    entries = recorded(4)
    last_plan = max(place for place, entry in enumerate(entries) if entry.name == "PlanShape")
    result = replay(entries[:last_plan])
    assert result.difference is not None
    assert result.difference.recorded is None


def test_recording_without_its_start_cannot_be_replayed():
    with pytest.raises(ValueError, match="start"):
        replay(recorded(5)[1:])


def test_unreadable_entries_are_named():
    entry = recorded(6)[1]
    with pytest.raises(ValueError, match="Submitted"):
        read_entry(replace(entry, payload=b"\x90"))
    with pytest.raises(ValueError, match="Nonsense"):
        read_entry(replace(entry, name="Nonsense"))
