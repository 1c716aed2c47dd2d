"""Two embedded models under load: the smaller one takes over, answers are cut, refusals tell."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from sluice.core.admission import REASONS
from sluice.telemetry.journal import JournalReader
from sluice.telemetry.life import find_life
from tests.e2e.clients import open_stream
from tests.e2e.processes import ServerProcess, eventually

pytestmark = pytest.mark.model

QUESTION: Any = [{"role": "user", "content": "Name three rivers."}]
SETTINGS = """
[models.large]
source = "{folder}"
context_tokens_max = 1024
sequences_max = 1
queue_requests_max = 4
kv_bytes = "64MiB"
threads = 1
smaller = "small"
slo = "brisk"

[models.small]
source = "{folder}"
context_tokens_max = 512
sequences_max = 4
kv_bytes = "64MiB"
threads = 1

[slo.brisk]
overload = ["smaller", "refuse"]

[slo.short]
overload = ["shorten", "queue"]
shorten_tokens = 8

[slo.both]
overload = ["shorten", "smaller"]
shorten_tokens = 8
"""


@pytest.fixture(scope="module")
def two(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with ``large``, of one slot, and ``small``, to which it may hand over."""
    folder = tmp_path_factory.mktemp("two")
    settings = folder / "sluice.toml"
    settings.write_text(SETTINGS.format(folder=smollm2_folder))
    running = ServerProcess(folder, ["-c", str(settings)])
    try:
        yield running.wait_ready()
        assert running.stop() == 0, running.output
    finally:
        running.destroy()


@contextmanager
def busy(server: ServerProcess) -> Iterator[None]:
    """The one slot of ``large`` is taken."""
    held = open_stream(
        server.target, "large", "A tale:", max_tokens=900, ignore_eos=True, service_tier="short"
    )
    assert held.event()
    try:
        yield
    finally:
        held.leave()
        eventually(lambda: server.metric("requests_in_flight", "model=large") == 0)


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def ask(server: ServerProcess, slo: str = "", **fields: Any) -> tuple[Any, Any]:
    """Headers and body of a chat with ``large``."""
    headers = {"x-sluice-slo": slo} if slo else {}
    headers |= fields.pop("headers", {})
    asked = {"model": "large", "messages": QUESTION, "max_tokens": 40, **fields}
    with client_of(server) as client:
        raw = client.chat.completions.with_raw_response.create(**asked, extra_headers=headers)
        return raw.headers, raw.parse()


def test_the_smaller_model_answers_while_its_model_is_busy(two: ServerProcess):
    before = two.metric("degradations_total", "model=large,rung=smaller")
    with busy(two):
        headers, answer = ask(two)
    assert headers["x-sluice-model"] == answer.model == "small"
    assert headers["x-sluice-replica"] == "small-0"
    assert headers["x-sluice-degraded"] == "smaller"
    assert answer.choices[0].message.content
    assert answer.service_tier == "brisk"
    assert answer.usage.sluice == {"degraded": ["smaller"], "model_asked": "large"}
    assert two.metric("degradations_total", "model=large,rung=smaller") == before + 1
    headers, answer = ask(two)
    assert (headers["x-sluice-model"], "x-sluice-degraded" in headers) == ("large", False)


def test_a_stream_names_the_model_that_answers(two: ServerProcess):
    with busy(two), client_of(two) as client:
        options = {"include_usage": True}
        with client.chat.completions.with_streaming_response.create(
            model="large", messages=QUESTION, max_tokens=20, stream=True, stream_options=options
        ) as raw:  # type: ignore[call-overload]
            assert raw.headers["x-sluice-model"] == "small"
            chunks = [json.loads(line[6:]) for line in raw.iter_lines() if line[6:7] == "{"]
    assert {chunk["model"] for chunk in chunks} == {"small"}
    assert chunks[-1]["usage"]["sluice"]["model_asked"] == "large"


def test_a_client_that_forbids_degrading_is_refused_with_numbers_and_a_time(two: ServerProcess):
    with busy(two), pytest.raises(openai.RateLimitError) as caught:
        ask(two, headers={"x-sluice-degrade": "never"})
    headers, body = caught.value.response.headers, caught.value.body
    assert isinstance(body, dict)
    assert caught.value.code in REASONS
    assert int(headers["retry-after"]) >= 1
    assert int(headers["retry-after-ms"]) >= 1
    assert headers["x-should-retry"] in {"true", "false"}
    reason = headers["x-sluice-reason"]
    assert reason.startswith(f"{caught.value.code}; measured=")
    assert isinstance(body["measured"], int | float)
    assert isinstance(body["threshold"], int | float)
    assert "x-sluice-degraded" not in headers


def test_a_shortened_answer_waits_its_turn_and_ends_at_its_limit(two: ServerProcess):
    with ThreadPoolExecutor(1) as waiting:
        with busy(two):
            asked = waiting.submit(ask, two, "short", max_tokens=200)
            eventually(lambda: two.metric("requests_waiting", "model=large") == 1)
        headers, answer = asked.result(60)
    assert headers["x-sluice-degraded"] == "shorten"
    assert headers["x-sluice-model"] == "large"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    assert answer.usage.sluice == {"degraded": ["shorten"], "output_tokens_max": 8}


def test_an_answer_that_is_short_anyhow_is_not_degraded(two: ServerProcess):
    with ThreadPoolExecutor(1) as waiting:
        with busy(two):
            asked = waiting.submit(ask, two, "short", max_tokens=5)
            eventually(lambda: two.metric("requests_waiting", "model=large") == 1)
        headers, answer = asked.result(60)
    assert "x-sluice-degraded" not in headers
    assert answer.usage.completion_tokens <= 5


def test_both_rungs_are_taken_where_the_ladder_has_both(two: ServerProcess):
    with busy(two):
        headers, answer = ask(two, "both", max_tokens=200)
    assert headers["x-sluice-model"] == "small"
    assert headers["x-sluice-degraded"].split(", ")[-1] == "smaller"
    assert answer.usage.sluice["model_asked"] == "large"


def test_degrading_can_be_seen_in_the_trace(two: ServerProcess):
    with busy(two):
        headers, _ = ask(two)
    name = headers["x-request-id"]
    eventually(lambda: find_life(JournalReader(two.journal), name) is not None)
    life = find_life(JournalReader(two.journal), name)
    assert life is not None
    assert life.slo_class == "brisk"
    (rung,) = [decision for decision in life.decisions if decision.rung]
    assert (rung.rung, rung.model) == ("smaller", "small")
