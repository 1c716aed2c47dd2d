"""A journal of live traffic, fed to a fresh policy, gives the recorded plans and endings."""

import pytest

from sluice.runtime.recording import Entry
from sluice.runtime.replay import Replayed, replay
from sluice.telemetry.journal import JournalReader
from sluice.telemetry.records import PolicyRecord, RequestEnded
from tests.e2e.clients import at_once, complete, open_stream
from tests.e2e.processes import ServerProcess, eventually

pytestmark = pytest.mark.model

SHARED = "The lighthouse keeper wrote in his book every evening what the sea had brought. " * 4


def records(server: ServerProcess) -> list[object]:
    return [entry.record for entry in JournalReader(server.journal).entries()]


def replayed(server: ServerProcess, replica: str) -> Replayed:
    return replay(
        Entry(one.t_ns, one.role, one.name, one.payload)
        for one in records(server)
        if isinstance(one, PolicyRecord) and one.owner == replica
    )


def test_recorded_traffic_replays_to_the_same_plans(server: ServerProcess):
    """Shared prefixes, choices, a wait for places, and clients that leave in the middle."""
    before = replayed(server, "exact-0")

    def stay(number: int) -> None:
        answer = complete(server.target, "exact", f"{SHARED}{number}", max_tokens=12)
        assert answer.status == 200

    def choose(number: int) -> None:
        options = {"n": 3, "temperature": 1, "max_tokens": 9}
        assert complete(server.target, "exact", f"{SHARED}{number}", **options).status == 200

    def leave(number: int) -> None:
        stream = open_stream(server.target, "exact", f"Leave {number}", max_tokens=300)
        for _ in range(number):
            stream.event()
        stream.leave(hard=bool(number % 2))

    acts = [stay, choose, leave] * 4
    at_once([lambda act=act, n=n: act(n) for n, act in enumerate(acts)])  # type: ignore[misc]
    labels = "model=exact"
    eventually(lambda: server.metric("requests_in_flight", labels) == 0)
    assert server.metric("prefix_hit_tokens_total", labels) > 0

    def is_written() -> bool:
        ended = [one for one in records(server) if isinstance(one, RequestEnded)]
        found = replayed(server, "exact-0")
        return len(ended) >= len(acts) and found.steps > before.steps

    eventually(is_written, 10, every_s=0.5)

    def is_equal() -> bool:
        found = replayed(server, "exact-0")
        # The last records may still be on their way to the disk.
        return found.difference is None and found.events > before.events + 30

    eventually(is_equal, 10, every_s=0.5)


def test_a_journal_holds_no_token_and_no_text(server: ServerProcess):
    secret = "xylophone quagmire"
    complete(server.target, "exact", f"{secret} " * 8, max_tokens=3)
    eventually(lambda: server.metric("requests_in_flight", "model=exact") == 0)
    raw = b"".join(
        path.read_bytes() for path in sorted(server.journal.rglob("*")) if path.is_file()
    )
    assert raw
    assert secret.encode() not in raw
    assert not any(secret in repr(record) for record in records(server))
