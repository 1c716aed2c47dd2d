"""Frames between the two processes: whole, in order, and an end where they are not."""

import asyncio
import os
import resource
import socket
import struct
import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.cluster import channel as channels
from sluice.cluster.channel import ChannelClosed, GatewayChannel, ReplicaChannel, socket_pair
from sluice.core.request import Request
from sluice.core.sampling import Sampling
from sluice.runtime.generation import Delta
from sluice.runtime.messages import Cancel, DrainDone, Submit, Text
from sluice.runtime.output import OutputRules

SUBMIT = Submit(
    Request("r", 5, tuple(range(2000)), 7, choices=2, deadline_ns=None),
    Sampling(temperature=0.5, logit_bias={3: -1.5}, seed=9),
    OutputRules(stop=("a", "é"), visible_tokens=(4,)),
    grammar="start: x",
)


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def test_messages_cross_unchanged_both_ways():
    async def work() -> None:
        ours, theirs = socket_pair()
        gateway, replica = await GatewayChannel.over(ours), ReplicaChannel(theirs)
        gateway.send_nowait(SUBMIT)
        gateway.send_nowait(Cancel("r"))
        got: list[object] = []
        while len(got) < 2:
            got += replica.receive(0.0)
            await asyncio.sleep(0)
        assert got == [SUBMIT, Cancel("r")]
        text = Text("r", Delta(1, "naïve\x00", 3))
        replica.send([text, DrainDone()])
        assert await gateway.receive() == [text, DrainDone()]
        gateway.abort()
        gateway.abort()
        await asyncio.sleep(0)
        with pytest.raises(ChannelClosed):
            replica.receive(5.0)
        with pytest.raises(ChannelClosed):
            replica.send([DrainDone()])
        theirs.close()

    asyncio.run(work())


@given(st.lists(st.integers(1, 400), max_size=30))
def test_frames_are_put_together_from_any_pieces(cuts):
    ours, theirs = socket_pair()
    with ours, theirs:
        replica = ReplicaChannel(theirs)
        sent = [Cancel(str(number)) for number in range(12)]
        raw = b"".join(frame(msgspec.msgpack.encode([one])) for one in sent)
        got: list[object] = []
        for cut in [*cuts, len(raw)]:
            part, raw = raw[:cut], raw[cut:]
            if part:
                ours.sendall(part)
                got += replica.receive(1.0)
        assert got == sent


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (frame(b"\xc1garbage"), "undecodable"),
        (frame(msgspec.msgpack.encode([["Submit", 1]])), "undecodable"),
        (frame(msgspec.msgpack.encode({"a": 1})), "undecodable"),
        (struct.pack(">I", channels.FRAME_BYTES_MAX + 1), "over the limit"),
    ],
)
def test_a_peer_that_talks_nonsense_is_gone(raw, words):
    ours, theirs = socket_pair()
    with ours, theirs:
        ours.sendall(raw)
        with pytest.raises(ChannelClosed, match=words):
            ReplicaChannel(theirs).receive(1.0)

    async def work() -> None:
        left, right = socket_pair()
        gateway = await GatewayChannel.over(left)
        with right:
            right.sendall(raw)
            with pytest.raises(ChannelClosed, match=words):
                await gateway.receive()
        gateway.abort()

    asyncio.run(work())


def test_half_a_frame_is_no_message_and_the_end_after_it_is_the_end():
    ours, theirs = socket_pair()
    with theirs:
        replica = ReplicaChannel(theirs)
        ours.sendall(frame(msgspec.msgpack.encode([Cancel("r")]))[:-1])
        assert replica.receive(1.0) == []
        ours.close()
        with pytest.raises(ChannelClosed, match="closed"):
            replica.receive(1.0)


def test_a_replica_waits_for_a_gateway_that_reads_slowly():
    ours, theirs = socket_pair()
    with ours, theirs:
        replica = ReplicaChannel(theirs)
        text = Text("r", Delta(0, "x" * (6 << 20), 1))
        sender = threading.Thread(target=replica.send, args=([text],))
        sender.start()
        received = b""
        while len(received) < 4 or len(received) < 4 + struct.unpack(">I", received[:4])[0]:
            received += ours.recv(1 << 20)
        sender.join()
        assert msgspec.msgpack.decode(received[4:], type=list[Text]) == [text]


def test_a_gateway_that_never_reads_is_gone(monkeypatch):
    monkeypatch.setattr(channels, "_SEND_WAIT_S", 0.01)
    ours, theirs = socket_pair()
    with ours, theirs, pytest.raises(ChannelClosed, match="does not read"):
        ReplicaChannel(theirs).send([Text("r", Delta(0, "x" * (6 << 20), 1))])


def test_a_replica_that_never_reads_is_gone(monkeypatch):
    monkeypatch.setattr(GatewayChannel, "WRITE_BYTES_MAX", 1 << 20)

    async def work() -> None:
        ours, theirs = socket_pair()
        gateway = await GatewayChannel.over(ours)
        while gateway._writer.transport.get_write_buffer_size() <= gateway.WRITE_BYTES_MAX:
            gateway.send_nowait(SUBMIT)
        with theirs, pytest.raises(ChannelClosed, match="does not read"):
            gateway.send_nowait(SUBMIT)
        gateway.abort()
        with pytest.raises(ChannelClosed):
            await gateway.receive()

    asyncio.run(work())


def test_a_channel_works_beyond_the_thousandth_descriptor():
    """The number comes from the gateway, which may hold thousands of connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("this machine does not allow so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    ours, theirs = socket_pair()
    high = os.dup2(theirs.fileno(), 2000, inheritable=False)
    theirs.close()
    with ours, socket.socket(fileno=high) as end:
        replica = ReplicaChannel(end)
        ours.sendall(frame(msgspec.msgpack.encode([Cancel("r")])))
        assert replica.receive(1.0) == [Cancel("r")]
        replica.send([DrainDone()])
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
