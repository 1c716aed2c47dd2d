"""Training finds what tells rescues from the rest, gives probabilities, and says when it cannot."""

from dataclasses import replace

import numpy as np
import pytest

from sluice.complexity.classifier import Card, raw_score
from sluice.complexity.evaluation import cross_validated, judged
from sluice.complexity.features import seen
from sluice.complexity.folds import folds_of, grouped
from sluice.complexity.outcomes import BadOutcomes
from sluice.complexity.training import fitted, platt, trained
from tests.complexity.conftest import made_outcomes


def untold(_stage, _done, _total):
    pass


@pytest.fixture(scope="module")
def validated(outcomes):
    return cross_validated(outcomes, (), untold)


@pytest.fixture(scope="module")
def classifier(validated):
    return trained(validated.rows, validated.held_out, Card("made"))


def test_what_can_be_learned_is_learned_and_length_is_beaten(validated):
    found = validated.evaluation
    assert found.quality.apgr.value > 0.7
    assert found.lead.low > 0.05
    assert found.baselines["random"].apgr.value == pytest.approx(0.5)
    assert found.calibration.error < 0.1


def test_serving_gives_the_score_that_training_computed(validated, classifier, outcomes):
    rows = validated.rows
    weights = fitted(rows, validated.held_out.counts)
    computed = rows.matrix.times(weights[: -1 - rows.scaled.shape[1]])
    computed = computed + rows.scaled @ weights[-1 - rows.scaled.shape[1] : -1] + weights[-1]
    served = [raw_score(classifier.linear, seen(one.prompt)) for one in outcomes]
    assert served == pytest.approx(computed.tolist(), abs=1e-4)


def test_hard_prompts_have_a_higher_probability_than_easy_ones(classifier):
    hard = classifier.score("prove the theorem about lattices integers matrices?")
    assert hard > classifier.score("what colour is bread?") + 0.3


def test_the_card_has_the_thresholds_of_every_share(classifier):
    thresholds = classifier.card.thresholds
    assert len(thresholds) == 100
    assert list(thresholds) == sorted(thresholds, reverse=True)
    assert 0.0 < thresholds[-1] < thresholds[0] < 1.0


def test_case_and_white_space_change_no_score(classifier, outcomes):
    prompt = outcomes[7].prompt
    assert classifier.score(prompt.upper().replace(" ", "   ")) == classifier.score(prompt)


def test_a_trained_model_is_worth_on_new_rows_what_cross_validation_said(validated, classifier):
    fresh = [replace(one, prompt=f"{one.prompt} x") for one in made_outcomes(300, seed=2)]
    found = judged(fresh, classifier, untold)
    assert found.seen == 0
    assert found.quality.apgr.value == pytest.approx(
        validated.evaluation.quality.apgr.value, abs=0.1
    )


def test_rows_that_a_model_was_trained_on_are_counted(outcomes, classifier):
    assert judged(outcomes, classifier, untold).seen == len(outcomes)


def test_a_model_is_judged_on_a_single_row_too(outcomes, classifier):
    (row,) = [one for one in outcomes if one.gain > 0][:1]
    found = judged([row], classifier, untold)
    assert found.quality.apgr.value == pytest.approx(0.5)


def test_the_same_rows_give_the_same_weights(outcomes, classifier):
    again = cross_validated(outcomes, (), untold)
    other = trained(again.rows, again.held_out, Card("made"))
    assert np.array_equal(other.linear.grams, classifier.linear.grams)
    assert (other.slope, other.offset) == (classifier.slope, classifier.offset)


def test_further_rows_of_a_judged_question_are_never_trained_on():
    """With labels that are pure chance, copies of the judged rows would look like an oracle."""
    chance = np.random.default_rng(4)
    rows = [
        replace(one, weak=float(chance.random() < 0.5), strong=float(chance.random() < 0.8))
        for one in made_outcomes(300, seed=3)
    ]
    found = cross_validated(rows, [*rows, *rows], untold).evaluation
    assert found.quality.apgr.value < 0.65
    assert found.grouping.by_question == 600


@pytest.mark.parametrize("fold", [0, 3])
def test_a_task_that_one_fold_alone_has_is_learned_like_any_other(fold):
    rows = made_outcomes(200, seed=5)
    folds = folds_of(rows, grouped(rows)).tolist()
    named = [
        replace(one, task="rare" if its == fold else "usual")
        for one, its in zip(rows, folds, strict=True)
    ]
    found = cross_validated(named, (), untold)
    assert len(found.held_out.counts) == 2
    hard = trained(found.rows, found.held_out, Card("made")).score("prove the theorem about music?")
    assert 0.0 < hard < 1.0


HOPELESS = {
    "no rescue": (lambda one: replace(one, weak=1.0, strong=1.0), "only one class: in no row"),
    "all rescued": (lambda one: replace(one, weak=0.0, strong=1.0), "only one class: in every row"),
    "strong worse": (
        lambda one: replace(one, weak=one.strong, strong=one.weak),
        "the strong model is not better",
    ),
    "one question": (lambda one: replace(one, question="q"), "nearly all rows ask the same"),
}


@pytest.mark.parametrize(("change", "words"), HOPELESS.values(), ids=HOPELESS)
def test_rows_that_teach_nothing_are_refused(change, words, outcomes):
    with pytest.raises(BadOutcomes, match=words):
        cross_validated([change(one) for one in outcomes], (), untold)


def test_too_few_rows_are_refused(outcomes):
    with pytest.raises(BadOutcomes, match="49 rows are too few: at least 50"):
        cross_validated(outcomes[:49], (), untold)


def test_the_mean_of_a_task_is_learned_where_single_outcomes_are_chance():
    """Easy and hard rows have equal chances but for their tasks, whose means differ a little."""
    chance = np.random.default_rng(8)
    named = [
        replace(one, task=task, weak=0.0, strong=float(chance.random() < (0.6 if task else 0.4)))
        for one in made_outcomes(300, seed=4)
        for task in ["hard" if one.prompt.startswith(("prove", "derive", "show")) else ""]
    ]
    with_tasks = cross_validated(named, (), untold).evaluation.quality.apgr.value
    without = cross_validated([replace(one, task="") for one in named], (), untold)
    assert with_tasks > without.evaluation.quality.apgr.value


def test_probabilities_follow_the_log_odds_that_made_them():
    chance = np.random.default_rng(6)
    scores = chance.normal(5, 2, 20_000)
    rescues = (chance.random(20_000) < 1 / (1 + np.exp(-(0.8 * scores - 3)))).astype(float)
    slope, offset = platt(scores, rescues)
    assert slope == pytest.approx(0.8, abs=0.05)
    assert offset == pytest.approx(-3, abs=0.3)


def test_a_score_that_misleads_gives_the_mean_to_all():
    scores = np.arange(100.0)
    slope, offset = platt(scores, (scores < 30).astype(float))
    assert slope == 0.0
    assert 1 / (1 + np.exp(-offset)) == pytest.approx(0.3, abs=0.02)
