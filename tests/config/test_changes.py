"""What of a changed file holds at once, and what waits for a restart."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from sluice.config.changes import LIVE, LIVE_TABLES, is_live, merged, told
from sluice.config.schema import Key, keys_of
from sluice.config.sections import ModelSection, ServerSection, SloSection, TenantSection
from sluice.config.settings import Settings

BEFORE = Settings(
    models={"m": ModelSection("m"), "n": ModelSection("n")},
    slo={"gold": SloSection(ttft_s=1.0)},
    tenants={"acme": TenantSection(weight=2.0)},
)


def other(key: Key) -> Any:
    """A value that differs from the default."""
    if key.shape.form is bool:
        return not key.default
    if key.shape.form in {int, float}:
        return (key.default or 1) * 3
    if key.shape.form is tuple:
        return ("x",)
    return Path("x") if key.shape.form is Path else "other"


def keys(section: type) -> list[Key]:
    return list(keys_of(section).values())


@pytest.mark.parametrize("key", keys(ServerSection), ids=lambda key: key.name)
def test_a_setting_of_the_server_holds_at_once_or_is_told_to_wait(key):
    after = replace(BEFORE, server=replace(BEFORE.server, **{key.field: other(key)}))
    change = merged(BEFORE, after)
    live = key.name in LIVE["server"]
    assert change.applied == ((("server", key.name),) if live else ())
    assert change.waiting == (() if live else (("server", key.name),))
    assert change.settings == (after if live else BEFORE)


@pytest.mark.parametrize("key", keys(ModelSection), ids=lambda key: key.name)
def test_a_setting_of_a_model_holds_at_once_or_is_told_to_wait(key):
    changed = replace(BEFORE.models["m"], **{key.field: other(key)})
    after = replace(BEFORE, models={**BEFORE.models, "m": changed})
    change = merged(BEFORE, after)
    live = key.name in LIVE["models"]
    assert change.applied == ((("models", "m", key.name),) if live else ())
    assert change.waiting == (() if live else (("models", "m", key.name),))
    assert change.settings == (after if live else BEFORE)


@pytest.mark.parametrize(("section", "name"), [(ServerSection, "server"), (ModelSection, "models")])
def test_what_is_listed_as_live_exists(section, name):
    known = set(keys_of(section)) | {field.name for field in fields(section)}
    assert known >= LIVE[name]


def test_where_a_server_listens_and_what_it_loads_never_change_while_it_runs():
    for key in ("listen", "tls_cert_file", "tls_key_file"):
        assert not is_live("server", key)
    for key in ("source", "engine", "numerics", "replicas", "threads", "kv_bytes"):
        assert not is_live("models", key)
    assert not is_live("journal", "dir")


def test_classes_and_tenants_come_go_and_change_as_a_whole():
    after = replace(
        BEFORE,
        slo={"gold": SloSection(ttft_s=2.0), "new": SloSection()},
        tenants={"other": TenantSection()},
    )
    change = merged(BEFORE, after)
    assert told(change.applied) == ("slo.gold.ttft", "slo.new", "tenants.acme", "tenants.other")
    assert change.waiting == ()
    assert change.settings == after
    assert set(LIVE_TABLES) == {"routes", "slo", "tenants"}


def test_a_model_that_comes_or_goes_waits_and_the_others_change():
    after = replace(
        BEFORE,
        models={"m": replace(BEFORE.models["m"], queue_requests_max=1), "new": ModelSection("x")},
    )
    change = merged(BEFORE, after)
    assert told(change.applied) == ("models.m.queue_requests_max",)
    assert told(change.waiting) == ("models.n", "models.new")
    assert set(change.settings.models) == {"m", "n"}
    assert change.settings.models["m"].queue_requests_max == 1


def test_keys_that_were_read_change_at_once():
    server = replace(
        BEFORE.server,
        api_key_digests=("a",),
        admin_key_digests=("b",),
        tenant_key_digests=(("c", "acme"),),
    )
    change = merged(BEFORE, replace(BEFORE, server=server))
    assert len(change.applied) == 3
    assert change.settings.server == server


def test_nothing_that_changed_changes_nothing():
    change = merged(BEFORE, replace(BEFORE))
    assert change == replace(change, applied=(), waiting=(), settings=BEFORE)


def test_other_sections_wait():
    after = replace(BEFORE, journal=replace(BEFORE.journal, keep_s=1.0))
    change = merged(BEFORE, after)
    assert told(change.waiting) == ("journal.keep",)
    assert change.settings == BEFORE
