"""Web sites on this machine that answer as a test tells them."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.catalog.sites import Site


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A client that leaves early is part of the tests."""


@pytest.fixture
def make_site() -> Iterator[Callable[[], Site]]:
    """Start a site; all are stopped at the end of the test."""
    running: list[tuple[Site, _Server, threading.Thread]] = []

    def start() -> Site:
        class Scripted(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                made.requests.append((self.path, dict(self.headers)))
                answer = made.answers.get(self.path)
                if answer is None:
                    self.send_error(404)
                else:
                    answer(self)

            def log_message(self, *_args: object) -> None:
                pass

        server = _Server(("127.0.0.1", 0), Scripted)
        made = Site(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        running.append((made, server, thread))
        return made

    yield start
    for made, server, thread in running:
        made.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def site(make_site: Callable[[], Site]) -> Site:
    return make_site()
