"""``sluice plan --list``: the models, GPUs, precisions and engines that a plan can name.

Called by ``plan.py``. It only reads the tables of the planner; nothing is estimated here.
"""

from typing import Any

from sluice.cli.console import plain_console
from sluice.planner.formats import PRECISIONS
from sluice.planner.question import ENGINES
from sluice.planner.tables import Tables


def listed(entries: Tables) -> dict[str, Any]:
    """What the tables hold, as one JSON document. Raises ``CannotPlan`` for a broken entry."""
    models = [
        {
            "name": name,
            "parameters": entries.model(name).params,
            "aliases": list(entry.get("aliases", ())),
        }
        for name, entry in entries.models.items()
    ]
    gpus = []
    for name, entry in entries.hardware.items():
        found = entries.accelerator(name)
        gpus.append(
            {
                "name": name,
                "aliases": list(entry.get("aliases", ())),
                "architecture": found.architecture,
                "memory_gib": found.memory_gib,
                "fp8": found.fp8_tflops is not None,
                "fp4": found.fp4_tflops is not None,
                "usd_per_hour_low": found.usd_per_hour_low,
                "usd_per_hour_high": found.usd_per_hour_high or found.usd_per_hour_low,
            }
        )
    return {
        "models": models,
        "gpus": gpus,
        "precisions": list(PRECISIONS),
        "engines": list(ENGINES),
    }


def print_listed(document: dict[str, Any]) -> None:
    """The same for readers."""
    console = plain_console(soft_wrap=True)
    console.print("Models for --model (or the path of a config.json):")
    for model in document["models"]:
        size = f"{model['parameters'] / 1e9:,.1f} B"
        console.print(f"  {model['name']:<28} {size:>9}{_also(model['aliases'])}")
    console.print("GPUs for --gpu:")
    for gpu in document["gpus"]:
        formats = "".join(f", {name}" for name in ("fp8", "fp4") if gpu[name])
        console.print(
            f"  {gpu['name']:<28} {gpu['memory_gib']:>5g} GiB, {gpu['architecture']}{formats}"
            f"{_also(gpu['aliases'])}"
        )
    console.print(f"Precisions: {', '.join(document['precisions'])}")
    console.print(f"Engines: {', '.join(document['engines'])}")


def _also(aliases: list[str]) -> str:
    return f"  also {', '.join(aliases)}" if aliases else ""
