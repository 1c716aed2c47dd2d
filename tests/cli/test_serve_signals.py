"""Signals that end a server, which drains first, and the one that reads settings again."""

import asyncio
import os
import signal
import sys
from contextlib import suppress

import pytest

from sluice.cli import signals
from sluice.cli.signals import listen_to_signals
from sluice.core.errors import ConfigError
from sluice.wiring.serving import Stop


@pytest.fixture(autouse=True)
def dispositions():
    """What the signals did before is what they do afterwards."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


async def no_reload() -> None:
    raise AssertionError("nothing asked for it")


async def stopped_by(number: signal.Signals, reload=no_reload) -> Stop:
    stop = Stop()
    listen_to_signals(stop, reload)
    os.kill(os.getpid(), number)
    async with asyncio.timeout(5):
        await stop.soon.wait()
    return stop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_of_any_kind_lets_requests_finish(number):
    stop = asyncio.run(stopped_by(number))
    assert not stop.now.is_set()


def test_a_server_whose_output_nobody_reads_any_more_stops_all_the_same(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with suppress(BrokenPipeError), os.fdopen(writer, "w") as broken:
        monkeypatch.setattr(sys, "stderr", broken)
        stop = asyncio.run(stopped_by(signal.SIGTERM))
    assert stop.soon.is_set()


def test_a_hang_up_that_is_ignored_stays_so_as_under_nohup():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    asyncio.run(stopped_by(signal.SIGTERM))
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_terminal_that_is_closed_stops_the_server(monkeypatch):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    seen = iter([True, False])
    monkeypatch.setattr(signals, "has_terminal", lambda: next(seen))
    assert not asyncio.run(stopped_by(signal.SIGHUP)).now.is_set()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_hang_up_reads_the_settings_again_as_often_as_it_comes(monkeypatch, terminal):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    monkeypatch.setattr(signals, "has_terminal", lambda: terminal)

    async def twice() -> bool:
        stop, again = Stop(), asyncio.Event()

        async def reload() -> None:
            again.set()
            raise ConfigError(("the server goes on with what it had",))

        listen_to_signals(stop, reload)
        for _ in range(2):
            again.clear()
            os.kill(os.getpid(), signal.SIGHUP)
            async with asyncio.timeout(5):
                await again.wait()
        return stop.soon.is_set()

    assert not asyncio.run(twice())
