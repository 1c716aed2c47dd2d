"""Bodies that are small in bytes or few in number and large in what they ask to be done."""

import asyncio
import json
import select
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from sluice.config.sections import ServerSection
from sluice.core.errors import InvalidRequest, Overloaded
from sluice.runtime.generation import ChatPrompt
from sluice.server.bodies import SMALL_BYTES_MAX, Account, Bodies
from sluice.server.limits import Limits
from sluice.server.structure import STRUCTURE_MAX, has_too_much
from sluice.server.wire import decode, decode_chat
from sluice.testing.gateway import FakeGateway, speak
from tests.server.wire_client import MESSAGES, ask, chat, connected, post, raw_post, read_until

USER = {"role": "user", "content": "a"}
CALL = {"function": {"name": "a", "arguments": "{}"}}
PART = {"type": "text", "text": "a"}


@pytest.fixture(scope="module")
def gateway():
    return FakeGateway(lambda call: speak(call, "ok"))


@pytest.fixture(scope="module")
def server(serve_module, gateway):
    return serve_module(gateway)


# ------------------------------------------------------------------------------------- bounds


def tool(number):
    return {"type": "function", "function": {"name": f"t{number}"}}


def many(count):
    return {f"k{number}": 1 for number in range(count)}


def texts(count):
    return dict.fromkeys(many(count), "")


def ids(count):
    return {str(number): 1 for number in range(count)}


@pytest.mark.parametrize(
    ("path", "param", "limit", "make"),
    [
        ("chat/completions", "messages", 10_000, lambda n: {"messages": [USER] * n}),
        ("chat/completions", "tools", 1000, lambda n: {"tools": [tool(i) for i in range(n)]}),
        (
            "chat/completions",
            "messages[0].tool_calls",
            1000,
            lambda n: {"messages": [{"role": "assistant", "tool_calls": [CALL] * n}]},
        ),
        (
            "chat/completions",
            "messages[0].content",
            1000,
            lambda n: {"messages": [{"role": "user", "content": [PART] * n}]},
        ),
        (
            "chat/completions",
            "chat_template_kwargs",
            1000,
            lambda n: {"chat_template_kwargs": many(n)},
        ),
        ("chat/completions", "logit_bias", 1024, lambda n: {"logit_bias": ids(n)}),
        ("chat/completions", "stop_token_ids", 1024, lambda n: {"stop_token_ids": [1] * n}),
        ("completions", "prompt", 128, lambda n: {"prompt": ["a"] * n}),
        ("completions", "prompt", 128, lambda n: {"prompt": [[1]] * n}),
        ("responses", "input", 10_000, lambda n: {"input": [USER] * n}),
        ("responses", "metadata", 1000, lambda n: {"input": "a", "metadata": texts(n)}),
    ],
)  # fmt: skip
def test_a_list_is_accepted_up_to_its_limit_and_refused_beyond(server, path, param, limit, make):
    base = {"model": "tiny", "messages": MESSAGES} if path.startswith("chat") else {"model": "tiny"}
    if path == "completions" and "prompt" not in make(1):
        base["prompt"] = "a"
    assert post(server, f"/v1/{path}", {**base, **make(limit)}).status == 200
    answer = post(server, f"/v1/{path}", {**base, **make(limit + 1)})
    assert answer.status == 400
    assert answer.error["param"] == param
    assert str(limit) in answer.error["message"]


@pytest.mark.parametrize("filler", ["[]", "{}", '{"a":1}', "[[1]]"])
def test_structure_without_end_is_refused_before_it_is_decoded(server, filler):
    items = ",".join([filler] * (STRUCTURE_MAX + 1))
    body = f'{{"model":"tiny","messages":[{{"role":"user","content":"a","x":[{items}]}}]}}'
    answer = post(server, "/v1/chat/completions", body.encode())
    assert answer.status == 400
    assert answer.error["param"] == "body"
    assert str(STRUCTURE_MAX) in answer.error["message"]


def test_text_is_no_structure():
    text = '{[: "quoted" \\ \\" ' * STRUCTURE_MAX
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": text}]}).encode()
    assert not has_too_much(body)
    assert decode(decode_chat, body).messages[0]["content"] == text


