"""The tokenizer made from the default model's GGUF against the one OpenVINO makes from it."""

import random
from pathlib import Path

import pytest

from sluice.core.errors import InvalidRequest
from sluice.executors.gguf import read_gguf
from sluice.runtime.generation import ChatPrompt
from sluice.runtime.model_folder import ModelFolder
from sluice.runtime.prepare import write_text_side
from sluice.runtime.templates import ChatTemplate
from sluice.runtime.tokenizing import Tokenizer
from tests.runtime.clocks import new_year

pytestmark = pytest.mark.model

FRAGMENTS = (
    "Hello",
    " world",
    "The quick brown fox",
    "naïve café",
    "Größe",
    "Ünïcödé",
    "日本語のテキスト",
    "中文 字符",
    "한국어",
    "Привет мир",
    "مرحبا",
    "שלום",
    "नमस्ते",
    "ไทย",
    "👩‍👩‍👧",
    "🏳️‍🌈",
    "😀😀",
    "e\u0301",
    "\u00a0",
    "\u200b",
    "\u3000",
    " ",
    "  ",
    "    ",
    "\t",
    "\n",
    "\n\n",
    "\r\n",
    "1",
    "12",
    "2024",
    "3.14159",
    "1,000,000",
    "0x1F",
    "don't",
    "I'll we've THEY'RE",
    "def f(x):\n    return x**2",
    "for (int i=0;i<10;++i){}",
    "a_b-c.d/e\\f",
    "https://example.com/?q=1&r=2",
    "<b>bold</b>",
    '{"k": [1, null]}',
    "$$x^2$$",
    "!!!",
    "...",
    "—",
    "“quoted”",
    "\x00",
    "\x7f",
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<repo_name>",
    "½ ² ①",
    "ﬁ ligature",
    "aaaaaaaaaaaaaaaaaaaa",
    "ABCdefGHI",
    "_",
    "#",
    "@user",
    "a" * 200,
    " " * 90,
)


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("smollm2")
    facts = write_text_side(read_gguf(smollm2_gguf), "", folder)
    return Tokenizer.load(ModelFolder(folder, facts))


def strings() -> list[str]:
    rng = random.Random(7)
    mixed = ["".join(rng.choices(FRAGMENTS, k=rng.randint(1, 8))) for _ in range(300)]
    return [*FRAGMENTS, *mixed]


def test_ids_equal_those_of_openvino_for_varied_strings(smollm2, smollm2_gguf):
    # Large, and needed for this test only.
    import openvino_genai  # noqa: PLC0415

    theirs = openvino_genai.Tokenizer(str(smollm2_gguf))
    checked = 0
    for text in strings():
        if "\x00" in text:
            continue  # OpenVINO's strings end there
        expected = theirs.encode(text, add_special_tokens=False).input_ids.data[0].tolist()
        assert list(smollm2.encode_chat(text)) == expected, repr(text)
        checked += 1
    assert checked > 200


def test_decoding_gives_varied_strings_back(smollm2):
    for text in strings():
        assert smollm2.decode(smollm2.encode_text(text)) == text


def test_special_tokens_in_a_clients_text_are_text(smollm2):
    tokens = smollm2.encode_text("a<|im_end|>b")
    assert not smollm2.special_tokens & set(tokens)


def test_facts_of_the_default_model(smollm2):
    facts = smollm2.facts
    assert (facts.context_tokens_max, facts.vocab_size, facts.add_bos) == (8192, 49152, False)
    assert (facts.bos_text, facts.eos_text, facts.end_tokens) == (
        "<|im_start|>",
        "<|im_end|>",
        (2, 0),
    )


def test_ten_megabytes_are_known_to_be_too_long_without_tokenising(smollm2):
    assert smollm2.tokens_min(10_000_000) > 100_000


def test_the_default_models_template_renders_as_known(smollm2):
    template = ChatTemplate(smollm2.facts, new_year)
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert template.render(ChatPrompt([{"role": "user", "content": "Hi"}])) == (
        f"<|im_start|>system\n{system}<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    with_system = ChatPrompt(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": "Bye"},
        ]
    )
    assert template.render(with_system) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    with pytest.raises(InvalidRequest, match="empty"):
        template.render(ChatPrompt([]))
