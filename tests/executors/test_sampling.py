"""The vectorised sampler against a slow one written for reading, and its promises to clients."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.core.sampling import Sampling
from sluice.executors.nucleus import draw_filtered, draw_unfiltered
from sluice.executors.sampling import NoTokenLeft, choose_tokens, open_sampling

VOCAB = 150  # not a multiple of the block of 64

# A coarse grid, so that ties are frequent.
LOGITS = st.lists(st.integers(-12, 12).map(lambda n: n / 2), min_size=VOCAB, max_size=VOCAB)


@st.composite
def samplings(draw):
    return Sampling(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 1.7])),
        top_k=draw(st.sampled_from([0, 1, 2, 5, 40, 149, 500])),
        top_p=draw(st.sampled_from([1.0, 0.95, 0.5, 0.1, 1e-6])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.5, -1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.8])),
        logit_bias=draw(st.dictionaries(st.integers(0, VOCAB - 1), st.integers(-100, 100))),
        seed=draw(st.integers(0, 2**70)),
        logprobs_top=draw(st.sampled_from([None, 0, 3, 20])),
    )


class FixedMask:
    """Allows the given tokens."""

    def __init__(self, tokens):
        self.tokens = tokens

    def fill(self, words):
        array = np.frombuffer(words, np.uint32)
        for token in self.tokens:
            array[token // 32] |= np.uint32(1 << (token % 32))


def slow_adjusted(logits, sampling, prompt, generated, allowed):
    """Mask, bias, repetition, presence and frequency, one token at a time."""
    adjusted = []
    for token, logit in enumerate(logits):
        value = np.float32(logit)
        if allowed is not None and token not in allowed:
            value = np.float32(-np.inf)
        value = value + np.float32(sampling.logit_bias.get(token, 0))
        if token in prompt or token in generated:
            penalty = np.float32(sampling.repetition_penalty)
            value = value / penalty if value > 0 else value * penalty
        count = generated.count(token)
        if count and (sampling.presence_penalty or sampling.frequency_penalty):
            value = value - np.float32(
                np.float32(count) * np.float32(sampling.frequency_penalty)
                + np.float32(sampling.presence_penalty)
            )
        adjusted.append(float(value))
    return adjusted


def slow_survivors(adjusted, sampling):
    """Weights of the tokens that the filters leave, by id, and how sure the last cut is."""
    best = max(adjusted)
    scaled = [
        np.float32(np.float32(v) - np.float32(best)) / np.float32(sampling.temperature)
        for v in adjusted
    ]
    least = np.float32(math.log(sampling.min_p)) if sampling.min_p else -math.inf
    ranked = sorted((-float(x), token) for token, x in enumerate(scaled) if x >= least)
    ranked = [(x, token) for x, token in ranked if x < math.inf]
    ranked = ranked[: sampling.top_k or None]
    weights = [(token, math.exp(-x)) for x, token in ranked]
    total = math.fsum(weight for _, weight in weights)
    target, kept, held, margin = sampling.top_p * total, [], 0.0, math.inf
    for token, weight in weights:
        kept.append((token, weight))
        held += weight
        margin = min(margin, abs(held - target) / total)
        if held >= target:
            break
    return dict(sorted(kept)), margin


def slow_draw(weights, uniform):
    """The token whose slice of the unit interval holds the number, and the distance to its ends."""
    total = math.fsum(weights.values())
    held = 0.0
    for token, weight in weights.items():
        if uniform * total < held + weight:
            return token, min(uniform * total - held, held + weight - uniform * total) / total
        held += weight
    return token, 0.0


@given(st.lists(st.tuples(LOGITS, samplings()), min_size=1, max_size=5), st.data())
def test_rows_get_the_token_that_the_slow_sampler_gives(rows, data):
    prompt = data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=8))
    generated = data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=8))
    allowed = data.draw(st.none() | st.sets(st.integers(0, VOCAB - 1), min_size=1))
    mask = None if allowed is None else FixedMask(allowed)
    states = [open_sampling(s, prompt, 0, VOCAB, mask) for _, s in rows]
    for state in states:
        for token in generated:
            state.record(token)
    tokens, logprobs = choose_tokens(np.array([x for x, _ in rows], np.float32), states)
    for place, (logits, sampling) in enumerate(rows):
        adjusted = slow_adjusted(logits, sampling, prompt, generated, allowed)
        if sampling.temperature == 0:
            assert tokens[place] == int(np.argmax(np.array(adjusted, np.float32)))
        else:
            check_drawn(tokens[place], adjusted, sampling, states[place])
        check_logprobs(logprobs.get(place), logits, sampling, tokens[place])


def check_drawn(token, adjusted, sampling, state):
    weights, cut_margin = slow_survivors(adjusted, sampling)
    if cut_margin < 1e-5:  # the top-p target lies on a cut; float32 may round to either side
        return
    assert token in weights
    expected, margin = slow_draw(weights, uniform_of(state))
    assert token == expected or margin < 1e-5


def uniform_of(state):
    """The number that the state's last draw used, by the published splitmix64 in plain integers."""
    word = (state.key + state.drawn * 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return ((word ^ (word >> 31)) >> 11) * 2.0**-53


def check_logprobs(entry, logits, sampling, token):
    if sampling.logprobs_top is None:
        assert entry is None
        return
    norm = math.log(math.fsum(math.exp(x) for x in logits))
    best = sorted((-x, t) for t, x in enumerate(logits))[: sampling.logprobs_top]
    assert entry.sampled.token == token
    assert entry.sampled.logprob == pytest.approx(logits[token] - norm, abs=1e-4)
    assert [e.token for e in entry.top] == [t for _, t in best]
    assert [e.logprob for e in entry.top] == pytest.approx([-x - norm for x, _ in best], abs=1e-4)


@given(st.lists(st.tuples(LOGITS, samplings()), min_size=2, max_size=6), st.integers(1, 4))
def test_a_row_does_not_depend_on_its_batch_mates(rows, steps):
    logits = np.array([x for x, _ in rows], np.float32)
    together = [open_sampling(s, (1, 2), 0, VOCAB) for _, s in rows]
    alone = [open_sampling(s, (1, 2), 0, VOCAB) for _, s in rows]
    for _ in range(steps):
        batched, _ = choose_tokens(logits.copy(), together)
        single = [
            int(choose_tokens(logits[i : i + 1].copy(), [state])[0][0])
            for i, state in enumerate(alone)
        ]
        assert batched.tolist() == single


def test_equal_seeds_draw_equal_tokens_and_other_choices_other_ones():
    logits = np.zeros((3, 5000), np.float32)
    sampling = Sampling(seed=7)
    states = [open_sampling(sampling, (), choice, 5000) for choice in (0, 0, 1)]
    drawn = np.array([choose_tokens(logits.copy(), states)[0] for _ in range(20)])
    assert (drawn[:, 0] == drawn[:, 1]).all()
    assert (drawn[:, 0] != drawn[:, 2]).any()
    assert len(set(drawn[:, 0].tolist())) > 15


def test_without_a_seed_two_sequences_draw_differently():
    states = [open_sampling(Sampling(), (), 0, 50_000) for _ in range(2)]
    tokens, _ = choose_tokens(np.zeros((2, 50_000), np.float32), states)
    assert tokens[0] != tokens[1]


def test_draws_follow_the_distribution():
    shares = np.array([0.5, 0.25, 0.15, 0.1])
    logits = np.log(np.repeat(shares[None], 20_000, axis=0)).astype(np.float32)
    states = [open_sampling(Sampling(seed=n), (), 0, 4) for n in range(len(logits))]
    tokens, _ = choose_tokens(logits, states)
    assert np.bincount(tokens, minlength=4) / len(tokens) == pytest.approx(shares, abs=0.015)


@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0], ids=["flat", "ordinary", "peaked"])
@pytest.mark.parametrize(
    "filters",
    [
        Sampling(top_p=0.9),
        Sampling(top_p=0.999),
        Sampling(top_k=40),
        Sampling(top_k=2000),
        Sampling(min_p=0.02),
        Sampling(top_k=300, top_p=0.8, min_p=0.001),
    ],
    ids=str,
)
def test_over_a_large_vocabulary_draws_equal_those_from_a_full_sort(spread, filters):
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal(49_152) * spread).astype(np.float32)
    scaled = np.repeat((logits - logits.max())[None], 8, axis=0)
    uniforms = (np.arange(8) + 0.5) / 8
    order = np.argsort(-scaled[0], kind="stable")
    weights = np.exp(scaled[0, order].astype(np.float64))
    kept = np.ones(len(order), bool)
    if filters.min_p:
        kept &= weights >= filters.min_p
    if filters.top_k:
        kept[filters.top_k :] = False
    held = np.where(kept, weights, 0).cumsum()
    kept[int((held < filters.top_p * held[-1]).sum()) + 1 :] = False
    survivors = np.sort(order[kept])
    slices = np.exp(scaled[0, survivors].astype(np.float64)).cumsum()
    expected = survivors[np.searchsorted(slices, uniforms * slices[-1], side="right")]
    drawn = draw_filtered(scaled, uniforms, [filters] * 8)
    # Where a slice ends within rounding of the number, its neighbour may be drawn.
    places = np.searchsorted(survivors, drawn) - np.searchsorted(survivors, expected)
    assert set(drawn.tolist()) <= set(survivors.tolist())
    assert (np.abs(places) <= 1).all()
    assert (places == 0).sum() >= 6


