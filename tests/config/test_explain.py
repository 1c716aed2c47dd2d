"""What users are shown of their settings."""

import re
import tomllib

from sluice.config.explain import default_text, docs_of, explain, sections
from sluice.config.load import load_settings
from sluice.config.schema import keys_of
from sluice.config.sections import ModelSection, SloSection
from sluice.config.settings import Settings
from sluice.config.sources import parse_override

DEFAULT = default_text("tiny")


def test_every_setting_has_a_meaning():
    missing = [
        f"{heading}.{key.name}"
        for _, section, heading in sections()
        for key in keys_of(section).values()
        if len(docs_of(section).get(key.field, "")) < 20
    ]
    assert not missing
    assert set(docs_of(Settings)) == {key.field for key in keys_of(Settings).values()}


def test_the_default_file_as_printed_sets_nothing():
    assert tomllib.loads(DEFAULT) == {}


def load_text(tmp_path, text):
    file = tmp_path / "sluice.toml"
    file.write_text(text)
    return load_settings(file, (), {}).settings


def test_each_line_of_the_default_file_can_be_uncommented_alone(tmp_path):
    lines = re.findall(r"^#(?! )(.*)$", DEFAULT, re.MULTILINE)
    keys = sum(len(keys_of(section)) for _, section, _ in sections())
    unset = len(re.findall(r"^# \S+ is unset\.$", DEFAULT, re.MULTILINE))
    together = len(re.findall(r"^# routes\.\S+, if not given: \S+", DEFAULT, re.MULTILINE))
    assert len(lines) + unset + together == keys
    for line in lines:
        load_text(tmp_path, line)


def test_the_default_file_uncommented_gives_the_defaults(tmp_path):
    settings = load_text(tmp_path, re.sub(r"^#(?! )", "", DEFAULT, flags=re.MULTILINE))
    defaults = load_settings(environment={}).settings
    assert settings.server == defaults.server
    assert settings.journal == defaults.journal
    assert settings.metrics == defaults.metrics
    assert settings.catalogue == defaults.catalogue
    assert settings.models == {"tiny": ModelSection(source="tiny")}
    assert settings.slo == {"interactive": SloSection(ttft_s=0.5, tpot_s=0.1)}


def test_values_are_told_as_json_has_them(tmp_path):
    loaded = load_settings(None, [parse_override("models.m.threads=3")], {})
    plain = {entry.key: entry.plain for entry in explain(loaded)}
    assert plain["models.m.threads"] == 3
    assert plain["models.m.kv_bytes"] is None
    assert plain["models.m.prefix_cache"] is True
    assert plain["server.grace"] == "30s"
    assert plain["server.cors_origins"] == []
    assert [entry.key for entry in explain(loaded) if not entry.settable] == [
        "server.api_key_digests",
        "server.admin_key_digests",
        "catalogue.hf_token",
    ]


def test_d15_every_value_is_shown_with_its_origin_and_secrets_masked(tmp_path):
    file = tmp_path / "sluice.toml"
    file.write_text('[models.small]\nsource = "a"\nkv_bytes = "2GiB"')
    environment = {"SLUICE_API_KEYS": "sk-one,sk-two", "SLUICE_SERVER__GRACE": "5s"}
    mirror = "catalogue.mirrors=https://user:pass@mirror/x"
    loaded = load_settings(file, [parse_override(mirror)], environment)
    entries = {entry.key: (entry.value, entry.origin) for entry in explain(loaded)}
    assert entries["server.listen"] == ('"127.0.0.1:8000"', "default")
    assert entries["server.grace"] == ('"5s"', "$SLUICE_SERVER__GRACE")
    assert entries["models.small.kv_bytes"] == ('"2GiB"', f"{file}:3")
    assert entries["models.small.replicas.min"] == ("1", "default")
    assert entries["catalogue.mirrors"] == (
        '["https://***@mirror/x"]',
        "--set",
    )
    assert entries["server.api_key_digests"] == ("2 given, masked", "$SLUICE_API_KEYS")
    shown = "\n".join(f"{key} {value}" for key, value in entries.items())
    assert "sk-one" not in shown
    assert "pass@" not in shown
    expected = {f"{path}.{key}" for path, key in _all_keys()}
    assert expected <= set(entries)


def _all_keys():
    for heading in ("server", "journal", "metrics", "catalogue"):
        section = keys_of(Settings)[heading].shape.form
        for name in keys_of(section):
            yield heading, name


def test_keys_of_tenants_are_counted_and_not_shown(tmp_path):
    file = tmp_path / "sluice.toml"
    file.write_text('[tenants.acme]\nkey_sha256_env = "ACME"\nweight = 2')
    one, two = "a" * 64, "b" * 64
    entries = {e.key: e for e in explain(load_settings(file, (), {"ACME": f"{one},{two}"}))}
    keys = entries["tenants.acme.key_digests"]
    assert (keys.value, keys.origin, keys.settable) == ("2 given, masked", "$ACME", False)
    assert entries["tenants.acme.weight"].value == "2.0"
    assert not any(one in f"{entry.key} {entry.value}" for entry in entries.values())


def test_a_tenant_without_a_variable_of_keys_is_told_so(tmp_path):
    file = tmp_path / "sluice.toml"
    file.write_text("[tenants.acme]\nweight = 2")
    entries = {entry.key: entry for entry in explain(load_settings(file, (), {}))}
    keys = entries["tenants.acme.key_digests"]
    assert (keys.value, keys.origin) == (
        "0 given, masked",
        "key_sha256_env and key_sha256_file are unset",
    )


def test_a_setting_that_is_switched_off_by_a_word_is_told_as_that_word(tmp_path):
    file = tmp_path / "sluice.toml"
    file.write_text('[models.m]\nsource = "a"\naging = "strict"')
    entries = {entry.key: entry for entry in explain(load_settings(file, (), {}))}
    assert entries["models.m.aging"].value == '"strict"'
    assert entries["models.m.aging"].plain == "strict"
