"""The path of a call for a pipeline, in virtual time: budget, degrading, phases, what is told."""

import asyncio
import threading
import time
from dataclasses import replace

import pytest

from sluice.cluster.pipelines import Pipeline, PipelineGateway
from sluice.cluster.retrieving import Asked, RetrievalStage, StageLimits
from sluice.core.errors import InvalidRequest, ModelNotFound, Overloaded
from sluice.core.path_budget import Predicted
from sluice.retrieval.passages import RetrievalFailed
from sluice.runtime.generation import ChatPrompt, RetrievalRung, TextPrompt, TokenPrompt
from sluice.runtime.quoting import Quotation
from sluice.telemetry.journal import Clocks, JournalLimits, JournalReader, JournalWriter
from sluice.telemetry.life import life_of
from sluice.telemetry.records import Retrieved
from sluice.testing.processes import VirtualTimeLoop
from sluice.testing.retrievers import FakeReranker, FakeRetriever, passages
from tests.cluster.rig import LIMITS, Rig, S, ending, in_virtual_time

PLAIN = Quotation("{% for p in passages %}[{{ p.number }}] {{ p.text }}\n{% endfor %}")
NO_RETRIEVAL, FEWER, NO_RERANK = (
    RetrievalRung.NO_RETRIEVAL,
    RetrievalRung.FEWER_PASSAGES,
    RetrievalRung.NO_RERANK,
)
LARGE = replace(LIMITS, blocks_total=400, context_tokens_max=4096)


class PipelineRig:
    """A pipeline called docs in front of the rig's model."""

    def __init__(self, retriever, reranker=None, limits=None, ttft_s=1.0, **rig):
        self.rig = Rig(limits=LARGE, step_s=lambda plan: 0.001 * plan.tokens, **rig)
        self.retriever = retriever
        limits = limits or StageLimits("docs")
        stage = RetrievalStage(limits, retriever, reranker, PLAIN, self.rig.clock)
        ttft_ns = None if ttft_s is None else round(ttft_s * S)
        self.gateway = PipelineGateway(self.rig.gateway, [Pipeline("docs", "tiny", stage, ttft_ns)])

    def call(self, name="a", text="How?", **more):
        prompt = ChatPrompt([{"role": "user", "content": text}])
        made = {"model": "docs", "prompt": prompt, "output_tokens_max": 4, **more}
        return replace(self.rig.call(name), **made)


@pytest.fixture
def run():
    def go(work, *made, **more):
        async def main():
            rig = PipelineRig(*made, **more)
            await rig.gateway._behind.start()
            await work(rig)
            rig.rig.check_empty()
            await rig.rig.gateway.close()

        in_virtual_time(main)

    return go


def test_passages_are_in_the_prompt_and_told_with_the_answer(run):
    async def work(rig):
        stream = await rig.gateway.generate(rig.call(text="How?"))
        finished = await ending(stream)
        told = stream.terms.retrieval
        assert [one.id for one in told.sources] == ["handbook#1", "handbook#2"]
        assert [one.number for one in told.sources] == [1, 2]
        assert (told.found, told.degraded, told.reason) == (2, (), "")
        assert stream.terms.disclosed == ()
        # The tiny tokenizer has a token for nearly each byte.
        assert finished.usage.prompt_tokens > 150
        assert rig.retriever.asked[0][:2] == ("How?", 6)

    run(work, FakeRetriever(passages(2, words=30)))


def test_its_phase_is_told_and_all_phases_sum_to_the_life_of_the_call(run):
    async def work(rig):
        arrived_ns = rig.rig.clock()
        finished = await ending(await rig.gateway.generate(rig.call()))
        phases = finished.phases
        assert phases.retrieval_ns == 300_000_000
        assert phases.admission_ns < 1_000_000
        total = sum(
            getattr(phases, f"{name}_ns")
            for name in ("retrieval", "admission", "queue", "prefill", "decode", "preempted")
        )
        assert total == rig.rig.clock() - arrived_ns
        assert rig.rig.value("phase_seconds_total", "tiny", "retrieval") == pytest.approx(0.3)
        assert rig.rig.value("retrievals_total", "docs", "whole") == 1
        assert rig.rig.value("retrieval_passages_total", "docs") == 1

    run(work, FakeRetriever(passages(1), delay_s=lambda: 0.3))


