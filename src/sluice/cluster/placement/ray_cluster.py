"""Replicas as actors on a Ray cluster, which the gateway speaks to directly.

Ray finds the machine, counts what is promised of it and notices when it is gone; tokens go over a
connection of their own, so that a stream costs no call to an actor. Actors are detached: a gateway
that starts again takes over those that its predecessor left, loaded as they are. Which replicas
there are to be, and what becomes of a lost one, is the fleet's decision.
"""

import asyncio
import contextlib
import functools
import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import ray.exceptions
import ray.util

import sluice
from sluice.cluster.channel import ChannelClosed, GatewayChannel
from sluice.cluster.placement.greeting import greet
from sluice.cluster.placement.host import EngineHost, HostFacts, ReplicaHost
from sluice.cluster.placement.placed import Needs, NotPlaced

_log = logging.getLogger(__name__)

NAMESPACE = "sluice"
# An actor is asked at the same time who it is and, by two gateways at most, when it ends.
_CALLS_AT_A_TIME = 8
# How long an actor that closed its connection may take to say why. One on a machine that is there
# does within milliseconds; whatever is longer is added to the time without it.
_EXIT_S_MAX = 0.3
# An actor on a machine that is there has ended within milliseconds.
_KILLED_S_MAX = 1.0
# How long a machine gets nothing that has lost a replica without a word. Ray takes up to half a
# minute to believe that a machine is gone, and would place replicas on it until then.
_SUSPECT_S = 60.0
# A gateway that was killed is noticed by its replicas within a step.
_FREED_S_MAX = 3.0
_LOOK_S = 0.2
_ANSWER_S_MAX = 3.0


@dataclass(frozen=True, slots=True)
class RayTerms:
    """How a cluster is used.

    ``deployment`` keeps the replicas of several gateways apart. A place is waited for
    ``place_s_max``; without a gateway a replica stays for ``keep_s``.
    """

    address: str
    deployment: str
    place_s_max: float
    keep_s: float


@dataclass(frozen=True, slots=True)
class Program:
    """What an actor runs: a module with ``life_of``, and what that is given."""

    module: str
    boot: str


@dataclass(frozen=True, slots=True)
class RayMachine:
    """One machine of a cluster and all that it promises."""

    address: str
    cpus: float
    gpus: float
    memory_bytes: int


class ClusterActor(ReplicaHost):
    """The host of a replica, in a process that Ray has started."""

    def __init__(self, program: str, boot: str, keep_s: float) -> None:
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        super().__init__(program, boot, host, keep_s)
        self.node = ray.get_runtime_context().get_node_id()


class EngineActor(EngineHost):
    """The host of an engine, in a process that Ray has started."""

    def __init__(self, command: Sequence[str]) -> None:
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        super().__init__(command, host)
        self.node = ray.get_runtime_context().get_node_id()


