"""``sluice deploy``: on the machines of a Ray cluster, or as manifests for Kubernetes."""

import asyncio
import importlib.util
import signal
from collections.abc import Sequence
from pathlib import Path

import click
import yaml

from sluice.cli.options import BadInput, json_option, print_json, settings_options
from sluice.cli.serve import command as serve_command
from sluice.cluster.placement.placed import NotPlaced
from sluice.config.load import file_text, load_settings, settings_file
from sluice.config.settings import Settings, conflicts
from sluice.config.sources import Override, dotted
from sluice.core.errors import ConfigError
from sluice.telemetry import log
from sluice.wiring.manifests import Cluster, Document, kinds, manifests
from sluice.wiring.placing import ray_cluster, ray_room

_K8S = """\b
Examples:
  sluice deploy k8s -c sluice.toml --image registry.example.com/sluice:0.1 > sluice.yaml
  sluice deploy k8s -c sluice.toml --image sluice:0.1 --out manifests
"""
_KEDA = """\b
Examples:
  sluice deploy keda-scaler --gateway http://sluice:8000
  sluice deploy keda-scaler --gateway http://sluice:8000 --listen 0.0.0.0:6000
"""
_RAY = """\b
Examples:
  sluice deploy ray -c sluice.toml --address auto --check
  sluice deploy ray -c sluice.toml
"""
_EXAMPLES = _K8S + "".join(part.partition("Examples:\n")[2] for part in (_RAY, _KEDA))


@click.group(epilog=_EXAMPLES)
def command() -> None:
    """Serve on a Ray cluster, or render Kubernetes manifests."""


# ----------------------------------------------------------------------------------- Kubernetes


def _images(
    _context: click.Context, _parameter: click.Parameter, texts: tuple[str, ...]
) -> dict[str, str]:
    found = {}
    for text in texts:
        model, equals, image = text.partition("=")
        if not (model and equals and image):
            raise click.UsageError(f"--engine-image {text}: write MODEL=IMAGE")
        found[model] = image
    return found


@command.command("k8s", epilog=_K8S, short_help="Render Kubernetes manifests.")
@settings_options
@click.option("--image", required=True, help="Image with sluice and its extra `keda`.")
@click.option("--namespace", default="default", show_default=True, help="Namespace of all of it.")
@click.option("--name", default="sluice", show_default=True, help="Name of the gateway.")
@click.option(
    "--engine-image",
    metavar="MODEL=IMAGE",
    multiple=True,
    callback=_images,
    help="Another image than the usual one of the engine.",
)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Folder; a file for each."
)
@json_option
def k8s(
    config: Path | None,
    overrides: Sequence[Override],
    out: Path | None,
    as_json: bool,
    **cluster: object,
) -> None:
    """Render manifests for the settings: gateway, engines, and what scales them.

    Engines are rendered for remote models with one address that is the bare name of a Service, such
    as dns+http://large:8000; other addresses are taken to be served already. Those with
    a range of replicas are scaled by KEDA to what the gateway wants. Keys are not in the
    settings: make Secrets NAME-keys and NAME-engine-keys with the variables that they name.
    """
    settings = load_settings(config, overrides, secrets=False).settings
    # What hangs on keys is looked at in the pod, where they are.
    wrong = [one for one in conflicts(settings) if one.keys[0][0] != "server"]
    if wrong:
        raise ConfigError(tuple(f"{dotted(one.keys[0])}: {one.message}" for one in wrong))
    path = settings_file(config)
    if path is None:
        raise BadInput("manifests are made of a settings file; name one with -c FILE")
    there = Cluster(
        image=str(cluster["image"]),
        namespace=str(cluster["namespace"]),
        name=str(cluster["name"]),
        engine_images=cluster["engine_image"],  # type: ignore[arg-type]
        sets=[f"{dotted(one.path)}={one.value}" for one in overrides],
    )
    documents = manifests(settings, path.read_text(encoding="utf-8"), there)
    if out is not None:
        _write(documents, out)
    if as_json:
        print_json({"apiVersion": "v1", "kind": "List", "items": documents})
    elif out is None:
        click.echo("---\n".join(_yaml(document) for document in documents), nl=False)


def _write(documents: Sequence[Document], out: Path) -> None:
    """A file for each; says what else is in the folder, which would be applied with them."""
    files = {
        f"{number:02d}-{one['kind'].lower()}-{one['metadata']['name']}.yaml": _yaml(one)
        for number, one in enumerate(documents)
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"cannot write to {out}: {error.strerror or error}") from None
    click.echo(f"{len(files)} files in {out}: {', '.join(kinds(documents))}", err=True)
    others = sorted(one.name for one in out.glob("*.y*ml") if one.name not in files)
    if others:
        click.echo(
            f"note: other files are there, which kubectl apply -f {out} takes too: "
            f"{', '.join(others)}",
            err=True,
        )