def test_late_retrieval_is_given_up_in_time_for_the_first_token(run):
    async def work(rig):
        began_ns = rig.rig.clock()
        stream = await rig.gateway.generate(rig.call())
        piece = await anext(stream)
        assert (rig.rig.clock() - began_ns) / S < 1.0
        told = stream.terms.retrieval
        assert told.degraded == (NO_RETRIEVAL,)
        assert told.reason.startswith("late: nothing came within")
        assert told.sources == ()
        assert stream.terms.disclosed == ("no_retrieval",)
        assert piece is not None
        await ending(stream)
        assert rig.rig.value("retrievals_total", "docs", "no_retrieval") == 1

    run(work, FakeRetriever(passages(3), delay_s=lambda: 30.0))


def test_without_a_budget_the_same_retrieval_makes_the_answer_late(run):
    async def work(rig):
        began_ns = rig.rig.clock()
        stream = await rig.gateway.generate(rig.call())
        await anext(stream)
        assert (rig.rig.clock() - began_ns) / S > 1.5
        assert stream.terms.retrieval.budget_ns is None
        await ending(stream)

    limits = StageLimits("docs", keeps_budget=False)
    run(work, FakeRetriever(passages(1), delay_s=lambda: 1.5), limits=limits)


def test_retrieval_that_comes_late_keeps_as_many_passages_as_leave_time(run):
    """When there is time for all of them, and when there is time for some."""

    async def work(rig):
        await ending(await rig.gateway.generate(rig.call("warm")))  # the speed is known from here
        rig.retriever.delay_s = lambda: 0.7
        seen = rig.retriever.found
        rig.retriever.found = [
            replace(one, document="other", text=f"New {one.text}") for one in seen
        ]
        stream = await rig.gateway.generate(rig.call("b"))
        told = stream.terms.retrieval
        assert told.found == 6
        assert 1 <= len(told.sources) < 6
        assert told.degraded == (FEWER,)
        # The best ones: the retriever's first.
        assert [one.id for one in told.sources] == [
            f"other#{n}" for n in range(1, len(told.sources) + 1)
        ]
        await ending(stream)

    run(work, FakeRetriever(passages(6, words=10)))


@pytest.mark.parametrize("form", ["chat", "text"])
def test_passages_that_are_cached_need_no_time(run, form):
    """The retrieval of the test before, of passages that the replica has seen."""

    async def work(rig):
        def call(name, question):
            text = TextPrompt(question)
            return rig.call(name, question) if form == "chat" else rig.call(name, prompt=text)

        await ending(await rig.gateway.generate(call("warm", "What?")))
        rig.retriever.delay_s = lambda: 0.7
        began_ns = rig.rig.clock()
        stream = await rig.gateway.generate(call("b", "How is it?"))
        told = stream.terms.retrieval
        assert (len(told.sources), told.degraded) == (6, ())
        await anext(stream)
        assert (rig.rig.clock() - began_ns) / S < 1.0
        finished = await ending(stream)
        assert finished.usage.cached_tokens > 0.8 * finished.usage.prompt_tokens

    run(work, FakeRetriever(passages(6, words=10)))


def test_passages_of_which_some_are_cached_are_kept_as_far_as_there_is_time(run):
    async def work(rig):
        rig.retriever.found = passages(3, words=20)
        await ending(await rig.gateway.generate(rig.call("warm")))
        rig.retriever.found = passages(6, words=20)
        rig.retriever.delay_s = lambda: 0.7
        stream = await rig.gateway.generate(rig.call("b"))
        told = stream.terms.retrieval
        assert 3 <= len(told.sources) < 6
        assert told.degraded == (FEWER,)
        await ending(stream)

    run(work, FakeRetriever())


