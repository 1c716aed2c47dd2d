"""The commands of ``docs/security.md`` do what the page says, as a shell runs them."""

import http.client
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.clients import COMPLETIONS, Stream, ask
from tests.e2e.processes import ServerProcess, Shell, eventually
from tests.e2e.test_overload_page import at

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
(SETTINGS,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
KEYS, MODELS, RELOAD, CONFIG, DRAIN = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
*MAKE, CHECK, START = KEYS.splitlines()


def key(shell: Shell, name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {(shell.folder / name).read_text().strip()}"}


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    shell = Shell(tmp_path_factory.mktemp("security"))
    (shell.folder / "security.toml").write_text(SETTINGS, encoding="utf-8")
    shell.run("\n".join(MAKE))
    return shell


@pytest.fixture(scope="module")
def server(shell: Shell) -> Iterator[ServerProcess]:
    program, command, *arguments = START.split()
    assert (program, command) == ("sluice", "serve")
    # Under nohup it would be ignored, and a program that is started so keeps it.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    running = ServerProcess(shell.folder / "s", arguments, shell.environment, cwd=shell.folder)
    signal.signal(signal.SIGHUP, before)
    try:
        yield running.wait_ready()
        assert running.stop() == 0, running.output
    finally:
        running.destroy()


def test_the_file_of_the_page_is_valid_and_warns_of_nothing(shell: Shell):
    assert shell.run(f"{CHECK} 2>&1") == "settings are valid\n"
    for name in ("admin.key", "acme.key"):
        assert (shell.folder / name).stat().st_mode & 0o077 == 0
        assert len((shell.folder / name).read_text().strip()) >= 32


def test_the_key_of_the_tenant_opens_inference_and_no_more(shell: Shell, server: ServerProcess):
    assert '"id":"llama"' in shell.run(at(server, MODELS))
    assert ask(server.target, "GET", "/v1/models").status == 401
    for path in ("/admin/config", "/admin/replicas"):
        assert ask(server.target, "GET", path, headers=key(shell, "acme.key")).status == 403


def test_a_second_key_is_valid_from_the_reload_on(shell: Shell, server: ServerProcess):
    make, reload = RELOAD.splitlines()
    shell.run(make)
    assert ask(server.target, "GET", "/v1/models", headers=key(shell, "acme-2.key")).status == 401
    told = json.loads(shell.run(at(server, reload)))
    assert told == {
        "applied": ["server.tenant_key_digests"], "needs_restart": [], "warnings": [],
    }  # fmt: skip
    for name in ("acme.key", "acme-2.key"):
        assert ask(server.target, "GET", "/v1/models", headers=key(shell, name)).status == 200


def test_settings_are_shown_without_secrets(shell: Shell, server: ServerProcess):
    shown = shell.run(at(server, CONFIG))
    assert '"key":"tenants.acme.requests_per_minute","value":600' in shown
    for name in ("acme.key", "admin.key", "acme.sha256"):
        for secret in (shell.folder / name).read_text().split():
            assert secret not in shown


def test_a_replica_is_drained_and_used_again(shell: Shell, server: ServerProcess):
    drain, undrain = DRAIN.splitlines()
    assert '"state":"draining"' in shell.run(at(server, drain))
    assert '"state":"ready"' in shell.run(at(server, undrain))


def test_a_hang_up_reads_the_settings_and_drops_no_stream(shell: Shell, server: ServerProcess):
    file, headers = shell.folder / "security.toml", key(shell, "acme.key")
    connection = http.client.HTTPConnection(server.target.host, server.target.port, timeout=60)
    asked = {"model": "llama", "prompt": "Once", "max_tokens": 150, "stream": True}
    told = {"content-type": "application/json", **headers}
    connection.request("POST", COMPLETIONS, json.dumps(asked), told)
    stream = Stream(connection, connection.getresponse(), 0.0)
    assert stream.event()
    file.write_text(SETTINGS.replace("= 600", "= 601") + "\n[journal]\nkeep = '1h'\n")
    server.send(signal.SIGHUP)
    eventually(lambda: "applied: tenants.acme.requests_per_minute" in server.output)
    assert "until a restart as before: journal.keep" in server.output
    answer = ask(server.target, "GET", "/v1/models", headers=headers)
    assert answer.headers["x-ratelimit-limit-requests"] == "601"
    file.write_text(SETTINGS + "\n[servr]\n")
    server.send(signal.SIGHUP)
    eventually(lambda: "settings were not changed" in server.output)
    events = stream.rest()
    assert events[-1] == "[DONE]"
    assert "error" not in str(events)
    file.write_text(SETTINGS)
