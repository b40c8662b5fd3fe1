"""The history of a program as one self-contained HTML page, one line a place: no server, no network and no script.

Names come from traces and may contain any characters; on the page all names are escaped text.
"""

from __future__ import annotations

from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from thence.analysis.history.answer import started_text
from thence.units import format_ns, signed_share
from thence.writers.page.template import filled, notes, scrolled
from thence.writers.text.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import polars as pl

    from thence.analysis.history.answer import History

_WIDTH, _HEIGHT, _EDGE = 360, 34, 4
"""Of a chart, in its own units, and the free space at its edges."""
_MIN_SPREAD = 0.05
"""A chart shows at least this share of its largest time, so that small noise looks small."""
_ABOUT = (
    "Time per step and GPU of each run, the oldest on the left. Every chart has a scale of its own; lines are levels, "
    "and the begin of a level is marked."
)
_MAX_MARKS = 200
"""Runs up to which each is a dot."""


def history_html(history: History) -> str:
    """The page of a history."""
    head, *more = history.explanation
    begins: dict[tuple[str, str], list[int]] = {}
    for by, name, run in history.changes.select("by", "name", "run").iter_rows():
        begins.setdefault((by, name), []).append(run)
    body = (
        f"<h1>{_text(head[0].upper() + head[1:])}</h1>",
        notes([*more, *map(str, history.gates)]),
        "<h2>Step and places</h2>",
        f'<p class="soft">{_ABOUT}</p>',
        scrolled(_places(history.places, begins, history.runs["name"].to_list()), "Step and places"),
        "<h2>Runs</h2>",
        scrolled(_runs(history.runs), "Runs"),
        "<h2>How these figures were made</h2>",
        notes(history.all_notes(), "soft"),
    )
    return filled("history.html", {"title": f"thence history: {_text(head)}", "body": "".join(body)})


def _text(text: str) -> str:
    return escape(printable(text))


def _table(titles: Sequence[tuple[str, str]], rows: Iterator[str]) -> str:
    head = "".join(f'<th scope="col" class="{kind}">{title}</th>' for title, kind in titles)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _places(places: pl.DataFrame, begins: Mapping[tuple[str, str], list[int]], names: Sequence[str]) -> str:
    titles = (
        ("by", "text kind"), ("name", "text"), ("runs", "chart"), ("first level", ""), ("newest level", ""),
        ("change", ""), ("since", "text"),
    )  # fmt: skip
    return _table(titles, (_place(row, sorted(begins.get((row["by"], row["name"]), ())), names) for row in _of(places)))


def _of(rows: pl.DataFrame) -> Iterator[dict[str, Any]]:
    return rows.iter_rows(named=True)


def _place(row: Mapping[str, Any], begins: Sequence[int], names: Sequence[str]) -> str:
    verdict = row["verdict"] or "same"
    change = "" if row["change_share"] is None else signed_share(row["change_share"])
    since = "" if row["since"] is None else f"run {row['since_run']}: {row['since']}"
    return (
        f'<tr><td class="text kind soft">{_text(row["by"])}</td>'
        f'<td class="text" title="{escape(printable(row["name"]), quote=True)[:2000]}">{_text(row["short_name"])}</td>'
        f'<td class="chart">{_chart(row["ns"], begins, names)}</td><td>{format_ns(row["first_ns"])}</td>'
        f'<td>{format_ns(row["newest_ns"])}</td><td class="{verdict}">{change}</td>'
        f'<td class="text {verdict}">{_text(since)}</td></tr>'
    )


def _chart(values: Sequence[float], begins: Sequence[int], names: Sequence[str]) -> str:
    """The times of the runs as dots, and the mean of each level as a line, in an SVG."""
    high = max(values)
    low = min(*values, high * (1 - _MIN_SPREAD)) if high > 0 else 0.0
    span = max(high - low, 1.0)

    def across(run: float) -> float:
        return _EDGE + (_WIDTH - 2 * _EDGE) * run / max(len(values) - 1, 1)

    def down(ns: float) -> float:
        return _HEIGHT - _EDGE - (_HEIGHT - 2 * _EDGE) * (ns - low) / span

    edges = [0, *(run - 1 for run in begins), len(values)]
    parts = []
    for first, end in pairwise(edges):
        level = down(sum(values[first:end]) / (end - first))
        left, right = across(max(first - 0.5, 0)), across(min(end - 0.5, len(values) - 1))
        parts.append(f'<line class="level" x1="{left:.1f}" x2="{right:.1f}" y1="{level:.1f}" y2="{level:.1f}"/>')
    for run in begins:
        place = across(run - 1.5)
        parts.append(f'<line class="begin" x1="{place:.1f}" x2="{place:.1f}" y1="0" y2="{_HEIGHT}"/>')
    shown = enumerate(values) if len(values) <= _MAX_MARKS else ()
    parts += [
        f'<circle cx="{across(run):.1f}" cy="{down(ns):.1f}" r="2"><title>{_text(names[run])}: {format_ns(ns)}</title>'
        "</circle>"
        for run, ns in shown
    ]
    if len(values) > _MAX_MARKS:
        points = " ".join(f"{across(run):.1f},{down(ns):.1f}" for run, ns in enumerate(values))
        parts.append(f'<polyline points="{points}"/>')
    about = f"{len(values)} runs, from {format_ns(min(values))} to {format_ns(high)}"
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{about}">{"".join(parts)}</svg>'


def _runs(runs: pl.DataFrame) -> str:
    titles = (
        ("run", ""), ("started (UTC)", "text"), ("name", "text"), ("steps", ""), ("step", ""), ("busy", ""),
        ("idle", ""), ("level", ""),
    )  # fmt: skip
    rows = runs.with_columns(started=started_text(runs)).reverse()
    return _table(
        titles,
        (
            f'<tr><td>{row["run"]}</td><td class="text">{row["started"]}</td><td class="text">{_text(row["name"])}</td>'
            f"<td>{row['steps']}</td><td>{format_ns(row['step_ns'])}</td><td>{format_ns(row['busy_ns'])}</td>"
            f"<td>{format_ns(row['idle_ns'])}</td><td>{row['level']}</td></tr>"
            for row in _of(rows)
        ),
    )
