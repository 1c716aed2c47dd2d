"""What a changed configuration changes while the server runs, and what waits for a restart.

``merged`` lays new settings over those in force: a setting that can change takes its new value, any
other keeps the old one and is told. What is not listed in ``LIVE`` needs a restart, so that a new
setting is never taken for one that can change. Called by ``wiring``, which applies the result.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from sluice.config.schema import keys_of
from sluice.config.settings import Settings
from sluice.config.sources import KeyPath, dotted

# Settings that can change while requests run, by table. Keys of callers that were read from files
# and variables (``_digest``, ``_digests``) can too.
LIVE: Mapping[str, frozenset[str]] = {
    "server": frozenset(
        {
            "body_bytes_max", "bodies_bytes_max", "header_bytes_max", "connections_max",
            "request_max", "grace",
            "api_keys_env", "api_key_file", "admin_key_env", "admin_key_file", "metrics_open",
            "allow_unauthenticated", "trust_tenant_header", "cors_origins",
            "api_key_digests", "admin_key_digests", "tenant_key_digests",
        }
    ),
    "models": frozenset(
        {
            "queue_requests_max", "queue_tokens_max", "queue_bytes_max", "queue_wait_max", "slo",
            "smaller", "fallback", "utilisation", "headroom", "aging",
            # Of remote models: other engines, or the same on other terms.
            "urls", "key_env", "key_file", "key", "upstream_model", "in_flight_max",
            "engine_priorities", "connect_max", "first_token_max", "whole_max", "retries", "probe",
        }
    ),
    "autoscale": frozenset(
        {
            "utilisation", "quantile", "drain", "queue_wait", "cold_start", "idle",
            "hold_requests_max", "hold_max", "leave_max", "schedules",
        }
    ),
}  # fmt: skip
# Tables of which each can come, go and change as a whole.
LIVE_TABLES = frozenset({"routes", "slo", "tenants"})


@dataclass(frozen=True, slots=True)
class Merged:
    """The settings that hold from now on, and which of them are new.

    ``waiting`` differ in the new settings and keep their value until a restart.
    """

    settings: Settings
    applied: tuple[KeyPath, ...]
    waiting: tuple[KeyPath, ...]


def merged(before: Settings, after: Settings) -> Merged:
    """The new settings as far as they can hold at once."""
    applied: list[KeyPath] = []
    waiting: list[KeyPath] = []
    values: dict[str, Any] = {}
    for name, key in keys_of(Settings).items():
        old, new = getattr(before, key.field), getattr(after, key.field)
        if key.shape.form is not Mapping:
            values[key.field] = _section(old, new, (name,), applied, waiting)
        elif name in LIVE_TABLES:
            applied += _differing(old, new, name)
            values[key.field] = new
        else:
            there = {one: new.get(one, old[one]) for one in old}
            waiting += [(name, one) for one in {**old, **new} if (one in old) != (one in new)]
            values[key.field] = {
                one: _section(old[one], there[one], (name, one), applied, waiting) for one in old
            }
    return Merged(replace(before, **values), tuple(applied), tuple(waiting))


def is_live(table: str, key: str) -> bool:
    """Whether a setting of a table, ``server`` or ``models``, can change while requests run."""
    return table in LIVE_TABLES or key in LIVE.get(table, ())


def _section(
    old: Any, new: Any, path: KeyPath, applied: list[KeyPath], waiting: list[KeyPath]
) -> Any:
    """A section with the new values that can hold at once."""
    changed = {}
    for field, name in _fields(type(old)):
        value = getattr(new, field)
        if value == getattr(old, field):
            continue
        if is_live(path[0], name):
            changed[field] = value
            applied.append((*path, name))
        else:
            waiting.append((*path, name))
    return replace(old, **changed)


def _fields(section: type) -> Iterator[tuple[str, str]]:
    """Each field of a section with the name that users know it by."""
    names = {key.field: key.name for key in keys_of(section).values()}
    for field in fields(section):
        yield field.name, names.get(field.name, field.name)


def _differing(old: Mapping[str, Any], new: Mapping[str, Any], table: str) -> Iterator[KeyPath]:
    """What differs between the tables of one kind: a whole table, or settings in it."""
    for name in {**old, **new}:
        if (name in old) != (name in new):
            yield (table, name)
            continue
        for field, key in _fields(type(new[name])):
            if getattr(old[name], field) != getattr(new[name], field):
                yield (table, name, key)


def told(paths: tuple[KeyPath, ...]) -> tuple[str, ...]:
    """Paths as users write them."""
    return tuple(dotted(path) for path in paths)
