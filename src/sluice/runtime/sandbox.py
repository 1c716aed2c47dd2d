"""A Jinja environment in which a template cannot change its input, reach Python, or run away.

Decides what a chat template may use and how much. Each round of a loop, macro call and function
call is a step; characters of each text that is made or printed are counted, and values of each
container that is. These and the time have a limit per rendering, and exceeding one raises
``SecurityError``. A template is still code that came with a model: one written for the purpose can
find a filter that takes memory before its result is counted.
"""

import json
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

from jinja2 import TemplateSyntaxError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

# A thousand messages with a hundred rounds each; that many rounds take a few tenths of a second.
STEPS_MAX = 100_000
# One text of the size of three request bodies. A template that joins long content with ``+`` makes
# it several times, hence the higher limit for all texts together.
TEXT_CHARS_MAX = 32 * 1024 * 1024
CHARS_MAX = 128 * 1024 * 1024
VALUES_MAX = 500_000
# Looked at with each step; what can happen between two takes some tens of milliseconds.
RENDER_S_MAX = 5.0
# Widths, counts and powers that templates write; nobody indents further.
NUMBER_MAX = 10_000

_WIDE_FORMAT = re.compile(r"\d{5,}|%[^%a-zA-Z]*\*")
_FORBIDDEN = (nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)
_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})


