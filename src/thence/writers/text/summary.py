"""A summary as tables for a terminal of 80 columns or more."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from thence.analysis.summary import IDLE_INSIDE
from thence.model.fitted_names import fitted
from thence.model.kernel_names import clip
from thence.model.places import KINDS
from thence.units import format_bytes, format_count, format_ns, format_share, several
from thence.writers.text.frame_table import frame_table, not_shown
from thence.writers.text.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from thence.analysis.summary import Summary
    from thence.model.tables import Device

__all__ = [
    "activity_counts",
    "attribution_table",
    "details_table",
    "flowed",
    "heading",
    "row_table",
]

_OF_ACTIVITIES = {kind.name for kind in KINDS if kind.origin in ("gpu", "collectives")}
_MOST_REASONS = 8
_KINDS_WIDTH = 30
_NAME_WIDTH = 96
_BAR_WIDTH = 8
_WIDE = 100
_LONGEST_PATH = 48
_LEAST_NAME = 16
_LEAST_APART = 28
_LEAST_OP_NAME = 40


def heading(summary: Summary) -> RenderableType:
    """The inputs and their totals."""
    inputs = summary.meta.inputs
    first = inputs[0] if len(inputs[0]) <= _LONGEST_PATH else PurePath(inputs[0]).name
    title = first if len(inputs) == 1 else f"{first} and {len(inputs) - 1} more"
    formats = ", ".join(dict.fromkeys(summary.meta.formats))
    at_most = "at most " if summary.soundness.work_missing else ""
    idle = (
        f"{at_most}{format_ns(summary.idle_ns)} ({format_share(summary.idle_ns, summary.span_ns)})"
    )
    numbers = Table.grid(padding=(0, 2))
    numbers.add_row(
        *(
            Text.assemble((f"{name} ", "dim"), (value, "bold"))
            for name, value in (
                ("span", format_ns(summary.span_ns)),
                (
                    "busy",
                    f"{format_ns(summary.busy_ns)} ({format_share(summary.busy_ns, summary.span_ns)})",
                ),
                ("idle", idle),
                ("sum", format_ns(summary.sum_ns)),
            )
        )
    )
    where = f"{several(summary.ranks, 'rank')}, {several(summary.devices, 'GPU')}{_models(summary.meta.devices)}"
    return Group(
        Text.assemble((printable(title), "bold"), (f"   {formats}", "dim"), overflow="fold"),
        *(
            [Text(printable(f"selected: {summary.selection}"), "yellow")]
            if summary.selection
            else []
        ),
        Text(f"{where}, {several(summary.streams, 'stream')}"),
        Text(activity_counts(summary)),
        numbers,
    )


def activity_counts(summary: Summary) -> str:
    """Number and total time of the kernels, memcpys and memsets: ``576 kernels 97.1 ms, 2 memcpys 3.1 us``."""
    return ", ".join(
        f"{several(n, kind, f'{kind}s')} {format_ns(summary.kind_ns[kind])}"
        for kind, n in summary.counts.items()
        if n
    )


def details_table(summary: Summary, width: int) -> RenderableType:
    """Why single CUDA graphs could not be matched, one line per reason."""
    headings = {
        "text": "CUDA graphs that could not be matched",
        "count": "activities",
        "total_ns": "total",
    }
    return frame_table(summary.details, headings, width)


def _models(devices: Iterable[Device]) -> str:
    names = sorted({device.name for device in devices if device.name})
    memory = {device.memory_bytes for device in devices}
    if not names:
        return ""
    size = memory.pop() if len(memory) == 1 else None
    return f" ({', '.join(names)}{', ' + format_bytes(size) if size else ''})"


def row_table(summary: Summary, top: int, width: int) -> RenderableType:
    """The table of GPU time by the summary's kind of place, with a line about the rows that are not shown."""
    shown = _shown_columns(summary, width)
    used = sum(columns + 2 for columns in shown.values())
    name_width, beside = _widths(summary, top, width - used - 2)
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold", show_edge=False)
    table.add_column(_title(summary), width=name_width, overflow="fold")
    for column, columns in shown.items():
        justify = "left" if column == "" else "right"
        table.add_column(column, justify=justify, min_width=columns, no_wrap=True)  # type: ignore[arg-type]
    for column, columns in beside.items():
        table.add_column(column, width=columns, overflow="fold")
    largest = max([*summary.rows["share"].head(1), 1e-12])
    rows = summary.rows.head(top)
    names = fitted(rows["short_name"].to_list(), name_width)
    for row, fitting in zip(rows.iter_rows(named=True), names, strict=True):
        values: dict[str, RenderableType] = {
            "count": format_count(row["count"]),
            "total": format_ns(row["total_ns"]),
            "mean": format_ns(row["mean_ns"]),
            "backward": format_ns(row["backward_ns"]) if row["backward_ns"] else "-",
            "share": format_share(row["total_ns"], summary.sum_ns),
            "": Text(_bar(row["share"] / largest), "cyan"),
        }
        # A row without a place has a reason for its name, a sentence that is not shortened.
        name = (
            Text(printable(row["short_name"]), "dim italic")
            if row["reason"]
            else Text(printable(fitting))
        )
        said = [Text(printable(clip(row[c] or "-", 2 * w)), "dim") for c, w in beside.items()]
        table.add_row(name, *(values[column] for column in shown), *said)
    if summary.idle_inside_ns is not None:
        idle = {"total": format_ns(summary.idle_inside_ns), "": ""}
        cells = [*(idle.get(column, "-") for column in shown), *("" for _ in beside)]
        table.add_row(Text(IDLE_INSIDE, "dim italic"), *cells)
    parts: list[RenderableType] = [table]
    if narrow := [
        column for column in _shown_columns(summary, _WIDE) if column and column not in shown
    ]:
        parts.append(Text(not_shown(narrow), "dim"))
    hidden = summary.rows.height - top
    if hidden <= 0:
        return Group(*parts)
    rest = int(summary.rows["total_ns"].slice(top).sum())
    share = format_share(rest, summary.sum_ns)
    more = f"... {format_count(hidden)} more, {format_ns(rest)} ({share}); --top {summary.rows.height} shows all"
    return Group(*parts, Text(more, "dim"))


