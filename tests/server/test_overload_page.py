"""What ``docs/overload.md`` says that a client sees, situation by situation."""

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sluice.config.explain import toml_value
from sluice.config.schema import keys_of
from sluice.config.sections import ModelSection, ServerSection, SloSection
from sluice.core.limits import TenantLimits
from sluice.telemetry.metric_table import METRICS
from sluice.testing.served import Served, served
from tests.cluster.overload_rig import OverloadRig, S
from tests.server.wire_client import Answer, connected, post, raw_post, read_until

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "overload.md").read_text(encoding="utf-8")
COMPLETIONS = "/v1/completions"
STEP_S = 0.02
KEY = {"authorization": "Bearer acme-key"}
SECTION = ServerSection(
    listen="127.0.0.1:0",
    tenant_key_digests=((hashlib.sha256(b"acme-key").hexdigest(), "acme"),),
)

Start = Callable[..., tuple[Served, OverloadRig]]


def row(situation: str) -> str:
    """The line of the page's table that is about a situation."""
    (found,) = [line for line in PAGE.splitlines() if line.startswith(f"| {situation} |")]
    return found


@pytest.fixture
def start() -> Iterator[Start]:
    """Serves a rig of one slot that has learned how long requests take."""
    with ExitStack() as stack:

        def make(
            section: ServerSection | None = None, **settings: Any
        ) -> tuple[Served, OverloadRig]:
            settings = {"slots": 1, "step_s": lambda: STEP_S, **settings}
            rig = OverloadRig(time.monotonic_ns, **settings)
            server = stack.enter_context(served(rig.gateway, section))
            stack.callback(lambda: server.call(rig.gateway.close))
            server.call(rig.gateway.start)
            return server, rig

        yield make


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": [1, 2, 3, 4], "max_tokens": 10, **fields}


def complete(server: Served, headers: Mapping[str, str] = {}, **fields: Any) -> Answer:
    return post(server, COMPLETIONS, body(**fields), headers)


class Busy:
    """A request that holds the slot while the context is open."""

    def __init__(self, server: Served, tokens: int = 200, key: str | None = None) -> None:
        self._stack = ExitStack()
        self._raw = raw_post(COMPLETIONS, **body(prompt=[7] * 9, max_tokens=tokens, stream=True))
        if key is not None:
            self._raw = self._raw.replace(
                b"\r\n", f"\r\nauthorization: Bearer {key}\r\n".encode(), 1
            )
        self._server = server

    def __enter__(self) -> None:
        opened = self._stack.enter_context(connected(self._server))
        opened.sendall(self._raw)
        assert read_until(opened, b"<").startswith(b"HTTP/1.1 200")

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def check_refusal(answer: Answer, situation: str, code: str) -> None:
    """Status, code and advice are those of the page."""
    told = row(situation)
    assert f"| {answer.status} |" in told, (answer.status, answer.body)
    assert answer.error["code"] == code
    assert f"`{code}`" in told
    assert answer.headers["x-sluice-reason"].split(";")[0] == code
    if "x-should-retry: false" in told:
        assert answer.headers["x-should-retry"] == "false"
        assert "retry-after" not in answer.headers
    elif answer.status != 400:
        assert int(answer.headers["retry-after"]) >= 1
        assert float(answer.headers["retry-after-ms"]) >= 1
    if answer.status == 429 and code != "deadline_expired":
        assert answer.error["measured"] > answer.error["threshold"]


def test_at_once(start: Start):
    server, _ = start()
    answer = complete(server)
    assert answer.status == 200
    for header in re.findall(r"`(x-sluice-\w+)`", row("starts at once")):
        assert header in answer.headers
    assert "x-sluice-degraded" not in answer.headers


def test_waiting_is_a_plain_answer(start: Start):
    server, rig = start()
    with Busy(server, tokens=20):
        answer = complete(server)
    assert answer.status == 200
    assert rig.value("wait_actual_seconds_count", "tiny") == 1
    assert "| 200 |" in row("waits, then starts")


