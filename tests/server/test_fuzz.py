"""No body makes the server fail: what is sent gets an answer or a refusal in the usual shape."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.config.sections import ServerSection
from sluice.runtime.generation import Call
from sluice.server import wire
from sluice.server.app import create_app
from sluice.server.stamp import Sources
from sluice.testing.gateway import FakeGateway, speak

USER = {"role": "user", "content": "x"}
PATHS: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/chat/completions": (wire.ChatRequest, {"model": "tiny", "messages": [USER]}),
    "/v1/completions": (wire.CompletionRequest, {"model": "tiny", "prompt": "x"}),
    "/v1/responses": (wire.ResponsesRequest, {"model": "tiny", "input": "x"}),
}

# Words that the server gives a meaning to, so that random values get past the first checks.
words = st.sampled_from(
    ["", "x", "user", "assistant", "tool", "system", "text", "json_schema", "json_object", "auto",
     "required", "function", "message", "function_call", "function_call_output", "input_text"]
)  # fmt: skip
numbers = st.one_of(
    st.sampled_from([0, 1, -1, 2, 129, 2**31, 2**63, -(2**63), 10**40, 0.0, 0.5, 1e300, -1e-300]),
    st.integers(),
    st.floats(allow_nan=True, allow_infinity=True),
)
keys = st.sampled_from(
    ["role", "content", "type", "text", "name", "function", "parameters", "tool_calls", "arguments",
     "tool_call_id", "call_id", "output", "json_schema", "schema", "format", "include_usage", "5"]
)  # fmt: skip
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, words, st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.dictionaries(keys | words, inner, max_size=5)
    ),
    max_leaves=12,
)


def send(path: str, body: bytes, headers: Mapping[bytes, bytes] | None = None) -> tuple[int, bytes]:
    """Run the app on one request without a socket."""
    app = create_app(
        FakeGateway(answer),
        ServerSection(),
        Sources(lambda: 1, lambda: 1, lambda: "id", "test"),
    )
    head = {b"content-type": b"application/json", **(headers or {})}
    scope = {"type": "http", "method": "POST", "path": path, "headers": list(head.items())}
    seen: dict[str, Any] = {"status": 0, "body": b""}
    inbox = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return inbox.pop() if inbox else await asyncio.Event().wait()

    async def transmit(message: Any) -> None:
        seen["status"] = message.get("status", seen["status"])
        seen["body"] += message.get("body", b"")

    asyncio.run(app(scope, receive, transmit))
    return seen["status"], seen["body"]


def answer(call: Call):
    """Encode the call as the gateway's wire would, then answer it."""
    msgspec.msgpack.encode(call)
    return speak(call, "fine")


def check(status: int, body: bytes) -> None:
    assert status in {200, 400, 404}, (status, body)
    if status != 200:
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["param"], str)
        assert error["param"]


@pytest.mark.parametrize("path", PATHS)
@given(drawn=st.data())
def test_no_field_makes_the_server_fail(path, drawn):
    kind, body = PATHS[path]
    names = [field.encode_name for field in msgspec.structs.fields(kind)]
    changes = drawn.draw(st.dictionaries(st.sampled_from(names), values, max_size=3))
    sent = json.dumps({**body, **changes}).encode("utf-8", "surrogatepass")
    check(*send(path, sent))


@pytest.mark.parametrize("path", PATHS)
@given(drawn=st.data())
def test_no_broken_body_makes_the_server_fail(path, drawn):
    body = bytearray(json.dumps(PATHS[path][1]).encode())
    for _ in range(drawn.draw(st.integers(1, 4))):
        at = drawn.draw(st.integers(0, len(body) - 1))
        body[at : at + drawn.draw(st.integers(0, 3))] = drawn.draw(st.binary(max_size=4))
        if not body:
            break
    check(*send(path, bytes(body)))


@given(name=st.sampled_from([b"content-type", b"content-encoding", b"x-sluice-deadline-ms",
                             b"x-sluice-slo", b"x-request-id", b"authorization"]),
       value=st.binary(max_size=20))  # fmt: skip
def test_no_header_makes_the_server_fail(name, value):
    status, _ = send("/v1/chat/completions", b"{}", {name: value})
    assert status in {400, 401}


@given(path=st.text(max_size=20))
def test_no_path_makes_the_server_fail(path):
    status, _ = send("/" + path, b"{}")
    assert status in {403, 404, 405}
