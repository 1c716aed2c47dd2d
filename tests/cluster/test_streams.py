"""Pieces on their way to a client: order, joining when the reader is behind, one cancel."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.core.errors import Overloaded
from sluice.core.request import EndReason, PhaseTimes, Rung, Usage
from sluice.runtime.generation import ChoiceEnded, Delta, Finished
from sluice.runtime.streams import PENDING_PIECES_MAX, PieceStream

END = Finished(EndReason.STOP, Usage(1, 0, 1), PhaseTimes())


def stream(cancelled: list[int] | None = None) -> PieceStream:
    return PieceStream("tiny", "", lambda: (cancelled if cancelled is not None else []).append(1))


async def read(source: PieceStream):
    return [piece async for piece in source]


def test_a_reader_that_keeps_up_gets_every_piece_as_it_was_put():
    async def work() -> None:
        source = stream()
        seen = []

        async def reader() -> None:
            async for piece in source:
                seen.append(piece)  # noqa: PERF401 - seen while it is filled

        reading = asyncio.create_task(reader())
        for number in range(200):
            source.put(Delta(0, str(number), 1))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        source.put(END)
        await reading
        assert [p.text for p in seen if isinstance(p, Delta)] == [str(n) for n in range(200)]
        assert seen[-1] is END

    asyncio.run(work())


@given(
    st.lists(st.tuples(st.integers(0, 3), st.text(max_size=3)), max_size=300),
    st.lists(st.integers(0, 200), max_size=20),
)
def test_joining_keeps_the_text_tokens_and_order_of_each_choice(texts, reads):
    async def work() -> None:
        source = stream()
        seen = []
        waits = iter(reads)
        for choice, text in texts:
            source.put(Delta(choice, text, 1))
            assert len(source._pending) <= PENDING_PIECES_MAX
            if next(waits, 1) == 0:
                seen.append(await anext(source))
        for choice in range(4):
            source.put(ChoiceEnded(choice, "stop"))
        source.put(END)
        seen += await read(source)
        for choice in range(4):
            mine = [p for p in seen if isinstance(p, Delta) and p.choice == choice]
            assert "".join(p.text for p in mine) == "".join(t for c, t in texts if c == choice)
            assert sum(p.tokens for p in mine) == sum(1 for c, _ in texts if c == choice)
            ends = [i for i, p in enumerate(seen) if p == ChoiceEnded(choice, "stop")]
            assert len(ends) == 1
            assert all(seen.index(piece) < ends[0] for piece in mine)

    asyncio.run(work())


def test_what_waits_for_a_stalled_reader_is_bounded():
    source = stream()
    for number in range(1000):
        source.put(Delta(number % 2, "x", 1))
        assert len(source._pending) <= PENDING_PIECES_MAX
    source.put(END)
    seen = asyncio.run(read(source))
    assert sum(p.tokens for p in seen if isinstance(p, Delta)) == 1000


def test_pieces_after_the_end_are_dropped():
    source = stream()
    source.put(END)
    source.put(Delta(0, "late", 1))
    assert asyncio.run(read(source)) == [END]


def test_cancelling_is_told_once_and_never_after_the_end():
    cancelled: list[int] = []
    source = stream(cancelled)
    source.put(Delta(0, "x", 1))
    source.cancel()
    source.cancel()
    source.put(Delta(0, "y", 1))
    assert (cancelled, asyncio.run(read(source))) == ([1], [])
    over = stream(cancelled)
    over.put(END)
    over.cancel()
    assert (cancelled, asyncio.run(read(over))) == ([1], [END])


def test_a_refusal_reaches_a_waiting_reader():
    async def work() -> None:
        source = stream()
        reading = asyncio.create_task(read(source))
        await asyncio.sleep(0)
        source.refuse(
            Overloaded("x", status=429, reason="r", measured=1, threshold=1, retry_after_s=1)
        )
        with pytest.raises(Overloaded):
            await reading
        source.refuse(ValueError("only the first counts"))
        with pytest.raises(Overloaded):
            source.raise_refusal()

    asyncio.run(work())


def test_a_cancelled_wait_loses_nothing():
    async def work() -> None:
        source = stream()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await anext(source)
        source.put(END)
        assert await read(source) == [END]

    asyncio.run(work())


@pytest.mark.parametrize("news", ["dispatched", "put", "refuse", "cancel"])
def test_a_stream_is_settled_once_a_replica_has_it_or_it_is_over(news):
    async def work() -> None:
        source = stream()
        waiting = asyncio.create_task(source.settled())
        await asyncio.sleep(0)
        source.retargeted("small", Rung.SMALLER)
        source.shortened(5)
        await asyncio.sleep(0)
        assert not waiting.done()
        match news:
            case "dispatched":
                source.dispatched("small-0")
            case "put":
                source.put(END)
            case "refuse":
                source.refuse(KeyError("full"))
            case "cancel":
                source.cancel()
        if news == "refuse":
            with pytest.raises(KeyError):
                await waiting
        else:
            await asyncio.wait_for(waiting, 1)
            await source.settled()
        assert (source.model, source.terms.model_asked) == ("small", "tiny")
        assert source.terms.degraded == (Rung.SMALLER, Rung.SHORTEN)
        assert source.terms.output_tokens_max == 5

    asyncio.run(work())
