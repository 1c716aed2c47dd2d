"""The block ledger: what is shared, what is reclaimed, and that nothing is lost."""

import pytest

from sluice.core.errors import InternalError
from sluice.core.kv import BlockLedger, BlockTable
from sluice.testing.ledgers import check_ledger

SIZE = 4


def computed(ledger, tokens):
    """A table that holds these tokens, all of them computed and published."""
    table = BlockTable()
    cached = ledger.attach(table, tokens)
    assert ledger.grow(table, len(tokens))
    ledger.publish(table, tokens, len(tokens))
    return table, cached


def test_growing_takes_whole_blocks_and_nothing_where_they_lack():
    ledger = BlockLedger(3, SIZE)
    table = BlockTable()
    assert ledger.grow(table, 5)
    assert (len(table.ids), ledger.available) == (2, 1)
    assert not ledger.grow(table, 13)
    assert (len(table.ids), ledger.available) == (2, 1)
    assert ledger.grow(table, 12)
    check_ledger(ledger, [table])


def test_full_blocks_are_shared_and_count_once():
    ledger = BlockLedger(8, SIZE)
    first, _ = computed(ledger, list(range(10)))
    second, cached = computed(ledger, [*range(8), 99, 98])
    assert cached == 8
    assert second.ids[:2] == first.ids[:2]
    assert (ledger.used, ledger.shared) == (4, 2)
    assert (ledger.private(first), ledger.private(second)) == (1, 1)
    check_ledger(ledger, [first, second])


def test_last_prompt_token_is_never_taken_from_the_cache():
    ledger = BlockLedger(8, SIZE)
    first, _ = computed(ledger, list(range(8)))
    ledger.release(first)
    _, cached = computed(ledger, list(range(8)))
    assert cached == 4


def test_blocks_can_be_shared_only_once_they_are_computed():
    ledger = BlockLedger(8, SIZE)
    tokens = list(range(12))
    table = BlockTable()
    ledger.grow(table, len(tokens))
    assert ledger.attach(BlockTable(), tokens) == 0
    ledger.publish(table, tokens, 7)
    other = BlockTable()
    assert ledger.attach(other, tokens) == 4


def test_same_tokens_behind_other_prefixes_are_not_shared():
    ledger = BlockLedger(8, SIZE)
    computed(ledger, [1, 1, 1, 1, 5, 5, 5, 5, 9])
    _, cached = computed(ledger, [2, 2, 2, 2, 5, 5, 5, 5, 9])
    assert cached == 0


def test_equal_blocks_computed_side_by_side_become_one():
    ledger = BlockLedger(8, SIZE)
    tokens = list(range(8))
    tables = [BlockTable(), BlockTable()]
    for table in tables:
        ledger.grow(table, 8)
    for table in tables:
        ledger.publish(table, tokens, 8)
    assert tables[0].ids == tables[1].ids
    assert ledger.used == 2
    check_ledger(ledger, tables)


def test_released_blocks_stay_cached_until_they_are_needed():
    ledger = BlockLedger(4, SIZE)
    table, _ = computed(ledger, list(range(9)))
    ledger.release(table)
    assert (ledger.available, ledger.cached) == (4, 2)
    again, cached = computed(ledger, list(range(9)))
    assert cached == 8
    check_ledger(ledger, [again])


def test_least_recently_used_leaf_is_reclaimed_first():
    ledger = BlockLedger(5, SIZE)
    old, _ = computed(ledger, [1] * 9)
    new, _ = computed(ledger, [2] * 5)
    ledger.release(old)
    ledger.release(new)
    table = BlockTable()
    ledger.grow(table, 3 * SIZE)  # two free ones and the end of the old prefix
    assert ledger.attach(BlockTable(), [2] * 5) == 4
    assert ledger.attach(BlockTable(), [1] * 9) == 4


def test_referenced_prefix_is_never_reclaimed():
    ledger = BlockLedger(3, SIZE)
    first, _ = computed(ledger, list(range(8)))
    second = BlockTable()
    assert not ledger.grow(second, 8)
    assert ledger.grow(second, 4)
    check_ledger(ledger, [first, second])


def test_without_a_prefix_cache_nothing_is_shared():
    ledger = BlockLedger(8, SIZE, prefix_cache=False)
    first, _ = computed(ledger, list(range(9)))
    second, cached = computed(ledger, list(range(9)))
    assert cached == 0
    assert not set(first.ids) & set(second.ids)
    ledger.release(first)
    ledger.release(second)
    assert (ledger.available, ledger.cached) == (8, 0)


def test_check_names_what_does_not_balance():
    ledger = BlockLedger(4, SIZE)
    table, _ = computed(ledger, list(range(9)))
    with pytest.raises(InternalError, match="reference counts"):
        check_ledger(ledger, [table, table])