def _widths(summary: Summary, top: int, room: int) -> tuple[int, dict[str, int]]:
    """The width of the names, and of the column of op_names if rows have op_names and there is room.

    The names of rows that are not attributed to a place are long: they are folded if op_names need the room.

    Args:
        summary: the summary to show.
        top: number of rows.
        room: width for both columns in characters.
    """
    rows = summary.rows.head(top)
    idle = [] if summary.idle_inside_ns is None else [IDLE_INSIDE]
    every = [*rows["short_name"], *idle, _title(summary)]
    wide = max(_LEAST_NAME, min(room, _NAME_WIDTH, max(map(len, every))))
    if "op_name" not in rows.columns or rows["op_name"].count() == 0:
        return wide, {}
    longest = max(map(len, rows["op_name"].drop_nulls()))
    places = rows.filter("attributed")["short_name"]
    narrow = max(_LEAST_APART, len(_title(summary)), *map(len, places))
    for name_width in (wide, narrow):
        left = room - name_width - 2
        if left >= min(longest, _LEAST_OP_NAME):
            return name_width, {"op_name": min(left, longest)}
    return wide, {}


def _title(summary: Summary) -> str:
    return f"GPU time by {summary.heading}"


def _shown_columns(summary: Summary, width: int) -> dict[str, int]:
    """The columns next to the name, with their widths; a narrow terminal has fewer, to leave room for the name."""
    by_place = summary.by not in (*_OF_ACTIVITIES, "phase")
    backward = by_place and bool(summary.rows["backward_ns"].max())
    wide = width >= _WIDE
    return {
        "count": max(5, len(format_count(sum(summary.counts.values())))),
        "total": 8,
        **({"mean": 8} if wide or not backward else {}),
        **({"backward": 8} if backward else {}),
        "share": 7,
        **({"": _BAR_WIDTH} if wide else {}),
    }


def _bar(fraction: float) -> str:
    eighths = round(fraction * _BAR_WIDTH * 8)
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]


def flowed(parts: Iterable[str], width: int) -> str:
    """The parts joined with commas, in lines of at most ``width`` characters; lines break only between parts."""
    lines = [""]
    for part in parts:
        if lines[-1] and len(lines[-1]) + len(part) + 3 > width:
            lines[-1] += ","
            lines.append(part)
        else:
            lines[-1] += f", {part}" if lines[-1] else part
    return "\n".join(lines)


def attribution_table(summary: Summary, width: int) -> RenderableType:
    """The attributed share of the GPU time by kind, and each reason for unattributed time once.

    Args:
        summary: the summary to show.
        width: width of the terminal in characters.
    """
    recorded = " of the work that was recorded" if summary.soundness.work_missing else ""
    shares = [
        f"{kind} {format_share(attributed, summary.sum_ns)}"
        for kind, attributed in summary.attributed_ns.items()
    ]
    title = f"attributed GPU time{recorded}"
    parts: list[RenderableType] = [Text(title, "bold"), Text(flowed(shares, width))]
    reasons = summary.reasons()
    if reasons:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(max_width=_KINDS_WIDTH)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(style="dim")
        for kinds, least_ns, reason in reasons[:_MOST_REASONS]:
            share = format_share(reason.total_ns, summary.sum_ns)
            if least_ns != reason.total_ns:
                share = f"up to {share}"
            table.add_row(", ".join(kinds), share, escape(printable(str(reason))))
        parts += [Text("the rest, and why", "bold"), table]
    hidden = len(reasons) - _MOST_REASONS
    if hidden > 0:
        parts.append(Text(f"... {several(hidden, 'more reason')}; --format json holds all", "dim"))
    return Group(*parts)
