"""The ``sluice`` command: which subcommands there are, and how errors become exit codes.

Exit codes: 0 done, 1 a finding or a failure, 2 bad input. A subcommand's module is imported when it
is called, so that ``sluice --help`` and short commands start at once. Each module has a
``command``, parses, makes one call and prints. With ``--json``, a failure is one JSON document on
standard output too, ``{"error": …}`` with the words that standard error gets.
"""

import contextlib
import importlib
import io
import json
import sys

import click

from sluice import __version__
from sluice.core.errors import ConfigError, ModelLoadError, RequestError, SluiceError

# Module and one line of help; in the order of the help page.
COMMANDS = {
    "serve": ("sluice.cli.serve", "Serve models behind the OpenAI API."),
    "models": ("sluice.cli.models", "List, fetch and remove models."),
    "config": ("sluice.cli.config", "Check settings, explain them, print the defaults."),
    "plan": ("sluice.cli.plan", "GPUs, cost and limits for a load and its targets."),
    "simulate": ("sluice.cli.simulate", "A fleet under a load or a trace, in virtual time."),
    "replay": ("sluice.cli.replay", "Recorded traffic again, under other settings."),
    "bench": ("sluice.cli.bench", "What an endpoint can do, measured from outside."),
    "route": ("sluice.cli.route", "Train and judge the classifier that routes by complexity."),
    "doctor": ("sluice.cli.doctor", "Why p99 moved: causes with evidence, from the journal."),
    "docs": ("sluice.cli.docs", "The documents that pipelines retrieve from."),
    "top": ("sluice.cli.top", "A running server in the terminal, live."),
    "deploy": ("sluice.cli.deploy", "Serve on a Ray cluster, or render Kubernetes manifests."),
    "trace": ("sluice.cli.trace", "One request's life, phase by phase."),
}

_EXAMPLES = """\b
Examples:
  sluice serve
  sluice serve smollm2-135m-instruct --listen 127.0.0.1:9000
  sluice serve -c sluice.toml --set journal.keep=2h
  sluice models list
  sluice config check -c sluice.toml
  sluice bench http://127.0.0.1:8000 --ttft 1s --tpot 60ms --quick
  sluice doctor
  sluice plan --model llama-3.1-8b --gpu h100 --rps 20 --input 1000 --output 200 \\
      --ttft 1s --tpot 50ms
"""


class _Commands(click.Group):
    """Subcommands by name, imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name][0])
        command = module.command
        assert isinstance(command, click.Command)  # noqa: S101 - a bug in our table
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(
    cls=_Commands,
    epilog=_EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="sluice")
def root() -> None:
    """Keep LLM serving inside its latency targets."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that has no such character gets a question mark, and no traceback.
        sys.stdout.reconfigure(errors="replace")
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code. Errors go to standard error, in words."""
    as_json = "--json" in (sys.argv[1:] if arguments is None else arguments)
    try:
        code = root.main(args=arguments, prog_name="sluice", standalone_mode=False)
    except click.ClickException as error:
        _tell(error, in_words(error), as_json=as_json)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except (BrokenPipeError, SystemExit):
        # The reader of our output left, as `head` does, to which click has an exit of its own.
        # Writing to it again would only repeat that.
        sys.stdout = None
        return 0
    except OSError as error:
        # What a command does not say in its own words: a full disk behind the output, a folder that
        # nothing can be written to. It is of the machine, and no bug.
        _tell(error, f"sluice: {_words_of(error)}", as_json=as_json)
        return 1
    except SluiceError as error:
        _tell(error, in_words(error), as_json=as_json)
        return 2 if isinstance(error, ConfigError | ModelLoadError | RequestError) else 1
    return code if isinstance(code, int) else 0


def _words_of(error: OSError) -> str:
    words = error.strerror or str(error) or type(error).__name__
    return words if error.filename is None else f"{words}: {error.filename}"


def _tell(error: Exception, words: str, *, as_json: bool) -> None:
    click.echo(words, err=True)
    if as_json:
        document: dict[str, object] = {"error": words.removeprefix("sluice: ")}
        if isinstance(error, ConfigError):
            document["problems"] = error.problems
        with contextlib.suppress(OSError):  # it may be the output that fails
            click.echo(json.dumps(document, indent=2, ensure_ascii=False))


def in_words(error: SluiceError | click.ClickException) -> str:
    """The error as the terminal shows it; of settings, each problem on its own line."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return error.format_message()
    if isinstance(error, click.UsageError):
        context = error.ctx
        path = "sluice" if context is None else context.command_path
        return f"sluice: {error.format_message()}\nTry '{path} --help'."
    if isinstance(error, click.ClickException):
        return f"sluice: {error.format_message()}"
    if isinstance(error, ConfigError) and len(error.problems) > 1:
        lines = (f"  {problem}" for problem in error.problems)
        return "\n".join((f"sluice: {len(error.problems)} problems in the settings:", *lines))
    return f"sluice: {error}"
