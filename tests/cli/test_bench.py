"""``sluice bench`` as users call it: reports, exit codes, bad endpoints."""

import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
from html import escape
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme

from sluice.cli.bench_report import alike
from sluice.cli.main import run
from sluice.loadtest.document import CHUNK_RULE
from sluice.planner.points import points_of
from sluice.planner.steady import Lengths
from sluice.testing.engine_answers import error_body
from sluice.testing.upstream import Reset, stream, whole
from tests.loadtest.rig import answer, events_of, later, upstream_in_thread, usage_of

# The client of a test shares its cores with everything else.
SOON = [
    "--duration",
    "0.5s",
    "--warm-up",
    "0.1s",
    "--lag-max",
    "10s",
    "--input",
    "30",
    "--output",
    "4",
]


@pytest.fixture(scope="module")
def server():
    with upstream_in_thread(lambda request: later(answer(request, gap_s=0.002), 0.01)) as upstream:
        yield f"http://127.0.0.1:{upstream.port}"


def bench(*arguments: str, capsys) -> tuple[int, Any]:
    code = run(["bench", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_one_rate_has_the_fixed_spellings_and_feeds_the_planner(server, capsys, tmp_path):
    out = tmp_path / "result.json"
    code, found = bench(
        server, "--model", "m", "--rate", "30", "--ttft", "2s", "--out", str(out), *SOON,
        capsys=capsys,
    )  # fmt: skip
    assert code == 0
    assert {"planned_rps", "sent_rps", "completed_rps", "good_rps", "failures"} <= set(found)
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        assert {"p50", "p90", "p95", "p99"} <= set(found[name])
    assert found["schedule_lag_p99_s"] >= 0
    assert (found["valid"], found["failures"]) == (True, {})
    assert found["completed_rps"] == found["planned_rps"] > 10
    assert found["tokens"]["prompt_mean"] == 30, "lengths are exact by the server's own count"
    assert found["lengths"] == {"compared": found["requests"], "prompt_share": 0, "output_share": 0}
    assert json.loads(out.read_text()) == found
    assert run(["bench", "compare", str(out), str(out)]) == 0
    (point,) = points_of(str(out), Lengths(30, 4))
    assert point.step_s == found["tpot_s"]["p50"]


def test_errors_of_one_code_are_told_together():
    error = {"ending": "refused", "status": 429, "count": 2, "with_retry_after": 2}
    late = [{**error, "reason": f"predicted_late: {wait_s} s"} for wait_s in (2.1, 2.3)]
    full = {**error, "reason": "queue_full: 67", "count": 9}
    first, second = alike([*late, full])
    assert (first["reason"], first["count"]) == ("queue_full: 67", 9)
    assert (second["reason"], second["count"]) == ("predicted_late: 2.1 s", 4)
    assert second["with_retry_after"] == 4


def test_several_loads_are_trials_of_one_report(server, capsys, tmp_path):
    names = {name: tmp_path / f"r.{name}" for name in ("html", "rows", "markdown")}
    files = [text for name, path in names.items() for text in (f"--{name}", str(path))]
    arguments = [
        "bench",
        server,
        "--rate",
        "5,20",
        "--concurrency",
        "2",
        "--e2e",
        "9s",
        *files,
        *SOON,
    ]
    assert run(arguments) == 0
    shown = capsys.readouterr().out
    assert "2 clients" in shown
    page = names["html"].read_text()
    assert page.count("<svg") == 4 + 3 * 5
    assert "http" not in page.replace("http://www.w3.org", "").replace(server, "")
    text = names["markdown"].read_text()
    assert text.count("\n## ") == 3
    assert len(re.findall(r"\n## .*100\.0% of \d+ answers whole", text)) == 3
    assert CHUNK_RULE in text
    assert escape(CHUNK_RULE) in page
    from pyarrow import parquet  # noqa: PLC0415

    rows = parquet.read_table(names["rows"]).to_pylist()
    assert {row["trial"] for row in rows} == {0, 1, 2}
    assert all(row["ending"] in {"done", "left"} for row in rows)


def test_a_saved_plan_is_played_again(server, capsys, tmp_path):
    path = tmp_path / "plan.jsonl.gz"
    _, first = bench(
        server, "--rate", "20", "--save-plan", str(path), "--processes", "2", *SOON, capsys=capsys
    )
    assert first["client"]["processes"] == 2
    code, again = bench(server, "--plan", str(path), "--cache", "as-is", *SOON, capsys=capsys)
    assert code == 0
    assert again["requests"] == first["requests"]


def test_an_adversary_is_another_tenant_beside_a_spike(server, capsys):
    code, found = bench(
        server, "--rate", "20", "--arrivals", "constant", "--spike", "rate=60,from=0.2s,for=0.2s",
        "--adversary", "rate=20,input=200,output=2", *SOON, capsys=capsys,
    )  # fmt: skip
    assert code == 0
    groups = found["by_tenant"]
    assert set(groups) == {"adversary", "none"}
    assert groups["adversary"]["tokens"]["prompt_mean"] == 200
    assert groups["none"]["requests"] == 10 + 11


def test_targets_that_are_missed_end_with_1_and_failures_above_the_limit_too(capsys):
    streams: list[bool] = []
    refuses: list[bool] = []

    def route(request):
        if refuses and b'"stream":true' in request.body:
            streams.append(True)
            if len(streams) % 2:
                return whole(error_body("busy", "x", "overloaded"), 429)
        return answer(request)

    with upstream_in_thread(route) as upstream:
        url = f"http://127.0.0.1:{upstream.port}"
        code, found = bench(url, "--rate", "20", "--ttft", "1us", *SOON, capsys=capsys)
        assert (code, found["meets_slo"]) == (1, False)
        assert found["objectives"][0]["missed_share"] == 1.0
        refuses.append(True)
        code, found = bench(url, "--rate", "40", *SOON, capsys=capsys)
        assert code == 1
        assert 0.2 < found["success_share"] < 0.8
        assert found["errors"][0]["reason"] == "overloaded: busy"
        code, found = bench(url, "--rate", "40", "--failures-max", "0.9", *SOON, capsys=capsys)
        assert code == 0


def only_listed(answered):
    """An endpoint that lists its model to anyone, and answers requests for it like this."""
    listed = whole(b'{"data":[{"id":"a"}]}')
    return lambda request: listed if request.method == "GET" else answered()


@pytest.mark.parametrize(
    ("route", "words"),
    [
        (lambda request: whole(b"", 401), "a key is needed"),
        (lambda request: whole(b'{"data":[{"id":"a"},{"id":"b"}]}'), "name one with --model"),
        (only_listed(lambda: whole(b"", 401)), "a key is needed"),
        (only_listed(lambda: (Reset(),)), "gave no answer"),
        (lambda request: (Reset(),), "gave no answer"),
        (lambda request: whole(b"<html>", kind="text/html"), "does not list its models"),
    ],
    ids=["key", "models", "key for answers", "reset in answers", "reset", "page"],
)
def test_endpoints_that_cannot_be_measured_end_with_2_and_say_why(route, words, capsys):
    with upstream_in_thread(route) as upstream:
        code, found = bench(
            f"http://127.0.0.1:{upstream.port}", "--rate", "1", *SOON, capsys=capsys
        )
    assert code == 2
    assert words in found["error"]


def test_a_server_that_is_down_and_addresses_that_are_none_end_with_2(capsys):
    code, found = bench("http://127.0.0.1:9", "--rate", "1", capsys=capsys)
    assert (code, "cannot reach" in found["error"]) == (2, True)
    code, found = bench("ftp://x", "--rate", "1", capsys=capsys)
    assert (code, "no address" in found["error"]) == (2, True)


def test_a_wrong_model_is_told_with_those_that_there_are(capsys):
    def route(request):
        if request.path == "/v1/models":
            return whole(b'{"data":[{"id":"right"}]}')
        return whole(error_body("no such model", "x", "model_not_found"), 404)

    with upstream_in_thread(route) as upstream:
        url = f"http://127.0.0.1:{upstream.port}"
        code, found = bench(url, "--model", "wrong", "--rate", "1", *SOON, capsys=capsys)
    assert code == 2
    assert "it serves right" in found["error"]


def test_certificates_are_checked_and_can_be_given(capsys, tmp_path):
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    with upstream_in_thread(answer, tls=context) as upstream:
        url = f"https://127.0.0.1:{upstream.port}"
        code, found = bench(url, "--rate", "10", *SOON, capsys=capsys)
        assert (code, "CERTIFICATE_VERIFY_FAILED" in found["error"]) == (2, True)
        arguments = ("--ca", str(tmp_path / "ca.pem"), "--rate", "10", *SOON)
        code, found = bench(url, *arguments, capsys=capsys)
    assert (code, found["failed"]) == (0, 0)


def test_a_server_without_usage_is_measured_and_told(capsys):
    def route(request):
        if request.path == "/v1/models":
            return answer(request)
        body = msgspec.json.decode(request.body)
        if body.get("stream"):
            return answer(request)
        message = {"role": "assistant", "content": "x"}
        return whole(msgspec.json.encode({"choices": [{"index": 0, "message": message}]}))

    with upstream_in_thread(route) as upstream:
        url = f"http://127.0.0.1:{upstream.port}"
        code, found = bench(url, "--rate", "10", *SOON, capsys=capsys)
    assert code == 0
    assert "no usage" in found["notes"][0]


def test_a_cache_that_knows_new_prompts_voids_the_trial(capsys):
    def route(request):
        body = msgspec.json.decode(request.body) if request.body else {}
        if not body.get("stream"):
            return answer(request)
        usage = usage_of(request, body["max_tokens"])
        details = {**usage, "prompt_tokens_details": {"cached_tokens": 29}}
        return stream(events_of(body["max_tokens"], details))

    with upstream_in_thread(route) as upstream:
        url = f"http://127.0.0.1:{upstream.port}"
        code, found = bench(url, "--rate", "10", *SOON, capsys=capsys)
        assert (code, found["void"]["cause"]) == (2, "cache_moved")
        code, found = bench(url, "--rate", "10", "--cache", "as-is", *SOON, capsys=capsys)
        assert (code, found["tokens"]["cached_share"]) == (0, pytest.approx(29 / 30))


def test_a_full_disk_costs_the_files_and_not_the_result(server, capsys):
    files = {name: f"/proc/nowhere.{name}" for name in ("markdown", "out", "html", "rows")}
    more = [word for name, path in files.items() for word in (f"--{name}", path)]
    code = run(["bench", server, "--rate", "10", "--json", *more, *SOON])
    printed = capsys.readouterr()
    assert code == 0
    assert json.loads(printed.out)["valid"]
    for path in files.values():
        assert f"cannot write {path}" in printed.err


def child(*arguments: str, limit: str = "true") -> subprocess.Popen[str]:
    """The command in a process of its own, behind a word to the shell."""
    command = [sys.executable, "-m", "sluice", "bench", *arguments, "--json"]
    return subprocess.Popen(
        # A shell in the background hands on that SIGINT is ignored, so SIGTERM stands for both.
        ["/bin/sh", "-c", f'{limit}; exec "$@"', "sh", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")},
    )


def test_being_told_to_stop_gives_a_partial_report():
    came = threading.Semaphore(0)

    def route(request):
        came.release()
        return answer(request)

    with upstream_in_thread(route) as upstream:
        url = f"http://127.0.0.1:{upstream.port}"
        process = child(url, "--rate", "40", "--duration", "600s", "--warm-up", "0.1s", *SOON[4:])
        for _ in range(60):  # after calibrating, some of the load
            assert came.acquire(timeout=30)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 2, err
    found = json.loads(out)
    assert found["void"]["cause"] == "interrupted"
    assert found["counted_s"] < 60
    assert found["completed_rps"] > 0


def test_files_that_run_out_void_the_trial_and_say_what_to_raise():
    """Answers take longer than the trial, so each request needs a file of its own."""

    def route(request):
        body = request.body
        return later(answer(request), 2.0 if b'"stream":true' in body else 0.0)

    with upstream_in_thread(route) as upstream:
        url = f"http://127.0.0.1:{upstream.port}"
        process = child(url, "--rate", "150", *SOON, limit="ulimit -n 64")
        out, err = process.communicate(timeout=60)
    assert process.returncode == 2, err
    found = json.loads(out)
    assert found["void"]["cause"] == "client_resources"
    assert "ulimit -n" in found["void"]["detail"]
