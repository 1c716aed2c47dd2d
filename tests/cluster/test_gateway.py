"""What becomes of calls: answered, refused, cancelled, lost, drained; and nothing stays behind."""

import asyncio
from typing import Any

import pytest

from sluice.cluster.served import ServedModel
from sluice.core.errors import (
    InternalError,
    InvalidRequest,
    ModelLoadError,
    ModelNotFound,
    Overloaded,
)
from sluice.core.request import EndReason
from sluice.core.roster import BatchingLimits
from sluice.runtime.generation import Call, ChoiceEnded, Delta, Fault
from sluice.runtime.messages import LoadFailed, Submit
from tests.cluster.rig import Rig, ending, in_virtual_time, pieces, served_model, text_of

ONE_SLOT = BatchingLimits(400, 4, 100, sequences_max=1)


def test_a_call_is_answered_and_nothing_is_held_afterwards():
    async def work() -> None:
        rig = Rig()
        await rig.gateway.start()
        seen = await pieces(await rig.generate(output=3, choices=2))
        assert [p.tokens for p in seen if isinstance(p, Delta) and p.choice == 1] == [1, 1, 1]
        assert [p for p in seen if isinstance(p, ChoiceEnded)] == [
            ChoiceEnded(0, "length"),
            ChoiceEnded(1, "length"),
        ]
        assert rig.value("generated_tokens_total") == 6
        rig.check_empty()
        await rig.gateway.close()

    in_virtual_time(work)


def test_an_id_that_is_in_use_is_a_bug_and_disturbs_nothing():
    async def work() -> None:
        rig = Rig()
        await rig.gateway.start()
        stream = await rig.generate("same", output=4)
        with pytest.raises(InternalError, match="in use"):
            await rig.generate("same", output=4)
        assert (await ending(stream)).reason is EndReason.LENGTH
        rig.check_empty()

    in_virtual_time(work)


def test_an_unknown_model_is_told_with_those_that_exist():
    async def work() -> None:
        rig = Rig()
        await rig.gateway.start()
        call = Call(id="x", model="gpt-9", arrived_ns=0, prompt=rig.call().prompt)
        route: Any = None  # only its name is told
        rig.gateway.routes = {"auto": route}
        with pytest.raises(ModelNotFound, match="available: auto, tiny"):
            await rig.gateway.generate(call)
        rig.gateway.routes = {}
        assert rig.value("refusals_total", "other", "model_not_found") == 1
        rig.check_empty()

    in_virtual_time(work)


class FullOfSchemas(ServedModel):
    """Has too many schemas to check."""

    async def submit(self, call: Call) -> Submit:
        raise Overloaded(
            "later", status=429, reason="queue_full", measured=8, threshold=8, retry_after_s=2
        )


def test_a_call_that_is_turned_away_before_admission_is_counted():
    async def work() -> None:
        rig = Rig(served=served_model(FullOfSchemas))
        await rig.gateway.start()
        with pytest.raises(Overloaded):
            await rig.generate("a")
        assert rig.value("refusals_total", "tiny", "queue_full") == 1
        rig.check_empty()

    in_virtual_time(work)


def test_a_client_that_leaves_while_its_prompt_is_tokenised_has_one_ending():
    async def work() -> None:
        rig = Rig(served=served_model(SlowTokenising))
        await rig.gateway.start()
        task = asyncio.get_running_loop().create_task(rig.generate("left"))
        await asyncio.sleep(0.4)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert rig.counts("requests_total") == {("tiny",): 1}
        assert rig.counts("requests_ended_total") == {("tiny", "cancelled"): 1}
        assert rig.value("phase_seconds_total", "tiny", "admission") == pytest.approx(0.4)
        rig.check_empty()

    in_virtual_time(work)


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_a_cancelled_call_frees_its_blocks_after_the_running_step(steps_before):
    async def work() -> None:
        rig = Rig(limits=ONE_SLOT)
        await rig.gateway.start()
        left = await rig.generate("left", output=300)
        follower = await rig.generate("follower", output=2)
        await asyncio.sleep(0.1 * steps_before + 0.05)
        left.cancel()
        left.cancel()
        start = asyncio.get_running_loop().time()
        assert (await ending(follower)).reason is EndReason.LENGTH
        # The running step, one of prefill, one of decode.
        assert asyncio.get_running_loop().time() - start < 0.26
        rig.check_empty()
        assert rig.value("requests_ended_total", "cancelled") == 1

    in_virtual_time(work)


