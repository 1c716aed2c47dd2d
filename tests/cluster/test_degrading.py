"""The gateway performs what the fleet decides under overload: shorter answers, smaller models."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from sluice.cluster.classes import ServiceClasses
from sluice.cluster.fleet_driver import FleetDriver
from sluice.cluster.gateway import LocalGateway
from sluice.cluster.observer import Observer
from sluice.cluster.served import ServedModel
from sluice.config.sections import SloSection
from sluice.core.errors import ContextExceeded, Overloaded
from sluice.core.events import Arrived, FleetEffect, FleetEvent, Reject, Retarget, Shorten
from sluice.core.fleet import Fleet
from sluice.core.limits import PoolLimits
from sluice.core.request import EndReason, Request, Rung
from sluice.core.roster import BatchingLimits
from sluice.runtime.generation import Call, ChoiceEnded, Delta, ModelCard, TokenPrompt
from sluice.runtime.messages import Submit
from sluice.runtime.streams import PieceStream
from sluice.runtime.templates import ChatTemplate
from sluice.telemetry.metrics import Metrics
from sluice.testing.executors import FakeExecutor
from sluice.testing.processes import FakeProcess
from tests.cluster.rig import in_virtual_time, pieces
from tests.runtime.gguf_files import byte_level_values, tokenizer_of

S = 1_000_000_000
SLO = {"gold": SloSection(ttft_s=5.0, overload=("shorten", "smaller", "queue"), shorten_tokens=2)}
Decide = Callable[[Arrived], Sequence[FleetEffect] | None]


class DecidingFleet(Fleet):
    """A fleet whose first answer to a request is the test's; ``None`` leaves it to the fleet."""

    def __init__(self, pools: Sequence[PoolLimits], decide: Decide) -> None:
        super().__init__(pools, chance=Random(1))
        self.decide = decide
        self.arrivals: list[Arrived] = []

    def handle(self, event: FleetEvent, now_ns: int) -> list[FleetEffect]:
        if not isinstance(event, Arrived):
            return super().handle(event, now_ns)
        self.arrivals.append(event)
        decided = list(self.decide(event) or ())
        if any(isinstance(effect, Reject | Retarget) for effect in decided):
            return decided
        for effect in decided:
            assert isinstance(effect, Shorten)
            request = replace(event.request, output_tokens_max=effect.output_tokens_max)
            event = Arrived(event.model, request)
        return [*decided, *super().handle(event, now_ns)]


class SlowModel(ServedModel):
    """Takes its time to tokenise, and may refuse to."""

    wait_s = 0.0
    refusal: Exception | None = None

    async def submit(self, call: Call) -> Submit:
        if self.wait_s:
            await asyncio.sleep(self.wait_s)
        if self.refusal is not None:
            raise self.refusal
        return await super().submit(call)


