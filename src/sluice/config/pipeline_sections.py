"""Settings of pipelines and of the documents that the embedded retriever searches.

Sections like those in ``sections``, apart because only the retrieval stage uses them; what two
values may be together is checked here, on behalf of ``settings``.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sluice.config.sections import Positive, Seconds
from sluice.config.upstreams import upstream_address

_RESOLVED = {"resolved": True}
# It is the name of a file, or goes into addresses.
_COLLECTION = re.compile(r"(?!\.)[\w.-]{1,128}")


@dataclass(frozen=True, slots=True)
class DocumentsSection:
    """The collections that ``sluice docs`` fills."""

    dir: Path = field(default_factory=lambda: Path.home() / ".local/share/sluice/documents")
    """Folder of the collections, one file each. The default moves with ``XDG_DATA_HOME``."""


@dataclass(frozen=True, slots=True)
class PipelineSection:
    """A name that clients can ask for like a model, ``[pipelines.NAME]``: passages are retrieved
    for each request and put into its prompt, and a model answers."""

    model: str | None = None
    """Model that answers: the name of a ``[models.NAME]`` table. Unset: the only one there is."""

    retriever: Literal["embedded", "qdrant", "http"] = "embedded"
    """Where passages come from. ``embedded`` searches by words (BM25) what ``sluice docs add``
    stored. ``qdrant`` searches by meaning in a Qdrant server, and needs ``sluice[retrieval]``.
    ``http`` asks any service that keeps the contract in docs/pipelines.md."""

    collection: str = "default"
    """Collection that is searched."""

    url: str | None = None
    """Address of the Qdrant server, or the whole address that questions are posted to."""

    key_env: str | None = None
    """Name of the environment variable with the key that the retriever asks for: sent as bearer
    token, or as Qdrant's own."""

    embeddings_url: str | None = None
    """Address of an engine with ``/v1/embeddings``, what stands before ``/v1``; for Qdrant."""

    embeddings_model: str | None = None
    """Its model, the one that the collection was made with."""

    embeddings_key_env: str | None = None
    """Name of the environment variable with the key of that engine."""

    rerank_url: str | None = None
    """Address of an engine with ``/v1/rerank``, what stands before ``/v1``. With it, ``candidates``
    are retrieved and the best of them kept. Unset: the retriever's own order holds."""

    rerank_model: str | None = None
    """Name of the reranking model there."""

    rerank_key_env: str | None = None
    """Name of the environment variable with the key of the reranking engine."""

    passages: Positive = 6
    """Most passages in a prompt. Each takes time to prefill; more help answers less and less."""

    candidates: Positive = 24
    """Passages that are retrieved for the reranker to choose from."""

    retrieval_s_max: Seconds = 2.0
    """Longest time for retrieval, reranking included, whatever the budget leaves."""

    ttft_s: Seconds | None = None
    """Time to the first token that the budget is made of where the class of a request has no
    target. Unset: only a deadline of the client or ``e2e`` of the class bounds the path then."""

    budget: bool = True
    """Whether retrieval gets what queue, prefill and decode are predicted to leave of the time to
    the first and last token. Without it ``retrieval_max`` alone ends it, however late the answer
    gets."""

    degrade: tuple[Literal["fewer_passages", "no_rerank", "no_retrieval"], ...] = (
        "fewer_passages", "no_rerank", "no_retrieval",
    )  # fmt: skip
    """What may become of retrieval that is late, fails or brings too much: fewer passages in the
    prompt, the retriever's own order, an answer without passages. Each is told in
    ``x-sluice-degraded``. What is left out is refused with 503 instead, as it is for clients that
    send ``x-sluice-degrade: never``; passages that do not fit then stay in, for admission to
    judge."""

    concurrency: Positive = 64
    """Most requests that are being retrieved for. Further ones count as late at once."""

    template_file: Path | None = None
    """Jinja template of the text that passages are put into a prompt with. It sees ``passages``,
    each with ``number``, ``document``, ``title``, ``text`` and ``score``. Unset: they are quoted
    one by one, with a word to the model that they are data."""

    key: str | None = field(default=None, repr=False, metadata=_RESOLVED)
    """The retriever's key itself."""

    embeddings_key: str | None = field(default=None, repr=False, metadata=_RESOLVED)
    """The key for embeddings itself."""

    rerank_key: str | None = field(default=None, repr=False, metadata=_RESOLVED)
    """The key for reranking itself."""


def is_collection(name: str) -> bool:
    """Whether a collection can have this name: letters, digits and any of ``._-``, no dot first."""
    return _COLLECTION.fullmatch(name) is not None


def pipeline_conflicts(
    name: str, one: PipelineSection, models: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Settings of a pipeline that do not go together, each with a message."""
    if name in models:
        yield "model", f"there is a model called {name} as well; give the pipeline another name"
    known = ", ".join(sorted(models)) or "none, so leave it out"
    if one.model is None:
        if len(models) > 1:
            yield "model", f"is missing: which of the models answers; configured: {known}"
    elif one.model not in models:
        yield "model", f'there is no model "{one.model}"; configured: {known}'
    if one.retriever == "embedded":
        if one.url is not None:
            yield "url", 'is for retrievers elsewhere, and retriever is "embedded"'
    elif one.url is None:
        yield "url", f"is missing: where does the retriever {one.retriever} listen"
    if one.retriever == "qdrant" and not (one.embeddings_url and one.embeddings_model):
        words = "Qdrant is asked with vectors: set embeddings_url and embeddings_model"
        yield "embeddings_url", words
    if one.rerank_url is not None and one.rerank_model is None:
        yield "rerank_model", "is missing beside rerank_url"
    if one.rerank_url is not None and one.candidates < one.passages:
        yield "candidates", f"{one.candidates} is below passages = {one.passages}"
    if len(set(one.degrade)) < len(one.degrade):
        yield "degrade", "each may stand once"
    yield from _wrong_collection(one)
    yield from _wrong_addresses(one)


def _wrong_collection(one: PipelineSection) -> Iterator[tuple[str, str]]:
    if one.retriever != "http" and not is_collection(one.collection):
        words = (
            "is named by up to 128 letters, digits and any of ._-, no dot first, not "
            f"{one.collection[:40]!r}"
        )
        yield "collection", words


def _wrong_addresses(one: PipelineSection) -> Iterator[tuple[str, str]]:
    for setting in ("url", "embeddings_url", "rerank_url"):
        value = getattr(one, setting)
        if value is not None:
            try:
                upstream_address(value)
            except ValueError as error:
                yield setting, str(error)
