"""The live ``Runner``: processes that play their shares of a plan, and one outcome of them all.

Processes start once and serve all trials of a run. Each owns its share before it begins: nothing is
handed out while requests go. The caller's process only counts, watches and, for the server's own
figures, reads its metrics.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import connection as pipes
from multiprocessing import get_context
from multiprocessing.connection import Connection as Pipe
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Self

import uvloop

from sluice.loadtest.measures import quantile
from sluice.loadtest.player import NS, Played, Player, Share
from sluice.loadtest.signals import Page, watched
from sluice.loadtest.texts import DrawnPrompts, FilePrompts, Prompts, Vocabulary
from sluice.loadtest.trial import (
    CannotMeasure,
    ClosedLoop,
    Ending,
    OpenLoop,
    Progress,
    RequestOutcome,
    TrialOutcome,
    TrialPlan,
    Void,
    VoidCause,
    Watch,
)
from sluice.loadtest.wire import Requests, Target
from sluice.runtime.clock import wall_s

# Time for the processes to take their shares before the first request is due.
_AHEAD_S = 0.3
_ASKS_A_SECOND_AHEAD = 200_000
_WATCH_S = 0.25
_LAG_S_MAX = 1e-3
_LAG_SHARE_MAX = 0.01
PROCESSES_MAX = 64


@dataclass(frozen=True, slots=True)
class Texts:
    """What prompts are made of: words, or the texts of a file."""

    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    own: tuple[bytes, ...] = ()

    def prompts(self, salt: str) -> Prompts:
        """The prompts of one trial."""
        return FilePrompts(self.own, salt) if self.own else DrawnPrompts(self.vocabulary, salt)


@dataclass(frozen=True, slots=True)
class LagRule:
    """How late the client may be: ``lag_s_max`` at p99, where it is not set 1 ms or 1 % of what is
    measured, whichever is more: of ``limit_s``, the tightest limit from the planned time, and of
    the median time to first token where there is no limit. ``paced`` is that all limits are on the
    pace of tokens, which does not count from the planned time: a late client only moves what runs
    beside what, and 1 % of the median time of a whole answer moves little of that."""

    limit_s: float | None = None
    lag_s_max: float | None = None
    paced: bool = False

    def allowed_s(self, requests: Sequence[RequestOutcome]) -> float:
        """The most for these requests."""
        if self.lag_s_max is not None:
            return self.lag_s_max
        measured_s = self.limit_s
        if measured_s is None:
            done = [one for one in requests if one.done]
            waits_s = [one.e2e_s if self.paced else one.ttft_s or one.e2e_s for one in done]
            measured_s = quantile(waits_s, 0.5) if waits_s else 0.0
        return max(_LAG_S_MAX, _LAG_SHARE_MAX * measured_s)


class LiveRunner:
    """Plays plans against a live endpoint; see ``Runner``. Use it as a context."""

    def __init__(
        self,
        target: Target,
        texts: Texts,
        *,
        processes: int = 1,
        lag: LagRule | None = None,
        metrics: Page | None = None,
    ) -> None:
        target.ssl_context()  # raises here and not in a child
        self._target, self._texts = target, texts
        self._processes, self._lag, self._metrics = processes, lag or LagRule(), metrics
        self._members: list[tuple[SpawnProcess, Pipe]] = []

    def __enter__(self) -> Self:
        context = get_context("spawn")
        for number in range(self._processes):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=work, args=(theirs, self._target, self._texts), daemon=True
            )
            process.name = f"load {number}"
            process.start()
            theirs.close()
            self._members.append((process, ours))
        for process, pipe in self._members:
            _received(process, pipe)  # it is ready
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        for process, pipe in self._members:
            pipe.close()
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
        self._members.clear()

    def run(self, plan: TrialPlan, watch: Watch | None = None) -> TrialOutcome:
        """See ``Runner``."""
        ahead_s = _AHEAD_S + len(plan.asks) / _ASKS_A_SECOND_AHEAD
        begin_ns = time.monotonic_ns() + round(ahead_s * NS)
        with watched(self._metrics) as seen, _terminable():
            for number, (_, pipe) in enumerate(self._members):
                pipe.send(_share(plan, number, len(self._members), begin_ns))
            played, interrupted = self._follow(watch)
            took_s = (time.monotonic_ns() - begin_ns) / NS
        outcome = joined(plan, played, took_s)
        outcome = replace(outcome, server=seen.figures())
        if interrupted:
            detail = f"interrupted after {took_s:.0f} s; what had been measured by then is shown"
            return replace(outcome, void=Void(VoidCause.INTERRUPTED, detail))
        return replace(outcome, void=void_of(outcome, played, self._lag))

    def _follow(self, watch: Watch | None) -> tuple[list[Played], bool]:
        """Wait for all; stop them when ``watch`` says so or the user does."""
        waiting = {pipe: process for process, pipe in self._members}
        latest = dict[Pipe, Progress]()
        played: list[Played] = []
        interrupted = stopped = False
        while waiting:
            try:
                for ready in pipes.wait(list(waiting), timeout=_WATCH_S):
                    assert isinstance(ready, Pipe), "we gave pipes only"
                    message = _received(waiting[ready], ready)
                    if isinstance(message, Progress):
                        latest[ready] = message
                    elif isinstance(message, Played):
                        played.append(message)
                        del waiting[ready]
                if watch is not None and latest and not stopped:
                    stopped = watch(_sum(list(latest.values())))
                    if stopped:
                        self._stop()
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = stopped = True
                self._stop()
        return played, interrupted

    def _stop(self) -> None:
        for _, pipe in self._members:
            with contextlib.suppress(OSError):
                pipe.send(None)


def joined(plan: TrialPlan, played: Sequence[Played], took_s: float) -> TrialOutcome:
    """One outcome of what all processes played."""
    requests = sorted((one for each in played for one in each.outcomes), key=lambda one: one.at_s)
    stops_s = [each.stopped_s for each in played if each.stopped_s is not None]
    whole_s = max(each.wall_s for each in played)
    late_s = [late for each in played for late in each.looks_late_s]
    lags_s = [one.lag_s for one in requests if one.lag_s is not None]
    client = {
        "processes": float(len(played)),
        "cpu_share": max(each.cpu_s / each.wall_s for each in played),
        "loop_late_s_p99": quantile(late_s, 0.99) if late_s else 0.0,
        "lag_s_p99": quantile(lags_s, 0.99) if lags_s else 0.0,
        "lag_s_max": max(lags_s, default=0.0),
        "connections": float(sum(each.connections for each in played)),
        "in_flight_max": float(sum(each.in_flight_max for each in played)),
        "sent_bytes_per_s": sum(each.sent_bytes for each in played) / whole_s,
        "received_bytes_per_s": sum(each.received_bytes for each in played) / whole_s,
    }
    return TrialOutcome(
        plan,
        requests,
        took_s,
        stopped_s=min(stops_s, default=None),
        began_unix_s=wall_s() - took_s,
        client=client,
    )


@contextmanager
def _terminable() -> Iterator[None]:
    """While a trial runs, SIGTERM is what Ctrl-C is: whoever ends a run gets what it has."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def void_of(outcome: TrialOutcome, played: Sequence[Played], rule: LagRule) -> Void | None:
    """Whether a trial says nothing about the server, and why."""
    starved = {words: count for each in played for words, count in each.starved.items()}
    if starved:
        words = ", ".join(f"{count:,} requests: {what}" for what, count in starved.items())
        return Void(
            VoidCause.CLIENT_RESOURCES,
            f"the client ran out of files or ports ({words}); raise `ulimit -n`, widen "
            f"net.ipv4.ip_local_port_range, or lower the rate",
        )
    counted = outcome.counted
    unreached = {Ending.NOT_CONNECTED, Ending.REJECTED}
    if counted and all(one.ending in unreached for one in counted):
        return Void(
            VoidCause.NOTHING_ANSWERED,
            f"none of {len(counted):,} requests was taken: {counted[0].reason}",
        )
    if not isinstance(outcome.plan.load, OpenLoop):
        return None
    unsent = sum(one.ending is Ending.UNSENT for one in counted)
    lags_s = [one.lag_s for one in counted if one.lag_s is not None and one.begun_s is not None]
    allowed_s = rule.allowed_s(counted)
    late_s = quantile(lags_s, 0.99) if lags_s else 0.0
    if late_s <= allowed_s and not unsent:
        return None
    sent = sum(one.sent_s is not None for one in counted)
    span_s = outcome.counted_s or 1.0
    return Void(
        VoidCause.CLIENT_LIMITED,
        f"the client could not keep its schedule: p99 of its lag is {1e3 * late_s:.3g} ms, "
        f"allowed {1e3 * allowed_s:.3g} ms; asked for {len(counted) / span_s:.4g} requests/s, sent "
        f"{sent / span_s:.4g}. Use more --processes, another machine, or a lower rate",
    )


