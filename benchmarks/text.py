"""What the text side costs: ``python benchmarks/text.py MODEL_FOLDER``.

Microseconds per token of a sequence's output, and the time and memory of loading a tokenizer.
"""

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from sluice.core.sampling import SampledLogprobs, TokenLogprob
from sluice.runtime.generation import ChatPrompt, OutputFormat
from sluice.runtime.grammar import GrammarOpener, format_grammar
from sluice.runtime.model_folder import read_model_folder
from sluice.runtime.output import OutputRules, SequenceOutput
from sluice.runtime.templates import ChatTemplate
from sluice.runtime.tokenizing import Tokenizer
from sluice.runtime.tools import HERMES, ToolCallParser

ANSWER = "Sure! The answer is 42 — naïve café 😀. def f(x):\n    return x\n" * 50
PROSE = "The quick brown fox jumps over 13 lazy dogs. def f(x): return x\n" * 4096
STOPS = ("\nUser:", "</s>", "###", "Observation:")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def median_s(run: Callable[[], object], times: int = 9) -> float:
    """Median duration of ``run``."""
    durations_s = []
    for _ in range(times):
        start_s = time.perf_counter()
        run()
        durations_s.append(time.perf_counter() - start_s)
    return statistics.median(durations_s)


def resident_mb() -> float:
    """Largest resident memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def show(what: str, value: float, unit: str) -> None:
    """Print one row."""
    print(f"{what:44} {value:10.2f} {unit}")


def measure_output(tokenizer: Tokenizer) -> None:
    """What a replica does for each sampled token, and the gateway for each piece."""
    tokens = tokenizer.encode_text(ANSWER)
    ends = tokenizer.facts.end_tokens
    top = tuple(TokenLogprob(token, -2.0) for token in range(100, 105))
    logprobs = {token: SampledLogprobs(TokenLogprob(token, -1.0), top) for token in set(tokens)}

    def output(rules: OutputRules, chosen: dict[int, SampledLogprobs]) -> None:
        sequence = SequenceOutput(0, tokenizer.table, ends, rules)
        for token in tokens:
            sequence.push(token, chosen.get(token))

    def per_token_us(rules: OutputRules, chosen: dict[int, SampledLogprobs]) -> float:
        return median_s(lambda: output(rules, chosen)) / len(tokens) * 1e6

    show("push, plain", per_token_us(OutputRules(), {}), "µs/token")
    show("push, 4 stop strings", per_token_us(OutputRules(stop=STOPS), {}), "µs/token")
    show("push, 5 logprobs", per_token_us(OutputRules(), logprobs), "µs/token")

    pieces = [tokenizer.decode((token,)) for token in tokens]

    def parse() -> None:
        calls = ToolCallParser(HERMES, frozenset(), str)
        for piece in pieces:
            calls.push(piece)

    show("tool-call parser", median_s(parse) / len(pieces) * 1e6, "µs/piece")


def measure_prompt(tokenizer: Tokenizer) -> None:
    """What the gateway does for each call."""
    template = ChatTemplate(tokenizer.facts, lambda: datetime(2031, 1, 1))  # noqa: DTZ001
    chat = ChatPrompt([{"role": "user", "content": "Hi there"}] * 10)
    rendered = template.render(chat)
    show("render 10 messages", median_s(lambda: template.render(chat)) * 1e6, "µs")
    show("encode 10 messages", median_s(lambda: tokenizer.encode_chat(rendered)) * 1e6, "µs")
    encode_s = median_s(lambda: tokenizer.encode_text(PROSE), 3)
    show("encode text", encode_s / len(PROSE) * 1e6, "s/MB")
    check_s = median_s(lambda: format_grammar(OutputFormat("json_schema", SCHEMA)))
    show("check a small schema", check_s * 1e6, "µs")


def measure_grammar(tokenizer: Tokenizer) -> None:
    """What a replica does for a sequence held to a schema."""
    grammar = format_grammar(OutputFormat("json_schema", SCHEMA))
    assert grammar is not None
    start_s = time.perf_counter()
    opener = GrammarOpener(tokenizer)
    show("grammar vocabulary", (time.perf_counter() - start_s) * 1e3, "ms")
    answer = tokenizer.encode_text('{"name": "Ada Lovelace of London", "age": 36}')
    words = memoryview(bytearray(-(-len(tokenizer.table.raw) // 32) * 4)).cast("I")

    def follow() -> None:
        opened = opener.open(grammar)
        for token in answer:
            opened.fill(words)
            opened.accept(token)

    show("mask and accept", median_s(follow) / len(answer) * 1e6, "µs/token")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = read_model_folder(parser.parse_args().folder)

    before_mb = resident_mb()
    start_s = time.perf_counter()
    tokenizer = Tokenizer.load(folder)
    show("load tokenizer", (time.perf_counter() - start_s) * 1e3, "ms")
    show("  memory", resident_mb() - before_mb, "MB")
    start_s = time.perf_counter()
    assert tokenizer.table.raw
    show("bytes of all tokens", (time.perf_counter() - start_s) * 1e3, "ms")
    measure_output(tokenizer)
    measure_prompt(tokenizer)
    measure_grammar(tokenizer)


if __name__ == "__main__":
    main()
