"""Framed messages between the gateway and a replica process, over one Unix socket pair.

A frame is a four-byte big-endian length and one msgpack document: a list of messages. This module
moves frames; what the messages mean is decided by its two users. A peer that sends what cannot be
decoded, or more than ``FRAME_BYTES_MAX``, is treated as gone.
"""

import asyncio
import math
import select
import socket
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from sluice.runtime.messages import FromReplica, ToReplica

_LENGTH = struct.Struct(">I")
FRAME_BYTES_MAX = 64 << 20
# How long a replica waits for the gateway to read. The gateway only parses and hands on, so a
# buffer that stays full means that its process is stopped or dead.
_SEND_WAIT_S = 30.0
_SOCKET_BUFFER_BYTES = 1 << 20


class ChannelClosed(Exception):
    """The other process closed the channel, broke the framing or stopped reading."""


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return the gateway's end and the replica's end of a new channel."""
    gateway, replica = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in (gateway, replica):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
    return gateway, replica


class ReplicaChannel:
    """The replica's end: plain blocking calls for a loop of one thread."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.settimeout(0)
        # ``poll``, not ``select``: the number of the descriptor comes from the gateway, which may
        # have thousands open.
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(end, select.POLLIN)
        self._writable.register(end, select.POLLOUT)
        self._received = bytearray()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[ToReplica])

    def receive(self, wait_s: float) -> list[ToReplica]:
        """Return the messages that have come, waiting up to ``wait_s`` for the first.

        Raises ``ChannelClosed`` where the gateway is gone.
        """
        if not self._readable.poll(math.ceil(wait_s * 1000)):
            return []
        self._read()
        return self._take_messages()

    def send(self, messages: Sequence[FromReplica]) -> None:
        """Send one frame. Raises ``ChannelClosed`` where the gateway is gone or does not read."""
        body = self._encoder.encode(messages)
        unsent = memoryview(_LENGTH.pack(len(body)) + body)
        while unsent:
            try:
                unsent = unsent[self._socket.send(unsent) :]
            except BlockingIOError:
                if not self._writable.poll(math.ceil(_SEND_WAIT_S * 1000)):
                    raise ChannelClosed("the gateway does not read") from None
            except OSError as error:
                raise ChannelClosed(str(error)) from error

    def _read(self) -> None:
        while True:
            try:
                chunk = self._socket.recv(_SOCKET_BUFFER_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not chunk:
                raise ChannelClosed("the gateway closed the channel")
            self._received += chunk
            if len(chunk) < _SOCKET_BUFFER_BYTES:
                return

    def _take_messages(self) -> list[ToReplica]:
        messages: list[ToReplica] = []
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            end = _LENGTH.size + _checked(length)
            if len(self._received) < end:
                break
            messages += self._decode(bytes(self._received[_LENGTH.size : end]))
            del self._received[:end]
        return messages

    def _decode(self, body: bytes) -> list[ToReplica]:
        try:
            return self._decoder.decode(body)
        except msgspec.DecodeError as error:
            raise ChannelClosed(f"undecodable frame: {error}") from error


class GatewayChannel:
    """The gateway's end: reads in asyncio, writes without waiting.

    Writes go to the transport's buffer. Over ``WRITE_BYTES_MAX`` in it the replica is taken as
    hung: a live one reads between any two steps.
    """

    WRITE_BYTES_MAX = 256 << 20

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[FromReplica])

    @classmethod
    async def over(cls, end: socket.socket) -> "GatewayChannel":
        """Take over the socket."""
        end.settimeout(0)
        reader, writer = await asyncio.open_unix_connection(sock=end, limit=_SOCKET_BUFFER_BYTES)
        return cls(reader, writer)

    async def receive(self) -> list[FromReplica]:
        """Wait for the next frame. Raises ``ChannelClosed`` where the replica is gone."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            body = await self._reader.readexactly(_checked(length))
            return self._decoder.decode(body)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise ChannelClosed("the replica closed the channel") from error
        except msgspec.DecodeError as error:
            raise ChannelClosed(f"undecodable frame: {error}") from error

    def send_nowait(self, message: ToReplica) -> None:
        """Queue a message. Raises ``ChannelClosed`` where the replica is gone or does not read."""
        transport: Any = self._writer.transport
        if transport.is_closing():
            raise ChannelClosed("the replica closed the channel")
        if transport.get_write_buffer_size() > self.WRITE_BYTES_MAX:
            raise ChannelClosed("the replica does not read")
        body = self._encoder.encode([message])
        self._writer.write(_LENGTH.pack(len(body)) + body)

    def abort(self) -> None:
        """Close at once, dropping what is unsent; safe to call twice.

        ``receive`` then raises ``ChannelClosed``. There is no way to wait for what is unsent: a
        replica that hangs would never read it.
        """
        self._writer.transport.abort()


def _checked(length: int) -> int:
    if length > FRAME_BYTES_MAX:
        raise ChannelClosed(f"a frame of {length} bytes is over the limit of {FRAME_BYTES_MAX}")
    return length
