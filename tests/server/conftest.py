"""Fixtures: the app on a real loopback socket, in a thread with a loop of its own."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from sluice.testing.served import Served, served

Serve = Callable[..., Served]


@contextmanager
def starting() -> Iterator[Serve]:
    with ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(served(*arguments))


@pytest.fixture
def serve_app() -> Iterator[Serve]:
    """Start servers that stop with the test. Takes what ``served`` takes."""
    with starting() as start:
        yield start


@pytest.fixture(scope="module")
def serve_module() -> Iterator[Serve]:
    """Start servers that stop with the module's last test."""
    with starting() as start:
        yield start
