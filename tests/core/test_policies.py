"""In which order prefill is given, and who gives way."""

import pytest

from sluice.core.costmodel import Coefficients, FixedCostModel
from sluice.core.policies import SloPolicy
from sluice.core.request import Request
from sluice.core.roster import BatchingLimits, Roster
from sluice.core.sequence import generation_of

MS = 1_000_000
S = 1_000_000_000
TOKENS = Coefficients(0.0, 1e6, 0.0, 0.0, 0.0)  # a prompt takes a millisecond per token


class Waiting:
    """A roster and those that wait in it, each made with what matters of it."""

    def __init__(self, blocks=4000):
        self.roster = Roster(BatchingLimits(10_000, 4, blocks), FixedCostModel(TOKENS))
        self.number = 0

    def add(self, name, tokens=10, ttft_ms=None, *, tier=1, tenant="", output=50):
        self.number += 1
        due_ns = None if ttft_ms is None else ttft_ms * MS
        prompt = tuple(range(tokens))
        request = Request(name, 0, prompt, output, tier=tier, tenant=tenant, ttft_due_ns=due_ns)
        (sequence,) = generation_of(request, 0, self.number).sequences
        self.roster.enter(sequence)
        return sequence

    def order(self, now_ms=0):
        arranged = SloPolicy().arrange(self.roster.waiting, self.roster, now_ms * MS)
        return [sequence.id.request_id for sequence in arranged]


def test_due_time_decides_within_a_tier():
    waiting = Waiting()
    waiting.add("late", ttft_ms=900)
    waiting.add("early", ttft_ms=200)
    waiting.add("strict", ttft_ms=5000, tier=0)
    assert waiting.order() == ["strict", "early", "late"]


def test_who_cannot_be_on_time_any_more_comes_after_all_who_can():
    waiting = Waiting()
    lost = waiting.add("lost", tokens=300, ttft_ms=200, tier=0)
    waiting.add("fine", tokens=300, ttft_ms=5000, tier=5)
    assert waiting.order() == ["fine", "lost"]
    assert lost.late


def test_prompt_that_is_mostly_cached_is_not_late():
    waiting = Waiting()
    first = waiting.add("first", tokens=800)
    waiting.roster.ledger.grow(first.table, 800)
    waiting.roster.ledger.publish(first.table, first.tokens, 800)
    again = waiting.add("again", tokens=810, ttft_ms=100)
    waiting.order()
    assert not again.late


def test_lateness_is_looked_at_each_time():
    waiting = Waiting()
    waiting.add("a", tokens=100, ttft_ms=500)
    waiting.add("b", tokens=100, ttft_ms=5000)
    assert waiting.order(now_ms=400) == ["a", "b"]
    assert waiting.order(now_ms=401) == ["b", "a"]


def test_who_has_no_target_is_never_late():
    waiting = Waiting()
    open_ended = waiting.add("open", tokens=3000)
    waiting.order(now_ms=50_000)
    assert not open_ended.late


def test_tenant_ahead_of_its_share_comes_after_the_others_of_its_tier():
    waiting = Waiting()
    waiting.add("flood", ttft_ms=300, tenant="flood")
    waiting.add("quiet", ttft_ms=900, tenant="quiet")
    waiting.add("lower", ttft_ms=100, tenant="quiet", tier=2)
    assert waiting.order() == ["flood", "quiet", "lower"]
    waiting.roster.shares.charge("flood", 5000)
    assert waiting.order() == ["quiet", "flood", "lower"]


def test_the_tenant_with_more_residents_is_ahead_before_anything_is_computed():
    waiting = Waiting()
    quiet = waiting.add("quiet", tenant="quiet")
    flood = [waiting.add(f"flood{n}", tenant="flood") for n in range(6)]
    for sequence in (quiet, *flood):
        waiting.roster.admit(sequence)
    assert waiting.roster.shares.ahead("flood")
    assert not waiting.roster.shares.ahead("quiet")
    waiting.add("next", tenant="flood")
    waiting.add("other", tenant="quiet")
    assert waiting.order() == ["other", "next"]
    waiting.roster.preempt(flood[0])
    waiting.roster.end(flood[1])
    assert not waiting.roster.shares.ahead("flood")


def test_backlog_beyond_the_due_times_turns_the_order_to_shortest_first():
    """2,400 ms of work are more than the last of three can wait for."""
    waiting = Waiting()
    waiting.add("long", tokens=800, ttft_ms=1000)
    waiting.add("short", tokens=100, ttft_ms=1900)
    assert waiting.order() == ["long", "short"]
    waiting.add("longer", tokens=1500, ttft_ms=2100)
    assert waiting.order() == ["short", "long", "longer"]


def test_late_ones_keep_their_turns_under_any_backlog():
    waiting = Waiting()
    waiting.add("first", tokens=800, ttft_ms=10)
    for number in range(20):
        waiting.add(f"r{number}", tokens=100, ttft_ms=1000)
    assert waiting.order(now_ms=5000)[0] == "first"


@pytest.mark.parametrize(("tier", "fits"), [(0, True), (1, False), (2, False)])
def test_after_a_preemption_the_like_of_it_stays_out_though_it_would_fit(tier, fits):
    waiting = Waiting(blocks=100)
    holder, lost = waiting.add("holder", tokens=370), waiting.add("lost", tokens=8)
    for sequence in (holder, lost):
        waiting.roster.ledger.grow(sequence.table, len(sequence.tokens))
        waiting.roster.admit(sequence)
    waiting.roster.preempt(lost)
    candidate = waiting.add("next", tokens=4, output=4, tier=tier)
    holder.output_limit = 4
    assert SloPolicy().fits(candidate, waiting.roster, 0, None) == fits


def test_victim_is_of_the_lowest_tier_and_late_before_others():
    waiting = Waiting()
    sequences = [
        waiting.add("strict", tier=0, ttft_ms=100),
        waiting.add("on_time", tier=2, ttft_ms=100),
        waiting.add("late", tier=2, ttft_ms=100),
        waiting.add("also", tier=2, ttft_ms=100),
    ]
    for sequence in sequences:
        waiting.roster.ledger.grow(sequence.table, 10)
    sequences[2].late = True
    victim = SloPolicy().victim(sequences, waiting.roster, 0)
    assert victim.id.request_id == "late"
