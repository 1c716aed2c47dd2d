"""Where settings stand: in a TOML file, in the environment, on the command line.

Each source becomes a table of leaves that remember their origin, and the tables are laid over one
another. Nothing here knows what a value may be, and nothing reads the environment itself: ``load``
hands it in.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sluice.config.schema import Shape, is_table, keys_of, nearest, shape_of
from sluice.config.settings import Settings

KeyPath = tuple[str, ...]

_PREFIX = "SLUICE_"
# Variables that Kubernetes sets for a service named sluice, and those of the test suite.
_FOREIGN = re.compile(r"SLUICE_(SERVICE_|PORT$|PORT_|TEST_)")
# More tables within tables than any setting needs.
_DEPTH_MAX = 32
# The parser takes quadratic time for a key of many parts.
_LONG_KEY = re.compile(r"(?<![\w-])(?:[\w-]+[ \t]*\.[ \t]*){50}")
_LONG_NUMBER = re.compile(r"(?:\d_?){4000}")
# Names the settings file for the command line; it is no setting itself.
CONFIG_VARIABLE = "SLUICE_CONFIG"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was given. ``place`` is ``FILE:LINE``, a variable's name or a flag."""

    kind: Literal["default", "file", "environment", "flag"]
    place: str = ""

    def __str__(self) -> str:
        match self.kind:
            case "default":
                return "default"
            case "environment":
                return f"${self.place}"
            case _:
                return self.place

    @property
    def is_text(self) -> bool:
        """Whether values from here are text, to be read by the type of their setting."""
        return self.kind in {"environment", "flag"}


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value as it was given."""

    value: object
    origin: Origin


@dataclass(frozen=True, slots=True)
class Table:
    """Settings under one heading. ``origin`` is where the heading stands first."""

    origin: Origin
    items: dict[str, "Table | Leaf"] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Override:
    """A value from the command line: ``place`` is the flag that gave it."""

    path: KeyPath
    value: str
    place: str = "--set"


def parse_override(text: str) -> Override:
    """``KEY=VALUE`` with a dotted key, as ``--set`` takes it. Raises ``ValueError``."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ValueError(f'--set {text}: write KEY=VALUE, for example "server.listen=0.0.0.0:8000"')
    return Override(_dotted(key.strip()), value.strip())


def file_table(text: str, name: str) -> Table:
    """The table of a TOML file. Raises ``ValueError`` where it is not TOML."""
    if found := _LONG_KEY.search(text):
        raise ValueError(f"{name}:{_line_of(text, found.start())}: is nested too deeply")
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(_toml_error(str(error), name, text)) from None
    except RecursionError:
        raise ValueError(f"{name}: is nested too deeply") from None
    except ValueError:
        raise ValueError(_long_number(name, text)) from None
    lines = key_lines(text)

    def origin(path: KeyPath) -> Origin:
        known = next((path[:n] for n in range(len(path), 0, -1) if path[:n] in lines), None)
        return Origin("file", f"{name}:{lines[known]}" if known else name)

    def table(items: Mapping[str, object], path: KeyPath) -> Table:
        if len(path) > _DEPTH_MAX:
            raise ValueError(f"{origin(path)}: is nested too deeply")
        made = Table(origin(path))
        for key, value in items.items():
            here = (*path, key)
            is_tree = isinstance(value, dict)
            made.items[key] = table(value, here) if is_tree else Leaf(value, origin(here))  # type: ignore[arg-type]
        return made

    return table(tree, ())


def _toml_error(told: str, name: str, text: str) -> str:
    """A message of the TOML parser with its place in front, as ``FILE:LINE``."""
    match = _TOML_PLACE.fullmatch(told)
    if match is None:
        return f"{name}: {told}"
    line = match["line"] or str(max(1, len(text.splitlines())))
    column = f" (column {match['column']})" if match["column"] else ""
    return f"{name}:{line}: {match['what']}{column}"


def _long_number(name: str, text: str) -> str:
    """What is wrong with a text that is TOML and still cannot be read."""
    found = _LONG_NUMBER.search(text)
    line = f":{_line_of(text, found.start())}" if found else ""
    return f"{name}{line}: a number has too many digits"


