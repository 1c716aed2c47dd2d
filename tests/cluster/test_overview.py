"""What the dashboard is told of a gateway that serves."""

import json

from sluice.cluster.overview import Clocks, Overview
from sluice.core.events import Scaled
from tests.cluster.rig import Rig, in_virtual_time, pieces

WALL_NS = 1_700_000_000 * 10**9


def overview_of(rig: Rig) -> Overview:
    return Overview(
        rig.observer, rig.driver.pools, Clocks(rig.clock, lambda: WALL_NS + rig.clock())
    )


def test_a_request_is_seen_while_it_runs_and_when_it_is_over():
    async def work() -> None:
        rig = Rig()
        await rig.gateway.start()
        overview = overview_of(rig)
        stream = await rig.generate(prompt=40, output=9)
        overview.sample()
        (running,) = json.loads(overview.document("", 0, 900))["samples"]
        assert running.get("prefilling", 0) + running.get("decoding", 0) == 1
        assert running["arrived"] == 1
        await pieces(stream)
        overview.sample()
        told = json.loads(overview.document("tiny", running["t_s"], 900))
        (over,) = told["samples"]
        assert over["met"] == 1
        assert over["generated_tokens"] == 9
        assert "decoding" not in over
        (slow,) = told["slowest"]["e2e"]
        assert slow["reason"] == "length"
        assert sum(slow["phases"].values()) == slow["e2e_s"] > 0
        life = json.loads(overview.request(slow["id"]) or b"null")
        assert [one["phase"] for one in life["phases"]][-1] == "decode"
        assert life["ttft_ns"] is not None
        assert [one["id"] for one in told["replicas"]] == ["tiny-0"]
        assert [one["what"] for one in told["changes"]] == ["start", "tiny-0 ready"]

    in_virtual_time(work)


def test_a_change_of_the_number_of_replicas_is_told_with_its_reason():
    async def work() -> None:
        rig = Rig()
        await rig.gateway.start()
        rig.observer.scaled(Scaled("tiny", 1, 3, "queue_wait", ()))
        told = json.loads(overview_of(rig).document("", 0, 900))
        assert told["changes"][0]["what"] == "tiny is to have 3 replicas, not 1"
        assert told["changes"][0]["details"] == {"for": "queue wait"}

    in_virtual_time(work)


def test_a_request_that_is_not_remembered_is_none():
    async def work() -> None:
        rig = Rig()
        await rig.gateway.start()
        assert overview_of(rig).request("unknown") is None

    in_virtual_time(work)


def test_no_text_of_a_request_is_told():
    async def work() -> None:
        rig = Rig()
        await rig.gateway.start()
        overview = overview_of(rig)
        stream = await rig.generate(prompt=40, output=9)
        await pieces(stream)
        overview.sample()
        told = overview.document("", 0, 900)
        assert b'prompt"' not in told
        assert b'output"' not in told

    in_virtual_time(work)


def test_times_stay_where_they_are_told_when_the_clock_is_set():
    async def work() -> None:
        rig = Rig()
        await rig.gateway.start()
        wall_ns = [WALL_NS]
        overview = Overview(rig.observer, rig.driver.pools, Clocks(rig.clock, lambda: wall_ns[0]))
        first_s = json.loads(overview.document("", 0, 900))["now_s"]
        wall_ns[0] += 3600 * 10**9
        assert json.loads(overview.document("", 0, 900))["now_s"] == first_s

    in_virtual_time(work)
