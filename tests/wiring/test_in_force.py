"""The journal tells what a server is set to and what changed, across reloads and restarts."""

from dataclasses import replace
from pathlib import Path

from sluice.config.sections import JournalSection, ModelSection, ServerSection, SloSection
from sluice.config.settings import Settings
from sluice.runtime.model_folder import ModelFacts, ModelFolder
from sluice.telemetry.records import Change
from sluice.wiring.deployment import PreparedModel
from sluice.wiring.gateway import _started
from sluice.wiring.in_force import facts_of, reloaded, settings_in_force, started

FACTS = ModelFacts("tiny", "llama", 2048, 100, source_sha256="a" * 64, chat_template="{{ x }}")
SECTION = ModelSection(source="/home/somebody/private/tiny.gguf", kv_bytes=2**20)
SETTINGS = Settings(
    models={"tiny": SECTION, "far": ModelSection("far", engine="vllm", key="hunter2")},
    slo={"fast": SloSection(ttft_s=0.5)},
    server=ServerSection(api_key_digests=("ab" * 32,), api_key_file=Path("/etc/private/keys")),
)


def prepared(section: ModelSection = SECTION, facts: ModelFacts = FACTS) -> list[PreparedModel]:
    return [PreparedModel("tiny", section, ModelFolder(Path("/private"), facts))]


def test_settings_and_facts_that_matter_are_told():
    told = settings_in_force(SETTINGS) | facts_of(prepared())
    assert told["models.tiny.kv_bytes"] == '"1MiB"'
    assert told["slo.fast.ttft"] == '"500ms"'
    assert told["facts.tiny.context_tokens_max"] == "2048"
    assert {"facts.tiny.template", "facts.tiny.fingerprint", "facts.version"} <= set(told)


def test_no_key_and_no_place_is_told():
    told = repr(settings_in_force(SETTINGS) | facts_of(prepared()))
    for secret in ("private", "hunter2", "abab"):
        assert secret not in told


def test_a_reload_tells_what_is_different_and_keeps_the_facts():
    first = started(SETTINGS, prepared(), {"note": "x"}, None)
    slower = replace(SETTINGS, slo={"fast": SloSection(ttft_s=1.0)})
    second = reloaded(first, slower, {"applied": "slo.fast.ttft"})
    assert second.what == "reload"
    assert second.changed == {"slo.fast.ttft": Change('"500ms"', '"1s"')}
    assert second.settings["facts.tiny.template"] == first.settings["facts.tiny.template"]
    assert second.digest != first.digest


def test_a_restart_with_another_template_and_context_says_so(tmp_path):
    settings = replace(SETTINGS, journal=JournalSection(dir=tmp_path / "journal"))
    assert _started(settings, prepared(), {}).changed == {}
    other = replace(FACTS, chat_template="{{ y }}", context_tokens_max=4096)
    again = _started(settings, prepared(facts=other), {})
    assert set(again.changed) == {"facts.tiny.template", "facts.tiny.context_tokens_max"}
    assert again.changed["facts.tiny.context_tokens_max"] == Change("2048", "4096")


def test_without_a_journal_nothing_is_kept(tmp_path):
    section = JournalSection(enabled=False, dir=tmp_path / "journal")
    settings = replace(SETTINGS, journal=section)
    _started(settings, prepared(), {})
    assert not section.dir.exists()
