"""Warm replicas of a remote vLLM sleep until they are needed."""

import logging
from typing import Any

from sluice.config.sections import ReplicaRange
from sluice.testing.simulated_vllm import SimulatedVllm
from tests.cluster.relay_rig import PROBE_S, RelayRig, relay

WARM: dict[str, Any] = {
    "replicas": ReplicaRange(min=1, max=2, warm=1),
    "sleep": True,
    "probe_s": PROBE_S,
}


def states(rig: RelayRig) -> list[str]:
    return sorted(one.state for one in rig.gateway.readiness().replicas)


def pin(rig: RelayRig, number: int) -> None:
    async def told() -> None:
        rig.gateway.driver.pin_replicas("big", number)

    rig.served.call(told)


def engines(*sleeps: bool | None) -> list[SimulatedVllm]:
    made = [SimulatedVllm() for _ in sleeps]
    for engine, asleep in zip(made, sleeps, strict=True):
        engine.sleeps = asleep
    return made


def test_a_warm_engine_sleeps_wakes_for_the_load_and_sleeps_again():
    first, second = engines(False, False)
    with relay(first.route, second.route, **WARM) as rig:
        rig.eventually(lambda: states(rig) == ["ready", "warm"])
        rig.eventually(lambda: (first.sleeps, second.sleeps) == (False, True))
        assert rig.chat(max_tokens=2).choices[0].finish_reason == "length"
        pin(rig, 2)
        rig.eventually(lambda: states(rig) == ["ready", "ready"])
        assert second.sleeps is False, "it is ready only when it says that it is awake"
        pin(rig, 1)
        rig.eventually(lambda: sorted([first.sleeps, second.sleeps], key=bool) == [False, True])
        assert rig.chat(max_tokens=2).choices[0].finish_reason == "length"


def test_an_engine_that_an_earlier_gateway_left_asleep_is_woken_before_it_gets_a_request():
    first, second = engines(True, True)
    with relay(first.route, second.route, **WARM) as rig:
        rig.eventually(lambda: states(rig) == ["ready", "warm"])
        assert (first.sleeps, second.sleeps) == (False, True)
        assert rig.chat(max_tokens=2).choices[0].finish_reason == "length"


def test_an_engine_without_these_routes_stays_awake_and_serves_and_it_is_said(caplog):
    first, second = engines(None, None)
    with caplog.at_level(logging.WARNING), relay(first.route, second.route, **WARM) as rig:
        rig.eventually(lambda: states(rig) == ["ready", "warm"])
        rig.eventually(lambda: "--enable-sleep-mode" in caplog.text)
        pin(rig, 2)
        rig.eventually(lambda: states(rig) == ["ready", "ready"])
        assert rig.chat(max_tokens=2).choices[0].finish_reason == "length"
    assert caplog.text.count("--enable-sleep-mode") == 1


def test_engines_that_are_not_needed_are_not_waited_for_at_the_start():
    first, second = engines(None, None)
    with relay(first.route, second.route, replicas=ReplicaRange(min=1, max=2)) as rig:
        assert states(rig) == ["ready", "stopped"]
        assert rig.chat(max_tokens=2).choices[0].finish_reason == "length"


def test_engines_that_are_all_at_rest_leave_the_server_ready_and_one_is_woken_by_a_request():
    first, second = engines(None, None)
    with relay(first.route, second.route, replicas=ReplicaRange(min=0, max=2)) as rig:
        assert states(rig) == ["stopped", "stopped"]
        assert rig.gateway.readiness().ready
        assert rig.chat(max_tokens=2).choices[0].finish_reason == "length"
        assert states(rig) == ["ready", "stopped"]
