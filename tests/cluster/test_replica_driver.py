"""The loop of a replica process: messages in; steps, text and endings out; faults kept to one."""

from collections.abc import Sequence

import pytest

from sluice.core.costmodel import Coefficients, FixedCostModel
from sluice.core.errors import InvalidRequest
from sluice.core.events import ReplicaLimits
from sluice.core.replica import Replica
from sluice.core.request import EndReason, Request, SequenceId
from sluice.core.roster import BatchingLimits
from sluice.core.sampling import Sampling
from sluice.core.step import StopReason
from sluice.executors.base import StepError
from sluice.runtime.generation import Delta, Fault
from sluice.runtime.messages import (
    Cancel,
    ChoiceDone,
    Drain,
    DrainDone,
    FromReplica,
    Load,
    RequestEnded,
    Submit,
    Text,
    ToReplica,
)
from sluice.runtime.output import OutputRules
from sluice.runtime.realtime import ReplicaDriver
from sluice.runtime.surroundings import record_nothing
from sluice.testing.executors import FakeExecutor

LIMITS = BatchingLimits(200, 4, 50, sequences_max=4)
GREEDY = Sampling(temperature=0)


class Closed(Exception):
    """The gateway is gone."""


class Inbox:
    """An in-memory channel: ``script`` gives what comes at each look; then the gateway is gone."""

    def __init__(self, *script: Sequence[ToReplica]) -> None:
        self.script = list(script)
        self.sent: list[FromReplica] = []
        self.waits_s: list[float] = []

    def receive(self, wait_s: float) -> Sequence[ToReplica]:
        self.waits_s.append(wait_s)
        if self.script:
            return self.script.pop(0)
        if wait_s > 0:  # nothing to do, and nothing more will come
            raise Closed
        return ()

    def send(self, messages: Sequence[FromReplica]) -> None:
        self.sent += messages

    def of(self, request_id: str) -> list[FromReplica]:
        return [m for m in self.sent if getattr(m, "request_id", None) == request_id]

    def ending(self, request_id: str) -> RequestEnded:
        ends = [m for m in self.of(request_id) if isinstance(m, RequestEnded)]
        assert len(ends) == 1, "exactly one ending"
        assert self.of(request_id)[-1] is ends[0]
        return ends[0]

    def text(self, request_id: str) -> str:
        return "".join(m.delta.text for m in self.of(request_id) if isinstance(m, Text))


class Numbers:
    """The text of a sequence: its tokens as numbers. It stops or breaks where it is told to."""

    def __init__(self, stop_after: int | None, break_at: int | None, held_back: bool) -> None:
        self._stop_after, self._break_at, self._held_back = stop_after, break_at, held_back
        self._seen: list[int] = []
        self._held = ""

    def push(self, token: int, logprobs: object = None) -> tuple[Delta | None, StopReason | None]:
        self._seen.append(token)
        if len(self._seen) == self._break_at:
            raise RuntimeError("broken output")
        stop = StopReason.STOP_STRING if len(self._seen) == self._stop_after else None
        if self._held_back:
            self._held += f"<{token}>"
            return None, stop
        return Delta(0, f"<{token}>", 1), stop

    def finish(self) -> Delta | None:
        if self._break_at == -1:
            raise RuntimeError("broken at the end")
        return Delta(0, self._held, len(self._seen)) if self._held else None


class Texts:
    """Opens outputs; a grammar's text says what is wrong with the sequence."""

    def open(self, choice: int, rules: OutputRules, grammar: str | None):
        if grammar == "refused":
            raise InvalidRequest("no such grammar")
        if grammar == "unknown":
            raise ValueError("a bug")
        stop_after = len(rules.stop_tokens) or None
        break_at = {"breaks": 2, "breaks at the end": -1}.get(grammar or "")
        return Numbers(stop_after, break_at, grammar == "held back"), None


def submit(name: str, output: int = 5, grammar: str | None = None, **more) -> Submit:
    rules = OutputRules(stop_tokens=more.pop("stop_tokens", ()))
    request = Request(name, 0, tuple(range(len(name), len(name) + 9)), output, **more)
    return Submit(request, GREEDY, rules, grammar)


def run(*script: Sequence[ToReplica], failures=None, clock=None) -> tuple[Inbox, FakeExecutor]:
    inbox = Inbox(*script)
    told = ReplicaLimits(
        LIMITS.context_tokens_max, LIMITS.block_size, LIMITS.blocks_total, LIMITS.sequences_max
    )
    executor = FakeExecutor(told, failures=failures)
    executor.load()
    replica = Replica(LIMITS, FixedCostModel(Coefficients()))
    ticks = iter(range(0, 10**12, 10_000_000))
    driver = ReplicaDriver(
        replica, executor, Texts(), inbox, clock or (lambda: next(ticks)), record_nothing
    )
    try:
        driver.run()
    except Closed:
        assert not replica.roster.waiting
        assert not replica.roster.residents
        assert replica.roster.ledger.available == LIMITS.blocks_total
    assert executor.open == {}, "a sequence stays open in the executor"
    assert (len(driver._texts), driver._choices) == (0, {})
    return inbox, executor


