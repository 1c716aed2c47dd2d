"""Opening outputs: what the executor must ask before it samples."""

from sluice.runtime.output import OutputRules
from sluice.runtime.outputs import TextOutputs
from tests.runtime.gguf_files import byte_level_values, tokenizer_of

OUTPUTS = TextOutputs(tokenizer_of(byte_level_values()))


def allowed(mask) -> set[int]:
    words = bytearray(4 * 9)
    mask.fill(memoryview(words).cast("I"))
    return {token for token in range(267) if words[token >> 3] & (1 << (token & 7))}


def test_plain_output_needs_no_mask():
    assert OUTPUTS.open(0, OutputRules(), None)[1] is None


def test_end_tokens_are_masked_until_the_least_number_of_tokens():
    ends = set(tokenizer_of(byte_level_values()).facts.end_tokens)
    output, mask = OUTPUTS.open(0, OutputRules(output_tokens_min=2), None)
    for _ in range(2):
        assert allowed(mask) == set(range(267)) - ends
        output.push(65)
    assert ends <= allowed(mask)


def test_a_grammar_is_the_mask():
    _, mask = OUTPUTS.open(0, OutputRules(), 'start: "ab"')
    assert allowed(mask) == {OUTPUTS._table.raw.index(b"a")}
