"""Signals that end a server: each drains first."""

import asyncio
import os
import signal

import pytest

from sluice.cli.serve import _stop_on_signals
from sluice.wiring.serving import Stop


@pytest.fixture(autouse=True)
def dispositions():
    """What the signals did before is what they do afterwards."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


async def stopped_by(number: signal.Signals) -> Stop:
    stop = Stop()
    _stop_on_signals(stop)
    os.kill(os.getpid(), number)
    async with asyncio.timeout(5):
        await stop.soon.wait()
    return stop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_of_any_kind_lets_requests_finish(number):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    stop = asyncio.run(stopped_by(number))
    assert not stop.now.is_set()


def test_a_hang_up_that_is_ignored_stays_so_as_under_nohup():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    asyncio.run(stopped_by(signal.SIGTERM))
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
