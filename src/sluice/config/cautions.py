"""Settings that are allowed and do not do what they seem to: told, never refused.

Called by ``sluice config check`` and at the start of a server. What is wrong in any case is an
error and stands in ``settings.conflicts``.
"""

from collections.abc import Iterator, Mapping

from sluice.config.settings import Settings, is_loopback
from sluice.config.upstreams import upstream_address


def cautions(settings: Settings, contexts: Mapping[str, int] | None = None) -> Iterator[str]:
    """What the operator may have expected otherwise, a line each.

    ``contexts`` are the longest sequences of models by name, where more is known of them than the
    settings say.
    """
    given = {
        name: model.context_tokens_max
        for name, model in settings.models.items()
        if model.context_tokens_max is not None and not model.is_remote
    }
    yield from _tenants(settings, {**given, **(contexts or {})})
    yield from _smaller(settings)
    yield from _open_keys(settings)


def _tenants(settings: Settings, contexts: Mapping[str, int]) -> Iterator[str]:
    for name, tenant in settings.tenants.items():
        has_key = tenant.key_sha256_env is not None or tenant.key_sha256_file is not None
        if not has_key and not settings.server.trust_tenant_header:
            yield (
                f"tenants.{name}: nothing makes a request one of this tenant, so the table does "
                "nothing; set its key_sha256_env or key_sha256_file, or "
                "server.trust_tenant_header behind a proxy"
            )
        limit = tenant.tokens_per_minute
        over = {} if limit is None else {m: c for m, c in contexts.items() if c > limit}
        for model, context in over.items():
            yield (
                f"tenants.{name}: tokens_per_minute = {limit} is below the context of {model}, "
                f"{context} tokens; a call without max_tokens reserves the rest of the context, so "
                "that it is always refused"
            )


def _smaller(settings: Settings) -> Iterator[str]:
    using = [name for name, slo in settings.slo.items() if "smaller" in slo.overload]
    offering = [name for name, model in settings.models.items() if model.smaller is not None]
    if not offering:
        for name in using:
            yield (
                f'slo.{name}: "smaller" in overload does nothing, because no model names a '
                "smaller one; set models.NAME.smaller"
            )
    if not using:
        for name in offering:
            yield (
                f'models.{name}: smaller does nothing, because no class has "smaller" in its '
                "overload"
            )


def _open_keys(settings: Settings) -> Iterator[str]:
    for name, model in settings.models.items():
        addresses = [upstream_address(one.url) for one in model.urls]
        hosts = [one.host for one in addresses if not one.tls and not is_loopback(one.host)]
        if model.key_env is not None and hosts:
            yield (
                f"models.{name}: its key goes to {hosts[0]} unencrypted, where others on the way "
                "can read it; use https"
            )
