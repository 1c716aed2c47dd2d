"""The app as it is served while settings change: replaced as a whole, never while it answers.

A request goes on with the app that it began with. The memory of all bodies is accounted for across
replacements. Made by ``wiring``; ``app`` knows nothing of it.
"""

from collections.abc import Callable, Coroutine
from typing import Any

from sluice.config.sections import ServerSection
from sluice.server.bodies import Bodies
from sluice.server.exchange import AsgiApp, Receive, Scope, Send
from sluice.server.limits import Limits


class CurrentApp:
    """The ASGI callable. ``make`` makes the app for settings, with the bounds on its bodies."""

    def __init__(
        self, section: ServerSection, make: Callable[[ServerSection, Bodies], AsgiApp]
    ) -> None:
        self._bodies = Bodies(Limits.of(section))
        self._make = make
        self._app = make(section, self._bodies)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        """Answer one HTTP request."""
        return self._app(scope, receive, send)

    def reconfigure(self, section: ServerSection) -> None:
        """Let new requests be answered under other settings."""
        self._bodies.limits = Limits.of(section)
        self._app = self._make(section, self._bodies)
