"""Summaries of in-kernel profiles as text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from thence.units import format_count, format_ns, format_share
from thence.writers.text.printable import printable

if TYPE_CHECKING:
    from thence.inside.summary import InsideSummary

_HEADINGS = {
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
"""Columns of `InsideSummary.rows` that are shown, the most important first; names as in ns."""


def headings_of(summary: InsideSummary) -> dict[str, str]:
    """The shown columns of a summary with their headings, by the unit of its times."""
    return {re.sub("_ns$", f"_{summary.unit}", name): text for name, text in _HEADINGS.items()}


def inside_lines(summary: InsideSummary, path: str = "") -> tuple[str, str]:
    """The line about the launch, which begins with the path if there is one, and the line about the SMs."""
    named = "".join(f"{name}: " for name in (path, summary.kernel) if name)
    head = f"{named}{format_count(summary.traces)} traces of {format_count(summary.blocks)} blocks, "
    idle = "" if summary.idle_sms is None else f", {summary.idle_sms} ran nothing"
    ran = f"{summary.sms.height} SMs ran something{idle}; " if not summary.sms.is_empty() else ""
    span, spread, waves = summary.span_ns, summary.start_spread_ns, summary.waves
    tail, tail_idle = summary.tail_ns, summary.tail_idle
    if span is None or spread is None or waves is None or tail is None or tail_idle is None:
        below = f"{ran}starts on different SMs cannot be compared in cycles"
        return printable(f"{head}times in cycles: the rate of the SM clock is unknown"), below
    head += f"{format_ns(span)} from the first start to the last end"
    below = f"blocks began within {format_ns(spread)}, {waves:.2f} waves"
    if not summary.sms.is_empty():
        below += (
            f"; {ran}tail {format_ns(tail)},"
            f" {format_share(tail_idle, 1)} of it idle; busiest SM"
            f" {summary.imbalance:.2f} times the mean"
        )
    return printable(head), below
