"""The commands of ``docs/overload.md`` do what the page says, as a shell runs them."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.clients import ask
from tests.e2e.processes import ServerProcess, Shell

pytestmark = pytest.mark.model

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "overload.md").read_text(encoding="utf-8")
SETTINGS, SMALLER = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
SERVE, REQUEST, MANY, COUNTS = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
EXPORT, CHECK, START = SERVE.splitlines()


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    shell = Shell(tmp_path_factory.mktemp("page"))
    (shell.folder / "overload.toml").write_text(SETTINGS, encoding="utf-8")
    shell.environment["ACME_KEYS"] = shell.run(f'{EXPORT}\nprintf %s "$ACME_KEYS"')
    return shell


@pytest.fixture(scope="module")
def server(shell: Shell, smollm2_gguf: Path) -> Iterator[ServerProcess]:
    """The server that the page starts, at a free port; the model is in the cache by then."""
    program, command, *arguments = START.split()
    assert (program, command) == ("sluice", "serve")
    arguments[arguments.index("overload.toml")] = str(shell.folder / "overload.toml")
    running = ServerProcess(shell.folder / "server", arguments, shell.environment)
    try:
        running.wait_ready()
        yield running
        assert running.stop() == 0, running.output
    finally:
        running.destroy()


def at(server: ServerProcess, lines: str) -> str:
    """The lines with this server's address. Skips where the machine has no ``curl``."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    assert "http://127.0.0.1:8000/" in lines
    return lines.replace("http://127.0.0.1:8000", server.url)


def test_the_file_of_the_page_is_valid(shell: Shell):
    assert "settings are valid" in shell.run(CHECK)


def test_the_file_with_two_models_is_valid_and_warns_of_nothing(shell: Shell):
    (shell.folder / "smaller.toml").write_text(SMALLER, encoding="utf-8")
    assert shell.run("sluice config check -c smaller.toml 2>&1") == "settings are valid\n"


def test_a_request_of_a_named_class_is_answered(shell: Shell, server: ServerProcess):
    answer = shell.run(at(server, REQUEST))
    head, _, body = answer.replace("\r", "").partition("\n\n")
    assert head.startswith("HTTP/1.1 200")
    assert re.search(r"^x-ratelimit-limit-requests: 60$", head, re.MULTILINE)
    assert '"service_tier":"batch"' in body


def test_more_than_fit_are_counted_as_the_page_says(shell: Shell, server: ServerProcess):
    printed = shell.run(at(server, MANY))
    counts = {status: int(count) for count, status in map(str.split, printed.splitlines())}
    assert counts.keys() == {"200", "429"}
    assert sum(counts.values()) == 12
    assert counts["200"] >= 2
    counted = shell.run(at(server, COUNTS))
    assert re.search(r"^sluice_refusals_total\{.*\} [1-9]", counted, re.MULTILINE)
    assert 'rung="shorten"' in counted
    assert 'slo_class="batch"' in counted


def test_strangers_are_turned_away(server: ServerProcess):
    assert ask(server.target, "GET", "/v1/models").status == 401