def test_shortened(start: Start):
    slo = {"c": SloSection(overload=("shorten", "queue"), shorten_tokens=5)}
    server, _ = start(slo=slo, slo_default="c")
    with Busy(server, tokens=20):
        answer = complete(server, max_tokens=50)
    assert answer.status == 200
    assert answer.headers["x-sluice-degraded"] == "shorten"
    assert answer.json()["usage"]["sluice"] == {"degraded": ["shorten"], "output_tokens_max": 5}
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert answer.json()["usage"]["completion_tokens"] == 5
    with Busy(server, tokens=20):
        answer = complete(server, {"x-sluice-degrade": "never"}, max_tokens=8)
    assert answer.json()["usage"]["completion_tokens"] == 8


def test_smaller_model(start: Start):
    slo = {"c": SloSection(overload=("smaller", "queue"))}
    server, _ = start(slo=slo, slo_default="c", pool={"smaller": "small"})
    with Busy(server):
        answer = complete(server)
    assert answer.status == 200
    assert answer.headers["x-sluice-degraded"] == "smaller"
    assert answer.headers["x-sluice-model"] == answer.json()["model"] == "small"
    assert answer.json()["usage"]["sluice"]["model_asked"] == "tiny"


@pytest.mark.parametrize(
    ("code", "pool"),
    [
        ("queue_full", {"queue_places_max": 0}),
        ("queue_tokens", {"queue_tokens_max": 12}),
        ("queue_bytes", {"queue_bytes_max": 150}),
    ],
)
def test_no_room_to_wait(start: Start, code, pool):
    server, rig = start(pool=pool)
    with Busy(server), connected(server) as first:
        if pool.get("queue_places_max") != 0:  # the first may wait whatever its size
            first.sendall(raw_post(COMPLETIONS, **body(prompt=[9] * 9)))
            server.eventually(lambda: rig.value("requests_waiting", "tiny") == 1)
        check_refusal(complete(server), "no room to wait", code)


@pytest.mark.parametrize("ladder", [("refuse",), ("shorten", "refuse"), ("smaller",)])
def test_its_class_does_not_wait(start: Start, ladder):
    slo = {"now": SloSection(overload=ladder, shorten_tokens=5)}
    server, rig = start(slo=slo, slo_default="now")
    with Busy(server):
        answer = complete(server, max_tokens=20)
    check_refusal(answer, "its class does not wait, and nothing is free", "no_free_place")
    server.eventually(lambda: rig.value("requests_in_flight", "tiny") == 0)
    assert complete(server).status == 200


def test_the_less_strict_gives_way_where_another_one_would_be_late(start: Start):
    """The place that it waits for goes to a newcomer, behind which it would be late."""
    slo = {"strict": SloSection(tier=0, ttft_s=4.0), "loose": SloSection(tier=5, ttft_s=4.0)}
    server, rig = start(slo=slo, pool={"queue_places_max": 1})
    complete(server, max_tokens=60)
    with ThreadPoolExecutor(1) as threads, Busy(server, tokens=80):
        waiting = threads.submit(complete, server, {"x-sluice-slo": "loose"})
        server.eventually(lambda: rig.value("requests_waiting", "tiny") == 1)
        stricter = complete(server, {"x-sluice-slo": "strict"})
        refused = waiting.result(20)
    assert stricter.status == 200
    check_refusal(refused, "beside it another one would be late", "gives_way")


def test_would_miss_its_target(start: Start):
    server, _ = start(slo={"quick": SloSection(ttft_s=0.3)})
    complete(server, max_tokens=60)
    with Busy(server):
        answer = complete(server, {"x-sluice-slo": "quick"})
    check_refusal(answer, "would miss its target", "predicted_late")
    assert answer.error["threshold"] == pytest.approx(0.3)


def test_would_miss_its_deadline(start: Start):
    server, rig = start()
    complete(server, max_tokens=60)
    with Busy(server):
        answer = complete(server, {"x-sluice-deadline-ms": "400"})
        check_refusal(answer, "would miss its deadline", "deadline_infeasible")
    server.eventually(lambda: rig.value("requests_in_flight", "tiny") == 0)
    hopeless = complete(server, {"x-sluice-deadline-ms": "20"}, max_tokens=20)
    assert (hopeless.status, hopeless.error["code"]) == (429, "deadline_infeasible")
    assert hopeless.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("budget_ms", ["0", "-250"])
