"""A gateway over fake replica processes in virtual time, and what it must not hold afterwards."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from random import Random
from typing import Any

from sluice.cluster.classes import ServiceClasses
from sluice.cluster.fleet_driver import FleetDriver
from sluice.cluster.gateway import LocalGateway
from sluice.cluster.observer import Observer
from sluice.cluster.placement.replica import ReplicaListener
from sluice.cluster.served import ServedModel
from sluice.config.sections import SloSection
from sluice.core.fleet import Fleet
from sluice.core.limits import PoolLimits, ScaleLimits
from sluice.core.roster import BatchingLimits
from sluice.core.step import Plan
from sluice.runtime.generation import (
    Call,
    ChatPrompt,
    Delta,
    Finished,
    ModelCard,
    Piece,
    TokenPrompt,
)
from sluice.runtime.grammar_trial import GrammarTrial
from sluice.runtime.streams import PieceStream
from sluice.runtime.templates import ChatTemplate
from sluice.telemetry.journal import JournalWriter
from sluice.telemetry.metrics import Metrics
from sluice.telemetry.records import Deployment
from sluice.testing.executors import FakeExecutor
from sluice.testing.processes import FakeProcess, VirtualTimeLoop
from tests.runtime.gguf_files import byte_level_values, tokenizer_of

S = 1_000_000_000
SLO = {"quick": SloSection(ttft_s=0.5, tpot_s=0.05)}
LIMITS = BatchingLimits(400, 4, 100, sequences_max=4)


def served_model(
    cls: type[ServedModel] = ServedModel,
    values: Mapping[str, Any] = {},
    trial: GrammarTrial | None = None,
) -> ServedModel:
    """The tiny tokenizer's model, as the gateway serves it."""
    tokenizer = tokenizer_of(byte_level_values(**values))
    numbers = itertools.count(1)
    return cls(
        card=ModelCard("tiny", 0, 512),
        tokenizer=tokenizer,
        template=ChatTemplate(tokenizer.facts, lambda: None),  # type: ignore[arg-type,return-value]
        classes=ServiceClasses(SLO),
        new_id=lambda: f"call{next(numbers)}",
        trial=trial,
    )


class Rig:
    """One gateway with one model; made within the loop that it runs on."""

    def __init__(
        self,
        *,
        limits: BatchingLimits = LIMITS,
        replicas: int = 1,
        queue_places: int = 8,
        queue_wait_s: float = 60.0,
        step_s: Callable[[Plan], float] = lambda plan: 0.1,
        served: ServedModel | None = None,
        journal: JournalWriter | None = None,
        scale: ScaleLimits | None = None,
        load_s: float = 0.0,
    ) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        self.clock = loop.now_ns
        self.processes: dict[str, FakeProcess] = {}
        ids = [f"tiny-{number}" for number in range(replicas)]
        pool = PoolLimits("tiny", tuple(ids), queue_places, int(queue_wait_s * S), scale=scale)
        self.metrics = Metrics(["tiny"], slo_classes=list(SLO))

        def launch(replica_id: str, listener: ReplicaListener) -> Any:
            process = FakeProcess(
                replica_id,
                listener,
                limits,
                self.clock,
                executor=lambda told: FakeExecutor(
                    told, duration_ns=lambda plan: int(step_s(plan) * S)
                ),
                load_s=load_s,
            )
            self.processes[replica_id] = process
            return process

        models = {"tiny": served or served_model()}
        self.observer = Observer(
            self.metrics, journal, self.clock, Deployment(0, "", {"version": "1"})
        )
        self.driver = FleetDriver(
            fleet=Fleet([pool], chance=Random(1)),
            models=models,
            replicas=dict.fromkeys(ids, "tiny"),
            launch=launch,
            observer=self.observer,
            clock=self.clock,
        )
        self.gateway = LocalGateway(self.driver, models, self.observer)

    @property
    def process(self) -> FakeProcess:
        return next(iter(self.processes.values()))

    def call(self, name: str = "a", prompt: int = 10, output: int | None = 5, **more: Any) -> Call:
        """A call of so many prompt and output tokens."""
        tokens = tuple((len(name) * 7 + i) % 250 for i in range(prompt))
        if "prompt_tokens" in more:
            tokens = more.pop("prompt_tokens")
        return Call(
            id=name, model="tiny", arrived_ns=self.clock(), prompt=TokenPrompt(tokens),
            output_tokens_max=output, **{"likeness": hash((tokens, output)), **more},
        )  # fmt: skip

    async def generate(self, name: str = "a", **more: Any) -> PieceStream:
        return await self.gateway.generate(self.call(name, **more))

    def value(self, name: str, *labels: str) -> float:
        """The value of a metric of this gateway."""
        found = [
            sample.value
            for family in self.metrics_families()
            for sample in family.samples
            if sample.name == f"sluice_{name}" and set(labels) <= set(sample.labels.values())
        ]
        assert len(found) == 1, (name, labels, found)
        return float(found[0])

    def counts(self, name: str) -> dict[tuple[str, ...], float]:
        """The series of a counter that are above zero, by their label values."""
        return {
            tuple(sample.labels.values()): sample.value
            for family in self.metrics_families()
            for sample in family.samples
            if sample.name == f"sluice_{name}" and sample.value
        }

    def metrics_families(self) -> list[Any]:
        self.gateway.metrics()
        return list(self.metrics.collect())

    async def until(self, holds: Callable[[], object]) -> None:
        """Let virtual time pass until something holds."""
        async with asyncio.timeout(3600):
            while not holds():  # noqa: ASYNC110 - time is virtual
                await asyncio.sleep(0.05)

    def check_empty(self) -> None:
        """Nothing is held for anybody: no call, place, timing, block or sequence."""
        gateway = self.gateway
        assert len(self.driver._calls) == 0
        assert self.observer._timings == {}
        assert self.driver._fleet.requests == 0
        for pool in gateway.pools():
            assert (pool.waiting, pool.waiting_places, pool.places) == (0, 0, 0)
            for replica in pool.replicas:
                assert (replica.requests, replica.places) == (0, 0)
        for process in self.processes.values():
            if process.replica is not None:
                roster = process.replica.roster
                assert (list(roster.waiting), list(roster.residents)) == ([], [])
                assert roster.ledger.available == roster.ledger.blocks_total
        for name in ("requests_in_flight", "requests_running", "requests_waiting", "queue_places"):
            assert self.value(name) == 0, name


async def pieces(stream: PieceStream) -> list[Piece]:
    """All pieces to the end."""
    return [piece async for piece in stream]


async def ending(stream: PieceStream) -> Finished:
    """The last piece, which must be ``Finished`` and the only one."""
    seen = await pieces(stream)
    assert [isinstance(piece, Finished) for piece in seen] == [False] * (len(seen) - 1) + [True]
    assert isinstance(seen[-1], Finished)
    return seen[-1]


def text_of(seen: list[Piece], choice: int = 0) -> str:
    return "".join(p.text for p in seen if isinstance(p, Delta) and p.choice == choice)


def chat(rig: Rig, content: str, **more: Any) -> Call:
    """A chat call of one message."""
    prompt = ChatPrompt([{"role": "user", "content": content}], **more)
    return Call(id="chat", model="tiny", arrived_ns=rig.clock(), prompt=prompt, output_tokens_max=5)


def in_virtual_time(work: Callable[[], Awaitable[None]]) -> None:
    """Run a test's coroutine on a loop of virtual time."""

    async def main() -> None:
        await work()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())
