"""Draws a Plotly figure of thence as SVG: the static picture that notebooks store next to the interactive figure.

GitHub, nbconvert and mail show this picture. Plotly's own export (kaleido) needs a browser. This module draws only
the kinds of traces that thence's figures have: bars, points and lines, boxes, heat maps, icicles.
"""

from __future__ import annotations

import html
import re
from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from thence.writers.page.figure_axes import Axis, axis_of
from thence.writers.page.figures import PALETTE
from thence.writers.text.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import plotly.graph_objects as go

_WIDTH = 800
_HEIGHT = 380
_CHARACTER = 6.4  # average width in px of a letter at font size 12
_LONGEST_LABEL = 46  # most letters of a category's label
_TOP, _BOTTOM, _RIGHT, _LEFT = 34, 46, 16, 64
_INK, _GRID = "#56606b", "#d9dee3"
_LEAST_WITH_TEXT = 5  # a frame shows its name if at least this many letters fit
_TAG = re.compile(r"<[^>]*>")
_COLOUR = re.compile(r"rgba?\(([^)]*)\)")
_FRAME_ROW = 20

Trace = dict[str, Any]


def figure_svg(figure: go.Figure) -> str:
    """The figure as an SVG document; texts are escaped, and the document loads nothing from elsewhere.

    Raises:
        KeyError: the figure has a kind of trace that this module cannot draw.
    """
    document = figure.to_plotly_json()
    traces = [trace for trace in document["data"] if trace.get("visible") is not False]
    layout = document["layout"]
    height = int(layout.get("height") or _HEIGHT)
    icicles = [trace for trace in traces if trace["type"] == "icicle"]
    if icicles:
        parts, height = _icicle(icicles[0])
    else:
        parts = [*_legend(traces, layout), *_plotted(traces, layout, height)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'font-family="system-ui, Segoe UI, Roboto, Liberation Sans, sans-serif" font-size="12" fill="{_INK}">'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{"".join(parts)}</svg>'
    )


def _plain(text: Any) -> str:
    """Converts a text of a figure, which is simple HTML, to escaped text for the SVG."""
    return html.escape(printable(html.unescape(_TAG.sub(" ", str(text)))))


def _clipped(text: Any, letters: int) -> str:
    plain = html.unescape(_plain(text))
    return html.escape(plain if len(plain) <= letters else plain[: max(letters - 1, 1)] + "…")


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _box(x: float, y: float, width: float, height: float, colour: str, title: str = "") -> str:
    inside = f"<title>{title}</title>" if title else ""
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.3):.2f}" height="{height:.2f}" {_fill(colour)}>'
        f"{inside}</rect>"
    )


def _fill(colour: str) -> str:
    """A colour of Plotly as SVG attributes; SVG has a separate attribute for the opacity."""
    if match := _COLOUR.fullmatch(colour.strip()):
        red, green, blue, *alpha = (float(part) for part in match[1].split(","))
        opacity = f' fill-opacity="{alpha[0]:.2f}"' if alpha else ""
        return f'fill="#{int(red):02x}{int(green):02x}{int(blue):02x}"{opacity}'
    return f'fill="{html.escape(colour)}"'


def _colour(trace: Trace, number: int) -> str:
    marker = trace.get("marker") or {}
    colour = marker.get("color") or (trace.get("line") or {}).get("color")
    return colour if isinstance(colour, str) else PALETTE[number % len(PALETTE)]


def _legend(traces: Sequence[Trace], layout: Mapping[str, Any]) -> Iterator[str]:
    """Names of the traces in a row above the plot, if there is more than one."""
    named = {
        str(trace["name"]): _colour(trace, number)
        for number, trace in enumerate(traces)
        if trace.get("name") and trace.get("showlegend") is not False
    }
    if len(named) < 2 or layout.get("showlegend") is False:
        return
    x = 8.0
    for name, colour in named.items():
        label = _clipped(name, 40)
        yield _box(x, 10, 10, 10, colour) + _text(x + 15, 19, label)
        x += 15 + _CHARACTER * len(html.unescape(label)) + 16


def _plotted(traces: Sequence[Trace], layout: Mapping[str, Any], height: int) -> Iterator[str]:
    """Axes and traces."""
    across, down = _axes(traces, layout, height)
    yield from _grid(across, down)
    stacked = layout.get("barmode") == "stack"
    reached: dict[Any, float] = defaultdict(float)
    for number, trace in enumerate(traces):
        draw = _DRAWN[trace["type"]]
        yield from draw(trace, (across, down), _colour(trace, number), reached if stacked else defaultdict(float))


