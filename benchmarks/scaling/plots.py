"""Plots of what the policies did, as SVG files: requests in time against replica-hours, and
replicas over time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.scaling.tables import Group, groups

Row = Mapping[str, Any]
MARKS = {
    "sluice": ("#0b6e4f", "o"), "hpa 50%": ("#3d5a98", "s"), "hpa 70%": ("#3d5a98", "^"),
    "knative": ("#b08900", "v"), "ray, target 2": ("#c8553d", "s"), "ray, 70%": ("#c8553d", "^"),
    "last value": ("#7a7a7a", "x"), "keda waiting": ("#7a7a7a", "+"), "oracle": ("#000000", "*"),
}  # fmt: skip
SHOWN = ("sluice", "hpa 50%", "ray, target 2", "oracle")
# Scenes and the cold start of which replicas are shown over time.
SHOWN_SCENES = (
    ("azure-conv", 180.0), ("azure-code", 30.0), ("azure-code", 600.0), ("m-large", 180.0),
)  # fmt: skip


def write(rows: Sequence[Row], folder: Path) -> None:
    """Write the plots."""
    folder.mkdir(parents=True, exist_ok=True)
    mpl.rcParams["svg.hashsalt"] = "sluice"  # the same runs give the same file
    mpl.rcParams["font.size"] = 8
    found = groups(rows)
    for name, figure in (("attainment", _attainment(found)), ("replicas", _replicas(found))):
        figure.savefig(folder / f"autoscale-{name}.svg", metadata={"Date": None})


def _attainment(found: Mapping[tuple[str, float], Group]) -> Figure:
    scenes, colds = sorted({scene for scene, _ in found}), sorted({cold for _, cold in found})
    figure = Figure(figsize=(9, 1.9 * len(scenes) + 0.4), layout="constrained")
    for place, (scene, cold_s) in enumerate((s, c) for s in scenes for c in colds):
        axes = figure.add_subplot(len(scenes), len(colds), place + 1)
        group = found.get((scene, cold_s), {})
        for name, (colour, mark) in MARKS.items():
            if name in group:
                row = group[name]
                axes.plot(
                    row["hours"], 100 * row["attainment"], mark, color=colour, label=name,
                    linestyle="none",
                )  # fmt: skip
        axes.set_title(f"{scene}, cold start {cold_s:.0f} s")
        _label(axes, "replica-hours", "in time, %")
        if not place:
            figure.legend(*axes.get_legend_handles_labels(), ncols=5, loc="outside lower center")
    return figure


def _replicas(found: Mapping[tuple[str, float], Group]) -> Figure:
    figure = Figure(figsize=(9, 5.2), layout="constrained")
    for place, (scene, cold_s) in enumerate(SHOWN_SCENES):
        axes = figure.add_subplot(2, 2, place + 1)
        for name in SHOWN:
            numbers = found.get((scene, cold_s), {}).get(name, {}).get("numbers")
            if numbers:
                times, counts = zip(*numbers, strict=True)
                axes.step(times, counts, where="post", color=MARKS[name][0], label=name)
        axes.set_title(f"{scene}, cold start {cold_s:.0f} s")
        _label(axes, "seconds", "replicas wanted")
        if not place:
            figure.legend(*axes.get_legend_handles_labels(), ncols=4, loc="outside lower center")
    return figure


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, alpha=0.25)