def test_the_beginning_of_a_long_conversation_leaves_retrieval_its_time_where_it_is_cached(run):
    said = [{"role": "user", "content": "word " * 160}, {"role": "assistant", "content": "Yes."}]
    prompt = ChatPrompt([*said, {"role": "user", "content": "How?"}])

    async def work(rig):
        await ending(await rig.gateway.generate(rig.call("warm")))  # the speed is known from here
        stream = await rig.gateway.generate(rig.call("new", prompt=prompt, body_bytes=900))
        assert stream.terms.retrieval.degraded == (NO_RETRIEVAL,)
        await ending(stream)
        stream = await rig.gateway.generate(rig.call("again", prompt=prompt, body_bytes=900))
        assert stream.terms.retrieval.degraded == ()
        await ending(stream)

    run(work, FakeRetriever(passages(1, words=2), delay_s=lambda: 0.3))


def test_the_class_of_a_call_and_the_deadline_of_its_client_make_the_budget(run):
    async def work(rig):
        quick = await rig.gateway.generate(rig.call("a", slo_class="quick"))
        assert quick.terms.retrieval.budget_ns <= 0.45 * S
        await ending(quick)
        due_ns = rig.rig.clock() + 2 * S
        hurried = await rig.gateway.generate(rig.call("b", deadline_ns=due_ns))
        assert hurried.terms.retrieval.budget_ns <= 1.8 * S
        await ending(hurried)
        free = await rig.gateway.generate(rig.call("c"))
        assert free.terms.retrieval.budget_ns is None
        await ending(free)

    run(work, FakeRetriever(passages(1)), ttft_s=None)


def test_a_budget_that_is_used_up_skips_retrieval(run):
    async def work(rig):
        call = rig.call(arrived_ns=rig.rig.clock() - 2 * S)
        stream = await rig.gateway.generate(call)
        assert stream.terms.retrieval.reason == "the rest of the request leaves it no time"
        assert rig.retriever.asked == []
        await ending(stream)

    run(work, FakeRetriever(passages(1)))


def test_failing_retrieval_answers_without_it_or_is_refused_as_configured(run):
    failing = FakeRetriever(fails=RetrievalFailed("the service is down"))

    async def degrades(rig):
        stream = await rig.gateway.generate(rig.call())
        assert stream.terms.retrieval.reason == "failed: the service is down"
        await ending(stream)
        # A client may forbid it.
        await refuses(rig, may_degrade=False)

    async def refuses(rig, **more):
        with pytest.raises(Overloaded) as refused:
            await rig.gateway.generate(rig.call("b", **more))
        error = refused.value
        assert (error.status, error.reason) == (503, "retrieval_failed")
        assert "the service is down" in error.message
        assert rig.rig.value("refusals_total", "tiny", "retrieval_failed") == 1

    run(degrades, failing)
    run(refuses, failing, limits=StageLimits("docs", allowed=frozenset()))


def test_a_reranker_chooses_from_the_candidates_unless_it_is_late_or_fails(run):
    limits = StageLimits("docs", passages_max=2, candidates_max=5)

    async def reranked(rig):
        stream = await rig.gateway.generate(rig.call())
        told = stream.terms.retrieval
        assert [one.id for one in told.sources] == ["handbook#4", "handbook#5"]
        assert told.found == 5
        await ending(stream)

    async def not_reranked(rig):
        stream = await rig.gateway.generate(rig.call())
        told = stream.terms.retrieval
        assert [one.id for one in told.sources] == ["handbook#1", "handbook#2"]
        assert told.degraded == (NO_RERANK,)
        await ending(stream)

    run(reranked, FakeRetriever(passages(9, words=2)), FakeReranker(), limits=limits)
    late = FakeReranker(delay_s=lambda: 30.0)
    run(not_reranked, FakeRetriever(passages(9, words=2)), late, limits=limits)
    failing = FakeReranker(fails=RetrievalFailed("no"))
    run(not_reranked, FakeRetriever(passages(9, words=2)), failing, limits=limits)


def test_reranking_that_is_usually_too_slow_is_not_begun(run):
    reranker = FakeReranker(delay_s=lambda: 30.0)

    async def work(rig):
        for number in range(12):
            await ending(await rig.gateway.generate(rig.call(f"{number}")))
        runs = reranker.runs
        rig.retriever.delay_s = lambda: 0.3
        await ending(await rig.gateway.generate(rig.call("late")))
        assert reranker.runs == runs

    run(work, FakeRetriever(passages(3, words=2)), reranker)


