"""The commands of ``docs/pipelines.md`` do what the page says, as a shell runs them."""

import asyncio
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.cluster.posting import EnginePost
from sluice.executors.dialects import DIALECTS
from sluice.executors.http_pool import Address
from sluice.executors.remote import RemoteEngine, Upstream
from sluice.retrieval.http_service import HttpRetriever
from sluice.retrieval.passages import RetrievalFailed
from sluice.runtime.quoting import Quotation
from tests.e2e.processes import ServerProcess, Shell, eventually
from tests.e2e.test_overload_page import at

pytestmark = pytest.mark.model

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "pipelines.md").read_text(encoding="utf-8")
(SETTINGS,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
FILL, SERVE, ASK, LOOK, SIZING = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
CHECK, START = SERVE.splitlines()
LIST, TRACE, METRICS = LOOK.splitlines()
(SERVICE,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(TEMPLATE,) = re.findall(r"```jinja\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    shell = Shell(tmp_path_factory.mktemp("pipelines"))
    shell.environment["XDG_DATA_HOME"] = str(shell.folder / "share")
    (shell.folder / "pipelines.toml").write_text(SETTINGS, encoding="utf-8")
    return shell


@pytest.fixture(scope="module")
def server(shell: Shell, smollm2_gguf: Path) -> Iterator[ServerProcess]:
    program, command, *arguments = START.split()
    assert (program, command) == ("sluice", "serve")
    running = ServerProcess(shell.folder / "s", arguments, shell.environment, cwd=shell.folder)
    try:
        yield running.wait_ready()
        assert running.stop() == 0, running.output
    finally:
        running.destroy()


def test_documents_are_stored_and_found(shell: Shell):
    printed = shell.run(FILL)
    assert "2 documents stored in 2 passages" in printed
    assert "handbook/reset.md#1" in printed
    assert shell.run(f"{CHECK} 2>&1") == "settings are valid\n"


def test_an_answer_comes_with_its_sources_and_is_found_in_trace_and_metrics(
    shell: Shell, server: ServerProcess
):
    head, _, body = shell.run(at(server, ASK)).replace("\r", "").partition("\n\n")
    assert head.startswith("HTTP/1.1 200")
    assert re.search(r"^x-sluice-retrieval: pipeline=handbook; passages=\d", head, re.MULTILINE)
    told = json.loads(body)["retrieval"]
    assert told["pipeline"] == "handbook"
    if not told["degraded"]:  # a busy machine may leave no time
        assert told["sources"][0]["id"] == "handbook/reset.md#1"
    assert shell.run(LIST).startswith("handbook/refunds.md  1 passages")
    assert "sluice_retrievals_total" in shell.run(at(server, METRICS))
    (call_id,) = re.findall(r"^x-request-id: (\S+)$", head, re.MULTILINE)
    trace = TRACE.replace("ID", f"{call_id} --journal {server.journal}")
    eventually(lambda: re.search(r"^retrieval ", shell.run(f"{trace} || true"), re.MULTILINE))
    assert "handbook retrieved" in shell.run(trace)


def test_plans_and_simulations_take_retrieval(shell: Shell):
    plan, simulation = SIZING.splitlines()
    assert "of it retrieval" in shell.run(plan)
    assert json.loads(shell.run(f"{simulation} --json"))["ttft_s"]["p50"] > 0.08


def test_the_template_of_the_page_can_be_used():
    passage = {"number": 1, "document": "d", "title": "t", "text": 'say "yes"', "score": 1.0}
    assert '[1] "say \\"yes\\""' in Quotation(TEMPLATE).text([passage])


def test_the_service_of_the_page_keeps_the_contract(tmp_path):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    (tmp_path / "retriever.py").write_text(SERVICE.replace("9100", str(port)), encoding="utf-8")

    async def find() -> list[str]:
        upstream = Upstream("retriever", Address("127.0.0.1", port), DIALECTS["openai"])
        retriever = HttpRetriever(EnginePost(RemoteEngine(upstream), "/"), "default")
        try:
            for _ in range(200):
                try:
                    return [one.id for one in await retriever.find("How do I reset it?", 4, 5.0)]
                except RetrievalFailed:
                    await asyncio.sleep(0.05)
            return []
        finally:
            await retriever.close()

    with subprocess.Popen([sys.executable, str(tmp_path / "retriever.py")]) as service:
        try:
            assert asyncio.run(find()) == ["reset#1"]
        finally:
            service.terminate()
