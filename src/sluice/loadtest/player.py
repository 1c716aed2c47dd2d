"""Plays one process's share of a plan on an event loop: sends when it is time, whatever comes back.

``crew.py`` runs one in each process. There is no limit on requests in flight in an open loop and
none on connections: one is kept for reuse when its answer is over, and opened when none is free.
The client's own condition is measured beside: how late it was, how long its loop was busy.
"""

import asyncio
import errno
import gc
import os
import resource
import socket
import ssl
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from time import monotonic_ns, process_time
from typing import assert_never

from sluice.loadtest.alarm import Alarm
from sluice.loadtest.connection import Call, Connection
from sluice.loadtest.trial import (
    ClosedLoop,
    Ending,
    OpenLoop,
    Progress,
    RequestOutcome,
    TrialPlan,
)
from sluice.loadtest.wire import Requests, Target
from sluice.workload.asks import Ask, own_text

NS = 1_000_000_000
# How often patience is looked at, and how often it is told how things stand.
_LOOK_S = 0.02
_TELL_LOOKS = 12
# Requests begun in one turn of the loop before answers are looked at again.
_BURST = 32
# A kept connection that was closed meanwhile shows within a round trip.
_STALE_NS_MAX = NS
_RESOURCES = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM}
)
# How long a client of a closed loop rests after a failure that did not say when to come back: one
# that asks again at once is a flood that hides what the others get.
_REST_S = 1.0
# Numbers of the asks of a closed loop that has gone through its plan, so that texts differ.
_ROUND = 1 << 40


@dataclass(frozen=True, slots=True)
class Share:
    """What one process plays: every so many-th ask of the plan, or a part of the clients."""

    plan: TrialPlan
    asks: Sequence[Ask]
    clients: int
    begin_ns: int


@dataclass(frozen=True, slots=True)
class Played:
    """What became of a share. ``looks_late_s`` are how late the loop came to a timer of its own,
    ``starved`` what the system refused the client: files or ports."""

    outcomes: Sequence[RequestOutcome]
    cpu_s: float
    wall_s: float
    looks_late_s: Sequence[float]
    sent_bytes: int
    received_bytes: int
    connections: int
    in_flight_max: int
    stopped_s: float | None = None
    starved: Mapping[str, int] = field(default_factory=dict)


