"""Answers on the wire: framing, and that no header can break out of a head."""

import asyncio
from types import SimpleNamespace

import pytest

from sluice.server.sending import Sender


class Flow:
    write_paused = False


def cycle_of(method: str = "POST", *, keep_alive: bool = True) -> SimpleNamespace:
    """What the sender uses of uvicorn's cycle; ``wire`` is what was written."""
    wire: list[bytes] = []
    done: list[bool] = []
    return SimpleNamespace(
        flow=Flow(),
        disconnected=False,
        response_started=False,
        response_complete=False,
        waiting_for_100_continue=False,
        default_headers=[(b"date", b"now")],
        keep_alive=keep_alive,
        scope={"method": method},
        transport=SimpleNamespace(write=wire.append, close=lambda: wire.append(b"<closed>")),
        message_event=asyncio.Event(),
        on_response=lambda: done.append(True),
        wire=wire,
        done=done,
    )


def send(cycle: SimpleNamespace, status: int, headers: list[tuple[bytes, bytes]], *bodies: bytes):
    async def run() -> None:
        sender = Sender(cycle)  # type: ignore[arg-type]
        await sender({"type": "http.response.start", "status": status, "headers": headers})
        for number, body in enumerate(bodies, 1):
            more = number < len(bodies)
            await sender({"type": "http.response.body", "body": body, "more_body": more})

    asyncio.run(run())
    return b"".join(cycle.wire)


def test_a_whole_answer_has_its_size_and_the_connection_is_kept():
    cycle = cycle_of()
    wire = send(cycle, 200, [(b"content-length", b"2")], b"{}")
    assert wire == b"HTTP/1.1 200 OK\r\ndate: now\r\ncontent-length: 2\r\n\r\n{}"
    assert (cycle.response_complete, cycle.done) == (True, [True])


def test_an_answer_without_a_size_comes_in_chunks_with_an_end():
    wire = send(cycle_of(), 200, [], b"one", b"", b"two", b"")
    head, _, body = wire.partition(b"\r\n\r\n")
    assert head.endswith(b"transfer-encoding: chunked")
    assert body == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"


def test_the_last_chunk_and_the_end_are_one():
    assert send(cycle_of(), 200, [], b"last").endswith(b"4\r\nlast\r\n0\r\n\r\n")


def test_a_head_without_a_body_has_neither_chunks_nor_body():
    assert b"chunked" not in send(cycle_of("HEAD"), 200, [], b"")
    assert send(cycle_of(), 204, [(b"content-length", b"0")], b"").endswith(b"\r\n\r\n")


def test_a_connection_that_is_not_kept_says_so_and_is_closed():
    wire = send(cycle_of(keep_alive=False), 200, [(b"content-length", b"0")], b"")
    assert b"\r\nconnection: close\r\n" in wire
    assert wire.endswith(b"<closed>")


@pytest.mark.parametrize("value", [b"a\r\nset-cookie: b", b"a\nb", b"a\rb", b"a\0b"])
def test_a_header_cannot_break_out_of_the_head(value):
    cycle = cycle_of()
    with pytest.raises(RuntimeError, match="line break"):
        send(cycle, 200, [(b"x-sluice-model", value)])
    assert cycle.wire == []


def test_nothing_is_written_to_a_client_that_is_gone():
    cycle = cycle_of()
    cycle.disconnected = True
    assert send(cycle, 200, [(b"content-length", b"2")], b"{}") == b""


def test_nothing_can_follow_a_complete_answer():
    cycle = cycle_of()
    cycle.response_started = cycle.response_complete = True
    with pytest.raises(RuntimeError, match="complete"):
        send(cycle, 200, [])


def test_a_whole_answer_is_written_at_once_as_its_messages_would_be():
    cycle = cycle_of()
    sender = Sender(cycle)  # type: ignore[arg-type]
    assert sender.is_free
    sender.answer(200, [(b"content-length", b"2")], b"{}")
    assert cycle.wire == [b"HTTP/1.1 200 OK\r\ndate: now\r\ncontent-length: 2\r\n\r\n{}"]
    assert (cycle.response_complete, cycle.done) == (True, [True])
    assert not sender.is_free


@pytest.mark.parametrize("state", ["disconnected", "response_started"])
def test_what_has_to_wait_or_is_gone_is_not_written_at_once(state):
    cycle = cycle_of()
    setattr(cycle, state, True)
    assert not Sender(cycle).is_free  # type: ignore[arg-type]


def test_nothing_is_written_at_once_while_the_client_does_not_read():
    cycle = cycle_of()
    cycle.flow.write_paused = True
    assert not Sender(cycle).is_free  # type: ignore[arg-type]
