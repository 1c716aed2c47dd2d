"""Published measurements as cases of the planner: reads the folder that the fit is made from.

The folder holds ``published_benchmarks.csv.gz``, one number per row. Rows are cleaned here, once,
for the fit and for ``benchmarks/planner.py``: doubtful rows and layouts that are not modelled are
left out, twins under two names become one, and duplicates become their median before anything is
divided into folds.
"""

import csv
import gzip
import hashlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from sluice.planner.memory import budget_of, sequences_max
from sluice.planner.names import CannotPlan
from sluice.planner.predict import family_of
from sluice.planner.question import precision_for
from sluice.planner.residual import Case
from sluice.planner.steady import Lengths
from sluice.planner.tables import own_tables
from sluice.planner.work import Deployment, Layout

FILE = "published_benchmarks.csv.gz"
# Names in the file -> names in our table. V3 and R1 are one architecture, measured as both.
MODELS = {
    "DeepSeek-V3": "deepseek-r1",
    "DeepSeek-V3.1-NVFP4": "deepseek-r1",
    "DeepSeek-R1-NVFP4": "deepseek-r1",
    "DeepSeek R1 0528": "deepseek-r1",
    "Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "Qwen3-32B-NVFP4": "qwen3-32b",
    "Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "LLaMA v3.1 8B": "llama-3.1-8b",
    "LLaMA v3.1 70B": "llama-3.1-70b",
    "LLaMA v3.1 405B": "llama-3.1-405b",
    "Llama 3.1 8B": "llama-3.1-8b",
    "Llama 3.3 70B": "llama-3.1-70b",
    "Llama 3.1 405B": "llama-3.1-405b",
    "Llama 4 Scout": "llama-4-scout",
    "Llama 4 Maverick": "llama-4-maverick",
    "Mixtral 8x7B": "mixtral-8x7b",
    "Mixtral 8x22B": "mixtral-8x22b",
    "Mistral 7B": "mistral-7b",
    "GPT-OSS 20B": "gpt-oss-20b",
    "GPT-OSS 120B": "gpt-oss-120b",
}
DEVICES = {
    "b200_sxm": "b200",
    "b300_sxm": "b300",
    "h100_sxm": "h100",
    "h200_sxm": "h200",
    "gb200": "gb200",
    "H100 80GB SXM": "h100",
    "H200 141GB": "h200",
    "A100-PCIE-80GB": "a100-80gb-pcie",
    "A100-SXM4-80GB": "a100-80gb",
    "L40S": "l40s",
    "H100": "h100",
    "H200": "h200",
    "B200": "b200",
    "GB200": "gb200",
    "RTX PRO 6000 Blackwell SE": "rtx-pro-6000",
}
# Capacity differs between versions by as much as between engines.
VERSIONS = {
    "TensorRT-LLM v0.14 perf overview": "trtllm-0.14",
    "TensorRT-LLM v1.0 perf overview": "trtllm-1.0",
    "TensorRT-LLM 1.1/1.2 perf overview": "trtllm-1.2",
}
# Says of its rows of expert models only that attention may be data parallel; their speed says so.
ATTENTION_DATA_PARALLEL = "TensorRT-LLM v1.0 perf overview"
# The closed-loop runs draw lengths evenly from 0.8 to 1.0 of the nominal.
DRAWN = {(1024, 1024), (8192, 1024), (1024, 8192)}
DEVICES_MAX = 8


@dataclass(frozen=True, slots=True)
class Measured:
    """One measurement with the case that the planner would be asked.

    ``value`` is seconds per token in closed loop, and output tokens per second and device at
    saturation; ``concurrency`` is at most what the KV pool holds and, at saturation, the engine.
    ``published`` are model and device as the source names them.
    """

    deployment: Deployment
    lengths: Lengths
    concurrency: float
    case: Case
    value: float
    source: str
    engine_version: str
    published: tuple[str, str]

    @property
    def curve(self) -> str:
        """What is varied in batch and lengths only."""
        return "|".join(str(each) for each in self.case[:8])

    @property
    def pair(self) -> str:
        """Model and device."""
        return f"{self.case.model}|{self.case.device}"

    @property
    def dense(self) -> bool:
        """Whether the model has no experts."""
        return self.deployment.shape.experts is None


def fold_of(group: str, folds: int) -> int:
    """The fold of a group, by a hash of its name: frozen, whatever is fitted."""
    return int(hashlib.sha256(group.encode()).hexdigest(), 16) % folds


def file_hash(folder: Path) -> str:
    """SHA-256 of the file of measurements."""
    return hashlib.sha256((folder / FILE).read_bytes()).hexdigest()


