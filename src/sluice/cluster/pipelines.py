"""Pipelines in front of the gateway: a call for one is given passages and goes on to its model.

``PipelineGateway`` is a ``server.ports.Gateway`` over another one: calls for models pass it, calls
for pipelines are retrieved for (``retrieving``) and become calls for the pipeline's model, whoever
answers for that. Admission, degrading and all that follows is the gateway's behind it: it counts
the prompt with its passages, and the time that they took.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from sluice.cluster.auto_route import AutoRoute
from sluice.cluster.calls import AnyModel
from sluice.cluster.forward import with_members
from sluice.cluster.gateway import LocalGateway
from sluice.cluster.retrieving import Asked, RetrievalStage
from sluice.cluster.token_counts import TokenCounts
from sluice.core.errors import InvalidRequest, Overloaded, RequestError
from sluice.core.request import Request
from sluice.core.tenants import Allowance
from sluice.runtime.generation import (
    Call,
    ModelCard,
    RawPrompt,
    Readiness,
    Refused,
    Relaying,
    SentBody,
)
from sluice.runtime.quoting import (
    PROMPT_MEMBERS,
    AnyPrompt,
    media_surplus,
    prompt_in,
    prompt_value,
    question_of,
    with_context,
)
from sluice.runtime.streams import PieceStream

# Reading and writing a larger body holds up the event loop for milliseconds.
_INLINE_BYTES_MAX = 256 * 1024
# So does tokenising more than this.
_TOKENISED_BYTES_MAX = 16_384
# Left free of passages for an answer without a limit of its own.
_OUTPUT_TOKENS_SPARED = 256


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A name that clients can ask for, the model that answers, and what comes before.

    ``ttft_ns`` is the target of calls that have none by their class.
    """

    name: str
    model: str
    stage: RetrievalStage
    ttft_ns: int | None = None


class PipelineGateway:
    """Serves pipelines beside the models of another gateway."""

    def __init__(self, behind: LocalGateway, pipelines: Sequence[Pipeline]) -> None:
        self._behind = behind
        self._pipelines = {one.name: one for one in pipelines}
        self._models_are = self._whose(behind.relaying)
        models = {one.model for one in pipelines}
        self._tokens_in = {name: TokenCounts(behind.served(name).tokens_in) for name in models}

    @property
    def relaying(self) -> Relaying:
        """Whose the models are: a pipeline's requests are treated as those of its model."""
        of, whose = self._models_are
        if of is not self._behind.relaying:  # the settings were read again
            self._models_are = _, whose = self._whose(self._behind.relaying)
        return whose

    def _whose(self, of: Relaying) -> tuple[Relaying, Relaying]:
        """Whose the models behind are, and whose all are."""
        names = self._pipelines.values()
        return of, Relaying(*(
            models.union(one.name for one in names if one.model in models)
            for models in (of.always, of.degraded)
        ))  # fmt: skip

    @property
    def routes(self) -> Mapping[str, AutoRoute]:
        """The names that stand for two models."""
        return self._behind.routes

    async def check_together(self, calls: Sequence[Call]) -> None:
        """Refuse several prompts for a pipeline; see ``server.ports.Gateway``."""
        if calls[0].model in self._pipelines:
            raise InvalidRequest(
                f"{calls[0].model} is a pipeline, which takes one prompt in a request.",
                param="prompt",
            )
        await self._behind.check_together(calls)

    async def generate(self, call: Call) -> PieceStream:
        """Admit a call, with passages in its prompt where it asks for a pipeline."""
        pipeline = self._pipelines.get(call.model)
        if pipeline is None:
            return await self._behind.generate(call)
        call = replace(call, model=pipeline.model)
        try:
            call = self._behind.served(call.model).named(call)
            call = await self._retrieved(pipeline, call)
        except RequestError as error:
            self.refused(Refused(call.id, call.client_id, call.model, 400, error.code))
            raise
        return await self._behind.generate(call)

    def models(self) -> Sequence[ModelCard]:
        """The models and the pipelines that clients can ask for."""
        cards = {card.id: card for card in self._behind.models()}
        aliases = [replace(cards[one.model], id=one.name) for one in self._pipelines.values()]
        return [*cards.values(), *aliases]

    def readiness(self) -> Readiness:
        """Whether calls can be served."""
        return self._behind.readiness()

    def metrics(self) -> tuple[bytes, str]:
        """Prometheus exposition of all metrics, and its content type."""
        return self._behind.metrics()

    def allowance(self, tenant: str) -> Allowance | None:
        """What a tenant may still use."""
        return self._behind.allowance(tenant)

    def refused(self, refused: Refused) -> None:
        """Count and record a request that was refused before it became a call."""
        pipeline = self._pipelines.get(refused.model)
        model = refused.model if pipeline is None else pipeline.model
        self._behind.refused(replace(refused, model=model))

    async def close(self) -> None:
        """Close what the pipelines ask."""
        for one in self._pipelines.values():
            await one.stage.close()

    # ---------------------------------------------------------------------------------- retrieval

    async def _retrieved(self, pipeline: Pipeline, call: Call) -> Call:
        """The call with what was found for it. Raises ``RequestError`` or ``Overloaded``."""
        served = self._behind.served(pipeline.model)
        least = served.classes.request(call, (), 1)
        # Also before a remote engine: retrieving is more work than counting a call.
        self._behind.driver.refuse_before_work(call, least)
        began_ns = pipeline.stage.now_ns()
        try:
            prompt = await _prompt_of(call)
            asked = self._asked(pipeline, served, call, prompt)
            retrieval, context = await pipeline.stage.run(asked)
            if context:
                call = await _with_context(call, prompt, context)
        except Overloaded as error:
            self.refused(Refused(call.id, call.client_id, call.model, error.status, error.reason))
            raise
        except asyncio.CancelledError:
            self._behind.driver.left_early(call, least, pipeline.stage.now_ns() - began_ns)
            raise
        return replace(call, retrieval=retrieval)

    def _asked(self, pipeline: Pipeline, served: AnyModel, call: Call, prompt: AnyPrompt) -> Asked:
        question = question_of(prompt)
        due = served.classes.request(call, (), 1)
        first_due_ns = due.ttft_due_ns
        if first_due_ns is None and pipeline.ttft_ns is not None:
            first_due_ns = call.arrived_ns + pipeline.ttft_ns
        # The whole prompt is taken to have as many tokens for its size as the question.
        size = call.body_bytes - media_surplus(prompt)
        times = size / max(1, len(question.encode("utf-8", "replace")))
        prompt_tokens = round(served.tokens_in(question) * max(1.0, times))
        output_tokens = call.output_tokens_max or _OUTPUT_TOKENS_SPARED
        return Asked(
            question=question,
            prompt_tokens=prompt_tokens,
            output_tokens_max=call.output_tokens_max,
            first_due_ns=first_due_ns,
            whole_due_ns=due.deadline_ns,
            room_tokens=served.card.context_tokens_max - prompt_tokens - output_tokens,
            may_degrade=call.may_degrade,
            tokens_in=self._tokens_in[pipeline.model],
            predicted=lambda: self._behind.driver.predicted(pipeline.model),
            cached_with=partial(self._cached_with, served, call, prompt),
        )

    async def _cached_with(
        self, served: AnyModel, call: Call, prompt: AnyPrompt, context: str
    ) -> int:
        """Tokens of a call's prompt, with this before its question, that need no prefill."""

        def counted() -> Request:
            return served.request_of(_changed(call, prompt, context))

        try:
            if call.body_bytes + len(context) > _TOKENISED_BYTES_MAX:
                request = await asyncio.to_thread(counted)
            else:
                request = counted()
        except RequestError:
            return 0  # it is too long: for admission to say, which knows all of it
        return self._behind.driver.predicted(call.model, request).cached_tokens


