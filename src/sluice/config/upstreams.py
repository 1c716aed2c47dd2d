"""What may be written about models of remote engines: addresses, and which settings go together.

Called by ``settings`` for the checks and by wiring for the addresses. Nothing is connected here.
"""

from collections.abc import Iterator
from dataclasses import fields
from typing import NamedTuple
from urllib.parse import urlsplit

from sluice.config.sections import ModelSection

# Settings that say something of engines elsewhere, and those of models that run here.
_REMOTE_ONLY = (
    "start", "key_env", "key_file", "upstream_model", "in_flight_max", "engine_priorities",
    "connect_s_max", "first_token_s_max", "whole_s_max", "probe_s", "retries", "sleep",
)  # fmt: skip
_HERE_ONLY = (
    "numerics", "kv_bytes", "sequences_max", "threads", "policy", "static_batch",
    "prefix_cache", "prefill_chunk_tokens_max", "step_s_max", "prefill_share", "kv_headroom",
    "load_s_max",
)  # fmt: skip
_STARTED = ("load_s_max",)
_DEFAULTS = {one.name: one.default for one in fields(ModelSection)}


class UpstreamAddress(NamedTuple):
    """Where an engine listens; ``path`` is what stands before ``/v1``."""

    host: str
    port: int
    tls: bool
    path: str


def upstream_address(url: str) -> UpstreamAddress:
    """An address taken apart. Raises ``ValueError`` saying what is wrong with it."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https", "dns+http"} or not parts.hostname:
        raise ValueError("must be an address such as http://gpu-1:8000 or https://api.example.com")
    if parts.username is not None or parts.password is not None:
        raise ValueError("must not hold a password; name the key's variable in key_env")
    if parts.query or parts.fragment:
        raise ValueError("must end with its path")
    path = parts.path.rstrip("/")
    if path.endswith("/v1"):
        raise ValueError(
            f'must not end with /v1, which every route has; write "{url.rstrip("/")[:-3]}"'
        )
    if not all("!" <= c <= "~" for c in url):
        raise ValueError("must be plain ASCII without blanks")
    tls = parts.scheme == "https"
    return UpstreamAddress(parts.hostname, parts.port or (443 if tls else 80), tls, path)


def contradictions(name: str, model: ModelSection) -> Iterator[tuple[str, str]]:
    """Settings of a model that do not go with its engine, each with a message."""
    if not model.is_remote:
        if model.urls:
            yield "urls", "is for engines that run elsewhere; say which in engine"
        for setting in _REMOTE_ONLY:
            if getattr(model, setting) != _DEFAULTS[setting]:
                yield _key(setting), f'is for remote engines, and engine is "{model.engine}"'
        return
    if model.source != name:
        yield "source", f'is for models that run here, and engine is "{model.engine}"; leave it out'
    yield from _whereabouts(model)
    if model.sleep and model.engine != "vllm":
        yield "sleep", f'is for vllm, and engine is "{model.engine}"'
    for setting in _HERE_ONLY:
        started = bool(model.start) and setting in _STARTED
        if not started and getattr(model, setting) != _default(setting):
            yield _key(setting), f'is for models that run here, and engine is "{model.engine}"'
    seen = set[UpstreamAddress]()
    for one in model.urls:
        try:
            address = upstream_address(one.url)
        except ValueError as error:
            yield "urls", f'"{_shown(one.url)}" {error}'
            continue
        if address in seen:
            yield "urls", f'"{one.url}" stands twice; give it a larger weight instead'
        seen.add(address)


def _whereabouts(model: ModelSection) -> Iterator[tuple[str, str]]:
    """What does not say where engines listen, or who starts them."""
    if not model.start and not model.urls:
        yield (
            "urls",
            f'is missing: where does {model.engine} listen, for example ["http://gpu-1:8000"]',
        )
    if model.start and model.urls:
        yield "urls", "is for engines that others start; leave urls or start out"
    if model.start and not any("{port}" in word for word in model.start):
        yield "start", "must say {port} where the command takes the port to listen at"


def _default(setting: str) -> object:
    return getattr(ModelSection(source=""), setting)


def _key(setting: str) -> str:
    """The name that users write: durations without their unit."""
    return "_".join(word for word in setting.split("_") if word != "s")


def _shown(url: str) -> str:
    """An address without what may be a password."""
    before, at, after = url.rpartition("@")
    return f"{before.partition('//')[0]}//***@{after}" if at else url
