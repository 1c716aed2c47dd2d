"""Connections are accepted together, in bounded numbers, and none after the end."""

import asyncio
import errno
import socket
from contextlib import ExitStack

import pytest

from sluice.server import plain_listener
from sluice.server.plain_listener import PlainListener
from sluice.server.serve import new_event_loop


class Made(asyncio.Protocol):
    def __init__(self, made: "asyncio.Queue[asyncio.Transport]") -> None:
        self.made = made

    def connection_made(self, transport):
        self.made.put_nowait(transport)


class Scarce:
    """A listening socket whose process has no file descriptor left at first."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener, self.failed = listener, False

    def fileno(self) -> int:
        return self.listener.fileno()

    def accept(self):
        if not self.failed:
            self.failed = True
            raise OSError(errno.EMFILE, "too many open files")
        return self.listener.accept()


def run(clients: int, *, turns: int | None = None, scarce: bool = False, stop_first: bool = False):
    """How many of the clients that wait are connected, after some turns of the loop or at last."""

    async def accept(listener: socket.socket) -> int:
        made: asyncio.Queue[asyncio.Transport] = asyncio.Queue()
        accepting = PlainListener(lambda: Made(made))
        accepting.start(Scarce(listener) if scarce else listener)  # type: ignore[arg-type]
        if stop_first:
            await accepting.stop()
        if turns is None:
            async with asyncio.timeout(5):
                opened = [await made.get() for _ in range(clients)]
        else:
            for _ in range(turns):
                await asyncio.sleep(0)
            opened = [made.get_nowait() for _ in range(made.qsize())]
        await accepting.stop()
        for transport in opened:
            transport.abort()
        await asyncio.sleep(0)
        return len(opened)

    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=200))
        listener.settimeout(0)
        for _ in range(clients):
            stack.enter_context(socket.create_connection(listener.getsockname()))
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(accept(listener))


def test_all_that_wait_are_connected_in_a_few_turns_of_the_loop():
    assert run(40, turns=10) == 40


def test_a_flood_is_taken_in_bounded_parts(monkeypatch):
    monkeypatch.setattr(plain_listener, "_TOGETHER_MAX", 3)
    assert run(40) == 40


def test_without_a_free_descriptor_it_looks_again_later(monkeypatch):
    monkeypatch.setattr(plain_listener, "_AGAIN_S", 0.01)
    assert run(2, scarce=True) == 2


@pytest.mark.parametrize("scarce", [False, True])
def test_nothing_is_accepted_after_the_end(scarce, monkeypatch):
    monkeypatch.setattr(plain_listener, "_AGAIN_S", 0.0)
    assert run(2, turns=20, scarce=scarce, stop_first=True) == 0