def test_d06_calls_cancelled_while_queued_cost_nothing():
    async def work() -> None:
        rig = Rig(limits=ONE_SLOT)
        await rig.gateway.start()
        first = await rig.generate("A", output=50)
        ghosts = [await rig.generate(name, prompt=40, output=50) for name in "BCD"]
        last = await rig.generate("E", prompt=20, output=1)
        assert rig.value("requests_waiting") == 4
        for ghost in ghosts:
            ghost.cancel()
        assert rig.value("requests_waiting") == 1
        assert rig.value("requests_ended_total", "cancelled") == 3
        await ending(first)
        a_ended = asyncio.get_running_loop().time()
        await ending(last)
        assert asyncio.get_running_loop().time() - a_ended < 0.15
        assert rig.value("prompt_tokens_total") == 10 + 20
        rig.check_empty()

    in_virtual_time(work)


def test_d07_a_full_queue_refuses_and_the_advice_follows_the_expected_wait():
    advice = []

    async def work(step_s: float) -> None:
        rig = Rig(limits=ONE_SLOT, queue_places=2, step_s=lambda plan: step_s)
        await rig.gateway.start()
        await ending(await rig.generate("first", output=10))
        streams, refusals = [], []
        for number in range(10):
            try:
                streams.append(await rig.generate(f"r{number}", output=10))
            except Overloaded as refusal:
                refusals.append(refusal)
        assert (len(streams), len(refusals)) == (3, 7)
        assert {(one.status, one.reason, one.threshold) for one in refusals} == {
            (429, "queue_full", 3)
        }
        assert all(one.retry_after_s and one.retry_after_s > 0 for one in refusals)
        advice.append(refusals[0].retry_after_s or 0.0)
        for stream in streams:
            await ending(stream)
        rig.check_empty()
        with pytest.raises(Overloaded):
            await asyncio.gather(*(rig.generate(f"n{n}", output=10, choices=1) for n in range(4)))

    in_virtual_time(lambda: work(0.2))
    in_virtual_time(lambda: work(0.4))
    assert advice[1] > 1.5 * advice[0]


class CountingWork(ServedModel):
    """Counts the calls that it tokenises."""

    tokenised = 0

    async def submit(self, call: Call) -> Submit:
        self.tokenised += 1
        return await super().submit(call)


def test_what_is_refused_whatever_it_says_is_not_tokenised_and_is_counted():
    async def work() -> None:
        served = served_model(CountingWork)
        assert isinstance(served, CountingWork)
        rig = Rig(limits=ONE_SLOT, queue_places=1, served=served)
        starting = asyncio.create_task(rig.gateway.start())
        with pytest.raises(Overloaded, match="No replica"):
            await rig.generate("early")
        await starting
        running = [await rig.generate(name, output=50) for name in "ab"]
        with pytest.raises(Overloaded) as caught:
            await rig.generate("c")
        assert (caught.value.reason, caught.value.measured) == ("queue_full", 3)
        assert caught.value.retry_after_s
        # More choices than can ever run: not a matter of waiting, full queue or not.
        with pytest.raises(InvalidRequest, match="n is 3"):
            await rig.generate("d", choices=3)
        draining = asyncio.create_task(rig.gateway.drain(30.0))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="shutting down"):
            await rig.generate("late")
        assert served.tokenised == 3  # a, b and d
        for reason in ("not_ready", "queue_full", "draining"):
            assert rig.value("refusals_total", reason) == 1
        assert rig.value("requests_total") == 6
        for stream in running:
            await ending(stream)
        await draining
        rig.check_empty()

    in_virtual_time(work)


def test_d07_each_choice_takes_a_place():
    async def work() -> None:
        rig = Rig(queue_places=2)  # 4 run and 2 wait
        await rig.gateway.start()
        for name in "ab":
            await rig.generate(name, output=20, choices=2)
        with pytest.raises(Overloaded) as caught:
            await rig.generate("three", output=2, choices=3)
        assert (caught.value.measured, caught.value.threshold) == (7, 6)
        await rig.generate("two", output=2, choices=2)
        await rig.gateway.close()
        rig.check_empty()

    in_virtual_time(work)


def test_a_call_that_waits_too_long_is_refused_in_its_stream():
    async def work() -> None:
        rig = Rig(limits=ONE_SLOT, queue_wait_s=2.0)
        await rig.gateway.start()
        first = await rig.generate("first", output=100)
        late = await rig.generate("late")
        with pytest.raises(Overloaded) as caught:
            await pieces(late)
        assert caught.value.reason == "queue_deadline"
        assert asyncio.get_running_loop().time() == pytest.approx(2.0, abs=0.01)
        late.cancel()
        assert (await ending(first)).reason is EndReason.LENGTH
        rig.check_empty()

    in_virtual_time(work)