async def _prompt_of(call: Call) -> AnyPrompt:
    """The prompt in text, also where nobody has read it so far. Raises ``InvalidRequest``."""
    prompt = call.prompt
    if not isinstance(prompt, RawPrompt):
        return prompt
    if prompt.path not in PROMPT_MEMBERS:
        raise InvalidRequest(
            f"A pipeline generates text; {prompt.path} is for the models behind it.", param="model"
        )
    if len(prompt.body) > _INLINE_BYTES_MAX:
        return await asyncio.to_thread(_read, prompt)
    return _read(prompt)


def _read(raw: RawPrompt) -> AnyPrompt:
    name = PROMPT_MEMBERS[raw.path]
    try:
        value = msgspec.json.decode(raw.fields[name])
    except (KeyError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{name} is missing or cannot be read.", param=name) from error
    return prompt_in(raw.path, value)


async def _with_context(call: Call, prompt: AnyPrompt, context: str) -> Call:
    """The call with passages in its prompt, in each form that it may be sent on in."""
    raw = _raw_of(call)
    if raw is not None and len(raw.body) > _INLINE_BYTES_MAX:
        changed = await asyncio.to_thread(_changed, call, prompt, context)
    else:
        changed = _changed(call, prompt, context)
    body = _raw_of(changed)
    if raw is not None and body is not None:
        # Whoever serves the call holds the body that it came with.
        raw.sent.change(body.sent.raw, body.sent.fields, body.sent.understand)
    kept = call.prompt if isinstance(call.prompt, RawPrompt) else changed.prompt
    body_bytes = call.body_bytes + len(context.encode("utf-8", "replace"))
    return replace(call, prompt=kept, body_bytes=body_bytes)


def _raw_of(call: Call) -> RawPrompt | None:
    return call.prompt if isinstance(call.prompt, RawPrompt) else call.raw


def _changed(call: Call, prompt: AnyPrompt, context: str) -> Call:
    """A copy of the call with passages in its prompt, in each form; its own body stays as it is."""
    raw = _raw_of(call)
    body = None if raw is None else replace(raw, sent=_rewritten(raw, context))
    if isinstance(call.prompt, RawPrompt):
        assert body is not None
        return replace(call, prompt=body)
    return replace(call, prompt=with_context(prompt, context), raw=body)


def _rewritten(raw: RawPrompt, context: str) -> SentBody:
    """A body for an engine with passages; all its members but the prompt keep their bytes."""
    name, sent = PROMPT_MEMBERS[raw.path], raw.sent
    value = prompt_value(with_context(_read(raw), context))
    fields: Mapping[str, Any] = {**sent.fields, name: msgspec.Raw(msgspec.json.encode(value))}
    understand = sent.understand

    def understood() -> Call:
        call = understand()  # of the body as it came
        assert not isinstance(call.prompt, RawPrompt)
        return replace(call, prompt=with_context(call.prompt, context))

    return SentBody(with_members(fields, {name: value}), fields, understood)
