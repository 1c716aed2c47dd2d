"""A scripted ``Gateway``: pieces, waits, refusals and failures as the test says.

It runs no model and knows no clock: waits are events that the test sets, or go through the
``sleep`` that it is given. It implements ``server/ports.py`` and records calls, cancellations and
refusals.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from sluice.core.errors import ModelNotFound
from sluice.core.request import EndReason, PhaseTimes, Usage
from sluice.core.tenants import Allowance
from sluice.runtime.generation import (
    NOTHING_REMOTE,
    Call,
    ChoiceEnded,
    Delta,
    Finished,
    ModelCard,
    Piece,
    Readiness,
    Refused,
    Relaying,
    Terms,
)
from sluice.runtime.streams import Relay
from sluice.server.ports import AutoRoute


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait this long, by the gateway's ``sleep``."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Hold:
    """Wait until the test sets the event."""

    event: asyncio.Event


Step = Piece | Pause | Hold | Exception


@dataclass(frozen=True, slots=True)
class Script:
    """What becomes of one call.

    ``before`` runs before the call is admitted: waits, or an exception that refuses it. ``steps``
    are the pieces, with waits between them; an exception among them is raised from the iteration.
    ``waits`` run between its admission and its coming to a replica, like ``before``. ``relay`` is
    what a remote engine answers.
    """

    steps: Sequence[Step]
    before: Sequence[Pause | Hold | Exception] = ()
    model: str = ""
    replica: str = "replica-0"
    terms: Terms = field(default_factory=Terms)
    waits: Sequence[Pause | Hold | Exception] = ()
    relay: Relay | None = None


@dataclass
class Recorded:
    """What the gateway saw."""

    calls: list[Call] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    left_before_admission: list[str] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)


def usage(prompt: int, completion: int, cached: int = 0) -> Usage:
    """Token counts, short."""
    return Usage(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion)


def finished(
    reason: EndReason = EndReason.STOP, counts: Usage | None = None, error: str = ""
) -> Finished:
    """An ending with phases left at zero."""
    return Finished(reason, counts or usage(1, 0), PhaseTimes(), error)


def speak(call: Call, *texts: str) -> Script:
    """Every choice says these texts, one token each, choices in turn, then stops."""
    steps: list[Step] = [
        Delta(choice, text, tokens=1) for text in texts for choice in range(call.choices)
    ]
    steps += [ChoiceEnded(choice, "stop") for choice in range(call.choices)]
    steps.append(finished(counts=usage(7, len(texts) * call.choices, cached=3)))
    return Script(steps)


def refuse(error: Exception) -> Script:
    """The call is refused at the door."""
    return Script((), before=(error,))


class FakeGateway:
    """Serves calls by script. ``script`` is asked once for each call."""

    def __init__(
        self,
        script: Callable[[Call], Script] | None = None,
        *,
        models: Sequence[str] = ("tiny",),
        readiness: Readiness | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        relaying: Relaying = NOTHING_REMOTE,
    ) -> None:
        self.relaying = relaying
        self.routes: dict[str, AutoRoute] = {}
        self.script = script or (lambda call: speak(call, "Hello", " world", "."))
        self.recorded = Recorded()
        self.allowances: dict[str, Allowance] = {}
        self.status = readiness or Readiness(ready=True, reason="")
        self._models = tuple(ModelCard(name, 1_700_000_000, 2048) for name in models)
        self._sleep = sleep

    async def check_together(self, calls: Sequence[Call]) -> None:
        """Take any calls."""

    async def generate(self, call: Call) -> "FakeGeneration":
        """Admit a call by its script."""
        self.recorded.calls.append(call)
        if call.model not in {card.id for card in self._models}:
            raise ModelNotFound(f"No model is called {call.model!r}.", param="model")
        script = self.script(call)
        try:
            for step in script.before:
                await self._wait(step)
        except asyncio.CancelledError:
            self.recorded.left_before_admission.append(call.id)
            raise
        return FakeGeneration(call, script, self.recorded, self._wait)

    def models(self) -> Sequence[ModelCard]:
        """The models given to the constructor."""
        return self._models

    def readiness(self) -> Readiness:
        """``status``, which tests may replace."""
        return self.status

    def metrics(self) -> tuple[bytes, str]:
        """A constant exposition."""
        return b"sluice_fake 1\n", "text/plain; version=0.0.4; charset=utf-8"

    def allowance(self, tenant: str) -> Allowance | None:
        """What the test put into ``allowances``."""
        return self.allowances.get(tenant)

    def refused(self, refused: Refused) -> None:
        """Record a refusal by the server."""
        self.recorded.refused.append(refused)

    async def _wait(self, step: Pause | Hold | Exception) -> None:
        match step:
            case Pause(seconds):
                await self._sleep(seconds)
            case Hold(event):
                await event.wait()
            case Exception():
                raise step


class FakeGeneration:
    """Plays one script. A cancelled one ends at its next step."""

    def __init__(
        self,
        call: Call,
        script: Script,
        recorded: Recorded,
        wait: Callable[[Pause | Hold | Exception], Awaitable[None]],
    ) -> None:
        self._call, self._script, self._recorded, self._wait = call, script, recorded, wait
        self._over = False
        self.relay = script.relay
        self.model = script.model or call.model
        self.replica = script.replica
        self.terms = script.terms

    async def settled(self) -> None:
        """Let the waits pass."""
        for step in self._script.waits:
            await self._wait(step)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        for step in self._script.steps:
            if self._over:
                yield finished(EndReason.CANCELLED)
                return
            if isinstance(step, Delta | ChoiceEnded | Finished):
                if isinstance(step, Finished):
                    self._over = True
                    self._recorded.ended.append(self._call.id)
                yield step
            else:
                await self._wait(step)

    def cancel(self) -> None:
        """Record that the client left; nothing once the call is over."""
        if not self._over:
            self._over = True
            self._recorded.cancelled.append(self._call.id)

    def withdraw(self) -> None:
        """As ``cancel``."""
        self.cancel()
