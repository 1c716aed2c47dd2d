"""Plots as SVG text: lines over two axes, and bars made of parts.

Called by ``plan_page.py`` and ``doctor_page.py``. Knows nothing of what it draws. Colours of text
and axes are those of the page around it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, isfinite, log10

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 28, 44
# About as wide as a letter of these names is.
_LETTER = 6.5
COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#65a30d")
Points = Sequence[tuple[float, float]]
Place = Callable[[float, float], tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Axes:
    """What is on the two axes."""

    title: str
    x: str
    y: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A straight line across the plot: at a value of ``axis``, and how far the band around it
    reaches."""

    axis: str
    at: float
    name: str
    low: float | None = None
    high: float | None = None


def lines(axes: Axes, series: Mapping[str, Points], marks: Sequence[Mark] = ()) -> str:
    """Each series as a line with its points, from zero on both axes."""
    # What has no place on the paper is left out: a time that is never reached, for example.
    finite = {
        name: [(x, y) for x, y in points if isfinite(x) and isfinite(y)]
        for name, points in series.items()
    }
    drawn = {name: points for name, points in finite.items() if points}
    marks = [mark for mark in marks if isfinite(mark.at) and isfinite(mark.high or 0.0)]
    xs = [x for points in drawn.values() for x, _ in points]
    ys = [y for points in drawn.values() for _, y in points]
    xs += [mark.high or mark.at for mark in marks if mark.axis == "x"]
    ys += [mark.at for mark in marks if mark.axis == "y"]
    x_max, y_max = max(xs, default=1.0) * 1.04 or 1.0, max(ys, default=1.0) * 1.08 or 1.0
    legend, top = _legend(list(drawn))

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - RIGHT) * x / x_max
        return across, HEIGHT - BOTTOM - (HEIGHT - top - BOTTOM) * y / y_max

    parts = [
        _text(LEFT, 16, axes.title, weight="bold"), *legend, *_grid(axes, place, (x_max, y_max)),
    ]  # fmt: skip
    for mark in marks:
        parts += _marked(mark, place, (x_max, y_max))
    for number, (name, points) in enumerate(drawn.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y in points:
            across, up = place(x, y)
            words = escape(f"{name}: {number_of(x)}, {number_of(y)}")
            parts.append(
                f'<circle cx="{across:.1f}" cy="{up:.1f}" r="2.5" fill="{colour}">'
                f"<title>{words}</title></circle>"
            )
    return _svg(HEIGHT, parts)


def _legend(names: Sequence[str]) -> tuple[list[str], float]:
    """The names of several series in their colours, in lines between title and plot, and where the
    plot begins below them."""
    if len(names) < 2:
        return [], TOP
    parts, across, up = list[str](), float(LEFT), TOP + 4.0
    for number, name in enumerate(names):
        width = _LETTER * len(name) + 16
        if across > LEFT and across + width > WIDTH:
            across, up = float(LEFT), up + 15
        parts.append(_text(across, up, name, colour=COLOURS[number % len(COLOURS)]))
        across += width
    return parts, up + 10


def bars(title: str, rows: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """One bar per row, of parts one after the other; each part has one colour in all rows."""
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    whole = max((sum(parts.values()) for parts in rows.values()), default=1.0) or 1.0
    height = TOP + 46 * len(rows) + 16 * len(names) + 12
    found = [_text(8, 16, title, weight="bold")]
    for number, (row, parts) in enumerate(rows.items()):
        top, left = TOP + 46 * number, 8.0
        found.append(_text(8, top + 10, f"{row}: {number_of(sum(parts.values()))} {unit}"))
        for name, value in parts.items():
            width = (WIDTH - 16) * max(value, 0.0) / whole
            colour = COLOURS[names.index(name) % len(COLOURS)]
            words = escape(f"{name}: {number_of(value)} {unit}")
            found.append(
                f'<rect x="{left:.1f}" y="{top + 14}" width="{width:.1f}" height="20" '
                f'fill="{colour}"><title>{words}</title></rect>'
            )
            left += width
    below = TOP + 46 * len(rows) + 8
    for number, name in enumerate(names):
        values = ", ".join(number_of(parts[name]) for parts in rows.values() if name in parts)
        colour = COLOURS[number % len(COLOURS)]
        found.append(_text(8, below + 16 * number, f"{name}: {values} {unit}", colour=colour))
    return _svg(height, found)


def number_of(value: float) -> str:
    """Three digits without an exponent."""
    return f"{value:.3g}" if value < 1000.0 else f"{value:,.0f}"


def ticks(largest: float) -> list[float]:
    """Round values from zero to ``largest``, about five of them."""
    if largest <= 0.0:
        return [0.0]
    size = 10.0 ** floor(log10(largest))
    step = next(size * part for part in (0.1, 0.2, 0.5, 1.0, 2.0) if largest <= 6 * size * part)
    return [step * number for number in range(int(largest / step) + 1)]


def _grid(axes: Axes, place: Place, largest: tuple[float, float]) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    x_max, y_max = largest
    _, top = place(0.0, y_max)
    parts = [
        f'<path d="M{LEFT} {top:.1f}V{bottom}H{right}" fill="none" stroke="currentColor"/>',
        _text((LEFT + right) / 2, HEIGHT - 8, axes.x, anchor="middle"),
        (
            f'<text transform="translate(14 {(top + bottom) / 2:.1f}) rotate(-90)" '
            f'text-anchor="middle" fill="currentColor">{escape(axes.y)}</text>'
        ),
    ]
    for value in ticks(x_max):
        across, _ = place(value, 0.0)
        parts.append(_text(across, bottom + 16, number_of(value), anchor="middle"))
    for value in ticks(y_max):
        _, up = place(0.0, value)
        parts.append(
            f'<path d="M{LEFT} {up:.1f}H{right}" stroke="currentColor" stroke-opacity="0.15"/>'
        )
        parts.append(_text(LEFT - 6, up + 4, number_of(value), anchor="end"))
    return parts


def _marked(mark: Mark, place: Place, largest: tuple[float, float]) -> list[str]:
    x_max, y_max = largest
    if mark.axis == "y":
        left, up = place(0.0, mark.at)
        right, _ = place(x_max, 0.0)
        line = f"M{left:.1f} {up:.1f}H{right:.1f}"
        return [_dashed(line), _text(right, up - 4, mark.name, anchor="end")]
    across, top = place(mark.at, y_max)
    _, bottom = place(mark.at, 0.0)
    parts = [_dashed(f"M{across:.1f} {top:.1f}V{bottom:.1f}")]
    if mark.low is not None and mark.high is not None:
        start, _ = place(mark.low, 0.0)
        end, _ = place(mark.high, 0.0)
        parts.append(
            f'<rect x="{start:.1f}" y="{top:.1f}" width="{end - start:.1f}" '
            f'height="{bottom - top:.1f}" fill="currentColor" fill-opacity="0.08"/>'
        )
    return [*parts, _text(across + 4, top + 10, mark.name)]


def _dashed(path: str) -> str:
    return f'<path d="{path}" fill="none" stroke="currentColor" stroke-dasharray="5 4"/>'


def _text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "start",
    colour: str = "currentColor",
    weight: str = "normal",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" '
        f'font-weight="{weight}">{escape(words)}</text>'
    )


def _svg(height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'font-family="sans-serif" font-size="12">{"".join(parts)}</svg>'
    )
