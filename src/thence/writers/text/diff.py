"""A comparison as rows of text, for the terminal, Markdown and the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.analysis.diff.explanation import signed_ns
from thence.model.kernel_names import clip
from thence.units import format_count, format_ns, signed_share
from thence.writers.text.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from thence.analysis.diff.answer import Diff
    from thence.analysis.diff.gate import Gate

CELLS = ("change", "interval", "calls")
"""Columns of text that `shown_rows` adds."""

_NAME = 80
_MAX_SHARE = 10
"""An interval that reaches this multiple of the time before is shown in time units instead of percent."""
_SIGNS = {"slower": "🔺", "faster": "🔻", "new": "🆕", "gone": "🗑", "unknown": "❔", "same": "✓"}
_SPECIAL = str.maketrans(
    {c: f"\\{c}" for c in "\\`*_{}[]()#+!|~$"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;", "@": "&#64;"}
)


def shown_rows(diff: Diff, depth: int | None = None, *, each: bool = False) -> pl.DataFrame:
    """The rows of a comparison, with the columns ``row``, `CELLS` and ``verdict`` as readable text.

    Column ``code`` is the verdict without the number of further runs.

    Args:
        depth: makes the rows by module and label a tree of this many levels; None: rows of every kind.
        each: whether every layer of a model has a row of its own.
    """
    rows = diff.rows if each else diff.shown_rows
    if depth is not None:
        rows = diff.tree(depth, each=each)
    cells = [
        (_name(row), _change(row), _interval(row), _calls(row), _verdict(row)) for row in rows.iter_rows(named=True)
    ]
    schema = dict.fromkeys(("row", *CELLS, "shown"), pl.String)
    texts = pl.DataFrame(cells, schema=schema, orient="row")
    frame = rows.with_columns(code="verdict").hstack(texts)
    return frame.with_columns(verdict="shown").drop("shown")


def _name(row: Mapping[str, Any]) -> str:
    if row["name"] == "all":
        return ""
    return "  " * (row["level"] - 1) + row["part"] if "part" in row else str(row["short_name"])


def _change(row: Mapping[str, Any]) -> str:
    share = row["difference_share"]
    relative = "" if share is None else f" ({signed_share(share)})"
    return f"{signed_ns(row['difference_ns'])}{relative}"


def _interval(row: Mapping[str, Any]) -> str:
    # A time cannot fall by more than all of it: where nothing is decided, such an interval says only that the runs vary
    # too much.
    if row["low_ns"] is None or (row["verdict"] == "unknown" and row["low_ns"] < -row["before_ns"]):
        return "not known"
    if row["before_ns"] and row["verdict"] != "gone":
        low, high = (max(row[key] / row["before_ns"], -1.0) for key in ("low_ns", "high_ns"))
        if max(abs(low), abs(high)) < _MAX_SHARE:
            return f"{100 * low:+.1f} to {100 * high:+.1f} %"
    return f"{signed_ns(row['low_ns'])} to {signed_ns(row['high_ns'])}"


def _calls(row: Mapping[str, Any]) -> str:
    before, after = row["before_count"], row["after_count"]
    if not before and not after:
        return ""
    same = abs(after - before) < 0.005
    return f"{before:.4g}" if same else f"{before:.4g} -> {after:.4g}"


def _verdict(row: Mapping[str, Any]) -> str:
    more = row["more_runs"]
    return row["verdict"] if more is None else f"{row['verdict']}, {more:,}+ more runs"


def markdown(diff: Diff, gates: Sequence[Gate] = (), top: int | None = None, rows: pl.DataFrame | None = None) -> str:
    """A comparison as Markdown for a comment on a pull request.

    Names are escaped, so that nothing in them is a link or HTML.

    Args:
        top: most rows to show; None for all.
        rows: as `shown_rows` returns them; None for its defaults.
    """
    first, *others = diff.explanation
    lines = [f"### {_escaped(first)}", ""]
    lines += [
        f"> **Not comparable ({refusal.code}), compared anyway:** {_escaped(refusal.text)}" for refusal in diff.refusals
    ]
    lines += [""] if diff.refusals else []
    lines += [
        f"- {'❌' if gate.verdict == 'exceeded' else '⚠️' if gate.verdict != 'within' else '✅'} {_escaped(str(gate))}"
        for gate in gates
    ]
    lines += [f"- {_escaped(text)}" for text in others]
    lines += ["", *_table(shown_rows(diff) if rows is None else rows, top), ""]
    lines += [
        "<details><summary>How these figures were made</summary>",
        "",
        *(f"- {_escaped(note)}" for note in _all_notes(diff)),
        "",
        "</details>",
        "",
    ]
    return "\n".join(lines)


def _all_notes(diff: Diff) -> Iterable[str]:
    yield from (f"not checked ({entry.code}): {entry.text}" for entry in diff.not_checked)
    yield from diff.notes


def _table(rows: pl.DataFrame, top: int | None) -> list[str]:
    # A comment on a pull request lists what changed and counts the rest.
    quiet = rows.filter(pl.col("by").is_in([*_WHOLE]) | (rows["code"] != "same"))
    shown = quiet if top is None else quiet.head(top)
    lines = ["| | by | name | before | after | change | 95 % interval | verdict |", "|---|---|---|--:|--:|--:|---|---|"]
    for row, verdict in zip(shown.iter_rows(named=True), shown["verdict"], strict=True):
        sign = _SIGNS[verdict.partition(",")[0]]
        name = _escaped(clip(row["row"], _NAME))
        lines.append(
            f"| {sign} | {row['by']} | {name} | {format_ns(row['before_ns'])} | {format_ns(row['after_ns'])} | "
            f"{row['change']} | {row['interval']} | {verdict} |"
        )
    hidden = rows.height - shown.height
    if hidden:
        lines += ["", f"{format_count(hidden)} more rows, the same or of smaller differences, are not shown."]
    return lines


_WHOLE = ("busy", "idle", "communication")


def _escaped(text: str) -> str:
    """The text, escaped so that nothing in it is Markdown, HTML or a mention."""
    return printable(text).translate(_SPECIAL)
