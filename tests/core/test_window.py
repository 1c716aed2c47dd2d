"""The window of a remote replica: as much as keeps its own queue short, whatever may fail."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.core.admission import NS_PER_S
from sluice.core.window import FIRST, GAUGE_NS_MAX, Window

MS = 1_000_000
PREDICTED_NS = 100 * MS


class Engine:
    """Runs ``slots`` at a time for ``service_ns``, others wait in it; always kept full."""

    def __init__(self, slots: int, window: Window, service_ns: int = NS_PER_S) -> None:
        self.slots, self.window, self.service_ns = slots, window, service_ns
        self.now_ns = 0
        self.sent = deque[int]()
        self.running: list[tuple[int, int]] = []  # when it ends, when it was sent

    @property
    def places(self) -> int:
        return len(self.sent) + len(self.running)

    def run(self, seconds: float, *, gauge: bool = True, tokens: bool = True) -> list[int]:
        """Let time pass; the waiting at each scrape."""
        waiting, end_ns = [], self.now_ns + int(seconds * NS_PER_S)
        while self.now_ns < end_ns:
            self.now_ns += 20 * MS
            self.running = [run for run in self.running if run[0] > self.now_ns]
            while self.places < self.window.places(self.now_ns):
                self.sent.append(self.now_ns)
            while self.sent and len(self.running) < self.slots:
                sent_ns = self.sent.popleft()
                # Endings are spread, as those of answers of different lengths are.
                spread_ns = (len(self.running) * 37 % 20) * self.service_ns // 20
                self.running.append((self.now_ns + self.service_ns + spread_ns, sent_ns))
                taken_ns = self.now_ns - sent_ns + PREDICTED_NS
                if tokens:
                    self.window.first_token(PREDICTED_NS, taken_ns, self.places, self.now_ns)
            if self.now_ns % NS_PER_S == 0:
                waiting.append(len(self.sent))
                if gauge:
                    self.window.gauged(len(self.sent), self.places, self.now_ns)
        return waiting


@pytest.mark.parametrize("slots", [1, 4, 16, 64, 200])
def test_few_wait_in_the_engine_and_none_of_its_places_is_idle(slots):
    engine = Engine(slots, Window(256))
    engine.run(60)
    waiting = engine.run(60)
    assert sum(waiting) / len(waiting) <= 3
    assert max(waiting) <= 3 + slots // 20
    assert engine.window.places(engine.now_ns) >= slots


def test_gauges_alone_are_enough():
    engine = Engine(16, Window(256))
    engine.run(120, tokens=False)
    waiting = engine.run(60, tokens=False)
    assert sum(waiting) / len(waiting) <= 3
    assert engine.window.places(engine.now_ns) >= 16


def test_without_gauges_late_first_tokens_bound_what_waits():
    engine = Engine(16, Window(256))
    engine.run(60, gauge=False)
    waiting = engine.run(120, gauge=False)
    assert max(waiting) < 48
    assert engine.window.places(engine.now_ns) >= 8


def test_late_first_tokens_do_not_shrink_the_window_of_an_engine_in_which_none_waits():
    window = Window(64)
    window.gauged(0, FIRST, 0)
    before = window.places(0)
    for number in range(20):
        window.first_token(PREDICTED_NS, 50 * PREDICTED_NS, before, number * MS)
    kept = window.places(20 * MS)
    window.gauged(1, FIRST, NS_PER_S)
    for number in range(20):
        window.first_token(PREDICTED_NS, 500 * PREDICTED_NS, before, 200 * NS_PER_S + number * MS)
    assert kept >= before
    assert window.places(200 * NS_PER_S) < kept


def test_a_full_engine_in_which_none_waits_is_soon_given_more():
    window = Window(256)
    for second in range(15):
        window.gauged(0, window.places(second * NS_PER_S), second * NS_PER_S)
    assert window.places(15 * NS_PER_S) > 128


def test_whole_answers_alone_let_the_window_grow_while_the_engine_keeps_up():
    window = Window(64)
    window.gauged(0, 0, 0)
    for _ in range(40):
        window.whole(window.places(0), 0)
    grown = window.places(0)
    window.gauged(9, grown, 1)
    shrunk = window.places(1)
    window.whole(shrunk, 2)
    assert grown == FIRST + 40
    assert window.places(2) == shrunk < grown


def test_an_engine_that_gets_faster_is_given_more():
    engine = Engine(4, Window(256))
    engine.run(30)
    assert engine.window.places(engine.now_ns) <= 8
    engine.slots = 32
    engine.run(60)
    assert engine.window.places(engine.now_ns) >= 32


def test_an_engine_that_got_slower_is_given_less_within_seconds():
    engine = Engine(64, Window(256))
    engine.run(60)
    engine.slots = 8
    engine.run(20)
    assert engine.window.places(engine.now_ns) <= 14


def test_old_gauges_halve_the_window_until_they_come_again():
    engine = Engine(16, Window(256))
    engine.run(60)
    before = engine.window.places(engine.now_ns)
    late_ns = engine.now_ns + GAUGE_NS_MAX + NS_PER_S
    assert engine.window.places(late_ns) == before // 2
    engine.window.gauged(0, 0, late_ns)
    assert engine.window.places(late_ns) >= before - 1


def test_a_window_that_was_blinded_while_many_waited_grows_again():
    window = Window(256)
    for second in range(20):
        window.gauged(50, 50, second * NS_PER_S)
    now_ns = 60 * NS_PER_S
    small = window.places(now_ns)
    for number in range(100):
        places = window.places(now_ns)
        window.first_token(PREDICTED_NS, PREDICTED_NS, places, now_ns + number * MS)
    assert small == 1
    assert window.places(now_ns) > 4


def test_predictions_that_are_wrong_for_good_do_not_close_the_window():
    engine_is_slow = 6 * PREDICTED_NS
    window, now_ns = Window(64), 0
    for _ in range(600):
        now_ns += 100 * MS
        window.first_token(PREDICTED_NS, engine_is_slow, window.places(now_ns), now_ns)
    assert window.places(now_ns) > FIRST


def test_a_refusal_takes_the_window_below_what_was_refused():
    window = Window(64)
    window.refused(6, NS_PER_S)
    assert window.places(NS_PER_S) <= 6


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("gauged"), st.floats(0, 1e6), st.integers(0, 300)),
        st.tuples(st.just("first"), st.integers(0, 10**13), st.integers(0, 10**13)),
        st.tuples(st.just("refused"), st.integers(0, 300), st.just(0)),
    ),
    max_size=60,
)


@given(STEPS, st.lists(st.integers(0, 10 * NS_PER_S), min_size=60, max_size=60), st.integers(1, 99))
def test_the_window_stays_within_its_bounds_whatever_comes(steps, gaps, most):
    window, now_ns = Window(most), 0
    for (kind, one, two), gap_ns in zip(steps, gaps, strict=False):
        now_ns += gap_ns
        if kind == "gauged":
            window.gauged(one, two, now_ns)
        elif kind == "first":
            window.first_token(one, two, window.places(now_ns), now_ns)
        else:
            window.refused(one, now_ns)
        assert 1 <= window.places(now_ns) <= most
    for _ in range(200):
        now_ns += NS_PER_S
        window.gauged(0, window.places(now_ns), now_ns)
    assert window.places(now_ns) == most