class Player:
    """Plays one share. Belongs to the loop on which it is made."""

    def __init__(self, target: Target, requests: Requests, share: Share) -> None:
        self._target, self._requests, self._share = target, requests, share
        self._loop = asyncio.get_running_loop()
        self._tls = target.ssl_context()
        self._address = ""
        self._span = share.plan.span
        self._times_ns = [share.begin_ns + ask.at_ns for ask in share.asks]
        self._next = 0
        self._begun = self._taken = 0
        self._sent_bytes = 0
        self._free: list[Connection] = []
        self._open = dict[Call, Connection | None]()
        self._connections: list[Connection] = []
        self._over: list[Call] = []
        self._dials = set[asyncio.Task[None]]()
        self._starved: dict[str, int] = {}
        self._late_s: list[float] = []
        self._in_flight_max = self._done = 0
        self._stopped_s: float | None = None
        self._finished = asyncio.Event()
        self._alarm = Alarm(self._loop, self._begin_due)

    def stop(self) -> None:
        """Send nothing more and leave what runs."""
        if self._stopped_s is None:
            self._stopped_s = (monotonic_ns() - self._share.begin_ns) / NS
            self._finished.set()

    async def play(self, told: Callable[[Progress], None], stopped: Callable[[], bool]) -> Played:
        """Play to the end, or until ``stopped`` says so, which is asked all the time."""
        await self._resolve()
        used_s, began_ns = process_time(), monotonic_ns()
        with _undisturbed():
            self._begin_at(self._share.begin_ns)
            looking = self._loop.create_task(self._look(told, stopped))
            await self._finished.wait()
            looking.cancel()
            self._alarm.close()
            await self._leave()
        wall_s = (monotonic_ns() - began_ns) / NS
        return Played(
            outcomes=[call.outcome(self._share.begin_ns) for call in self._over],
            cpu_s=process_time() - used_s,
            wall_s=wall_s,
            looks_late_s=self._late_s,
            sent_bytes=self._sent_bytes,
            received_bytes=sum(each.received_bytes for each in self._connections),
            connections=len(self._connections),
            in_flight_max=self._in_flight_max,
            stopped_s=self._stopped_s,
            starved=self._starved,
        )

    async def _resolve(self) -> None:
        """Names are resolved once: a trial measures the server, not the resolver."""
        try:
            found = await self._loop.getaddrinfo(
                self._target.host, self._target.port, type=socket.SOCK_STREAM
            )
            self._address = str(found[0][4][0])
        except OSError:
            self._address = self._target.host  # each call then fails with the reason

    # Beginning requests.

    def _begin_at(self, at_ns: int) -> None:
        match self._share.plan.load:
            case OpenLoop():
                if self._times_ns:
                    self._alarm.set(self._times_ns[0])
            case ClosedLoop():
                self._alarm.set(at_ns)
            case unknown:
                assert_never(unknown)

    def _begin_due(self) -> None:
        """Begin all that are due; in a closed loop, the first request of each client."""
        if self._finished.is_set():
            return
        if isinstance(self._share.plan.load, ClosedLoop):
            for _ in range(self._clients()):
                self._begin(self._ask_in_turn(), self._share.begin_ns)
            return
        times_ns, asks = self._times_ns, self._share.asks
        for _ in range(_BURST):
            if self._next == len(times_ns):
                return
            if times_ns[self._next] > monotonic_ns():
                self._alarm.set(times_ns[self._next])
                return
            number, self._next = self._next, self._next + 1
            self._begin(asks[number], times_ns[number])
        self._loop.call_soon(self._begin_due)

    def _clients(self) -> int:
        load, asks = self._share.plan.load, len(self._share.asks)
        if isinstance(load, ClosedLoop) and load.once:
            return min(self._share.clients, asks)
        return self._share.clients if asks else 0

    def _ask_in_turn(self) -> Ask:
        turns, place = divmod(self._taken, len(self._share.asks))
        self._taken += 1
        ask = self._share.asks[place]
        if not turns:
            return ask
        number = ask.number + turns * _ROUND
        own = own_text(ask.number)
        parts = tuple(
            part._replace(text=own_text(number)) if part.text == own else part
            for part in ask.prompt
        )
        return replace(ask, number=number, prompt=parts)

    def _begin(self, ask: Ask, at_ns: int) -> None:
        begun_ns = monotonic_ns()
        raw = self._requests.raw(ask)
        call = Call(ask, at_ns, raw, begun_ns)
        self._begun += 1
        self._sent_bytes += len(raw)
        while self._free:
            connection = self._free.pop()
            if connection.usable:
                self._open[call] = connection
                connection.send(call)
                break
        else:
            self._dial(call)
        self._in_flight_max = max(self._in_flight_max, len(self._open))

    def _dial(self, call: Call) -> None:
        self._open[call] = None
        task = self._loop.create_task(self._connect(call))
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)

    async def _connect(self, call: Call) -> None:
        patience_s = (call.at_ns - monotonic_ns()) / NS + self._span.patience_s
        try:
            async with asyncio.timeout(max(0.0, patience_s)):
                _, connection = await self._loop.create_connection(
                    lambda: Connection(self._call_over, self._free.append, self._alarm.look),
                    self._address,
                    self._target.port,
                    ssl=self._tls,
                    server_hostname=self._target.host if self._tls else None,
                )
        except TimeoutError:
            self._never_sent(call, Ending.TIMEOUT, "no connection in time")
        except ssl.SSLError as error:
            self._never_sent(call, Ending.NOT_CONNECTED, f"TLS: {error.reason or error}")
        except OSError as error:
            words = error.strerror or str(error)
            if error.errno in _RESOURCES:
                self._starved[words] = self._starved.get(words, 0) + 1
                self._never_sent(call, Ending.UNSENT, words)
            else:
                self._never_sent(call, Ending.NOT_CONNECTED, words)
        else:
            self._connections.append(connection)
            if call.ending is None and call in self._open:
                self._open[call] = connection
                connection.send(call)
            else:
                connection.abort()

    # Ending them.

    def _never_sent(self, call: Call, ending: Ending, reason: str) -> None:
        call.end(monotonic_ns(), ending, reason)
        self._ended(call)

    def _call_over(self, connection: Connection, call: Call) -> None:
        if _was_stale(connection, call) and not self._finished.is_set():
            call.again()
            self._dial(call)
            return
        self._ended(call)

    def _ended(self, call: Call) -> None:
        if self._open.pop(call, call) is call:
            return  # it was left
        self._over.append(call)
        self._done += call.ending is Ending.DONE
        if isinstance(self._share.plan.load, ClosedLoop) and not self._finished.is_set():
            if call.ending is Ending.DONE:
                self._loop.call_soon(self._begin_another)
            else:
                rest_s = call.retry_after_s
                self._loop.call_later(_REST_S if rest_s is None else rest_s, self._begin_another)

    def _begin_another(self) -> None:
        """The next request of a client of a closed loop, in a later turn of the loop: a server that
        is gone would recurse for ever."""
        now_ns = monotonic_ns()
        if self._goes_on(now_ns) and not self._finished.is_set():
            self._begin(self._ask_in_turn(), now_ns)

    def _goes_on(self, now_ns: int) -> bool:
        """Whether a client of a closed loop has another request to send."""
        load = self._share.plan.load
        if isinstance(load, ClosedLoop) and load.once:
            return self._taken < len(self._share.asks)
        return now_ns - self._share.begin_ns < self._span.arriving_s * NS

    async def _look(self, told: Callable[[Progress], None], stopped: Callable[[], bool]) -> None:
        """Look at patience, at the end and at the clock, all the time."""
        due_ns = monotonic_ns()
        looks = 0
        while True:
            due_ns += round(_LOOK_S * NS)
            now_ns = monotonic_ns()
            await asyncio.sleep(max(0.0, (due_ns - now_ns) / NS))
            now_ns = monotonic_ns()
            self._late_s.append((now_ns - due_ns) / NS)
            due_ns = max(due_ns, now_ns - NS)
            self._lose_patience(now_ns)
            looks += 1
            if looks % _TELL_LOOKS == 0:
                told(self._progress(now_ns))
            if stopped():
                self.stop()
            if self._is_over(now_ns):
                self._finished.set()

    def _lose_patience(self, now_ns: int) -> None:
        limit_ns = now_ns - round(self._span.patience_s * NS)
        late = []
        for call in self._open:
            if call.at_ns > limit_ns:
                break
            late.append(call)
        for call in late:
            connection = self._open[call]
            if connection is not None:
                call.end(now_ns, Ending.TIMEOUT, f"no answer within {self._span.patience_s:g} s")
                connection.abort()

    def _is_over(self, now_ns: int) -> bool:
        """Whether nothing more is sent and all that count have ended."""
        at_s = (now_ns - self._share.begin_ns) / NS
        match self._share.plan.load:
            case ClosedLoop(once=True):
                return at_s > 0.0 and not self._open and not self._goes_on(now_ns)
            case ClosedLoop():
                sending = False
            case OpenLoop():
                sending = self._next < len(self._times_ns)
            case unknown:
                assert_never(unknown)
        # Load is kept up behind what counts as long as any of that goes on, but no longer.
        to_ns = self._share.begin_ns + round(self._span.to_s * NS)
        if at_s < self._span.to_s or (sending and self._times_ns[self._next] < to_ns):
            return False
        return not any(call.at_ns < to_ns for call in self._open)

    def _progress(self, now_ns: int) -> Progress:
        begun = due = self._begun
        if isinstance(self._share.plan.load, OpenLoop):
            due = bisect_right(self._times_ns, now_ns)
        over, at_s = len(self._over), (now_ns - self._share.begin_ns) / NS
        return Progress(at_s, due, begun, over, self._done)

    async def _leave(self) -> None:
        """Leave what has not ended, close all connections."""
        now_ns = monotonic_ns()
        for call in self._open:
            call.end(now_ns, Ending.LEFT)
            self._over.append(call)
        self._open.clear()
        for task in tuple(self._dials):
            task.cancel()
        for connection in self._connections:
            connection.abort()
        self._unsent(now_ns)
        await asyncio.sleep(0)

    def _unsent(self, now_ns: int) -> None:
        """Requests that were due and could not be begun; nobody else is to blame for them."""
        if isinstance(self._share.plan.load, ClosedLoop) or self._stopped_s is not None:
            return
        for number in range(self._next, bisect_right(self._times_ns, now_ns)):
            call = Call(self._share.asks[number], self._times_ns[number], b"", now_ns)
            call.end(now_ns, Ending.UNSENT, "the client was too late")
            self._over.append(call)


def _was_stale(connection: Connection, call: Call) -> bool:
    """Whether a kept connection had been closed before it was used once more."""
    return (
        call.ending is Ending.DISCONNECTED
        and call.head_ns is None
        and connection.exchanges > 1
        and call.end_ns is not None
        and call.sent_ns is not None
        and call.end_ns - call.sent_ns < _STALE_NS_MAX
    )


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No garbage collection while times are taken, all files that the system allows, and a core for
    the client when it wants one: behind the server for the processor, it would measure itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.freeze()
    gc.disable()
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, before - 10)
    try:
        yield
    finally:
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, before)
        gc.enable()
        gc.unfreeze()
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
