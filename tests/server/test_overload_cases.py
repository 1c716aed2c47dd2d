"""Cases D-06, D-07, D-08 and D-11 over sockets: the server, the gateway and a scripted replica."""

import hashlib
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import pytest

from sluice.config.sections import ServerSection
from sluice.core.limits import TenantLimits
from sluice.server.limits import Limits
from sluice.testing.served import Served, served
from tests.cluster.overload_rig import OverloadRig
from tests.server.wire_client import Answer, connected, post, raw_post, read_until

COMPLETIONS = "/v1/completions"
STEP_S = 0.02

Start = Callable[..., tuple[Served, OverloadRig]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Serves a rig; takes what the rig takes, and the server's section and limits."""
    with ExitStack() as stack:

        def make(
            section: ServerSection | None = None, limits: Limits | None = None, **settings: Any
        ) -> tuple[Served, OverloadRig]:
            settings = {"step_s": lambda: STEP_S, **settings}
            rig = OverloadRig(time.monotonic_ns, **settings)
            server = stack.enter_context(served(rig.gateway, section, limits))
            stack.callback(lambda: server.call(rig.gateway.close))
            server.call(rig.gateway.start)
            return server, rig

        yield make


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": [1, 2, 3, 4], "max_tokens": 20, **fields}


def complete(server: Served, headers: Mapping[str, str] = {}, **fields: Any) -> Answer:
    return post(server, COMPLETIONS, body(**fields), headers)


def opened_stream(server: Served, **fields: Any) -> socket.socket:
    """A connection on which a completion was asked for."""
    opened = socket.create_connection((server.host, server.port), timeout=20)
    opened.sendall(raw_post(COMPLETIONS, **{"messages": None, **body(**fields)}))
    return opened


def at_once(server: Served, count: int, **fields: Any) -> list[tuple[Answer, float]]:
    """Ask so many times at the same instant; the answers and how long each took."""

    def one(_: int) -> tuple[Answer, float]:
        start_s = time.monotonic()
        return complete(server, **fields), time.monotonic() - start_s

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


# ------------------------------------------------------------------------------------------ D-06


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hard", [False, True], ids=["end", "reset"])
def test_d06_clients_that_leave_the_queue_cost_nothing(start: Start, stream, hard):
    server, rig = start(slots=1)
    with connected(server) as a, connected(server) as e:
        a.sendall(raw_post(COMPLETIONS, **{"messages": None, **body(stream=True, max_tokens=60)}))
        assert read_until(a, b"<").startswith(b"HTTP/1.1 200")
        ghosts = [opened_stream(server, prompt=[n] * 100, stream=stream) for n in (5, 6, 7)]
        e.sendall(
            raw_post(COMPLETIONS, **{"messages": None, **body(prompt=[9] * 5, stream=stream)})
        )
        server.eventually(lambda: rig.value("requests_waiting", "tiny") == 4)
        for ghost in ghosts:
            if hard:
                ghost.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            ghost.close()
        server.eventually(lambda: rig.value("requests_waiting", "tiny") == 1, 1.0)
        assert rig.value("requests_ended_total", "tiny", "cancelled") == 3
        read_until(a, b"[DONE]")
        ended_s = time.monotonic()
        server.eventually(lambda: rig.value("requests_running", "tiny") == 1, 0.3 + 0.25)
        assert time.monotonic() - ended_s < 0.3 + 0.25
        assert read_until(e, b"\r\n").startswith(b"HTTP/1.1 200")
        server.eventually(lambda: rig.value("requests_in_flight", "tiny") == 0)
    assert rig.value("prompt_tokens_total", "tiny") == 4 + 5


# ------------------------------------------------------------------------------------------ D-07


def test_d07_three_of_ten_are_served_and_the_others_told_at_once(start: Start):
    server, rig = start(slots=1, pool={"queue_places_max": 2})
    assert complete(server).status == 200
    answers = at_once(server, 10, max_tokens=40)
    assert sorted(answer.status for answer, _ in answers) == [200] * 3 + [429] * 7
    for answer, took_s in answers:
        if answer.status == 429:
            assert took_s < 0.2 + 0.25
            assert int(answer.headers["retry-after"]) >= 1
            assert int(answer.headers["retry-after-ms"]) >= 1
            assert answer.headers["x-should-retry"] == "true"
            assert answer.headers["x-sluice-reason"].startswith("queue_full; measured=4")
            assert (answer.error["code"], answer.error["threshold"]) == ("queue_full", 3)
    assert complete(server).status == 200
    assert rig.value("refusals_total", "tiny", "queue_full") == 7


def test_d07_each_choice_takes_a_place(start: Start):
    """Three choices do not fit into two free places, though one of four slots is idle too."""
    server, rig = start(slots=4, pool={"queue_places_max": 2})
    assert complete(server).status == 200
    with closing(opened_stream(server, n=4, max_tokens=200, stream=True)) as running:
        read_until(running, b"<")
        refused = complete(server, n=3)
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        assert (refused.error["measured"], refused.error["threshold"]) == (7, 6)
        with closing(opened_stream(server, n=2, stream=True)):
            server.eventually(lambda: rig.value("requests_waiting", "tiny") == 2)


# ------------------------------------------------------------------------------------------ D-08

KEY = {"authorization": "Bearer acme-key"}
SECTION = ServerSection(
    listen="127.0.0.1:0",
    tenant_key_digests=((hashlib.sha256(b"acme-key").hexdigest(), "acme"),),
)
HEAD = (
    f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    "authorization: Bearer acme-key\r\n"
)


def raw_keyed(**fields: Any) -> bytes:
    raw = raw_post(COMPLETIONS, **{"messages": None, **body(**fields)})
    return HEAD.encode() + raw[raw.index(b"content-length") :]


class Cycles:
    """Requests of one key that end in every way but well."""

    def __init__(self, server: Served, rig: OverloadRig) -> None:
        self.server, self.rig = server, rig

    def idle(self) -> None:
        """Wait until nothing of the key is in flight, as the server sees it."""
        self.server.eventually(lambda: self.rig.value("requests_in_flight", "tiny") == 0, 2.0)

    def leave(self) -> None:
        with connected(self.server) as opened:
            opened.sendall(raw_keyed(stream=True, max_tokens=200))
            assert read_until(opened, b"<").startswith(b"HTTP/1.1 200")

    def hang(self) -> None:
        """The replica falls silent with the call on board and is killed for it."""
        process = self.rig.process
        with connected(self.server) as opened:
            opened.sendall(raw_keyed(max_tokens=200))
            self.server.eventually(lambda: self.rig.value("requests_in_flight", "tiny") == 1)

            async def killed() -> None:
                process.crash("silent", silent=True)

            self.server.call(killed)
            assert b" 502 " in read_until(opened, b"\r\n").split(b"\r\n")[0]
        self.server.eventually(lambda: self.rig.gateway.readiness().ready)

    def fail(self) -> None:
        """The engine cannot compute the call."""
        self.rig.failing.add("all")
        assert complete(self.server, KEY).status in {500, 502}
        self.rig.failing.clear()

    def mistake(self) -> None:
        assert complete(self.server, KEY, model="unknown").status == 404

    def stall(self) -> None:
        """The client stops reading and is given up."""
        self.rig.process.loudness = 2_000_000
        with connected(self.server) as opened:
            opened.sendall(raw_keyed(stream=True, max_tokens=200))
            read_until(opened, b"xxx")
            self.idle()
        self.rig.process.loudness = 0


def test_d08_no_permit_leaks_in_any_way_to_end(start: Start):
    tenants = (TenantLimits("acme", concurrency=2),)
    server, rig = start(SECTION, Limits(send_s_max=0.1), tenants=tenants)
    cycles = Cycles(server, rig)
    for cycle, times in (
        (cycles.leave, 50),
        (cycles.hang, 20),
        (cycles.fail, 20),
        (cycles.mistake, 20),
        (cycles.stall, 20),
    ):
        for _ in range(times):
            cycle()
            cycles.idle()
    assert rig.value("refusals_total", "tiny", "concurrency") == 0
    with ThreadPoolExecutor(2) as pool:
        last = list(pool.map(lambda _: complete(server, KEY), range(2)))
    assert [answer.status for answer in last] == [200, 200]


def test_d08_the_third_is_refused_and_uses_up_no_quota(start: Start):
    tenants = (TenantLimits("acme", concurrency=2, requests_per_minute=30),)
    server, _ = start(SECTION, tenants=tenants)
    with connected(server) as one, connected(server) as two:
        for opened in (one, two):
            opened.sendall(raw_keyed(stream=True, max_tokens=200))
            read_until(opened, b"<")
        refused = [complete(server, KEY) for _ in range(5)]
        for answer in refused:
            assert (answer.status, answer.error["code"]) == (429, "concurrency")
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.headers["x-ratelimit-limit-requests"] == "30"
            assert answer.headers["x-ratelimit-remaining-requests"] == "28"


# ------------------------------------------------------------------------------------------ D-11


@pytest.mark.parametrize("priority", [-1, 10, 1.5, "high", True, [1]])
def test_d11_a_priority_that_is_none_is_refused(start: Start, priority):
    server, _ = start()
    refused = complete(server, priority=priority)
    assert (refused.status, refused.error["param"]) == (400, "priority")


def test_d11_an_urgent_request_goes_next(start: Start):
    server, rig = start(slots=1)
    ends: list[str] = []

    def one(name: str, priority: int, tokens: int = 6) -> None:
        assert complete(server, priority=priority, max_tokens=tokens).status == 200
        ends.append(name)

    def arrived(count: int) -> bool:
        return rig.value("requests_total", "tiny") == count

    with ThreadPoolExecutor(7) as pool:
        pool.submit(one, "runs", 5, 100)
        server.eventually(partial(arrived, 1))
        for number in range(5):
            pool.submit(one, f"low{number}", 5)
            server.eventually(partial(arrived, number + 2))
        pool.submit(one, "high", 0)
    assert ends == ["runs", "high", *(f"low{number}" for number in range(5))]
