"""Helpers that all figures share: colours, axes, and escaping of texts from a trace.

Plotly is imported lazily, when a figure is made. Plotly interprets texts as simple HTML, so `shown` escapes every
text of a trace; texts of a trace are never part of a hover template.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from thence.errors import MissingRequirement
from thence.model.kernel_names import clip
from thence.writers.text.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    import plotly.graph_objects as go

PALETTE = (
    "#4878a8", "#d9833f", "#58a08a", "#b0697f", "#8a7fb5", "#c2a545", "#7d8a97", "#6fa8c9",
)  # fmt: skip
"""Colours with enough contrast on light and dark backgrounds."""
ROW_PX = 22
"""Height of a horizontal bar with its gap."""

_INK = "#6b7683"
_GRID = "rgba(128, 138, 150, 0.22)"
_NAME = 48
_FONT = "system-ui, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"


def shown(text: str, width: int = _NAME) -> str:
    """Sanitizes a text of a trace for Plotly: clipped, without control characters, HTML-escaped."""
    return escape(printable(clip(text, width)))


def stream_name(rank: int, device: int, stream: int | None) -> str:
    """The name of a stream; ``stream`` is None if the trace does not record streams."""
    return f"rank {rank} GPU {device}: " + ("all streams" if stream is None else f"stream {stream}")


def distinct(names: Iterable[str]) -> list[str]:
    """Escaped names, clipped for the labels of an axis, each different, because equal labels would share a bar."""
    taken: dict[str, int] = {}
    result = []
    for name in names:
        text = shown(name)
        taken[text] = taken.get(text, 0) + 1
        result.append(text if taken[text] == 1 else f"{text} ({taken[text]})")
    return result


def new_figure(**layout: Any) -> go.Figure:
    """An empty figure in the common style.

    Raises:
        MissingRequirement: Plotly is not installed.
    """
    try:
        import plotly.graph_objects as go
    except ImportError:
        raise MissingRequirement(
            "figures and HTML reports need Plotly, which is not installed: pip install plotly"
        ) from None
    axis = {"gridcolor": _GRID, "zerolinecolor": _GRID, "linecolor": _GRID, "automargin": True}
    return go.Figure(
        layout={
            "template": {"layout": {"xaxis": axis, "yaxis": axis}},
            "font": {"color": _INK, "size": 12, "family": _FONT},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "margin": {"l": 8, "r": 16, "t": 34, "b": 40},
            "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "normal"},
            "hoverlabel": {"align": "left"},
            "colorway": list(PALETTE),
            **layout,
        }
    )  # fmt: skip
