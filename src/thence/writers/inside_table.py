"""Summaries of in-kernel profiles as text and as HTML for notebooks."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from thence.units import format_count, format_ns, format_share
from thence.writers.plain import printable

if TYPE_CHECKING:
    from thence.analysis.inside import InsideSummary

__all__ = ["HEADINGS", "inside_html", "inside_lines"]

HEADINGS = {
    "name": "range",
    "count": "count",
    "total_ns": "total",
    "share": "share",
    "mean_ns": "mean",
    "p50_ns": "p50",
    "p90_ns": "p90",
    "p99_ns": "p99",
    "sm_low_ns": "SM low",
    "sm_high_ns": "SM high",
    "unclosed": "unclosed",
}
"""Columns of `InsideSummary.rows` that are shown, the most important first."""

_MOST_ROWS = 20


def inside_lines(summary: InsideSummary, path: str) -> tuple[str, str]:
    """What a launch was, for above the table of its ranges, and how it was spread, for below."""
    kernel = f"{summary.kernel}: " if summary.kernel else ""
    head = (
        f"{path}: {kernel}{format_count(summary.traces)} traces of {format_count(summary.blocks)}"
        f" blocks, {format_ns(summary.span_ns)} from the first start to the last end"
    )
    below = f"blocks began within {format_ns(summary.start_spread_ns)}, {summary.waves:.2f} waves"
    if not summary.sms.is_empty():
        idle = "" if summary.idle_sms is None else f", {summary.idle_sms} ran nothing"
        below += (
            f"; {summary.sms.height} SMs ran something{idle}; tail {format_ns(summary.tail_ns)},"
            f" {format_share(summary.tail_idle, 1)} of it idle; busiest SM"
            f" {summary.imbalance:.2f} times the mean"
        )
    return printable(head), below


def inside_html(summary: InsideSummary, path: str) -> str:
    """A summary as an HTML fragment; every text of the profile is escaped."""
    head, below = map(escape, inside_lines(summary, path))
    rows = "".join(
        f'<tr><td style="text-align:left">{escape(row["name"])}</td>'
        f"<td>{format_count(row['count'])}</td><td>{format_ns(row['total_ns'])}</td>"
        f"<td>{format_share(row['share'], 1)}</td><td>{_time(row['mean_ns'])}</td>"
        f"<td>{_time(row['p50_ns'])}</td><td>{_time(row['p99_ns'])}</td></tr>"
        for row in summary.rows.head(_MOST_ROWS).iter_rows(named=True)
    )
    hidden = summary.rows.height - _MOST_ROWS
    more = f"<p>... {format_count(hidden)} more in <code>.rows</code></p>" if hidden > 0 else ""
    said = "".join(f"<p>{escape(text)}</p>" for text in (*summary.notes, *summary.warnings))
    headings = "".join(
        f"<th>{name}</th>" for name in ("range", "count", "total", "share", "mean", "p50", "p99")
    )
    return (
        f"<div><p><b>{head}</b><br>{below}</p><table><thead><tr>{headings}</tr></thead>"
        f"<tbody>{rows}</tbody></table>{more}{said}</div>"
    )


def _time(value: float | None) -> str:
    return "-" if value is None else format_ns(value)
