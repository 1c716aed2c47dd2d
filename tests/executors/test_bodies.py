"""Fields are added to a body whose other bytes stay."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.executors.bodies import with_fields

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
OURS = {"rid": "r-1", "stream_options": {"include_usage": True}}


@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=3), st.sampled_from(["", " \n", "\t"]))
def test_the_object_gets_the_fields_and_keeps_its_own(theirs, space):
    body = (space + json.dumps(theirs, indent=len(space) or None) + space).encode()
    joined = with_fields(body, OURS)
    assert json.loads(joined) == {**theirs, **OURS}
    if theirs:
        assert joined.startswith(body.strip()[:-1])


def test_much_space_before_the_brace_changes_nothing():
    body = b'{"a":1' + b" " * 200 + b"}"
    assert json.loads(with_fields(body, OURS)) == {"a": 1, **OURS}


def test_bytes_that_a_rewrite_would_change_stay():
    body = b'{"a" : 1.50, "a": 2, "\\u0061": "\xc3\xa4"}'
    assert with_fields(body, {"priority": 3}) == body[:-1] + b',"priority":3}'
    assert with_fields(body, {}) is body


@pytest.mark.parametrize("body", [b"{}", b"{\n\n}", b" {} ", b"{" + b" " * 200 + b"}"])
def test_an_empty_object_gets_no_comma(body):
    assert json.loads(with_fields(body, OURS)) == OURS


@pytest.mark.parametrize("body", [b"", b"[]", b'"{}"', b"null", b"{"])
def test_what_is_no_object_is_refused(body):
    with pytest.raises(ValueError, match="not a JSON object"):
        with_fields(body, OURS)
