"""A gateway whose replicas come and go with the load, in virtual time: what clients get of it, and
what operators see."""

import asyncio
import json
from typing import Any

import pytest

from sluice.cluster.overview import Clocks, Overview
from sluice.cluster.readiness import readiness
from sluice.core.errors import ModelLoadError, Overloaded
from sluice.core.events import Reconfigured
from sluice.core.limits import PoolLimits, ScaleLimits
from sluice.core.request import COMPLETE
from sluice.runtime.messages import LoadFailed
from sluice.telemetry.journal import JournalWriter
from sluice.telemetry.records import ReplicaChanged, StartStage
from tests.cluster.rig import Rig, S, ending, in_virtual_time, pieces
from tests.cluster.test_observer import journal_in, recorded


def scale(most: int, **limits: Any) -> ScaleLimits:
    return ScaleLimits(**{"replicas_max": most, "start_ns": 20 * S, **limits})


def from_zero(**limits: Any) -> ScaleLimits:
    held: dict[str, Any] = {"hold_places": 40, "hold_ns": 30 * S, "idle_ns": 5 * S}
    return scale(1, replicas_min=0, **held | limits)


def states(rig: Rig) -> list[str]:
    (pool,) = rig.gateway.pools()
    return [one.state.value for one in pool.replicas]


def told(rig: Rig) -> Any:
    overview = Overview(rig.observer, rig.driver.pools, Clocks(rig.clock, rig.clock))
    return json.loads(overview.document("", 0, 900))


def test_d17_fifty_at_once_wake_one_replica_which_serves_forty_and_ten_are_told_when_to_come():
    async def work() -> None:
        rig = Rig(scale=from_zero(), load_s=20.0, queue_places=64)
        await rig.gateway.start()
        assert states(rig) == ["stopped"]
        assert rig.gateway.readiness().ready, "only a request that gets here starts one"
        streams, refused = [], []
        for number in range(50):
            try:
                streams.append(await rig.generate(f"r{number}", output=2))
            except Overloaded as error:
                refused.append(error)
        assert (len(streams), len(refused)) == (40, 10)
        assert {(one.status, one.reason) for one in refused} == {(503, "held_full")}
        assert all(15 <= (one.retry_after_s or 0) <= 30 for one in refused)
        assert rig.process.starts == 1
        await asyncio.sleep(19.5)  # longer than the idle time
        assert (rig.process.starts, rig.process.replica) == (1, None)
        ends = [await ending(stream) for stream in streams]
        assert all(one.reason in COMPLETE for one in ends)
        assert rig.value("cold_start_seconds_count", "load") == 1
        assert rig.value("cold_start_seconds_sum", "load") == pytest.approx(20.0)
        assert rig.value("cold_start_seconds_count", "first_token") == 1
        assert rig.value("ttft_seconds_sum", "default") >= 40 * 20.0
        assert rig.value("start_expected_seconds", "tiny") == pytest.approx(20.0)
        await asyncio.sleep(30)
        assert states(rig) == ["stopped"]
        rig.check_empty()
        await rig.gateway.close()

    in_virtual_time(work)


def test_readiness_says_when_one_is_expected_and_whether_requests_wait_for_it():
    async def work() -> None:
        rig = Rig(scale=from_zero(hold_places=1), load_s=20.0)
        await rig.gateway.start()
        (absent,) = rig.gateway.readiness().absent
        assert (absent.ready_in_s, absent.held) == (20.0, True)
        stream = await rig.generate("a")
        await asyncio.sleep(8)
        (absent,) = rig.gateway.readiness().absent
        assert (absent.ready_in_s, absent.held) == (12.0, False)
        await pieces(stream)
        assert rig.gateway.readiness().absent == ()
        await rig.gateway.close()

    in_virtual_time(work)


def test_a_model_that_must_be_served_is_not_ready_until_it_is_and_says_when():
    async def work() -> None:
        rig = Rig(replicas=2, scale=scale(2), load_s=20.0)
        starting = asyncio.create_task(rig.gateway.start())
        await asyncio.sleep(5)
        seen = rig.gateway.readiness()
        assert not seen.ready
        assert "one is expected in 15 s, requests are held until then" in seen.reason
        await starting
        assert rig.gateway.readiness().ready
        await rig.gateway.close()

    in_virtual_time(work)


