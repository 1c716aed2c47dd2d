"""Settings from a TOML file, then the environment, then the command line.

The only reader of ``os.environ``. Every problem of every source is collected with the place where
it stands, and all are raised at once as one ``ConfigError``; no value is ignored and none is
guessed. Secrets are read here, from the variables and files that settings name, and only digests go
on.
"""

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any

from sluice.config.pipeline_sections import PipelineSection
from sluice.config.schema import (
    Key,
    Shape,
    accepted,
    convert,
    is_table,
    keys_of,
    nearest,
    shape_of,
    value_of_text,
)
from sluice.config.sections import CatalogueSection, ModelSection, ServerSection
from sluice.config.settings import Settings, conflicts
from sluice.config.sources import (
    CONFIG_VARIABLE,
    KeyPath,
    Leaf,
    Origin,
    Override,
    Table,
    dotted,
    environment_table,
    file_table,
    overlay,
    override_table,
    put,
    stray_variables,
)
from sluice.core.errors import ConfigError

_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Goes into addresses, metrics and process ids.
_MODEL_NAME = re.compile(r"(?!.*\.\.)[A-Za-z0-9._:/-]{1,128}")
# These go into headers, metrics and the journal.
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FILE_BYTES_MAX = 1024**2
_SECRETS_IN: Mapping[str, type] = {"server": ServerSection, "catalogue": CatalogueSection}

