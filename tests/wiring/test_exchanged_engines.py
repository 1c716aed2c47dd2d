"""Engines of a remote model come, go and get other terms while streams run through them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from sluice.cluster.remote import RemoteListener
from sluice.config.changes import is_live
from sluice.config.schema import keys_of
from sluice.config.sections import ModelSection, UpstreamUrl
from sluice.config.settings import Settings as AllSettings
from sluice.server.ports import Reloaded
from sluice.testing.simulated_vllm import SimulatedVllm, Speed, text_of
from sluice.testing.upstream import ScriptedUpstream
from sluice.wiring import remote
from sluice.wiring.remote import RemoteIds, remote_model
from tests.cluster.remote_rig import CHAT, Front, Seen, Settings, running

SLOW = Speed(slots=8, token_s=0.01)


def urls(upstreams: Sequence[ScriptedUpstream], weights: Sequence[float] = ()) -> str:
    told = weights or [1.0] * len(upstreams)
    return ", ".join(
        f'{{ url = "http://127.0.0.1:{one.port}", weight = {weight} }}'
        for one, weight in zip(upstreams, told, strict=True)
    )


class Fleet:
    """Three simulated engines, and a server in front of those that its file names."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "sluice.toml"
        self.engines = [SimulatedVllm(SLOW) for _ in range(3)]
        self.upstreams = [ScriptedUpstream(engine.route) for engine in self.engines]
        self.front: Front

    def write(self, *numbers: int, weights: Sequence[float] = (), text: str = "") -> None:
        chosen = [self.upstreams[number] for number in numbers]
        made = Settings(deadline_s=5.0, text=text).toml(chosen).splitlines()
        lines = [f"urls = [{urls(chosen, weights)}]" if x.startswith("urls") else x for x in made]
        self.file.write_text("\n".join(lines))

    async def reload(
        self, *numbers: int, weights: Sequence[float] = (), text: str = ""
    ) -> Reloaded:
        self.write(*numbers, weights=weights, text=text)
        return await self.front.server.reload()

    def states(self) -> dict[str, str]:
        return {one.id: one.state for one in self.front.gateway.readiness().replicas}

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not holds():  # noqa: ASYNC110 - nothing tells when a probe has found an engine
                await asyncio.sleep(0.005)

    async def ask(self, tokens: int = 3) -> Seen:
        return await self.front.ask(max_tokens=tokens)

    @property
    def running(self) -> list[int]:
        return [engine.running for engine in self.engines]

    @property
    def completed(self) -> list[int]:
        return [engine.completed for engine in self.engines]


def in_front(folder: Path, work: Callable[[Fleet], Awaitable[None]], *numbers: int) -> None:
    async def run() -> None:
        fleet = Fleet(folder)
        for upstream in fleet.upstreams:
            await upstream.start()
        fleet.write(*numbers)
        try:
            async with running(fleet.file, fleet.upstreams) as fleet.front:
                await work(fleet)
        finally:
            for upstream in fleet.upstreams:
                await upstream.stop()

    asyncio.run(run())


def streams(fleet: Fleet, count: int, tokens: int) -> Iterator[asyncio.Task[Seen]]:
    for _ in range(count):
        yield asyncio.ensure_future(fleet.ask(tokens))


def test_an_engine_that_is_added_gets_requests(tmp_path):
    async def work(fleet: Fleet) -> None:
        told = await fleet.reload(0, 1)
        assert told.applied == ("models.m.urls",)
        await fleet.until(lambda: fleet.states() == {"m-0": "ready", "m-1": "ready"})
        seen = await asyncio.gather(*streams(fleet, 8, 3))
        assert {one.text for one in seen} == {text_of(3)}
        assert all(fleet.completed[:2])

    in_front(tmp_path, work, 0)


def test_an_engine_that_is_taken_out_finishes_its_streams(tmp_path):
    async def work(fleet: Fleet) -> None:
        running_now = list(streams(fleet, 4, 40))
        await fleet.until(lambda: sum(fleet.running) == 4 and all(fleet.running[:2]))
        await fleet.reload(1)
        assert fleet.states() == {"m-0": "draining", "m-1": "ready"}
        before = fleet.running[0] + fleet.completed[0]
        assert (await fleet.ask()).text == text_of(3)
        assert fleet.running[0] + fleet.completed[0] == before
        seen = await asyncio.gather(*running_now)
        assert {(one.text, one.cut, one.error) for one in seen} == {(text_of(40), False, None)}
        await fleet.until(lambda: list(fleet.states()) == ["m-1"])
        await fleet.until(lambda: fleet.upstreams[0].open_now == 0)

    in_front(tmp_path, work, 0, 1)


def test_a_client_that_leaves_as_the_last_of_an_engine_that_leaves_gets_its_ending(tmp_path):
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "stream": True}

    async def work(fleet: Fleet) -> None:
        client = await fleet.front.send(CHAT, {**body, "max_tokens": 400})
        await fleet.until(lambda: fleet.running[0] == 1)
        await fleet.reload(1)
        await fleet.until(lambda: fleet.states() == {"m-0": "draining", "m-1": "ready"})
        await fleet.front.leave(client)
        await fleet.until(lambda: list(fleet.states()) == ["m-1"])
        await fleet.front.quiet()
        counted = await fleet.front.metrics()
        assert counted["requests_ended_total", "m", "cancelled"] == 1

    in_front(tmp_path, work, 0)


