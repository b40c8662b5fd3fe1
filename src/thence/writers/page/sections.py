"""Sections of a page: their HTML, and the data of the figures and tables that the page's script draws."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from thence.model.tables import named_inputs
from thence.writers.text.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import plotly.graph_objects as go


@dataclass(frozen=True)
class Section:
    """One section of a page.

    Attributes:
        name: id of the section on the page.
        title: heading.
        html: content, in which texts of a trace are escaped. `chart` and `table` return the placeholders that
            the script fills.
        figures: Plotly figures by the names that were passed to `chart`.
        tables: tables from `thence.writers.page.report_tables.frame_data`, by the names that were passed to
            `table`.
    """

    name: str
    title: str
    html: str
    figures: Mapping[str, go.Figure] = field(default_factory=dict)
    tables: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    def to_html(self) -> str:
        """The section with its heading."""
        heading = f'<h2 id="{self.name}-title">{escape(self.title)}</h2>'
        return f'<section id="{self.name}" aria-labelledby="{self.name}-title">{heading}{self.html}</section>'


def chart(name: str, says: str, title: str = "") -> str:
    """The placeholder of a figure.

    Args:
        name: name of the figure.
        says: description for assistive technology.
        title: heading above the figure.
    """
    heading = f"<h3>{escape(title)}</h3>" if title else ""
    return (
        f'<div class="figure">{heading}<div class="chart" role="figure" aria-label="{escape(says)}" '
        f'data-figure="{name}"></div></div>'
    )


def table(name: str, title: str) -> str:
    """The placeholder of a table; the title is its accessible name."""
    return f'<div class="table" data-table="{name}" data-title="{escape(title)}"></div>'


def scrolled(html: str, title: str) -> str:
    """An HTML table in an element that scrolls if the table is too wide."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title)}">{html}</div>'


def notes(texts: Iterable[str], kind: str = "") -> str:
    """Sentences as an HTML list; empty without any."""
    items = "".join(f"<li>{escape(printable(text))}</li>" for text in texts)
    return f'<ul class="{f"notes {kind}".strip()}">{items}</ul>' if items else ""


def absent(reason: str, inputs: Sequence[str]) -> str:
    """The reason why a section has nothing to show, as a paragraph."""
    sentence = reason.removeprefix(f"{named_inputs(inputs)}: ")
    if sentence.startswith(("holds ", "describes ")):
        sentence = f"The trace {sentence}"
    return f'<p class="absent">{escape(printable(sentence))}.</p>'
