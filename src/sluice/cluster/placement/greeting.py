"""How a gateway and a replica on another machine meet: a secret, and one clock for both.

The gateway connects and sends the secret that it was told on another way; the replica asks it a few
times for its clock and takes the answer that came soonest. Requests carry times of the gateway, so
the replica reads its own clock with that difference. Then the frames of ``channel`` follow. One who
does not know the secret is dropped and learns nothing. What is sent is not encrypted: it is meant
for the network inside a cluster.
"""

import asyncio
import hmac
import socket
import struct
from collections.abc import Callable

from sluice.cluster.channel import ChannelClosed, GatewayChannel

SECRET_BYTES = 32
_CLOCK = struct.Struct(">q")
_ASK, _ENOUGH = b"?", b"."
_ASKED = 5
# For the whole greeting; both ends answer at once.
GREETING_S_MAX = 5.0


async def greet(
    address: tuple[str, int], secret: bytes, clock: Callable[[], int]
) -> GatewayChannel:
    """Connect to a replica and tell it the time. Raises ``ChannelClosed`` where it does not work.

    ``clock`` gives the nanoseconds that requests carry.
    """
    writer: asyncio.StreamWriter | None = None
    greeted = False
    try:
        async with asyncio.timeout(GREETING_S_MAX):
            reader, writer = await asyncio.open_connection(*address, limit=1 << 20)
            writer.write(secret)
            while await reader.readexactly(1) == _ASK:
                writer.write(_CLOCK.pack(clock()))
            greeted = True
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        where = f"{address[0]}:{address[1]}"
        raise ChannelClosed(f"there is no talking to it at {where}: {error!r}") from error
    finally:
        if writer is not None and not greeted:
            writer.transport.abort()
    _watch_peer(writer.get_extra_info("socket"))
    return GatewayChannel(reader, writer)


def welcome(
    connection: socket.socket, secret: bytes, clock: Callable[[], int]
) -> Callable[[], int] | None:
    """Let a gateway in: the clock that it and its requests have, ``None`` for a stranger.

    ``clock`` is that of this machine.
    """
    connection.settimeout(GREETING_S_MAX)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        if not hmac.compare_digest(_exactly(connection, SECRET_BYTES), secret):
            return None
        asked = [_difference(connection, clock) for _ in range(_ASKED)]
        connection.sendall(_ENOUGH)
    except OSError:
        return None
    _watch_peer(connection)
    trip_ns, difference_ns = min(asked)
    # Of a gateway on the same machine the clock is the same, and the trip is all that was measured.
    if abs(difference_ns) <= trip_ns:
        return clock
    return lambda: clock() + difference_ns


def _difference(connection: socket.socket, clock: Callable[[], int]) -> tuple[int, int]:
    """How long the question took, and how far the gateway's clock is ahead of ours."""
    asked_ns = clock()
    connection.sendall(_ASK)
    (theirs_ns,) = _CLOCK.unpack(_exactly(connection, _CLOCK.size))
    answered_ns = clock()
    return answered_ns - asked_ns, theirs_ns - (asked_ns + answered_ns) // 2


def _exactly(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        chunk = connection.recv(count - len(received))
        if not chunk:
            raise ConnectionError("the other end closed the connection")
        received += chunk
    return received


def _watch_peer(connection: socket.socket) -> None:
    """Let the connection break within half a minute where the other machine is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 10),
        (socket.TCP_KEEPINTVL, 5),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, 25_000),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
