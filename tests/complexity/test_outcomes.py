"""Files of outcomes are read in each of their forms, and what is wrong is told with its line."""

import gzip
import json

import pytest

from sluice.complexity.outcomes import BadOutcomes, not_text, question_of, read_outcomes, reviewed


def written(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_csv_names_the_question_by_its_prompt(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('prompt,weak_ok,strong_ok\n"two\nlines",0,1\nB,true,FALSE\n')
    first, second = read_outcomes(path)
    assert (first.prompt, first.weak, first.strong, first.gain) == ("two\nlines", 0.0, 1.0, 1.0)
    assert (second.weak, second.strong, second.rescue) == (1.0, 0.0, 0.0)
    assert first.question == question_of("TWO  lines")


def test_json_lines_zipped_with_a_pair_of_scores(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    row = {"qid": "q", "task": "t", "prompt": "p", "scores": {"s": 0.25, "m": 0.5, "l": 1}}
    path.write_bytes(gzip.compress(json.dumps(row).encode()))
    (found,) = read_outcomes(path, ("s", "l"))
    assert (found.question, found.task, found.weak, found.strong) == ("q", "t", 0.25, 1.0)


def test_contaminated_rows_are_left_out(tmp_path):
    rows = [{"prompt": f"p{n}", "weak": 0, "strong": 1, "contaminated": n} for n in (0, 1)]
    assert [one.prompt for one in read_outcomes(written(tmp_path / "a", *rows))] == ["p0"]


WRONG = {
    "empty": ("", "has no rows"),
    "no columns": ("prompt,good\na,1\n", "weak_ok, strong_ok not among 'prompt, good'"),
    "no prompt": ("prompt,weak_ok,strong_ok\n ,0,1\n", ":2: prompt must be a text"),
    "no number": ("prompt,weak_ok,strong_ok\na,maybe,1\n", ":2: weak must be 0 to 1"),
    "not finite": ("prompt,weak_ok,strong_ok\na,0,nan\n", ":2: strong must be 0 to 1"),
    "short row": ("prompt,weak_ok,strong_ok\na,0\n", ":2: strong must be 0 to 1"),
    "json": ('{"prompt": "a", "weak": 0, "strong": 1}\n{"prompt": \n', ":2: not a JSON object"),
    "json list": ('{"prompt": "a", "weak": 0, "strong": 1}\n[1]\n', ":2: not a JSON object"),
    "no outcome": ('{"prompt": "a"}\n', "needs weak and strong, or scores"),
    "no pair": ('{"prompt": "a", "scores": {"x": 1, "y": 0}}\n', "choose --pair WEAK:STRONG of x"),
}


@pytest.mark.parametrize(("text", "words"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_told(text, words, tmp_path):
    path = tmp_path / "bad"
    path.write_text(text)
    with pytest.raises(BadOutcomes, match=words.replace("(", r"\(")):
        read_outcomes(path)


def test_an_unknown_model_is_told_with_those_that_there_are(tmp_path):
    path = written(tmp_path / "a", {"prompt": "a", "scores": {"x": 1, "y": 0}})
    with pytest.raises(BadOutcomes, match="no score of z; there are x, y"):
        read_outcomes(path, ("x", "z"))


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"\x1f\x8b broken"], ids=["utf", "gzip"])
def test_a_file_that_is_no_text_is_refused(content, tmp_path):
    path = tmp_path / "bad"
    path.write_bytes(content)
    with pytest.raises(BadOutcomes, match="bad"):
        read_outcomes(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(BadOutcomes, match="No such file"):
        read_outcomes(tmp_path / "none")


def test_repetitions_contradictions_and_prompts_that_are_no_text_are_counted(tmp_path):
    rows = [
        {"prompt": "a b", "weak": 0, "strong": 1},
        {"prompt": "A  b", "weak": 0, "strong": 1},
        {"prompt": "a b", "weak": 1, "strong": 1},
        {"prompt": "\0\1\2\3", "weak": 1, "strong": 1},
    ]
    found = reviewed(read_outcomes(written(tmp_path / "a", *rows)))
    assert (found.rows, found.repeated, found.contradicting, found.no_text) == (4, 2, 1, 1)


def test_text_in_any_language_is_text():
    assert not not_text("これは文章です。\n次の行")
    assert not not_text("")
