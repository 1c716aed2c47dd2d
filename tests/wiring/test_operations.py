"""A server whose settings change while requests run, over HTTP, with a file on disk."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trustme

from sluice.config.load import digest, load_settings
from sluice.core.errors import ConfigError
from sluice.server.transport import Transport
from sluice.telemetry.journal import Clocks, JournalLimits, JournalReader, JournalWriter
from sluice.telemetry.records import Deployment
from sluice.testing.served import Served, served_app
from sluice.wiring.gateway import pool_limits, tenant_limits
from sluice.wiring.operations import RunningServer
from sluice.wiring.remote import RemoteIds
from tests.cluster.overload_rig import OverloadRig
from tests.server.test_tls import Authority, secured, serial
from tests.server.wire_client import Answer, ask, connected, post, raw_post, read_until

KEY = {"authorization": "Bearer acme-key"}
ADMIN = {"authorization": "Bearer boss"}
COMPLETIONS = "/v1/completions"


def settings_text(**more: str) -> str:
    tables = {
        "server": 'listen = "127.0.0.1:0"\nadmin_key_file = "{folder}/admin"',
        "models.tiny": 'source = "x"',
        "tenants.acme": 'key_sha256_file = "{folder}/acme"\nconcurrency = 2',
    }
    for key, lines in more.items():
        table = key.replace("__", ".")
        tables[table] = tables.get(table, "") + "\n" + lines
    return "\n".join(f"[{name}]\n{lines}" for name, lines in tables.items())


@dataclass
class Running:
    """A server with its file; ``said`` answers requests to it."""

    folder: Path
    server: Served
    rig: OverloadRig
    operations: RunningServer

    def write(self, **more: str) -> None:
        text = settings_text(**more).replace("{folder}", str(self.folder))
        (self.folder / "sluice.toml").write_text(text)

    def reload(self, **more: str) -> Answer:
        """Write the file and let it be read."""
        self.write(**more)
        return ask(self.server, "POST", "/admin/reload", headers=ADMIN)

    def complete(self, headers=KEY, **fields: Any) -> Answer:
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 3, **fields}
        return post(self.server, COMPLETIONS, body, headers)

    def setting(self, key: str) -> Any:
        answer = ask(self.server, "GET", "/admin/config", headers=ADMIN)
        found = [one for one in answer.json()["settings"] if one["key"] == key]
        assert len(found) == 1, key
        return found[0]["value"]


@pytest.fixture
def run(tmp_path) -> Iterator[Callable[..., Running]]:
    with ExitStack() as stack:

        def start(step_s: float = 0.005, **more: str) -> Running:
            (tmp_path / "admin").write_text("boss\n")
            (tmp_path / "acme").write_text(digest("acme-key") + "\n")
            text = settings_text(**more).replace("{folder}", str(tmp_path))
            (tmp_path / "sluice.toml").write_text(text)
            read = partial(load_settings, tmp_path / "sluice.toml", (), {})
            loaded = read()
            settings = loaded.settings
            limits = pool_limits("tiny", settings.models["tiny"], ["tiny-0"])
            rig = OverloadRig(
                time.monotonic_ns,
                step_s=lambda: step_s,
                slots=1,
                pool={"queue_places_max": limits.queue_places_max},
                slo=settings.slo,
                tenants=tenant_limits(settings.tenants),
                sections=settings.tenants,
                journal=JournalWriter(
                    tmp_path / "journal",
                    "gateway",
                    Clocks(time.monotonic_ns, time.time_ns),
                    JournalLimits(keep_s=3600, bytes_max=10**7),
                ),
            )
            transport = Transport.of(settings.server)
            operations = RunningServer(rig.gateway, loaded, read, transport, RemoteIds())
            app = operations.app
            server = stack.enter_context(served_app(app, settings.server, transport))
            stack.callback(lambda: server.call(rig.gateway.close))
            server.call(rig.gateway.start)
            return Running(tmp_path, server, rig, operations)

        yield start


def test_limits_of_a_tenant_change_at_once(run):
    running = run()
    assert running.complete().status == 200
    answer = running.reload(tenants__acme="requests_per_minute = 1")
    assert answer.status == 200
    assert answer.json() == {
        "applied": ["tenants.acme.requests_per_minute"],
        "needs_restart": [],
        "warnings": [],
    }
    assert running.complete().headers["x-ratelimit-limit-requests"] == "1"
    assert running.complete().error["code"] == "requests_per_minute"
    assert running.reload().json()["applied"] == ["tenants.acme.requests_per_minute"]
    assert running.complete().status == 200


def test_a_reload_drops_no_stream(run):
    running = run(step_s=0.02)
    stream = raw_post(COMPLETIONS, model="tiny", prompt=[1, 2], max_tokens=40, stream=True)
    stream = stream.replace(b"\r\n", b"\r\nauthorization: Bearer acme-key\r\n", 1)
    with connected(running.server) as opened:
        opened.sendall(stream)
        seen = read_until(opened, b"data: ")
        (running.folder / "acme").write_text(digest("new-key"))
        answer = running.reload(
            server="body_bytes_max = 100\nheader_bytes_max = 200\nrequest_max = '1ms'",
            models__tiny="queue_requests_max = 0",
        )
        assert answer.status == 200
        seen += read_until(opened, b"[DONE]")
    assert seen.count(b'"finish_reason":"length"') == 1
    assert b"error" not in seen


def test_keys_in_files_come_and_go(run):
    running = run()
    (running.folder / "acme").write_text(digest("new-key"))
    (running.folder / "admin").write_text("boss\nnew boss\n")
    assert running.reload().json()["applied"] == [
        "server.admin_key_digests",
        "server.tenant_key_digests",
    ]
    assert running.complete().status == 401
    assert running.complete({"authorization": "Bearer new-key"}).status == 200
    new = {"authorization": "Bearer new boss"}
    assert ask(running.server, "GET", "/admin/config", headers=new).status == 200


def test_a_file_with_mistakes_changes_nothing_and_tells_them_all(run, caplog):
    running = run()
    answer = running.reload(
        server="body_bytes_max = 'much'\nlissten = 1",
        tenants__acme="requests_per_minute = 1\nslo = 'none'",
    )
    assert answer.status == 400
    assert answer.error["code"] == "invalid_settings"
    assert len(answer.error["problems"]) == 3
    for words in ("body_bytes_max", "lissten", "tenants.acme.slo", "sluice.toml:"):
        assert words in answer.error["message"]
        assert words in caplog.text
    assert "x-ratelimit-limit-requests" not in running.complete().headers
    assert running.setting("server.body_bytes_max") == "10MiB"
    (running.folder / "sluice.toml").unlink()
    gone = ask(running.server, "POST", "/admin/reload", headers=ADMIN)
    assert gone.status == 400
    assert "cannot be read" in gone.error["message"]
    assert running.complete().status == 200


def test_what_needs_a_restart_is_named_and_stays_as_it_was(run):
    running = run()
    answer = running.reload(
        server="body_bytes_max = 1000",
        models__tiny="threads = 3",
        models__new='source = "y"',
        journal="keep = '1h'",
    )
    assert answer.json()["applied"] == ["server.body_bytes_max"]
    assert answer.json()["needs_restart"] == ["models.new", "models.tiny.threads", "journal.keep"]
    assert running.setting("models.tiny.threads") is None
    assert running.setting("server.body_bytes_max") == "1000B"
    assert running.complete(padding="x" * 2000).status == 413
    again = running.reload(server="body_bytes_max = 1000", models__tiny="threads = 3")
    assert again.json()["needs_restart"] == ["models.tiny.threads"]


def test_a_change_that_only_holds_together_with_one_that_needs_a_restart_is_refused(run):
    running = run()
    answer = running.reload(
        models__tiny="smaller = 'new'\nqueue_requests_max = 0", models__new='source = "y"'
    )
    assert answer.status == 400
    assert 'there is no other model "new"' in answer.error["message"]
    assert running.setting("models.tiny.queue_requests_max") == 64


def test_classes_come_while_the_server_runs_and_are_counted_by_name(run):
    running = run()
    wanted = {**KEY, "x-sluice-slo": "gold"}
    assert running.complete(wanted).status == 400
    assert running.reload(slo__gold="ttft = '10s'").json()["applied"] == ["slo.gold"]
    assert running.complete(wanted).status == 200
    assert running.rig.value("class_requests_total", "tiny", "gold", "met") == 1
    running.reload()
    assert running.complete(wanted).status == 400


def test_the_queue_gets_shorter_for_newcomers(run):
    running = run(step_s=0.02, tenants__acme="", models__tiny="queue_requests_max = 5")
    running.reload(models__tiny="queue_requests_max = 0")
    stream = raw_post(COMPLETIONS, model="tiny", prompt=[1, 2], max_tokens=50, stream=True)
    stream = stream.replace(b"\r\n", b"\r\nauthorization: Bearer acme-key\r\n", 1)
    with connected(running.server) as opened:
        opened.sendall(stream)
        read_until(opened, b"data: ")
        answer = running.complete()
    assert (answer.status, answer.error["code"]) == (429, "queue_full")


def test_settings_in_force_are_shown_without_secrets(run):
    running = run(tenants__acme="weight = 3")
    answer = ask(running.server, "GET", "/admin/config", headers=ADMIN)
    told = {one["key"]: one for one in answer.json()["settings"]}
    assert told["tenants.acme.weight"]["value"] == 3
    assert told["tenants.acme.weight"]["origin"].endswith("sluice.toml:9")
    assert told["tenants.acme.key_digests"]["value"] == "1 given, masked"
    for secret in ("boss", "acme-key", digest("boss"), digest("acme-key")):
        assert secret not in answer.body.decode()


def test_a_replica_is_drained_and_used_again(run):
    running = run()
    path = "/admin/replicas/tiny-0/"
    answer = ask(running.server, "POST", path + "drain", headers=ADMIN)
    (state,) = answer.json()["replicas"]
    assert (answer.status, state["state"]) == (200, "draining")
    refused = running.complete()
    assert (refused.status, refused.error["code"]) == (503, "not_ready")
    ready = ask(running.server, "GET", "/ready")
    assert ready.status == 503
    assert "tiny-0 is draining" in ready.json()["reason"]
    assert ask(running.server, "POST", path + "undrain", headers=ADMIN).status == 200
    assert running.complete().status == 200
    for wrong in ("/admin/replicas/none/drain", path + "stop", path):
        answer = ask(running.server, "POST", wrong, headers=ADMIN)
        assert (answer.status, answer.error["code"]) == (404, "not_found")
    assert ask(running.server, "GET", path + "drain", headers=ADMIN).status == 405
    assert ask(running.server, "POST", path + "drain", headers=KEY).status == 403


def test_reloads_at_the_same_time_are_done_one_after_the_other(run):
    running = run()
    running.write(tenants__acme="weight = 7")
    answers: list[Answer] = []

    def reload() -> None:
        answers.append(ask(running.server, "POST", "/admin/reload", headers=ADMIN))

    threads = [threading.Thread(target=reload) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    applied = [one for answer in answers for one in answer.json()["applied"]]
    assert applied == ["tenants.acme.weight"]
    assert running.setting("tenants.acme.weight") == 7


def test_changes_are_in_the_journal_by_name(run):
    running = run()
    running.reload(tenants__acme="weight = 7", journal="keep = '1h'")
    ask(running.server, "POST", "/admin/replicas/tiny-0/drain", headers=ADMIN)
    running.server.call(running.rig.gateway.close)
    records = [entry.record for entry in JournalReader(running.folder / "journal").entries()]
    changes = {one.what: one for one in records if isinstance(one, Deployment)}
    told = {"applied": "tenants.acme.weight", "needs_restart": "journal.keep"}
    assert changes["reload"].details == told
    assert changes["reload"].settings["tenants.acme.weight"] == "7.0"
    assert changes["drain"].details == {"replica": "tiny-0"}


def test_events_of_the_operator_are_in_the_journal_as_such(run):
    running = run()
    body = {"what": "rollout", "details": {"engine": "vllm 0.33"}}
    assert post(running.server, "/admin/events", body, ADMIN).status == 200
    running.server.call(running.rig.gateway.close)
    records = [entry.record for entry in JournalReader(running.folder / "journal").entries()]
    (noted,) = [one for one in records if isinstance(one, Deployment) and one.what == "rollout"]
    assert (noted.details, noted.source) == ({"engine": "vllm 0.33"}, "operator")


def test_a_renewed_certificate_is_shown_after_a_reload(run, tmp_path):
    authority = Authority(trustme.CA(), tmp_path / "cert.pem", tmp_path / "key.pem")
    authority.issue()
    files = 'tls_cert_file = "{folder}/cert.pem"\ntls_key_file = "{folder}/key.pem"'
    running = run(server=files)
    seen = []
    for damage in (False, False, True):
        with secured(running.server, authority.trusting()) as opened:
            seen.append(serial(opened))
        authority.issue()
        running.write(server=files + "\ngrace = '1s'")
        if damage:
            authority.key_file.write_text("no key")
            with pytest.raises(ConfigError, match=r"key\.pem"):
                running.server.call(running.operations.reload)
        else:
            running.server.call(running.operations.reload)
    with secured(running.server, authority.trusting()) as opened:
        seen.append(serial(opened))
    assert len(set(seen)) == 3
    assert seen[2] == seen[3]
    assert running.operations.section.grace_s == 1


def test_tls_cannot_be_switched_while_the_server_runs(run, tmp_path):
    authority = Authority(trustme.CA(), tmp_path / "cert.pem", tmp_path / "key.pem")
    authority.issue()
    files = 'tls_cert_file = "{folder}/cert.pem"\ntls_key_file = "{folder}/key.pem"'
    running = run()
    answer = running.reload(server=files)
    assert answer.json()["needs_restart"] == ["server.tls_cert_file", "server.tls_key_file"]
    assert running.complete().status == 200


def test_a_server_that_others_reach_does_not_lose_its_last_key(tmp_path):
    (tmp_path / "keys").write_text("sk-1")
    file = tmp_path / "sluice.toml"
    open_to_others = '[server]\nlisten = "0.0.0.0:0"\n'
    file.write_text(f"{open_to_others}api_key_file = '{tmp_path / 'keys'}'")
    read = partial(load_settings, file, (), {})
    loaded = read()
    transport = Transport.of(loaded.settings.server)
    gateway = OverloadRig(time.monotonic_ns).gateway
    running = RunningServer(gateway, loaded, read, transport, RemoteIds())
    file.write_text(open_to_others)
    with pytest.raises(ConfigError, match="no API key is set"):
        asyncio.run(running.reload())
    assert running.section.api_key_digests == (digest("sk-1"),)
