"""Who may become resident: KV at its worst moment, and time for every row's tokens."""

import pytest

from sluice.core.costmodel import Coefficients, FixedCostModel
from sluice.core.lifecycle import SequenceState
from sluice.core.request import Request
from sluice.core.residency import fits_at_peak, holdings, keeps_pace
from sluice.core.roster import BatchingLimits, BatchingPolicy, Roster
from sluice.core.sequence import generation_of

MS = 1_000_000
S = 1_000_000_000
ROWS = Coefficients(10e6, 0.0, 5e6, 0.0, 0.0)  # a step takes 10 ms and 5 ms per row


def roster_of(**fields):
    limits = BatchingLimits(10_000, 4, fields.pop("blocks", 1000), **fields)
    return Roster(limits, FixedCostModel(ROWS))


def candidate_of(roster, *, tokens=8, output=50, **fields):
    number = len(roster.waiting) + len(roster.residents)
    request = Request(f"r{number}", 0, tuple(range(number, number + tokens)), output, **fields)
    (sequence,) = generation_of(request, 0, number).sequences
    roster.enter(sequence)
    return sequence


def resident(roster, *, late=False, since_ns=0, **fields):
    """One that decodes, its first token having come at ``since_ns``."""
    sequence = candidate_of(roster, **fields)
    roster.ledger.grow(sequence.table, len(sequence.tokens))
    roster.admit(sequence)
    sequence.computed = len(sequence.tokens)
    sequence.begin_decode(since_ns)
    sequence.tokens.append(7)
    sequence.produced = 1
    sequence.late = late
    return sequence


def pace(roster, candidate, now_ns=0):
    return keeps_pace(candidate, holdings(candidate, roster), roster, now_ns)


@pytest.mark.parametrize(("rows", "joins"), [(5, True), (6, False)])
def test_candidate_joins_while_the_step_leaves_prefill_its_share_of_the_tightest_target(
    rows, joins
):
    """50 ms and a fifth of it for prefill leave 40 ms: six rows."""
    roster = roster_of()
    for _ in range(rows):
        resident(roster, tpot_ns=50 * MS)
    assert pace(roster, candidate_of(roster, tpot_ns=80 * MS)) == joins
    assert pace(roster, candidate_of(roster)) == joins


def test_target_of_the_candidate_counts_like_those_of_the_residents():
    roster = roster_of()
    for _ in range(6):
        resident(roster, tpot_ns=80 * MS)
    assert pace(roster, candidate_of(roster, tpot_ns=80 * MS))
    assert not pace(roster, candidate_of(roster, tpot_ns=50 * MS))


def test_without_targets_the_pace_holds_nobody_back():
    roster = roster_of()
    for _ in range(30):
        resident(roster)
    assert pace(roster, candidate_of(roster))


@pytest.mark.parametrize(("late_ms", "counts"), [(100, True), (2000, False)])
def test_resident_that_cannot_catch_up_holds_nobody_back(late_ms, counts):
    """It has 49 tokens to go, each of which could come 35 ms earlier than it is due."""
    roster = roster_of()
    resident(roster, tpot_ns=50 * MS)
    for _ in range(6):
        resident(roster, tpot_ns=300 * MS, since_ns=late_ms * MS)
    now_ns = (50 + late_ms) * MS
    assert pace(roster, candidate_of(roster), now_ns) == (not counts)


def test_target_that_a_row_alone_could_not_meet_is_ignored():
    roster = roster_of()
    resident(roster, tpot_ns=200 * MS)
    assert pace(roster, candidate_of(roster, tpot_ns=14 * MS))
    resident(roster, tpot_ns=14 * MS)
    assert pace(roster, candidate_of(roster))


def test_late_residents_hold_back_late_candidates_only():
    roster = roster_of()
    for _ in range(6):
        resident(roster, tpot_ns=50 * MS, late=True)
    candidate = candidate_of(roster)
    assert pace(roster, candidate)
    candidate.late = True
    assert not pace(roster, candidate)


@pytest.mark.parametrize(("tier", "joins"), [(0, True), (1, False)])
def test_stricter_tier_may_use_the_time_that_is_left_for_prompts(tier, joins):
    roster = roster_of()
    for _ in range(7):
        resident(roster, tpot_ns=50 * MS)
    assert pace(roster, candidate_of(roster, tpot_ns=50 * MS, tier=tier)) == joins
    resident(roster, tpot_ns=50 * MS)
    assert not pace(roster, candidate_of(roster, tpot_ns=50 * MS, tier=tier))


def test_tenant_within_its_share_may_use_the_time_that_is_left_for_prompts():
    roster = roster_of()
    for _ in range(7):
        resident(roster, tpot_ns=50 * MS, tenant="flood")
    assert pace(roster, candidate_of(roster, tpot_ns=50 * MS, tenant="quiet"))
    assert not pace(roster, candidate_of(roster, tpot_ns=50 * MS, tenant="flood"))


def fits_with_history(headroom, blocks):
    """Two sequences of 8 tokens and 12 to come, as all before them had."""
    roster = roster_of(blocks=blocks, kv_headroom=headroom, policy=BatchingPolicy.SLO)
    for _ in range(100):
        roster.lengths.observe(12)
    resident(roster, output=100)
    candidate = candidate_of(roster, output=100)
    return fits_at_peak(candidate, holdings(candidate, roster), roster, None)


def test_headroom_is_kept_free_where_lengths_are_predicted():
    """They need 10 blocks at the worst moment, and one per row is kept in any case."""
    assert fits_with_history(0.02, blocks=12)
    assert not fits_with_history(0.02, blocks=11)
    assert not fits_with_history(0.3, blocks=12)
    assert fits_with_history(0.3, blocks=13)


def test_nothing_is_kept_where_lengths_are_known():
    roster = roster_of(blocks=10, kv_headroom=0.5)
    resident(roster, output=12)
    candidate = candidate_of(roster, output=12)
    assert candidate.state is SequenceState.WAITING
    assert fits_at_peak(candidate, holdings(candidate, roster), roster, None)