def test_the_same_passages_make_the_same_beginning_in_any_order_of_scores(run):
    async def work(rig):
        await ending(await rig.gateway.generate(rig.call("a", text="One?")))
        rig.retriever.found = rig.retriever.found[::-1]
        finished = await ending(await rig.gateway.generate(rig.call("b", text="Another one?")))
        assert finished.usage.cached_tokens > 0.8 * finished.usage.prompt_tokens

    run(work, FakeRetriever(passages(3, words=30)))


def test_only_so_many_are_retrieved_for_at_a_time(run):
    async def work(rig):
        calls = [rig.gateway.generate(rig.call(f"{number}")) for number in range(3)]
        streams = await asyncio.gather(*calls)
        reasons = sorted(stream.terms.retrieval.reason for stream in streams)
        assert reasons == ["", "", "2 others are being retrieved"]
        for stream in streams:
            await ending(stream)

    limits = StageLimits("docs", in_flight_max=2)
    run(work, FakeRetriever(passages(1), delay_s=lambda: 0.1), limits=limits)


def test_reranking_takes_a_place_as_well(run):
    async def work(rig):
        first = asyncio.ensure_future(rig.gateway.generate(rig.call("a")))
        await asyncio.sleep(0.05)  # found, and being reranked
        second = await rig.gateway.generate(rig.call("b"))
        assert second.terms.retrieval.reason == "1 others are being retrieved"
        stream = await first
        assert stream.terms.retrieval.degraded == ()
        await ending(stream)
        await ending(second)

    limits = StageLimits("docs", in_flight_max=1)
    reranker = FakeReranker(delay_s=lambda: 0.1)
    run(work, FakeRetriever(passages(2, words=2)), reranker, limits=limits)


@pytest.mark.parametrize(("words", "aside"), [(100, False), (4000, True)])
def test_long_passages_are_counted_and_quoted_in_a_thread_and_the_fleet_is_asked_here(words, aside):
    counted, quoted, predicted = [], [], []

    class Watched(Quotation):
        def text(self, passages):
            quoted.append(threading.get_ident())
            return super().text(passages)

    def tokens_in(text):
        counted.append(threading.get_ident())
        return 1

    def prediction():
        predicted.append(threading.get_ident())
        return Predicted(queue_ns=0, prefill_token_ns=1.0, token_ns=1, output_tokens=1)

    async def nothing_cached(context):
        return 0

    async def main():
        found = FakeRetriever(passages(1, words=words))
        stage = RetrievalStage(StageLimits("docs"), found, None, Watched(), time.monotonic_ns)
        asked = Asked(
            "How?", 1, 1, None, None, 1000, True, tokens_in, prediction, nothing_cached
        )  # fmt: skip
        told, context = await stage.run(asked)
        assert (len(told.sources), "Fact 1" in context) == (1, True)

    asyncio.run(main())
    here = threading.get_ident()
    assert (counted[-1] != here, quoted[-1] != here) == (aside, aside)
    assert set(predicted) == {here}


def test_a_client_that_leaves_during_retrieval_leaves_nothing_behind(run):
    async def work(rig):
        task = asyncio.get_running_loop().create_task(rig.gateway.generate(rig.call()))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stage = rig.gateway._pipelines["docs"].stage
        assert stage._in_flight == 0
        assert retriever.left == 1
        assert rig.rig.counts("requests_total") == {("tiny",): 1}
        assert rig.rig.counts("requests_ended_total") == {("tiny", "cancelled"): 1}
        assert rig.rig.value("phase_seconds_total", "tiny", "retrieval") == pytest.approx(0.1)

    retriever = FakeRetriever(passages(1), delay_s=lambda: 0.5)
    run(work, retriever)


