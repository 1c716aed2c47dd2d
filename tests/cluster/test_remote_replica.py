"""One engine behind an address as its listener sees it: probes, readiness, load."""

import asyncio
from typing import Any

import pytest

from sluice.cluster.classes import ServiceClasses
from sluice.cluster.remote import RemoteReplica, RemoteTerms, limits_of
from sluice.cluster.remote_model import BLOCK_TOKENS, CONTEXT_TOKENS_UNKNOWN, RemoteModel
from sluice.core.events import ReplicaLimits
from sluice.executors.dialects import DIALECTS
from sluice.executors.stream import Deadlines, EngineFacts, Gauges, Health, Probe
from sluice.runtime.generation import ModelCard
from sluice.runtime.messages import Load, Ready
from sluice.testing.processes import VirtualTimeLoop
from tests.cluster.rig import in_virtual_time

GAUGES = Gauges(waiting=2, running=5, kv_use=0.25, counters={"preemptions": 3})
FACTS = EngineFacts(("weights",), 4096)
LOADED = Probe(0, Health.READY, GAUGES)
UNREADABLE = Probe(0, Health.READY, None, "metrics: status 500")
DOWN = Probe(0, Health.DOWN, None, "refused")


class FakeEngine:
    """An engine whose probes are scripted; the last one is what it stays at."""

    def __init__(self, *probes: Probe, facts: EngineFacts = FACTS) -> None:
        self._probes, self._facts = list(probes), facts
        self.probed_s: list[float] = []

    async def probe(self) -> Probe:
        self.probed_s.append(asyncio.get_running_loop().time())
        return self._probes.pop(0) if len(self._probes) > 1 else self._probes[0]

    async def facts(self) -> EngineFacts:
        return self._facts

    async def close(self) -> None: ...


class Heard:
    """A listener that writes down what it is told, and starts again what has parted."""

    records_text = False

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.sampled_by: list[tuple[str, Gauges]] = []
        self.replica: Any = None

    def received(self, _replica_id: str, messages: Any) -> None:
        self.told += messages

    def parted(self, _replica_id: str, error: str) -> None:
        self.told.append(error)
        self.replica.start()

    def probed(self, _replica_id: str) -> None: ...

    def sampled(self, replica_id: str, gauges: Gauges) -> None:
        self.sampled_by.append((replica_id, gauges))

    @property
    def kinds(self) -> list[str]:
        return [one if isinstance(one, str) else type(one).__name__ for one in self.told]


async def watched(engine: FakeEngine, for_s: float, dialect: str = "vllm", **terms: Any) -> Heard:
    """What is told in so many seconds of virtual time."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    heard = Heard()
    given = RemoteTerms(DIALECTS[dialect], "big", Deadlines(), **terms)
    model = RemoteModel(ModelCard("big", 0, 100), ServiceClasses({}))
    heard.replica = RemoteReplica("big-0", engine, given, model, heard, loop.now_ns)  # type: ignore[arg-type]
    heard.replica.start()
    await asyncio.sleep(for_s)
    await heard.replica.stop()
    return heard


def test_a_healthy_engine_is_ready_once_and_reports_with_each_probe():
    async def check() -> None:
        heard = await watched(FakeEngine(LOADED), 2.5)
        assert heard.kinds == ["Ready", "Load", "Load", "Load"]
        ready, load = heard.told[:2]
        assert isinstance(ready, Ready)
        assert isinstance(load, Load)
        assert ready.limits.context_tokens_max == 4096
        report = load.report
        assert (report.waiting, report.running, report.preemptions) == (2, 5, 3)
        assert report.blocks_free / report.blocks_total == 0.75
        assert heard.sampled_by == [("big-0", GAUGES)] * 3

    in_virtual_time(check)


def test_an_engine_that_is_down_is_ready_when_it_comes():
    async def check() -> None:
        heard = await watched(FakeEngine(DOWN, DOWN, DOWN, LOADED), 3.5)
        assert heard.kinds == ["Ready", "Load"]
        assert heard.told[0].load_ns == 3_000_000_000

    in_virtual_time(check)


def test_one_bad_probe_is_nothing_and_two_in_a_row_part_it_until_it_is_well():
    async def check() -> None:
        engine = FakeEngine(LOADED, DOWN, LOADED, DOWN, DOWN, LOADED)
        heard = await watched(engine, 5.5)
        assert heard.kinds == ["Ready", "Load", "Load", "refused", "Ready", "Load"]

    in_virtual_time(check)


def test_load_that_cannot_be_read_any_more_is_not_reported_and_takes_no_readiness():
    async def check() -> None:
        heard = await watched(FakeEngine(LOADED, UNREADABLE), 5.5)
        assert heard.kinds == ["Ready", "Load"]

    in_virtual_time(check)


@pytest.mark.parametrize(
    ("dialect", "probe"),
    [("openai", Probe(0, Health.READY)), ("llama-server", UNREADABLE)],
    ids=["a vendor", "metrics not shown"],
)
def test_an_engine_without_metrics_reports_what_it_was_given(dialect, probe):
    async def check() -> None:
        heard = await watched(FakeEngine(probe), 1.5, dialect)
        assert heard.kinds == ["Ready", "Load", "Load"]
        report = heard.told[1].report
        assert (report.waiting, report.running, report.gauged) == (0, 0, False)

    in_virtual_time(check)


def test_an_engine_that_comes_back_without_metrics_counts_as_one_that_has_none():
    async def check() -> None:
        heard = await watched(FakeEngine(LOADED, DOWN, DOWN, UNREADABLE), 3.5)
        assert heard.kinds == ["Ready", "Load", "refused", "Ready", "Load"]
        assert [one.report.gauged for one in heard.told if isinstance(one, Load)] == [True, False]

    in_virtual_time(check)


def test_an_engine_that_is_down_is_looked_at_sooner_than_one_that_serves():
    async def check() -> None:
        engine = FakeEngine(DOWN, DOWN, Probe(0, Health.READY))
        await watched(engine, 40.0, "openai", probe_s=30.0)
        assert engine.probed_s == [0.0, 2.0, 4.0, 34.0]

    in_virtual_time(check)


@pytest.mark.parametrize(
    ("given", "facts", "limits"),
    [
        ({}, EngineFacts((), 1024, 4), (1024, 4)),
        ({"context_tokens_max": 512, "in_flight_max": 2}, EngineFacts((), 1024, 4), (512, 2)),
        ({}, EngineFacts(), (CONTEXT_TOKENS_UNKNOWN, 256)),
    ],
    ids=["told", "set", "unknown"],
)
def test_settings_win_over_what_the_engine_tells(given, facts, limits):
    terms = RemoteTerms(DIALECTS["vllm"], "big", Deadlines(), **given)
    context, sequences = limits
    blocks = sequences * -(-context // BLOCK_TOKENS)
    assert limits_of(terms, facts) == ReplicaLimits(context, BLOCK_TOKENS, blocks, sequences)
