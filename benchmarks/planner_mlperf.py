"""SLO rates of MLPerf Llama 2 70B systems, predicted from two numbers of each.

No row of MLPerf is in the fit. A system is calibrated by its Offline throughput, and by one more
run's throughput and median TPOT. "Mid load" is that of the Interactive run for both scenarios: what
a user measures at half load. For the Interactive rate itself it knows the batch and median TPOT
that the run had, and predicts how far the 99th percentiles let the rate go; "the other run" is
stricter there and uses the Server run, which is close to Offline and so says little about small
batches. Beside them stands the constant-ratio baseline: Offline times the median ratio of the
systems with other devices. Results are of MLPerf Inference v5.1 (closed division), unverified by
MLCommons in this form.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from sluice.planner.estimate import Load, Targets, places, slo_moment
from sluice.planner.plan import step_models
from sluice.planner.predict import Point, StepModel
from sluice.planner.question import precision_for
from sluice.planner.steady import Lengths
from sluice.planner.tables import own_tables
from sluice.planner.work import Deployment, Layout
from tools.planner_rows import raw_rows

PROMPT_TOKENS = 273.0  # of the data set; the logs give the output only
BATCH_MAX = 4096
SCENARIOS = {"server": Targets(2.0, 0.2, 99.0), "interactive": Targets(0.45, 0.04, 99.0)}
# Which run gives the second point, by method and scenario.
METHODS: dict[str, dict[str, str] | None] = {
    "Offline": None,
    "Offline and mid load": {"server": "interactive", "interactive": "interactive"},
    "Offline and the other run": {"server": "interactive", "interactive": "server"},
}
# Beginning of the name in the results -> name in our table.
DEVICES = {
    "B200-SXM": "b200",
    "GB200": "gb200",
    "H100-SXM": "h100",
    "H200-NVL": "h200-nvl",
    "H200-SXM": "h200",
    "MI300X": "mi300x",
    "MI325X": "mi325x",
    "RTX PRO 6000": "rtx-pro-6000",
}


@dataclass(frozen=True, slots=True)
class System:
    """One submitted system: tokens per second of a replica and median TPOT by scenario."""

    name: str
    device: str
    engine_name: str
    precision: str
    output_tokens: float
    speeds: dict[str, float]
    steps_s: dict[str, float]

    @property
    def tensor(self) -> int:
        """Two devices where one is too small for the weights and a pool."""
        return 2 if self.device == "h100" else 1


def systems(folder: Path) -> list[System]:
    """Closed-division systems with Offline and at least one of the other scenarios."""
    found: dict[str, dict[tuple[str, str], dict[str, str]]] = defaultdict(dict)
    for row in raw_rows(folder):
        if row["source"] != "MLPerf Inference v5.1" or "llama2-70b" not in row["model"]:
            continue
        device = next((name for start, name in DEVICES.items() if row["gpu"].startswith(start)), "")
        if not device or not row["notes"].startswith("closed"):
            continue
        parts = row["url_or_repo_path"].split("/")
        key = "|".join((device, parts[1], parts[3], parts[4]))
        found[key][row["mode"], row["metric"].split(" (")[0]] = row
    return [each for key in sorted(found) if (each := _system(key, found[key])) is not None]


def _system(key: str, rows: dict[tuple[str, str], dict[str, str]]) -> System | None:
    speed = "output token throughput"
    modes = [mode for mode in ("offline", *SCENARIOS) if (mode, speed) in rows]
    if "offline" not in modes or len(modes) < 2:
        return None
    first = rows["offline", speed]
    device = key.split("|", maxsplit=1)[0]
    tensor = 2 if device == "h100" else 1
    replicas = int(first["n_gpus"]) / tensor
    return System(
        name=key,
        device=device,
        engine_name="trtllm" if first["engine"].startswith("TensorRT") else "vllm",
        precision=first["precision"],
        output_tokens=float(first["osl"]),
        speeds={mode: float(rows[mode, speed]["value"]) / replicas for mode in modes},
        steps_s={
            mode: float(rows[mode, "TPOT p50"]["value"]) / 1e3
            for mode in modes
            if (mode, "TPOT p50") in rows
        },
    )


def model_of(system: System) -> StepModel:
    """The step model of one replica, not calibrated."""
    tables = own_tables()
    shape, device = tables.model("llama-2-70b"), tables.accelerator(system.device)
    precision = precision_for(shape, system.precision)
    deployment = Deployment(shape, device, precision, Layout(system.tensor))
    return step_models(deployment, system.engine_name, system.precision)[0]


def predicted(system: System, scenario: str, run: str | None) -> float:
    """Output tokens per second of a replica in this scenario, after Offline and the other run."""
    load = Load(Lengths(PROMPT_TOKENS, system.output_tokens), BATCH_MAX)
    model = model_of(system)
    held, _ = places(model, load)
    known = [Point(held, held / system.speeds["offline"])]
    if run is not None:
        step_s = system.steps_s[run]
        known.append(Point(system.speeds[run] * step_s, step_s))
    model = model.calibrated(load.lengths, known)
    best = slo_moment(model, load, SCENARIOS[scenario])
    return 0.0 if best is None else best.rate_rps * system.output_tokens


def baseline(system: System, scenario: str, every: Sequence[System]) -> float:
    """Offline times the median ratio of systems with other devices."""
    ratios = [
        other.speeds[scenario] / other.speeds["offline"]
        for other in every
        if other.device != system.device and scenario in other.speeds
    ]
    return system.speeds["offline"] * median(ratios)


def print_mlperf(folder: Path) -> None:
    """Median error by scenario and method, and by device for two points."""
    every = systems(folder)
    print("-- MLPerf v5.1 Llama 2 70B: SLO rate, median of |error| over systems")
    table = "{:<14}{:<34}{:>8}{:>9}{:>9}"
    print(table.format("scenario", "from", "systems", "median", "worst"))
    asked = [each for each in every if set(each.steps_s) >= set(SCENARIOS)]
    for scenario in SCENARIOS:
        for name, runs in METHODS.items():
            run = None if runs is None else runs[scenario]
            errors = [
                predicted(each, scenario, run) / each.speeds[scenario] - 1.0 for each in asked
            ]
            print(table.format(scenario, name, *_summary(errors)))
            if name == "Offline and mid load":
                for device in sorted({each.device for each in asked}):
                    own = [e for e, s in zip(errors, asked, strict=True) if s.device == device]
                    print(table.format("", f"  {device}", *_summary(own)))
        ratios = [baseline(each, scenario, every) / each.speeds[scenario] - 1.0 for each in asked]
        print(table.format(scenario, "Offline x ratio of other devices", *_summary(ratios)))


def _summary(errors: Sequence[float]) -> tuple[int, str, str]:
    return len(errors), f"{median(map(abs, errors)):.1%}", f"{max(errors, key=abs):+.1%}"