def test_a_call_without_text_survives_its_replica_and_one_with_text_ends_with_an_error():
    async def work() -> None:
        rig = Rig(limits=ONE_SLOT)
        await rig.gateway.start()
        begun = await rig.generate("begun", output=50)
        waiting = await rig.generate("waiting", output=5)
        await asyncio.sleep(0.35)
        rig.process.crash("ended by SIGKILL")
        failed = await ending(begun)
        assert (failed.reason, failed.fault) == (EndReason.FAILED, Fault.REPLICA)
        assert "ended by SIGKILL" in failed.error
        with pytest.raises(Overloaded, match="No replica"):
            await rig.generate("meanwhile")
        assert (await ending(waiting)).reason is EndReason.LENGTH
        assert rig.process.starts == 2
        rig.check_empty()

    in_virtual_time(work)


def test_a_call_in_prefill_is_computed_again_by_the_restarted_replica():
    async def work() -> None:
        rig = Rig()
        await rig.gateway.start()
        undisturbed = text_of(await pieces(await rig.generate("a", output=5)))
        stream = await rig.generate("a", output=5)
        await asyncio.sleep(0.05)
        rig.process.crash()
        assert text_of(await pieces(stream)) == undisturbed
        rig.check_empty()

    in_virtual_time(work)


def test_a_cancelled_call_whose_replica_is_lost_has_an_ending_too():
    async def work() -> None:
        rig = Rig()
        await rig.gateway.start()
        stream = await rig.generate("a", output=50)
        await asyncio.sleep(0.25)
        rig.process.deaf = True
        stream.cancel()
        assert rig.driver.busy("tiny-0")
        rig.process.crash()
        rig.check_empty()
        assert rig.value("requests_ended_total", "cancelled") == 1

    in_virtual_time(work)


def test_a_replica_that_always_crashes_becomes_visible_and_its_calls_end():
    async def work() -> None:
        rig = Rig()
        await rig.gateway.start()
        poison = await rig.generate("poison", output=50)
        for _ in range(5):
            await rig.until(lambda: rig.process.replica is not None)
            rig.process.crash()
        # Two lost replicas are enough to give a request up: it may be the cause.
        assert (await ending(poison)).reason is EndReason.FAILED
        assert rig.gateway.readiness().replicas[0].state == "crash_loop"
        assert "no replica serves tiny" in rig.gateway.readiness().reason
        rig.check_empty()

    in_virtual_time(work)


# -------------------------------------------------------------------------------- start and end


@pytest.mark.parametrize("permanent", [True, False])
def test_a_model_that_cannot_be_loaded_fails_the_start_with_its_words(permanent):
    async def work() -> None:
        rig = Rig()
        starting = asyncio.create_task(rig.gateway.start())
        process = rig.process
        process._load_s = 5.0
        await asyncio.sleep(1.0)
        process.tell(LoadFailed("weights are cut short", permanent))
        process.crash("exit status 0")
        with pytest.raises(ModelLoadError, match="weights are cut short"):
            await starting

    in_virtual_time(work)


@pytest.mark.parametrize(("permanent", "starts"), [(True, 2), (False, 3)])
def test_a_restart_that_fails_for_good_is_not_tried_again(permanent, starts):
    async def work() -> None:
        rig = Rig()
        await rig.gateway.start()
        rig.process._load_s = 5.0
        rig.process.crash()
        await rig.until(lambda: rig.process.starts == 2)
        rig.process.tell(LoadFailed("no memory", permanent))
        rig.process.crash("exit status 0")
        assert "no memory" in rig.gateway.readiness().reason
        await asyncio.sleep(60)
        assert rig.process.starts == starts
        assert rig.gateway.readiness().ready is not permanent
        if not permanent:
            # What was wrong with an earlier start does not explain a later loss.
            rig.process.crash("ended by SIGSEGV")
            assert "ended by SIGSEGV" in rig.gateway.readiness().reason
        await rig.gateway.close()

    in_virtual_time(work)


def test_a_drain_lets_calls_finish_and_admits_none():
    async def work() -> None:
        rig = Rig()
        await rig.gateway.start()
        stream = await rig.generate("a", output=20)
        draining = asyncio.create_task(rig.gateway.drain(30.0))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as caught:
            await rig.generate("b")
        assert (caught.value.status, caught.value.reason) == (503, "draining")
        assert not rig.gateway.readiness().ready
        assert (await ending(stream)).reason is EndReason.LENGTH
        await draining
        assert asyncio.get_running_loop().time() < 3
        rig.check_empty()

    in_virtual_time(work)


def test_calls_that_outlast_the_grace_period_end_with_one_error():
    async def work() -> None:
        rig = Rig(limits=ONE_SLOT)
        await rig.gateway.start()
        running, waiting = [await rig.generate(name, output=300) for name in "ab"]
        await rig.gateway.drain(2.0)
        assert asyncio.get_running_loop().time() == pytest.approx(2.0, abs=0.3)
        ended = await ending(running)
        assert ended.reason is EndReason.SHUTDOWN
        assert ended.error
        assert (await ending(waiting)).reason is EndReason.SHUTDOWN
        await rig.gateway.close()
        rig.check_empty()

    in_virtual_time(work)


