"""The step-time formula, and where its coefficients come from.

``t = fixed + soft_max(reading weights, multiplying) + reading KV + scores + communication``, each
term at peak rate times a coefficient. No coefficient is negative, so that more work never takes
less time and a faster device is never slower. The coefficients are fitted in levels, from all rows
to (engine family, architecture): see ``tools/planner_fit.py``. They belong to this formula and to
no other.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from sluice.planner.work import Work

# Reading and multiplying overlap in part: 1 is one after the other, infinity is perfect overlap.
# Concurrency sweeps do not tell values from 1 to 4 apart.
OVERLAP_POWER = 1.5


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Seconds per launch (``_s``), and how many times longer than at peak rate a term takes."""

    step_s: float = 2e-4
    layer_s: float = 5.6e-5
    expert_layer_s: float = 1.6e-5
    latent_layer_s: float = 3.6e-5
    state_layer_s: float = 3.6e-5
    row_s: float = 1.3e-5
    dense_read: float = 1.05
    expert_read: float = 1.25
    dense_multiply: float = 3.2
    expert_multiply: float = 2.3
    dense_prefill: float = 2.5
    expert_prefill: float = 6.0
    kv_read: float = 1.22
    scores: float = 1.8
    reduction_s: float = 6.8e-6
    reduce: float = 1.85
    pcie_reduction_s: float = 2e-5
    pcie_reduce: float = 2.5
    exchange_s: float = 2e-5
    exchange: float = 2.0

    def step_duration_s(self, work: Work) -> float:
        """Predicted duration of a step with this work; never falls with any part of it."""
        reading = self.dense_read * work.dense_read_s + self.expert_read * work.expert_read_s
        multiplying = (
            self.dense_multiply * work.dense_multiply_s
            + self.expert_multiply * work.expert_multiply_s
            + self.dense_prefill * work.dense_prefill_s
            + self.expert_prefill * work.expert_prefill_s
        )
        overlapped: float = (reading**OVERLAP_POWER + multiplying**OVERLAP_POWER) ** (
            1.0 / OVERLAP_POWER
        )
        return (
            self.step_s
            + self.layer_s * work.layers
            + self.expert_layer_s * work.expert_layers
            + self.latent_layer_s * work.latent_layers
            + self.state_layer_s * work.state_layers
            + self.row_s * work.rows
            + overlapped
            + self.kv_read * work.kv_read_s
            + self.scores * work.scores_s
            + self.reduction_s * work.reductions
            + self.reduce * work.reduce_s
            + self.pcie_reduction_s * work.pcie_reductions
            + self.pcie_reduce * work.pcie_reduce_s
            + self.exchange_s * work.exchanges
            + self.exchange * work.exchange_s
        )

    def parts_s(self, work: Work) -> dict[str, float]:
        """Where the time goes: the same sum by its parts, in seconds."""
        reading = self.dense_read * work.dense_read_s + self.expert_read * work.expert_read_s
        whole = self.step_duration_s(work)
        parts = {
            "launches": self.step_s
            + self.layer_s * work.layers
            + self.expert_layer_s * work.expert_layers
            + self.latent_layer_s * work.latent_layers
            + self.state_layer_s * work.state_layers
            + self.row_s * work.rows,
            "reading weights": reading,
            "reading KV": self.kv_read * work.kv_read_s,
            "attention scores": self.scores * work.scores_s,
            "communication": self.reduction_s * work.reductions
            + self.reduce * work.reduce_s
            + self.pcie_reduction_s * work.pcie_reductions
            + self.pcie_reduce * work.pcie_reduce_s
            + self.exchange_s * work.exchanges
            + self.exchange * work.exchange_s,
        }
        rest = whole - sum(parts.values())
        return {**parts, "multiplying beyond reading": rest}


@dataclass(frozen=True, slots=True)
class Levels:
    """Fitted coefficients by (engine family, architecture), with the wider levels to fall back to.

    ``rows`` counts what each level was fitted on.
    """

    levels: Mapping[str, Coefficients]
    rows: Mapping[str, int]

    def best(self, engine: str, architecture: str) -> tuple[str, Coefficients]:
        """The narrowest level that there is, with its name."""
        for name in (f"{engine}/{architecture}", f"*/{architecture}", "*/*"):
            if name in self.levels:
                return name, self.levels[name]
        return "prior", Coefficients()

    def as_json(self) -> dict[str, Any]:
        """Plain values, rounded to what the rows can tell."""
        return {
            name: {
                "rows": self.rows[name],
                **{key: float(f"{value:.4g}") for key, value in asdict(level).items()},
            }
            for name, level in self.levels.items()
        }


def levels_from_json(document: Mapping[str, Mapping[str, float]]) -> Levels:
    """What ``as_json`` wrote."""
    rows = {name: int(entry["rows"]) for name, entry in document.items()}
    levels = {
        name: Coefficients(**{key: value for key, value in entry.items() if key != "rows"})
        for name, entry in document.items()
    }
    return Levels(levels, rows)


@cache
def fitted() -> Mapping[str, Any]:
    """The fit that comes with the package: levels, residual rows, bands, date and hash."""
    text = (files("sluice.planner") / "tables" / "fit.json").read_text(encoding="utf-8")
    document: Mapping[str, Any] = json.loads(text)
    return document