def _line_of(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def environment_table(environment: Mapping[str, str], below: Table) -> tuple[Table, list[str]]:
    """The settings among the variables, and what is wrong with them.

    ``SLUICE_SERVER__LISTEN`` sets ``server.listen``. Names that users chose (of a model, of an SLO
    class) are found in ``below`` whatever their case, with ``_`` for each character that a variable
    cannot hold; a name not found there is taken in lower case.
    """
    made, problems = Table(Origin("environment")), []
    for variable in sorted(environment):
        words = variable.removeprefix(_PREFIX).split("__")
        if not variable.startswith(_PREFIX) or not _is_setting(words):
            continue
        path = _environment_path(words, below)
        clash = put(made, path, Leaf(environment[variable], Origin("environment", variable)))
        if clash is not None:
            problems.append(f"${variable}: {clash}")
    return made, problems


def stray_variables(environment: Mapping[str, str], ours: frozenset[str]) -> list[str]:
    """Variables with our prefix that set nothing. ``ours`` are those that settings name."""
    choices = [variable.lower() for variable in _variables(Settings, _PREFIX)]
    problems = []
    for variable in sorted(environment):
        words = variable.removeprefix(_PREFIX).split("__")
        ignored = variable in ours or _FOREIGN.match(variable) or _is_setting(words)
        if variable.startswith(_PREFIX) and not ignored:
            near = nearest(variable, choices)
            hint = f"; nearest: {near.upper()}" if near else ""
            problems.append(f"${variable}: not a setting (SLUICE_SECTION__KEY){hint}")
    return problems


def override_table(overrides: Sequence[Override]) -> tuple[Table, list[str]]:
    """The settings of the command line, later ones winning, and what is wrong with them."""
    made, problems = Table(Origin("flag")), []
    for override in overrides:
        leaf = Leaf(override.value, Origin("flag", override.place))
        clash = put(made, override.path, leaf)
        if clash is not None:
            problems.append(f"{override.place}: {clash}")
    return made, problems


def put(table: Table, path: KeyPath, leaf: Leaf) -> str | None:
    """Set one leaf, making tables on the way; says what is in the way, if anything is."""
    if len(path) > _DEPTH_MAX:
        return f"{path[0]}: is nested too deeply"
    for word in path[:-1]:
        below = table.items.setdefault(word, Table(leaf.origin))
        if isinstance(below, Leaf):
            return f"{'.'.join(path)} is set both as a table and as a value"
        table = below
    table.items[path[-1]] = leaf
    return None


def dotted(path: KeyPath) -> str:
    """The spelling of a key path that TOML and ``--set`` accept."""
    return ".".join(
        part if re.fullmatch(r"[\w-]+", part) else json.dumps(part, ensure_ascii=False)
        for part in path
    )


def overlay(lower: Table, upper: Table) -> Table:
    """``upper`` over ``lower``: tables are joined, values replaced."""
    items = dict(lower.items)
    for key, value in upper.items.items():
        under = items.get(key)
        both = isinstance(under, Table) and isinstance(value, Table)
        items[key] = overlay(under, value) if both else value  # type: ignore[arg-type]
    return Table(lower.origin, items)


_HEADER = re.compile(r"\s*\[\[?\s*(?P<key>[^\[\]]+?)\s*\]\]?\s*(#.*)?$")
_ASSIGNMENT = re.compile(r"""\s*(?P<key>(?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*[^\s=.]+)*)\s*=""")
_TOML_PLACE = re.compile(
    r"(?P<what>.*) \(at (line (?P<line>\d+), column (?P<column>\d+)|end of document)\)"
)
_LONG_TEXT = re.compile(r"\"\"\"|'''")


def key_lines(text: str) -> dict[KeyPath, int]:
    """The line on which each key of a TOML text stands, from 1. Keys of inline tables share a
    line."""
    found: dict[KeyPath, int] = {}
    header: KeyPath = ()
    in_long_text = False
    for number, line in enumerate(text.splitlines(), start=1):
        quotes = len(_LONG_TEXT.findall(line))
        if in_long_text:
            in_long_text = quotes % 2 == 0
            continue
        in_long_text = quotes % 2 == 1
        if match := _HEADER.match(line):
            header = _dotted(match["key"])
            found.setdefault(header, number)
        elif match := _ASSIGNMENT.match(line):
            found.setdefault((*header, *_dotted(match["key"])), number)
    return found


def _dotted(key: str) -> KeyPath:
    """The parts of a TOML key; text that is no TOML key is split at its dots."""
    if _LONG_KEY.match(key):
        return tuple(key.split("."))
    try:
        tree: object = tomllib.loads(f"{key} = 0")
    except (ValueError, RecursionError):
        return tuple(part.strip() for part in key.split("."))
    path: list[str] = []
    while isinstance(tree, dict):
        ((part, tree),) = tree.items()
        path.append(part)
    return tuple(path)


def _environment_path(words: Sequence[str], below: Table) -> KeyPath:
    path: list[str] = []
    shape: Shape | None = shape_of(Settings)
    here: Table | Leaf | None = below
    for word in words:
        name = word.lower()
        if shape is not None and shape.form is Mapping:
            known = here.items if isinstance(here, Table) else {}
            name = next((key for key in known if _as_variable(key) == word.upper()), name)
            shape = shape_of(shape.items[1])
        elif shape is not None and is_table(shape):
            key = keys_of(shape.form).get(name)
            shape = key.shape if key else None
        here = here.items.get(name) if isinstance(here, Table) else None
        path.append(name)
    return tuple(path)


def _as_variable(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", "_", name).upper()


def _is_setting(words: Sequence[str]) -> bool:
    return len(words) > 1 and all(words)


def _variables(section: type, prefix: str) -> Iterator[str]:
    for key in keys_of(section).values():
        name = prefix + key.name.upper()
        if key.shape.form is Mapping:
            continue
        if is_table(key.shape):
            yield from _variables(key.shape.form, name + "__")
        else:
            yield name