def test_structure_after_text_is_counted():
    text = json.dumps('\\" \\\\"' * 100_000)
    assert has_too_much(f'{{"a":{text},"b":[{"[]," * STRUCTURE_MAX}[]]}}'.encode())
    with pytest.raises(InvalidRequest, match=str(STRUCTURE_MAX)):
        decode(decode_chat, b"[" * (STRUCTURE_MAX + 1))


# ------------------------------------------------------------------------------------ threads


class CountingThreads(ThreadPoolExecutor):
    """Threads that count the work they were given."""

    given = 0

    def submit(self, *arguments, **options):
        self.given += 1
        return super().submit(*arguments, **options)


@pytest.mark.parametrize(("size", "at_a_time"), [(SMALL_BYTES_MAX + 1, 2), (1_000_000, 1)])
def test_large_bodies_are_understood_beside_the_event_loop_few_at_a_time(size, at_a_time):
    bodies = Bodies(Limits())
    go_on = threading.Event()

    def understand(body: bytes) -> threading.Thread:
        go_on.wait(10)
        return threading.current_thread()

    async def work() -> tuple[int, list[threading.Thread]]:
        threads = CountingThreads()
        asyncio.get_running_loop().set_default_executor(threads)
        body = b" " * size
        understood = asyncio.gather(*(bodies.understand(body, understand) for _ in range(6)))
        for _ in range(20):
            await asyncio.sleep(0)
        given = threads.given
        go_on.set()
        return given, await understood

    given, ran_in = asyncio.run(work())
    assert given == at_a_time
    assert len(ran_in) == 6
    assert threading.current_thread() not in ran_in


def test_a_small_body_is_understood_where_it_is():
    bodies = Bodies(Limits())
    seen = asyncio.run(bodies.understand(b"{}", lambda body: threading.current_thread()))
    assert seen is threading.current_thread()


def test_a_large_body_becomes_the_same_call(server, gateway):
    text = "x" * (2 * SMALL_BYTES_MAX)
    assert chat(server, messages=[{"role": "user", "content": text}]).status == 200
    call = gateway.recorded.calls[-1]
    assert isinstance(call.prompt, ChatPrompt)
    assert call.prompt.messages[0]["content"] == text
    assert call.body_bytes > len(text)


def test_a_large_body_that_is_wrong_is_refused_by_name(server):
    answer = chat(server, padding="x" * (2 * SMALL_BYTES_MAX), temperature=9)
    assert (answer.status, answer.error["param"]) == (400, "temperature")


# ------------------------------------------------------------------------------------- memory

SECTION = ServerSection(listen="127.0.0.1:0", body_bytes_max=400_000, bodies_bytes_max=500_000)


def test_bodies_are_bounded_together(serve_app):
    server = serve_app(FakeGateway(), SECTION)
    large = raw_post(padding="x" * 350_000)
    with connected(server) as first, connected(server) as second:
        first.sendall(large[:-1])
        second.sendall(large[:-1])
        answered, _, _ = select.select([first, second], [], [], 10)
        assert len(answered) == 1
        told = read_until(answered[0], b"}}")
        waiting = second if answered[0] is first else first
        assert told.startswith(b"HTTP/1.1 503 ")
        assert b'"code":"bodies"' in told
        assert b"retry-after: 1\r\n" in told
        assert chat(server).status == 200  # an ordinary body is not kept out
        waiting.sendall(large[-1:])
        assert read_until(waiting, b"\r\n").startswith(b"HTTP/1.1 200 ")
    for _ in range(3):
        assert chat(server, padding="x" * 350_000).status == 200


def test_a_body_that_is_given_up_frees_its_memory(serve_app):
    server = serve_app(FakeGateway(), SECTION)
    for _ in range(3):
        with connected(server) as opened:
            opened.sendall(raw_post(padding="x" * 350_000)[:-1])
        ask(server, "GET", "/health")
        assert chat(server, padding="x" * 350_000).status == 200


def test_an_account_gives_back_what_it_held():
    bodies = Bodies(Limits(bodies_bytes_max=100_000))
    with closing(Account(bodies)) as account:
        account.grow(SMALL_BYTES_MAX)
        assert bodies.held_bytes == 0
        account.grow(90_000)
        assert bodies.held_bytes == 90_000
        with closing(Account(bodies)) as other, pytest.raises(Overloaded):
            other.grow(90_000)
        assert bodies.held_bytes == 90_000
    assert bodies.held_bytes == 0
