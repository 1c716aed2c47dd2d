"""What users are shown of their settings."""

import re
import tomllib

from sluice.config.explain import default_text, docs_of, explain, sections
from sluice.config.load import load_settings
from sluice.config.schema import keys_of
from sluice.config.settings import Settings
from sluice.config.sources import parse_override


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
    assert tomllib.loads(default_text()) == {}


def test_the_default_file_uncommented_gives_the_defaults(tmp_path):
    text = re.sub(r"^#(?! )", "", default_text(), flags=re.MULTILINE)
    # Names of secrets are left out: naming a variable that is not set is an error.
    text = re.sub(r"^\w+_env = .*$", "", text, flags=re.MULTILINE)
    text = text.replace("\n[slo.NAME]\n", '\n[slo.NAME]\nttft = "1s"\n')
    file = tmp_path / "all.toml"
    file.write_text(text)
    settings = load_settings(file, (), {}).settings
    defaults = load_settings(environment={}).settings
    assert settings.server == defaults.server
    assert settings.journal == defaults.journal
    assert settings.catalogue == defaults.catalogue
    assert settings.models["NAME"].source == "..."


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
