"""The retrieval stage of one pipeline: passages for a question, within its share of the budget.

Called by ``pipelines`` before a call is admitted. How long retrieval may take and how many passages
leave time for the rest is computed by ``core/path_budget`` from what the fleet predicts at that
moment; here it is held to, and what is late, fails or is too much is degraded as the pipeline
allows. The retriever decides what fits a question.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from sluice.core.errors import Overloaded
from sluice.core.path_budget import (
    Budget,
    Path,
    Predicted,
    on_time,
    passages_that_fit,
    split,
)
from sluice.retrieval.passages import (
    Passage,
    Reranker,
    RetrievalFailed,
    RetrievalLate,
    Retriever,
)
from sluice.runtime.generation import Retrieval, RetrievalRung, Source
from sluice.runtime.quoting import Quotation, quoted

T = TypeVar("T")

# Less is no time to ask anybody.
_LEAST_NS = 1_000_000
# Weight of the past in the time that reranking usually takes.
_KEPT = 0.8
_RETRY_S = 1.0
# So many numbers of passages are tried with what is cached of them.
_LOOKS_MAX = 4
# Counting the tokens of more text, and quoting it, takes milliseconds.
_INLINE_CHARS_MAX = 16_384
_SAMPLE_TEXT = "sample"
_SAMPLE = {"number": 1, "document": "", "title": "", "text": _SAMPLE_TEXT, "score": 1.0}
_NAME_ENDS = re.compile(r"[\s\"<>]+")


@dataclass(frozen=True, slots=True)
class StageLimits:
    """What one pipeline holds to.

    ``passages_max`` go into a prompt, chosen by the reranker from ``candidates_max``. Retrieval
    takes ``retrieval_ns_max`` at most, and only that bounds it where ``keeps_budget`` is false.
    ``allowed`` are the rungs that may be taken. ``in_flight_max`` run at a time.
    """

    pipeline: str
    passages_max: int = 6
    candidates_max: int = 24
    retrieval_ns_max: int = 2_000_000_000
    keeps_budget: bool = True
    allowed: frozenset[RetrievalRung] = frozenset(RetrievalRung)
    in_flight_max: int = 64


@dataclass(frozen=True, slots=True)
class Asked:
    """What is known of a call before its passages are.

    Its first and its last token are due at ``first_due_ns`` and ``whole_due_ns``. ``room_tokens``
    are left in the context beside its prompt and its output. ``tokens_in`` counts those of a text,
    ``predicted`` gives what the fleet predicts now, and ``cached_with`` how many tokens of the
    prompt, with such a text before its question, need no prefill: that takes as long as tokenising.
    """

    question: str
    prompt_tokens: int
    output_tokens_max: int | None
    first_due_ns: int | None
    whole_due_ns: int | None
    room_tokens: int
    may_degrade: bool
    tokens_in: Callable[[str], int]
    predicted: Callable[[], Predicted]
    cached_with: Callable[[str], Awaitable[int]]

    def budget(self, now_ns: int) -> Budget:
        """What is left."""
        first, whole = (
            None if due_ns is None else due_ns - now_ns
            for due_ns in (self.first_due_ns, self.whole_due_ns)
        )
        return Budget(first, whole)

    def path(self, intro_tokens: int, passage_tokens: int) -> Path:
        """The way of the call with passages of this size, which the template introduces."""
        return Path(self.prompt_tokens + intro_tokens, passage_tokens, self.output_tokens_max)


@dataclass(slots=True)
class _Progress:
    """One run: what was found so far, what is kept of it and what was given up."""

    began_ns: int
    ends_ns: int
    budget_ns: int | None
    found: Sequence[Passage] = ()
    kept: Sequence[Passage] = ()
    tokens: int = 0
    degraded: tuple[RetrievalRung, ...] = ()
    reason: str = ""


class RetrievalStage:
    """Retrieves for one pipeline. ``clock`` gives monotonic nanoseconds."""

    def __init__(
        self,
        limits: StageLimits,
        retriever: Retriever,
        reranker: Reranker | None,
        quotation: Quotation,
        clock: Callable[[], int],
    ) -> None:
        self._limits, self._retriever, self._reranker = limits, retriever, reranker
        self._quotation, self._clock = quotation, clock
        self._frames = (quotation.text([_SAMPLE]), quotation.text([_SAMPLE, _SAMPLE]))
        self._in_flight = 0
        self._rerank_ns = 0.0
        self._passage_tokens = 0

    async def run(self, asked: Asked) -> tuple[Retrieval, str]:
        """What was retrieved, and its text for the prompt, empty where nothing goes into it.

        Raises ``Overloaded`` where retrieval failed and the pipeline or the client wants no answer
        without it.
        """
        one = await self._begin(asked)
        if asked.question and self._may_begin(one, asked):
            self._in_flight += 1
            try:
                await self._find(one, asked)
                if one.found and self._reranker is not None:
                    await self._rerank(one, asked, self._reranker)
            finally:
                self._in_flight -= 1
            await self._choose(one, asked)
        return await _aside(one.kept, lambda: self._told(one))

    def now_ns(self) -> int:
        """The time on its clock."""
        return self._clock()

    async def close(self) -> None:
        """Close what it asks."""
        await self._retriever.close()
        if self._reranker is not None:
            await self._reranker.close()

    # ------------------------------------------------------------------------------------- stages

    async def _begin(self, asked: Asked) -> _Progress:
        now_ns, limits = self._clock(), self._limits
        share_ns = None
        if limits.keeps_budget:
            intro_tokens, around_tokens = self._frame(asked)
            path = asked.path(intro_tokens, self._passage_tokens or around_tokens)
            budget, predicted = asked.budget(now_ns), asked.predicted()
            shares = split(budget, path, predicted)
            share_ns = shares.retrieval_ns
            if share_ns is not None and share_ns < min(limits.retrieval_ns_max, shares.prefill_ns):
                # The beginning of a long conversation is mostly cached, up to where passages go.
                path = replace(path, cached_tokens=await asked.cached_with(self._frames[0]))
                share_ns = split(budget, path, predicted).retrieval_ns
        within_ns = limits.retrieval_ns_max
        if share_ns is not None:
            within_ns = min(within_ns, share_ns)
        return _Progress(now_ns, now_ns + within_ns, share_ns)

    def _may_begin(self, one: _Progress, asked: Asked) -> bool:
        """Whether there is time and a place, which is not taken yet; notes it where not."""
        if one.ends_ns - one.began_ns < _LEAST_NS:
            self._give_up(one, asked, "the rest of the request leaves it no time")
            return False
        if self._in_flight >= self._limits.in_flight_max:
            self._give_up(one, asked, f"{self._in_flight} others are being retrieved")
            return False
        return True

    async def _find(self, one: _Progress, asked: Asked) -> None:
        limits = self._limits
        wanted = limits.passages_max if self._reranker is None else limits.candidates_max
        within_ns = one.ends_ns - one.began_ns
        try:
            async with asyncio.timeout(within_ns / 1e9):
                one.found = await self._retriever.find(asked.question, wanted, within_ns / 1e9)
        except (TimeoutError, RetrievalLate):
            self._give_up(one, asked, f"late: nothing came within {within_ns / 1e6:.0f} ms")
        except RetrievalFailed as error:
            self._give_up(one, asked, f"failed: {error}")
        one.kept = one.found

    async def _rerank(self, one: _Progress, asked: Asked, reranker: Reranker) -> None:
        began_ns = self._clock()
        within_ns = one.ends_ns - began_ns
        if within_ns < max(_LEAST_NS, self._rerank_ns):
            self._rerank_ns *= _KEPT  # so that it is tried again
            return self._skip_rerank(one, asked, "no time is left to rerank")
        try:
            async with asyncio.timeout(within_ns / 1e9):
                one.kept = await reranker.rerank(asked.question, one.found, within_ns / 1e9)
        except (TimeoutError, RetrievalLate):
            self._skip_rerank(one, asked, "reranking was late")
        except RetrievalFailed as error:
            self._skip_rerank(one, asked, f"reranking failed: {error}")
        taken_ns = self._clock() - began_ns
        self._rerank_ns = _KEPT * self._rerank_ns + (1.0 - _KEPT) * taken_ns
        return None

    async def _choose(self, one: _Progress, asked: Asked) -> None:
        """Keep the best as far as there is time and room for them."""
        kept = one.kept = one.kept[: self._limits.passages_max]
        if not kept:
            return
        intro_tokens, around_tokens = self._frame(asked)
        sizes = await _aside(
            kept,
            lambda: [
                around_tokens + asked.tokens_in(passage.text) + asked.tokens_in(passage.document)
                for passage in kept
            ],
        )
        self._passage_tokens = sum(sizes) // len(sizes)
        fitting = await self._fitting(one, asked, intro_tokens, sizes)
        if fitting == 0 and self._may(RetrievalRung.NO_RETRIEVAL, asked):
            self._note(one, RetrievalRung.NO_RETRIEVAL, "no passage leaves time for the answer")
            one.kept = ()
            return
        if 0 < fitting < len(sizes) and self._may(RetrievalRung.FEWER_PASSAGES, asked):
            reason = f"{fitting} of {len(sizes)} passages leave time and room for the answer"
            self._note(one, RetrievalRung.FEWER_PASSAGES, reason)
            one.kept = one.kept[:fitting]
        one.tokens = intro_tokens + sum(sizes[: len(one.kept)])

    async def _fitting(
        self, one: _Progress, asked: Asked, intro_tokens: int, sizes: Sequence[int]
    ) -> int:
        """How many of the passages kept, of these sizes, there is time and room for.

        What is cached of them is asked for only where they do not fit without.
        """
        fitting = len(sizes)
        while fitting and intro_tokens + sum(sizes[:fitting]) > asked.room_tokens:
            fitting -= 1
        if not self._limits.keeps_budget:
            return fitting
        budget, predicted = asked.budget(self._clock()), asked.predicted()
        path = asked.path(intro_tokens, -(-sum(sizes) // len(sizes)))
        timely = passages_that_fit(budget, path, predicted, fitting)
        if not on_time(budget, replace(path, prompt_tokens=0), predicted, 0):
            return timely  # whatever is cached
        for number in range(fitting, max(timely, fitting - _LOOKS_MAX), -1):
            kept = one.kept[:number]
            cached = await asked.cached_with(await _aside(kept, partial(self._context, kept)))
            budget = asked.budget(self._clock())
            if on_time(budget, replace(path, cached_tokens=cached), predicted, number):
                return number
        return timely

    def _frame(self, asked: Asked) -> tuple[int, int]:
        """Tokens of the template itself: before all passages, and around each of them."""
        one, two = (asked.tokens_in(text) for text in self._frames)
        each = two - one
        return max(0, one - each), max(0, each - asked.tokens_in(_SAMPLE_TEXT))

    # ---------------------------------------------------------------------------------- degrading

    def _may(self, rung: RetrievalRung, asked: Asked) -> bool:
        return asked.may_degrade and rung in self._limits.allowed

    def _note(self, one: _Progress, rung: RetrievalRung, reason: str) -> None:
        one.degraded = (*one.degraded, rung)
        one.reason = f"{one.reason}; {reason}" if one.reason else reason

    def _give_up(self, one: _Progress, asked: Asked, reason: str) -> None:
        if not self._may(RetrievalRung.NO_RETRIEVAL, asked):
            raise self._refusal(one, reason)
        self._note(one, RetrievalRung.NO_RETRIEVAL, reason)

    def _skip_rerank(self, one: _Progress, asked: Asked, reason: str) -> None:
        if not self._may(RetrievalRung.NO_RERANK, asked):
            raise self._refusal(one, reason)
        self._note(one, RetrievalRung.NO_RERANK, reason)

    def _refusal(self, one: _Progress, reason: str) -> Overloaded:
        return Overloaded(
            f"The pipeline {self._limits.pipeline} could not retrieve, and no answer without that "
            f"is wanted: {reason}.",
            status=503,
            reason="retrieval_failed",
            measured=(self._clock() - one.began_ns) / 1e9,
            threshold=(one.ends_ns - one.began_ns) / 1e9,
            retry_after_s=_RETRY_S,
        )

    # --------------------------------------------------------------------------------------- told

    def _context(self, kept: Sequence[Passage]) -> str:
        """What goes into the prompt of these passages."""
        return self._quotation.text(
            [
                {
                    "number": number,
                    "document": _name(passage.document),
                    "title": _name(passage.title),
                    "text": quoted(passage.text),
                    "score": passage.score,
                }
                for number, passage in enumerate(_ordered(kept), 1)
            ]
        )

    def _told(self, one: _Progress) -> tuple[Retrieval, str]:
        sources = tuple(
            Source(number, passage.id, passage.document, passage.title, passage.score)
            for number, passage in enumerate(_ordered(one.kept), 1)
        )
        context = self._context(one.kept) if one.kept else ""
        told = Retrieval(
            pipeline=self._limits.pipeline,
            duration_ns=self._clock() - one.began_ns,
            budget_ns=one.budget_ns,
            found=len(one.found),
            tokens=one.tokens,
            sources=sources,
            degraded=one.degraded,
            reason=one.reason,
        )
        return told, context


async def _aside(passages: Sequence[Passage], work: Callable[[], T]) -> T:
    """The result of work on these passages, done in a thread where they are long."""
    if sum(len(passage.text) for passage in passages) <= _INLINE_CHARS_MAX:
        return work()
    return await asyncio.to_thread(work)


def _ordered(passages: Sequence[Passage]) -> list[Passage]:
    """The same passages in the same order make the same beginning, whatever was asked."""
    return sorted(passages, key=lambda passage: (passage.document, passage.number))


def _name(text: str) -> str:
    return _NAME_ENDS.sub(" ", quoted(text))
