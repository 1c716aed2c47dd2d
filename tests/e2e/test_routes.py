"""A route over two simulated models, as ``docs/routing.md`` sets it up and as clients use it."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.clients import CHAT, Answer, ask, post
from tests.e2e.processes import ServerProcess, Shell, eventually

_, _, PAGE = (
    (Path(__file__).resolve().parents[2] / "docs" / "routing.md")
    .read_text(encoding="utf-8")
    .partition("## Serving")
)
(SETTINGS,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
START, REQUEST, TELL, TRAIN = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
CHECK, SERVE = START.splitlines()


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    shell = Shell(tmp_path_factory.mktemp("routes"))
    (shell.folder / "auto.toml").write_text(SETTINGS, encoding="utf-8")
    return shell


@pytest.fixture(scope="module")
def server(shell: Shell) -> Iterator[ServerProcess]:
    program, command, *arguments = SERVE.split()
    assert (program, command) == ("sluice", "serve")
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup, and inherited
    running = ServerProcess(shell.folder / "server", arguments, shell.environment, cwd=shell.folder)
    signal.signal(signal.SIGHUP, before)
    try:
        yield running.wait_ready()
        assert running.stop() == 0, running.output
    finally:
        running.destroy()


def at(server: ServerProcess, lines: str) -> str:
    assert "http://127.0.0.1:8000/" in lines
    return lines.replace("http://127.0.0.1:8000", server.url)


def chat(server: ServerProcess, *turns: str, **fields: object) -> Answer:
    roles = ["user", "assistant"] * len(turns)
    said = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    body = {"model": "auto", "messages": said, "max_tokens": 5, **fields}
    return post(server.target, CHAT, body)


def way(answer: Answer) -> tuple[str, str]:
    assert answer.status == 200, answer.body
    return answer.headers["x-sluice-route-way"], answer.headers["x-sluice-route-reason"]


def test_the_file_of_the_page_is_valid(shell: Shell):
    assert "settings are valid" in shell.run(CHECK)


def test_the_route_is_listed_and_its_request_is_answered_as_the_page_says(shell, server):
    listed = ask(server.target, "GET", "/v1/models").json()
    assert [one["id"] for one in listed["data"]] == ["small", "large", "auto"]
    head, _, body = shell.run(at(server, REQUEST)).replace("\r", "").partition("\n\n")
    for line in ("x-sluice-model: small", "x-sluice-route: auto", "x-sluice-route-way: simple",
                 "x-sluice-route-reason: score"):  # fmt: skip
        assert f"\n{line}\n" in f"{head}\n"
    answer = json.loads(body)
    assert answer["model"] == "small"
    assert answer["usage"]["sluice"]["route"]["way"] == "simple"
    # The journal is written a little later.
    told = f"sluice trace {answer['id']} --journal server/journal || true"
    eventually(lambda: "route auto: to small (score; score 0." in shell.run(told))


def test_rules_conversations_and_foreign_texts_go_to_the_large_model(server):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert way(chat(server, "What is 2 + 2?", tools=[tool])) == ("complex", "tools")
    assert way(chat(server, "What is 2 + 2?", "4", "And what is 5 + 5?")) == ("simple", "score")
    first = {"model": "auto", "messages": [{"role": "user", "content": "Name a colour."}]}
    asked = post(server.target, CHAT, {**first, "max_tokens": 5}, {"x-sluice-route": "complex"})
    assert way(asked) == ("complex", "asked")
    assert way(chat(server, "Name a colour.", "Red", "What is 2 + 2?")) == (
        "complex",
        "conversation",
    )
    assert way(chat(server, "Name a fruit.", "Pear", "What is 2 + 2?")) == ("simple", "score")
    assert way(chat(server, "请证明没有最大的素数")) == ("complex", "unfamiliar")


def test_outcomes_are_kept_and_the_next_training_takes_them(shell, server):
    assert '"kept":true' in shell.run(at(server, TELL))
    answer = chat(server, "What is 2 + 2?")
    told = {"route": "auto", "id": answer.json()["id"], "ok": False}
    assert post(server.target, "/v1/feedback", told).json()["kept"]
    assert (shell.folder / "told.jsonl").read_text().splitlines() == [
        '{"prompt":"What is 3 + 4?","weak":1.0,"strong":1.0}',
        '{"prompt":"What is 2 + 2?","weak":0.0}',
    ]
    unknown = post(server.target, "/v1/feedback", {**told, "id": "chatcmpl-unknown"})
    assert (unknown.status, unknown.json()["error"]["param"]) == (400, "id")
    rows = [f"What is {n} + {n}?,1,1\nProve that {n} divides its cube.,0,1" for n in range(60)]
    (shell.folder / "outcomes.csv").write_text("prompt,weak_ok,strong_ok\n" + "\n".join(rows))
    assert "wrote next.route" in shell.run(TRAIN)
    assert "feedback told.jsonl" in shell.run("sluice route score --card --model next.route")


def test_d19_a_threshold_is_found_again_from_the_scores_of_the_journal(shell):
    find = "sluice route threshold --journal server/journal --route auto --share 50"
    eventually(lambda: "prompts" in shell.run(f"{find} 2>&1 || true"))
    assert re.search(r"^threshold +0\.\d+$", shell.run(find), re.MULTILINE)
    assert "no scores of a route other" in shell.run(
        f"{find.replace('auto', 'other')} 2>&1 || true"
    )


def test_metrics_count_what_decided(server):
    routed = {
        labels: value
        for (name, labels), value in server.metrics().items()
        if name == "sluice_routed_total"
    }
    assert routed["reason=tools,route=auto,way=complex"] == 1
    assert routed["reason=score,route=auto,way=simple"] >= 2
    assert server.metric("route_share_meant_ratio", "route=auto") == 0.3
    assert server.metric("route_outcomes_total", "route=auto") == 2


def test_other_settings_hold_without_a_restart_and_wrong_ones_change_nothing(shell, server):
    """Last, because it changes the file."""
    file = shell.folder / "auto.toml"
    text = file.read_text()
    (shell.folder / "bad.route").write_bytes(b"no classifier")
    file.write_text(text + 'classifier = "bad.route"\n')
    server.send(signal.SIGHUP)
    eventually(lambda: "routes.auto.classifier: bad.route is not a file" in server.output)
    assert way(chat(server, "What is 2 + 2?"))[0] == "simple"
    file.write_text(text.replace("share = 30", "threshold = 0.0"))
    server.send(signal.SIGHUP)
    eventually(lambda: way(chat(server, "What is 2 + 2?")) == ("complex", "score"))
    file.write_text(text[: text.index("[routes")])
    server.send(signal.SIGHUP)
    eventually(lambda: chat(server, "What is 2 + 2?").status == 404)
