"""``sluice serve``: fetch, load and serve models until told to stop."""

import asyncio
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click

from sluice.cli.options import settings_options
from sluice.cli.progress import PreparationProgress
from sluice.cli.signals import listen_to_signals
from sluice.cli.welcome import further_names, welcome
from sluice.config.cautions import cautions
from sluice.config.load import load_settings
from sluice.config.sources import Override
from sluice.runtime.clock import monotonic_ns
from sluice.server.serve import address_of, bind, new_event_loop
from sluice.server.transport import Transport
from sluice.telemetry import log
from sluice.wiring.defaults import models_of
from sluice.wiring.gateway import make_gateway, prepare
from sluice.wiring.operations import RunningServer
from sluice.wiring.remote import RemoteIds
from sluice.wiring.serving import Stop, run_server
from sluice.wiring.tracing import check_installed

_EXAMPLES = """\b
Examples:
  sluice serve
  sluice serve smollm2-135m-instruct --listen 127.0.0.1:9000
  sluice serve ./model.gguf --set server.grace=10s
  sluice serve hf:ORG/REPO/FILE.gguf
  sluice serve sim:llama-3.1-70b@h100x4
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

    MODEL is a catalogue name, the path of a GGUF file or of a folder with OpenVINO IR,
    hf:ORG/REPO/FILE.gguf, or sim:MODEL@GPUxN, which simulates a model on GPUs that are not here.
    With neither MODEL nor models in the settings, the catalogue's default model is served. Clients
    ask for a file or folder by its name without .gguf, in lower case and with '-' for each run of
    other characters than letters, digits, '_' and '-'. Ctrl-C lets running requests finish; a
    second one ends them. SIGHUP reads the settings again and applies what can change without a
    restart.
    """
    given = list(overrides)
    if listen is not None:
        given.append(Override(("server", "listen"), listen, "--listen"))
    if model is not None:
        given.append(Override(("models", model_name(model), "source"), model, "MODEL"))
    read = partial(load_settings, config, given)
    loaded = read()
    settings = loaded.settings
    check_installed(settings.tracing)
    log.set_up("gateway")
    transport = Transport.of(settings.server)
    listener = bind(settings.server)
    with PreparationProgress() as progress:
        prepared = prepare(models_of(settings), settings.catalogue, progress.update)
    for note in (note for model in prepared for note in model.notes):
        click.echo(f"note: {note}", err=True)
    for warning in cautions(settings, {one.name: one.context_tokens_max for one in prepared}):
        click.echo(f"warning: {warning}", err=True)
    ids = RemoteIds()
    gateway = make_gateway(settings, prepared, ids)
    loading_ns = monotonic_ns()

    def tell_ready() -> None:
        load_s = (monotonic_ns() - loading_ns) / 1e9
        click.echo(f"loading done, {load_s:.1f} s", err=True)
        server = settings.server
        needs_key = bool(server.api_key_digests or server.tenant_key_digests)
        address = address_of(listener, transport.scheme)
        remote = gateway.relaying.always
        further = further_names(settings)
        click.echo(
            welcome(gateway.pools(), address, remote, further, needs_key=needs_key), err=True
        )

    async def run() -> None:
        running, stop = RunningServer(gateway, loaded, read, transport, ids), Stop()
        asyncio.get_running_loop().set_exception_handler(log.unhandled)
        listen_to_signals(stop, running.reload)
        click.echo("loading " + ", ".join(models_of(settings)), err=True)
        await run_server(running, listener, stop, tell_ready)

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run())


def model_name(source: str) -> str:
    """The name that clients use for a model given by its source."""
    if source.startswith("hf:") or "/" in source or source.lower().endswith(".gguf"):
        source = re.sub(r"\.gguf$", "", source.rstrip("/").rpartition("/")[2], flags=re.IGNORECASE)
    return re.sub(r"[^a-z0-9_-]+", "-", source.lower()).strip("-") or "model"