def test_a_burst_wakes_the_warm_replica_and_no_stream_is_lost_when_it_goes_to_rest_again(tmp_path):
    async def work(journal: JournalWriter) -> None:
        rig = Rig(replicas=2, scale=scale(2, warm=1), load_s=5.0, journal=journal)
        await rig.gateway.start()
        await rig.until(lambda: states(rig) == ["ready", "warm"])
        streams = [await rig.generate(f"r{number}", output=100) for number in range(8)]
        await rig.until(lambda: states(rig) == ["ready", "ready"])
        assert rig.clock() < 7 * S, "a second of waiting, from second 5 on"
        assert rig.value("wake_seconds_count", "tiny") == 1
        assert rig.value("cold_start_seconds_count", "load") == 2
        await asyncio.sleep(3)
        rig.driver.pin_replicas("tiny", 1)
        assert "draining" in states(rig)
        ends = await asyncio.gather(*map(ending, streams))
        assert all(one.reason in COMPLETE for one in ends)
        await rig.until(lambda: sorted(states(rig)) == ["ready", "warm"])
        assert sum(one.starts for one in rig.processes.values()) == 2
        stages = [(one.replica, one.stage) for one in recorded(journal, StartStage)]
        assert stages.count(("tiny-1", "wake")) == 1
        changes = recorded(journal, ReplicaChanged)
        assert [one.replica for one in changes if one.state == "ready"] == ["tiny-0", "tiny-1"]
        await rig.gateway.close()

    with journal_in(tmp_path, record_text=False) as journal:
        in_virtual_time(lambda: work(journal))


def test_a_replica_that_is_woken_again_and_again_counts_nothing_twice():
    async def work() -> None:
        rig = Rig(replicas=2, scale=scale(2, warm=1))
        await rig.gateway.start()
        await rig.until(lambda: states(rig) == ["ready", "warm"])
        for round_ in range(1, 4):
            rig.driver.pin_replicas("tiny", 2)
            await rig.until(lambda: states(rig) == ["ready", "ready"])
            streams = [await rig.generate(f"r{number}", prompt=40) for number in range(8)]
            for stream in streams:
                await pieces(stream)
            assert rig.value("prefix_query_tokens_total", "tiny") == round_ * 8 * 40
            rig.driver.pin_replicas("tiny", 1)
            await rig.until(lambda: states(rig).count("warm") == 1)
        await rig.gateway.close()

    in_virtual_time(work)


def test_one_that_never_becomes_ready_is_started_later_and_later_and_the_others_serve():
    async def work() -> None:
        rig = Rig(replicas=2, scale=scale(2))
        await rig.gateway.start()
        bad, words = rig.processes["tiny-1"], "the model was not loaded within 5 s (load_max)"
        bad._load_s = 100.0
        rig.driver.pin_replicas("tiny", 2)
        waits_s = []
        for _ in range(3):
            await rig.until(lambda: states(rig)[1] == "starting")
            await asyncio.sleep(5)
            bad.tell(LoadFailed(words, permanent=False))
            bad.crash("ended by SIGKILL")
            (one,) = [one for one in rig.gateway.readiness().replicas if one.id == "tiny-1"]
            assert (one.state, one.error) == ("backoff", words)
            waits_s.append(one.starts_in_s)
        assert waits_s == [0.5, 1.0, 2.0]
        shown = told(rig)["replicas"][1]
        assert (shown["state"], shown["error"], shown["losses"]) == ("backoff", words, 3)
        assert shown["starts_in_s"] == pytest.approx(2.0, abs=0.1)
        assert rig.value("replica_state", "tiny-1", "backoff") == 1
        assert (await ending(await rig.generate("a"))).reason in COMPLETE
        assert rig.gateway.readiness().ready
        await rig.gateway.close()

    in_virtual_time(work)


