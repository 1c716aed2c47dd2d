"""Incidents of simulated fleets, from the journal to the verdict."""

import json

import pytest

from benchmarks.doctor_incidents import Case, fault_s, journal_of
from sluice.cli.main import run
from sluice.doctor.columns import read_journal
from sluice.doctor.diagnosis import Verdict, Wanted, diagnose
from sluice.doctor.windows import Window


@pytest.fixture(scope="module")
def incident(tmp_path_factory):
    root, made = tmp_path_factory.mktemp("incidents"), {}

    def journal(seed, *faults):
        case = Case(seed, faults)
        if case not in made:
            made[case] = journal_of(case, root / case.name), fault_s(case)
        return made[case]

    return journal


def diagnosed(incident, **wanted):
    folder, start_s = incident
    journal = read_journal(folder)
    window = Window(start_s * 1e9, float(journal.requests["arrived_ns"][-1]) + 1)
    return diagnose(journal, Wanted(incident=window, **wanted))


@pytest.mark.parametrize(
    ("seed", "cause"),
    [
        (504, "longer_context"),
        (513, "admission_limits"),
        (514, "slow_retrieval"),
        (516, "vendor_throttling"),
    ],
)
def test_the_cause_of_an_incident_is_named_first_and_confirmed(incident, seed, cause):
    found = diagnosed(incident(seed, (cause, 0.6)))
    assert found.spike.confirmed
    assert (found.causes[0].name, found.causes[0].verdict) == (cause, Verdict.CONFIRMED)
    assert found.causes[0].share.low >= 0.2


def test_without_a_fault_nothing_is_blamed(incident):
    found = diagnosed(incident(500))
    assert not found.spike.confirmed
    assert not found.causes


def test_the_command_prints_one_document_and_exits_with_a_finding(incident, capsys):
    folder, start_s = incident(514, ("slow_retrieval", 0.6))
    window = f"{start_s:.3f}s.."
    assert run(["doctor", str(folder), "--window", window, "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["spike"]["confirmed"]
    assert shown["spike"]["before_s"] < shown["spike"]["after_s"]
    cause = shown["causes"][0]
    assert (cause["name"], cause["verdict"]) == ("slow_retrieval", "confirmed")
    assert cause["share_low"] <= cause["share"] <= cause["share_high"]
    assert cause["evidence"]


def test_a_folder_that_is_not_there_is_bad_input(tmp_path, capsys):
    assert run(["doctor", str(tmp_path / "none")]) == 2
    assert "there is no journal folder" in capsys.readouterr().err