def test_the_ends_of_the_unit_interval_give_tokens_with_weight():
    scaled = np.array([[-np.inf, 0.0, -1.0, -np.inf]] * 2, np.float32)
    uniforms = np.array([0.0, np.nextafter(1.0, 0.0)])
    assert draw_unfiltered(scaled.copy(), uniforms).tolist() == [1, 2]
    assert draw_filtered(scaled, uniforms, [Sampling(top_k=3)] * 2).tolist() == [1, 2]


def test_a_temperature_near_zero_is_greedy():
    states = [open_sampling(Sampling(temperature=1e-40, seed=n), (), 0, 3) for n in range(8)]
    tokens, _ = choose_tokens(np.array([[1.0, 3.0, 2.0]] * 8, np.float32), states)
    assert tokens.tolist() == [1] * 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_that_allows_nothing_blames_its_row_and_changes_no_state(temperature):
    free = open_sampling(Sampling(temperature=temperature, seed=1), (), 0, VOCAB)
    stuck = open_sampling(Sampling(temperature=temperature), (), 0, VOCAB, FixedMask(()))
    with pytest.raises(NoTokenLeft) as caught:
        choose_tokens(np.zeros((2, VOCAB), np.float32), [free, stuck])
    assert caught.value.row == 1
    assert free.drawn == 0


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0), Sampling(), Sampling(top_k=3), Sampling(top_p=0.9)]
)
def test_logits_that_are_not_numbers_blame_their_row(sampling):
    logits = np.zeros((3, VOCAB), np.float32)
    logits[2, 5] = np.nan
    greedy = Sampling(temperature=0)
    states = [open_sampling(s, (), 0, VOCAB) for s in (greedy, sampling, sampling)]
    with pytest.raises(NoTokenLeft) as caught:
        choose_tokens(logits, states)
    assert caught.value.row == 2


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        (Sampling(temperature=-0.1), "temperature"),
        (Sampling(temperature=math.nan), "temperature"),
        (Sampling(top_k=-1), "top_k"),
        (Sampling(top_p=0.0), "top_p"),
        (Sampling(top_p=1.1), "top_p"),
        (Sampling(min_p=1.5), "min_p"),
        (Sampling(presence_penalty=math.inf), "presence_penalty"),
        (Sampling(repetition_penalty=0.0), "repetition_penalty"),
        (Sampling(logprobs_top=21), "logprobs_top"),
        (Sampling(logit_bias={VOCAB: 1.0}), "logit_bias"),
        (Sampling(logit_bias={3: math.nan}), "logit_bias"),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(sampling, named):
    with pytest.raises(ValueError, match=named):
        open_sampling(sampling, (), 0, VOCAB)