class BoundedContext(Context):
    """Variables of one rendering, and what it has used up."""

    environment: "BoundedEnvironment"
    steps = 0
    chars = 0
    values_made = 0
    ends_at_s: float | None = None

    def step(self, chars: int = 0) -> None:
        """Count a step, and the characters it prints."""
        self.steps += 1
        if self.steps > STEPS_MAX:
            raise SecurityError(f"the chat template runs for more than {STEPS_MAX} steps")
        now_s = self.environment.clock_s()
        if self.ends_at_s is None:
            self.ends_at_s = now_s + RENDER_S_MAX
        if now_s > self.ends_at_s:
            raise SecurityError(f"the chat template runs for more than {RENDER_S_MAX:.0f} s")
        self.count_chars(chars)

    def count_chars(self, chars: int) -> None:
        """Count characters that are made."""
        self.chars += chars
        if self.chars > CHARS_MAX:
            raise _too_long(CHARS_MAX)

    def count(self, value: Any) -> None:
        """Count a value that was made: a text, or all that a container holds.

        What a container holds twice counts twice, as it would when it is written out.
        """
        if isinstance(value, str):
            self.count_chars(len(value))
            return
        pending = [value]
        while pending:
            item = pending.pop()
            self.values_made += 1
            if self.values_made + len(pending) > VALUES_MAX:
                raise SecurityError(f"the chat template makes more than {VALUES_MAX} values")
            if isinstance(item, dict):
                pending.extend(item.values())
            elif isinstance(item, (list, tuple)):
                pending.extend(item)
            elif isinstance(item, range):
                self.values_made += len(item)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates so that they count what they do."""

    context_class = BoundedContext
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(
        self,
        functions: dict[str, Callable[..., Any]],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationMark, loopcontrols],
            finalize=_count_output,
        )
        self.clock_s = clock_s
        # Makes any amount of text of its own.
        del self.globals["lipsum"]
        self.globals.update(functions)
        self.filters["tojson"] = _to_json
        for name in ("center", "indent", "wordwrap", "batch", "slice", "truncate"):
            self.filters[name] = _with_small_numbers(FILTERS[name])
        self.filters["format"] = _format_filter
        self.filters["replace"] = _replace_filter

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for node in template.find_all(_FORBIDDEN):
            raise TemplateSyntaxError("blocks, includes and imports are not allowed", node.lineno)
        _Counting().visit(template)
        return template

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function, method or macro of a template, which counts as a step."""
        assert isinstance(context, BoundedContext)
        method = getattr(called, "__name__", "")
        # Jinja wraps `str.format`.
        text = getattr(getattr(called, "__wrapped__", called), "__self__", None)
        if text is self:  # `step` and `joined`, put there by _Counting
            return called(*args)
        context.step()
        if isinstance(text, str):
            _check_method(text, method, args)
        result = super().call(context, called, *args, **kwargs)
        context.count(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        result = super().call_binop(context, operator, left, right)
        assert isinstance(context, BoundedContext)
        context.count(result)
        return result

    def step(self, context: BoundedContext, chars: int) -> None:
        """Count a round of a loop or a macro call; called by compiled templates."""
        context.step(chars)

    def joined(self, context: BoundedContext, *parts: Any) -> str:
        """The ``~`` operator; called by compiled templates."""
        context.count(parts)
        texts = [str(part) for part in parts]
        context.count_chars(sum(map(len, texts)))
        return "".join(texts)

    def made(self, context: BoundedContext, value: Any) -> Any:
        """A list, tuple or mapping that a template writes; called by compiled templates."""
        context.count(value)
        return value


class _Counting(NodeTransformer):
    """Adds calls to ``BoundedEnvironment.step`` and ``joined`` to a parsed template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - named by node class
        self.generic_visit(node)
        node.body.insert(0, _step(node))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802 - named by node class
        self.generic_visit(node)
        node.body.insert(0, _step(node))
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802 - named by node class
        self.generic_visit(node)
        node.body.insert(0, _step(node))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - named by node class
        self.generic_visit(node)
        return _environment_call("joined", node.nodes)

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802 - named by node class
        self.generic_visit(node)
        return _environment_call("made", [node])

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802 - named by node class
        self.generic_visit(node)
        return _environment_call("made", [node])

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802 - named by node class
        self.generic_visit(node)
        return node if node.ctx != "load" else _environment_call("made", [node])


def _step(node: nodes.Node) -> nodes.Node:
    constant = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
    return nodes.ExprStmt(_environment_call("step", [nodes.Const(constant)]))


def _environment_call(name: str, arguments: Iterable[nodes.Expr]) -> nodes.Call:
    method = nodes.EnvironmentAttribute(name)
    return nodes.Call(method, [nodes.ContextReference(), *arguments], [], None, None)


class _GenerationMark(Extension):
    """``{% generation %}`` marks the assistant's text for training; for us it is its content."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that Jinja asks for

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@pass_context
def _count_output(context: BoundedContext, value: Any) -> Any:
    context.count(value)
    if isinstance(value, str):
        return value
    text = str(value)
    context.count_chars(len(text))
    return text


def _check_method(text: str, method: str, args: tuple[Any, ...]) -> None:
    """Refuse the string methods whose result can be far longer than what goes in."""
    if method in _PADDING:
        _check_numbers(args)
    elif method == "replace" and len(args) >= 2:
        _check_replace(text, args[0], args[1])
    elif method in ("format", "format_map"):
        _check_format(text)
    elif method == "join" and args:
        parts = args[0] if isinstance(args[0], (list, tuple)) else ()
        _check_size(sum(len(str(part)) + len(text) for part in parts))


def _check_operands(operator: str, left: Any, right: Any) -> None:
    if operator == "%" and isinstance(left, str):
        _check_format(left)
    elif operator == "**":
        _check_numbers((left, right))
    elif operator == "*":
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
                _check_size(len(sequence) * times)


def _check_numbers(numbers: Iterable[Any]) -> None:
    for number in numbers:
        if isinstance(number, int) and abs(number) > NUMBER_MAX:
            raise SecurityError(f"the chat template uses the number {number}; at most {NUMBER_MAX}")


def _check_replace(text: str, old: Any, new: Any) -> None:
    old, new = str(old), str(new)
    times = text.count(old)
    _check_size(len(text) + times * max(0, len(new) - len(old)))


def _check_format(text: str) -> None:
    if _WIDE_FORMAT.search(text):
        raise SecurityError(
            "the chat template formats with a width of five digits or a variable one"
        )


def _check_size(chars: int) -> None:
    if chars > TEXT_CHARS_MAX:
        raise _too_long(TEXT_CHARS_MAX)


def _too_long(limit: int) -> SecurityError:
    return SecurityError(f"the chat template makes more than {limit} characters of text")


def _with_small_numbers(filter_: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_numbers(args)
        _check_numbers(kwargs.values())
        return filter_(*args, **kwargs)

    # Jinja reads on the function itself whether it wants the environment as an argument.
    bounded.__dict__.update(filter_.__dict__)
    return bounded


def _format_filter(value: Any, *args: Any, **kwargs: Any) -> str:
    text = str(value)
    _check_format(text)
    return str(text % (kwargs or args))


def _replace_filter(value: Any, old: str, new: str, count: int | None = None) -> str:
    text = str(value)
    _check_replace(text, old, new)
    return text.replace(old, new) if count is None else text.replace(old, new, count)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - the signature templates call
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """``tojson`` as chat templates expect it: plain JSON, where Jinja's own escapes for HTML."""
    _check_numbers((indent,))
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
