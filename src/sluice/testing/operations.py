"""``Operations`` that change nothing and note what they were asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sluice.core.errors import ConfigError
from sluice.server.ports import OperatorEvent, Reloaded, Setting


@dataclass
class FakeOverview:
    """Shows the same document always, and one request."""

    shown: bytes = b"{}"
    requests: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, float, float]] = field(default_factory=list)

    def document(self, model: str, since_s: float, window_s: float) -> bytes:
        """``shown``."""
        self.asked.append((model, since_s, window_s))
        return self.shown

    def request(self, request_id: str) -> bytes | None:
        """One of ``requests``."""
        return self.requests.get(request_id)

    def scaling(self) -> bytes:
        """``shown``."""
        return self.shown


@dataclass
class FakeOperations:
    """Answers with what the test put here. ``problems`` make a reload fail."""

    in_force: Sequence[Setting] = ()
    reloaded: Reloaded = field(default_factory=Reloaded)
    problems: tuple[str, ...] = ()
    reloads: int = 0
    draining: dict[str, bool] = field(default_factory=dict)
    pinned: dict[str, int | None] = field(default_factory=dict)
    noted: list[OperatorEvent] = field(default_factory=list)
    overview: FakeOverview = field(default_factory=FakeOverview)

    def settings(self) -> Sequence[Setting]:
        """``in_force``."""
        return self.in_force

    async def reload(self) -> Reloaded:
        """``reloaded``, or ``ConfigError`` where there are ``problems``."""
        self.reloads += 1
        if self.problems:
            raise ConfigError(self.problems)
        return self.reloaded

    def drain_replica(self, replica_id: str, *, on: bool) -> None:
        """Note the wish."""
        self.draining[replica_id] = on

    def pin_replicas(self, model: str, number: int | None) -> None:
        """Note the wish."""
        self.pinned[model] = number

    def note(self, event: OperatorEvent) -> None:
        """Keep the event."""
        self.noted.append(event)
