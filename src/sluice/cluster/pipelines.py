"""Pipelines in front of the gateway: a call for one is given passages and goes on to its model.

``PipelineGateway`` is a ``server.ports.Gateway`` over another one: calls for models pass it, calls
for pipelines are retrieved for (``retrieving``) and become calls for the pipeline's model, whoever
answers for that. Admission, degrading and all that follows is the gateway's behind it: it counts
the prompt with its passages, and the time that they took.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import msgspec

from sluice.cluster.auto_route import AutoRoute
from sluice.cluster.calls import AnyModel
from sluice.cluster.forward import with_members
from sluice.cluster.gateway import LocalGateway
from sluice.cluster.retrieving import Asked, RetrievalStage
from sluice.core.errors import InvalidRequest, Overloaded, RequestError
from sluice.core.tenants import Allowance
from sluice.runtime.generation import (
    Call,
    ModelCard,
    RawPrompt,
    Readiness,
    Refused,
    Relaying,
)
from sluice.runtime.quoting import (
    PROMPT_MEMBERS,
    AnyPrompt,
    prompt_in,
    prompt_value,
    question_of,
    with_context,
)
from sluice.runtime.streams import PieceStream

# Reading and writing a larger body holds up the event loop for milliseconds.
_INLINE_BYTES_MAX = 256 * 1024
# Of passages of usual size this is some megabytes.
_PASSAGES_KNOWN = 4096
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
        # Passages come again and again, and counting their tokens takes longer than all the rest.
        self._tokens_in = {
            one.name: lru_cache(_PASSAGES_KNOWN)(behind.served(one.model).tokens_in)
            for one in pipelines
        }

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
        call = served.named(call)
        # Also before a remote engine: retrieving is more work than counting a call.
        self._behind.driver.refuse_before_work(call, served.classes.request(call, (), 1))
        prompt = await _prompt_of(call)
        asked = self._asked(pipeline, served, call, question_of(prompt))
        try:
            retrieval, context = await pipeline.stage.run(asked)
        except Overloaded as error:
            self.refused(Refused(call.id, call.client_id, call.model, error.status, error.reason))
            raise
        call = replace(call, retrieval=retrieval)
        if not context:
            return call
        return await _with_context(call, prompt, context)

    def _asked(self, pipeline: Pipeline, served: AnyModel, call: Call, question: str) -> Asked:
        due = served.classes.request(call, (), 1)
        first_due_ns = due.ttft_due_ns
        if first_due_ns is None and pipeline.ttft_ns is not None:
            first_due_ns = call.arrived_ns + pipeline.ttft_ns
        # The whole prompt is taken to have as many tokens for its size as the question.
        times = call.body_bytes / max(1, len(question.encode("utf-8", "replace")))
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
            tokens_in=self._tokens_in[pipeline.name],
            predicted=lambda: self._behind.driver.predicted(pipeline.model),
        )


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
    raw = call.prompt if isinstance(call.prompt, RawPrompt) else call.raw
    if raw is not None:
        if len(raw.body) > _INLINE_BYTES_MAX:
            await asyncio.to_thread(_rewrite, raw, context)
        else:
            _rewrite(raw, context)
    body_bytes = call.body_bytes + len(context.encode("utf-8", "replace"))
    if isinstance(call.prompt, RawPrompt):
        return replace(call, body_bytes=body_bytes)
    return replace(call, prompt=with_context(prompt, context), body_bytes=body_bytes)


def _rewrite(raw: RawPrompt, context: str) -> None:
    """Put passages into a body for an engine; all members but the prompt keep their bytes."""
    name, sent = PROMPT_MEMBERS[raw.path], raw.sent
    value = prompt_value(with_context(_read(raw), context))
    fields: Mapping[str, Any] = {**sent.fields, name: msgspec.Raw(msgspec.json.encode(value))}
    understand = sent.understand

    def understood() -> Call:
        call = understand()  # of the body as it came
        assert not isinstance(call.prompt, RawPrompt)
        return replace(call, prompt=with_context(call.prompt, context))

    sent.change(with_members(fields, {name: value}), fields, understood)
