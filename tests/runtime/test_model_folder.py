"""Which folders are models, and their facts."""

import json

import pytest

from sluice.core.errors import ModelLoadError
from sluice.runtime.model_folder import ModelFacts, read_model_folder, write_facts

CONFIG = {"model_type": "qwen2", "vocab_size": 100, "max_position_embeddings": 4096,
          "eos_token_id": 7, "bos_token_id": 5}  # fmt: skip
TOKENIZER = {"added_tokens": [{"id": 8, "content": "<|im_end|>"}, {"id": 5, "content": "<s>"}],
             "model": {"type": "BPE", "vocab": {}, "merges": []}}  # fmt: skip


@pytest.fixture
def optimum(tmp_path):
    (tmp_path / "openvino_model.xml").write_text("<net/>")
    (tmp_path / "openvino_model.bin").write_bytes(b"")

    def write(**files):
        contents = {"config": CONFIG, "tokenizer": TOKENIZER, **files}
        for name, content in contents.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / f"{name}.json").write_text(text)
        return tmp_path

    return write


def test_facts_survive_writing_and_reading(optimum):
    facts = ModelFacts("m", "llama", 8192, 49152, 1, 2, (2, 0), "<s>", "</s>", True, "{{ x }}")
    folder = optimum()
    write_facts(facts, folder)
    assert read_model_folder(folder).facts == facts


def test_an_optimum_folder_works_as_it_is(optimum):
    folder = read_model_folder(
        optimum(
            tokenizer_config={
                "eos_token": {"content": "<|im_end|>"},
                "bos_token": "<s>",
                "add_bos_token": True,
                "chat_template": "T",
            },
            generation_config={"eos_token_id": [8, 9]},
        )
    )
    facts = folder.facts
    assert facts.architecture == "qwen2"
    assert facts.context_tokens_max == 4096
    assert facts.end_tokens == (8, 7, 9)
    assert (facts.bos_token, facts.bos_text, facts.add_bos) == (5, "<s>", True)
    assert facts.chat_template == "T"
    assert folder.graph_path.is_file()


def test_a_template_file_wins_and_named_templates_are_told_apart(optimum):
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "U"}]
    folder = optimum(tokenizer_config={"chat_template": named})
    facts = read_model_folder(folder).facts
    assert (facts.chat_template, facts.chat_template_tools) == ("D", "U")
    (folder / "chat_template.jinja").write_text("J")
    assert read_model_folder(folder).facts.chat_template == "J"


@pytest.mark.parametrize("nested", [False, True])
def test_a_post_processor_that_adds_bos_is_noticed(optimum, nested):
    processor = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}]}
    if nested:
        processor = {"type": "Sequence", "processors": [{"type": "ByteLevel"}, processor]}
    folder = optimum(
        tokenizer={**TOKENIZER, "post_processor": processor},
        tokenizer_config={"bos_token": "<s>"},
    )
    assert read_model_folder(folder).facts.add_bos


@pytest.mark.parametrize("name", ["openvino_model.xml", "openvino_model.bin", "tokenizer.json"])
def test_a_missing_file_is_named(optimum, name):
    folder = optimum()
    (folder / name).unlink()
    with pytest.raises(ModelLoadError, match=name):
        read_model_folder(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config", '{"vocab_size": '),
        ("config", '{"vocab_size": "many", "max_position_embeddings": 1}'),
        ("config", '{"vocab_size": 10}'),
        ("tokenizer_config", "[]"),
        ("sluice", '{"name": 1}'),
    ],
)
def test_a_corrupt_file_is_named(optimum, name, content):
    with pytest.raises(ModelLoadError, match=rf"{name}\.json does not hold"):
        read_model_folder(optimum(**{name: content}))


def test_a_path_that_is_no_folder_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match="is not a folder"):
        read_model_folder(tmp_path / "none")
