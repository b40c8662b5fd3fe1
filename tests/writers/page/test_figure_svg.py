"""Figures carry a static picture: what it draws is what the figure holds."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, Any

import pytest

import thence
from helpers import DATA, FSDP, recording, shared
from thence.pictures import Pictures
from thence.writers.page.figure_axes import axis_of
from thence.writers.page.figure_svg import figure_svg
from thence.writers.page.figures import new_figure

if TYPE_CHECKING:
    from collections.abc import Iterator

PLOTS = [name for name in vars(Pictures) if name.startswith("plot_")]
OF_XLA = ("plot_programs", "plot_wait_histogram", "plot_waits")
STATIC, LIVE = "image/svg+xml", "application/vnd.plotly.v1+json"


@pytest.fixture(scope="module")
def traces() -> dict[str, thence.Trace]:
    return {
        "ranks": shared(*FSDP),
        "xla": thence.open(DATA / "jax" / "jax_fsdp2.xplane.pb.gz"),
        "compiled": thence.open(DATA / "jax" / "recording"),
        "one": shared(recording("torch_eager_rank0")),
    }


def drawn(svg: str) -> ET.Element:
    return ET.fromstring(svg)  # our own text


def shapes(root: ET.Element, tag: str) -> Iterator[ET.Element]:
    return root.iter(f"{{http://www.w3.org/2000/svg}}{tag}")


@pytest.mark.parametrize("name", PLOTS)
def test_every_plot_has_a_picture(name: str, traces: dict[str, thence.Trace], monkeypatch: pytest.MonkeyPatch) -> None:
    import plotly.io as pio

    monkeypatch.setattr(pio.renderers, "default", "plotly_mimetype")
    of = {"plot_compile": "compiled", "plot_programs": "xla", "plot_spread": "one", "plot_by": "one"}
    figure = getattr(traces[of.get(name, "ranks")], name)()
    bundle = figure._repr_mimebundle_()
    assert {STATIC, LIVE} == set(bundle)
    root = drawn(bundle[STATIC])
    marks = sum(1 for tag in ("rect", "circle", "path") for _ in shapes(root, tag))
    assert marks > 3
    box = [float(part) for part in root.attrib["viewBox"].split()]
    for rectangle in shapes(root, "rect"):
        if rectangle.attrib["width"] != "100%":
            assert float(rectangle.attrib["width"]) >= 0
            assert 0 <= float(rectangle.attrib["x"]) <= box[2] + 1


def test_html_is_left_out_where_the_viewer_reads_plotlys_json(
    traces: dict[str, thence.Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    import plotly.io as pio

    figure = traces["one"].plot_by("label")
    for renderer, forms in (("plotly_mimetype+colab", {STATIC, LIVE}), ("colab", {STATIC, "text/html"})):
        monkeypatch.setattr(pio.renderers, "default", renderer)
        assert set(figure._repr_mimebundle_()) == forms


def test_bars_are_as_long_as_their_values() -> None:
    figure = new_figure(height=200)
    figure.add_bar(orientation="h", y=["a", "b"], x=[10, 40], marker_color="#112233")
    figure.add_bar(orientation="h", y=["a", "b"], x=[30, 20], marker_color="#445566")
    figure.update_layout(barmode="stack")
    found: dict[str, list[tuple[float, float]]] = {}
    for shape in shapes(drawn(figure_svg(figure)), "rect"):
        if "x" not in shape.attrib:  # the ground
            continue
        colour = shape.attrib["fill"]
        found.setdefault(colour, []).append((float(shape.attrib["x"]), float(shape.attrib["width"])))
    (a, b), (above_a, above_b) = found["#112233"], found["#445566"]
    scale = a[1] / 10
    assert [b[1] / scale, above_a[1] / scale, above_b[1] / scale] == pytest.approx([40, 30, 20], rel=0.01)
    assert above_a[0] == pytest.approx(a[0] + a[1], abs=0.1)
    assert above_b[0] == pytest.approx(b[0] + b[1], abs=0.1)


def test_points_lie_where_a_logarithm_puts_them() -> None:
    figure = new_figure(height=300)
    figure.add_scatter(x=[10, 1000, 100_000], y=[0, 5, 10], mode="markers")
    figure.update_xaxes(type="log")
    circles = list(shapes(drawn(figure_svg(figure)), "circle"))
    x = [float(circle.attrib["cx"]) for circle in circles]
    y = [float(circle.attrib["cy"]) for circle in circles]
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.2)
    assert y[0] - y[1] == pytest.approx(y[1] - y[2], abs=0.2)
    assert y[0] > y[2], "larger values stand higher"


def test_text_of_a_trace_is_escaped_and_draws_nothing() -> None:
    figure = new_figure(height=200)
    bad = "&lt;script&gt;alert(1)&lt;/script&gt;<b>bold</b>\x1b[7m"
    figure.add_bar(orientation="h", y=[bad], x=[1], name=bad)
    figure.add_bar(orientation="h", y=["other"], x=[1], name="other")
    svg = figure_svg(figure)
    assert not re.search(r"<(script|b)\b", svg)
    assert "\x1b" not in svg
    assert "<script>alert(1)" in "".join(drawn(svg).itertext())


@pytest.mark.parametrize(
    ("layout", "values", "labels"),
    [
        ({}, [0, 10], ["0", "2", "4", "6", "8", "10"]),
        ({"type": "log"}, [1, 1_000_000], ["1", "10", "100", "1,000", "10k", "100k", "1M"]),
        ({"type": "log", "range": [1, 2]}, [], ["10", "20", "50", "100"]),
        ({"type": "category"}, ["b", "a", "b"], ["b", "a"]),
    ],
)
def test_ticks_are_round(layout: dict[str, Any], values: list[Any], labels: list[str]) -> None:
    axis = axis_of(layout, values, (0, 100))
    assert [label for _, label in axis.ticks()] == labels
    assert all(-1 <= pixel <= 101 for pixel, _ in axis.ticks())