def _axes(traces: Sequence[Trace], layout: Mapping[str, Any], height: int) -> tuple[Axis, Axis]:
    names = [name for trace in traces for name in _values(trace, "y") if isinstance(name, str)]
    longest = min(max((len(html.unescape(name)) for name in names), default=0), _LONGEST_LABEL)
    left = max(_LEFT, 14 + _CHARACTER * longest)
    xs = [value for trace in traces for value in _extent(trace, "x", traces, layout)]
    ys = [value for trace in traces for value in _extent(trace, "y", traces, layout)]
    across = axis_of(layout.get("xaxis") or {}, xs, (left, _WIDTH - _RIGHT))
    down = axis_of(layout.get("yaxis") or {}, ys, (height - _BOTTOM, _TOP))
    return across, down


def _values(trace: Trace, axis: str) -> list[Any]:
    values = trace.get(axis)
    return [] if values is None else list(values)


def _extent(trace: Trace, axis: str, traces: Sequence[Trace], layout: Mapping[str, Any]) -> list[Any]:
    """Values of a trace that an axis must cover: for bars their ends, for stacked bars the ends of the stacks."""
    if trace["type"] == "box" and axis == "y":
        return [trace["lowerfence"][0], trace["upperfence"][0]]
    if trace["type"] == "heatmap" and axis == "x":
        return [trace["x0"] - trace["dx"] / 2, trace["x0"] + trace["dx"] * (len(trace["z"][0]) - 0.5)]
    values = _values(trace, axis)
    if trace["type"] != "bar" or (axis == "x") != (trace.get("orientation") == "h"):
        return values
    if layout.get("barmode") == "stack":
        sums: dict[Any, float] = defaultdict(float)
        for other in traces:
            if other["type"] == "bar":
                for place, value in _bars(other):
                    sums[place] += value
        return [0, *sums.values()]
    return [0, *(b + v for b, v in zip(trace.get("base") or [0] * len(values), values, strict=True))]


def _bars(trace: Trace) -> list[tuple[Any, float]]:
    flat = trace.get("orientation") == "h"
    places, values = _values(trace, "y" if flat else "x"), _values(trace, "x" if flat else "y")
    return [(place, value or 0) for place, value in zip(places, values, strict=True)]


def _grid(across: Axis, down: Axis) -> Iterator[str]:
    """Grid lines at the ticks of numeric axes, labels at all ticks, and titles of the axes."""
    free = 0.0  # where the previous label ends
    for x, label in across.ticks():
        if across.kind != "category":
            yield f'<path d="M{x:.1f} {_TOP}V{down.begin}" stroke="{_GRID}"/>'
        half = _CHARACTER * min(len(html.unescape(label)), 24) / 2
        if x - half >= free:
            yield _text(x, down.begin + 16, _clipped(label, 24), "middle")
            free = x + half + 4
    for y, label in down.ticks():
        if down.kind != "category":
            yield f'<path d="M{across.begin} {y:.1f}H{across.end}" stroke="{_GRID}"/>'
        yield _text(across.begin - 6, y + 4, _clipped(label, _LONGEST_LABEL), "end")
    if across.title:
        yield _text((across.begin + across.end) / 2, down.begin + 36, _plain(across.title), "middle")
    if down.title:
        middle = (down.begin + down.end) / 2
        yield f'<g transform="rotate(-90 14 {middle:.0f})">{_text(14, middle, _plain(down.title), "middle")}</g>'


def _bar(trace: Trace, axes: tuple[Axis, Axis], colour: str, reached: dict[Any, float]) -> Iterator[str]:
    flat = trace.get("orientation") == "h"
    along, beside = axes if flat else axes[::-1]
    thick = beside.step * float(trace.get("width") or 0.7)
    bases, texts = trace.get("base"), trace.get("text") or trace.get("hovertext") or ()
    for number, (place, value) in enumerate(_bars(trace)):
        base = reached[place] if bases is None else bases[number]
        reached[place] += value if bases is None else 0
        low, high = sorted((along.at(base), along.at(base + value)))
        middle = beside.at(place) - thick / 2
        title = _plain(texts[number]) if number < len(texts) else ""
        rectangle = (low, middle, high - low, thick) if flat else (middle, low, thick, high - low)
        yield _box(*rectangle, colour, title)
        if trace.get("textposition") == "outside" and title and flat:
            yield _text(high + 6, middle + thick / 2 + 4, title)


def _scatter(trace: Trace, axes: tuple[Axis, Axis], colour: str, _reached: Any) -> Iterator[str]:
    across, down = axes
    marker = trace.get("marker") or {}
    points = [
        (number, across.at(x), down.at(y))
        for number, (x, y) in enumerate(zip(_values(trace, "x"), _values(trace, "y"), strict=True))
        if x is not None and y is not None
        and (across.kind != "log" or x > 0) and (down.kind != "log" or y > 0)
    ]  # fmt: skip
    if "lines" in (trace.get("mode") or "lines") and len(points) > 1:
        path = "L".join(f"{x:.1f} {y:.1f}" for _, x, y in points)
        yield f'<path d="M{path}" fill="none" stroke="{html.escape(colour)}" stroke-width="2"/>'
    sizes = marker.get("size", 6)
    opacity = marker.get("opacity", 1)
    for number, x, y in points if "markers" in (trace.get("mode") or "") else ():
        size = sizes if isinstance(sizes, int | float) else sizes[number]
        place = f'cx="{x:.1f}" cy="{y:.1f}" r="{size / 2:.1f}"'
        yield f'<circle {place} fill="{html.escape(colour)}" fill-opacity="{opacity}"/>'


