"""All that the HTTP server knows about the rest of sluice: protocols declared by their consumer."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from sluice.core.tenants import Allowance
from sluice.runtime.generation import Call, ModelCard, Piece, Readiness, Refused, Terms


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

    async def settled(self) -> None:
        """Wait until model, replica and terms are final.

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


class Gateway(Protocol):
    """Serves calls."""

    def check_together(self, calls: Sequence[Call]) -> None:
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
