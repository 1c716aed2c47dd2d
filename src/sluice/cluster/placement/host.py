"""A replica that outlives its gateway: it waits for one, serves it, and waits for the next.

``ReplicaHost`` is what runs inside an actor on another machine. It loads its model when the first
gateway comes and keeps it, so that a gateway that was restarted finds it loaded. Left alone for
long it ends. It serves one gateway at a time: a second one is not answered. What a replica does is
its program's part, which is named and not imported: an engine is loaded by who needs it.
``EngineHost`` runs an engine of somebody else's, which does not outlive its gateway.
"""

import importlib
import logging
import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import sluice
from sluice.cluster.channel import ChannelClosed, ReplicaChannel
from sluice.cluster.placement.engine import free_port, guarded
from sluice.cluster.placement.greeting import SECRET_BYTES, welcome
from sluice.runtime.clock import monotonic_ns

_log = logging.getLogger(__name__)

# For which the process stays when it is over, so that who waits for its ending hears of it.
_LAST_WORDS_S = 2.0


class Life(Protocol):
    """A replica; see ``wiring.replica_life.ReplicaLife``."""

    def live(self, channel: ReplicaChannel, clock: Callable[[], int]) -> None:
        """Serve one gateway until it says that this was all; ``ChannelClosed`` if it is lost."""
        ...

    def close(self) -> None:
        """Release the model."""
        ...


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What a gateway must know to use a replica: where it is, what it is, and whether it is free.

    ``boot`` is what it was started with. ``secret`` is for ``greeting.greet``. ``node`` is what its
    cluster calls its machine.
    """

    address: tuple[str, int]
    secret: bytes
    boot: str
    is_taken: bool
    version: str
    node: str


class ReplicaHost:
    """Serves one replica on this machine, and ends the process when that is over.

    ``program`` has ``life_of``, which takes ``boot``.
    """

    def __init__(
        self,
        program: str,
        boot: str,
        host: str,
        keep_s: float,
        end_process: Callable[[], None] | None = None,
    ) -> None:
        self._program, self._boot, self._keep_s = program, boot, keep_s
        self._end_process = end_process or _end_process
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._listener = socket.create_server((host, 0))
        self._address = self._listener.getsockname()[:2]
        self._is_taken = False
        self._ending = ""
        self.node = host
        self._over = threading.Event()
        # A daemon: a process that is told to end does not wait for a step.
        threading.Thread(target=self._run, name="replica", daemon=True).start()

    def facts(self) -> HostFacts:
        """How to reach it."""
        return HostFacts(
            self._address,
            self._secret,
            self._boot,
            self._is_taken,
            sluice.__version__,
            self.node,
        )

    def ending(self) -> str:
        """Wait until it has ended by itself, and say why."""
        self._over.wait()
        return self._ending

    def _run(self) -> None:
        self._ending = "it failed"
        try:
            life: Life = importlib.import_module(self._program).life_of(self._boot)
            try:
                self._ending = self._serve(life)
            finally:
                life.close()
        except ImportError as error:
            self._ending = f"its program cannot be loaded: {error}"
        finally:
            self._listener.close()
            self._over.set()
            self._end_process()

    def _serve(self, life: Life) -> str:
        """Serve gateways until there are no more; says how that came."""
        while True:
            self._listener.settimeout(self._keep_s)
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                return f"no gateway came for {self._keep_s:g} s"
            with connection:
                clock = welcome(connection, self._secret, monotonic_ns)
                if clock is None:
                    continue
                self._is_taken = True
                try:
                    life.live(ReplicaChannel(connection), clock)
                except ChannelClosed as closed:
                    _log.info("the gateway is gone: %s", closed)
                else:
                    return "it was told to end, or could not load its model"
                finally:
                    self._is_taken = False


def _end_process() -> None:
    """End this process: nobody else may be left who could, and what it holds is wanted."""
    time.sleep(_LAST_WORDS_S)
    os._exit(0)


class EngineHost:
    """Runs an engine's command at a free port of this machine, ended with this process."""

    def __init__(self, command: Sequence[str], host: str) -> None:
        port = free_port()
        self._address = (host, port)
        # In a session of its own: Ray kills the group of an actor that ends, and a guard that is
        # killed ends nothing in order.
        self._guard = subprocess.Popen(
            guarded(command, port), stdin=subprocess.PIPE, start_new_session=True
        )
        self.node = host

    def facts(self) -> tuple[tuple[str, int], str]:
        """Where it will listen, and what its cluster calls its machine."""
        return self._address, self.node

    def ending(self) -> str:
        """Wait until the command has ended, and say how."""
        return f"its command exited with status {self._guard.wait()}"