def test_engines_that_are_all_exchanged_lose_no_request(tmp_path):
    async def work(fleet: Fleet) -> None:
        asked: list[asyncio.Task[Seen]] = []
        for numbers in ((1,), (2,), (0, 1), (2,)):
            asked += streams(fleet, 3, 10)
            await asyncio.sleep(0)
            await fleet.reload(*numbers)
            asked += streams(fleet, 3, 10)
        seen = await asyncio.gather(*asked)
        assert {(one.status, one.text) for one in seen} == {(200, text_of(10))}
        await fleet.until(lambda: len(fleet.states()) == 1)
        await fleet.until(lambda: [one.open_now for one in fleet.upstreams[:2]] == [0, 0])

    in_front(tmp_path, work, 0)


def test_other_terms_make_other_replicas_of_the_same_engine(tmp_path):
    async def work(fleet: Fleet) -> None:
        stream = asyncio.ensure_future(fleet.ask(40))
        await fleet.until(lambda: fleet.running[0] == 1)
        told = await fleet.reload(0, text="in_flight_max = 1")
        assert told.applied == ("models.m.in_flight_max",)
        assert (await stream).text == text_of(40)
        await fleet.until(lambda: fleet.states() == {"m-1": "ready"})
        assert fleet.front.gateway.pools()[0].replicas[0].seats == 1

    in_front(tmp_path, work, 0)


def test_weights_change_in_place(tmp_path):
    async def work(fleet: Fleet) -> None:
        told = await fleet.reload(0, 1, weights=(1, 100))
        assert told.applied == ("models.m.urls",)
        assert fleet.states() == {"m-0": "ready", "m-1": "ready"}
        for _ in range(4):
            await asyncio.gather(*streams(fleet, 2, 2))
        assert fleet.completed[1] > fleet.completed[0]

    in_front(tmp_path, work, 0, 1)


def test_a_replica_of_an_engine_is_drained_by_hand(tmp_path):
    async def work(fleet: Fleet) -> None:
        fleet.front.server.drain_replica("m-0", on=True)
        await asyncio.gather(*streams(fleet, 4, 2))
        assert fleet.completed == [0, 4, 0]
        fleet.front.server.drain_replica("m-0", on=False)
        assert fleet.states()["m-0"] == "ready"

    in_front(tmp_path, work, 0, 1)


class Noting:
    """A section that notes what is read of it."""

    def __init__(self, section: ModelSection) -> None:
        self._section = section
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self._section, name)


def test_whatever_a_replica_is_made_of_makes_another_one_when_it_changes():
    urls = (UpstreamUrl("http://127.0.0.1:1"),)
    section: Any = Noting(ModelSection("m", engine="vllm", urls=urls, key="k"))
    model = remote_model("m", section, AllSettings())
    section.read.clear()
    remote.remote_launches(["m-0"], section, model)["m-0"]("m-0", cast(RemoteListener, None))
    assert section.read - {"urls"} <= set(remote._TERMS)
    live = {key.field for key in keys_of(ModelSection).values() if is_live("models", key.name)}
    assert section.read - live == {
        "engine", "start", "silence_s_max", "context_tokens_max", "key", "sleep"
    }  # fmt: skip
    assert is_live("models", "key")


def test_an_address_that_comes_back_is_another_replica():
    ids, one, two = RemoteIds(), UpstreamUrl("http://a:1"), UpstreamUrl("http://b:1")
    section = ModelSection("m", engine="vllm", urls=(one, two))
    assert ids.of("m", section) == ("m-0", "m-1")
    assert ids.of("m", replace(section, urls=(two,))) == ("m-1",)
    assert ids.of("m", replace(section, urls=(two, one, one))) == ("m-1", "m-2", "m-3")
    assert ids.of("m", replace(section, urls=(one, replace(two, weight=3.0)))) == ("m-2", "m-1")
    assert ids.of("m", replace(section, urls=(one,), key="other")) == ("m-4",)


def test_the_key_that_engines_are_sent_is_exchanged(tmp_path):
    (tmp_path / "key").write_text("sk-1")
    text = f'key_file = "{tmp_path}/key"'

    def sent(fleet: Fleet) -> list[str | None]:
        calls = [one for one in fleet.upstreams[0].requests if one.method == "POST"]
        return [one.header("authorization") for one in calls]

    async def work(fleet: Fleet) -> None:
        await fleet.reload(0, text=text)
        await fleet.until(lambda: fleet.states() == {"m-1": "ready"})
        await fleet.ask()
        (tmp_path / "key").write_text("sk-2")
        told = await fleet.reload(0, text=text)
        assert told.applied == ("models.m.key",)
        await fleet.until(lambda: fleet.states() == {"m-2": "ready"})
        await fleet.ask()
        assert sent(fleet) == ["Bearer sk-1", "Bearer sk-2"]

    in_front(tmp_path, work, 0)
