"""Tool calls in generated text.

Decides which text is a tool call, in the formats that models write, and how it reaches the client:
name and id once, arguments as they grow, calls numbered in order. Works on text pieces as they come
and gives the same answer however the text is cut. Text that turns out not to be a call is content
again; nothing is lost. Used in the gateway for calls that offer tools.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal, NamedTuple

from sluice.runtime.generation import JsonObject, ToolCallDelta


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls.

    ``begin`` and ``end`` enclose one call, or several in a list; empty where there is no marker and
    a call is the whole answer.
    """

    kind: Literal["hermes", "llama", "mistral"]
    begin: str
    end: str
    arguments_key: str


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", "arguments")
LLAMA = ToolFormat("llama", "", "", "parameters")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "", "arguments")


def tool_format(chat_template: str) -> ToolFormat:
    """The format that a chat template teaches; Hermes where it says nothing of tools."""
    if MISTRAL.begin in chat_template:
        return MISTRAL
    if HERMES.begin not in chat_template and (
        "<|python_tag|>" in chat_template or '"parameters"' in chat_template
    ):
        return LLAMA
    return HERMES


def tools_prompt(tools: Sequence[JsonObject]) -> str:
    """Tells a model about tools whose chat template does not, in the Hermes format."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You can call functions. Their signatures, one a line:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call one, answer with its name and arguments as JSON in this form:\n"
        '<tool_call>\n{"name": "function_name", "arguments": {"parameter": "value"}}\n</tool_call>'
    )


def call_text(calls: Iterable[Mapping[str, Any]]) -> str:
    """Earlier calls as the model wrote them, for templates that do not print calls."""
    blocks = [
        f"{HERMES.begin}\n"
        + json.dumps(
            {"name": call["function"]["name"], "arguments": call["function"]["arguments"]},
            ensure_ascii=False,
        )
        + f"\n{HERMES.end}"
        for call in calls
    ]
    return "\n".join(blocks)


class ParsedPiece(NamedTuple):
    """Content and tool-call pieces that became certain."""

    content: str
    tool_calls: tuple[ToolCallDelta, ...]


class _State(Enum):
    CONTENT = 1  # outside of calls
    HEADER = 2  # at a call, before its arguments
    ARGUMENTS = 3  # in the arguments
    TAIL = 4  # after the arguments
    WHOLE = 5  # in a call of another shape: read when its end is there


class _More(Exception):
    """What is to be read has not come yet."""


class _Mismatch(Exception):
    """What came is no call of the expected shape."""


class _Header(NamedTuple):
    name: str
    opens_list: bool
    arguments_at: int


_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SPACE = re.compile(r"\s*")
_INERT = re.compile(r'[^"\\{}\[\]]+')
# Longest beginning of a call that is waited for before its arguments.
_HEADER_CHARS_MAX = 1024


class ToolCallParser:
    """Takes the text of one choice apart."""

    def __init__(self, form: ToolFormat, names: frozenset[str], new_id: Callable[[], str]) -> None:
        """``names`` are the tools on offer; ``new_id`` gives an id for each call."""
        self._form = form
        self._names = names
        self._new_id = new_id
        self._state = _State.CONTENT if form.begin else _State.HEADER
        self._text = ""  # undecided
        self._lead = 0  # characters of it that are the opening marker and space before it
        self._in_list = False
        self._nesting = 0
        self._in_string = False
        self._calls = 0
        self._content: list[str] = []
        self._pieces: list[ToolCallDelta] = []

    @property
    def calls(self) -> int:
        """Tool calls found so far."""
        return self._calls

    def push(self, text: str) -> ParsedPiece:
        """Add text; gives what became certain."""
        self._text += text
        steps = {
            _State.CONTENT: self._step_content,
            _State.HEADER: self._step_header,
            _State.ARGUMENTS: self._step_arguments,
            _State.TAIL: self._step_tail,
            _State.WHOLE: self._step_whole,
        }
        try:
            while self._text:
                steps[self._state]()
        except _More:
            pass
        return self._taken()

    def finish(self) -> ParsedPiece:
        """What is left when the text is over."""
        text, self._text = self._text, ""
        match self._state:
            case _State.ARGUMENTS:
                self._add_arguments(text)
            case _State.WHOLE if self._add_whole(text[self._lead :]):
                pass
            case _State.TAIL:
                pass  # the beginning of brackets and a marker, which are no content
            case _:
                self._content.append(text)
        return self._taken()

    # Each step decides something about the text and takes it away, or raises _More.

    def _step_content(self) -> None:
        begin = self._form.begin
        at = self._text.find(begin) if begin else -1
        if at < 0:
            start = _held_from(self._text, begin)
            self._content.append(self._text[:start])
            self._text = self._text[start:]
            raise _More
        start = len(self._text[:at].rstrip())
        self._content.append(self._text[:start])
        self._text = self._text[start:]
        self._lead = at - start + len(begin)
        self._state = _State.HEADER

    def _step_header(self) -> None:
        body = self._text[self._lead :]
        try:
            header = _read_header(body, allow_list=bool(self._form.begin) and not self._in_list)
            if not self._form.begin and header.name not in self._names:
                raise _Mismatch
        except _More:
            if len(body) <= _HEADER_CHARS_MAX:
                raise
            self._give_up_header(body)
        except _Mismatch:
            self._give_up_header(body)
        else:
            self._in_list = self._in_list or header.opens_list
            self._begin_call(header.name)
            self._take(self._lead + header.arguments_at, _State.ARGUMENTS)

    def _give_up_header(self, body: str) -> None:
        if self._form.end and body.lstrip()[:1] in ("{", "["):
            self._state = _State.WHOLE
            return
        self._content.append(self._text[: self._lead])
        self._take(self._lead, _State.CONTENT)

    def _step_arguments(self) -> None:
        at, text = 0, self._text
        while at < len(text):
            inert = _INERT.match(text, at)
            if inert is not None:
                at = inert.end()
                continue
            character = text[at]
            if character == "\\" and at + 1 == len(text):
                break  # what it escapes has not come yet
            at += 2 if character == "\\" else 1
            if character == '"':
                self._in_string = not self._in_string
            elif not self._in_string and character in "{[":
                self._nesting += 1
            elif not self._in_string and character in "}]":
                self._nesting -= 1
                if self._nesting == 0:
                    self._add_arguments(text[:at])
                    self._take(at, _State.TAIL)
                    return
        self._add_arguments(text[:at])
        self._text = text[at:]
        raise _More

    def _step_tail(self) -> None:
        closed = 0
        try:
            closed = _expect(self._text, 0, "}")
            at, following = self._read_tail(closed)
        except _Mismatch:
            # The call stands; what follows it is content.
            at, following = closed, _State.CONTENT
        self._take(at, following)

    def _read_tail(self, at: int) -> tuple[int, _State]:
        """Where the text goes on after the brace that closes a call, and as what."""
        text = self._text
        if self._in_list:
            at = _skip_space(text, at)
            if text[at] == ",":
                return at + 1, _State.HEADER
            at = _expect(text, at, "]")
        if self._form.end:
            at = _expect(text, at, self._form.end)
        elif not self._form.begin:
            return _expect(text, at, ";"), _State.HEADER
        return at, _State.CONTENT

    def _step_whole(self) -> None:
        begin, end = self._form.begin, self._form.end
        stop = self._text.find(end, self._lead)
        again = self._text.find(begin, self._lead)
        if again >= 0 and (stop < 0 or again < stop):
            # Another call begins before this one ends: this was none.
            start = len(self._text[:again].rstrip())
            self._content.append(self._text[:start])
            self._take(start, _State.CONTENT)
            return
        if stop < 0:
            raise _More
        if not self._add_whole(self._text[self._lead : stop]):
            self._content.append(self._text[: stop + len(end)])
        self._take(stop + len(end), _State.CONTENT)

    def _add_whole(self, body: str) -> bool:
        """Read calls from complete JSON; whether it was that."""
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            return False
        calls = value if isinstance(value, list) else [value]
        if not calls or not all(
            isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls
        ):
            return False
        for call in calls:
            arguments = call.get("arguments", call.get("parameters", {}))
            self._begin_call(call["name"])
            self._add_arguments(
                arguments
                if isinstance(arguments, str)
                else json.dumps(arguments, ensure_ascii=False)
            )
        return True

    def _begin_call(self, name: str) -> None:
        self._pieces.append(ToolCallDelta(self._calls, "", self._new_id(), name))
        self._calls += 1

    def _add_arguments(self, text: str) -> None:
        last = self._pieces[-1] if self._pieces else None
        if last is not None and last.index == self._calls - 1:
            self._pieces[-1] = replace(last, arguments=last.arguments + text)
        elif text:
            self._pieces.append(ToolCallDelta(self._calls - 1, text))

    def _take(self, chars: int, following: _State) -> None:
        self._text = self._text[chars:]
        self._lead = 0
        self._state = following
        if following is _State.CONTENT:
            self._in_list = False

    def _taken(self) -> ParsedPiece:
        piece = ParsedPiece("".join(self._content), tuple(self._pieces))
        self._content.clear()
        self._pieces.clear()
        return piece


def _held_from(text: str, begin: str) -> int:
    """Start of the suffix that could become the marker, with the space in front of it."""
    if not begin:
        return len(text)
    for size in range(min(len(begin) - 1, len(text)), -1, -1):
        if text.endswith(begin[:size]):
            return len(text[: len(text) - size].rstrip())
    raise AssertionError("every text ends with the empty string")


def _read_header(text: str, *, allow_list: bool) -> _Header:
    """Read ``{"name": "…", "arguments": `` up to the brace that opens the arguments."""
    at = _skip_space(text, 0)
    opens_list = allow_list and text[at] == "["
    if opens_list:
        at += 1
    at = _expect(text, at, "{")
    name: str | None = None
    while True:
        key, at = _read_string(text, at)
        at = _skip_space(text, _expect(text, at, ":"))
        if key in {"arguments", "parameters"}:
            if name is None or text[at] != "{" or at > _HEADER_CHARS_MAX:
                raise _Mismatch
            return _Header(name, opens_list, at)
        if key not in {"name", "type", "id"}:
            raise _Mismatch
        value, at = _read_string(text, at)
        if key == "name":
            name = value
        at = _expect(text, at, ",")


def _read_string(text: str, at: int) -> tuple[str, int]:
    at = _skip_space(text, at)
    if text[at] != '"':
        raise _Mismatch
    found = _STRING.match(text, at)
    if found is None:
        raise _More
    try:
        return json.loads(found[0], strict=False), found.end()
    except ValueError:
        raise _Mismatch from None


def _expect(text: str, at: int, wanted: str) -> int:
    at = _skip_space(text, at)
    found = text[at : at + len(wanted)]
    if found == wanted:
        return at + len(wanted)
    raise _More if wanted.startswith(found) else _Mismatch


def _skip_space(text: str, at: int) -> int:
    """Position of the next character that is no space; raises ``_More`` where none has come."""
    found = _SPACE.match(text, at)
    at = found.end() if found is not None else at
    if at >= len(text):
        raise _More
    return at
