"""Workloads drawn from distributions: lengths, names, conversations, and what one seed fixes."""

from collections import Counter
from dataclasses import replace
from itertools import islice, pairwise
from random import Random
from statistics import fmean, pstdev

import pytest

from sluice.workload.asks import Ask, BadWorkload
from sluice.workload.lengths import Empirical, Joint, Lognormal, lengths_of
from sluice.workload.mixes import Mix, shares_of
from sluice.workload.prompts import Prompts
from sluice.workload.synthetic import Sessions, Synthetic

PLAIN = Synthetic(10.0, lengths_of(1000, 200, 0.5))
CHATS = replace(PLAIN, sessions=Sessions(turns=4.0, think_s=5.0, system_tokens=64))


def first(workload, count, seed=1):
    return list(islice(workload.asks(seed), count))


def test_lengths_have_their_mean_and_spread():
    found = [ask.prompt_tokens for ask in first(PLAIN, 20_000)]
    assert fmean(found) == pytest.approx(1000, rel=0.02)
    assert pstdev(found) / fmean(found) == pytest.approx(0.5, rel=0.05)
    assert {ask.output_tokens for ask in first(Synthetic(1.0, lengths_of(10, 7)), 50)} == {7}


def test_other_distributions_draw_what_they_hold():
    draw = Random(1)
    quantiles = Empirical(((0.0, 10.0), (0.5, 100.0), (1.0, 1000.0)))
    found = sorted(quantiles.draw(draw) for _ in range(10_001))
    assert found[5000] == pytest.approx(100, rel=0.1)
    assert 10 <= found[0] <= found[-1] <= 1000
    assert fmean(found) == pytest.approx(quantiles.mean, rel=0.05)
    pairs = ((1, 2), (3, 4))
    assert {Joint(pairs).draw(draw) for _ in range(50)} == set(pairs)
    assert max(Lognormal(100, 2.0, 150).draw(draw) for _ in range(1000)) == 150


def test_one_seed_gives_the_same_requests_and_another_one_others():
    assert first(CHATS, 300) == first(CHATS, 300)
    assert first(CHATS, 300) != first(CHATS, 300, seed=2)


def test_a_change_of_one_figure_leaves_what_is_drawn_for_the_others():
    faster = replace(PLAIN, rate_rps=20.0)
    mixed = replace(PLAIN, mix=Mix(tenants=shares_of("tenant", ["a=1", "b=3"])))
    for other in (faster, mixed):
        pairs = zip(first(PLAIN, 100), first(other, 100), strict=True)
        assert all(a.prompt_tokens == b.prompt_tokens for a, b in pairs)


def test_names_have_their_shares():
    mix = Mix(
        shares_of("model", ["small=1", "large=3"]),
        shares_of("class", ["chat"]),
        shares_of("tenant", ["a=0.5", "b=0.5"]),
    )
    asks = first(replace(PLAIN, mix=mix), 4000)
    assert Counter(ask.model for ask in asks)["large"] == pytest.approx(3000, rel=0.05)
    assert {ask.slo_class for ask in asks} == {"chat"}
    assert Counter(ask.tenant for ask in asks)["a"] == pytest.approx(2000, rel=0.1)


@pytest.mark.parametrize("texts", [["a=0"], ["a=-1"], ["a=x"], ["=1"], ["a=nan"], ["a=1", "a=2"]])
def test_shares_that_are_none_are_refused(texts):
    with pytest.raises(BadWorkload, match="class"):
        shares_of("class", texts)


def test_a_turn_of_a_conversation_begins_with_all_that_came_before_it():
    asks = first(CHATS, 3000)
    assert all(a.at_ns <= b.at_ns for a, b in pairwise(asks))
    assert len(asks) / asks[-1].at_ns * 1e9 == pytest.approx(10.0, rel=0.1)
    turns: dict[int, Ask] = {}
    prompts = Prompts()
    for ask in asks[:400]:
        system, own = ask.prompt
        assert system.tokens == 64
        before = turns.get(own.text)
        if before is not None:
            earlier = prompts.tokens(before.prompt)
            assert prompts.tokens(ask.prompt)[: len(earlier)] == earlier
            assert ask.prompt_tokens > before.prompt_tokens + before.output_tokens
        turns[own.text] = ask
    assert len(turns) < 200


def test_a_conversation_is_the_same_one_at_another_rate():
    def turns(rate_rps):
        found: dict[int, list[tuple[int, int]]] = {}
        for ask in first(replace(CHATS, rate_rps=rate_rps), 600):
            found.setdefault(ask.prompt[1].text, []).append((ask.prompt_tokens, ask.output_tokens))
        return found

    slow, fast = turns(5.0), turns(40.0)
    both = slow.keys() & fast.keys()
    assert len(both) > 60
    for text in both:
        assert all(a == b for a, b in zip(slow[text], fast[text], strict=False))
    assert sum(len(slow[text]) > 1 < len(fast[text]) for text in both) > 10


def test_conversations_come_at_their_rate_from_the_beginning_on():
    slow = replace(CHATS, sessions=Sessions(turns=6.0, think_s=60.0))
    asks = first(slow, 2000)
    for part in (asks[:400], asks[-400:]):
        assert 400 / (part[-1].at_ns - part[0].at_ns) * 1e9 == pytest.approx(10.0, rel=0.2)
    early, late = (fmean(ask.prompt_tokens for ask in part) for part in (asks[:500], asks[-500:]))
    assert early == pytest.approx(late, rel=0.25)
    mean = slow.mean_prompt_tokens(1000, 200)
    assert fmean(ask.prompt_tokens for ask in asks) == pytest.approx(mean, rel=0.15)


def test_prompts_of_different_texts_differ_from_their_first_token_on():
    prompts = Prompts()
    asks = first(PLAIN, 2000)
    starts = [prompts.tokens(ask.prompt)[0] for ask in asks]
    assert len(set(starts)) == len(starts)
    for ask in asks[:50]:
        assert len(prompts.tokens(ask.prompt)) == ask.prompt_tokens


def test_a_prompt_longer_than_the_store_of_tokens_has_its_length():
    asks = first(Synthetic(1.0, lengths_of(600_000, 1)), 2)
    assert [len(Prompts().tokens(ask.prompt)) for ask in asks] == [600_000, 600_000]


@pytest.mark.parametrize(
    ("prompt", "output", "spread"),
    [(0, 1, 0), (1, 0, 0), (float("nan"), 1, 0), (1, 1e12, 0), (1, 1, -1), (1, 1, 50)],
)
def test_lengths_that_are_none_are_refused(prompt, output, spread):
    with pytest.raises(BadWorkload, match=r"must be|spread"):
        lengths_of(prompt, output, spread)