class Two:
    """A gateway with the models ``large`` and ``small``, one replica each."""

    def __init__(self, decide: Decide, small_tokens: int = 400) -> None:
        loop: Any = asyncio.get_running_loop()
        self.clock = loop.now_ns
        self.metrics = Metrics(["large", "small"], slo_classes=list(SLO))
        self.observer = Observer(self.metrics, None, self.clock)
        self.fleet = DecidingFleet(
            [PoolLimits("large", ("large-0",), smaller="small"), PoolLimits("small", ("small-0",))],
            decide,
        )
        self.models = {name: self._model(name) for name in ("large", "small")}
        limits = {"large-0": 400, "small-0": small_tokens}
        self.processes: dict[str, FakeProcess] = {}

        def launch(replica_id: str, listener: Any) -> Any:
            tokens = limits[replica_id]
            process = FakeProcess(
                replica_id,
                listener,
                BatchingLimits(tokens, 4, 100, sequences_max=2),
                self.clock,
                executor=lambda told: FakeExecutor(told, duration_ns=lambda plan: S // 10),
            )
            self.processes[replica_id] = process
            return process

        self.driver = FleetDriver(
            fleet=self.fleet,
            models=self.models,
            replicas={"large-0": "large", "small-0": "small"},
            launch=launch,
            observer=self.observer,
            clock=self.clock,
        )
        self.gateway = LocalGateway(self.driver, self.models, self.observer)

    def _model(self, name: str) -> SlowModel:
        tokenizer = tokenizer_of(byte_level_values())
        return SlowModel(
            card=ModelCard(name, 0, 512),
            tokenizer=tokenizer,
            template=ChatTemplate(tokenizer.facts, lambda: None),  # type: ignore[arg-type,return-value]
            classes=ServiceClasses(SLO, default="gold" if name == "large" else None),
            new_id=lambda: "call",
        )

    async def generate(self, **more: Any) -> PieceStream:
        call = Call("a", "large", self.clock(), TokenPrompt(tuple(range(10))), output_tokens_max=5)
        return await self.gateway.generate(replace(call, **more))

    def value(self, name: str, **labels: str) -> float:
        self.gateway.metrics()
        return sum(
            sample.value
            for family in self.metrics.collect()
            for sample in family.samples
            if sample.name == f"sluice_{name}" and labels.items() <= sample.labels.items()
        )

    def check_empty(self) -> None:
        assert len(self.driver._calls) == 0
        assert self.observer._timings == {}
        assert self.fleet.requests == 0
        assert all(task.done() for task in self.driver._retargets)


def shorten_to(tokens: int) -> Decide:
    return lambda event: [Shorten(event.request.id, tokens)]


def to_small(event: Arrived) -> Sequence[FleetEffect] | None:
    """What does not fit on large goes to small, if it was not there yet."""
    if event.model == "large" and Rung.SMALLER not in event.request.degraded:
        return [Retarget(event.request.id, "small", 9.0, 5.0)]
    return None


def completion_tokens(seen: Sequence[Any]) -> int:
    return sum(piece.tokens for piece in seen if isinstance(piece, Delta))


def test_a_shortened_answer_ends_at_its_limit_and_says_so():
    async def work() -> None:
        two = Two(shorten_to(2))
        await two.gateway.start()
        stream = await two.generate()
        await stream.settled()
        assert stream.terms.degraded == (Rung.SHORTEN,)
        assert (stream.terms.output_tokens_max, stream.terms.slo_class) == (2, "gold")
        seen = await pieces(stream)
        assert completion_tokens(seen) == 2
        assert ChoiceEnded(0, "length") in seen
        assert two.value("degradations_total", model="large", rung="shorten") == 1
        assert two.value("class_requests_total", slo_class="gold", outcome="met") == 1
        two.check_empty()

    in_virtual_time(work)


def test_a_retargeted_call_is_answered_by_the_smaller_model_in_its_own_class():
    async def work() -> None:
        two = Two(to_small)
        await two.gateway.start()
        stream = await two.generate()
        await stream.settled()
        assert (stream.model, stream.replica) == ("small", "small-0")
        assert stream.terms.degraded == (Rung.SMALLER,)
        assert stream.terms.model_asked == "large"
        assert completion_tokens(await pieces(stream)) == 5
        first, second = two.fleet.arrivals
        assert (first.model, second.model) == ("large", "small")
        asked, given = first.request, second.request
        assert given.degraded == (Rung.SMALLER,)
        assert (given.slo_class, given.arrived_ns) == ("gold", asked.arrived_ns)
        assert (given.ttft_due_ns, given.overload) == (asked.ttft_due_ns, asked.overload)
        assert two.value("requests_total", model="small") == 1
        assert two.value("requests_ended_total", model="small") == 1
        assert two.value("ttft_seconds_count", model="small") == 1
        assert two.value("degradations_total", model="large", rung="smaller") == 1
        two.check_empty()

    in_virtual_time(work)


def test_both_rungs_are_disclosed_in_order_and_the_lower_limit_holds():
    async def work() -> None:
        def both(event: Arrived) -> Sequence[FleetEffect] | None:
            if event.model == "large":
                return [Retarget(event.request.id, "small", 9.0, 5.0)]
            return [Shorten(event.request.id, 3)]

        two = Two(both)
        await two.gateway.start()
        stream = await two.generate()
        seen = await pieces(stream)
        assert completion_tokens(seen) == 3
        assert stream.terms.degraded == (Rung.SMALLER, Rung.SHORTEN)
        two.check_empty()

    in_virtual_time(work)


def test_an_answer_that_was_shortened_before_it_went_to_the_smaller_model_stays_short():
    async def work() -> None:
        def both(event: Arrived) -> Sequence[FleetEffect] | None:
            if event.model == "large":
                return [Shorten(event.request.id, 3), *(to_small(event) or ())]
            return None

        two = Two(both)
        await two.gateway.start()
        stream = await two.generate()
        assert completion_tokens(await pieces(stream)) == 3
        assert (stream.model, stream.terms.output_tokens_max) == ("small", 3)
        assert stream.terms.degraded == (Rung.SHORTEN, Rung.SMALLER)
        assert two.value("degradations_total", rung="shorten") == 1
        assert two.fleet.arrivals[-1].request.degraded == (Rung.SHORTEN, Rung.SMALLER)
        two.check_empty()

    in_virtual_time(work)


@pytest.mark.parametrize("refusal", [ContextExceeded("long"), None], ids=["refuses", "too small"])
def test_a_call_that_the_smaller_model_cannot_take_goes_on_at_its_own(refusal):
    async def work() -> None:
        two = Two(to_small, small_tokens=12)
        two.models["small"].refusal = refusal
        await two.gateway.start()
        stream = await two.generate()
        await stream.settled()
        assert (stream.model, stream.terms.degraded) == ("large", ())
        assert completion_tokens(await pieces(stream)) == 5
        first, second = two.fleet.arrivals
        assert (second.model, second.request.degraded) == ("large", (Rung.SMALLER,))
        assert second.request.prompt == first.request.prompt
        assert two.value("degradations_total") == 0
        two.check_empty()

    in_virtual_time(work)


def test_a_refusal_at_the_smaller_model_is_told_like_any_other():
    async def work() -> None:
        def decide(event: Arrived) -> Sequence[FleetEffect] | None:
            if event.model == "small":
                return [Reject("a", 429, "predicted_late", 9.0, 5.0, 3.0)]
            return to_small(event)

        two = Two(decide)
        await two.gateway.start()
        stream = await two.generate()
        with pytest.raises(Overloaded) as refused:
            await stream.settled()
        assert (refused.value.reason, refused.value.retry_after_s) == ("predicted_late", 3.0)
        assert two.value("refusals_total", reason="predicted_late") == 1
        assert two.value("requests_total", model="small") == 1
        assert two.value("refusals_total", model="small") == 1
        assert two.value("degradations_total") == 0
        assert two.value("class_requests_total", slo_class="gold", outcome="refused") == 1
        two.check_empty()

    in_virtual_time(work)


@pytest.mark.parametrize("left_after_s", [None, 0.0, 0.1, 0.31, 1.0])
def test_a_client_that_leaves_is_forgotten_in_every_phase(left_after_s):
    """Before the smaller model is asked, while it tokenises, while it waits, while it answers."""

    async def work() -> None:
        two = Two(to_small)
        two.models["small"].wait_s = 0.3
        await two.gateway.start()
        stream = await two.generate(output_tokens_max=50)
        if left_after_s is not None:
            await asyncio.sleep(left_after_s)
        stream.cancel()
        stream.cancel()
        await asyncio.sleep(3)
        two.check_empty()
        assert two.value("requests_ended_total", reason="cancelled") == 1
        assert two.value("requests_ended_total") == 1
        assert two.value("class_requests_total", outcome="left") == 1
        for process in two.processes.values():
            assert process.replica is not None
            assert not process.replica.roster.residents

    in_virtual_time(work)


def test_a_server_that_closes_ends_a_call_between_its_models_once():
    async def work() -> None:
        two = Two(to_small)
        two.models["small"].wait_s = 60.0
        await two.gateway.start()
        stream = await two.generate()
        await asyncio.sleep(0.1)
        await two.gateway.close()
        await asyncio.sleep(0.1)
        assert [type(piece).__name__ for piece in await pieces(stream)] == ["Finished"]
        two.check_empty()

    in_virtual_time(work)


def test_a_draining_server_waits_for_a_call_between_its_models_and_refuses_it():
    async def work() -> None:
        two = Two(to_small)
        two.models["small"].wait_s = 0.5
        await two.gateway.start()
        stream = await two.generate()
        await two.gateway.drain(10.0)
        with pytest.raises(Overloaded) as refused:
            await stream.settled()
        assert refused.value.reason == "draining"
        two.check_empty()

    in_virtual_time(work)


class Broken(Exception):
    """A bug."""


def test_a_bug_on_the_way_to_the_smaller_model_ends_the_call(caplog):
    async def work() -> None:
        two = Two(to_small)
        two.models["small"].refusal = Broken()
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        await two.gateway.start()
        stream = await two.generate()
        (ended,) = await pieces(stream)
        assert getattr(ended, "reason", None) is EndReason.FAILED
        await asyncio.sleep(0.1)
        two.check_empty()

    in_virtual_time(work)


def test_a_request_that_may_not_be_degraded_says_so_to_the_fleet():
    async def work() -> None:
        two = Two(lambda event: None)
        await two.gateway.start()
        await pieces(await two.generate(may_degrade=False))
        request: Request = two.fleet.arrivals[0].request
        assert request.overload == (Rung.QUEUE,)
        two.check_empty()

    in_virtual_time(work)