def _quartiles(trace: Trace, axes: tuple[Axis, Axis], colour: str, _reached: Any) -> Iterator[str]:
    across, down = axes
    middle, thick = across.at(trace["x"][0]), across.step * float(trace.get("width") or 0.5)
    names = ("lowerfence", "q1", "median", "q3", "upperfence")
    low, q1, median, q3, high = (down.at(trace[name][0]) for name in names)
    left, right = middle - thick / 2, middle + thick / 2
    stroke = f'stroke="{html.escape(colour)}"'
    yield f'<path d="M{middle:.1f} {low:.1f}V{q1:.1f}M{middle:.1f} {q3:.1f}V{high:.1f}" {stroke}/>'
    yield f'<path d="M{left:.1f} {q1:.1f}H{right:.1f}V{q3:.1f}H{left:.1f}Z" fill="none" {stroke} stroke-width="2"/>'
    yield f'<path d="M{left:.1f} {median:.1f}H{right:.1f}" {stroke} stroke-width="2"/>'


def _heatmap(trace: Trace, axes: tuple[Axis, Axis], _colour: str, _reached: Any) -> Iterator[str]:
    """Rows of coloured cells; neighbouring cells of the same colour are drawn as one rectangle."""
    across, down = axes
    thick = down.step - float(trace.get("ygap") or 0)
    low, high = trace.get("zmin", 0), trace.get("zmax", 1)
    for name, row in zip(trace["y"], trace["z"], strict=True):
        top = down.at(name) - thick / 2
        colours = [None if z is None else _scaled(trace["colorscale"], (z - low) / (high - low)) for z in row]
        begin = 0
        for end in range(1, len(colours) + 1):
            if end < len(colours) and colours[end] == colours[begin]:
                continue
            if (colour := colours[begin]) is not None:
                left, right = (across.at(trace["x0"] + trace["dx"] * (edge - 0.5)) for edge in (begin, end))
                yield _box(left, top, right - left, thick, colour)
            begin = end


def _scaled(scale: Sequence[Sequence[Any]], share: float) -> str:
    """The colour at ``share`` of the scale, interpolated in steps of a tenth between two of its colours."""
    for (low, first), (high, last) in pairwise(scale):
        if low <= share <= high and high > low:
            part = round(10 * (share - low) / (high - low)) / 10
            channels = _channels(first), _channels(last)
            mixed = [a + part * (b - a) for a, b in zip(*channels, strict=True)]
            return f"rgba({', '.join(f'{c:.2f}' for c in mixed)})"
    return str(scale[-1][1])


def _channels(colour: str) -> list[float]:
    match = _COLOUR.fullmatch(colour)
    return [float(channel) for channel in match[1].split(",")] if match else [0.0]


def _icicle(trace: Trace) -> tuple[list[str], int]:
    """The frames, each below its parent and as wide as its fraction of the parent, and the height in px."""
    children: dict[str, list[int]] = defaultdict(list)
    for number, parent in enumerate(trace["parents"]):
        children[parent].append(number)
    values = [float(value) for value in trace["values"]]
    parts: list[str] = []
    deepest = 0
    waiting = [(root, 0.0, float(_WIDTH), 0) for root in children[""]]
    while waiting:
        node, left, width, depth = waiting.pop()
        if width < 0.5:
            continue
        deepest = max(deepest, depth)
        title = f"{_plain(trace['labels'][node])}: {_plain(trace['text'][node])}"
        parts.append(
            _box(left, depth * _FRAME_ROW, width - 0.6, _FRAME_ROW - 1, trace["marker"]["colors"][node], title)
        )
        letters = int(width / _CHARACTER) - 1
        if letters >= _LEAST_WITH_TEXT:
            parts.append(_text(left + 4, depth * _FRAME_ROW + 14, _clipped(trace["labels"][node], letters)))
        for child in children[trace["ids"][node]]:
            part = width * values[child] / (values[node] or 1)
            waiting.append((child, left, part, depth + 1))
            left += part
    return parts, (deepest + 1) * _FRAME_ROW


_DRAWN: Mapping[str, Callable[[Trace, tuple[Axis, Axis], str, dict[Any, float]], Iterator[str]]] = {
    "bar": _bar,
    "scatter": _scatter,
    "box": _quartiles,
    "heatmap": _heatmap,
}
