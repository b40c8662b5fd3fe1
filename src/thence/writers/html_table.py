"""A summary as an HTML fragment for notebooks. Every text of the trace is escaped."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from thence.units import format_count, format_ns, format_share

if TYPE_CHECKING:
    from thence.analysis.summary import Summary

__all__ = ["summary_html"]

_MOST_ROWS = 20


def summary_html(summary: Summary) -> str:
    """Totals and the largest rows as a table."""
    inputs = escape(", ".join(summary.meta.inputs))
    totals = " &nbsp; ".join(
        f"{name} <b>{format_ns(value)}</b>"
        for name, value in (
            ("span", summary.span_ns),
            ("busy", summary.busy_ns),
            ("idle", summary.idle_ns),
            ("sum", summary.sum_ns),
        )
    )
    rows = "".join(
        f'<tr><td title="{escape(row["name"])}" style="text-align:left">{escape(row["short_name"])}</td>'
        f"<td>{format_count(row['count'])}</td><td>{format_ns(row['total_ns'])}</td>"
        f"<td>{format_ns(row['mean_ns'])}</td><td>{format_share(row['total_ns'], summary.sum_ns)}</td></tr>"
        for row in summary.rows.head(_MOST_ROWS).iter_rows(named=True)
    )
    hidden = summary.rows.height - _MOST_ROWS
    more = (
        f"<p>... {format_count(hidden)} more rows in <code>.rows</code></p>" if hidden > 0 else ""
    )
    warnings = "".join(f"<p>{escape(text)}</p>" for text in summary.meta.notes)
    warnings += "".join(f"<p>warning: {escape(text)}</p>" for text in summary.meta.warnings)
    return (
        f"<div><p><b>{inputs}</b><br>{totals}</p>"
        f"<table><thead><tr><th>GPU time by {escape(summary.by)}</th><th>count</th><th>total</th>"
        f"<th>mean</th><th>share</th></tr></thead><tbody>{rows}</tbody></table>{more}{warnings}</div>"
    )
