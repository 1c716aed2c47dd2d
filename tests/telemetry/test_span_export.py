"""What is kept, what is dropped, and that neither holds up what follows the journal."""

import threading
from collections.abc import Sequence

import pytest

from sluice.telemetry.lives import LIVES_MAX, SETTLE_NS, Lives
from sluice.telemetry.records import RequestArrived
from sluice.telemetry.span_export import SpanExport, SpanQueue
from sluice.telemetry.spans import Span
from tests.telemetry.journeys import GIVEN, entries, refused, served, tried_twice


class FakeSender:
    """Takes batches while ``open``; waits for it before each."""

    def __init__(self, takes: bool = True) -> None:
        self.takes, self.open = takes, threading.Event()
        self.open.set()
        self.sent: list[Span] = []
        self.closed = False

    def send(self, spans: Sequence[Span]) -> bool:
        self.open.wait(10)
        if self.takes:
            self.sent += spans
        return self.takes

    def close(self) -> None:
        self.closed = True


class Rig:
    def __init__(self, share: float = 0.0, takes: bool = True, spans_max: int = 1000) -> None:
        self.sender = FakeSender(takes)
        self.queue = SpanQueue(self.sender, spans_max)
        self.now_ns = 0
        self.export = SpanExport(self.queue, share, lambda: self.now_ns)

    def play(self, *requests) -> None:
        for records in requests:
            self.export.take(entries(records))
        self.now_ns += SETTLE_NS
        self.export.take(())

    def names(self) -> list[str]:
        self.export.finish()
        self.queue.close(5)
        return [one.name for one in self.sender.sent]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_where_the_sender_dies_the_process_ends_instead_of_dropping_all_that_follows():
    class Dying(FakeSender):
        def send(self, spans: Sequence[Span]) -> bool:
            raise SystemExit  # ends the thread without a word

    rig = Rig()
    rig.queue = SpanQueue(Dying(), 1000)
    rig.export = SpanExport(rig.queue, 0.0, lambda: rig.now_ns)
    rig.play(served("b" * 32, outcome="missed"))
    rig.queue._wake.set()
    rig.queue._thread.join(5)
    with pytest.raises(RuntimeError, match="has died"):
        rig.play(served("c" * 32, outcome="missed"))


def test_misses_refusals_failures_and_what_clients_keep_are_kept_and_others_by_share():
    rig = Rig(share=0.0)
    sampled = GIVEN[:-2] + "01"
    rig.play(
        served("a" * 32),
        served("b" * 32, outcome="missed"),
        refused("c" * 32),
        served("d" * 32, traceparent=sampled),
        tried_twice(),
    )
    rig.names()
    kept = {one.attributes["gen_ai.request.id"] for one in rig.sender.sent if one.kind == "server"}
    assert kept == {"b" * 32, "c" * 32, "d" * 32, "0123456789abcdef0123456789abcdef"}
    assert {one.attributes.get("sluice.sample.probability", 1.0) for one in rig.sender.sent} == {
        1.0
    }
    assert rig.export.counted.kept == 4


def test_the_share_of_what_was_met_is_told_with_each_span():
    rig = Rig(share=1.0)
    rig.play(served())
    assert "decode" in rig.names()
    assert rig.sender.sent[0].attributes["sluice.sample.probability"] == 1.0


def test_steps_that_come_after_the_ending_are_still_in_it():
    rig = Rig(share=1.0)
    records = served()
    steps = [one for one in records if type(one).__name__ == "Step"]
    rest = [one for one in records if one not in steps]
    rig.play(rest[:0], steps[:1], rest)
    rig2 = Rig(share=1.0)
    rig2.export.take(entries(rest))
    rig2.export.take(entries(steps))
    rig2.now_ns += SETTLE_NS
    rig2.export.take(())
    rig2.names()
    (prefill,) = [one for one in rig2.sender.sent if one.name == "prefill"]
    assert prefill.attributes["sluice.chunks"] == 2
    rig.names()


def test_a_collector_that_hangs_costs_spans_and_nothing_else():
    rig = Rig(share=1.0, spans_max=20)
    rig.sender.open.clear()
    rig.play(*(served(f"{n:032x}", at_ms=n) for n in range(1, 100)))
    assert rig.export.counted.dropped > 500
    rig.sender.open.set()
    rig.names()
    counted = rig.export.counted
    assert counted.exported == len(rig.sender.sent) > 0
    assert counted.exported + counted.dropped == 99 * 8


def test_what_a_collector_does_not_take_is_counted():
    rig = Rig(share=1.0, takes=False)
    rig.play(served())
    assert rig.names() == []
    assert rig.export.counted.dropped == 8
    assert rig.sender.closed


def test_requests_that_never_end_take_bounded_room():
    lives = Lives()
    for n in range(LIVES_MAX + 100):
        (entry,) = entries([RequestArrived(n, f"r{n}", "m", n, 1, 1)])
        lives.add(entry, n)
    assert len(lives._known) == LIVES_MAX
    assert lives.dropped == 100
