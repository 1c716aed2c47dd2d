"""A gateway over one scripted replica, with classes and tenants, on either clock.

In virtual time for long loads, on the machine's clock behind the HTTP server for what only sockets
show. The replica is a real ``core.Replica``; what fails, hangs or is loud is the test's choice.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from sluice.cluster.classes import ServiceClasses
from sluice.cluster.fleet_driver import FleetDriver
from sluice.cluster.gateway import LocalGateway
from sluice.cluster.observer import Observer
from sluice.cluster.placement.replica import ReplicaListener
from sluice.cluster.served import ServedModel
from sluice.config.sections import SloSection, TenantSection
from sluice.core.events import ReplicaLimits, StepFailed
from sluice.core.fleet import Fleet
from sluice.core.fleet_replica import RestartLimits
from sluice.core.limits import PoolLimits, TenantLimits
from sluice.core.request import SequenceId
from sluice.core.roster import BatchingLimits
from sluice.core.step import Plan
from sluice.executors.base import Outcome, StepError
from sluice.runtime.generation import Call, ModelCard, TokenPrompt
from sluice.runtime.messages import FromReplica, Text
from sluice.runtime.streams import PieceStream
from sluice.runtime.templates import ChatTemplate
from sluice.telemetry.journal import JournalWriter
from sluice.telemetry.metrics import Metrics
from sluice.telemetry.records import Deployment
from sluice.testing.executors import FakeExecutor
from sluice.testing.processes import FakeProcess
from tests.runtime.gguf_files import byte_level_values, tokenizer_of

S = 1_000_000_000
CONTEXT = 512
# A replica that crashes as often as a test wants and is back at once.
RESTARTS = RestartLimits(1, 1, losses_max=1_000_000)


class Executor(FakeExecutor):
    """Blames the sequences whose requests are in ``failing``."""

    failing: set[str]

    def run(self, plan: Plan) -> Outcome:
        blamed = tuple(dict.fromkeys(row.sequence for row in plan.rows if self.fails(row.sequence)))
        if blamed:
            raise StepError("scripted failure", blamed)
        return super().run(plan)

    def fails(self, sequence: SequenceId) -> bool:
        return bool(self.failing & {sequence.request_id, "all"})


class Process(FakeProcess):
    """A replica whose pieces of text are ``loudness`` characters long, where that is set.

    A step that its executor refuses fails at once.
    """

    loudness = 0

    def _run(self, plan: Plan) -> None:
        try:
            super()._run(plan)
        except StepError as failure:
            failed = StepFailed(plan.step, failure.blamed, str(failure))
            self._later(0.0, lambda: self._handle(failed))

    def tell(self, *messages: FromReplica) -> None:
        if self.loudness:
            messages = tuple(self._loud(message) for message in messages)
        super().tell(*messages)

    def _loud(self, message: FromReplica) -> FromReplica:
        if not isinstance(message, Text):
            return message
        return Text(message.request_id, replace(message.delta, text="x" * self.loudness))


class OverloadRig:
    """One model ``tiny`` with one replica of ``slots`` sequences and steps of a fixed time.

    Where ``pool`` names a ``smaller`` model, that is served by a replica like this one.
    """

    def __init__(
        self,
        clock: Callable[[], int],
        *,
        slots: int = 4,
        step_s: Callable[[], float] = lambda: 0.1,
        pool: Mapping[str, Any] = {},
        slo: Mapping[str, SloSection] = {},
        slo_default: str | None = None,
        tenants: Sequence[TenantLimits] = (),
        sections: Mapping[str, TenantSection] = {},
        journal: JournalWriter | None = None,
    ) -> None:
        self.clock = clock
        self.failing: set[str] = set()
        self._processes: list[Process] = []
        self._step_s = step_s
        self._limits = BatchingLimits(CONTEXT, 16, 400, sequences_max=slots)
        pools = [PoolLimits("tiny", ("tiny-0",), **pool)]
        if pools[0].smaller is not None:
            pools.append(PoolLimits(pools[0].smaller, (f"{pools[0].smaller}-0",)))
        replicas = {name: one.model for one in pools for name in one.replica_ids}
        self.metrics = Metrics(list(replicas.values()), slo_classes=list(slo))
        classes = ServiceClasses(slo, sections, slo_default)
        models = {name: _served(name, classes) for name in replicas.values()}
        observer = Observer(self.metrics, journal, clock, Deployment(0, "", {"version": "1"}))
        self.driver = FleetDriver(
            fleet=Fleet(pools, chance=Random(1), tenants=tenants, restarts=RESTARTS),
            models=models,
            replicas=replicas,
            launch=self._launch,
            observer=observer,
            clock=clock,
        )
        self.gateway = LocalGateway(self.driver, models, observer)

    @property
    def process(self) -> Process:
        """The replica of ``tiny``."""
        return self._processes[0]

    def _launch(self, replica_id: str, listener: ReplicaListener) -> Any:
        process = Process(
            replica_id, listener, self._limits, self.clock, executor=self._make_executor
        )
        self._processes.append(process)
        return process

    def _make_executor(self, told: ReplicaLimits) -> Executor:
        made = Executor(told, duration_ns=lambda plan: round(self._step_s() * S))
        made.failing = self.failing
        return made

    def call(self, name: str, prompt: int = 10, output: int = 20, **more: Any) -> Call:
        """A call whose prompt shares nothing with that of another name."""
        chance = Random(name)
        tokens = tuple(chance.randrange(250) for _ in range(prompt))
        return Call(
            id=name, model="tiny", arrived_ns=self.clock(), prompt=TokenPrompt(tokens),
            output_tokens_max=output, **more,
        )  # fmt: skip

    async def generate(self, name: str, **more: Any) -> PieceStream:
        return await self.gateway.generate(self.call(name, **more))

    def values(self, name: str) -> dict[tuple[str, ...], float]:
        """All values of a metric by its labels, in the order of the metric's labels."""
        self.gateway.metrics()
        return {
            tuple(sample.labels.values()): sample.value
            for family in self.metrics.collect()
            for sample in family.samples
            if sample.name == f"sluice_{name}"
        }

    def value(self, name: str, *labels: str) -> float:
        """The one value of a metric that has all these labels; 0 where there is none."""
        found = [value for known, value in self.values(name).items() if set(labels) <= set(known)]
        assert len(found) <= 1, (name, labels, found)
        return found[0] if found else 0.0


def _served(name: str, classes: ServiceClasses) -> ServedModel:
    tokenizer = tokenizer_of(byte_level_values())
    numbers = itertools.count(1)
    return ServedModel(
        card=ModelCard(name, 0, CONTEXT),
        tokenizer=tokenizer,
        template=ChatTemplate(tokenizer.facts, lambda: None),  # type: ignore[arg-type,return-value]
        classes=classes,
        new_id=lambda: f"call{next(numbers)}",
    )
