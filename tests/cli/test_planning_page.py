"""``docs/planning.md`` shows what the commands in it print."""

import difflib

from tools.shown_output import PAGE, refreshed


def test_every_command_of_the_page_prints_what_the_page_shows():
    text = PAGE.read_text(encoding="utf-8")
    now = refreshed(text)
    changed = difflib.unified_diff(text.splitlines(), now.splitlines(), lineterm="")
    assert now == text, "run `python -m tools.shown_output`:\n" + "\n".join(changed)


def test_the_page_works_its_example_for_three_models_and_two_gpus():
    text = PAGE.read_text(encoding="utf-8")
    for model in ("llama-3.1-8b", "llama-3.1-70b", "gpt-oss-120b"):
        for gpu in ("h100", "b200"):
            assert f"--model {model} --gpu {gpu} --rps 1000" in text