def test_a_crash_loop_is_seen_everywhere_another_takes_its_place_and_it_is_tried_again():
    async def work() -> None:
        rig = Rig(replicas=3, scale=scale(3))
        await rig.gateway.start()
        rig.driver.pin_replicas("tiny", 2)
        bad = rig.processes["tiny-1"]
        for _ in range(5):
            bad._load_s = 1.0
            await rig.until(lambda: states(rig)[1] == "starting")
            bad.crash("ended by SIGSEGV")
        assert states(rig)[1] == "crash_loop"
        assert rig.value("replica_state", "tiny-1", "crash_loop") == 1
        assert rig.value("replica_losses_total", "tiny-1") == 5
        assert told(rig)["replicas"][1]["error"] == "ended by SIGSEGV"
        status = rig.gateway.readiness().replicas[1]
        assert (status.state, status.losses, status.starts_in_s) == ("crash_loop", 5, 60.0)
        await rig.until(lambda: states(rig)[2] == "ready")
        bad._load_s = 0.0
        await rig.until(lambda: states(rig)[1] != "crash_loop")
        assert rig.clock() < 80 * S
        await rig.gateway.close()

    in_virtual_time(work)


def test_what_finds_no_place_says_so_and_the_others_serve():
    async def work() -> None:
        rig = Rig(replicas=2, scale=scale(2, warm=1))
        words = "it needs 2 processors; this machine has 2, of which other replicas have 2"
        refused = rig.processes["tiny-1"]
        refused._load_s = 1.0
        starting = asyncio.create_task(rig.gateway.start())
        await asyncio.sleep(0)
        refused.tell(LoadFailed(words, permanent=False))
        refused.crash(words)
        await starting
        assert states(rig) == ["ready", "backoff"]
        assert rig.gateway.readiness().replicas[1].error == words
        assert (await ending(await rig.generate("a"))).reason in COMPLETE
        await rig.gateway.close()

    in_virtual_time(work)


def test_a_start_of_which_nothing_can_come_is_given_up_with_its_words():
    async def work() -> None:
        rig = Rig(replicas=2, scale=scale(2), load_s=5.0)
        starting = asyncio.create_task(rig.gateway.start())
        await asyncio.sleep(1)
        rig.process.tell(LoadFailed("weights are cut short", permanent=True))
        rig.process.crash("exit status 0")
        with pytest.raises(ModelLoadError, match="weights are cut short"):
            await starting

    in_virtual_time(work)


def test_that_the_most_is_reached_is_said_in_the_log_and_shown(caplog):
    async def work() -> None:
        rig = Rig(scale=scale(1, drain_ns=S), queue_places=200, queue_wait_s=600)
        await rig.gateway.start()
        streams = [await rig.generate(f"r{number}", output=50) for number in range(60)]
        await asyncio.sleep(25)
        (shown,) = told(rig)["scaling"]
        assert (shown["wanted"], shown["most"]) == (1, 1)
        assert shown["short_of"] > 1
        assert rig.value("replicas_needed", "tiny") > rig.value("replicas_max", "tiny") == 1
        lines = [one.message for one in caplog.records if "more than replicas.max" in one.message]
        assert len(lines) == 1
        for stream in streams:
            await pieces(stream)
        await rig.gateway.close()

    in_virtual_time(work)


def test_settings_that_change_while_a_replica_starts_hold_and_start_it_once():
    async def work() -> None:
        rig = Rig(replicas=3, scale=scale(3), load_s=5.0, queue_places=64)
        await rig.gateway.start()
        streams = [await rig.generate(f"r{number}", output=100) for number in range(12)]
        rig.driver.pin_replicas("tiny", 2)
        await asyncio.sleep(2)
        assert states(rig) == ["ready", "starting", "stopped"]
        ids = tuple(f"tiny-{number}" for number in range(3))
        pool = PoolLimits("tiny", ids, 64, 60 * S, scale=scale(3, utilisation=0.5, leave_ns=9 * S))
        rig.driver.reconfigure(Reconfigured((pool,), ()), lambda *_: pytest.fail("none is new"))
        rig.driver.reconfigure(Reconfigured((pool,), ()), lambda *_: pytest.fail("none is new"))
        await rig.until(lambda: states(rig)[1] == "ready")
        assert [one.starts for one in rig.processes.values()] == [1, 1, 0]
        ends = await asyncio.gather(*map(ending, streams))
        assert all(one.reason in COMPLETE for one in ends)
        await rig.gateway.close()

    in_virtual_time(work)


def test_readiness_of_a_server_that_drains_is_bad_whatever_may_be_started():
    async def work() -> None:
        rig = Rig(scale=from_zero())
        await rig.gateway.start()
        seen = readiness(rig.gateway.pools(), rig.clock(), draining=True)
        assert (seen.ready, seen.reason) == (False, "the server is draining")
        await rig.gateway.close()

    in_virtual_time(work)