_USER_FOLDERS = (
    ("XDG_CACHE_HOME", ("catalogue", "cache_dir"), "sluice"),
    ("XDG_DATA_HOME", ("documents", "dir"), "sluice/documents"),
    ("XDG_STATE_HOME", ("journal", "dir"), "sluice/journal"),
)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Checked settings, and where each value that is not a default was given."""

    settings: Settings
    origins: Mapping[KeyPath, Origin]

    def origin(self, path: KeyPath) -> Origin:
        """Where the value at ``path`` was given."""
        return self.origins.get(path, Origin("default"))


def load_settings(
    file: Path | None = None,
    overrides: Sequence[Override] = (),
    environment: Mapping[str, str] | None = None,
    *,
    secrets: bool = True,
) -> Loaded:
    """Read, lay over one another, convert and check all settings.

    Without ``secrets`` no key is read, and what hangs on keys is not checked: for commands that
    only look at what a server has written, in an environment that is not the server's.
    ``environment`` defaults to the process's own. With no ``file``, the one that ``SLUICE_CONFIG``
    names is read, if it names one. Raises ``ConfigError`` with every problem found.
    """
    variables = os.environ if environment is None else environment
    file = settings_file(file, variables)
    problems: list[str] = []
    lower = Table(Origin("default"))
    if file is not None:
        try:
            lower = file_table(file_text(file), str(file))
        except (OSError, ValueError) as error:
            problems.append(_unreadable(file, error))
    _take_standard_variables(lower, variables)
    given, wrong = override_table(overrides)
    problems += wrong
    ambient, wrong = environment_table(variables, lower)
    problems += wrong
    table = overlay(overlay(lower, ambient), given)
    problems += stray_variables(variables, _named_variables(table))
    reading = _Reading(problems)
    settings = reading.settings(table)
    if secrets:
        settings = _with_secrets(settings, variables, reading)
        reading.check(settings)
    if reading.problems:
        raise ConfigError(tuple(reading.problems))
    return Loaded(settings, reading.origins)


def settings_file(file: Path | None, environment: Mapping[str, str] | None = None) -> Path | None:
    """The settings file that is read: the one given, or the one that ``SLUICE_CONFIG`` names."""
    variables = os.environ if environment is None else environment
    if file is None and variables.get(CONFIG_VARIABLE):
        return Path(variables[CONFIG_VARIABLE])
    return file


def variable(name: str) -> str:
    """The value of a variable that the user names, empty where it is unset."""
    return os.environ.get(name, "")


@dataclass(slots=True)
class _Reading:
    """One pass over the joined table: values out, problems and origins noted."""

    problems: list[str]
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    failed: set[KeyPath] = field(default_factory=set)

    def settings(self, table: Table) -> Settings:
        return self._section(Settings, table, ())  # type: ignore[no-any-return]

    def problem(self, path: KeyPath, message: str) -> None:
        """Note a problem of the setting at ``path``, with the place where it was given."""
        origin = self._origin_near(path)
        place = f"{origin}: " if origin.kind != "default" else ""
        self.problems.append(f"{place}{dotted(path)}: {message}")
        self.failed.add(path)

    def check(self, settings: Settings) -> None:
        """Note what does not fit together, of the values that are fine alone."""
        for conflict in conflicts(settings):
            if self.failed.isdisjoint(conflict.keys):
                given = [key for key in conflict.keys if key in self.origins]
                path = given[0] if given else conflict.keys[0]
                self.problem(path, conflict.message)

    def _origin_near(self, path: KeyPath) -> Origin:
        known = (path[:n] for n in range(len(path), 0, -1) if path[:n] in self.origins)
        return self.origins.get(next(known, ()), Origin("default"))

    def _section(self, section: type, table: Table, path: KeyPath) -> Any:
        keys = keys_of(section)
        for name, item in table.items.items():
            if name not in keys:
                self.origins[*path, name] = item.origin
                self._unknown(path, name, list(keys))
        values = {key.field: self._value(key, table, (*path, key.name)) for key in keys.values()}
        return section(**values)

    def _unknown(self, path: KeyPath, name: str, names: list[str]) -> None:
        owners = [] if path else _owners(name)
        near = nearest(name, names)
        if owners:
            hint = f"nearest: {' or '.join(owners)}"
        elif near:
            hint = f"nearest: {dotted((*path, near))}"
        else:
            hint = f"accepted: {', '.join(names)}"
        self.problem((*path, name), f"unknown setting; {hint}")

    def _value(self, key: Key, table: Table, path: KeyPath) -> Any:
        item = table.items.get(key.name)
        if item is not None:
            self.origins[path] = item.origin
            try:
                return self._given(item, key.shape, path)
            except ValueError as error:
                self.problem(path, str(error))
        elif key.required:
            self.problem(path, f"is missing; it must be {accepted(key.shape)}")
        # Stands in for a value with a problem, so that the rest can still be checked.
        return path[-2] if key.from_table else key.default

    def _given(self, item: Table | Leaf, shape: Shape, path: KeyPath) -> Any:
        value: object = {}
        if isinstance(item, Leaf):
            value = item.value
            if item.origin.is_text:
                value = value_of_text(str(value), shape)
        if not is_table(shape):
            if isinstance(item, Table):
                raise ValueError(f"must be {accepted(shape)}, not a table")
            return convert(value, shape)
        if not isinstance(value, dict):
            raise ValueError("must be a table")  # noqa: TRY004 - a user's mistake
        table = item if isinstance(item, Table) else _table_of(value, item.origin)
        if is_dataclass(shape.form):
            return self._section(shape.form, table, path)  # type: ignore[arg-type]
        return self._named(table, shape_of(shape.items[1]), path)

    def _named(self, table: Table, shape: Shape, path: KeyPath) -> dict[str, Any]:
        made = {}
        for name, item in table.items.items():
            here = (*path, name)
            self.origins[here] = item.origin
            if path in {("models",), ("routes",), ("pipelines",)} and not _MODEL_NAME.fullmatch(
                name
            ):
                self.problem(
                    here,
                    f"a {path[0].removesuffix('s')}'s name has at most 128 characters: ASCII "
                    "letters, digits, slashes and any of ._:- but no two dots in a row",
                )
                continue
            if path in {("slo",), ("tenants",)} and not _NAME.fullmatch(name):
                words = "has at most 64 characters: ASCII letters, digits and any of ._:-"
                self.problem(here, f"the name of a class or tenant {words}")
                continue
            try:
                made[name] = self._given(item, shape, here)
            except ValueError as error:
                words = str(error)
                if is_table(shape) and is_dataclass(shape.form) and name in keys_of(shape.form):  # type: ignore[arg-type]
                    words = f"belongs to one of the tables: write it under [{path[-1]}.NAME]"
                self.problem(here, words)
        return made


def _owners(name: str) -> list[str]:
    """The settings of this name in any section, as they are written."""
    return [
        f"{section.name}.NAME.{name}" if shape.form is Mapping else f"{section.name}.{name}"
        for section in keys_of(Settings).values()
        for shape in (section.shape,)
        if name in keys_of(shape_of(shape.items[1]).form if shape.form is Mapping else shape.form)
    ]


def _table_of(value: Mapping[str, object], origin: Origin) -> Table:
    """An inline table that came as text: its leaves are values already, at the text's place."""
    settled = Origin("file", str(origin))
    return Table(
        origin,
        {
            key: _table_of(entry, origin) if isinstance(entry, dict) else Leaf(entry, settled)
            for key, entry in value.items()
        },
    )


