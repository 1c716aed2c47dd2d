"""What a diagnosis makes of journals that are torn, empty, doubled, skewed or huge in names."""

import pytest

from sluice.doctor.columns import NoRequests
from sluice.doctor.diagnosis import Verdict, Wanted, diagnose
from sluice.doctor.reading import read_journal
from sluice.doctor.windows import BadWindow, Window, parse_window, whole
from tests.doctor.journals import S, refused, request, written


def slower_from(count=300, at=150, factor=4.0, **facts):
    """Requests of which those from a number on take longer."""
    found = []
    for number in range(count):
        ttft_s = 0.1 + 0.001 * (number * 7919 % 50)
        ttft_s *= factor if number >= at else 1.0
        found += request(number, number * 0.1, ttft_s, **facts)
    return found


def test_a_torn_journal_is_read_up_to_the_tear_which_is_told(tmp_path):
    folder = written(tmp_path / "j", slower_from(3000))
    path = next(folder.iterdir())
    path.write_bytes(path.read_bytes()[:-100])
    journal = read_journal(folder)
    assert 0 < len(journal.requests) < 3000
    assert any("torn frame" in problem for problem in diagnose(journal, Wanted()).problems)


def test_a_journal_without_requests_is_refused_in_words(tmp_path):
    folder = written(tmp_path / "j", [])
    with pytest.raises(NoRequests, match="has no requests"):
        read_journal(folder)


def test_requests_with_one_id_are_counted_apart_and_told(tmp_path):
    found = request(0, 0.0, name="same") + request(1, 10.0, name="same") + slower_from()
    journal = read_journal(written(tmp_path / "j", found))
    assert len(journal.requests) == 302
    assert journal.duplicates == 1
    assert any("used before: 1" in problem for problem in diagnose(journal, Wanted()).problems)


def test_a_window_of_one_request_confirms_nothing(tmp_path):
    journal = read_journal(written(tmp_path / "j", slower_from()))
    found = diagnose(journal, Wanted(incident=Window(29.85 * S, 29.95 * S)))
    assert not found.spike.confirmed
    assert "too few" in found.spike.why


def test_a_window_without_requests_confirms_nothing(tmp_path):
    journal = read_journal(written(tmp_path / "j", slower_from()))
    found = diagnose(journal, Wanted(incident=Window(29.85 * S, 29.86 * S)))
    assert not found.spike.confirmed
    assert "the window has 0 requests" in found.spike.why


def test_windows_outside_the_journal_are_refused_with_where_it_reaches(tmp_path):
    all_of_it = whole(read_journal(written(tmp_path / "j", slower_from())).requests)
    with pytest.raises(BadWindow, match="the journal reaches from"):
        parse_window("900s..950s", all_of_it)
    with pytest.raises(BadWindow, match="ends before it begins"):
        parse_window("20s..10s", all_of_it)
    with pytest.raises(BadWindow, match="is no time"):
        parse_window("yesterday..", all_of_it)


@pytest.mark.parametrize(
    ("text", "start_s", "end_s"),
    [
        ("10s..20s", 10, 20),
        ("10s..", 10, 29.9),
        ("..20s", 0, 20),
        ("5s", 24.9, 29.9),
        ("-10s..-5s", 19.9, 24.9),
        ("1970-01-01T00:00:10Z..1970-01-01T00:00:20Z", 10, 20),
    ],
)
def test_windows_can_be_written_in_several_ways(tmp_path, text, start_s, end_s):
    all_of_it = whole(read_journal(written(tmp_path / "j", slower_from())).requests)
    window = parse_window(text, all_of_it)
    assert window.start_ns / S == pytest.approx(start_s, abs=1e-6)
    assert window.end_ns / S == pytest.approx(end_s, abs=1e-6)


def test_where_all_are_refused_that_is_told_and_nothing_is_blamed(tmp_path):
    found = slower_from(150) + [
        record for number in range(150, 300) for record in refused(number, number * 0.1)
    ]
    journal = read_journal(written(tmp_path / "j", found))
    said = diagnose(journal, Wanted(incident=Window(15.0 * S, 40.0 * S)))
    assert said.refused == (0.0, 1.0)
    assert not said.spike.confirmed
    assert "the window has 0 requests" in said.spike.why


def test_without_steps_the_causes_that_need_them_cannot_be_told(tmp_path):
    journal = read_journal(written(tmp_path / "j", slower_from()))
    found = diagnose(journal, Wanted(incident=Window(15.0 * S, 40.0 * S)))
    assert found.spike.confirmed
    unknown = {each.name for each in found.causes if each.verdict is Verdict.CANNOT_TELL}
    assert {"host_cpu", "preemption", "imbalance", "slow_clients"} <= unknown
    assert any("steps of replicas" in signal for signal in found.missing)
    assert not {each.name for each in found.causes if each.verdict is Verdict.CONFIRMED} & unknown


def test_a_clock_that_runs_behind_makes_no_negative_phases(tmp_path):
    found = slower_from()
    for number in range(300, 320):  # its engine told the first token before the arrival
        found += request(number, number * 0.1, -5.0)
    said = diagnose(read_journal(written(tmp_path / "j", found)), Wanted())
    assert said.excess is None or said.excess.requests > 0


def test_a_hundred_thousand_tenants_are_told_apart_as_far_as_it_helps(tmp_path):
    found = [
        record
        for number in range(100_000)
        for record in request(number, number * 0.001, 0.1, tenant=f"t{number}")[:1]
    ]
    journal = read_journal(written(tmp_path / "j", found))
    assert len(journal.requests.of["tenant"]) <= 10_002
    assert diagnose(journal, Wanted()).spike.confirmed is False


def test_the_change_is_found_where_no_window_is_named(tmp_path):
    journal = read_journal(written(tmp_path / "j", slower_from()))
    found = diagnose(journal, Wanted())
    assert found.windows.found
    assert found.windows.incident.start_ns / S == pytest.approx(15.0, abs=1.5)
    assert found.spike.confirmed
