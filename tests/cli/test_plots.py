"""Plots are SVG in which everything that is drawn lies inside."""

import re
from xml.etree import ElementTree as ET

import pytest

from sluice.cli.plots import HEIGHT, WIDTH, Axes, Mark, bars, lines, ticks


def test_points_and_marks_lie_inside_the_plot():
    svg = lines(
        Axes("a < b", "x", "y"),
        {"one & two": [(0.0, 0.0), (5.0, 80.0)], "empty": [], "other": [(2.0, 90.0)]},
        (Mark("x", 6.0, "rate", 4.0, 9.0), Mark("y", 100.0, "target")),
    )
    root = ET.fromstring(svg)
    circles = [each for each in root.iter() if each.tag.endswith("circle")]
    assert len(circles) == 3
    for each in circles:
        assert 0 <= float(each.attrib["cx"]) <= WIDTH
        assert 0 <= float(each.attrib["cy"]) <= HEIGHT
    (band,) = (each for each in root.iter() if each.tag.endswith("rect"))
    assert float(band.attrib["x"]) + float(band.attrib["width"]) <= WIDTH
    assert "a &lt; b" in svg
    assert "empty" not in svg


def test_names_of_series_stand_above_all_that_is_drawn():
    names = [f"series number {n}" for n in range(9)]
    root = ET.fromstring(lines(Axes("t", "x", "y"), {name: [(1.0, 5.0)] for name in names}))
    told = [each for each in root.iter() if (each.text or "").startswith("series number")]
    (points, *_) = (each for each in root.iter() if each.tag.endswith("polyline"))
    highest = float(points.attrib["points"].split(",")[1])
    assert all(float(each.attrib["y"]) < highest for each in told if "fill" in each.attrib)
    assert all(float(each.attrib["x"]) < WIDTH - 80 for each in told if "x" in each.attrib)


def test_parts_of_a_bar_have_the_width_of_their_share():
    svg = bars("t", {"row": {"a": 3.0, "b": 1.0}, "half": {"a": 2.0}}, "GiB")
    widths = [float(each) for each in re.findall(r'width="([\d.]+)" height="20"', svg)]
    assert widths[0] == pytest.approx(3 * widths[1], rel=0.01)
    assert sum(widths[:2]) == pytest.approx(2 * widths[2], rel=0.01)


@pytest.mark.parametrize("largest", [0.003, 0.7, 1.0, 6.1, 99.0, 12345.0])
def test_ticks_are_a_handful_of_round_values_up_to_the_largest(largest):
    found = ticks(largest)
    assert 3 <= len(found) <= 7
    assert found[0] == 0.0
    assert found[-1] <= largest * 1.0000001


def test_an_axis_without_extent_has_one_tick():
    assert ticks(0.0) == [0.0]


def test_what_is_never_reached_is_left_out_and_the_rest_is_drawn():
    inf, nan = float("inf"), float("nan")
    marks = (Mark("x", inf, "rate", 1.0, inf), Mark("y", nan, "target"))
    svg = lines(Axes("t", "x", "y"), {"a": [(1.0, 2.0), (2.0, inf), (nan, 1.0)]}, marks)
    assert sum(each.tag.endswith("circle") for each in ET.fromstring(svg).iter()) == 1
    assert "nan" not in svg
    assert "inf" not in svg
    assert ET.fromstring(lines(Axes("t", "x", "y"), {"a": [(inf, inf)]})) is not None
