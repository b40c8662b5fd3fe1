"""A comparison as one self-contained HTML page: it needs no server, no network and no script.

Names come from traces and may contain any characters; on the page all names are escaped text.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import polars as pl

from thence.analysis.diff.sample import WHOLE_TRACE
from thence.units import format_ns
from thence.writers.page.template import filled, scrolled
from thence.writers.text.diff import shown_rows
from thence.writers.text.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from thence.analysis.diff.answer import Diff
    from thence.analysis.diff.gate import Gate
    from thence.analysis.diff.sample import Sample

_MAX_ROWS = 300
"""Most rows of one kind; the largest differences come first."""
_TITLES = {"busy": "Whole step", "idle": "Whole step", "communication": "Whole step"}


def diff_html(diff: Diff, gates: Sequence[Gate] = (), rows: pl.DataFrame | None = None) -> str:
    """The page of a comparison.

    Args:
        rows: as `thence.writers.text.diff.shown_rows` returns them; None for its defaults.
    """
    first, *others = diff.explanation
    refused = [f"Not comparable ({r.code}), compared anyway: {r.text}" for r in diff.refusals]
    notes = [*(f"not checked ({n.code}): {n.text}" for n in diff.not_checked), *diff.notes]
    body = (
        f"<h1>{_text(first)}</h1>",
        _list(refused, "refused"),
        _list(map(str, gates)),
        _list(others),
        f'<div class="sides">{_side("before", diff.before)}{_side("after", diff.after)}</div>',
        *_tables(shown_rows(diff) if rows is None else rows),
        "<h2>How these figures were made</h2>",
        _list(notes, "soft"),
    )
    title = f"thence diff: {_text(first)}"
    return filled("diff.html", {"title": title, "body": "".join(body)})


def _text(text: str) -> str:
    return escape(printable(text))


def _list(texts: Iterable[str], kind: str = "") -> str:
    items = "".join(f"<li>{_text(text)}</li>" for text in texts)
    return f'<ul class="{kind}">{items}</ul>' if items else ""


def _side(name: str, samples: Sequence[Sample]) -> str:
    """The runs of a side with the length of their steps."""
    runs = []
    for sample in samples:
        counted = sample.steps.filter(pl.col("left_out").is_null())["total_ns"]
        mean, spread = float(counted.mean() or 0), float(counted.std() or 0)  # type: ignore[arg-type]
        inputs = ", ".join(sample.inputs)
        if sample.what == WHOLE_TRACE:
            runs.append(f"{inputs}: no steps; the whole trace takes {format_ns(mean)}")
            continue
        runs.append(
            f"{inputs}: {len(counted)} of {sample.steps.height} {sample.what}, {format_ns(mean)} each "
            f"(standard deviation {format_ns(spread)})"
        )
    return f"<div><b>{name}</b>{_list(runs)}</div>"


def _tables(rows: pl.DataFrame) -> Iterator[str]:
    titled = rows.with_columns(title=pl.col("by").replace(_TITLES))
    for title in titled["title"].unique(maintain_order=True):
        ours = titled.filter(pl.col("title") == title)
        yield f"<h2>{_text(title if title in _TITLES.values() else f'By {title}')}</h2>"
        yield scrolled(_table(ours.head(_MAX_ROWS)), f"Differences: {printable(title)}")
        if ours.height > _MAX_ROWS:
            yield f'<p class="soft">{ours.height - _MAX_ROWS:,} more rows of smaller differences</p>'


def _table(rows: pl.DataFrame) -> str:
    longest = max(1.0, *(float(rows[c].max() or 0) for c in ("before_ns", "after_ns")))  # type: ignore[arg-type]
    limits = [abs(ns) for c in ("low_ns", "high_ns") for ns in rows[c].drop_nulls().head(50)]
    widest = max(1.0, *limits) if limits else 1.0
    titles = (
        ("name", "text"), ("before", ""), ("after", ""), ("before and after as bars", "unseen"), ("change", ""),
        ("95 % interval", ""), ("interval drawn", "unseen"), ("verdict", "text verdict"), ("calls per step", ""),
    )  # fmt: skip
    head = "".join(
        f'<th scope="col"><span class="unseen">{title}</span></th>'
        if kind == "unseen"
        else f'<th scope="col" class="{kind}">{title}</th>'
        for title, kind in titles
    )
    body = "".join(_row(row, longest, widest) for row in rows.iter_rows(named=True))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _row(row: Mapping[str, Any], longest: float, widest: float) -> str:
    whole = row["name"] == "all"
    name = row["by"] if whole else row["row"]
    full = escape(printable(row["name"]), quote=True)[:2000]
    bars = "".join(
        f'<i class="{kind}" style="width:{100 * row[column] / longest:.1f}%"></i>'
        for kind, column in (("b", "before_ns"), ("a", "after_ns"))
    )
    return (
        f'<tr><td class="text" title="{full}">{_text(name)}</td><td>{format_ns(row["before_ns"])}</td>'
        f'<td>{format_ns(row["after_ns"])}</td><td><div class="bars">{bars}</div></td>'
        f'<td class="{row["code"]}">{row["change"]}</td><td>{row["interval"]}</td>'
        f'<td class="{row["code"]}">{_whisker(row, widest)}</td>'
        f'<td class="text verdict {row["code"]}">{row["verdict"]}</td><td class="soft">{row["calls"]}</td></tr>'
    )


def _whisker(row: Mapping[str, Any], widest: float) -> str:
    """The interval as a line in an SVG with zero in the middle."""
    if row["low_ns"] is None:
        return ""

    def place(ns: float) -> float:
        return 75 + 72 * max(-1.0, min(1.0, ns / widest))

    low, high, middle = (place(row[k]) for k in ("low_ns", "high_ns", "difference_ns"))
    return (
        '<svg viewBox="0 0 150 16" aria-hidden="true"><line class="zero" x1="75" x2="75" y1="0" y2="16"/>'
        f'<line x1="{low:.1f}" x2="{high:.1f}" y1="8" y2="8" stroke-width="2"/>'
        f'<circle cx="{middle:.1f}" cy="8" r="3" fill="currentColor"/></svg>'
    )