def raw_rows(folder: Path) -> list[dict[str, str]]:
    """The file as it is."""
    with gzip.open(folder / FILE, "rt", newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def closed_loop_rows(folder: Path) -> list[Measured]:
    """Time per output token against concurrency, one row per case."""
    found = defaultdict(list)
    for row in raw_rows(folder):
        if row["mode"] == "online closed-loop" and row["metric"] == "TPOT" and usable(row):
            one = _measured(row, float(row["concurrency"]), float(row["value"]) / 1e3)
            found[one.case].append(one)
    return [_running(one) for one in _medians(found)]


def _running(one: Measured) -> Measured:
    """With as many requests as run at once: the others wait for KV memory, and time per token is
    that of those that run. A model that does not fit says that the budget is too strict: as asked.
    """
    whole = one.lengths.prompt + one.lengths.output
    held = sequences_max(one.deployment, budget_of(one.deployment), whole)
    if not one.deployment.layout.groups <= held < one.concurrency:
        return one
    return replace(one, concurrency=held, case=one.case._replace(concurrency=held))


def capacity_rows(folder: Path) -> list[Measured]:
    """Output tokens per second and device with everything queued at once, one row per case."""
    found = defaultdict(list)
    for row in raw_rows(folder):
        if row["mode"] != "max-throughput" or not usable(row):
            continue
        if row["pipeline_parallel"] not in {"", "1"}:
            continue
        value = float(row["value"])
        if row["unit"] == "tok/s":
            value /= int(row["n_gpus"])
        try:
            one = _measured(row, 1.0, value)
        except CannotPlan:
            continue
        one = _saturated(one, row)
        if one.concurrency >= 2:
            found[one.case].append(one)
    return list(_medians(found))


def usable(row: dict[str, str]) -> bool:
    """Whether the row is not doubtful and its layout is one that is modelled."""
    return (
        not row["notes"].startswith("suspect:")
        and row["tensor_parallel"] != ""
        and int(row["n_gpus"]) <= DEVICES_MAX
    )


def _medians(found: dict[Case, list[Measured]]) -> Iterator[Measured]:
    for rows in found.values():
        value = median(row.value for row in rows)
        yield replace(rows[0], value=value)


def _measured(row: dict[str, str], concurrency: float, value: float) -> Measured:
    name = row["model"].rsplit("/", maxsplit=1)[-1]
    tables = own_tables()
    shape = tables.model(MODELS.get(name, name))
    device = tables.accelerator(DEVICES[row["gpu"]])
    groups = int(row["attention_dp"] or 1)
    tensor = int(row["tensor_parallel"])
    if row["source"] == ATTENTION_DATA_PARALLEL and shape.experts is not None:
        tensor, groups = 1, tensor
    precision = row["precision"].lower()
    nominal = int(row["isl"]), int(row["osl"])
    drawn = 0.9 if nominal in DRAWN and row["mode"] == "online closed-loop" else 1.0
    lengths = Lengths(nominal[0] * drawn, nominal[1] * drawn)
    engine = row["engine"].lower().split()[0]
    if engine.startswith("tensorrt"):
        engine = VERSIONS[row["source"]]
    case = Case(
        shape.name,
        family_of(shape.name),
        engine,
        device.architecture,
        device.name,
        precision,
        tensor,
        groups,
        concurrency,
        lengths.prompt,
        lengths.output,
    )
    deployment = Deployment(shape, device, precision_for(shape, precision), Layout(tensor, groups))
    return Measured(
        deployment=deployment,
        lengths=lengths,
        concurrency=concurrency,
        case=case,
        value=value,
        source=row["source"],
        engine_version=row["engine"].lower(),
        published=(row["model"], row["gpu"]),
    )


def _saturated(one: Measured, row: dict[str, str]) -> Measured:
    """With as many requests as the pool holds when each has reserved all it may need."""
    queued = 2048.0
    words = row["notes"].split()
    if "requests" in words:
        queued = float(words[words.index("requests") - 1])
    # TensorRT-LLM takes a share of what weights and buffers leave, not of the device.
    pool_bytes = 0.95 * max(0.0, budget_of(one.deployment, memory_share=1.0).pool_bytes)
    whole = one.lengths.prompt + one.lengths.output
    held = pool_bytes / one.deployment.kv_bytes(whole)
    per_group = min(held, 2048.0, queued / one.deployment.layout.groups)
    concurrency = per_group * one.deployment.layout.groups
    case = one.case._replace(concurrency=max(concurrency, 1.0))
    return replace(one, concurrency=concurrency, case=case)
