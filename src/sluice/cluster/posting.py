"""``retrieval``'s ``Post`` over the client of remote engines: bounded, within a deadline.

What an answer means is decided in ``retrieval/http_service``; how bytes travel, in ``executors``.
"""

from sluice.executors.remote import RemoteEngine
from sluice.executors.stream import ConnectFailed, Deadlines, UpstreamError, UpstreamRequest
from sluice.retrieval.passages import RetrievalFailed, RetrievalLate

# A hundred passages of ten thousand characters; more is not what was asked for.
ANSWER_BYTES_MAX = 1024**2


class EnginePost:
    """Posts to one path of one address. ``engine`` is its own; it is closed with it."""

    def __init__(self, engine: RemoteEngine, path: str) -> None:
        self._engine, self._path = engine, path

    async def __call__(self, body: bytes, within_s: float) -> bytes:
        """The body of a 2xx answer. Raises ``RetrievalFailed``."""
        if within_s <= 0:
            raise RetrievalLate("no time was left")
        request = UpstreamRequest(
            "",
            self._path,
            body,
            headers=(("x-sluice-deadline-ms", str(max(1, int(within_s * 1000)))),),
            streamed=False,
            any_body=True,
            deadlines=Deadlines(connect_s=within_s, whole_s=within_s),
        )
        try:
            async with await self._engine.open(request) as answer:
                return b"".join([chunk.raw async for chunk in answer])
        except ConnectFailed as error:
            raise RetrievalFailed(error.message) from error
        except UpstreamError as error:
            # The rest of its words may be the service's own.
            status = "" if error.reply is None else f", status {error.reply.status}"
            raise RetrievalFailed(f"{type(error).__name__}{status}") from error

    async def close(self) -> None:
        """Close its connections."""
        await self._engine.close()