def test_text_comes_token_by_token_and_then_the_endings():
    inbox, _ = run([submit("a", 3)])
    kinds = [type(m) for m in inbox.of("a")]
    assert kinds == [Text, Text, Text, ChoiceDone, RequestEnded]
    assert inbox.ending("a").usage.completion_tokens == 3
    assert inbox.ending("a").reason is EndReason.LENGTH
    assert any(isinstance(message, Load) for message in inbox.sent)


def test_output_does_not_depend_on_what_else_runs():
    alone, _ = run([submit("a", 8)])
    together, _ = run([submit("b", 5)], [submit("a", 8), submit("c", 9, choices=2)], [submit("d")])
    assert together.text("a") == alone.text("a")


def test_a_stop_ends_the_sequence_at_once():
    inbox, executor = run([submit("a", 50, stop_tokens=(1, 1, 1))])
    assert inbox.ending("a").reason is EndReason.STOP
    assert inbox.ending("a").usage.completion_tokens == 3
    assert len(executor.plans) == 3


def test_text_that_was_held_back_comes_when_the_length_is_reached():
    inbox, _ = run([submit("a", 4, "held back")])
    plain, _ = run([submit("a", 4)])
    assert inbox.text("a") == plain.text("a")


def test_what_arrives_during_a_step_is_in_the_next_one():
    _, executor = run([submit("a", 6)], [submit("b", 6)])
    assert [row.sequence.request_id for row in executor.plans[0].rows] == ["a"]
    assert {row.sequence.request_id for row in executor.plans[1].rows} == {"a", "b"}


@pytest.mark.parametrize("looks", range(8))
def test_a_cancel_at_any_look_ends_the_request_once(looks):
    inbox, _ = run([submit("a", 6), submit("b", 6)], *([()] * looks), [Cancel("a"), Cancel("a")])
    assert inbox.ending("a").reason in {EndReason.CANCELLED, EndReason.LENGTH}
    assert inbox.ending("b").reason is EndReason.LENGTH


def test_a_cancel_of_nobody_is_ignored():
    inbox, _ = run([Cancel("nobody"), submit("a")])
    assert inbox.ending("a").reason is EndReason.LENGTH


@pytest.mark.parametrize(
    ("grammar", "words", "fault"),
    [
        ("refused", "no such grammar", Fault.REQUEST),
        ("unknown", "a bug", Fault.ENGINE),
        ("breaks", "broken output", Fault.ENGINE),
        ("breaks at the end", "broken at the end", Fault.ENGINE),
    ],
)
def test_what_is_wrong_with_one_request_ends_that_one_only(grammar, words, fault):
    alone, _ = run([submit("good", 6)])
    inbox, _ = run([submit("good", 6), submit("bad", 4, grammar, choices=2)])
    assert (inbox.ending("bad").reason, inbox.ending("bad").fault) == (EndReason.FAILED, fault)
    assert words in inbox.ending("bad").error
    assert inbox.ending("good").fault is None
    assert inbox.text("good") == alone.text("good")
    assert inbox.ending("good").reason is EndReason.LENGTH


def test_a_request_whose_output_breaks_is_not_computed_to_its_end():
    inbox, _ = run([submit("bad", 100, "breaks")])
    assert inbox.ending("bad").usage.completion_tokens <= 3


def test_a_request_that_cannot_be_set_up_costs_no_step():
    _, executor = run([submit("bad", 4, "refused")])
    assert executor.plans == []


def test_a_failed_step_ends_those_it_blames_and_computes_the_others_again():
    alone, _ = run([submit("good", 6)])
    failure = StepError("a row is broken", (SequenceId("bad", 0),))
    inbox, _ = run([submit("good", 6), submit("bad", 6)], failures={3: failure})
    assert (inbox.ending("bad").reason, inbox.ending("bad").fault) == (
        EndReason.FAILED,
        Fault.ENGINE,
    )
    assert "a row is broken" in inbox.ending("bad").error
    assert inbox.text("good") == alone.text("good")


def test_a_drain_finishes_what_runs_takes_no_more_and_ends_the_loop():
    inbox, _ = run([submit("a", 6)], [Drain(10**15)], [submit("late")])
    assert inbox.ending("a").reason is EndReason.LENGTH
    assert inbox.ending("late").reason is EndReason.SHUTDOWN
    assert isinstance(inbox.sent[-1], DrainDone | Load)
    assert DrainDone() in inbox.sent


def test_a_drain_ends_what_is_left_at_its_deadline():
    inbox, _ = run([submit("a", 100)], [Drain(300_000_000)])
    assert inbox.ending("a").reason is EndReason.SHUTDOWN


def test_a_deadline_that_passes_ends_the_request():
    inbox, _ = run([submit("a", 100, deadline_ns=200_000_000)])
    assert inbox.ending("a").reason is EndReason.EXPIRED


def test_it_does_not_wait_between_steps_and_does_when_idle():
    inbox, _ = run([submit("a", 4)])
    # The first look waits, looks around steps do not, and the last waits again.
    assert inbox.waits_s[0] > 0
    assert set(inbox.waits_s[1:-1]) == {0.0}
    assert inbox.waits_s[-1] > 0
