"""``sluice serve``: fetch, load and serve models until told to stop."""

import asyncio
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import click

from sluice.cli.options import settings_options
from sluice.cli.progress import PreparationProgress
from sluice.cli.welcome import welcome
from sluice.config.cautions import cautions
from sluice.config.load import load_settings
from sluice.config.sources import Override
from sluice.runtime.clock import monotonic_ns
from sluice.server.serve import address_of, bind, new_event_loop
from sluice.telemetry import log
from sluice.wiring.defaults import models_of
from sluice.wiring.gateway import make_gateway, prepare
from sluice.wiring.serving import Stop, run_server

_EXAMPLES = """\b
Examples:
  sluice serve
  sluice serve smollm2-135m-instruct --listen 127.0.0.1:9000
  sluice serve ./model.gguf --set server.grace=10s
  sluice serve hf:ORG/REPO/FILE.gguf
  sluice serve -c sluice.toml
"""


# Options that other servers have, and what says the same here.
_ELSEWHERE = {
    "--host": "write --listen HOST:PORT",
    "--port": "write --listen HOST:PORT",
    "--model": "give the model as the argument: sluice serve MODEL",
    "--served-model-name": "name the model's table: sluice serve --set models.NAME.source=MODEL",
    "--max-model-len": "write --set models.NAME.context_tokens_max=TOKENS",
    "--api-key": (
        "keys do not go on a command line, where other users see them: put them into "
        "$SLUICE_API_KEYS, or one per line into a file and write --set server.api_key_file=FILE"
    ),
}


def _point_elsewhere(
    context: click.Context, parameter: click.Parameter, value: object | None
) -> None:
    if value is not None:
        option = parameter.opts[0]
        raise click.UsageError(f"there is no {option}; {_ELSEWHERE[option]}", context)


def _elsewhere_options(command: click.Command) -> click.Command:
    """Let the command know the names of ``_ELSEWHERE``, to refuse them in words."""
    command.params += [
        click.Option(
            [name, "elsewhere_" + name.strip("-").replace("-", "_")],
            hidden=True,
            expose_value=False,
            callback=_point_elsewhere,
        )
        for name in _ELSEWHERE
    ]
    return command


@_elsewhere_options
@click.command(epilog=_EXAMPLES)
@click.argument("model", required=False)
@click.option("--listen", metavar="HOST:PORT", help="Address of the API; port 0 takes a free one.")
@settings_options
def command(
    model: str | None, listen: str | None, config: Path | None, overrides: Sequence[Override]
) -> None:
    """Serve MODEL, or what the settings name, behind the OpenAI API.

    MODEL is a catalogue name, the path of a GGUF file or of a folder with OpenVINO IR, or
    hf:ORG/REPO/FILE.gguf. With neither MODEL nor models in the settings, the catalogue's default
    model is served. Clients ask for a file or folder by its name without .gguf, in lower case and
    with '-' for each run of other characters than letters, digits, '_' and '-'. Ctrl-C lets running
    requests finish; a second one ends them.
    """
    given = list(overrides)
    if listen is not None:
        given.append(Override(("server", "listen"), listen, "--listen"))
    if model is not None:
        given.append(Override(("models", model_name(model), "source"), model, "MODEL"))
    settings = load_settings(config, given).settings
    log.set_up("gateway")
    listener = bind(settings.server)
    with PreparationProgress() as progress:
        prepared = prepare(models_of(settings), settings.catalogue, progress.update)
    for note in (note for model in prepared for note in model.notes):
        click.echo(f"note: {note}", err=True)
    for warning in cautions(settings, {one.name: one.context_tokens_max for one in prepared}):
        click.echo(f"warning: {warning}", err=True)
    gateway = make_gateway(settings, prepared)
    loading_ns = monotonic_ns()

    def tell_ready() -> None:
        load_s = (monotonic_ns() - loading_ns) / 1e9
        click.echo(f"loading done, {load_s:.1f} s", err=True)
        server = settings.server
        needs_key = bool(server.api_key_digests or server.tenant_key_digests)
        click.echo(welcome(gateway.pools(), address_of(listener), needs_key=needs_key), err=True)

    async def run() -> None:
        stop = Stop()
        _stop_on_signals(stop)
        click.echo("loading " + ", ".join(one.name for one in prepared), err=True)
        await run_server(gateway, settings.server, listener, stop, tell_ready)

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run())


def model_name(source: str) -> str:
    """The name that clients use for a model given by its source."""
    if source.startswith("hf:") or "/" in source or source.lower().endswith(".gguf"):
        source = re.sub(r"\.gguf$", "", source.rstrip("/").rpartition("/")[2], flags=re.IGNORECASE)
    return re.sub(r"[^a-z0-9_-]+", "-", source.lower()).strip("-") or "model"


def _stop_on_signals(stop: Stop) -> None:
    """The first signal drains, the second ends what runs, a third ends the process at once."""
    loop = asyncio.get_running_loop()
    numbers = [signal.SIGINT, signal.SIGTERM]
    # A terminal that is closed sends it. Under nohup it is ignored, and stays so.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)

    def stop_further() -> None:
        if not stop.soon.is_set():
            click.echo("draining; press Ctrl-C again to end running requests", err=True)
            stop.soon.set()
            return
        stop.now.set()
        for each in numbers:
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)

    for number in numbers:
        loop.add_signal_handler(number, stop_further)
