"""``sluice serve sim:…``: made-up answers at the speed of hardware that is not here."""

import asyncio
import itertools
import re
import shlex
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from sluice.config.sections import ModelSection
from sluice.core.costmodel import Load
from sluice.wiring.simulated import simulated_model
from tests.e2e.clients import CHAT, ask, open_stream, post
from tests.e2e.processes import ServerProcess, eventually

SOURCE = "sim:llama-3.1-8b@h100"
DOCS = Path(__file__).resolve().parents[2] / "docs"
RSS_BYTES_MAX = 64 * 2**20


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Three replicas of one model, and a model with a single place."""
    folder = tmp_path_factory.mktemp("simulated")
    settings = folder / "sluice.toml"
    settings.write_text(
        f'[models.fast]\nsource = "{SOURCE}"\nreplicas = {{ min = 3 }}\n'
        '[models.one]\nsource = "sim:llama-3.1-70b@h100x4"\nsequences_max = 1\n'
    )
    running = ServerProcess(folder, ["-c", str(settings)])
    try:
        yield running.wait_ready()
        assert running.stop() == 0, running.output
    finally:
        running.destroy()


@pytest.fixture
def client(fleet: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=fleet.url + "/v1", api_key="none", max_retries=0) as connected:
        yield connected


def chat(content: str, **options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **options}


def test_a_stream_comes_at_the_pace_of_the_hardware(client):
    times_s: list[float] = []
    usage: Any = None
    stream = client.chat.completions.create(
        model="fast", **chat("Hello", max_tokens=60), stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    for chunk in stream:
        usage = chunk.usage or usage
        if chunk.choices and chunk.choices[0].delta.content:
            times_s.append(time.monotonic())
    assert usage.completion_tokens == 60 == len(times_s)
    predicted_s = simulated_model(ModelSection(SOURCE)).times.predict_ns(Load(1, 1, 40)) / 1e9
    gaps_s = [after - before for before, after in itertools.pairwise(times_s)]
    assert statistics.median(gaps_s) == pytest.approx(predicted_s, rel=0.25)


def test_equal_requests_get_equal_answers_of_their_own_length(client):
    def answer(content, **options):
        return client.chat.completions.create(model="fast", **chat(content, **options))

    first, again = (answer("Tell me more", seed=12, temperature=0.7) for _ in range(2))
    assert first.choices[0].message.content == again.choices[0].message.content
    assert first.choices[0].finish_reason == "stop"
    assert first.usage.completion_tokens == again.usage.completion_tokens
    several = answer("Tell me more", n=3, max_tokens=8)
    assert len(several.choices) == 3
    assert several.usage.completion_tokens == 24


def test_stop_strings_and_the_prefix_cache_work_as_with_a_computed_model(client):
    text = client.completions.create(
        model="one", prompt="Once " * 200, max_tokens=12, temperature=0
    )
    stop = text.choices[0].text.split()[5]
    cut = client.completions.create(
        model="one", prompt="Once " * 200, max_tokens=12, temperature=0, stop=stop
    )
    assert cut.choices[0].text == text.choices[0].text[: text.choices[0].text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.prompt_tokens_details.cached_tokens > 100


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("logprobs", True),
        ("logit_bias", {"5": 1}),
        ("response_format", {"type": "json_object"}),
    ],
)
def test_what_needs_probabilities_is_refused_by_name(client, param, value):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="fast", **chat("Hello", **{param: value}))
    assert refused.value.param == param
    assert "simulated" in refused.value.message


def test_a_prompt_beyond_the_context_is_refused(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="fast", prompt="word " * 140_000, max_tokens=5)
    assert refused.value.code == "context_length_exceeded"


def test_requests_spread_over_the_replicas_which_are_small_processes(fleet):
    async def all_at_once():
        async with openai.AsyncOpenAI(base_url=fleet.url + "/v1", api_key="none") as client:
            asked = (
                client.chat.completions.with_raw_response.create(
                    model="fast", **chat(f"Number {n}", max_tokens=30)
                )
                for n in range(30)
            )
            return await asyncio.gather(*asked)

    began = time.monotonic()
    answers = asyncio.run(all_at_once())
    assert {answer.headers["x-sluice-replica"] for answer in answers} == {
        "fast-0", "fast-1", "fast-2"
    }  # fmt: skip
    assert time.monotonic() - began < 6.0  # in one batch each: 30 in turn would take longer
    pids = fleet.replica_pids()
    assert len(pids) >= 4
    for pid in pids:
        if "simulated_replica" in " ".join(psutil.Process(pid).cmdline()):
            assert psutil.Process(pid).memory_info().rss < RSS_BYTES_MAX


def test_a_second_request_waits_for_the_only_place(fleet):
    stream = open_stream(fleet.target, "one", "Once upon a time", max_tokens=60)
    second = post(fleet.target, CHAT, {"model": "one", **chat("Hello", max_tokens=2)})
    assert second.status == 200
    assert len(stream.rest()) > 1
    waited_s = fleet.metric("phase_seconds_total", "model=one,phase=queue")
    assert waited_s > 0.2


def test_a_request_whose_client_leaves_is_gone_at_once(fleet):
    stream = open_stream(fleet.target, "one", "Once upon a time", max_tokens=100_000)
    stream.leave()
    began = time.monotonic()
    eventually(lambda: fleet.metric("requests_running", "model=one") == 0, 5.0)
    assert time.monotonic() - began < 2.0  # of 20 minutes that it would have run


@pytest.mark.model
def test_a_simulated_model_serves_beside_a_computed_one(smollm2_folder, tmp_path):
    settings = tmp_path / "sluice.toml"
    settings.write_text(
        f'[models.large]\nsource = "{SOURCE}"\n[models.tiny]\nsource = "{smollm2_folder}"\n'
    )
    server = ServerProcess(tmp_path, ["-c", str(settings)])
    try:
        server.wait_ready()
        for name in ("large", "tiny"):
            answer = post(server.target, CHAT, {"model": name, **chat("Hello", max_tokens=4)})
            assert answer.json()["usage"]["completion_tokens"] == 4
        names = {entry["id"] for entry in ask(server.target, "GET", "/v1/models").json()["data"]}
        assert names == {"large", "tiny"}
        assert server.stop() == 0, server.output
    finally:
        server.destroy()


def test_the_command_of_the_page_starts_in_seconds(tmp_path):
    page = (DOCS / "simulated.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"```sh\n(.*?)\n```", page, re.DOTALL)
    program, subcommand, *arguments = shlex.split(command)
    assert (program, subcommand) == ("sluice", "serve")
    began = time.monotonic()
    server = ServerProcess(tmp_path, arguments)
    try:
        server.wait_ready()
        assert time.monotonic() - began < 10.0  # 1.5 s where nothing else runs
        assert server.stop() == 0, server.output
    finally:
        server.destroy()


def test_an_unknown_name_stops_the_start_with_the_nearest(tmp_path):
    server = ServerProcess(tmp_path, ["sim:llama-3.1-70b@h10x4"])
    assert server.process.wait(30) != 0
    assert "did you mean" in server.output
    assert "Traceback" not in server.output
