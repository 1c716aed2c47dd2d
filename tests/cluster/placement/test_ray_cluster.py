"""Replicas on a real Ray cluster: found again, refused, lost with their machine, and ended.

One small cluster serves all tests of the module; the one that loses a machine is the last.
"""

import asyncio
import itertools
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

import psutil
import pytest

from sluice.cluster.gateway import LocalGateway
from sluice.cluster.placement import ray_cluster
from sluice.cluster.placement.placed import Needs, NotPlaced
from sluice.cluster.placement.ray_cluster import Program, RayPlacement, RayReplica, RayTerms
from sluice.config.sections import (
    CatalogueSection,
    JournalSection,
    ModelSection,
    PlacementSection,
    ReplicaNeeds,
    ReplicaRange,
)
from sluice.config.settings import Settings
from sluice.core.errors import ModelLoadError
from sluice.core.request import COMPLETE
from sluice.runtime.clock import monotonic_ns
from sluice.runtime.generation import Call, Finished, TokenPrompt
from sluice.runtime.messages import Ready
from sluice.wiring.boot import ReplicaBoot
from sluice.wiring.gateway import make_gateway, prepare
from sluice.wiring.remote import RemoteIds
from tests.cli.test_deploy import CHECK, LOCAL, SERVE
from tests.cluster.placement.ray_rig import SmallCluster, small_cluster
from tests.e2e.processes import Shell

