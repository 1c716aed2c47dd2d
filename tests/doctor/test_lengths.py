"""Some prompts that are far longer are told apart from prompts that all grow."""

import numpy as np
import pytest

from sluice.doctor.lengths import bar_of


def usual(seed, count=400, mean=600.0):
    return mean * np.random.default_rng(seed).lognormal(0.0, 0.5, count)


def with_long(seed, share, tokens):
    draw = np.random.default_rng(seed + 100)
    prompts = usual(seed)
    chosen = draw.random(len(prompts)) < share
    prompts[chosen] = tokens * draw.uniform(0.8, 1.2, np.count_nonzero(chosen))
    return prompts


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 0.8])
def test_long_prompts_beside_the_usual_ones_are_above_the_bar(seed, share):
    before, after = usual(seed), with_long(seed + 1, share, 12_000)
    bar = bar_of(before, after)
    assert np.quantile(before, 0.7) < bar < 9600
    assert np.mean(after > bar) == pytest.approx(share, abs=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_more_of_the_long_prompts_that_were_there_are_above_the_bar(seed):
    before, after = with_long(seed, 0.08, 6000), with_long(seed + 1, 0.4, 6000)
    bar = bar_of(before, after)
    assert bar > np.quantile(before, 0.7)
    assert 0.2 < np.mean(after > bar) < 0.5


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "grown",
    [lambda p: p * 1.4, lambda p: p * 3.0, lambda p: p * 20.0, lambda p: p + 300, lambda p: p],
    ids=["by-two-fifths", "three-times", "twenty-times", "a-longer-template", "not-at-all"],
)
def test_where_all_prompts_grow_or_none_there_is_no_bar(seed, grown):
    after = grown(usual(seed + 1))
    # A few of a wide distribution may be beyond all that was there before.
    assert np.mean(after > bar_of(usual(seed), after)) < 0.25


def test_without_prompts_there_is_no_bar():
    assert bar_of(np.array([]), usual(1)) == np.inf
    assert bar_of(usual(1), np.array([np.nan])) == np.inf
