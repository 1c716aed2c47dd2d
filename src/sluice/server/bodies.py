"""Request bodies on their way to a call: how much memory they take together, and where large ones
are worked on.

One ``Bodies`` serves all exchanges of an app. Small bodies are decoded where they are, on the event
loop. Large ones are decoded and checked in threads, few at a time, so that no body holds up the
others' answers. What a body means is the routes' business.
"""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

from sluice.core.errors import Overloaded
from sluice.server.limits import Limits
from sluice.server.rounds import Rounds

Understood = TypeVar("Understood")

# Decoding and checking a body of this size takes about a millisecond. What it holds of memory is
# bounded by the number of connections, so it is not counted: many large bodies that never end must
# not keep ordinary requests out.
SMALL_BYTES_MAX = 64 * 1024
# Threads share one interpreter with the event loop: more of them would only slow it down.
_THREADS_MAX = 2
# Decoding is one step that nothing can interrupt. Of bodies from this size on one is decoded at a
# time, so that the event loop never waits for two such steps in a row.
_ALONE_BYTES_MIN = 512 * 1024
_RETRY_AFTER_S = 1.0


class Account:
    """What one body holds of the memory for bodies; to be closed."""

    def __init__(self, bodies: "Bodies") -> None:
        self._bodies = bodies
        self.held_bytes = 0

    def close(self) -> None:
        """The body has become a call or was refused."""
        self._bodies.held_bytes -= self.held_bytes
        self.held_bytes = 0

    def grow(self, size: int) -> None:
        """The body has ``size`` bytes by now. Raises ``Overloaded`` where that is too much."""
        if size > SMALL_BYTES_MAX:
            self._bodies.take(size - self.held_bytes)
            self.held_bytes = size


class Bodies:
    """Bounds on one body and on all together. ``limits`` are those of each request.

    ``rounds`` are what the exchanges share as well, whose bodies these are.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.held_bytes = 0
        self.rounds = Rounds()
        self._threads = asyncio.Semaphore(_THREADS_MAX)
        self._alone = asyncio.Semaphore(1)

    def take(self, size: int) -> None:
        """Hold more bytes. Raises ``Overloaded``, holding nothing, beyond the limit."""
        wanted, limit = self.held_bytes + size, self.limits.bodies_bytes_max
        if wanted > limit:
            raise Overloaded(
                f"Large request bodies take up their {limit} bytes of memory; "
                "send this one again later.",
                status=503,
                reason="bodies",
                measured=wanted,
                threshold=limit,
                retry_after_s=_RETRY_AFTER_S,
            )
        self.held_bytes = wanted

    async def understand(
        self, body: bytes, understand: Callable[[bytes], Understood]
    ) -> Understood:
        """What ``understand`` makes of a body; it runs in a thread where the body is large."""
        if len(body) <= SMALL_BYTES_MAX:
            return understand(body)
        alone = self._alone if len(body) >= _ALONE_BYTES_MIN else nullcontext()
        async with alone, self._threads:
            return await asyncio.to_thread(understand, body)
