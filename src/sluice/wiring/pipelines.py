"""Settings of pipelines to the gateway that serves them."""

import ssl
from pathlib import Path

from sluice.cluster.gateway import LocalGateway
from sluice.cluster.pipelines import Pipeline, PipelineGateway
from sluice.cluster.posting import ANSWER_BYTES_MAX, EnginePost
from sluice.cluster.retrieving import RetrievalStage, StageLimits
from sluice.config.load import file_text
from sluice.config.pipeline_sections import PipelineSection
from sluice.config.settings import Settings
from sluice.config.upstreams import upstream_address
from sluice.core.admission import NS_PER_S
from sluice.core.errors import ConfigError
from sluice.executors.dialects import DIALECTS
from sluice.executors.http_pool import Address
from sluice.executors.remote import RemoteEngine, Upstream
from sluice.executors.remote_answer import AnswerLimits
from sluice.retrieval.embedded import EmbeddedRetriever
from sluice.retrieval.http_service import HttpEmbeddings, HttpReranker, HttpRetriever
from sluice.retrieval.passages import Retriever
from sluice.runtime.clock import monotonic_ns
from sluice.runtime.generation import RetrievalRung
from sluice.runtime.quoting import TEMPLATE_DEFAULT, Quotation
from sluice.wiring.defaults import models_of


def pipeline_gateway(behind: LocalGateway, settings: Settings) -> PipelineGateway:
    """A gateway that serves the pipelines of the settings, too. Raises ``ConfigError``."""
    problems: list[str] = []
    made: list[Pipeline] = []
    first = next(iter(models_of(settings)))
    for name, section in settings.pipelines.items():
        try:
            model = section.model or first
            stage = _stage(name, section, settings.documents.dir)
            ttft_ns = None if section.ttft_s is None else round(section.ttft_s * NS_PER_S)
            made.append(Pipeline(name, model, stage, ttft_ns))
        except ConfigError as error:
            problems += [f"pipelines.{name}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(tuple(problems))
    return PipelineGateway(behind, made)


def _stage(name: str, section: PipelineSection, folder: Path) -> RetrievalStage:
    limits = StageLimits(
        pipeline=name,
        passages_max=section.passages,
        candidates_max=section.candidates,
        retrieval_ns_max=round(section.retrieval_s_max * NS_PER_S),
        keeps_budget=section.budget,
        allowed=frozenset(map(RetrievalRung, section.degrade)),
        in_flight_max=section.concurrency,
    )
    reranker = None
    if section.rerank_url is not None:
        post = _post(f"reranker of {name}", section.rerank_url, "/v1/rerank", section.rerank_key)
        reranker = HttpReranker(post, section.rerank_model or "")
    quotation = Quotation(_template(section.template_file))
    retriever = _retriever(name, section, folder)
    return RetrievalStage(limits, retriever, reranker, quotation, monotonic_ns)


def _retriever(name: str, section: PipelineSection, folder: Path) -> Retriever:
    if section.retriever == "embedded":
        return EmbeddedRetriever(folder, section.collection)
    url = section.url or ""
    if section.retriever == "http":
        return HttpRetriever(
            _post(f"retriever of {name}", url, "", section.key), section.collection
        )
    try:
        from sluice.retrieval.qdrant import QdrantRetriever, connected  # noqa: PLC0415 - an extra
    except ImportError as error:
        words = f"retriever: qdrant needs the extra: pip install 'sluice[retrieval]' ({error.name})"
        raise ConfigError((words,)) from error
    post = _post(
        f"embeddings of {name}",
        section.embeddings_url or "",
        "/v1/embeddings",
        section.embeddings_key,
    )
    embeddings = HttpEmbeddings(post, section.embeddings_model or "")
    return QdrantRetriever(connected(url, section.key), section.collection, embeddings)


def _post(name: str, url: str, path: str, key: str | None) -> EnginePost:
    address = upstream_address(url)
    tls = ssl.create_default_context() if address.tls else None
    upstream = Upstream(
        name,
        Address(address.host, address.port, tls),
        DIALECTS["openai"],
        path=address.path,
        key=key or "",
        answers=AnswerLimits(whole_bytes_max=ANSWER_BYTES_MAX),
    )
    return EnginePost(RemoteEngine(upstream), path or ("" if address.path else "/"))


def _template(file: Path | None) -> str:
    if file is None:
        return TEMPLATE_DEFAULT
    try:
        return file_text(file)
    except OSError as error:
        raise ConfigError((f"template_file: {file} cannot be read: {error.strerror}",)) from error
    except ValueError as error:
        raise ConfigError((f"template_file: {file} cannot be used: {error}",)) from error
