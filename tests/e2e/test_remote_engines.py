"""``sluice serve`` before a real llama.cpp server and a scripted vLLM, by OpenAI's client."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from sluice.testing.upstream import ScriptedUpstream
from tests.cluster.relay_rig import LoopThread, engine
from tests.e2e.processes import ServerProcess, eventually

pytestmark = pytest.mark.model

MESSAGES: Any = [{"role": "user", "content": "Count to a hundred."}]
SETTINGS = """
[models.llama]
engine = "llama-server"
urls = ["{llama}"]
probe = "50ms"
smaller = "scripted"
slo = "quick"

[models.scripted]
engine = "vllm"
urls = ["http://127.0.0.1:{scripted}"]
probe = "50ms"

[models.later]
engine = "vllm"
urls = ["http://127.0.0.1:{nobody}"]
probe = "50ms"

[slo.quick]
overload = ["smaller", "queue"]
"""


@pytest.fixture(scope="module")
def llama(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real llama.cpp server with one slot."""
    program = Path(__file__).parent.parent / "executors" / "llama_server.py"
    with (tmp_path_factory.mktemp("llama") / "log").open("wb") as errors:
        child = subprocess.Popen(
            [sys.executable, str(program), str(smollm2_gguf)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
    assert child.stdout is not None
    yield child.stdout.readline().strip()
    child.kill()
    child.communicate(timeout=10)


@pytest.fixture(scope="module")
def gateway(llama: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One gateway over a real engine, a scripted one, and one that is not there."""
    thread, scripted, nobody = LoopThread(), ScriptedUpstream(engine()), ScriptedUpstream(engine())
    thread.call(scripted.start)
    thread.call(nobody.start)
    thread.call(nobody.stop)
    folder = tmp_path_factory.mktemp("gateway")
    file = folder / "sluice.toml"
    file.write_text(SETTINGS.format(llama=llama, scripted=scripted.port, nobody=nobody.port))
    running = ServerProcess(folder, ["-c", str(file)])
    try:
        yield running.wait_ready()
        assert running.stop() == 0, running.output
    finally:
        running.destroy()
        thread.call(scripted.stop)
        thread.stop()


@pytest.fixture
def client(gateway: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_no_process_is_started_and_nothing_is_converted(gateway):
    assert gateway.replica_pids() == []
    assert "llama: remote, 1 engine, context 2,048 tokens, at most 1 request at" in gateway.output


def test_streamed_and_whole_answers_of_a_real_engine_agree(client):
    asked: Any = {"model": "llama", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12


def test_responses_completions_and_tokens_of_a_real_engine(client, gateway):
    response = client.responses.create(model="llama", input="Say hi.", max_output_tokens=4)
    assert response.output_text
    completed = client.completions.create(model="llama", prompt="One two three", max_tokens=4)
    assert completed.usage.completion_tokens == 4
    tokens = client.post(
        f"{gateway.url}/tokenize", body={"model": "llama", "content": "hi there"}, cast_to=object
    )
    assert len(tokens["tokens"]) >= 2


def test_the_engines_own_words_come_back_for_a_wrong_request(client):
    with pytest.raises(openai.BadRequestError, match="messages"):
        client.chat.completions.create(model="llama", messages=5)


def test_a_client_that_leaves_frees_the_engines_only_slot(client, gateway):
    """The next request can only be answered once the engine has stopped the one that was left."""
    long: Any = {"model": "llama", "messages": MESSAGES, "max_tokens": 1500, "stream": True}
    stream = client.chat.completions.create(**long, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    began_s = time.monotonic()
    answered = client.chat.completions.create(
        model="llama", messages=MESSAGES, max_tokens=1, extra_headers={"x-sluice-degrade": "never"}
    )
    assert answered.model != "m"
    assert time.monotonic() - began_s < 3
    eventually(lambda: gateway.metric("requests_in_flight", "model=llama") == 0)


def test_a_remote_engine_stands_in_for_one_that_is_busy(client):
    long: Any = {"model": "llama", "messages": MESSAGES, "max_tokens": 1500, "stream": True}
    with client.chat.completions.create(**long, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))
        answered = client.chat.completions.with_raw_response.create(
            model="llama", messages=MESSAGES
        )
        assert answered.headers["x-sluice-degraded"] == "smaller"
        assert answered.headers["x-sluice-model"] == "scripted"
        assert answered.parse().choices[0].message.content == "Hello!"


def test_an_engine_that_is_not_there_keeps_nobody_from_the_others(client, gateway):
    with pytest.raises(openai.InternalServerError) as refused:
        client.chat.completions.create(model="later", messages=MESSAGES)
    assert refused.value.status_code == 503
    assert int(refused.value.response.headers["retry-after"]) >= 1
    assert re.search(r"note: later: remote, 1 engine; none answers yet", gateway.output)
    assert gateway.metric("replica_state", "model=later,replica=later-0,state=starting") == 1
    assert gateway.metric("replica_state", "model=llama,replica=llama-0,state=ready") == 1
