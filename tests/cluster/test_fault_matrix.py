"""Every fault of an upstream through the whole server: what the client sees, what is counted.

Each row of ``tests/executors/upstream_faults.py`` is asked for streamed and whole, twice: of a
model whose one replica always has the fault, and of one whose second replica is well. All of them
are models of one server, so that the whole matrix takes a few seconds. The table in
``docs/failure-conduct.md`` is made from what is seen here;
``python -m tests.cluster.test_fault_matrix`` prints it.
"""

import asyncio
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from sluice.executors.stream import ClientError, FirstTokenLate, UpstreamError, UpstreamOverloaded
from sluice.testing.upstream import Hold, Received, Reset, Script, ScriptedUpstream, Wait, whole
from tests.cluster.remote_rig import Seen, eventually, running
from tests.executors.stream_rig import run
from tests.executors.upstream_faults import FAULTS, GOOD_STREAM, GOOD_WHOLE, PIECES, Fault

DOCUMENT = Path(__file__).parents[2] / "docs" / "failure-conduct.md"
TEXT = "".join(PIECES)
AT_ONCE = 20
# What a busy machine surely keeps: only the engines that say nothing are to run into it.
DEADLINE_S = 1.0


@dataclass(frozen=True)
class Case:
    """One cell: a fault, the kind of answer, and whether another replica is well."""

    number: int
    fault: Fault
    streamed: bool
    rescued: bool

    @property
    def model(self) -> str:
        return f"f{self.number}{'s' if self.streamed else 'w'}{'r' if self.rescued else 'a'}"

    @property
    def script(self) -> Script:
        script = self.fault.streamed if self.streamed else self.fault.whole
        assert script is not None
        if Reset() in script:  # what was written before a reset must have left
            return [Wait(0.05) if act == Hold() else act for act in script]
        return script

    @property
    def kind(self) -> type[UpstreamError]:
        if not self.streamed and self.fault.name == "silent within its body":
            return FirstTokenLate
        return self.fault.expected

    @property
    def tokens(self) -> int:
        """Output that reached the client before the fault."""
        return self.fault.tokens if self.streamed else 0

    def __str__(self) -> str:
        kind = "streamed" if self.streamed else "whole"
        return f"{self.fault.name}-{kind}-{'another is well' if self.rescued else 'alone'}"


@dataclass(frozen=True)
class Row:
    """What one case came to. ``hits`` are requests to its replicas, in their order."""

    seen: Seen
    hits: tuple[int, int]
    counted: dict[tuple[str, ...], float]

    @property
    def conduct(self) -> str:
        """The cell of the table."""
        if self.seen.status == 200 and self.seen.error is None:
            told = "whole answer"
        elif self.seen.status == 200:
            told = "error event"
        else:
            told = str(self.seen.status)
        return f"{told}, {'+'.join(str(n) for n in self.hits if n)} sent"


CASES = [
    Case(number, fault, streamed, rescued)
    for number, fault in enumerate(FAULTS)
    for streamed in (True, False)
    if (fault.streamed if streamed else fault.whole) is not None
    for rescued in (False, True)
]


def settings(port: int) -> str:
    """A model for each case: at the paths /MODEL/0 and, where another replica is well, /MODEL/1."""
    bounds = f"""
engine = "vllm"
upstream_model = "m"
probe = "3s"
first_token_max = "{DEADLINE_S}s"
silence_max = "{DEADLINE_S}s"
whole_max = "{DEADLINE_S}s"
"""
    text = '[server]\nlisten = "127.0.0.1:0"\n'
    for case in CASES:
        urls = [f'"http://127.0.0.1:{port}/{case.model}/{n}"' for n in range(1 + case.rescued)]
        text += f"[models.{case.model}]\nurls = [{', '.join(urls)}]{bounds}"
    return text


