"""What the section types say about settings: keys, accepted values, and values from text.

The dataclasses of ``sections`` are the only description of what can be set; this module reads it
for the loader, the explainer and the generated reference. It opens no file and knows no source.
"""

import difflib
import math
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from sluice.config.sections import Range, Unit, Without
from sluice.config.units import parse_duration_s, parse_size_bytes

# Whole numbers of TOML have 64 bits, and so have those of the messages and files behind settings.
WHOLE_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Shape:
    """The type of a setting, taken apart.

    ``form`` is the bare type: a dataclass, ``Mapping``, ``tuple``, ``Literal`` or a scalar;
    ``items`` are its arguments. ``without`` is the word that stands for no value.
    """

    form: Any
    items: tuple[Any, ...] = ()
    unit: Unit | None = None
    range: Range | None = None
    optional: bool = False
    without: str | None = None


@dataclass(frozen=True, slots=True)
class Key:
    """One setting of a section: the name users write, and the field that holds its value.

    ``from_table`` says that the name of its table stands in where it is not given, and ``required``
    that nothing does.
    """

    name: str
    field: str
    shape: Shape
    default: Any
    from_table: bool = False
    required: bool = False


def shape_of(annotation: Any) -> Shape:
    """Take an annotation of a section field apart."""
    optional, marks = False, []
    while get_origin(annotation) in {Union, types.UnionType, Annotated}:
        if get_origin(annotation) is Annotated:
            annotation, *more = get_args(annotation)
            marks += more
        else:
            (annotation,) = (arg for arg in get_args(annotation) if arg is not type(None))
            optional = True
    unit = next((mark for mark in marks if isinstance(mark, Unit)), None)
    bounds = next((mark for mark in marks if isinstance(mark, Range)), None)
    without = next((mark.word for mark in marks if isinstance(mark, Without)), None)
    form = get_origin(annotation) or annotation
    return Shape(form, get_args(annotation), unit, bounds, optional, without)


@cache
def keys_of(section: type) -> Mapping[str, Key]:
    """The settings of a section by the name that users write, in the order of its fields."""
    hints = get_type_hints(section, include_extras=True)
    found = {}
    for field in fields(section):
        if field.metadata.get("resolved"):
            continue
        shape = shape_of(hints[field.name])
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        name = field.name
        if shape.unit is Unit.DURATION:
            name = "_".join(word for word in name.split("_") if word != "s")
        from_table = bool(field.metadata.get("table_name"))
        required = default is MISSING and not from_table
        default = None if default is MISSING else default
        found[name] = Key(name, field.name, shape, default, from_table, required)
    return found


def is_table(shape: Shape) -> bool:
    """Whether the setting is a table of further settings."""
    return is_dataclass(shape.form) or shape.form is Mapping


def nearest(name: str, choices: Sequence[str]) -> str | None:
    """The choice that is most like ``name``, whatever the order of its words; ``None`` if none
    is."""

    def likeness(choice: str) -> float:
        def ratio(left: str, right: str) -> float:
            return difflib.SequenceMatcher(None, left, right).ratio()

        ordered = "_".join(sorted(name.lower().split("_"))), "_".join(sorted(choice.split("_")))
        return max(ratio(name.lower(), choice), ratio(*ordered))

    best = max(choices, key=likeness, default=None)
    return best if best is not None and likeness(best) >= 0.5 else None


def accepted(shape: Shape) -> str:
    """What the setting accepts, in words that fit after "must be"."""
    if shape.without is not None:
        return f'{accepted(replace(shape, without=None))}, or "{shape.without}"'
    if shape.unit is Unit.DURATION:
        return 'a duration such as "500ms", "30s" or "24h"'
    if shape.unit is Unit.SIZE:
        return 'a size such as "512MiB" or "4GiB", or a number of bytes'
    if shape.form is Literal:
        return "one of " + ", ".join(f'"{item}"' for item in shape.items)
    if shape.form is tuple:
        return f"a list, each {_accepted_entry(shape_of(shape.items[0]))}"
    if is_table(shape):
        return "a table"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return words.get(shape.form, "a path") + _bounds_in_words(shape.range)


def _accepted_entry(item: Shape) -> str:
    if not is_dataclass(item.form):
        return accepted(item)
    return f"text or a table with {', '.join(keys_of(item.form))}"  # type: ignore[arg-type]