def _share(plan: TrialPlan, number: int, of: int, begin_ns: int) -> Share:
    clients = 0
    if isinstance(plan.load, ClosedLoop):
        clients = (plan.load.concurrency + of - 1 - number) // of
    asks = tuple(plan.asks[number::of])
    # The plan itself stays here: a process needs its own requests only.
    return Share(replace(plan, asks=()), asks, clients, begin_ns)


def _sum(parts: Sequence[Progress]) -> Progress:
    return Progress(
        max(each.at_s for each in parts),
        sum(each.due for each in parts),
        sum(each.sent for each in parts),
        sum(each.ended for each in parts),
        sum(each.done for each in parts),
    )


def _received(process: SpawnProcess, pipe: Pipe) -> object:
    try:
        message = pipe.recv()
    except (EOFError, ConnectionError):
        process.join(timeout=1)
        raise CannotMeasure(
            f"a process of the load client ended by itself, exit code {process.exitcode}; its "
            f"words are on standard error"
        ) from None
    if isinstance(message, CannotMeasure):
        raise message
    return message


# In the processes.


def work(pipe: Pipe, target: Target, texts: Texts) -> None:
    """The life of one process: play shares until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
    pipe.send("ready")
    made: tuple[str, Requests] | None = None
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            share = pipe.recv()
            if not isinstance(share, Share):
                continue  # a word to stop
            if made is None or made[0] != share.plan.salt:
                made = (share.plan.salt, Requests(target, texts.prompts(share.plan.salt)))
            pipe.send(uvloop.run(play_share(pipe, target, made[1], share)))


async def play_share(
    pipe: Pipe, target: Target, requests: Requests, share: Share
) -> Played | CannotMeasure:
    """Play one share while listening for the word to stop, which is anything."""
    try:
        player = Player(target, requests, share)
    except CannotMeasure as error:
        return error
    return await player.play(pipe.send, pipe.poll)
