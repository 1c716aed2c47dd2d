"""Plots as SVG files, from the stored runs."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.load.measures import goodput, retries
from benchmarks.load.scenarios import MIXES
from benchmarks.load.sweeps import KNOB_LOADS, KNOBS, knob_key
from benchmarks.load.tables import LABELS, Source, knob_gap_s, knob_ttft_s

COLOURS = {
    "slo": "#0b6e4f", "fcfs": "#c8553d", "static": "#7a7a7a", "vllm": "#3d5a98", "llama": "#b08900",
}  # fmt: skip


def draw(scenarios: Sequence[str], source: Source, folder: Path) -> None:
    """Write the plots of these scenarios, as far as there are runs."""
    folder.mkdir(parents=True, exist_ok=True)
    mpl.rcParams["svg.hashsalt"] = "sluice"  # the same runs give the same file
    mpl.rcParams["font.size"] = 9
    makers = {
        "goodput": (_goodput, f"goodput-{source.world}"),
        "policies": (_policies, f"policies-{source.world}"),
        "retry": (_retry, f"retry-{source.world}"),
        "knobs": (_knobs, "knobs"),
    }
    for name in scenarios:
        if name in makers:
            make, file = makers[name]
            figure = make(source)
            if figure is not None:
                figure.savefig(folder / f"{file}.svg", metadata={"Date": None})


def _goodput(source: Source) -> Figure | None:
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, mix in zip(_axes(figure, len(MIXES)), MIXES, strict=True):
        for engine in source.engines:
            figures = [
                goodput(run, source.settings.targets) for _, run in source.loads(engine, mix)
            ]
            _line(axes, engine, [f.offered for f in figures], [f.good for f in figures])
        _name(axes, mix, "offered, requests/s", "good, requests/s")
    return _finished(figure)


def _policies(source: Source) -> Figure | None:
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    titles = ("TTFT p99, s", "rows in a step", "good, requests/s")
    for number, (axes, title) in enumerate(zip(_axes(figure, 3), titles, strict=True)):
        for engine in ("static", "fcfs", "slo"):
            points = []
            for step, run in source.loads(engine, "azure"):
                one = goodput(run, source.settings.targets)
                values = (one.ttft_s_p99, run.facts.get("rows_mean", 0.0), one.good)
                points.append((step, values[number]))
            _line(axes, engine, [x for x, _ in points], [y for _, y in points])
        _name(axes, title, "load, times capacity", title)
        if number == 0:
            axes.set_yscale("log")
    return _finished(figure)


def _retry(source: Source) -> Figure | None:
    run = source.run("slo", "retry")
    if run is None:
        return None
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    (axes,) = _axes(figure, 1)
    counts = retries(run).per_second
    axes.bar(range(len(counts)), counts, width=0.9, color=COLOURS["slo"], label="retries")
    _name(axes, "Clients that come back when told to", "seconds since the first", "retries in 1 s")
    return _finished(figure)


def _knobs(source: Source) -> Figure | None:
    """One column for each setting, one row for each kind of p99."""
    names = [
        name
        for name, knob in KNOBS.items()
        if source.run("slo", knob_key(name, knob.values[0], KNOB_LOADS[0])) is not None
    ]
    if not names:
        return None
    figure = Figure(figsize=(3.1 * len(names), 5.6), layout="constrained")
    grid = _axes(figure, len(names), 2)
    for column, name in enumerate(names):
        for load, colour in zip(KNOB_LOADS, ("#3d5a98", "#c8553d"), strict=True):
            points = _knob_points(source, name, load)
            for row, label in enumerate(("TTFT p99, s", "ITL p99, s")):
                axes = grid[row * len(names) + column]
                xs, ys = [point[1] for point in points], [point[2 + row] for point in points]
                axes.plot(xs, ys, "o-", color=colour, markersize=3, label=f"load {load:g}×")
                labels: dict[tuple[float, float], list[str]] = {}
                for (value, *_), x, y in zip(points, xs, ys, strict=True):
                    labels.setdefault((round(x, 1), round(y, 3)), []).append(f"{value:g}")
                for (x, y), texts in labels.items():
                    axes.annotate(
                        ", ".join(texts),
                        (x, y),
                        xytext=(3, 3),
                        textcoords="offset points",
                        fontsize=7,
                    )
                title = f"{KNOBS[name].label} ({KNOBS[name].requests})" if row == 0 else ""
                _name(axes, title, "output tokens/s", label)
    return _finished(figure)


def _knob_points(source: Source, name: str, load: float) -> list[tuple[float, float, float, float]]:
    """(value, output tokens/s, TTFT p99, ITL p99) for each value of a setting."""
    points = []
    for value in KNOBS[name].values:
        run = source.run("slo", knob_key(name, value, load))
        if run is None:
            continue
        ttft_s, gap_s = knob_ttft_s(run), knob_gap_s(run)
        if ttft_s is not None and gap_s is not None:
            points.append((value, run.facts["output_tokens_per_s"], ttft_s, gap_s))
    return points


def _axes(figure: Figure, columns: int, rows: int = 1) -> list[Axes]:
    return [figure.add_subplot(rows, columns, place + 1) for place in range(rows * columns)]


def _line(axes: Axes, engine: str, xs: Sequence[float], ys: Sequence[float]) -> None:
    if xs:
        axes.plot(xs, ys, "o-", color=COLOURS[engine], markersize=4, label=LABELS[engine])


def _name(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.margins(0.15)
    axes.grid(visible=True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _finished(figure: Figure) -> Figure | None:
    """The figure with one legend; ``None`` where it shows nothing."""
    handles: dict[str, Artist] = {}
    for axes in figure.axes:
        if axes.get_yscale() == "linear":
            axes.set_ylim(bottom=0)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if not handles:
        return None
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=5)
    return figure
