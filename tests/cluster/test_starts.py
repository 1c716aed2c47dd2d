"""Starts of replicas by stage: what counts as cold, what as a wake, and what as neither."""

from sluice.cluster.starts import Starts
from sluice.core.events import ReplicaLimits
from sluice.runtime.messages import Ready
from sluice.telemetry.metric_table import Stage

MS = 1_000_000
READY = Ready(ReplicaLimits(8, 8, 8, 8), load_ns=500 * MS, compile_ns=300 * MS)


def loaded() -> Starts:
    starts = Starts()
    starts.asked("a", 1000 * MS)
    starts.ready("a", READY, 2000 * MS)
    return starts


def test_the_stages_of_a_cold_start_sum_to_the_time_since_it_was_asked_for():
    starts = Starts()
    starts.asked("a", 1000 * MS)
    assert not starts.is_loaded("a")
    stages = starts.ready("a", READY, 2000 * MS)
    assert stages == {Stage.PLACE: 500 * MS, Stage.LOAD: 200 * MS, Stage.COMPILE: 300 * MS}
    assert starts.is_loaded("a")


def test_only_the_first_request_of_a_cold_one_is_its_first():
    starts = loaded()
    assert starts.is_first("a")
    assert not starts.is_first("a")
    starts.first_token("a", 40 * MS)
    assert starts.last["a"][Stage.FIRST_TOKEN] == 40 * MS
    starts.asked("a", 3000 * MS)
    starts.ready("a", READY, 3001 * MS)
    assert not starts.is_first("a"), "it was only woken"


def test_one_that_is_loaded_is_woken():
    starts = loaded()
    starts.asked("a", 3000 * MS)
    assert starts.ready("a", READY, 3002 * MS) == {Stage.WAKE: 2 * MS}
    assert starts.last["a"][Stage.PLACE] == 500 * MS, "of its last cold start"


def test_a_drain_that_is_taken_back_is_no_start():
    starts = loaded()
    starts.drains("a")
    starts.asked("a", 3000 * MS)
    assert starts.ready("a", READY, 3000 * MS) == {}


def test_one_that_drained_and_is_warm_is_woken_later():
    starts = loaded()
    starts.drains("a")
    starts.asked("a", 3000 * MS)  # to be warm
    starts.asked("a", 9000 * MS)
    assert starts.ready("a", READY, 9003 * MS) == {Stage.WAKE: 3 * MS}


def test_one_that_was_lost_or_stopped_is_cold_again():
    starts = loaded()
    starts.over("a")
    starts.asked("a", 3000 * MS)
    assert Stage.LOAD in starts.ready("a", READY, 4000 * MS)