class _Plain(yaml.SafeDumper):
    """Writes what people read and change: no references, and text of several lines as a block."""

    def ignore_aliases(self, *_: object) -> bool:
        return True


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Plain.add_representer(str, _block)


def _yaml(document: Document) -> str:
    return str(yaml.dump(document, Dumper=_Plain, sort_keys=False, allow_unicode=True))


@command.command("keda-scaler", epilog=_KEDA, short_help="Tell KEDA how many replicas to run.")
@click.option("--gateway", metavar="URL", required=True, help="The gateway whose wish is told.")
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default="127.0.0.1:6000",
    show_default=True,
    help="Address at which KEDA asks; in a pod 0.0.0.0:6000.",
)
@click.option(
    "--key-file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="File with an API key, where /metrics asks for one.",
)
def keda_scaler(gateway: str, listen: str, key_file: Path | None) -> None:
    """Answer KEDA how many replicas the gateway wants of each model.

    The trigger of a ScaledObject names the model: metadata {scalerAddress: ..., model: NAME}. While
    the gateway does not answer, neither does this, so that KEDA keeps what there is. Speaks gRPC
    without TLS.
    """
    if importlib.util.find_spec("grpc") is None:
        raise BadInput("this needs an extra that is not installed: pip install sluice[keda]")
    from sluice.cluster.placement.keda import (  # noqa: PLC0415 - of an extra
        KedaScaler,
        desired_of,
    )

    if not gateway.startswith(("http://", "https://")):
        raise BadInput(f"--gateway {gateway}: write http://HOST:PORT")
    key = None if key_file is None else _key_in(key_file)
    log.set_up("keda-scaler")

    async def run() -> None:
        stop = asyncio.Event()
        for sign in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(sign, stop.set)
        try:
            server, port = await KedaScaler(desired_of(gateway, key)).serve(listen)
        except RuntimeError as error:
            raise BadInput(f"--listen {listen}: {error}") from error
        host = listen.rpartition(":")[0]
        click.echo(f"answering KEDA at {host}:{port} for {gateway}", err=True)
        await stop.wait()
        await server.stop(1.0)

    asyncio.run(run())


def _key_in(file: Path) -> str:
    """The one key of a file, as a header can carry it."""
    try:
        key = file_text(file).strip()
    except (OSError, ValueError) as error:
        raise BadInput(f"--key-file {file} cannot be read: {error}") from None
    if not key or not (key.isascii() and key.isprintable()):
        raise BadInput(f"--key-file {file}: it must hold one key, of characters of a header")
    return key


# ------------------------------------------------------------------------------------------ Ray


@command.command("ray", epilog=_RAY, short_help="Serve with replicas on a Ray cluster.")
@settings_options
@click.option("--address", metavar="ADDRESS", help="The cluster: auto, or HOST:PORT of its head.")
@click.option("--listen", metavar="HOST:PORT", help="Address of the API; port 0 takes a free one.")
@click.option("--check", is_flag=True, help="Only say whether the cluster has room.")
@click.pass_context
def ray(
    context: click.Context,
    config: Path | None,
    overrides: Sequence[Override],
    address: str | None,
    listen: str | None,
    check: bool,
) -> None:
    """Serve with replicas on a Ray cluster; the gateway runs here.

    The same as `sluice serve` with placement.kind = "ray", after a look at whether the replicas fit
    on the machines that there are.
    """
    given = [*overrides, Override(("placement", "kind"), "ray", "deploy ray")]
    if address is not None:
        given.append(Override(("placement", "ray_address"), address, "--address"))
    settings = load_settings(config, given).settings
    missing = asyncio.run(_tell_room(settings))
    if missing:
        for words in missing:
            click.echo(f"no room: {words}", err=True)
        if check:
            context.exit(1)
    if not check:
        context.invoke(serve_command, model=None, listen=listen, config=config, overrides=given)


async def _tell_room(settings: Settings) -> list[str]:
    """Show the machines, and return what does not fit on them."""
    cluster, _ = ray_cluster(settings.placement)
    try:
        machines = await cluster.machines()
    except NotPlaced as error:
        raise BadInput(str(error)) from error
    for one in machines:
        memory = f"{one.memory_bytes / 2**30:.1f} GiB"
        words = f"{one.cpus:g} processors, {one.gpus:g} GPUs, {memory}"
        click.echo(f"machine {one.address}: {words}", err=True)
    rooms, missing = ray_room(settings, machines)
    for replica_id, place in rooms.items():
        click.echo(f"{replica_id}: fits on {place}", err=True)
    return missing