class RayPlacement:
    """Starts replicas on a cluster. ``clock`` gives the nanoseconds that requests carry."""

    def __init__(self, terms: RayTerms, clock: Callable[[], int]) -> None:
        self._terms, self._clock = terms, clock
        self._joining = asyncio.Lock()
        self._joined = False
        self._known: set[str] = set()  # replicas that this gateway has had
        self._suspects: dict[str, float] = {}  # machines, with when they fell silent

    async def place(self, replica_id: str, program: Program, needs: Needs) -> "RayReplica":
        """Take over an actor that is there, or start one. Raises ``NotPlaced``."""
        await self.join()
        name = f"{self._terms.deployment}/{replica_id}/"
        found = await self._left_over(name, program)
        self._known.add(replica_id)
        if found is None:
            return await self._create(name, program, needs)
        actor, facts = found
        _log.info("replica %s is taken over as it runs", replica_id)
        return await self._met(actor, facts)

    async def machines(self) -> list[RayMachine]:
        """The machines of the cluster with what they have. Raises ``NotPlaced`` without one."""
        await self.join()
        there = await asyncio.to_thread(ray.nodes)
        return [
            RayMachine(
                node["NodeManagerAddress"],
                node["Resources"].get("CPU", 0.0),
                node["Resources"].get("GPU", 0.0),
                int(node["Resources"].get("memory", 0.0)),
            )
            for node in there
            if node["Alive"]
        ]

    async def join(self) -> None:
        """Become part of the cluster. Raises ``NotPlaced`` where there is none."""
        async with self._joining:
            if self._joined:
                return
            join = functools.partial(
                ray.init,
                address=self._terms.address,
                namespace=NAMESPACE,
                ignore_reinit_error=True,
                log_to_driver=False,
                configure_logging=False,
            )
            try:
                await asyncio.wait_for(_alone(join), self._terms.place_s_max)
            except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
                why = str(error) or "no answer"
                raise NotPlaced(
                    f"there is no Ray cluster at {self._terms.address!r} ({why}); start one with "
                    "`ray start --head`, or set placement.ray_address",
                    permanent=True,
                ) from error
            self._joined = True

    async def _left_over(self, name: str, program: Program) -> tuple[Any, HostFacts] | None:
        """An actor of this replica that a gateway before this one has left; others are ended."""
        found = None
        for actor in await asyncio.to_thread(_actors, name):
            # One that this gateway had is not asked: its machine may be gone, and never answers.
            facts = None if self._had(name) else await _facts_if_alive(actor)
            if facts is not None and facts.is_taken:
                facts = await self._freed(actor, name)
            fits = facts is not None and facts.boot == program.boot
            if facts is not None and fits and found is None:
                found = (actor, facts)
            else:
                await asyncio.to_thread(ray.kill, actor)
        return found

    def _had(self, name: str) -> bool:
        return name.split("/")[-2] in self._known

    async def _freed(self, actor: Any, name: str) -> HostFacts | None:
        """Wait for an actor whose gateway may be dead; raises ``NotPlaced`` where it is not."""
        for _ in range(round(_FREED_S_MAX / _LOOK_S)):
            await asyncio.sleep(_LOOK_S)
            facts = await _facts_if_alive(actor)
            if facts is None or not facts.is_taken:
                return facts
        deployment = self._terms.deployment
        raise NotPlaced(
            f"another gateway serves with {name.rstrip('/')}: only one can be {deployment!r} on a "
            "cluster, set placement.name of this one",
            permanent=True,
        )

    async def _create(self, name: str, program: Program, needs: Needs) -> "RayReplica":
        options = await self._options(needs) | {
            "name": name + uuid.uuid4().hex[:8],
            "namespace": NAMESPACE,
            "lifetime": "detached",
        }
        make = ray.remote(ClusterActor).options(**options).remote
        made = functools.partial(make, program.module, program.boot, self._terms.keep_s)
        actor: Any = await asyncio.to_thread(made)
        with _killed_unless_used(actor) as used:
            facts = await self._started(actor, needs)
            if facts.version != sluice.__version__:
                raise NotPlaced(
                    f"sluice is {facts.version} at {facts.address[0]} and {sluice.__version__} "
                    "here: install the same on all machines",
                    permanent=True,
                )
            placed = await self._met(actor, facts)
            used()
        return placed

    async def place_engine(self, command: Sequence[str], needs: Needs) -> "RayEngine":
        """Start an engine's ``command`` at a free port of a machine. Raises ``NotPlaced``.

        It ends with this gateway.
        """
        await self.join()
        make = ray.remote(EngineActor).options(**await self._options(needs)).remote
        actor: Any = await asyncio.to_thread(functools.partial(make, list(command)))
        with _killed_unless_used(actor) as used:
            address, node = await self._started(actor, needs)
            used()
        return RayEngine(address, _Actor(actor, node, self._suspects))

    async def _options(self, needs: Needs) -> dict[str, Any]:
        """How Ray is to place an actor."""
        options: dict[str, Any] = {
            "max_concurrency": _CALLS_AT_A_TIME,
            "max_restarts": 0,
            "scheduling_strategy": "SPREAD",  # a machine that is lost takes few with it
            "num_cpus": 1.0 if needs.cpus is None else needs.cpus,
            "num_gpus": needs.gpus,
            "resources": dict(needs.resources),
        }
        if needs.memory_bytes:
            options["memory"] = needs.memory_bytes
        suspects = await asyncio.to_thread(self._avoided, asyncio.get_running_loop().time())
        if suspects:
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(suspects)})"}
        return options

    async def _started(self, actor: Any, needs: Needs) -> Any:
        """Wait until an actor runs, and return its facts. Raises ``NotPlaced``."""
        try:
            return await _facts(actor, self._terms.place_s_max)
        except TimeoutError:
            raise NotPlaced(await asyncio.to_thread(self._no_room, needs)) from None
        except ray.exceptions.RayError as error:
            raise NotPlaced(f"its actor could not be started: {_words(error)}") from error

    def _avoided(self, now_s: float) -> list[str]:
        """The machines that are to get nothing, unless that would leave none."""
        since_s = now_s - _SUSPECT_S
        suspects = [node for node, silent_s in self._suspects.items() if silent_s > since_s]
        there = ray.nodes() if suspects else []  # type: ignore[no-untyped-call]
        others = [one for one in there if one["Alive"] and one["NodeID"] not in suspects]
        return suspects if any(one["Resources"].get("CPU") for one in others) else []

    def _no_room(self, needs: Needs) -> str:
        """Why nothing was placed, in numbers."""
        free = ray.available_resources()  # type: ignore[no-untyped-call]
        there = ray.nodes()  # type: ignore[no-untyped-call]
        nodes = [node["Resources"] for node in there if node["Alive"]]
        most = max((node.get("CPU", 0.0) for node in nodes), default=0.0)
        return (
            f"the Ray cluster made no room within {self._terms.place_s_max:g} s "
            f"(placement.wait_max): it needs {needs}; of {len(nodes)} machines the largest has "
            f"{most:g} processors, and {free.get('CPU', 0.0):g} processors and "
            f"{free.get('GPU', 0.0):g} GPUs are free in all: add machines, or lower "
            "models.NAME.needs or replicas"
        )

    async def _met(self, actor: Any, facts: HostFacts) -> "RayReplica":
        try:
            channel = await greet(facts.address, facts.secret, self._clock)
        except ChannelClosed as closed:
            ending = _ending(actor)
            await asyncio.wait([ending], timeout=_EXIT_S_MAX)
            how = await _ended(actor, ending)
            raise NotPlaced(f"{closed}; {how}") from closed
        return RayReplica(channel, _Actor(actor, facts.node, self._suspects))


