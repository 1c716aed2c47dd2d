"""A question is in one fold, in whatever form it comes."""

from sluice.complexity.folds import (
    FOLDS,
    PASSAGE_ROWS_MAX,
    fingerprints,
    folds_of,
    grouped,
    seen_in,
)
from sluice.complexity.outcomes import Outcome

PASSAGE = "It was the best of times, it was the worst of times, said the book. " * 5


def asked(*prompts, names=None):
    names = names or [f"q{number}" for number in range(len(prompts))]
    return [
        Outcome(name, "", prompt, 0.0, 1.0) for name, prompt in zip(names, prompts, strict=True)
    ]


def test_rows_of_one_question_or_one_prompt_are_one_group():
    found = grouped(asked("a", "b", "c", "  B ", names=["1", "2", "1", "3"]))
    assert found.groups.tolist() == [0, 1, 0, 1]
    assert (found.by_question, found.by_passage) == (2, 0)


def test_questions_about_one_passage_are_one_group():
    found = grouped(asked(PASSAGE + "Who?", "other", PASSAGE + "When?"))
    assert found.groups.tolist() == [0, 1, 0]
    assert (found.by_question, found.by_passage) == (0, 1)


def test_a_beginning_that_many_share_is_an_instruction():
    rows = asked(*(f"{PASSAGE} {number}" for number in range(PASSAGE_ROWS_MAX + 1)))
    assert grouped(rows).by_passage == 0


def test_groups_are_never_split_and_stay_where_they_are_when_rows_are_added():
    rows = asked(*(f"prompt {number % 40}" for number in range(100)))
    grouping = grouped(rows)
    folds = folds_of(rows, grouping)
    assert set(folds.tolist()) == set(range(FOLDS))
    for group in set(grouping.groups.tolist()):
        assert len(set(folds[grouping.groups == group].tolist())) == 1
    more = [*rows, *asked(*(f"further {number}" for number in range(30)))]
    assert folds_of(more, grouped(more))[:100].tolist() == folds.tolist()


def test_prompts_that_were_trained_on_are_known_again():
    known = fingerprints(asked("One  Two", "three"))
    assert seen_in(asked("one two", "four", "THREE"), known).tolist() == [True, False, True]
