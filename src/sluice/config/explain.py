"""Settings in words: every value with its origin, and the commented default file.

Called by ``sluice config`` and by the generator of the reference. Secrets are never shown: of keys
their number, of addresses with a password the rest.
"""

import ast
import inspect
import itertools
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sluice.config.load import Loaded
from sluice.config.schema import Key, Shape, is_table, keys_of, shape_of
from sluice.config.sections import Unit
from sluice.config.settings import Settings
from sluice.config.sources import KeyPath, Origin, dotted
from sluice.config.units import format_duration, format_size

# Which setting names the holder of each secret.
_SECRETS = {
    ("server", "api_key_digests"): (("server", "api_keys_env"), ("server", "api_key_file")),
    ("server", "admin_key_digest"): (("server", "admin_key_env"),),
    ("catalogue", "hf_token"): (("catalogue", "hf_token_env"),),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One effective setting, as TOML text, and where it came from."""

    key: str
    value: str
    origin: str


def explain(loaded: Loaded) -> list[Entry]:
    """All settings in force, in the order of the reference; secrets masked."""
    entries = list(_entries(loaded.settings, (), loaded))
    for (section, name), holders in _SECRETS.items():
        secret = getattr(getattr(loaded.settings, section), name)
        count = len(secret) if isinstance(secret, tuple) else int(secret is not None)
        named = [getattr(getattr(loaded.settings, holder[0]), holder[1]) for holder in holders]
        origin = " and ".join(
            f"${value}" if key[1].endswith("_env") else str(value)
            for key, value in zip(holders, named, strict=True)
            if value is not None
        )
        entries.append(Entry(f"{section}.{name}", f"{count} given, masked", origin))
    return entries


def toml_value(value: Any, shape: Shape) -> str:
    """A field's value as users write it; ``unset`` for none."""
    if value is None:
        return "unset"
    if shape.unit is Unit.DURATION:
        return f'"{format_duration(value)}"'
    if shape.unit is Unit.SIZE:
        return f'"{format_size(value)}"'
    if is_dataclass(value):
        given = (
            f"{key.name} = {toml_value(getattr(value, key.field), key.shape)}"
            for key in keys_of(shape.form).values()
            if getattr(value, key.field) is not None
        )
        return "{ " + ", ".join(given) + " }"
    if isinstance(value, Mapping):
        item = shape_of(shape.items[1])
        parts = (f"{dotted((name,))} = {toml_value(v, item)}" for name, v in value.items())
        return "{ " + ", ".join(parts) + " }" if value else "{}"
    if isinstance(value, tuple):
        item = shape_of(shape.items[0])
        return "[" + ", ".join(toml_value(entry, item) for entry in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | Path):
        # A JSON string is a TOML string too.
        return json.dumps(_masked(str(value)), ensure_ascii=False)
    return str(value)


@cache
def docs_of(section: type) -> Mapping[str, str]:
    """The text under each field of a section, as one paragraph, by the field's name."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(section)))
    body = tree.body[0].body  # type: ignore[attr-defined]
    found = {}
    for field, text in itertools.pairwise(body):
        match field, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(doc))),
            ):
                found[name] = " ".join(doc.split()).replace("``", "`")
    return found


def sections() -> Iterator[tuple[Key, type, str]]:
    """Every table of the file: its key in the root, its type and its heading."""
    for key in keys_of(Settings).values():
        if key.shape.form is Mapping:
            yield key, shape_of(key.shape.items[1]).form, f"{key.name}.NAME"
        else:
            yield key, key.shape.form, key.name


def default_text() -> str:
    """A configuration file with every setting, its meaning and its default.

    Settings are commented out with a bare ``#``, so that defaults stay in force; the text around
    them begins with ``# ``.
    """
    lines = [
        "# Settings of sluice. Remove the # before a setting to change it; the value shown is the",
        "# default. `sluice config check -c FILE` checks the file.",
    ]
    for key, section, heading in sections():
        lines += ["", *_comment(docs_of(Settings)[key.field]), f"#[{heading}]"]
        for entry in keys_of(section).values():
            lines += ["", *_comment(docs_of(section)[entry.field]), _default_line(entry)]
    return "\n".join(lines) + "\n"


def _default_line(key: Key) -> str:
    if key.required:
        return f'#{key.name} = "..."'
    if key.default is None:
        return f"# {key.name} is unset."
    return f"#{key.name} = {default_value(key)}"


def default_value(key: Key) -> str:
    """The default as TOML, the same on every machine: the user's home is ``~``."""
    return toml_value(key.default, key.shape).replace(f'"{Path.home()}/', '"~/')


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, width=98, initial_indent="# ", subsequent_indent="# ")


def _entries(section: Any, path: KeyPath, loaded: Loaded) -> Iterator[Entry]:
    shape = shape_of(type(section))
    for key in keys_of(shape.form).values():
        value = getattr(section, key.field)
        yield from _entry(value, key.shape, (*path, key.name), loaded)


def _entry(value: Any, shape: Shape, path: KeyPath, loaded: Loaded) -> Iterator[Entry]:
    if is_dataclass(shape.form):
        yield from _entries(value, path, loaded)
    elif is_table(shape) and value:
        item = shape_of(shape.items[1])
        for name, inner in value.items():
            yield from _entry(inner, item, (*path, name), loaded)
    else:
        origin: Origin = loaded.origin(path)
        yield Entry(dotted(path), toml_value(value, shape), str(origin))


def _masked(text: str) -> str:
    return re.sub(r"(\w+://)[^/@\s]*@", r"\1***@", text)
