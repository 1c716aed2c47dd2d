"""Who is given a connection, in which order, and what becomes of it when its caller has left."""

import asyncio

import pytest

from sluice.executors.http_pool import ConnectionLimits, ConnectionPool
from sluice.testing.engine_answers import ENGINE_ANSWERS
from sluice.testing.upstream import ScriptedUpstream
from tests.executors.stream_rig import run

VLLM = ENGINE_ANSWERS["vllm"]


def test_a_place_that_falls_to_a_caller_who_has_just_left_goes_to_the_next():
    async def check():
        async with ScriptedUpstream(VLLM.route()) as upstream:
            pool = ConnectionPool("up", upstream.address(), ConnectionLimits(connections_max=1))
            connection = await pool.acquire(1.0)
            connection._keep_alive = True  # as after an answer
            loop = asyncio.get_running_loop()
            first, second = (loop.create_task(pool.acquire(5.0)) for _ in range(2))
            await asyncio.sleep(0)
            pool.release(connection)
            first.cancel()
            async with asyncio.timeout(1.0):
                pool.release(await second)
            assert first.cancelled()
            await pool.close()

    run(check)


def test_who_waits_for_a_connection_is_not_overtaken_by_who_comes_when_it_is_free():
    async def check():
        async with ScriptedUpstream(VLLM.route()) as upstream:
            pool = ConnectionPool("up", upstream.address(), ConnectionLimits(connections_max=1))
            connection = await pool.acquire(1.0)
            connection._keep_alive = True  # as after an answer
            loop = asyncio.get_running_loop()
            served = []

            async def exchange(name):
                taken = await pool.acquire(5.0)
                served.append(name)
                pool.release(taken)

            waiting = [loop.create_task(exchange(name)) for name in ("first", "second")]
            await asyncio.sleep(0)
            pool.release(connection)
            await exchange("newcomer")
            await asyncio.gather(*waiting)
            assert upstream.connections == 1
            await pool.close()
            return served

    assert run(check) == ["first", "second", "newcomer"]


@pytest.mark.parametrize("kept", ["idle", "given back later"])
def test_at_the_bound_a_fresh_connection_is_not_another_kept_one(kept):
    async def check():
        async with ScriptedUpstream(VLLM.route()) as upstream:
            pool = ConnectionPool("up", upstream.address(), ConnectionLimits(connections_max=1))
            connection = await pool.acquire(1.0)
            connection._keep_alive = True  # as after an answer
            if kept == "idle":
                pool.release(connection)
            asked = asyncio.get_running_loop().create_task(pool.acquire_fresh(5.0))
            await asyncio.sleep(0)
            pool.release(connection)
            fresh = await asked
            assert fresh is not connection
            assert not connection.usable
            assert pool.open_connections == pool.in_use == 1
            pool.release(fresh)
            await pool.close()

    run(check)


def test_a_connection_that_closes_on_its_way_to_a_caller_is_replaced():
    async def check():
        async with ScriptedUpstream(VLLM.route()) as upstream:
            pool = ConnectionPool("up", upstream.address(), ConnectionLimits(connections_max=1))
            connection = await pool.acquire(1.0)
            connection._keep_alive = True  # as after an answer
            asked = asyncio.get_running_loop().create_task(pool.acquire(5.0))
            await asyncio.sleep(0)
            pool.release(connection)
            connection.break_off(ConnectionAbortedError())
            taken = await asked
            assert taken is not connection
            assert taken.usable
            assert pool.open_connections == pool.in_use == 1
            pool.release(taken)
            await pool.close()

    run(check)


def test_callers_that_leave_at_the_bound_leave_no_trace():
    async def check():
        async with ScriptedUpstream(VLLM.route()) as upstream:
            pool = ConnectionPool("up", upstream.address(), ConnectionLimits(connections_max=2))
            held = [await pool.acquire(1.0) for _ in range(2)]
            loop = asyncio.get_running_loop()
            calls = [pool.acquire_fresh, pool.acquire] * 4
            asked = [loop.create_task(call(5.0)) for call in calls]
            await asyncio.sleep(0)
            for connection in held:
                pool.release(connection)
            await asyncio.sleep(0)
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            both = await asyncio.gather(pool.acquire(1.0), pool.acquire(1.0))
            assert pool.open_connections == pool.in_use == 2
            for connection in both:
                pool.release(connection)
            await pool.close()
            assert pool.open_connections == 0

    run(check)
