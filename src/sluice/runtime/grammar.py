"""Constrained output: what a request says about its format, as a grammar over tokens.

Decides which formats and schemas are accepted, and holds a sequence to one. A grammar is text: the
gateway makes and checks it before admission (``format_grammar``, ``tool_grammar``; no vocabulary is
needed), the replica opens it for each sequence. Knows the grammar engine (llguidance), which only
``grammar_limits`` and ``grammar_trial`` know besides.

Bounds: a schema is at most ``SCHEMA_BYTES_MAX`` long, which keeps checking it under about 100 ms;
masks have a fuel limit of a few milliseconds. What short schemas may ask for is bounded in
``grammar_limits``, the time that opening takes in ``grammar_trial``.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import llguidance

from sluice.core.errors import InvalidRequest
from sluice.runtime.generation import ChatPrompt, OutputFormat
from sluice.runtime.grammar_limits import check_schema, parser_limits
from sluice.runtime.tokenizing import Tokenizer
from sluice.runtime.tools import ToolFormat

if TYPE_CHECKING:
    # Exists for type checkers only.
    from llguidance._lib import JsonCompileOptions

SCHEMA_BYTES_MAX = 64 * 1024
# Opened grammars kept, so that requests with the same schema do not compile it again. The largest
# that pass the trial take tens of megabytes each.
OPENED_MAX = 4
# Calls in one answer where calls are demanded: a small model would repeat them without end.
CALLS_MAX = 8
# Models that may print endless white space between tokens of JSON do so.
_OPTIONS: "JsonCompileOptions" = {"whitespace_pattern": r"[ \n\r\t]{1,24}"}


def format_grammar(output_format: OutputFormat) -> str | None:
    """The grammar of a response format, ``None`` for plain text.

    Raises ``InvalidRequest`` for a schema that is wrong, unsupported or too long.
    """
    if output_format.kind == "text":
        return None
    schema: Mapping[str, Any] = {"type": "object"}
    if output_format.kind == "json_schema":
        schema = output_format.schema or {}
    text = _schema_text(schema, "response_format")
    try:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=_OPTIONS)
    except ValueError as error:  # nested more deeply than it reads
        raise _refused(str(error), "response_format") from error
    return _checked(grammar, "response_format")


def tool_grammar(
    prompt: ChatPrompt, tool_format: ToolFormat, marker_token: int | None
) -> str | None:
    """The grammar that holds an answer to tool calls, ``None`` where the choice is the model's.

    ``marker_token`` is the id of the format's opening marker where the vocabulary has it as a
    special token. Raises ``InvalidRequest`` for parameters whose schema cannot be followed.
    """
    if prompt.tool_choice in {"auto", "none"} or not prompt.tools:
        return None
    functions = [tool.get("function", {}) for tool in prompt.tools]
    if prompt.tool_choice != "required":
        functions = [f for f in functions if f.get("name") == prompt.tool_choice]
        if not functions:
            raise InvalidRequest(
                f"tool_choice names {prompt.tool_choice!r}, which is not in tools",
                param="tool_choice",
            )
    try:
        calls = _call_schema(functions, tool_format.arguments_key)
    except RecursionError as error:
        raise _refused("parameters are nested too deeply", "tools") from error
    schema = _schema_text(calls, "tools")
    options = json.dumps({"x-guidance": _OPTIONS})[1:-1]
    call = "%json " + "{" + options + ", " + schema[1:]
    begin, end = json.dumps(tool_format.begin), json.dumps(tool_format.end)
    if marker_token is not None:
        begin = f"<[{marker_token}]>"
    several = prompt.tool_choice == "required"
    if tool_format.kind == "hermes":
        one = f'{begin} "\\n" call "\\n" {end}'
        start = f'{one} ("\\n" {one}){{0,{CALLS_MAX - 1}}}' if several else one
    elif tool_format.kind == "mistral":
        more = f'("," " "? call){{0,{CALLS_MAX - 1}}}' if several else ""
        start = f'{begin} "[" call {more} "]"'
    else:
        start = "call"
    return _checked(
        llguidance.LLMatcher.grammar_from_lark(f"start: {start}\ncall: {call}\n"), "tools"
    )


class TokenGrammar:
    """The state of a grammar in one sequence."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def fill(self, words: memoryview) -> None:
        """Write the tokens that may come next as a bit mask.

        A grammar that cannot go on allows end tokens only, and the next ``accept`` says why.
        """
        mask = self._matcher.compute_bitmask()
        target = words.cast("B")
        size = min(len(mask), len(target))
        target[:size] = mask[:size]
        target[size:] = bytes(len(target) - size)

    def accept(self, token: int) -> bool:
        """Advance by a token; whether the output is complete. Raises ``InvalidRequest``."""
        if not self._matcher.consume_token(token) or self._matcher.is_error():
            raise InvalidRequest(
                "the output cannot follow the requested format any further:"
                f" {_first_line(self._matcher.get_error()) or 'a token outside the grammar'}",
                param="response_format",
            )
        return self._matcher.is_stopped()


