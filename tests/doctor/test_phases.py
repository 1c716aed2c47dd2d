"""Phases of slow requests add up, whichever of two ways the wait in the fleet is told."""

import msgspec
import pytest

from sluice.doctor.diagnosis import Wanted, diagnose
from sluice.doctor.reading import read_journal
from sluice.doctor.windows import Window
from sluice.telemetry import records
from tests.doctor.journals import S, request, written

LATE_NS = 3_000_000  # between the last step and the ending that the gateway notes


def waited(number, at_s, ttft_s, wait_s, *, apart):
    """A request that waited in the fleet; its queue phase holds the wait, or is ``apart``."""
    for record in request(number, at_s, ttft_s):
        match record:
            case records.RequestDispatched():
                yield msgspec.structs.replace(record, t_ns=record.t_ns + int(wait_s * S))
            case records.RequestEnded():
                told_ns = record.queue_ns - (int(wait_s * S) if apart else 0)
                ended_ns = record.t_ns + LATE_NS
                yield msgspec.structs.replace(record, t_ns=ended_ns, queue_ns=told_ns)
            case _:
                yield record


@pytest.mark.parametrize("apart", [False, True])
def test_the_wait_in_the_fleet_counts_once(tmp_path, apart):
    found = []
    for number in range(200):
        slow = number >= 100
        ttft_s, wait_s = (2.0, 0.9) if slow else (0.1, 0.0)
        found += waited(number, number / 10, ttft_s, wait_s, apart=apart)
    journal = read_journal(written(tmp_path, found))
    window = Window(10.0 * S, 21.0 * S)
    excess = diagnose(journal, Wanted(incident=window)).excess
    assert excess is not None
    assert excess.phases["fleet_queue"] == pytest.approx(0.9, abs=0.01)
    assert excess.phases["queue"] == pytest.approx(0.05, abs=0.01)
    assert excess.unattributed_s == pytest.approx(0.0, abs=0.01)
