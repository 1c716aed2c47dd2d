"""What the operator is told once every model is loaded: what each can hold, and where to call."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType

from sluice.cluster.remote_model import CONTEXT_TOKENS_UNKNOWN
from sluice.config.settings import Settings
from sluice.core.events import ReplicaLimits
from sluice.core.pool_view import PoolView

_MIB = 1024**2


def welcome(
    pools: Sequence[PoolView],
    address: str,
    remote: AbstractSet[str] = frozenset(),
    further: Mapping[str, str] = MappingProxyType({}),
    *,
    needs_key: bool,
) -> str:
    """The text for standard error; ``address`` is the server's, without a path.

    ``remote`` are the models of engines elsewhere, ``further`` the names that are no models, with
    what stands behind each.
    """
    lines = []
    for pool in pools:
        if pool.model in remote:
            lines.append(_remote_line(pool, pool.limits))
        elif pool.limits is not None:
            lines += _model_lines(pool, pool.limits)
        else:
            lines.append(f"{pool.model}: no replica; the first request starts one")
    lines += [f"{name}: {words}" for name, words in further.items()]
    key = ' -H "Authorization: Bearer $KEY"' if needs_key else ""
    message = '{"role": "user", "content": "Hello"}'
    body = f'{{"model": "{pools[0].model}", "messages": [{message}], "max_tokens": 50}}'
    return "\n".join(
        (
            *lines,
            f"API        {address}/v1",
            f"dashboard  {address}/dashboard",
            f"metrics    {address}/metrics",
            "",
            f"curl {address}/v1/chat/completions{key} -H 'content-type: application/json' \\",
            f"  -d '{body}'",
        )
    )


def further_names(settings: Settings) -> dict[str, str]:
    """What clients can ask for that is no model, with what stands behind it."""
    only = next(iter(settings.models), "")
    routes = {
        name: f"route, {one.simple} for simple prompts, {one.complex} for complex ones"
        for name, one in settings.routes.items()
    }
    pipelines = {
        name: f"pipeline, {one.retriever} retrieval before {one.model or only}"
        for name, one in settings.pipelines.items()
    }
    return routes | pipelines


def _model_lines(pool: PoolView, limits: ReplicaLimits) -> list[str]:
    kv_tokens = limits.blocks_total * limits.block_size
    size = _size(limits.blocks_total * limits.block_bytes)
    held = (
        f"{pool.model}: context {limits.context_tokens_max:,} tokens, KV pool "
        f"{kv_tokens:,} tokens ({size}), {limits.sequences_max:,} sequences at once, "
        f"{_replicas(pool)}"
    )
    lines = [held]
    if kv_tokens < limits.context_tokens_max:
        lines.append(
            f"note: {pool.model}: the KV pool is smaller than the context; a request can have at "
            f"most {kv_tokens:,} tokens. Raise kv_bytes or free memory for more"
        )
    return lines


def _replicas(pool: PoolView) -> str:
    if pool.scaling is None:
        return _count(len(pool.replicas), "replica")
    return f"{_count(pool.scaling.number, 'replica')}, {pool.scaling.most:,} at most"


def _remote_line(pool: PoolView, limits: ReplicaLimits | None) -> str:
    engines = _count(len(pool.replicas), "engine")
    if limits is None:
        return f"note: {pool.model}: remote, {engines}; none answers yet, and it is asked again"
    context = f"context {limits.context_tokens_max:,} tokens, "
    if limits.context_tokens_max == CONTEXT_TOKENS_UNKNOWN:
        context = ""
    return (
        f"{pool.model}: remote, {engines}, {context}at most "
        f"{_count(limits.sequences_max, 'request')} at an engine"
    )


def _size(size_bytes: int) -> str:
    if size_bytes >= 1024 * _MIB:
        return f"{size_bytes / 1024 / _MIB:.1f} GiB"
    return f"{size_bytes / _MIB:,.0f} MiB"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
