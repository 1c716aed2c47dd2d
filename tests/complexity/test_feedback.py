"""What clients told becomes rows: bounded on disk, complete where one outcome is known."""

import json
import resource
import signal

import pytest

from sluice.complexity.feedback import completed, read_feedback
from sluice.complexity.outcome_file import OutcomeFile, before
from sluice.complexity.outcomes import BadOutcomes, Outcome


def known(weak: float, strong: float, count: int = 1) -> list[Outcome]:
    return [Outcome(f"{weak}{strong}{n}", "", "p", weak, strong) for n in range(count)]


def test_what_is_added_is_read_again(tmp_path):
    path = tmp_path / "new" / "told.jsonl"
    file = OutcomeFile(path, 1000)
    file.add("both\nlines", 1.0, 0.5)
    file.add("one", 0.0, None)
    found = read_feedback(path)
    assert [(one.prompt, one.weak, one.strong) for one in found.whole] == [("both\nlines", 1, 0.5)]
    assert [(one.prompt, one.weak, one.strong) for one in found.halves] == [("one", 0, None)]


def test_prompts_are_readable_by_their_owner_alone(tmp_path):
    path = tmp_path / "told.jsonl"
    file = OutcomeFile(path, 100)
    for number in range(9):
        file.add(f"prompt {number}", 1.0, 1.0)
    assert [one.stat().st_mode & 0o777 for one in (path, before(path))] == [0o600, 0o600]


def test_the_file_is_bounded_and_the_oldest_outcomes_go_first(tmp_path):
    path = tmp_path / "told.jsonl"
    file = OutcomeFile(path, 4000)
    for number in range(500):
        file.add(f"prompt {number}", 1.0, 1.0)
        held = path.stat().st_size + (before(path).stat().st_size if before(path).exists() else 0)
        assert held <= 4000
    numbers = [int(one.prompt.split()[1]) for one in read_feedback(path).whole]
    assert numbers == list(range(numbers[0], 500))
    assert len(numbers) > 30


def test_a_line_that_was_cut_at_the_end_is_left_out(tmp_path):
    path = tmp_path / "told.jsonl"
    path.write_text('{"prompt": "a", "weak": 1, "strong": 1}\n{"prompt": "b", "we')
    assert len(read_feedback(path).whole) == 1


@pytest.mark.parametrize(
    "line", ['{"weak": 1}', '{"prompt": " ", "weak": 1}', '{"prompt": "a"}',
             '{"prompt": "a", "weak": 2}', '{"prompt": "a", "weak": "yes"}'],
)  # fmt: skip
def test_a_line_that_is_no_outcome_is_told_with_its_place(tmp_path, line):
    path = tmp_path / "told.jsonl"
    path.write_text(line + "\n" + json.dumps({"prompt": "a", "weak": 1, "strong": 1}) + "\n")
    with pytest.raises(BadOutcomes, match=r"told\.jsonl:1"):
        read_feedback(path)


def test_an_outcome_after_a_torn_line_is_kept_and_read(tmp_path):
    path = tmp_path / "told.jsonl"
    path.write_text('{"prompt": "a", "weak": 1, "strong": 1}\n{"prompt": "b", "we')
    OutcomeFile(path, 10_000).add("c", 1.0, 0.0)
    found = read_feedback(path)
    assert [one.prompt for one in found.whole] == ["a", "c"]
    assert found.torn == 1


def test_a_file_of_torn_lines_alone_teaches_nothing(tmp_path):
    path = tmp_path / "told.jsonl"
    path.write_text("{\n{\n")
    with pytest.raises(BadOutcomes, match="none of its 2 lines is whole"):
        read_feedback(path)


def test_a_disk_that_fills_up_in_the_middle_of_a_line_leaves_none_of_it(tmp_path):
    path = tmp_path / "told.jsonl"
    file = OutcomeFile(path, 10_000)
    file.add("a", 1.0, 1.0)
    held = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(held) + 10, limits[1]))
    try:
        with pytest.raises(OSError, match=r"space|large"):
            file.add("b" * 100, 1.0, 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert path.read_bytes() == held
    file.add("c", 0.0, 0.0)
    assert [one.prompt for one in read_feedback(path).whole] == ["a", "c"]


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(BadOutcomes, match="no outcomes"):
        read_feedback(tmp_path / "none.jsonl")


def test_the_other_outcome_is_what_it_was_in_rows_of_both(tmp_path):
    path = tmp_path / "told.jsonl"
    file = OutcomeFile(path, 10_000)
    for weak, strong in ((0.0, None), (1.0, None), (None, 1.0), (None, 0.0)):
        file.add("p", weak, strong)
    rows = known(0, 1, 60) + known(0, 0, 40) + known(1, 1, 95) + known(1, 0, 5)
    found = completed(read_feedback(path).halves, rows)
    assert [one.weak for one in found] == pytest.approx([0, 1, 95 / 155, 5 / 45], abs=0.02)
    assert [one.strong for one in found] == pytest.approx([0.60, 0.95, 1, 0], abs=0.01)


def test_outcomes_of_one_model_alone_teach_nothing(tmp_path):
    path = tmp_path / "told.jsonl"
    OutcomeFile(path, 10_000).add("p", 1.0, None)
    with pytest.raises(BadOutcomes, match="both"):
        completed(read_feedback(path).halves, [])