def file_text(file: Path) -> str:
    """The text of a file that a user named. Does not wait for one that is a pipe or a device.

    Raises ``OSError`` or ``ValueError`` where it cannot be read, is too long or is no text.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as opened:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{file}: is not a regular file")
        content = opened.read(_FILE_BYTES_MAX + 1)
    if len(content) > _FILE_BYTES_MAX:
        raise ValueError(f"{file}: is longer than {_FILE_BYTES_MAX} bytes")
    return content.decode()


def _unreadable(file: Path, error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return f"{file}: cannot be read: {error.strerror}"
    if isinstance(error, UnicodeDecodeError):
        return f"{file}: is not UTF-8 text (byte {error.start})"
    return str(error)


def _take_standard_variables(table: Table, variables: Mapping[str, str]) -> None:
    """Variables that other tools read too. ``HF_ENDPOINT`` stands above the file and below our own
    name; the user's folders give way to anything said."""
    if variables.get("HF_ENDPOINT"):
        leaf = Leaf(variables["HF_ENDPOINT"], Origin("environment", "HF_ENDPOINT"))
        put(table, ("catalogue", "hf_endpoint"), leaf)
    for variable, path, below in _USER_FOLDERS:
        section = table.items.get(path[0])
        given = isinstance(section, Table) and path[1] in section.items
        if variables.get(variable) and not given:
            folder = str(Path(variables[variable]) / below)
            put(table, path, Leaf(folder, Origin("environment", variable)))


def _named_variables(table: Table) -> frozenset[str]:
    """Variables that settings name as holders of secrets, and the one that names the file."""
    names = {CONFIG_VARIABLE}
    for section in _SECRETS_IN.values():
        names |= {key.default for key in keys_of(section).values() if key.name.endswith("_env")}
    return frozenset(names | set(_variables_named_in(table)))


def _variables_named_in(table: Table) -> Iterator[str]:
    for key, item in table.items.items():
        if isinstance(item, Table):
            yield from _variables_named_in(item)
        elif key.endswith("_env") and isinstance(item.value, str):
            yield item.value


def _with_secrets(settings: Settings, variables: Mapping[str, str], reading: _Reading) -> Settings:
    def read(section: str, key: str, name: str) -> str:
        path = (section, key)
        if not _VARIABLE_NAME.fullmatch(name):
            # The value is not shown: it may be the secret itself.
            reading.problem(path, "must be the name of an environment variable, not a key")
            return ""
        # The usual name written out, as in ``sluice config default``, asks for nothing.
        is_usual = name == keys_of(_SECRETS_IN[section])[key].default
        if path in reading.origins and not is_usual and not variables.get(name):
            reading.problem(path, f"${name} is not set or empty")
        return variables.get(name, "")

    server, catalogue = settings.server, settings.catalogue
    keys = [key.strip() for key in read("server", "api_keys_env", server.api_keys_env).split(",")]
    keys += _lines_of(server.api_key_file, ("server", "api_key_file"), reading)
    admin_key = read("server", "admin_key_env", server.admin_key_env).strip()
    admin_keys = _lines_of(server.admin_key_file, ("server", "admin_key_file"), reading)
    token = read("catalogue", "hf_token_env", catalogue.hf_token_env).strip()
    api_key_digests = tuple(dict.fromkeys(digest(key) for key in keys if key))
    owners = dict.fromkeys(api_key_digests, "server.api_keys_env or server.api_key_file")
    found = [("admin_key_env", digest(admin_key))] if admin_key else []
    found += [("admin_key_file", digest(key)) for key in admin_keys]
    for name, one in found:
        if one in api_key_digests:
            words = "must be no API key, because whoever asks for text could change the server"
            reading.problem(("server", name), words)
        owners[one] = f"server.{name}"
    return replace(
        settings,
        models=_with_engine_keys(settings, variables, reading),
        pipelines=_with_pipeline_keys(settings, variables, reading),
        server=replace(
            server,
            api_key_digests=api_key_digests,
            admin_key_digests=tuple(dict.fromkeys(one for _, one in found)),
            tenant_key_digests=_tenant_keys(settings, variables, reading, owners),
        ),
        catalogue=replace(catalogue, hf_token=token or None),
    )


