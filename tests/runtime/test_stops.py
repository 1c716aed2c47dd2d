"""Stop strings across the borders of pieces."""

from hypothesis import given
from hypothesis import strategies as st

from sluice.runtime.stops import StopMatcher

# Few letters and short strings, so that stops overlap, nest and repeat.
letters = st.text(alphabet="ab\n", max_size=12)
stop_strings = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=4)


def oracle(stops: list[str], text: str) -> tuple[str, bool]:
    """Character by character: the first that completes a stop ends the text before that stop."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


def run(stops, pieces):
    matcher = StopMatcher(tuple(stops))
    shown = []
    for piece in pieces:
        text, stopped = matcher.push(piece)
        shown.append(text)
        if stopped:
            return shown, True
    return [*shown, matcher.finish()], False


@given(stop_strings, st.lists(letters, max_size=6))
def test_the_text_is_that_of_the_oracle_however_it_is_cut(stops, pieces):
    shown, stopped = run(stops, pieces)
    assert ("".join(shown), stopped) == oracle(stops, "".join(pieces))


@given(stop_strings, st.lists(letters, max_size=6))
def test_only_a_suffix_that_could_become_a_stop_is_held_back(stops, pieces):
    matcher = StopMatcher(tuple(stops))
    seen = shown = ""
    for piece in pieces:
        text, stopped = matcher.push(piece)
        seen, shown = seen + piece, shown + text
        if stopped:
            return
        held = seen[len(shown) :]
        assert seen == shown + held
        possible = [k for k in range(len(seen) + 1) if any(s.startswith(seen[k:]) for s in stops)]
        assert len(shown) == min([len(seen), *possible])


def test_without_stops_nothing_is_held():
    assert run([], ["ab", "c"]) == (["ab", "c", ""], False)


def test_finishing_twice_gives_held_text_once():
    matcher = StopMatcher(("xy",))
    assert matcher.push("ax") == ("a", False)
    assert (matcher.finish(), matcher.finish()) == ("x", "")


def test_nothing_is_left_after_a_stop():
    matcher = StopMatcher(("xy",))
    assert matcher.push("ax") == ("a", False)
    assert matcher.push("yz") == ("", True)
    assert matcher.finish() == ""


def test_a_long_stop_in_a_long_repetitive_text_is_found():
    stop = "a" * 500 + "b"
    shown, stopped = run([stop], ["a" * 7] * 400 + ["b"])
    assert stopped
    assert "".join(shown) == "a" * 2300
