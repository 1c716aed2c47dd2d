"""Durations and sizes as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.config.units import format_duration, format_size, parse_duration_s, parse_size_bytes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("30s", 30.0),
        ("1.5h", 5400.0),
        (" 2 m ", 120.0),
        ("1d", 86400.0),
        ("250us", 0.00025),
        ("3ns", 3e-9),
    ],
)
def test_durations_are_read_as_seconds(text, seconds):
    assert parse_duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "size"),
    [("10", 10), ("64KiB", 65536), ("1.5MiB", 1572864), ("4 GiB", 4 << 30), ("2MB", 2_000_000)],
)
def test_sizes_are_read_as_bytes(text, size):
    assert parse_size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "s", "-1s", "1e3s", "1s 2ms", "soon"])
def test_text_without_an_amount_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="500ms"):
        parse_duration_s(text)


def test_a_duration_without_unit_is_refused_with_the_units():
    with pytest.raises(ValueError, match=r"'500' has no unit.*ms, s, m, h, d"):
        parse_duration_s("500")


def test_an_unknown_unit_is_named():
    with pytest.raises(ValueError, match="'fortnights'"):
        parse_duration_s("2fortnights")
    with pytest.raises(ValueError, match="'gib'"):
        parse_size_bytes("2gib")


def test_part_of_a_byte_is_refused():
    with pytest.raises(ValueError, match="whole number of bytes"):
        parse_size_bytes("0.5B")


@given(st.integers(min_value=1, max_value=10**15))
def test_a_printed_duration_reads_back_as_the_same_nanoseconds(nanoseconds):
    seconds = nanoseconds / 1e9
    assert parse_duration_s(format_duration(seconds)) == pytest.approx(seconds, rel=1e-12)


@given(st.integers(min_value=0, max_value=1 << 50))
def test_a_printed_size_reads_back_exactly(size):
    assert parse_size_bytes(format_size(size)) == size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.5, "500ms"), (90.0, "90s"), (86400, "24h"), (600.0, "10m"), (0, "0s")],
)
def test_durations_print_as_a_person_writes_them(seconds, text):
    assert format_duration(seconds) == text
