"""Replicas as child processes on this machine.

Decided here: whether one more fits. Processors are counted where replicas were promised some;
memory is what is free now, less what those that are still loading will take. A native crash ends a
child, never the gateway. Called through ``placed.Place``; what a child does is its program's part.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sluice.cluster.channel import GatewayChannel, socket_pair
from sluice.cluster.placement.engine import GRACE_S, free_port, guarded
from sluice.cluster.placement.placed import Needs, NotPlaced
from sluice.executors.openvino_memory import free_memory_bytes

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine has for replicas, all of it and in use or not."""

    cpus: float
    gpus: float
    memory_bytes: int

    @classmethod
    def this(cls) -> "Machine":
        """The machine as this process may use it."""
        memory_bytes = _PAGE_BYTES * os.sysconf("SC_PHYS_PAGES")
        gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
        return cls(len(os.sched_getaffinity(0)), gpus, memory_bytes)


class LocalPlacement:
    """Starts children while there is room for them."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._children: list[_Child] = []

    async def place(self, command: Sequence[str], needs: Needs) -> "_ReplicaChild":
        """Start ``command``, with the number of the channel's file descriptor appended.

        Raises ``NotPlaced`` where it does not fit or cannot be started.
        """
        self._check(needs)
        ours, theirs = socket_pair()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal is the gateway's to handle
            )
        except OSError as error:
            ours.close()
            raise NotPlaced(f"the process could not be started: {error}") from error
        except asyncio.CancelledError:
            ours.close()
            raise
        finally:
            theirs.close()
        channel = await GatewayChannel.over(ours)
        child = _ReplicaChild(process, needs, self._children, channel)
        self._children.append(child)
        return child

    async def place_engine(self, command: Sequence[str], needs: Needs) -> "_EngineChild":
        """Start an engine's ``command`` at a free port. Raises ``NotPlaced``, as ``place`` does."""
        self._check(needs)
        port = free_port()
        process = await asyncio.create_subprocess_exec(
            *guarded(command, port), stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        child = _EngineChild(process, needs, self._children, ("127.0.0.1", port))
        self._children.append(child)
        return child

    def _check(self, needs: Needs) -> None:
        """Raise ``NotPlaced`` where the machine has not, or has not free, what is needed."""
        machine, theirs = self._machine, [child.needs for child in self._children]
        if needs.resources:
            names = ", ".join(name for name, _ in needs.resources)
            raise NotPlaced(f"this machine has no {names}: only Ray clusters do", permanent=True)
        amounts = (
            ("processors", needs.cpus or 0.0, machine.cpus, sum(one.cpus or 0.0 for one in theirs)),
            ("GPUs", needs.gpus, machine.gpus, sum(one.gpus for one in theirs)),
        )
        for what, wanted, there, taken in amounts:
            if wanted > there - taken:
                raise NotPlaced(
                    f"it needs {wanted:g} {what}; this machine has {there:g}, of which other "
                    f"replicas have {taken:g}: lower models.NAME.needs or replicas.min",
                    permanent=wanted > there,
                )
        promised = sum(child.unclaimed_bytes() for child in self._children)
        free = free_memory_bytes() - promised
        if needs.memory_bytes > free:
            raise NotPlaced(
                f"it needs {needs.memory_bytes / _GIB:.2f} GiB of memory; "
                f"{max(0, free) / _GIB:.2f} GiB are free, beside {promised / _GIB:.2f} GiB for "
                "replicas that are loading: lower models.NAME.kv_bytes or replicas.min, or free "
                "memory",
                permanent=needs.memory_bytes > machine.memory_bytes,
            )


@dataclass(eq=False, slots=True)
class _Child:
    """A running child; it takes its place among ``others`` until it has ended."""

    process: asyncio.subprocess.Process
    needs: Needs
    others: list["_Child"] = field(repr=False)

    @property
    def pid(self) -> int | None:
        """Its process id."""
        return self.process.pid

    def unclaimed_bytes(self) -> int:
        """Memory that it will take beyond what it has now."""
        try:
            statm = Path(f"/proc/{self.process.pid}/statm").read_text()
        except OSError:
            return 0  # it is gone
        resident = int(statm.split()[1]) * _PAGE_BYTES
        return max(0, self.needs.memory_bytes - resident)

    async def leave(self, wait_s: float) -> str:
        """Wait until it has ended, killing it after ``wait_s``, and say how."""
        if self.process.returncode is None:
            try:
                await asyncio.wait_for(self.process.wait(), wait_s)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self.process.kill()
        status = await self.process.wait()
        if self in self.others:
            self.others.remove(self)
        return _exit_words(status)

    async def dismiss(self, wait_s: float) -> None:
        """See ``placed.Placed``; it ends by itself when its channel is closed."""
        await self.leave(wait_s)


@dataclass(eq=False, slots=True)
class _ReplicaChild(_Child):
    channel: GatewayChannel


@dataclass(eq=False, slots=True)
class _EngineChild(_Child):
    """An engine behind its guard, which is told to end by closing its standard input."""

    address: tuple[str, int]

    def ending(self) -> str | None:
        """How it has ended, ``None`` while it runs."""
        status = self.process.returncode
        return None if status is None else _exit_words(status)

    async def leave(self, wait_s: float) -> str:
        """Wait until it has ended, ending it after ``wait_s``, and say how."""
        if self.process.stdin is not None and self.process.returncode is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), wait_s)
            self.process.stdin.close()
        return await _Child.leave(self, GRACE_S + 2.0)


def _exit_words(status: int) -> str:
    if status >= 0:
        return f"the process exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = str(-status)
    return f"the process was ended by {name}"
