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
import tomllib
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

_UNSET = "unset"

# Which setting names the holder of each secret.
_SECRETS = {
    ("server", "api_key_digests"): (("server", "api_keys_env"), ("server", "api_key_file")),
    ("server", "admin_key_digests"): (("server", "admin_key_env"), ("server", "admin_key_file")),
    ("catalogue", "hf_token"): (("catalogue", "hf_token_env"),),
}
_TENANT_NAME = "acme"


# What the default file shows of settings that are unset and needed: without a target, an SLO class
# says nothing.
_SHOWN_VALUES = {("slo", "ttft"): '"500ms"', ("slo", "tpot"): '"100ms"'}
_SLO_NAME = "interactive"
# Tables whose settings cannot stand alone: they are shown, and none can be uncommented by itself.
_TOGETHER = {"routes": "auto"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One effective setting, as TOML text, and where it came from.

    One that is not ``settable`` is what other settings lead to: how many keys were found.
    """

    key: str
    value: str
    origin: str
    settable: bool = True

    @property
    def plain(self) -> Any:
        """The value as JSON has it, ``None`` where it is unset."""
        if not self.settable or self.value == _UNSET:
            return None if self.settable else self.value
        return tomllib.loads(f"value = {self.value}")["value"]


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
        told = f"{count} given, masked"
        entries.append(Entry(f"{section}.{name}", told, origin, settable=False))
    for name, model in loaded.settings.models.items():
        if model.key is not None:
            origin = f"${model.key_env}" if model.key_file is None else str(model.key_file)
            key = dotted(("models", name, "key"))
            entries.append(Entry(key, "1 given, masked", origin, settable=False))
    for tenant, given in loaded.settings.tenants.items():
        keys = [name for _, name in loaded.settings.server.tenant_key_digests if name == tenant]
        key, told = dotted(("tenants", tenant, "key_digests")), f"{len(keys)} given, masked"
        variable, file = given.key_sha256_env, given.key_sha256_file
        places = [] if variable is None else [f"${variable}"]
        places += [] if file is None else [str(file)]
        origin = " and ".join(places) or "key_sha256_env and key_sha256_file are unset"
        entries.append(Entry(key, told, origin, settable=False))
    return entries


def toml_value(value: Any, shape: Shape) -> str:
    """A field's value as users write it; ``unset`` for none."""
    if value is None:
        return _UNSET if shape.without is None else f'"{shape.without}"'
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


def default_text(model: str) -> str:
    """A configuration file with every setting, its meaning and its default.

    Settings are commented out with a bare ``#``, so that defaults stay in force; the text around
    them begins with ``# ``. Each line has its whole key, so that it can be used without any other.
    ``model`` is the model that is served without settings.
    """
    lines = [
        "# Settings of sluice. Remove the # before a setting to change it; the value shown is the",
        "# default. Each line stands for itself. Instead, all lines of a section may be put under",
        "# its heading, [server] for example, without its name in front; TOML does not allow both",
        "# for one section.",
        "# `sluice config check -c FILE` checks the file.",
    ]
    for key, section, heading in sections():
        examples = {"models": model, "tenants": _TENANT_NAME, **_TOGETHER}
        name = heading.replace("NAME", examples.get(key.name, _SLO_NAME))
        lines += ["", f"# ---- {heading}", *_comment(docs_of(Settings)[key.field])]
        for entry in keys_of(section).values():
            example = " Unset; an example:" if (key.name, entry.name) in _SHOWN_VALUES else ""
            lines += ["", *_comment(docs_of(section)[entry.field] + example)]
            lines.append(_default_line(entry, key.name, name))
    return "\n".join(lines) + "\n"


def _default_line(key: Key, section: str, name: str) -> str:
    if section in _TOGETHER:
        value = "unset" if key.default is None else default_value(key)
        return f"# {name}.{key.name}, if not given: {value}"
    shown = _SHOWN_VALUES.get((section, key.name))
    if shown is not None:
        return f"#{name}.{key.name} = {shown}"
    if key.from_table:
        return f"#{name}.{key.name} = {json.dumps(name.partition('.')[2])}"
    if key.default is None:
        return f"# {name}.{key.name} is unset."
    return f"#{name}.{key.name} = {default_value(key)}"


def default_value(key: Key) -> str:
    """The default as TOML, the same on every machine: the user's home is ``~``."""
    if key.from_table:
        return "NAME"
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
