"""A name with many addresses is as many replicas, and an outage of look-ups changes nothing."""

import asyncio
from dataclasses import replace

import pytest

from sluice.cluster.placement.keda import read_desired
from sluice.complexity.model_file import default_model, write_model
from sluice.config.sections import ModelSection, UpstreamUrl
from sluice.config.settings import Settings, conflicts
from sluice.testing.simulated_vllm import SimulatedVllm
from sluice.testing.upstream import ScriptedUpstream
from sluice.wiring import operations, remote
from sluice.wiring.addresses import Addresses
from tests.cluster import remote_rig

MODEL = ModelSection(
    source="large",
    engine="vllm",
    urls=(
        UpstreamUrl("dns+http://large:8000/api", weight=2.0),
        UpstreamUrl("http://gpu-1:8000"),
    ),
)
ROUTE = """
[models.n]
engine = "vllm"
urls = ["http://127.0.0.1:{port}"]
[routes.auto]
simple = "m"
complex = "n"
share = 30
classifier = "{classifier}"
"""
SETTINGS = Settings(models={"large": MODEL})


class Names:
    """What a name resolves to now; ``None`` where the look-up fails."""

    def __init__(self, *found: str) -> None:
        self.found: tuple[str, ...] | None = found

    def __call__(self, host: str, port: int) -> tuple[str, ...]:
        assert (host, port) == ("large", 8000)
        if self.found is None:
            raise OSError("no name server answers")
        return self.found


def urls(addresses: Addresses) -> list[str]:
    return [one.url for one in addresses.resolved(SETTINGS).models["large"].urls]


def test_each_address_of_a_name_is_an_engine_with_its_path_and_weight():
    addresses = Addresses(Names("10.0.0.1", "10.0.0.2", "fd00::1"))
    assert addresses.look(SETTINGS)
    *behind, plain = addresses.resolved(SETTINGS).models["large"].urls
    assert [one.url for one in behind] == [
        "http://10.0.0.1:8000/api", "http://10.0.0.2:8000/api", "http://[fd00::1]:8000/api",
    ]  # fmt: skip
    assert {one.weight for one in behind} == {2.0}
    assert plain == MODEL.urls[1]


def test_a_change_is_told_once():
    names = Names("10.0.0.1")
    addresses = Addresses(names)
    assert [addresses.look(SETTINGS) for _ in range(2)] == [True, False]
    names.found = ("10.0.0.2",)
    assert addresses.look(SETTINGS)
    assert urls(addresses)[0] == "http://10.0.0.2:8000/api"


@pytest.mark.parametrize("outage", [None, ()])
def test_a_look_up_that_fails_or_finds_nothing_changes_nothing(outage):
    names = Names("10.0.0.1")
    addresses = Addresses(names)
    addresses.look(SETTINGS)
    names.found = outage
    assert not addresses.look(SETTINGS)
    assert urls(addresses)[0] == "http://10.0.0.1:8000/api"


def test_a_name_without_an_address_stands_for_one_engine_that_does_not_answer():
    assert urls(Addresses(Names()))[0] == "http://large:8000/api"


def test_settings_take_such_a_name_and_no_other_scheme():
    assert list(conflicts(SETTINGS)) == []
    wrong = replace(MODEL, urls=(UpstreamUrl("srv+http://large:8000"),))
    (conflict,) = conflicts(Settings(models={"large": wrong}))
    assert "must be an address" in conflict.message


def test_engines_come_and_go_with_the_addresses_of_their_name(tmp_path, monkeypatch):
    """A gateway over a name: what it resolves to are its replicas, and one of them answers."""
    found = ["127.0.0.1"]
    monkeypatch.setattr(remote, "Addresses", lambda: Addresses(lambda host, port: tuple(found)))
    monkeypatch.setattr(operations, "LOOK_S", 0.01)

    async def main() -> None:
        async with ScriptedUpstream(SimulatedVllm().route) as upstream:
            file = tmp_path / "sluice.toml"
            made = remote_rig.Settings(deadline_s=5.0).toml([upstream])
            file.write_text(made.replace("http://127.0.0.1:", "dns+http://engines:"))
            async with remote_rig.running(file, [upstream]) as front:
                following = asyncio.create_task(front.server.follow_addresses())
                assert await ready_of(front, 1) == 1
                found.append("127.0.0.2")
                assert await ready_of(front, 2) == 1, "at the other address nothing listens"
                found[:] = ["127.0.0.1"]
                assert await ready_of(front, 1) == 1, "the one that stays was not exchanged"
                following.cancel()

    asyncio.run(main())


def test_addresses_are_followed_where_a_classifier_has_gone(tmp_path, monkeypatch):
    found = ["127.0.0.1"]
    monkeypatch.setattr(remote, "Addresses", lambda: Addresses(lambda host, port: tuple(found)))
    monkeypatch.setattr(operations, "LOOK_S", 0.01)
    classifier = tmp_path / "own.route"
    write_model(default_model(), classifier)

    async def main() -> None:
        async with ScriptedUpstream(SimulatedVllm().route) as upstream:
            file = tmp_path / "sluice.toml"
            route = ROUTE.format(port=upstream.port, classifier=classifier)
            made = remote_rig.Settings(deadline_s=5.0, tables=route).toml([upstream])
            first, rest = made.split("[models.n]")
            first = first.replace("http://127.0.0.1:", "dns+http://engines:")
            file.write_text(f"{first}[models.n]{rest}")
            async with remote_rig.running(file, [upstream]) as front:
                following = asyncio.create_task(front.server.follow_addresses())
                assert await ready_of(front, 2) == 2
                route_before = front.gateway.routes["auto"]
                classifier.unlink()
                found.append("127.0.0.2")
                assert await ready_of(front, 3) == 2
                assert front.gateway.routes["auto"] is route_before
                seen = await front.ask(model="auto", max_tokens=2)
                assert (seen.status, seen.headers["x-sluice-route"]) == (200, "auto")
                following.cancel()

    asyncio.run(main())


def test_the_number_of_engines_that_a_gateway_wants_is_published(tmp_path):
    """Whoever starts engines elsewhere, as KEDA does, reads it in the metrics."""

    async def main() -> None:
        text = "replicas = { min = 2, max = 3 }"
        async with ScriptedUpstream(SimulatedVllm().route) as upstream:
            file = tmp_path / "sluice.toml"
            file.write_text(remote_rig.Settings(deadline_s=5.0, text=text).toml([upstream]))
            async with remote_rig.running(file, [upstream]) as front:
                page, _ = front.gateway.metrics()
                assert read_desired(page.decode()) == {"m": 2.0}, "more than there are"

    asyncio.run(main())


async def ready_of(front: remote_rig.Front, count: int) -> int:
    """How many replicas are ready once there are so many."""
    async with asyncio.timeout(10):
        while True:
            states = [one.state for one in front.gateway.readiness().replicas]
            if len(states) == count and "ready" in states:
                return states.count("ready")
            await asyncio.sleep(0.01)