async def matrix(folder: Path) -> dict[str, Row]:
    """Ask for all cases; the rows by name."""
    cases = {case.model: case for case in CASES}
    hits = Counter[tuple[str, str]]()

    def route(received: Received) -> Script:
        _, model, replica, path = received.path.split("/", 3)
        if not path.startswith("v1/chat"):
            return whole(b"{}")
        hits[model, replica] += 1
        if replica == "1":
            return GOOD_STREAM if cases[model].streamed else GOOD_WHOLE
        return cases[model].script

    rows, gate = {}, asyncio.Semaphore(AT_ONCE)
    async with ScriptedUpstream(route) as upstream:
        file = folder / "sluice.toml"
        file.write_text(settings(upstream.port))
        async with running(file, [upstream]) as front:
            # So many first looks at once may be late; the next ones are not.
            def all_serve() -> bool:
                return all(r.is_serving for p in front.gateway.pools() for r in p.replicas)

            await eventually(all_serve, within_s=20)

            async def ask(case: Case) -> tuple[Case, Seen]:
                async with gate:
                    return case, await front.ask(model=case.model, streamed=case.streamed)

            answers = await asyncio.gather(*(ask(case) for case in CASES))
            await front.quiet()
            counted = await front.metrics()
            by_model = dict[str, dict[tuple[str, ...], float]]()
            for key, value in counted.items():
                by_model.setdefault(key[1] if len(key) > 1 else "", {})[key] = value
            for case, seen in answers:
                sent = (hits[case.model, "0"], hits[case.model, "1"])
                rows[str(case)] = Row(seen, sent, by_model[case.model])
    return rows


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return run(lambda: matrix(tmp_path_factory.mktemp("matrix")))


def is_retried(case: Case) -> bool:
    """Whether another attempt is made: nothing was sent, and it is not the client's own fault.

    A key that is refused is this server's.

    Alone, a replica that names a time is not asked again before it, and its client is told.
    """
    if case.tokens or (issubclass(case.kind, ClientError) and case.fault.status != 401):
        return False
    return case.rescued or case.fault.name not in {"503", "429"}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_d12_what_the_client_sees(rows, case):
    seen = rows[str(case)].seen
    assert not seen.cut
    assert seen.headers["x-request-id"]
    if case.rescued and is_retried(case):
        assert (seen.status, seen.error, seen.text) == (200, None, TEXT)
        assert seen.headers["x-sluice-replica"] == f"{case.model}-1"
    elif case.tokens:
        assert (seen.status, seen.text) == (200, "a" * case.tokens)
        assert seen.error["code"] == "engine_error"
        assert "[DONE]" not in seen.events
    elif issubclass(case.kind, ClientError) and case.fault.status != 401:
        assert seen.status == case.fault.status
    else:
        assert seen.headers["content-type"] == "application/json"
        assert seen.status == expected_status(case)
        assert seen.error["message"]
        if case.fault.name in {"503", "429"}:
            assert float(seen.headers["retry-after"]) == 3
            assert 2900 <= float(seen.headers["retry-after-ms"]) <= 3750


def expected_status(case: Case) -> int:
    if issubclass(case.kind, FirstTokenLate):
        return 504
    if issubclass(case.kind, UpstreamOverloaded):
        assert case.fault.status is not None
        return case.fault.status
    return 502


@pytest.mark.parametrize("case", CASES, ids=str)
def test_d13_how_often_the_upstream_is_asked(rows, case):
    expected = (1, 1) if case.rescued else (2, 0)
    assert rows[str(case)].hits == (expected if is_retried(case) else (1, 0))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_d08_one_ending_is_counted_and_nothing_is_held(rows, case):
    row = rows[str(case)]
    endings = {
        key[2]: n for key, n in row.counted.items() if key[0] == "requests_ended_total" and n
    }
    whole_answer = row.seen.status == 200 and row.seen.error is None
    assert endings == {"stop" if whole_answer else "failed": 1}
    failed = sum(n for key, n in row.counted.items() if key[0] == "attempts_failed_total")
    assert failed == sum(row.hits) - whole_answer
    for gauge in ("requests_in_flight", "requests_running", "requests_waiting", "queue_places"):
        assert row.counted[gauge, case.model] == 0


def table(rows: dict[str, Row]) -> str:
    """The conduct table as the document has it."""
    columns = [(streamed, rescued) for streamed in (True, False) for rescued in (False, True)]
    names = [
        f"{'streamed' if streamed else 'whole'}, {'another is well' if rescued else 'alone'}"
        for streamed, rescued in columns
    ]
    lines = [f"| the engine | {' | '.join(names)} |", "|---|---|---|---|---|"]
    for number, fault in enumerate(FAULTS):
        cells = []
        for streamed, rescued in columns:
            name = str(Case(number, fault, streamed, rescued))
            cells.append(rows[name].conduct if name in rows else "–")
        lines.append(f"| {fault.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_table_of_conduct_in_the_documentation_is_what_was_seen(rows):
    assert table(rows) in DOCUMENT.read_text()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as here:
        print(table(run(lambda: matrix(Path(here)))))  # noqa: T201
