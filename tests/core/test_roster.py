"""Who waits and who is resident; what their tenants are charged for; who stays out after a loss."""

from sluice.core.costmodel import Coefficients, FixedCostModel
from sluice.core.fairness import QUANTUM_TOKENS
from sluice.core.request import Request
from sluice.core.roster import BatchingLimits, Roster
from sluice.core.sequence import generation_of


def roster_of(blocks=100):
    return Roster(BatchingLimits(10_000, 4, blocks), FixedCostModel(Coefficients()))


def entered(roster, name, *, tenant="", tier=1, tokens=8):
    number = len(roster.waiting) + len(roster.residents)
    request = Request(name, 0, (number,) * tokens, 50, tenant=tenant, tier=tier)
    (sequence,) = generation_of(request, 0, number).sequences
    roster.enter(sequence)
    return sequence


def resident(roster, name, **fields):
    sequence = entered(roster, name, **fields)
    roster.ledger.grow(sequence.table, len(sequence.tokens))
    roster.admit(sequence)
    return sequence


def test_preempted_sequence_waits_at_its_place_by_arrival():
    roster = roster_of()
    first, second = entered(roster, "a"), entered(roster, "b")
    roster.admit(first)
    roster.preempt(first)
    assert roster.waiting == [first, second]


def test_tenant_is_charged_once_for_what_is_computed():
    roster = roster_of()
    one, _ = resident(roster, "a", tenant="one"), resident(roster, "b", tenant="two")
    one.computed = QUANTUM_TOKENS + 1
    assert not roster.shares.ahead("one")
    roster.settle_shares()
    assert roster.shares.ahead("one")
    roster.settle_shares()
    two_tokens = QUANTUM_TOKENS + 1
    roster.shares.charge("two", two_tokens)
    assert not roster.shares.ahead("one")


def test_tokens_computed_again_after_a_preemption_are_free():
    roster = roster_of()
    one, _ = resident(roster, "a", tenant="one"), resident(roster, "b", tenant="two")
    one.computed = QUANTUM_TOKENS
    roster.preempt(one)
    roster.admit(one)
    one.computed = QUANTUM_TOKENS
    roster.settle_shares()
    assert not roster.shares.ahead("one")


def test_tokens_from_the_prefix_cache_are_free():
    roster = roster_of()
    entered(roster, "b", tenant="two")
    one = entered(roster, "a", tenant="one")
    one.computed = 2 * QUANTUM_TOKENS  # what the cache had
    roster.admit(one)
    roster.settle_shares()
    assert not roster.shares.ahead("one")


def test_tenant_whose_last_request_ended_leaves():
    roster = roster_of()
    one, _ = resident(roster, "a", tenant="one"), entered(roster, "b", tenant="two")
    one.computed = 2 * QUANTUM_TOKENS
    roster.end(one)
    assert not roster.shares.ahead("two")


def test_after_a_preemption_only_stricter_tiers_join_until_a_tenth_of_the_pool_is_free():
    roster = roster_of(blocks=100)
    holder = resident(roster, "holder", tokens=380)  # 95 blocks
    lost = resident(roster, "lost", tier=2)
    assert not roster.recovering(2)
    roster.preempt(lost)
    assert [roster.recovering(tier) for tier in (1, 2, 3)] == [False, True, True]
    roster.ledger.release(holder.table)
    assert not roster.recovering(2)
    roster.ledger.grow(holder.table, 380)
    assert not roster.recovering(2)  # it had recovered; another preemption would begin it again
