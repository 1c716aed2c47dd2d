"""Chat templates: messages to the text a model was trained on.

Decides which messages are accepted, how they are put into the shape templates expect, and which
variables a template sees. The limits a template runs under are in ``sandbox``. What a template
refuses is an ``InvalidRequest`` in the template's own words; messages are checked here too, since
the HTTP server is not the only caller. Rendering changes nothing, so that it may run on any thread.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from sluice.core.errors import InvalidRequest, ModelLoadError
from sluice.runtime.generation import ChatPrompt, JsonObject
from sluice.runtime.model_folder import ModelFacts
from sluice.runtime.sandbox import BoundedEnvironment
from sluice.runtime.tools import call_text, tools_prompt

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Variables that say what is rendered; a client cannot put others in their place.
_RESERVED = frozenset({"messages", "tools", "documents", "bos_token", "eos_token"})
# What a template's code can raise beside Jinja's own errors when messages are not as it expects.
_TEMPLATE_FAULTS = (TemplateError, TypeError, ValueError, LookupError, AttributeError,
                    ArithmeticError, RecursionError)  # fmt: skip


class ChatTemplate:
    """The chat template of one model."""

    def __init__(self, facts: ModelFacts, now: Callable[[], datetime]) -> None:
        """Compile the model's templates; raises ``ModelLoadError`` for one that does not compile.

        ``now`` gives the time for templates that print the date.
        """
        self._facts = facts
        environment = BoundedEnvironment(
            {
                "raise_exception": _raise_exception,
                "strftime_now": lambda layout: now().strftime(layout),
            }
        )
        try:
            self._plain = environment.from_string(facts.chat_template or "")
            self._tools = environment.from_string(
                facts.chat_template_tools or facts.chat_template or ""
            )
        except TemplateSyntaxError as error:
            raise ModelLoadError(
                f"the chat template of {facts.name} does not compile: line {error.lineno}:"
                f" {error.message}"
            ) from error
        source = facts.chat_template or ""
        self._takes_tools = facts.chat_template_tools is not None or "tools" in source
        self._takes_developer = "developer" in source

    @property
    def takes_tools(self) -> bool:
        """Whether the template itself tells the model about tools."""
        return self._takes_tools

    def render(self, prompt: ChatPrompt) -> str:
        """The prompt as text; ``InvalidRequest`` where template and messages do not fit."""
        if self._facts.chat_template is None:
            raise InvalidRequest(
                f"the model {self._facts.name} has no chat template; send the prompt as text to"
                " /v1/completions",
                param="model",
            )
        reserved = sorted(_RESERVED.intersection(prompt.template_options))
        if reserved:
            raise InvalidRequest(
                f"chat_template_kwargs cannot set {', '.join(reserved)}",
                param="chat_template_kwargs",
            )
        tools = list(prompt.tools) if prompt.tools and prompt.tool_choice != "none" else None
        template = self._tools if tools else self._plain
        try:
            return template.render(self._variables(prompt, tools))
        except _TEMPLATE_FAULTS as error:
            detail = str(error) or type(error).__name__
            raise InvalidRequest(
                f"the chat template of {self._facts.name} refuses these messages: {detail}",
                param="messages",
            ) from error

    def _variables(self, prompt: ChatPrompt, tools: list[JsonObject] | None) -> dict[str, Any]:
        return {
            "add_generation_prompt": True,
            "documents": None,
            "bos_token": self._facts.bos_text,
            "eos_token": self._facts.eos_text,
            **prompt.template_options,
            "messages": self._messages(prompt.messages, tools),
            "tools": tools,
        }

    def _messages(
        self, messages: Sequence[JsonObject], tools: list[JsonObject] | None
    ) -> list[dict[str, Any]]:
        if not messages:
            raise InvalidRequest("messages is empty; send at least one message", param="messages")
        shaped = [self._message(i, message) for i, message in enumerate(messages)]
        if tools and not self._takes_tools:
            _add_to_system(shaped, tools_prompt(tools))
        return shaped

    def _message(self, at: int, message: JsonObject) -> dict[str, Any]:
        role = message.get("role")
        if role not in ROLES:
            raise InvalidRequest(
                f"messages[{at}] has the role {role!r}; roles are {', '.join(ROLES)}",
                param="messages",
            )
        if role == "developer" and not self._takes_developer:
            role = "system"
        shaped = {**message, "role": role, "content": _text(at, message.get("content"))}
        calls = message.get("tool_calls")
        if calls:
            shaped["tool_calls"] = [_tool_call(at, call) for call in calls]
            if not self._takes_tools:
                parts = (shaped["content"], call_text(shaped["tool_calls"]))
                shaped["content"] = "\n".join(part for part in parts if part)
        else:
            shaped.pop("tool_calls", None)
        return shaped


def _add_to_system(messages: list[dict[str, Any]], text: str) -> None:
    if messages[0]["role"] == "system":
        parts = (messages[0]["content"], text)
        messages[0]["content"] = "\n\n".join(part for part in parts if part)
    else:
        messages.insert(0, {"role": "system", "content": text})


def _text(at: int, content: Any) -> str:
    """Content as one text: ``None`` is no text, text parts stand on lines of their own."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"messages[{at}].content is no text or list", param="messages")
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str) or part.get("type", "text") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidRequest(
                f"messages[{at}].content has a part of type {kind!r}; this model reads text parts",
                param="messages",
            )
        texts.append(text)
    return "\n".join(texts)


def _tool_call(at: int, call: Any) -> dict[str, Any]:
    """A tool call of an earlier answer, with its arguments parsed: templates print them as JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(
            f"messages[{at}].tool_calls has an entry without a function name", param="messages"
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(
                f"messages[{at}].tool_calls: arguments of {function['name']} are not JSON: {error}",
                param="messages",
            ) from error
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