class GrammarOpener:
    """Opens grammars over one vocabulary; making it takes about 0.1 s and 10 MB."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Vocabulary(tokenizer)),
            eos_token=list(tokenizer.facts.end_tokens),
        )
        self._opened: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def open(self, grammar: str) -> TokenGrammar:
        """A grammar at its beginning, for one sequence. Raises ``InvalidRequest``."""
        opened = self._opened.get(grammar)
        if opened is None:
            opened = llguidance.LLMatcher(
                self._tokenizer, grammar, log_level=0, limits=parser_limits()
            )
            if opened.is_error():
                raise _refused(opened.get_error(), "response_format")
            self._opened[grammar] = opened
            if len(self._opened) > OPENED_MAX:
                self._opened.popitem(last=False)
        self._opened.move_to_end(grammar)
        return TokenGrammar(opened.deep_copy())


class _Vocabulary:
    """The vocabulary in the shape that llguidance asks for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        facts = tokenizer.facts
        self.eos_token_id = facts.end_tokens[0] if facts.end_tokens else 0
        self.bos_token_id = facts.bos_token
        self.tokens = tokenizer.table.raw
        self.special_token_ids = sorted(tokenizer.special_tokens)
        self._encode = tokenizer.encode_text

    def __call__(self, text: str) -> list[int]:
        return list(self._encode(text))


def _schema_text(schema: Mapping[str, Any], param: str) -> str:
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"the schema is not JSON: {error}", param=param) from error
    size = len(text.encode("utf-8", "replace"))
    if size > SCHEMA_BYTES_MAX:
        raise InvalidRequest(
            f"the schema has {size} bytes; at most {SCHEMA_BYTES_MAX} are accepted", param=param
        )
    check_schema(schema, param)
    return text


def _checked(grammar: str, param: str) -> str:
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(
        grammar, limits=parser_limits()
    )
    if is_error:
        raise _refused(messages[0], param)
    return grammar


def _refused(message: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"the schema cannot be followed: {_first_line(message)}", param=param)


def _first_line(message: str) -> str:
    # Further lines print the parser's state.
    return message.strip().partition("\n<state>")[0][:300]


def _call_schema(functions: list[Mapping[str, Any]], arguments_key: str) -> dict[str, Any]:
    """One call of any of the functions; their schemas and references move under ``$defs``."""
    definitions: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for i, function in enumerate(functions):
        root = f"#/$defs/call{i}"
        parameters = function.get("parameters") or {"type": "object"}
        definitions[f"call{i}"] = _moved(parameters, root)
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": function.get("name")},
                    arguments_key: {"$ref": root},
                },
                "required": ["name", arguments_key],
                "additionalProperties": False,
            }
        )
    return {"$defs": definitions, "anyOf": calls}


def _moved(schema: Any, root: str) -> Any:
    if isinstance(schema, Mapping):
        return {
            key: root + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, root)
            for key, value in schema.items()
        }
    if isinstance(schema, list):
        return [_moved(value, root) for value in schema]
    return schema
