"""Pages with what the policies did: attainment against replica-hours, and replicas over time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go  # type: ignore[import-not-found,import-untyped,unused-ignore]

Row = Mapping[str, Any]
SHOWN = ("sluice", "hpa 50%", "hpa 70%", "ray, 70%", "oracle")


def write(rows: Sequence[Row], folder: Path) -> None:
    """One page for each scene and cold start, SVG drawn by the reader's browser."""
    folder.mkdir(parents=True, exist_ok=True)
    for scene, cold_s in sorted({(row["scene"], row["cold_s"]) for row in rows}):
        group = [row for row in rows if (row["scene"], row["cold_s"]) == (scene, cold_s)]
        name = f"autoscale-{scene}-{cold_s:.0f}s"
        _pareto(group, f"{scene}, cold start {cold_s:.0f} s").write_html(
            folder / f"{name}.html", include_plotlyjs="cdn"
        )
        _replicas(group, f"{scene}, cold start {cold_s:.0f} s").write_html(
            folder / f"{name}-replicas.html", include_plotlyjs="cdn"
        )


def _pareto(group: Sequence[Row], title: str) -> go.Figure:
    figure = go.Figure(
        go.Scatter(
            x=[row["hours"] for row in group],
            y=[100 * row["attainment"] for row in group],
            text=[row["policy"] for row in group],
            mode="markers+text",
            textposition="top center",
        )
    )
    figure.update_layout(title=title, xaxis_title="replica hours", yaxis_title="in time, %")
    return figure


def _replicas(group: Sequence[Row], title: str) -> go.Figure:
    figure = go.Figure()
    for row in group:
        if row["policy"] in SHOWN:
            times, numbers = zip(*row["numbers"], strict=True) if row["numbers"] else ((), ())
            figure.add_scatter(x=times, y=numbers, name=row["policy"], line_shape="hv")
    figure.update_layout(title=title, xaxis_title="seconds", yaxis_title="replicas wanted")
    return figure
