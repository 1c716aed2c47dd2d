"""The options of ``sluice plan`` in the planner's words, and which of them contradict each other.

Called by ``plan.py``. What a number may be is checked by the planner; here only what was given
together, and what a text means.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.cli.telling import Told
from sluice.config.units import parse_size_bytes
from sluice.planner.candidates import Candidates, candidates
from sluice.planner.estimate import Load, Targets
from sluice.planner.knobs import smaller_model
from sluice.planner.names import CannotPlan
from sluice.planner.plan import deployment_of
from sluice.planner.points import points_of
from sluice.planner.question import Question
from sluice.planner.slots import Slots, Verdict, verdict
from sluice.planner.steady import Lengths
from sluice.planner.tables import Tables, own_tables, with_user_table
from sluice.planner.weight_files import weights_bytes

# What a question about a rate needs, by parameter; a question about slots needs none of it.
RATE_OPTIONS = {
    "rps": "--rps",
    "prompt": "--input",
    "output": "--output",
    "ttft": "--ttft",
    "tpot": "--tpot",
}
# What says nothing about memory.
_RATE_ONLY = {
    **RATE_OPTIONS,
    "calibrate": "--calibrate",
    "simulate": "--simulate",
    "e2e": "--e2e",
    "retrieval": "--retrieval",
    "chunks": "--chunks",
    "page": "--html",
}


def entries_of(path: Path | None) -> Tables:
    """Our tables, with the user's entries before them."""
    return own_tables() if path is None else with_user_table(own_tables(), path)


def missing(asked: Mapping[str, Any]) -> list[str]:
    """Options without which there is no question."""
    needed = {"model": "--model", "gpus": "--gpu"}
    if asked["slots"] is None:
        needed |= RATE_OPTIONS
    return [option for key, option in needed.items() if not asked[key] and asked[key] != 0]


def answer(asked: Mapping[str, Any]) -> Candidates:
    """The plans for the options. Raises ``CannotPlan`` as the planner does."""
    if asked["context"] is not None or asked["divided"]:
        raise CannotPlan("--context and --divided belong to --slots, which is not given")
    entries = entries_of(asked["tables"])
    gpus = [entries.accelerator(name) for name in _gpus(asked)]
    precisions: list[str | None] = [*_listed(asked["precisions"])] or [None]
    prompt, retrieval_s = asked["prompt"] + asked["chunks"], 0.0
    # The planner refuses other percentiles.
    if asked["retrieval"] is not None and 0.0 < asked["percentile"] < 100.0:
        retrieval_s = asked["retrieval"].quantile_s(asked["percentile"] / 100.0)
    lengths = Lengths(prompt, asked["output"], asked["cached"], asked["output_variation"])
    shape = entries.model(asked["model"])
    points = [point for text in asked["calibrate"] for point in points_of(text, lengths)]
    question = Question(
        shape=shape,
        accelerator=gpus[0],
        rate_rps=asked["rps"],
        load=Load(lengths, asked["batch"]),
        targets=Targets(
            asked["ttft"], asked["tpot"], asked["percentile"], asked["e2e"], retrieval_s
        ),
        kv_format=asked["kv_format"],
        tensor=asked["tp"],
        groups=asked["dp"],
        engine_name=asked["engine"],
        headroom=asked["headroom"],
        utilisation=asked["utilisation"],
        spare=asked["spare"],
        zones=asked["zones"],
        chunk_tokens=float(asked["chunk"]),
        memory_share=asked["memory_share"],
        file_bytes=_file_bytes(asked["weights"]),
        beside=_beside(asked["beside"]),
        points=tuple(points),
        smaller=smaller_model(shape, entries),
    )
    found = candidates(question, gpus, precisions)
    if asked["simulate"] is None:
        return found
    # The whole policy is imported for it, which takes longer than a plan in closed form.
    from sluice.planner.search import with_simulation  # noqa: PLC0415

    with Told(0) as told:
        return with_simulation(found, asked["simulate"], told.at)


@dataclass(frozen=True, slots=True)
class SlotsAnswer:
    """The verdict, with what it is about."""

    model: str
    gpu: str
    gpus: int
    precision: str
    kv_bytes_per_token: float
    verdict: Verdict


def answer_slots(asked: Mapping[str, Any]) -> SlotsAnswer:
    """Whether the slots fit. Raises ``CannotPlan`` as the planner does."""
    given = [option for key, option in _RATE_ONLY.items() if asked[key]]
    if given:
        raise CannotPlan(
            f"--slots asks about memory only, and {', '.join(given)} about a rate: ask one of them"
        )
    if asked["context"] is None:
        raise CannotPlan("--slots needs --context, the tokens of one request or of all together")
    gpus, precisions = _gpus(asked), _listed(asked["precisions"])
    if len(gpus) > 1 or len(precisions) > 1:
        raise CannotPlan("--slots asks about one deployment: name one --gpu and one --precision")
    entries = entries_of(asked["tables"])
    accelerator = entries.accelerator(gpus[0])
    question = Question(
        shape=entries.model(asked["model"]),
        accelerator=accelerator,
        rate_rps=1.0,
        load=Load(Lengths(1, 1)),
        targets=Targets(1.0, 1.0),
        precision=precisions[0] if precisions else None,
        kv_format=asked["kv_format"],
        groups=asked["dp"],
        file_bytes=_file_bytes(asked["weights"]),
        beside=_beside(asked["beside"]),
    )
    deployment, name = deployment_of(question, asked["tp"] or 1)
    slots = Slots(asked["slots"], asked["context"], "divided" if asked["divided"] else "each")
    per_token = deployment.kv_bytes(1.0) - deployment.kv_bytes(0.0)
    return SlotsAnswer(
        model=deployment.shape.name,
        gpu=accelerator.name,
        gpus=deployment.layout.devices,
        precision=name,
        kv_bytes_per_token=per_token * deployment.layout.tensor,
        verdict=verdict(deployment, slots, memory_share=asked["memory_share"]),
    )


def _gpus(asked: Mapping[str, Any]) -> list[str]:
    names = _listed(asked["gpus"])
    if not names:
        raise CannotPlan("--gpu names no GPU; --list shows them")
    return names


def _listed(texts: tuple[str, ...]) -> list[str]:
    """Names given one by one or with commas between them, each once."""
    names = (name.strip() for text in texts for name in text.split(","))
    return list(dict.fromkeys(name for name in names if name))


def _file_bytes(path: Path | None) -> float | None:
    return None if path is None else float(weights_bytes(path))


def _beside(texts: tuple[str, ...]) -> tuple[tuple[str, float], ...]:
    found = []
    for text in texts:
        name, equals, size = text.partition("=")
        if not (name and equals):
            raise CannotPlan(f"--beside {text!r} is not NAME=SIZE, for example encoder=1.2GiB")
        try:
            found.append((name, float(parse_size_bytes(size))))
        except ValueError as error:
            raise CannotPlan(f"--beside {name}: {error}") from None
    return tuple(found)