def convert(value: object, shape: Shape) -> Any:
    """A TOML value as the field's type. Raises ``ValueError`` saying what would be accepted."""
    if shape.without is not None and value == shape.without:
        return None
    if type(value) is int and abs(value) > WHOLE_MAX:
        raise ValueError(f"must be {accepted(shape)}, and no number has more than 64 bits")
    if shape.unit is Unit.DURATION and _is_plain_number(value):
        raise ValueError(f'has no unit; write for example "{value}s" or "{value}ms"')
    if shape.unit is not None and isinstance(value, str):
        return _within(_amount(value, shape), shape)
    if shape.form is tuple and isinstance(value, list):
        item = shape_of(shape.items[0])
        return tuple(convert(entry, item) for entry in value)
    if shape.form is Literal and value in shape.items:
        return value
    if is_dataclass(shape.form):
        return _entry(value, shape.form)  # type: ignore[arg-type]
    if shape.form is Path and isinstance(value, str) and value:
        return Path(value).expanduser()
    if shape.form is float and type(value) in {int, float}:
        return _within(float(value), shape)  # type: ignore[arg-type]
    if shape.form in {bool, int, str} and type(value) is shape.form:
        return _within(value, shape)
    raise ValueError(f"must be {accepted(shape)}, not {_shown(value)}")


def _entry(value: object, section: type) -> Any:
    """An entry of a list: a table, or its first setting alone."""
    keys = keys_of(section)
    first = next(iter(keys))
    given = value if isinstance(value, dict) else {first: value}
    unknown = next((name for name in given if name not in keys), None)
    absent = next((name for name, key in keys.items() if key.required and name not in given), None)
    if unknown is not None or absent is not None:
        told = f"there is no {unknown} in it" if unknown is not None else f"{absent} is missing"
        raise ValueError(f"must be {_accepted_entry(shape_of(section))}; {told}")
    converted = {}
    for name, entry in given.items():
        try:
            converted[keys[name].field] = convert(entry, keys[name].shape)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
    return section(**converted)


def _amount(text: str, shape: Shape) -> float:
    """The number that a duration or size stands for."""
    try:
        return (parse_duration_s if shape.unit is Unit.DURATION else parse_size_bytes)(text)
    except ValueError:
        if shape.without is None or text[:1].isdigit():
            raise
    # A word, and there is one that it could have been.
    raise ValueError(f"must be {accepted(shape)}, not {_shown(text)}")


def value_of_text(text: str, shape: Shape) -> object:
    """Text from the environment or the command line as the TOML value that it stands for.

    Numbers, switches, lists and tables are read as TOML; a list may also be plain words separated
    by commas; all else is text as it stands. What cannot be read comes back as text, for
    ``convert`` to refuse.
    """
    if shape.unit is Unit.SIZE and text.isascii() and text.isdigit():
        return int(text)
    as_toml = shape.form in {bool, int, float} and shape.unit is None
    if as_toml or is_table(shape) or (shape.form is tuple and text.startswith("[")):
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError):
            return text
    if shape.form is tuple:
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


def _is_plain_number(value: object) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _within(value: Any, shape: Shape) -> Any:
    bounds = shape.range
    if bounds is None:
        return value
    low_missed = bounds.low is not None and (
        value <= bounds.low if bounds.low_excluded else value < bounds.low
    )
    high_missed = bounds.high is not None and value > bounds.high
    if low_missed or high_missed or not math.isfinite(value):
        if shape.unit is not None:
            raise ValueError(f"must be {accepted(shape)}, above zero")
        raise ValueError(f"must be {accepted(shape)}, not {value:g}")
    return value


def _bounds_in_words(bounds: Range | None) -> str:
    if bounds is None:
        return ""
    if bounds.high is None:
        return f", {'above' if bounds.low_excluded else 'at least'} {bounds.low:g}"
    return f" from {bounds.low:g} to {bounds.high:g}"


def _shown(value: object) -> str:
    match value:
        case str():
            return f'"{value}"'
        case bool():
            return str(value).lower()
        case int() | float():
            return str(value)
        case list():
            return "a list"
        case dict():
            return "a table"
        case _:
            return f"a {type(value).__name__}"
