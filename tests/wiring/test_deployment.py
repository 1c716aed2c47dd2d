"""Fingerprints change with what may change answers, and descriptions hold nothing secret."""

from dataclasses import replace
from pathlib import Path

from sluice.config.sections import ModelSection
from sluice.runtime.model_folder import ModelFacts, ModelFolder
from sluice.wiring.deployment import PreparedModel, deployment

FACTS = ModelFacts("tiny", "llama", 2048, 100, source_sha256="a" * 64)
SECTION = ModelSection(source="/home/somebody/secret/tiny.gguf")
MODEL = PreparedModel("tiny", SECTION, ModelFolder(Path("/nowhere"), FACTS))


def of(section: ModelSection = SECTION, facts: ModelFacts = FACTS) -> PreparedModel:
    return PreparedModel("tiny", section, ModelFolder(Path("/nowhere"), facts))


def test_fingerprints_differ_between_numerics_and_weights_and_for_nothing_else():
    exact = of(replace(SECTION, numerics="exact"))
    other = of(facts=replace(FACTS, source_sha256="b" * 64))
    assert len({MODEL.fingerprint, exact.fingerprint, other.fingerprint}) == 3
    assert of(replace(SECTION, sequences_max=3)).fingerprint == MODEL.fingerprint


def test_weights_that_nobody_hashed_are_told_apart_by_graph_and_size(tmp_path):
    (tmp_path / "openvino_model.xml").write_text("graph")
    (tmp_path / "openvino_model.bin").write_bytes(b"12")
    folder = ModelFolder(tmp_path, replace(FACTS, source_sha256=""))
    before = folder.version
    (tmp_path / "openvino_model.bin").write_bytes(b"123")
    assert folder.version != before


def test_a_deployment_tells_versions_and_settings_without_paths():
    told = deployment([MODEL])
    assert set(told) == {"version", "model tiny"}
    for words in (MODEL.fingerprint, "numerics fast", "context 2048", "KV pool sized at load"):
        assert words in told["model tiny"]
    assert "secret" not in str(told)
    changed = deployment([of(replace(SECTION, step_s_max=0.2))])
    assert changed["model tiny"] != told["model tiny"]


def test_a_context_beyond_what_the_model_was_trained_for_is_noted():
    assert MODEL.notes == []
    (note,) = of(replace(SECTION, context_tokens_max=4096)).notes
    assert "4,096" in note
    assert "2,048" in note
    assert of(replace(SECTION, context_tokens_max=4096)).context_tokens_max == 2048
