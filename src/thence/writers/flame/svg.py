"""A flame graph as an SVG image for documents and notebooks, without scripts and other files.

The root is the top row. Every frame has a tooltip with its full name, time, share and count. Frames
narrower than `_LEAST_WIDTH` and rows after the first `_MOST_ROWS` are not drawn; a note states how many
frames this leaves out.
"""

from __future__ import annotations

import itertools
import re
import zlib
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape, quoteattr

import numpy as np
import polars as pl

from thence.units import format_count, format_ns, format_share

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thence.analysis.flame.flame import Flame
    from thence.model.arrays import Float64


_WIDTH, _ROW, _MARGIN, _HEADER = 1200, 17, 10, 44
_LEAST_WIDTH = 0.25
_MOST_ROWS = 256
_CHARACTER = 6.3
"""Width of a character of the font in px, to shorten names that do not fit."""
_FILLS = {
    "compute": "#a5c0dc",
    "communication": "#e9b595",
    "copy": "#98d7c2",
    "idle": "#dfe0e3",
    "unattributed": "#d9ccdf",
    "smaller": "#cacbce",
}
"""The colours of the HTML page's light theme."""
_FRAMES = ("#efe6d2", "#f0e4d3", "#ece3cd", "#f2ead9", "#eee0cc")
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|[\x7f-\x9f]")
"""Characters that XML 1.0 (section 2.2) excludes, and those that it discourages."""


def flame_svg(flame: Flame) -> str:
    """The image of a flame graph, 1,200 px wide; the height grows with the depth of the stacks.

    Args:
        flame: flame graph of any size.
    """
    frames = _placed(flame)
    rows = int(frames["depth"].max()) + 1  # type: ignore[arg-type] # the root is always there
    notes = [*flame.notes, *_omitted(flame, frames)]
    height = _HEADER + rows * _ROW + _MARGIN + len(notes) * _ROW
    title = f"{flame.title}: {', '.join(flame.meta.inputs)}"
    facts = f"span {format_ns(flame.span_ns)}, busy {format_share(flame.busy_ns, flame.span_ns)}"
    below = _HEADER + rows * _ROW + _ROW
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="Verdana, DejaVu Sans, sans-serif" '
        f'font-size="11">\n<title>{_text(title)}</title>\n'
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>\n'
        f'<text x="{_MARGIN}" y="18" font-size="14">{_text(title)}</text>\n'
        f'<text x="{_MARGIN}" y="35" fill="#5b6570">{_text(facts)}</text>\n'
    )
    said = (
        f'<text x="{_MARGIN}" y="{below + number * _ROW}" fill="#5b6570">{_text(note)}</text>\n'
        for number, note in enumerate(notes)
    )
    return "".join((head, *_boxes(flame, frames), *said, "</svg>\n"))


def _placed(flame: Flame) -> pl.DataFrame:
    """The frames that are drawn, with columns x and width in px.

    Among siblings larger frames come first and idle ones last, as in `Flame.stacks`.
    """
    nodes = flame.nodes.select("node", "parent", "depth", "name", "full_name", "kind", "total_ns", "count", "idle")
    # Cut before layout: a frame is never wider than the one around it.
    scale = (_WIDTH - 2 * _MARGIN) / max(flame.total_ns, 1)
    kept = nodes.filter(
        (pl.col("total_ns") * scale >= _LEAST_WIDTH) | pl.col("parent").is_null(), pl.col("depth") < _MOST_ROWS
    )
    ordered = kept.sort("idle", "total_ns", "node", descending=[False, True, False])
    ordered = ordered.with_columns(offset=(pl.col("total_ns").cum_sum() - pl.col("total_ns")).over("parent")).sort(
        "depth", maintain_order=True
    )
    return ordered.with_columns(
        x=_MARGIN + _starts(ordered, flame.nodes.height) * scale, width=pl.col("total_ns") * scale
    )


def _starts(ordered: pl.DataFrame, nodes: int) -> Float64:
    """Start of each frame in ns from the left: the sum of its offset among siblings and its parent's start.

    Args:
        ordered: the frames that are drawn, ordered by depth, with all their parents.
        nodes: number of nodes of the whole flame graph.
    """
    start = np.zeros(nodes, np.float64)
    node = ordered["node"].to_numpy()
    parent = ordered["parent"].fill_null(0).to_numpy()
    offset = ordered["offset"].to_numpy()
    depth = ordered["depth"].to_numpy()
    edges = np.searchsorted(depth, np.arange(1, depth.max() + 2))
    for first, last in itertools.pairwise(edges):  # one level at a time
        start[node[first:last]] = start[parent[first:last]] + offset[first:last]
    placed: Float64 = start[node]
    return placed


def _omitted(flame: Flame, frames: pl.DataFrame) -> Iterator[str]:
    omitted = flame.nodes.height - frames.height
    if omitted:
        yield (
            f"{format_count(omitted)} of {format_count(flame.nodes.height)} frames are too narrow or "
            "too deep to be drawn here."
        )


def _boxes(flame: Flame, frames: pl.DataFrame) -> Iterator[str]:
    """Yields a group for each frame: its tooltip, its box, and as much of its name as fits."""
    total = flame.total_ns
    columns = ("depth", "name", "full_name", "kind", "total_ns", "count", "x", "width")
    for depth, name, full_name, kind, ns, count, x, width in frames.select(columns).iter_rows():
        y = _HEADER + depth * _ROW
        tip = f"{full_name or name}\n{format_ns(ns)}, {format_share(ns, total)}, {format_count(count)}"
        letters = int((width - 4) / _CHARACTER)
        wanted = name.rpartition("/")[2] if flame.of_files else name  # the folder is in the tooltip
        shown = wanted if len(wanted) <= letters else f"{wanted[: letters - 1]}…"
        label = f'<text x="{x + 3:.2f}" y="{y + 12}">{_text(shown)}</text>' if letters > 2 else ""
        yield (
            f"<g><title>{_text(tip)}</title>"
            f'<rect x="{x:.2f}" y="{y}" width="{max(width - 0.3, 0.1):.2f}" height="{_ROW - 1}" '
            f"fill={quoteattr(_fill(kind, name))}/>{label}</g>\n"
        )


def _fill(kind: str, name: str) -> str:
    # crc32 is the same in every process, unlike hash().
    return _FILLS.get(kind) or _FRAMES[zlib.crc32(name.encode("utf-8", "replace")) % len(_FRAMES)]


def _text(text: str) -> str:
    return escape(_NOT_IN_XML.sub("\ufffd", text))
