"""What goes through to remote engines and comes back is written nowhere, whatever they do."""

from typing import Any

import pytest

from sluice.config.load import digest
from sluice.config.sections import JournalSection, ServerSection
from sluice.server.routes import routes
from sluice.telemetry.journal import JournalReader, JournalWriter
from sluice.testing.engine_answers import error_body
from sluice.testing.upstream import Close, Received, Reset, Script, Send, Wait, cut, whole
from tests.cluster.relay_rig import RelayRig, answering, engine, relay
from tests.server.test_guarded_routes import WORK

MARK = "xyzzy-plugh"
KEYS = {"authorization": f"Bearer client-{MARK}"}
UPSTREAM_KEY = f"upstream-{MARK}"
TEXT = f"text {MARK} text"


def marked(path: str, **more: Any) -> dict[str, Any]:
    texts: dict[str, Any] = {
        "messages": [{"role": "user", "content": TEXT}],
        "prompt": TEXT, "input": TEXT, "query": TEXT, "documents": [TEXT], "text_1": TEXT,
        "text_2": TEXT,
    }  # fmt: skip
    work = {name: texts.get(name, value) for name, value in WORK[path].items()}
    return {"model": "big", **work, "user": TEXT, **more}


def faults(healthy: Script) -> dict[str, Script]:
    """What an engine may do about a call; its words hold the marker."""
    return {
        "healthy": healthy,
        "wrong": whole(error_body(TEXT, "BadRequestError", 400), 400),
        "refuses the key": whole(error_body(f"bad key {UPSTREAM_KEY}", "Unauthorized", 401), 401),
        "fails": whole(error_body(TEXT, "InternalServerError", 500), 500),
        "is full": whole(error_body(TEXT, "Overloaded", 503), 503, ("retry-after-ms", "20")),
        "no json": whole(TEXT.encode()),
        "no http": [Send(TEXT.encode() + b"\r\n\r\n"), Close()],
        "odd header": [Send(f"HTTP/1.1 200 OK\r\nx-{MARK}: {TEXT}\r\nbroken".encode()), Close()],
        "resets": [Send(b"HTTP/1.1 200 OK\r\n"), Reset()],
        "redirects": whole(b"", 302, ("location", f"http://127.0.0.1:1/{MARK}")),
        "cut": cut(healthy, 300),
        "hangs": [Wait(0.2), Close()],
    }


NAMES = list(faults([Close()]))
FEW = ("/v1/chat/completions", "/v1/embeddings")
ENGINES_OWN = {"healthy", "wrong"}  # the answer that the client is to get, word for word


def written(rig: RelayRig, journal: Any) -> str:
    async def text() -> str:
        return rig.gateway.metrics()[0].decode()

    metrics = rig.served.call(text)
    observed = rig.gateway._observer._journal
    assert isinstance(observed, JournalWriter)
    observed.flush()
    return metrics + "\n".join(repr(one.record) for one in JournalReader(journal).entries())


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_a_request_or_an_answer_is_written(tmp_path, caplog, capfd, name):
    caplog.set_level(1)
    caplog.set_level(1, "asyncio")

    def answer(request: Received) -> Script:
        generates = request.path in {"/v1/chat/completions", "/v1/completions"}
        healthy = engine(pieces=(TEXT, TEXT))(request) if generates else whole(b'{"data":[]}')
        return faults(healthy)[name]

    section = ServerSection(listen="127.0.0.1:0", api_key_digests=(digest(f"client-{MARK}"),))
    settings = {"server": section, "journal": JournalSection(dir=tmp_path)}
    waits: Any = dict.fromkeys(("first_token_s_max", "silence_s_max", "whole_s_max"), 0.1)
    waits["retries"] = int(name == "fails")
    with relay(answering(answer), settings=settings, key=UPSTREAM_KEY, **waits) as rig:
        for path in WORK if name == "healthy" else FEW:
            for body in (marked(path), marked(path, stream=True)):
                seen = rig.post(path, body, **KEYS)
                if name not in ENGINES_OWN and seen.status != 200:
                    assert MARK not in seen.body.decode(), (path, seen.body)
                assert MARK not in str(dict(seen.headers)) or name in ENGINES_OWN
        assert rig.sent(), "the engine was asked"
        told = written(rig, tmp_path)
    assert "RequestArrived" in told
    assert MARK not in told
    logged = "\n".join(f"{one.getMessage()} {one.__dict__}" for one in caplog.records)
    assert MARK not in logged
    shown = capfd.readouterr()
    assert MARK not in shown.out + shown.err


def test_every_route_is_marked():
    served = routes(remote=True).exact
    taking = {path.decode() for path, one in served.items() if one.method == "POST"}
    assert taking == {*WORK, "/v1/feedback"}  # which keeps prompts where its operator says so