def test_a_hung_replica_does_not_hold_up_a_drain():
    async def work() -> None:
        rig = Rig()
        await rig.gateway.start()
        stream = await rig.generate("a", output=50)
        await asyncio.sleep(0.25)
        rig.process.deaf = True
        rig.process._end()
        stream.cancel()
        await rig.gateway.drain(2.0)
        assert asyncio.get_running_loop().time() < 4
        await rig.gateway.close()
        rig.check_empty()

    in_virtual_time(work)


def test_closing_ends_what_still_lives():
    async def work() -> None:
        rig = Rig()
        await rig.gateway.start()
        stream = await rig.generate("a", output=50)
        await asyncio.sleep(0.25)
        await rig.gateway.close()
        assert (await ending(stream)).reason is EndReason.SHUTDOWN
        rig.check_empty()

    in_virtual_time(work)


def test_calls_spread_over_replicas_and_move_when_one_is_lost():
    async def work() -> None:
        rig = Rig(limits=ONE_SLOT, replicas=2)
        await rig.gateway.start()
        await rig.until(
            lambda: all(one.state == "ready" for one in rig.gateway.readiness().replicas)
        )
        streams = [await rig.generate(name, output=5) for name in "ab"]
        assert {stream.replica for stream in streams} == {"tiny-0", "tiny-1"}
        rig.processes[streams[0].replica].crash()
        assert rig.gateway.readiness().ready
        for stream in streams:
            assert (await ending(stream)).reason is EndReason.LENGTH
        rig.check_empty()

    in_virtual_time(work)


def test_a_call_on_board_of_a_replica_that_fell_silent_ends():
    async def work() -> None:
        rig = Rig(limits=ONE_SLOT)
        await rig.gateway.start()
        stream = await rig.generate("a", output=5)
        rig.process.crash("silent for 30 s", silent=True)
        assert (await ending(stream)).reason is EndReason.FAILED
        rig.check_empty()

    in_virtual_time(work)


def test_a_call_that_cannot_be_sent_ends_and_those_behind_it_are_served():
    async def work() -> None:
        rig = Rig(limits=ONE_SLOT)
        await rig.gateway.start()
        send = rig.process.send

        def refusing(message: object) -> None:
            if isinstance(message, Submit) and message.request.id.startswith("bad"):
                raise OverflowError("can't serialize ints above 64 bits")
            send(message)  # type: ignore[arg-type]

        rig.process.send = refusing  # type: ignore[method-assign]
        at_once = await ending(await rig.generate("bad"))
        assert (at_once.reason, at_once.fault) == (EndReason.FAILED, Fault.ENGINE)
        rig.check_empty()
        streams = [await rig.generate(name) for name in ("a", "bad-2", "bad-3", "c")]
        endings = [(await ending(stream)).reason for stream in streams]
        failed, whole = EndReason.FAILED, EndReason.LENGTH
        assert endings == [whole, failed, failed, whole]
        rig.check_empty()
        await rig.gateway.close()

    in_virtual_time(work)


# ------------------------------------------------------------------------------------------ D-23


class SlowTokenising(ServedModel):
    """Takes a second to tokenise."""

    async def submit(self, call: Call) -> Submit:
        await asyncio.sleep(1.0)
        return await super().submit(call)


@pytest.mark.parametrize(("served", "more_s"), [(ServedModel, 0.0), (SlowTokenising, 1.0)])
def test_d23_time_to_first_token_holds_the_queue_and_the_tokenising(served, more_s):
    async def work() -> None:
        rig = Rig(
            limits=ONE_SLOT,
            queue_places=20,
            step_s=lambda plan: 0.2,  # one of prefill, nine of decode
            served=served_model(served),
        )
        await rig.gateway.start()
        calls = [rig.call(f"r{n}", output=10) for n in range(10)]
        loop = asyncio.get_running_loop()
        start = loop.time()

        async def first_text_s(call: Call) -> float:
            stream = await rig.gateway.generate(call)
            await anext(stream)
            seen = loop.time() - start
            await pieces(stream)
            return seen

        seen_s = sorted(await asyncio.gather(*(first_text_s(call) for call in calls)))
        assert seen_s == pytest.approx([0.2 + 2 * n + more_s for n in range(10)], rel=0.01)
        assert rig.value("ttft_seconds_sum", "default") == pytest.approx(sum(seen_s), rel=0.001)
        assert rig.value("ttft_seconds_sum", "default") / 10 == pytest.approx(
            9.2 + more_s, rel=0.01
        )
        assert rig.value("queue_seconds_sum", "default") / 10 == pytest.approx(9.0, rel=0.01)
        assert rig.value("prefill_seconds_sum", "default") / 10 == pytest.approx(0.2, rel=0.01)
        rig.check_empty()

    in_virtual_time(work)
