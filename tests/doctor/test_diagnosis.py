"""Incidents of simulated fleets, from the journal to the verdict."""

import json
import shutil

import pytest

from benchmarks.doctor_cases import CAUSES, Case
from benchmarks.doctor_incidents import fault_s, journal_of
from sluice.cli.main import run
from sluice.doctor.diagnosis import Verdict, Wanted, diagnose
from sluice.doctor.reading import read_journal
from sluice.doctor.windows import Window
from sluice.telemetry.journal import Clocks, JournalLimits, JournalWriter
from sluice.telemetry.records import HostSampled


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
        (508, "mixed_prompts"),
        (504, "longer_context"),
        (513, "admission_limits"),
        (514, "slow_retrieval"),
        (516, "vendor_throttling"),
    ],
)
def test_the_cause_of_an_incident_is_named_first_and_confirmed(incident, seed, cause):
    found = diagnosed(incident(seed, (cause, 0.6)))
    assert found.spike.confirmed
    assert (found.causes[0].name, found.causes[0].verdict) == (CAUSES[cause], Verdict.CONFIRMED)
    assert found.causes[0].share.low >= 0.2
    if cause == "mixed_prompts":
        (other,) = [each for each in found.causes if each.name == "longer_context"]
        assert other.verdict is Verdict.RULED_OUT


def test_a_slow_engine_whose_threads_wait_for_processors_is_a_starved_host(incident, tmp_path):
    folder, start_s = incident(506, ("engine_slowdown", 0.7))
    assert diagnosed((folder, start_s)).causes[0].name == "engine_slowdown"
    shutil.copytree(folder, tmp_path / "j")
    journal = JournalWriter(tmp_path / "j", "hosts", Clocks(lambda: 0, lambda: 0), JournalLimits())
    for at_s in range(int(2 * start_s)):
        # Of each second threads compute half and wait for a tenth of that, or for as long.
        late_s = max(0.0, at_s - start_s)
        used_s, waited_s = 0.5 * at_s, 0.05 * at_s + 0.45 * late_s
        journal.append(
            HostSampled(int(at_s * 1e9), "chat-0", int(used_s * 1e9), int(waited_s * 1e9))
        )
    journal.close()
    found = diagnosed((tmp_path / "j", start_s))
    assert (found.causes[0].name, found.causes[0].verdict) == ("host_cpu", Verdict.CONFIRMED)
    assert "9% before, 50% then" in found.causes[0].evidence[0]
    (slow,) = [each for each in found.causes if each.name == "engine_slowdown"]
    assert slow.verdict is not Verdict.CONFIRMED


def test_the_work_of_a_replica_that_is_away_is_no_imbalance(incident):
    found = diagnosed(incident(509, ("cold_start", 0.8)))
    assert found.causes[0].name == "cold_start"
    (cause,) = [each for each in found.causes if each.name == "imbalance"]
    assert cause.verdict is Verdict.RULED_OUT


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
