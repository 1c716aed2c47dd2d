"""Counts of tokens are remembered, and texts are not."""

import tracemalloc

from sluice.cluster.token_counts import TEXTS_MAX, TokenCounts


def test_a_text_is_counted_once_until_it_is_forgotten():
    counted: list[str] = []

    def count(text: str) -> int:
        counted.append(text)
        return len(text)

    tokens_in = TokenCounts(count)
    assert [tokens_in(text) for text in ("a", "bb", "a", "bb")] == [1, 2, 1, 2]
    assert counted == ["a", "bb"]
    for number in range(TEXTS_MAX - 1):
        tokens_in(f"other {number}")
        tokens_in("a")
    tokens_in("a")
    assert counted.count("a") == 1
    tokens_in("bb")
    assert counted.count("bb") == 2


def test_many_long_texts_take_less_than_a_megabyte():
    tokens_in = TokenCounts(len)
    tracemalloc.start()
    for number in range(TEXTS_MAX + 500):
        tokens_in(f"{number} " + "\u20ac" * 10_000)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1_000_000
