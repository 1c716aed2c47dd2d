"""Writes docs/reference/ from the code: HTTP, settings, command line, errors, metrics.

``python -m tools.reference`` writes the pages; tests/architecture/test_docs.py fails while they are
not what the code says. Pages depend on the code alone, not on the machine or on library versions.
"""

from collections.abc import Iterator
from pathlib import Path

import click

from sluice.cli.bench_compare import compare
from sluice.cli.main import COMMANDS, root
from sluice.config.changes import is_live
from sluice.config.explain import default_value, docs_of, sections
from sluice.config.schema import Key, accepted, keys_of
from sluice.config.settings import Settings
from sluice.core.errors import SluiceError
from sluice.server.problems import TABLE
from sluice.telemetry.metric_table import METRICS, VLLM_ALIASES
from tools.http_reference import http_lines

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"


def settings_page() -> str:
    """Every setting: key, default, accepted values, meaning."""
    lines = [
        "# Settings",
        "",
        "A TOML file (`-c FILE`, or the one that `SLUICE_CONFIG` names), then the environment,",
        "then `--set KEY=VALUE`; the last one wins. The variable of a setting is `SLUICE_` and its",
        "key in capitals with `__` between the parts: `SLUICE_SERVER__LISTEN`. Durations and sizes",
        'carry their unit: `"500ms"`, `"4GiB"`. What cannot be used is an error, and all problems',
        "are reported at once. Settings that change without a restart do so at SIGHUP and at",
        "`POST /admin/reload`, for requests and connections that begin afterwards.",
    ]
    for key, section, heading in sections():
        lines += ["", f"## [{heading}]", "", docs_of(Settings)[key.field]]
        for entry in keys_of(section).values():
            lines += ["", f"### {entry.name}", "", _facts(entry, key.name)]
            lines += ["", docs_of(section)[entry.field]]
            inner = entry.shape.form
            if hasattr(inner, "__dataclass_fields__"):
                docs = docs_of(inner)
                lines.append("")
                lines += [
                    f"- `{part.name}` (default `{default_value(part)}`): {docs[part.field]}"
                    for part in keys_of(inner).values()
                ]
    return _page(lines)


def cli_page() -> str:
    """Every command with its arguments and options."""
    lines = [
        "# Command line",
        "",
        "Exit codes: 0 done, 1 a finding or a failure, 2 bad input. With `--json`, standard output",
        'is one JSON document, `{"error": …}` after a failure; progress and logs go to standard',
        "error. A settings file that is missing or wrong is bad input, except that `config check`",
        "tells findings in a file with 1.",
    ]
    context = click.Context(root, info_name="sluice")
    for name in COMMANDS:
        command = root.get_command(context, name)
        assert command is not None
        for path, found in _commands(f"sluice {name}", command, context):
            lines += ["", f"## {path}", "", *_command(path, found)]
    return _page(lines)


def errors_page() -> str:
    """Every error class: when it is raised and how the server answers it."""
    lines = [
        "# Errors",
        "",
        'Bodies have OpenAI\'s shape: `{"error": {"message", "type", "param", "code"}}`.',
        "",
        "| error | status | type | code | when |",
        "|---|---|---|---|---|",
    ]
    for error in _tree(SluiceError):
        row = TABLE[error]
        status = row.status or getattr(error, "status", None) or "429 or 503"
        code = row.code or getattr(error, "code", None) or "the reason"
        lines.append(f"| {error.__name__} | {status} | {row.type} | {code} | {_first(error)} |")
    return _page(lines)


def metrics_page() -> str:
    """Every metric with its labels."""
    lines = [
        "# Metrics",
        "",
        "`GET /metrics` in Prometheus' text format. Times are in seconds.",
        "",
        "| metric | type | labels | meaning |",
        "|---|---|---|---|",
    ]
    for metric in METRICS:
        labels = ", ".join(metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.meaning} |")
    lines += [
        "",
        "With `metrics.vllm_aliases = true` these appear as well, under vLLM's names:",
        "",
        "| metric | same as |",
        "|---|---|",
    ]
    lines += [f"| `{alias.name}` | `{alias.source}` |" for alias in VLLM_ALIASES]
    return _page(lines)


def http_page() -> str:
    """Routes, fields, headers and codes."""
    return _page(list(http_lines()))


PAGES = {
    "http.md": http_page,
    "settings.md": settings_page,
    "cli.md": cli_page,
    "errors.md": errors_page,
    "metrics.md": metrics_page,
}


def main() -> None:
    """Write all pages."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")


def _facts(key: Key, table: str) -> str:
    default = f"default `{default_value(key)}`"
    when = " Changes without a restart." if is_live(table, key.name) else ""
    return f"Must be {accepted(key.shape)}; {default}.{when}"


def _commands(
    path: str, command: click.Command, parent: click.Context
) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if path == "sluice bench":  # takes a URL too, so that it is no group
        yield f"{path} {compare.name}", compare
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=command.name, parent=parent)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _commands(f"{path} {name}", inner, context)
    # Those of a command that takes an argument of its own in their place.
    for further in getattr(command, "inner", ()):
        yield f"{path} {further.name}", further


def _command(path: str, command: click.Command) -> Iterator[str]:
    arguments = [p for p in command.params if isinstance(p, click.Argument)]
    options = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
    words = [path, *(_argument(argument) for argument in arguments)]
    words += ["[OPTIONS]"] if options else []
    words += ["COMMAND"] if isinstance(command, click.Group) else []
    yield f"`{' '.join(words)}`"
    yield ""
    yield " ".join((command.help or "").split())
    if options:
        yield ""
    for option in options:
        value = "" if option.is_flag else f" {option.metavar or option.type.name.upper()}"
        spelt = ", ".join((*option.opts, *option.secondary_opts))
        yield f"- `{spelt}{value}`: {' '.join((option.help or '').split())}{_default(option)}"


def _default(option: click.Option) -> str:
    """What is taken where nothing is given, as far as ``--help`` shows it."""
    if option.is_flag or not option.show_default or option.default is None:
        return ""
    return f" Default: {option.default}."


def _argument(argument: click.Argument) -> str:
    name = argument.metavar or (argument.name or "").upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _tree(error: type[SluiceError]) -> Iterator[type[SluiceError]]:
    yield error
    for child in error.__subclasses__():
        if child.__module__ == error.__module__:
            yield from _tree(child)


def _first(error: type[SluiceError]) -> str:
    return (error.__doc__ or "").split("\n\n")[0].replace("\n", " ").strip()


def _page(lines: list[str]) -> str:
    note = "<!-- Written by `python -m tools.reference`; change the code instead. -->"
    return "\n".join([note, "", *lines]) + "\n"


if __name__ == "__main__":
    main()
