"""Messages, tools and tool choice of a chat: checks of their shape, with the place at fault named.

Messages are passed on as they came: what a template makes of roles and parts is the runtime's
business. Error messages never repeat a message's text.
"""

import re
from typing import Any

from sluice.core.errors import InvalidRequest
from sluice.server.wire import ENTRIES_MAX, Json

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_CHOICES = ("auto", "none", "required")
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


def check_messages(messages: list[Json]) -> list[Json]:
    """The same messages, checked. Raises ``InvalidRequest``."""
    if not messages:
        raise InvalidRequest("messages must hold at least one message.", param="messages")
    for number, message in enumerate(messages):
        _check_message(message, f"messages[{number}]")
    return messages


def _check_message(message: Json, at: str) -> None:
    role, content, calls = (message.get(key) for key in ("role", "content", "tool_calls"))
    if role not in _ROLES:
        known = ", ".join(_ROLES)
        raise InvalidRequest(f"{at}.role must be one of {known}.", param=f"{at}.role")
    if content is not None:
        text_of(content, f"{at}.content", ("text",))
    elif role != "assistant" or not calls:
        raise InvalidRequest(f"{at}.content is missing.", param=f"{at}.content")
    if calls is not None:
        if role != "assistant":
            told = "Only assistant messages carry tool_calls."
            raise InvalidRequest(told, param=f"{at}.tool_calls")
        _check_calls(calls, f"{at}.tool_calls")
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        param = f"{at}.tool_call_id"
        raise InvalidRequest(f"{param} must be a string in a tool message.", param=param)


def text_of(content: object, at: str, kinds: tuple[str, ...]) -> str:
    """Content that is a string or a list of text parts, as one string.

    ``kinds`` are the accepted values of a part's ``type``.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{at} must be a string or a list of parts.", param=at)
    _check_length(content, at)
    texts: list[str] = []
    for number, part in enumerate(content):
        where = f"{at}[{number}]"
        if not isinstance(part, dict):
            raise InvalidRequest(f"{where} must be an object.", param=where)
        if part.get("type") not in kinds:
            told = f"{where}.type must be {' or '.join(kinds)}: this model reads text only."
            raise InvalidRequest(told, param=f"{where}.type")
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{where}.text must be a string.", param=f"{where}.text")
        texts.append(part["text"])
    return "\n".join(texts)


def _check_length(entries: list[Any], at: str) -> None:
    if len(entries) > ENTRIES_MAX:
        told = f"{at} has {len(entries)} entries; the limit is {ENTRIES_MAX}."
        raise InvalidRequest(told, param=at)


def _check_calls(calls: object, at: str) -> None:
    if not isinstance(calls, list):
        raise InvalidRequest(f"{at} must be a list.", param=at)
    _check_length(calls, at)
    for number, call in enumerate(calls):
        where = f"{at}[{number}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise InvalidRequest(f"{where}.function must be an object.", param=f"{where}.function")
        for key in ("name", "arguments"):
            if not isinstance(function.get(key), str):
                param = f"{where}.function.{key}"
                raise InvalidRequest(f"{param} must be a string.", param=param)


def tools_of(tools: list[Json] | None) -> list[Json]:
    """Checked tools in the shape of chat completions. Raises ``InvalidRequest``."""
    names: set[str] = set()
    for number, tool in enumerate(tools or []):
        at = f"tools[{number}]"
        if tool.get("type") != "function":
            message = f"{at}.type must be function; other tools are not run here."
            raise InvalidRequest(message, param=f"{at}.type")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise InvalidRequest(f"{at}.function must be an object.", param=f"{at}.function")
        names.add(_tool_name(function, names, f"{at}.function"))
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            param = f"{at}.function.parameters"
            raise InvalidRequest(f"{param} must be a JSON schema object.", param=param)
    return list(tools or [])


def _tool_name(function: Json, taken: set[str], at: str) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        message = f"{at}.name must be 1 to 64 letters, digits, '_', '-' or '.'."
        raise InvalidRequest(message, param=f"{at}.name")
    if name in taken:
        raise InvalidRequest(f"{at}.name is used by two tools.", param=f"{at}.name")
    return name


def tool_choice_of(choice: str | Json | None, tools: list[Json]) -> str:
    """``auto``, ``none``, ``required`` or the name of one of the tools."""
    if choice is None:
        return "auto"
    if isinstance(choice, str):
        if choice not in _CHOICES:
            message = "tool_choice must be auto, none, required or name a function."
            raise InvalidRequest(message, param="tool_choice")
        if choice == "required" and not tools:
            raise InvalidRequest("tool_choice 'required' needs tools.", param="tool_choice")
        return choice
    name = _chosen_name(choice)
    if name not in {tool["function"]["name"] for tool in tools}:
        message = "tool_choice names a function that is not among the tools."
        raise InvalidRequest(message, param="tool_choice")
    return name


def _chosen_name(choice: Json) -> str:
    """The function named by ``{"type": "function", "function": {"name": …}}`` or, in responses,
    ``{"type": "function", "name": …}``."""
    named: Any = choice.get("function", choice)
    name = named.get("name") if isinstance(named, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str) or name in _CHOICES:
        message = "tool_choice must be auto, none, required or name a function."
        raise InvalidRequest(message, param="tool_choice")
    return name