def test_a_client_that_leaves_during_retrieval_is_in_the_journal_once(tmp_path):
    async def main():
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        clocks = Clocks(loop.now_ns, loop.now_ns)
        journal = JournalWriter(tmp_path, "gateway", clocks, JournalLimits())
        rig = PipelineRig(FakeRetriever(passages(1), delay_s=lambda: 0.5), journal=journal)
        await rig.rig.gateway.start()
        task = loop.create_task(rig.gateway.generate(rig.call("left")))
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.wait([task])
        await rig.rig.gateway.close()

    in_virtual_time(main)
    records = [one.record for one in JournalReader(tmp_path).entries()]
    assert [type(one).__name__ for one in records if getattr(one, "id", "") == "left"] == [
        "RequestArrived",
        "RequestEnded",
    ]
    life = life_of(JournalReader(tmp_path).entries(), "left")
    assert life is not None
    assert (life.phases[0].phase, life.phases[0].duration_ns) == ("retrieval", 200_000_000)


def test_passages_that_do_not_fit_the_context_are_left_out(run):
    async def work(rig):
        stream = await rig.gateway.generate(rig.call())
        told = stream.terms.retrieval
        assert told.degraded == (NO_RETRIEVAL,) or len(told.sources) < 6
        await ending(stream)

    run(work, FakeRetriever(passages(6, words=300)), ttft_s=None)


def test_an_empty_question_is_not_searched_for(run):
    async def work(rig):
        stream = await rig.gateway.generate(rig.call(text="  \x00 "))
        assert rig.retriever.asked == []
        assert stream.terms.retrieval.sources == ()
        await ending(stream)

    run(work, FakeRetriever(passages(1)))


def test_overload_refuses_before_anything_is_retrieved(run):
    async def work(rig):
        held = [await rig.rig.generate(f"h{n}", output=200) for n in range(4)]
        with pytest.raises(Overloaded):
            await rig.gateway.generate(rig.call("a", likeness=7))
        assert rig.retriever.asked == []
        for stream in held:
            stream.cancel()
        await rig.rig.until(lambda: rig.rig.driver._fleet.requests == 0)
        await asyncio.sleep(1)

    run(work, FakeRetriever(passages(1)), queue_places=0)


def test_text_prompts_are_retrieved_for_and_token_ids_refused(run):
    async def work(rig):
        stream = await rig.gateway.generate(rig.call(prompt=TextPrompt("Once upon")))
        assert rig.retriever.asked[0][0] == "Once upon"
        await ending(stream)
        with pytest.raises(InvalidRequest, match="not token ids"):
            await rig.gateway.generate(rig.call("b", prompt=TokenPrompt((1, 2))))
        with pytest.raises(InvalidRequest, match="one prompt"):
            await rig.gateway.check_together([rig.call("c"), rig.call("d")])

    run(work, FakeRetriever(passages(1)))


def test_pipelines_are_listed_and_models_are_served_as_before(run):
    async def work(rig):
        assert [card.id for card in rig.gateway.models()] == ["tiny", "docs"]
        stream = await rig.gateway.generate(rig.call(model="tiny"))
        assert stream.terms.retrieval is None
        await ending(stream)
        with pytest.raises(ModelNotFound):
            await rig.gateway.generate(rig.call("b", model="none"))
        assert rig.retriever.asked == []

    run(work, FakeRetriever(passages(1)))


def test_the_journal_and_the_trace_know_what_was_retrieved(tmp_path):
    async def main():
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        clocks = Clocks(loop.now_ns, loop.now_ns)
        journal = JournalWriter(tmp_path, "gateway", clocks, JournalLimits())
        retriever = FakeRetriever(passages(2, words=2), delay_s=lambda: 0.2)
        rig = PipelineRig(retriever, journal=journal)
        await rig.rig.gateway.start()
        await ending(await rig.gateway.generate(rig.call("seen")))
        await rig.rig.gateway.close()

    in_virtual_time(main)
    life = life_of(JournalReader(tmp_path).entries(), "seen")
    assert life is not None
    assert isinstance(life.retrieval, Retrieved)
    assert life.retrieval.sources == ("handbook#1", "handbook#2")
    assert life.phases[0].phase == "retrieval"
    assert life.phases[0].duration_ns == 200_000_000
