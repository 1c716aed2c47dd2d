"""All that the HTTP server knows about the rest of sluice: protocols declared by their consumer."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sluice.core.model_routes import Choice, Question, Why
from sluice.core.tenants import Allowance
from sluice.runtime.generation import (
    Call,
    ModelCard,
    Piece,
    Readiness,
    Refused,
    Relaying,
    Terms,
    ToldOutcome,
)


class Relay(Protocol):
    """The answer of a remote engine: bytes to pass on, and whether they are the last.

    It ends without the last where the call was ended by the gateway, whose ``Finished`` then says
    why. Raises ``SluiceError`` where the engine gives no whole answer.
    """

    @property
    def content_type(self) -> str:
        """The engine's word for what was passed on."""
        ...

    def __aiter__(self) -> AsyncIterator[tuple[bytes, bool]]: ...


class Generation(Protocol):
    """An admitted call. Iterating gives pieces in order, the last one ``Finished``."""

    @property
    def model(self) -> str:
        """Name of the model that answers, which may differ from the one asked for."""
        ...

    @property
    def replica(self) -> str:
        """Id of the replica that answers."""
        ...

    @property
    def terms(self) -> Terms:
        """On which terms it is answered."""
        ...

    @property
    def relay(self) -> Relay | None:
        """What is to be passed on instead of pieces, where a remote engine answers."""
        ...

    async def settled(self) -> None:
        """Wait until model, replica, terms and relay are final.

        Raises ``RequestError`` or ``Overloaded`` where admission refuses the call after a wait.
        """
        ...

    def __aiter__(self) -> AsyncIterator[Piece]: ...

    def cancel(self) -> None:
        """The client left: free everything the call holds. Safe at any time and more than once."""
        ...

    def withdraw(self) -> None:
        """Cancel a call because another one of its request is refused: it is charged nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting in force; ``value`` as JSON has it, masked where it is secret."""

    key: str
    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What reading the settings again changed, by the keys of the settings.

    ``needs_restart`` differ from what holds and were left as they were.
    """

    applied: tuple[str, ...] = ()
    needs_restart: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OperatorEvent:
    """Something that the operator says has happened: a rollout, a change of an engine.

    ``what`` is a short name of its kind, ``details`` are texts by name.
    """

    what: str
    details: Mapping[str, str]


class Overview(Protocol):
    """What a person wants to see of a running server, as JSON."""

    def document(self, model: str, since_s: float, window_s: float) -> bytes:
        """All of it for a model, or for all (``""``): samples after a time, lists of a window."""
        ...

    def request(self, request_id: str) -> bytes | None:
        """The life of a request that the document names, ``None`` for one that is forgotten."""
        ...

    def scaling(self) -> bytes:
        """How many replicas there are to be, and why; how long starts took."""
        ...


class Operations(Protocol):
    """What the operator may do to a running server, and look at."""

    @property
    def overview(self) -> Overview: ...

    def settings(self) -> Sequence[Setting]:
        """Every setting in force. Secrets are masked."""
        ...

    async def reload(self) -> Reloaded:
        """Read the settings again and apply what can change while requests run.

        Raises ``ConfigError`` with every mistake; nothing is changed then.
        """
        ...

    def drain_replica(self, replica_id: str, *, on: bool) -> None:
        """Give a replica nothing more and let it finish what it has, or use it again."""
        ...

    def pin_replicas(self, model: str, number: int | None) -> None:
        """Let so many replicas of a model serve; ``None`` leaves it to the load again.

        Raises ``InvalidRequest`` where the model has no range of replicas, or not so many.
        """
        ...

    def note(self, event: OperatorEvent) -> None:
        """Record an event at this moment, for whoever asks later what changed."""
        ...


class AutoRoute(Protocol):
    """A name that stands for two models."""

    def judge(self, text: str) -> tuple[float | None, Why]:
        """The score of a text, or why there is none. May be called in any thread."""
        ...

    def choose(self, question: Question, call_id: str, text: str) -> Choice:
        """The model for a request, which is counted; ``text`` is what was judged of it."""
        ...

    def answered(self, call_id: str, model: str) -> None:
        """Another model than the chosen one answers a request."""
        ...

    async def told(self, outcome: ToldOutcome) -> None:
        """Keep what became of a prompt. Raises ``InvalidRequest`` where that cannot be used."""
        ...


class Gateway(Protocol):
    """Serves calls. ``relaying`` says which models are those of remote engines; ``routes`` are
    names that stand for two models."""

    @property
    def relaying(self) -> Relaying: ...

    @property
    def routes(self) -> Mapping[str, AutoRoute]: ...

    async def check_together(self, calls: Sequence[Call]) -> None:
        """Check that all calls of one request can ever be served at once.

        Raises ``InvalidRequest`` where they cannot, whatever else is being served.
        """
        ...

    async def generate(self, call: Call) -> Generation:
        """Admit a call.

        Returns once it is admitted, before its first token. Raises ``RequestError`` where it cannot
        be served as asked and ``Overloaded`` where admission refuses it. A caller whose client
        leaves cancels the await; nothing of the call may remain then.
        """
        ...

    def models(self) -> Sequence[ModelCard]:
        """The models that clients can ask for."""
        ...

    def readiness(self) -> Readiness:
        """Whether calls can be served at this moment."""
        ...

    def metrics(self) -> tuple[bytes, str]:
        """Prometheus exposition of all metrics, and its content type."""
        ...

    def allowance(self, tenant: str) -> Allowance | None:
        """What a tenant may still use, ``None`` where it has no limit per minute."""
        ...

    def refused(self, refused: Refused) -> None:
        """Count and record a request that the server refused before it became a call."""
        ...