MODEL = ModelSection(source="sim:llama-3.1-8b@h100", needs=ReplicaNeeds(cpus=1.0))
PROGRAM = "sluice.wiring.simulated_replica"
IDS = itertools.count(1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[SmallCluster]:
    before = psutil.Process().children(recursive=True)
    with small_cluster() as cluster:
        cluster.nodes = [cluster.add(), cluster.add()]
        there = psutil.Process().children(recursive=True)
        started = [one for one in there if one not in before]
        yield cluster
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


def terms(cluster: SmallCluster, place_s: float = 20.0, keep_s: float = 30.0) -> RayTerms:
    return RayTerms(cluster.address, f"test{next(IDS)}", place_s, keep_s)


def program(model: ModelSection = MODEL) -> Program:
    boot = ReplicaBoot("m-0", "m", None, None, model, JournalSection(enabled=False))
    return Program(PROGRAM, boot.to_json())


async def ready(placed: RayReplica) -> Ready:
    (message,) = await asyncio.wait_for(placed.channel.receive(), 20)
    assert isinstance(message, Ready)
    return message


async def end(placed: RayReplica) -> str:
    placed.channel.abort()
    return await placed.leave(0)


def test_a_gateway_that_starts_again_takes_over_what_is_loaded(cluster):
    async def main() -> None:
        told = terms(cluster)
        first = await RayPlacement(told, monotonic_ns).place("m-0", program(), Needs(cpus=1))
        loaded = await ready(first)
        first.channel.abort()  # as a gateway does that is killed
        second = await RayPlacement(told, monotonic_ns).place("m-0", program(), Needs(cpus=1))
        again = await ready(second)
        assert again.limits == loaded.limits
        assert again.load_ns < 0.1 * loaded.load_ns, "it was not loaded a second time"
        await end(second)

    asyncio.run(main())


def test_one_with_other_settings_is_not_taken_over(cluster):
    async def main() -> None:
        told = terms(cluster)
        first = await RayPlacement(told, monotonic_ns).place("m-0", program(), Needs(cpus=1))
        limits = (await ready(first)).limits
        first.channel.abort()
        other = ModelSection(source=MODEL.source, context_tokens_max=1000)
        placement = RayPlacement(told, monotonic_ns)
        second = await placement.place("m-0", program(other), Needs(cpus=1))
        assert (await ready(second)).limits.context_tokens_max == 1000 != limits.context_tokens_max
        assert "killed" in await first.leave(0)
        await end(second)

    asyncio.run(main())


def test_two_gateways_of_one_name_are_refused_and_the_first_is_undisturbed(cluster, monkeypatch):
    monkeypatch.setattr(ray_cluster, "_FREED_S_MAX", 0.4)

    async def main() -> None:
        told = terms(cluster)
        first = await RayPlacement(told, monotonic_ns).place("m-0", program(), Needs(cpus=1))
        await ready(first)
        with pytest.raises(NotPlaced, match=r"placement\.name") as refused:
            await RayPlacement(told, monotonic_ns).place("m-0", program(), Needs(cpus=1))
        assert refused.value.permanent
        await end(first)

    asyncio.run(main())


def test_a_replica_without_a_gateway_ends_by_itself(cluster):
    async def main() -> None:
        told = terms(cluster, keep_s=0.3)
        placed = await RayPlacement(told, monotonic_ns).place("m-0", program(), Needs(cpus=1))
        await ready(placed)
        placed.channel.abort()
        await asyncio.wait([placed.leave.__self__.ending], timeout=10)  # type: ignore[attr-defined]
        assert "no gateway came for 0.3 s" in await placed.leave(0)

    asyncio.run(main())


def test_what_the_cluster_has_no_room_for_is_refused_with_the_numbers(cluster):
    async def main() -> None:
        placement = RayPlacement(terms(cluster, place_s=0.5), monotonic_ns)
        words = "needs 3 processors; of 3 machines the largest has 2 processors"
        with pytest.raises(NotPlaced, match=words) as refused:
            await placement.place("m-0", program(), Needs(cpus=3))
        assert not refused.value.permanent, "a cluster may grow"

    asyncio.run(main())


def test_a_program_that_cannot_be_run_is_a_loss_and_not_a_hang(cluster):
    async def main() -> None:
        placement = RayPlacement(terms(cluster), monotonic_ns)
        with pytest.raises(NotPlaced, match="No module named"):
            await asyncio.wait_for(
                placement.place("m-0", Program("sluice.nowhere", ""), Needs(cpus=1)), 20
            )

    asyncio.run(main())


def test_an_engine_listens_on_a_machine_of_the_cluster_and_is_ended(cluster):
    async def main() -> None:
        placement = RayPlacement(terms(cluster), monotonic_ns)
        command = (sys.executable, "-m", "http.server", "{port}")
        placed = await placement.place_engine(command, Needs(cpus=1))
        assert placed.ending() is None
        await until(lambda: listens(placed.address))
        await placed.leave(0)
        await until(lambda: not listens(placed.address))
        ended = await placement.place_engine(("false", "{port}"), Needs(cpus=1))
        await until(ended.ending)
        assert ended.ending() == "its command exited with status 1"
        await ended.leave(0)

    asyncio.run(main())


def listens(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, 1).close()
    except OSError:
        return False
    return True


# -------------------------------------------------------------------------- the whole gateway


def settings(cluster: SmallCluster, replicas: int, **placement: Any) -> Settings:
    model = ModelSection(
        source=MODEL.source, needs=MODEL.needs, replicas=ReplicaRange(min=replicas)
    )
    where = {"ray_address": cluster.address, "name": f"test{next(IDS)}", **placement}
    return Settings(
        models={"m": model},
        placement=PlacementSection(kind="ray", **where),
        journal=JournalSection(enabled=False),
        catalogue=CatalogueSection(),
    )


def gateway_of(told: Settings) -> LocalGateway:
    return make_gateway(told, prepare(told.models, told.catalogue, _no_progress), RemoteIds())


def _no_progress(what: str, done: int, whole: int | None) -> None:
    pass


def with_gateway(told: Settings, work: Callable[[LocalGateway], Awaitable[None]]) -> None:
    async def main() -> None:
        gateway = gateway_of(told)
        try:
            async with asyncio.timeout(60):
                await gateway.start()
                await work(gateway)
        finally:
            await gateway.close()

    asyncio.run(main())


async def answer(gateway: LocalGateway, output: int) -> list[object]:
    """All pieces of one answer."""
    number = next(IDS)
    prompt = TokenPrompt(tuple((number * 31 + i) % 1000 for i in range(100)))
    call = Call(
        id=f"r{number}", model="m", arrived_ns=monotonic_ns(), prompt=prompt,
        output_tokens_max=output, likeness=number,
    )  # fmt: skip
    return [piece async for piece in await gateway.generate(call)]


def test_a_server_that_finds_no_room_on_the_cluster_says_so_at_its_start(cluster):
    async def main() -> None:
        gateway = gateway_of(settings(cluster, 5, wait_s_max=1.0))
        with pytest.raises(ModelLoadError, match="made no room within 1 s"):
            await gateway.start()

    asyncio.run(main())


def test_the_page_takes_a_user_to_the_cluster(cluster, tmp_path):
    """The commands of ``docs/deploy.md``, for the cluster that ``RAY_ADDRESS`` names."""
    (tmp_path / "sluice.toml").write_text(LOCAL, encoding="utf-8")
    shell = Shell(tmp_path)
    shell.environment["RAY_ADDRESS"] = cluster.address
    cluster.free()
    checked = shell.run(f"{CHECK} 2>&1 || true")
    for _ in range(10):  # Ray takes a moment to take back what was freed
        if "no room" in checked:
            checked = shell.run(f"{CHECK} 2>&1 || true")
    assert len(re.findall(r"^machine \S+: 2 processors", checked, re.MULTILINE)) == 2
    assert "chat-1: fits on" in checked
    listening = [*SERVE.split(), "--listen", "127.0.0.1:0"]
    server = subprocess.Popen(
        listening, cwd=tmp_path, env=shell.environment, stderr=subprocess.PIPE, text=True
    )
    assert server.stderr is not None
    try:
        base = _api(server.stderr)
        body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
        request = urllib.request.Request(
            f"{base}/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=20) as reply:
            assert reply.headers["x-sluice-replica"] in {"chat-0", "chat-1"}
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=20) == 0
    finally:
        server.kill()
        server.wait()
        server.stderr.close()


def _api(lines: Iterable[str]) -> str:
    """The address that a server prints when it is ready."""
    return next(found[1] for line in lines if (found := re.match(r"API +(\S+)", line)))


def test_a_machine_that_is_lost_under_load_costs_no_request_its_ending(cluster):
    """Every request has one ending, and there are as many replicas again as fast as they start."""

    async def work(gateway: LocalGateway) -> None:
        started_s = time.monotonic() - begun_s
        ends: Counter[str] = Counter()
        stopped = asyncio.Event()

        async def client() -> None:
            while not stopped.is_set():
                pieces = await answer(gateway, 40)
                finished = [piece for piece in pieces if isinstance(piece, Finished)]
                assert finished == pieces[-1:], "one ending, and nothing after it"
                ends[finished[0].reason] += 1

        clients = [asyncio.create_task(client()) for _ in range(16)]
        await asyncio.sleep(0.5)
        cluster.lose(cluster.nodes[0])
        lost_s = time.monotonic()
        await until(lambda: serving(gateway) == 1)
        await until(lambda: serving(gateway) == 2)
        back_s = time.monotonic() - lost_s
        stopped.set()
        await asyncio.wait_for(asyncio.gather(*clients), 20)
        whole = sum(ends[reason] for reason in COMPLETE)
        assert whole > 50
        assert sum(ends.values()) - whole <= 16, "at most what ran when the machine was lost"
        # 0.3 s for its last words, and a start as the first ones; no pause before it.
        assert back_s < 0.5 + 1.25 * started_s, (back_s, started_s)

    async def nothing(gateway: LocalGateway) -> None:
        pass

    # Uses up the processes that Ray has in reserve, so that the first starts are like the later.
    with_gateway(settings(cluster, 2), nothing)
    begun_s = time.monotonic()
    with_gateway(settings(cluster, 2), work)


def serving(gateway: LocalGateway) -> int:
    (pool,) = gateway.pools()
    return sum(replica.is_serving for replica in pool.replicas)


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 - the fleet tells nobody
            await asyncio.sleep(0.01)