def test_deadline_passed_before_it_arrived(start: Start, budget_ms):
    server, _ = start()
    answer = complete(server, {"x-sluice-deadline-ms": budget_ms})
    check_refusal(answer, "deadline passed before it arrived", "deadline_past")


@pytest.mark.parametrize("stream", [False, True])
def test_waited_too_long(start: Start, stream):
    server, _ = start(pool={"queue_wait_ns_max": S // 4})
    with Busy(server):
        answer = complete(server, stream=stream)
    check_refusal(answer, "waited, and is too late now", "queue_deadline")


@pytest.mark.parametrize(
    ("code", "limits"),
    [
        ("requests_per_minute", {"requests_per_minute": 1}),
        ("tokens_per_minute", {"tokens_per_minute": 250}),
        ("concurrency", {"concurrency": 1}),
    ],
)
def test_over_a_limit_of_its_tenant(start: Start, code, limits):
    server, _ = start(SECTION, tenants=(TenantLimits("acme", **limits),))
    with Busy(server, key="acme-key"):
        answer = complete(server, KEY, max_tokens=100)
    check_refusal(answer, "over a limit of its tenant", code)
    told = [name for name in answer.headers if name.startswith("x-ratelimit-")]
    assert len(told) == (0 if code == "concurrency" else 3)


@pytest.mark.parametrize("stream", [False, True])
def test_deadline_passes_while_it_runs(start: Start, stream):
    """Nothing was learned yet, so that it is not refused at the door."""
    server, rig = start()
    slow = iter([STEP_S] * 8)
    rig._step_s = lambda: next(slow, 0.6)
    raw = raw_post(COMPLETIONS, **body(max_tokens=100, stream=stream))
    raw = raw.replace(b"\r\n", b"\r\nx-sluice-deadline-ms: 400\r\n", 1)
    with connected(server) as opened:
        opened.sendall(raw)
        seen = read_until(opened, b"deadline_expired")
    told = row("deadline passes while it runs")
    assert b"deadline_expired" in seen
    assert "`deadline_expired`" in told
    status = seen.split(b" ", 2)[1].decode()
    assert status == "200" if stream else f"| {status} |" in told


def test_no_replica_is_ready(start: Start):
    server, rig = start()

    async def crash() -> None:
        rig.process._load_s = 5.0
        rig.process.crash()

    server.call(crash)
    check_refusal(complete(server), "no replica is ready", "not_ready")


def test_shutting_down(start: Start):
    server, rig = start()
    with Busy(server):
        server.loop.call_soon_threadsafe(
            lambda: setattr(rig, "draining", server.loop.create_task(rig.gateway.drain(5.0)))
        )
        server.eventually(lambda: not rig.gateway.readiness().ready)
        answer = complete(server)
    check_refusal(answer, "the server is shutting down", "draining")


@pytest.mark.parametrize(
    ("code", "fields"),
    [("context_length_exceeded", {"max_tokens": 600}), ("too_many_choices", {"n": 3})],
)
def test_can_never_be_served(start: Start, code, fields):
    server, _ = start(slots=2)
    check_refusal(complete(server, **fields), "can never be served", code)


def test_every_situation_of_the_page_is_tested():
    table = PAGE.partition("| situation |")[2].partition("\n\n")[0]
    situations = re.findall(r"^\| ([^|]+) \| \d+ \|", table, re.MULTILINE)
    tested = Path(__file__).read_text(encoding="utf-8")
    elsewhere = {
        "the model could not be loaded", "shortened", "smaller model",
        "no replica is ready, and one is being started",
    }  # fmt: skip
    assert len(situations) > 10
    assert [one for one in situations if f'"{one}"' not in tested and one not in elsewhere] == []


def test_settings_and_metrics_of_the_page_are_those_that_exist():
    table = PAGE.partition("| setting | default |")[2].partition("\n\n")[0]
    told = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, re.MULTILINE))
    keys = keys_of(ModelSection)
    assert len(told) > 5
    for name, default in told.items():
        assert toml_value(keys[name].default, keys[name].shape).strip('"') == default, name
    metrics = {metric.name for metric in METRICS}
    assert set(re.findall(r"`(sluice_\w+)`", PAGE)) <= metrics