def _with_engine_keys(
    settings: Settings, variables: Mapping[str, str], reading: _Reading
) -> dict[str, ModelSection]:
    """The models with the keys of their remote engines."""
    models = dict(settings.models)
    for name, model in settings.models.items():
        of_variable, of_file = (("models", name, key) for key in ("key_env", "key_file"))
        keys = [(of_file, key) for key in _lines_of(model.key_file, of_file, reading)]
        if model.key_env is not None:
            key = _engine_key_in(model.key_env, of_variable, variables, reading)
            keys += [(of_variable, key)] if key else []
        for path, key in keys:
            _check_header(key, path, reading)
        if len(keys) > 1:
            reading.problem(of_file, "there is more than one key; engines are sent one")
        elif keys:
            models[name] = replace(model, key=keys[0][1])
    return models


def _with_pipeline_keys(
    settings: Settings, variables: Mapping[str, str], reading: _Reading
) -> dict[str, PipelineSection]:
    """The pipelines with the keys of what they ask."""
    pipelines = dict(settings.pipelines)
    for name, pipeline in settings.pipelines.items():
        named = {
            "key": pipeline.key_env,
            "embeddings_key": pipeline.embeddings_key_env,
            "rerank_key": pipeline.rerank_key_env,
        }
        keys: dict[str, Any] = {}
        for key, variable in named.items():
            if variable is not None:
                path = ("pipelines", name, f"{key}_env")
                keys[key] = _engine_key_in(variable, path, variables, reading)
                _check_header(keys[key], path, reading)
        pipelines[name] = replace(pipeline, **keys)
    return pipelines


def _check_header(key: str, path: KeyPath, reading: _Reading) -> None:
    if not (key.isascii() and key.isprintable()):
        reading.problem(path, "there is a character that no header can carry")


def _engine_key_in(
    variable: str, path: KeyPath, variables: Mapping[str, str], reading: _Reading
) -> str:
    if not _VARIABLE_NAME.fullmatch(variable):
        reading.problem(path, "must be the name of an environment variable, not a key")
        return ""
    key = variables.get(variable, "").strip()
    if not key:
        reading.problem(path, f"${variable} is not set or empty")
    return key


def _tenant_keys(
    settings: Settings,
    variables: Mapping[str, str],
    reading: _Reading,
    others: Mapping[str, str],
) -> tuple[tuple[str, str], ...]:
    """The digests of tenants' keys, each with its tenant.

    ``others`` belong to no tenant; each with the setting that it comes from.
    """
    owners = dict(others)
    found: list[tuple[str, str]] = []
    for name, tenant in settings.tenants.items():
        here, file = ("tenants", name), tenant.key_sha256_file
        places = [
            (
                (*here, "key_sha256_file"),
                str(file),
                _lines_of(file, (*here, "key_sha256_file"), reading),
            )
        ]
        variable = tenant.key_sha256_env
        if variable is not None:
            path = (*here, "key_sha256_env")
            places.append((path, f"${variable}", _digests_in(variable, path, variables, reading)))
        for path, place, digests in places:
            for one in dict.fromkeys(part.lower() for part in digests):
                if not _DIGEST.fullmatch(one):
                    words = "holds something that is no SHA-256 digest of 64 hexadecimal digits"
                    reading.problem(path, f"{place} {words}")
                elif one in owners:
                    reading.problem(path, f"{place} holds a key that {owners[one]} has too")
                else:
                    owners[one] = f"tenants.{name}"
                    found.append((one, name))
    return tuple(found)


def _digests_in(
    variable: str | None, path: KeyPath, variables: Mapping[str, str], reading: _Reading
) -> list[str]:
    """What a variable with digests of a tenant's keys holds."""
    if variable is None:
        return []
    if not _VARIABLE_NAME.fullmatch(variable):
        reading.problem(path, "must be the name of an environment variable, not a digest")
        return []
    digests = [part.strip() for part in variables.get(variable, "").split(",") if part.strip()]
    if not digests:
        reading.problem(path, f"${variable} is not set or empty")
    return digests


def digest(key: str) -> str:
    """What is kept of an API key: the hexadecimal SHA-256 of its UTF-8 bytes."""
    return hashlib.sha256(key.encode()).hexdigest()


def _lines_of(file: Path | None, path: KeyPath, reading: _Reading) -> list[str]:
    """The keys or digests in a file that a setting names."""
    if file is None:
        return []
    try:
        lines = file_text(file).splitlines()
    except (OSError, ValueError) as error:
        reading.problem(path, _unreadable(file, error))
        return []
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        reading.problem(path, f"{file} holds no key; write one per line")
    return keys