class _Actor:
    """An actor that runs, to its end.

    ``suspects`` gets its machine where it is gone without a word of its end.
    """

    def __init__(self, actor: Any, node: str, suspects: dict[str, float]) -> None:
        self._actor, self._node, self._suspects = actor, node, suspects
        self.ending = _ending(actor)
        self._how: str | None = None

    async def leave(self, wait_s: float) -> str:
        """Wait until it has ended, ending it after ``wait_s``, and say how."""
        if self._how is None:
            await asyncio.wait([self.ending], timeout=min(wait_s, _EXIT_S_MAX))
            if not self.ending.done():
                # What Ray says after a kill is of the kill: the machine may be gone all the same.
                self._suspects[self._node] = asyncio.get_running_loop().time()
                ray.kill(self._actor)
                self.ending.cancel()
                self._how = "nothing is heard of it or of its machine, and it was killed"
                return self._how
            self._how = await _ended(self._actor, self.ending)
        return self._how

    async def dismiss(self, wait_s: float) -> None:  # noqa: ARG002
        """End it at once: it would wait for another gateway."""
        if self._how is None:
            self._how = await _ended(self._actor, self.ending)


class RayReplica:
    """One incarnation of a replica: an actor that runs and the connection to it."""

    pid = None

    def __init__(self, channel: GatewayChannel, actor: _Actor) -> None:
        self.channel = channel
        self.leave, self.dismiss = actor.leave, actor.dismiss


class RayEngine:
    """An engine that an actor runs."""

    def __init__(self, address: tuple[str, int], actor: _Actor) -> None:
        self.address = address
        self._actor = actor
        self.leave, self.dismiss = actor.leave, actor.dismiss

    def ending(self) -> str | None:
        """How it has ended, ``None`` while it runs."""
        ending = self._actor.ending
        if not ending.done() or ending.cancelled():
            return None
        error = ending.exception()
        return ending.result() if error is None else _words(error)


@contextlib.contextmanager
def _killed_unless_used(actor: Any) -> Iterator[Callable[[], object]]:
    """End an actor that comes to nothing, whatever the reason, being cancelled included."""
    with contextlib.ExitStack() as stack:
        stack.callback(ray.kill, actor)
        yield stack.pop_all


def _ending(actor: Any) -> "asyncio.Future[str]":
    """What the actor says when it ends; ``RayError`` where it is ended or dies."""
    return asyncio.wrap_future(actor.ending.remote().future())


async def _ended(actor: Any, ending: "asyncio.Future[str]") -> str:
    """Let nothing remain of an actor, and say how it ended, as far as that can be known soon.

    Of one whose machine is gone Ray learns late, and whoever waits for it must not: then ``ending``
    is cancelled.
    """
    ray.kill(actor)
    await asyncio.wait([ending], timeout=_KILLED_S_MAX)
    if not ending.done():
        ending.cancel()
        return "nothing is heard of its machine"
    error = ending.exception()
    return f"its actor ended: {ending.result()}" if error is None else f"it died: {_words(error)}"


async def _facts(actor: Any, wait_s: float) -> Any:
    """What an actor says of itself. Raises ``TimeoutError``, or ``RayError`` where it is dead."""
    told = asyncio.wrap_future(actor.facts.remote().future())
    return await asyncio.wait_for(told, wait_s)


async def _facts_if_alive(actor: Any) -> HostFacts | None:
    """What an actor says of itself, ``None`` where it says nothing in time or is dead."""
    try:
        facts = await _facts(actor, _ANSWER_S_MAX)
    except (TimeoutError, ray.exceptions.RayError):
        return None
    assert isinstance(facts, HostFacts)
    return facts


def _alone(work: Callable[[], object]) -> "asyncio.Future[None]":
    """Do it in a thread that nobody waits for at the end: Ray may wait for a cluster for ever."""
    loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def run() -> None:
        error: Exception | None = None
        try:
            work()
        except (ConnectionError, RuntimeError, ValueError) as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, error)

    def tell(error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    threading.Thread(target=run, name="joining Ray", daemon=True).start()
    return done


def _words(error: BaseException) -> str:
    """What Ray says, on one line: the reason stands at the end."""
    return " ".join(str(error).split())[-300:]


def _actors(name: str) -> list[Any]:
    """The actors whose names begin like this."""
    there = ray.util.list_named_actors(all_namespaces=True)
    found = []
    for one in there:
        if one["namespace"] == NAMESPACE and one["name"].startswith(name):
            try:
                found.append(ray.get_actor(one["name"], namespace=NAMESPACE))
            except ValueError:
                continue  # it ended in between
    return found
