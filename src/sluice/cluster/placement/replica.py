"""One replica over all its incarnations: start, talk, notice its end, stop.

A ``PlacedReplica`` reports what happens and decides nothing: whether and when to start again is the
fleet's decision, where it runs is the placement's. A replica that does not load in time, or has
work and says nothing for long, is ended and reported as lost, like one that crashed. Nothing here
waits for a replica to read: one that hangs never would.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sluice.cluster.channel import ChannelClosed, GatewayChannel
from sluice.cluster.placement.placed import NotPlaced, Place, Placed
from sluice.runtime.messages import FromReplica, LoadFailed, Ready, ToReplica

_log = logging.getLogger(__name__)

# One that was told to end by closing its channel gets this long before it is killed.
_EXIT_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a replica may say nothing: while it loads, and with work at hand."""

    load_s_max: float
    silence_s_max: float


class ReplicaListener(Protocol):
    """Who wants to know what a replica process says and when it is gone."""

    def received(self, replica_id: str, messages: Sequence[FromReplica]) -> None:
        """Messages came from the replica, in order."""
        ...

    def lost(self, replica_id: str, error: str, *, silent: bool = False) -> None:
        """The process ended or was ended without having been asked to stop.

        ``silent`` says that it was ended because it held work and said nothing.
        """
        ...

    def busy(self, replica_id: str) -> bool:
        """Whether the replica holds work, so that silence is a fault."""
        ...


class PlacedReplica:
    """Starts and watches one replica. ``place`` starts an incarnation of it somewhere."""

    def __init__(
        self, replica_id: str, place: Place, listener: ReplicaListener, patience: Patience
    ) -> None:
        self.replica_id = replica_id
        self._place = place
        self._listener = listener
        self._patience = patience
        self._placed: Placed | None = None
        self._channel: GatewayChannel | None = None
        self._watch: asyncio.Task[None] | None = None
        self._stopping = False
        self._runs = False
        self._ready: Ready | None = None  # what the incarnation said when its model was loaded
        self._spoke = False
        self._silent = False
        self._hear_by_s: float | None = None  # when it must have spoken, None while it is idle

    @property
    def pid(self) -> int | None:
        """Process id of the current incarnation, ``None`` before the first."""
        return None if self._placed is None else self._placed.pid

    def start(self) -> None:
        """Start an incarnation; what comes of it is told to the listener.

        One that runs is left alone; where it is loaded, it is told again that it is ready.
        """
        if self._runs and self._ready is not None:
            told = self._listener.received
            asyncio.get_running_loop().call_soon(told, self.replica_id, [self._ready])
        self.warm()

    def warm(self) -> None:
        """Start an incarnation where none runs: it is loaded, and gets nothing to do."""
        if not self._stopping and not self._runs:
            self._runs = True
            self._spoke = self._silent = False
            self._ready = None
            self._watch = asyncio.create_task(self._run(), name=f"replica {self.replica_id}")

    def send(self, message: ToReplica) -> None:
        """Queue a message; one to a process that is gone is dropped, as its loss is reported."""
        if self._channel is None:
            return
        if self._hear_by_s is None:
            self._hear_by_s = _now_s() + self._patience.silence_s_max
        try:
            self._channel.send_nowait(message)
        except ChannelClosed as closed:
            # What was dropped may be a request: only the end of the process answers for it.
            _log.error("replica %s is given up: %s", self.replica_id, closed)
            self._channel.abort()

    async def stop(self) -> None:
        """End it, killing it where it does not leave by itself. No loss is reported."""
        self._stopping = True
        if self._channel is not None:
            self._channel.abort()
        elif self._watch is not None:
            self._watch.cancel()  # it looks for a place
        if self._placed is not None:
            # One that has said nothing yet loads its model: it has nothing to finish.
            await self._placed.dismiss(_EXIT_WAIT_S if self._spoke else 0.0)
        if self._watch is not None:
            await asyncio.wait([self._watch])

    async def _run(self) -> None:
        error = "what it said could not be taken"
        try:
            error = await self._live()
        finally:
            await self._buried(error)

    async def _buried(self, error: str) -> None:
        """Let nothing of the incarnation remain, and report its loss."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.abort()
        if self._placed is not None:
            error = f"{error}; {await self._placed.leave(0.0)}"
        self._runs = False
        if not self._stopping:
            self._listener.lost(self.replica_id, error, silent=self._silent)

    async def _live(self) -> str:
        """Run one incarnation to its end and say how it ended."""
        self._placed = None
        try:
            self._placed = placed = await self._place()
        except NotPlaced as refused:
            failed = LoadFailed(str(refused), permanent=refused.permanent)
            self._listener.received(self.replica_id, [failed])
            return str(refused)
        self._channel = placed.channel
        if self._stopping:
            return "told to stop while it was being started"
        return await self._listen(placed.channel)

    async def _listen(self, channel: GatewayChannel) -> str:
        self._hear_by_s = _now_s() + self._patience.load_s_max
        while True:
            receiving = asyncio.create_task(channel.receive())
            # Not cancelled while waiting: that could lose half a frame.
            while not (await asyncio.wait([receiving], timeout=self._wait_s()))[0]:
                impatient = self._impatient_words()
                if impatient:
                    self._silent = self._spoke
                    receiving.cancel()
                    return impatient
            try:
                messages = receiving.result()
            except ChannelClosed as closed:
                return await self._closed_words(str(closed))
            if not self._spoke:
                self._spoke = True
                first = messages[0] if messages else None
                self._ready = first if isinstance(first, Ready) else None
            self._listener.received(self.replica_id, messages)
            is_busy = self._listener.busy(self.replica_id)
            self._hear_by_s = _now_s() + self._patience.silence_s_max if is_busy else None

    def _wait_s(self) -> float:
        if self._hear_by_s is None:
            return self._patience.silence_s_max
        return max(0.0, self._hear_by_s - _now_s())

    def _impatient_words(self) -> str:
        """Why a replica is given up, empty where it may still be silent.

        Silence counts from its last message or, where it was idle then, from its next work.
        """
        if self._hear_by_s is None or _now_s() < self._hear_by_s:
            return ""
        if not self._spoke:
            words = f"the model was not loaded within {self._patience.load_s_max:g} s (load_max)"
            self._listener.received(self.replica_id, [LoadFailed(words, permanent=False)])
            return words
        if self._listener.busy(self.replica_id):
            return f"silent for {self._patience.silence_s_max:g} s with work at hand"
        self._hear_by_s = None
        return ""

    async def _closed_words(self, closed: str) -> str:
        """Give one that closed its channel a moment to leave, so that it is known how it ended."""
        if self._placed is not None:
            await self._placed.leave(_EXIT_WAIT_S)
        return closed


def _now_s() -> float:
    return asyncio.get_running_loop().time()
