"""Charts: what is drawn has the size of its number, in every form, and no name becomes markup."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import polars as pl
import pytest

import thence
from thence.writers.charts.chart import MAX_TABLE_ROWS, Chart
from thence.writers.charts.description import COLOURS, Axis, Series
from thence.writers.charts.drawing import Scale, drawn

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SVG = "{http://www.w3.org/2000/svg}"
BLUE, ORANGE = COLOURS[:2]
NAMES, TIME = Axis("name", scale="rows"), Axis("total_ns", "GPU time", "ns")
HOSTILE = "</svg></script><script>alert(1)</script>&\x1b[7m\u202e"
PLOT_PX = 240


def bars(first: dict[str, int], second: dict[str, int]) -> Chart:
    series = tuple(
        Series(name, "bar", pl.DataFrame({"name": list(values), "total_ns": list(values.values())}), colour)
        for name, values, colour in (("forward", first, BLUE), ("backward", second, ORANGE))
    )
    return Chart("GPU time", series, TIME, NAMES, "Read it so.")


def shapes(chart: Chart, tag: str) -> Iterator[ET.Element]:
    """Shapes with a tooltip: the legend has none."""
    for shape in ET.fromstring(chart.to_svg()).iter(f"{SVG}{tag}"):
        if shape.find(f"{SVG}title") is not None and tag != "svg":
            yield shape


def percent(shape: ET.Element, key: str) -> float:
    return float(shape.attrib[key].removesuffix("%"))


def tip(shape: ET.Element) -> str:
    return shape.findtext(f"{SVG}title") or ""


def test_bars_are_as_long_as_their_values_and_stacked() -> None:
    """The longest row, b, has 60 ns: 100 %."""
    found = {tip(shape): (percent(shape, "x"), percent(shape, "width"), float(shape.attrib["y"])) for shape in
             shapes(bars({"a": 15, "b": 45}, {"a": 30, "b": 15}), "rect")}  # fmt: skip
    assert {text: place[:2] for text, place in found.items()} == {
        "a\nforward: 15 ns": (0, 25),
        "a\nbackward: 30 ns": (25, 50),
        "b\nforward: 45 ns": (0, 75),
        "b\nbackward: 15 ns": (75, 25),
    }
    assert found["a\nforward: 15 ns"][2] == found["a\nbackward: 30 ns"][2] < found["b\nforward: 45 ns"][2]


def test_a_row_has_its_name_and_its_sum_or_the_text_given() -> None:
    chart = bars({"a": 15, "b": 45}, {"a": 30})
    texts = [each.text for each in ET.fromstring(chart.to_svg()).iter(f"{SVG}text")]
    assert {"a", "45 ns", "b"} <= set(texts)
    given = Chart(chart.title, chart.series, chart.x, chart.y, rows={"b": "half", "a": "most"})
    texts = [each.text for each in ET.fromstring(given.to_svg()).iter(f"{SVG}text")]
    assert [text for text in texts if text in ("a", "b", "half", "most")] == ["b", "half", "a", "most"]


def test_dots_lie_where_logarithms_put_them() -> None:
    data = pl.DataFrame({"size": [10, 1000, 100_000, 0], "ns": [1, 10, 100, 5]})
    chart = Chart("t", (Series("s", "dot", data),), Axis("size", "", "bytes", "log"), Axis("ns", "", "ns", "log"))
    dots = list(shapes(chart, "circle"))
    assert [tip(dot).split("\n")[1] for dot in dots] == ["10 B: 1 ns", "1.000 kB: 10 ns", "100.0 kB: 100 ns"]
    x, y = [percent(dot, "cx") for dot in dots], [float(dot.attrib["cy"]) for dot in dots]
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.02)
    assert y[0] - y[1] == pytest.approx(y[1] - y[2], abs=0.2)
    assert x[0] < x[2]
    assert y[0] > y[2]


def test_the_area_of_a_dot_follows_its_number() -> None:
    data = pl.DataFrame({"x": [1, 2, 3], "y": [1, 1, 1], "area": [0.0, 0.25, 1.0]})
    radii = [float(dot.attrib["r"]) for dot in shapes(Chart("t", (Series("s", "dot", data),), Axis("x"), Axis("y")),
                                                      "circle")]  # fmt: skip
    assert radii[1] - radii[0] == pytest.approx((radii[2] - radii[0]) / 2, abs=0.06)


def test_a_line_goes_through_its_points_and_lines_differ_by_their_marks() -> None:
    data = pl.DataFrame({"x": [0, 5, 10], "y": [0, 100, 50]})
    series = (Series("a", "line", data, BLUE), Series("b", "line", data, ORANGE))
    chart = Chart("t", series, Axis("x"), Axis("y"))
    lines = [each.attrib["points"].split() for each in ET.fromstring(chart.to_svg()).iter(f"{SVG}polyline")]
    first = [tuple(map(float, point.split(","))) for point in lines[0]]
    assert [x for x, _ in first] == pytest.approx([0, 485.4, 970.9], abs=0.1)  # 3 % are free at the right
    scale = PLOT_PX / 105  # 5 % are free above
    assert [first[0][1] - y for _, y in first] == pytest.approx([0, 100 * scale, 50 * scale], abs=0.2)
    assert (len(list(shapes(chart, "circle"))), len(list(shapes(chart, "rect")))) == (3, 3)


def test_areas_are_stacked() -> None:
    """At 0, b is from 10 to 40; at 8 from 20 to 30. The axis ends at 40 and 5 % more."""
    series = (
        Series("a", "area", pl.DataFrame({"x": [0, 8], "y": [10, 20]}), BLUE),
        Series("b", "area", pl.DataFrame({"x": [0, 8], "y": [30, 10]}), ORANGE),
    )
    chart = Chart("t", series, Axis("x", "time", "ns"), Axis("y", "memory", "bytes"))
    _, upper = [each.attrib["points"].split() for each in ET.fromstring(chart.to_svg()).iter(f"{SVG}polygon")]
    points = [tuple(map(float, point.split(","))) for point in upper]
    assert [x for x, _ in points] == [0, 1000, 1000, 0]
    top = [points[2][1] + 20 * PLOT_PX / 42 - y for _, y in points]  # bytes above 0
    assert [round(y * 42 / PLOT_PX) for y in top] == [40, 30, 20, 10]


def test_a_histogram_has_columns_between_its_ends() -> None:
    """The axis is logarithmic, from 1 to 100: 10 is in its middle. The first column begins at 0, its left end."""
    first = pl.DataFrame({"from": [0, 10], "end": [10, 100], "count": [3, 1]}).slice(1)
    below = pl.DataFrame({"from": [0, 1], "end": [1, 10], "count": [4, 2]})
    series = (Series("a", "column", pl.concat([below, first])),)
    chart = Chart("t", series, Axis("from", "wait", "ns", "log"), Axis("count", "", "count"))
    zero, low, high = shapes(chart, "rect")
    assert tip(zero) == "a\n0 ns to 1 ns: 4"
    assert percent(zero, "x") == pytest.approx(0, abs=0.05)
    for shape, begin in ((low, 0), (high, 50)):
        assert percent(shape, "x") == pytest.approx(begin + 2, abs=0.05)  # 4 % of its width are free at each side
        assert percent(shape, "width") == pytest.approx(46, abs=0.05)
    assert float(low.attrib["height"]) == pytest.approx(2 * float(high.attrib["height"]), abs=0.1)


def test_a_box_is_from_quartile_to_quartile() -> None:
    data = pl.DataFrame({"name": ["a"], "low": [0.0], "q1": [10.0], "median": [20.0], "q3": [50.0], "high": [100.0]})
    chart = Chart("t", (Series("a", "box", data),), TIME, NAMES)
    (box,) = shapes(chart, "rect")
    assert (percent(box, "x"), percent(box, "width")) == (10, 40)
    assert tip(box) == "a\nlow: 0 ns\nq1: 10 ns\nmedian: 20 ns\nq3: 50 ns\nhigh: 100 ns"


def test_spans_lie_over_time() -> None:
    data = pl.DataFrame({"name": ["a", "b"], "total_ns": [0, 50], "end": [20, 100], "busy": [1.0, 0.5]})
    whole, half = shapes(Chart("t", (Series("s", "span", data),), TIME, NAMES), "rect")
    assert [(percent(each, "x"), percent(each, "width")) for each in (whole, half)] == [(0, 20), (50, 50)]
    assert "fill-opacity" not in whole.attrib
    assert half.attrib["fill-opacity"] in ("0.6", "0.7")


@pytest.mark.parametrize(
    ("scale", "labels"),
    [
        (Scale(0, 10e6, "ns"), ["0", "2 ms", "4 ms", "6 ms", "8 ms", "10 ms"]),
        (Scale(0, 3, "count"), ["0", "1", "2", "3"]),
        (Scale(0, 0.5, "share"), ["0", "10 %", "20 %", "30 %", "40 %", "50 %"]),
        (Scale(0, 6, "bytes", log=True), ["1 B", "10 B", "100 B", "1 kB", "10 kB", "100 kB", "1 MB"][::2]),
        (Scale(3, 4.5, "ns", log=True), ["1 us", "2 us", "5 us", "10 us", "20 us"]),
        (Scale(11, 14, "count", log=True), ["100G", "1T", "10T", "100T"]),
    ],
)
def test_ticks_are_round(scale: Scale, labels: list[str]) -> None:
    assert [label for _, label in scale.ticks()] == labels
    assert all(-0.001 <= place <= 1.001 for place, _ in scale.ticks())


def test_an_empty_chart_is_drawn() -> None:
    empty = pl.DataFrame(schema={"x": pl.Float64, "y": pl.Float64})
    for chart in (Chart("t", (), TIME, NAMES), Chart("t", (Series("s", "dot", empty),), Axis("x"), Axis("y"))):
        ET.fromstring(chart.to_svg())
        assert chart.to_frame().is_empty()


def test_the_numbers_are_a_frame_and_a_table() -> None:
    chart = bars({"a": 15, "b": 45}, {"a": 30})
    assert chart.to_frame().rows() == [("forward", "a", 15), ("forward", "b", 45), ("backward", "a", 30)]
    cells = re.findall("<td>(.*?)</td>", chart.to_html())
    assert cells == ["forward", "a", "15 ns", "forward", "b", "45 ns", "backward", "a", "30 ns"]
    many = bars({str(number): 1 for number in range(MAX_TABLE_ROWS)}, {"a": 1, "b": 1})
    assert "2 more rows are in the chart only" in many.to_html()


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        assert not [name for name, _ in attrs if name.startswith("on")]


def test_no_name_becomes_markup() -> None:
    data = pl.DataFrame({"name": [HOSTILE], "total_ns": [1], "note": [HOSTILE]})
    series = (Series(HOSTILE, "bar", data), Series("other", "bar", data))
    chart = Chart(HOSTILE, series, Axis("total_ns", HOSTILE, "ns"), NAMES, HOSTILE)
    harmless = bars({"a": 1}, {"a": 1})
    assert Tags(chart.to_html()).names == Tags(harmless.to_html()).names
    tags = {each.tag for each in ET.fromstring(chart.to_svg()).iter()}
    assert tags == {each.tag for each in ET.fromstring(harmless.to_svg()).iter()}
    assert not re.search("[\x1b\u202e]", chart.to_svg() + chart.to_html())


def test_a_notebook_shows_it_without_a_script() -> None:
    chart = bars({"a": 15}, {"a": 30})
    assert "script" not in Tags(chart._repr_html_()).names
    root = ET.fromstring(chart._repr_svg_())
    assert (root.findtext(f"{SVG}title"), root.attrib["role"]) == ("GPU time", "img")
    assert "Read it so." in (root.findtext(f"{SVG}desc") or "")


def test_a_chart_is_saved_as_an_image_or_a_page(tmp_path: Path) -> None:
    chart = bars({"a": 15}, {"a": 30})
    chart.save(tmp_path / "chart.svg")
    assert (tmp_path / "chart.svg").read_text(encoding="utf-8") == chart.to_svg()
    chart.save(str(tmp_path / "chart.html"))
    assert chart.to_html() in (tmp_path / "chart.html").read_text(encoding="utf-8")
    with pytest.raises(thence.UsageError, match=r"chart.pdf: a chart is written as .svg or .html"):
        chart.save(tmp_path / "chart.pdf")


def test_the_height_has_room_for_everything() -> None:
    drawing = drawn(bars({"a": 15, "b": 45}, {"a": 30}).series, TIME, NAMES, {})
    ys = [float(y) for y in re.findall(r' y[12]?="([\d.]+)"', drawing.body)]
    assert max(ys) < drawing.height
