"""``sluice serve``: fetch, load and serve models until told to stop."""

import asyncio
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import click

from sluice.cli.options import settings_options
from sluice.cli.progress import PreparationProgress
from sluice.cluster.gateway import LocalGateway
from sluice.config.load import load_settings
from sluice.config.settings import Settings
from sluice.config.sources import Override
from sluice.server.serve import address_of, bind, new_event_loop
from sluice.telemetry import log
from sluice.wiring.gateway import make_gateway, models_of, prepare
from sluice.wiring.serving import Stop, run_server

_EXAMPLES = """\b
Examples:
  sluice serve
  sluice serve smollm2-135m-instruct --listen 127.0.0.1:9000
  sluice serve ./model.gguf --set server.grace=10s
  sluice serve hf:ORG/REPO/FILE.gguf
  sluice serve -c sluice.toml
"""


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
    model is served. Ctrl-C lets running requests finish; a second one ends them.
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
    gateway = make_gateway(settings, prepared)

    def tell_ready() -> None:
        click.echo(welcome(gateway, settings, address_of(listener)), err=True)

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


def welcome(gateway: LocalGateway, settings: Settings, address: str) -> str:
    """What the operator sees when everything is loaded."""
    lines = []
    for pool in gateway.pools():
        limits = pool.limits
        if limits is None:
            continue
        kv_tokens = limits.blocks_total * limits.block_size
        lines.append(
            f"{pool.model}: context {limits.context_tokens_max:,} tokens, KV pool "
            f"{kv_tokens:,} tokens in {limits.blocks_total:,} blocks, "
            f"{limits.sequences_max} sequences at once, {len(pool.replicas)} replica(s)"
        )
    key = ' -H "Authorization: Bearer $KEY"' if settings.server.api_key_digests else ""
    first = gateway.models()[0].id
    message = '{"role": "user", "content": "Hello"}'
    body = f'{{"model": "{first}", "messages": [{message}], "max_tokens": 50}}'
    return "\n".join(
        (
            *lines,
            f"API      {address}/v1",
            f"metrics  {address}/metrics",
            "",
            f"curl {address}/v1/chat/completions{key} -H 'content-type: application/json' \\",
            f"  -d '{body}'",
        )
    )


def _stop_on_signals(stop: Stop) -> None:
    """The first signal drains, the second ends what runs, a third ends the process at once."""
    loop = asyncio.get_running_loop()

    def stop_further() -> None:
        if not stop.soon.is_set():
            click.echo("draining; press Ctrl-C again to end running requests", err=True)
            stop.soon.set()
            return
        stop.now.set()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop_further)
