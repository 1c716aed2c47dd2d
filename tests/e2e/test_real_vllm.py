"""In front of a real vLLM, which ``SLUICE_TEST_VLLM`` names by its address, ``http://HOST:PORT``.

Not part of the default run: it takes a vLLM (a CPU build will do) that serves a small chat model.
"""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.processes import ServerProcess, eventually

pytestmark = pytest.mark.vllm

MESSAGES: Any = [{"role": "user", "content": "Count to twenty."}]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder: Path = tmp_path_factory.mktemp("gateway")
    file = folder / "sluice.toml"
    url = os.environ["SLUICE_TEST_VLLM"]
    file.write_text(f'[models.real]\nengine = "vllm"\nurls = ["{url}"]\nin_flight_max = 4\n')
    running = ServerProcess(folder, ["-c", str(file)])
    try:
        yield running.wait_ready()
    finally:
        running.destroy()


@pytest.fixture
def client(gateway: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(client: openai.OpenAI, **more: Any) -> Any:
    asked: Any = {"model": "real", "messages": MESSAGES, "max_tokens": 12, "temperature": 0, **more}
    return client.chat.completions.create(**asked)


def test_streamed_and_whole_answers_agree_with_usage(client):
    whole = ask(client)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == 12


def test_usage_is_hidden_from_a_stream_that_did_not_ask(client):
    chunks = list(ask(client, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_extensions_and_other_routes_reach_the_engine(client, gateway):
    chosen = ask(client, extra_body={"structured_outputs": {"choice": ["left", "right"]}})
    assert chosen.choices[0].message.content in {"left", "right"}
    several = client.completions.create(model="real", prompt=["One", "Two"], n=2, max_tokens=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    tokens: Any = client.post(
        f"{gateway.url}/tokenize", body={"model": "real", "prompt": "hi there"}, cast_to=object
    )
    assert tokens["count"] == len(tokens["tokens"])
    assert client.responses.create(model="real", input="Say hi.", max_output_tokens=4).output


def test_the_context_comes_from_the_engine_and_too_long_is_told_in_its_words(client):
    context = client.models.retrieve("real").model_dump()["max_model_len"]
    with pytest.raises(openai.BadRequestError, match="context length"):
        ask(client, messages=[{"role": "user", "content": "word " * 2 * context}])


def test_more_clients_than_places_are_all_served_in_turn(client):
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: ask(client), range(12)))
    assert [one.usage.completion_tokens for one in answers] == [12] * 12


def test_a_client_that_leaves_frees_its_place(client, gateway):
    stream = ask(client, stream=True, max_tokens=1000, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    began_s = time.monotonic()
    eventually(lambda: gateway.metric("requests_in_flight", "model=real") == 0)
    assert time.monotonic() - began_s < 1
