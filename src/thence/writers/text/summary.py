"""A summary as tables for a terminal of 80 columns or more."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from thence.analysis.report.summary import IDLE_INSIDE, OVERLAPPED
from thence.model.kernel_names import clip
from thence.model.places import KINDS
from thence.model.shortened_names import fitted
from thence.model.thresholds import WELL_COVERED_SHARE
from thence.units import (
    format_bytes,
    format_cell,
    format_count,
    format_ns,
    format_range_ns,
    format_share,
    several,
    signed_share,
)
from thence.writers.text.frame_table import frame_table, not_shown
from thence.writers.text.merged_sentences import merged
from thence.writers.text.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import polars as pl
    from rich.console import JustifyMethod, RenderableType

    from thence.analysis.report.summary import Summary, Totals
    from thence.model.tables import Device

_OF_ACTIVITIES = {kind.name for kind in KINDS if kind.origin in ("gpu", "collectives")}
_MAX_REASONS = 10
_KINDS_WIDTH = 30
_NAME_WIDTH = 96
_BAR_WIDTH = 8
_USE = {"headroom_ns": "headroom", "tflops": "TFLOP/s", "gbps": "GB/s"}
"""Headings of the columns about use of the GPU, by their names; thence roofline shows more."""
_OF_MOST = ("headroom_ns", "tflops", "gbps")
"""Those that are shown of rows of which most of the time has a roofline: else they would mislead."""
_LAST = ("", *reversed(_USE.values()), "mean", "backward", "count", "exposed")
"""Columns that a narrow terminal leaves out, in this order: first the bars, which repeat the shares."""
_RANK_OF_USE = 10
_RANK_OF_BARS = 11
_LONGEST_PATH = 48
_MIN_NAME = 16
_MIN_FOLDED = 28
"""Characters to which names are shortened before a column is left out."""
_MIN_SEPARATE = 28
_MIN_OP_NAME = 40


def title(summary: Summary, whole: Totals | None = None) -> RenderableType:
    """The inputs and the devices.

    Args:
        whole: totals of the whole trace; None if the summary is of all that the user selected.
    """
    inputs = summary.meta.inputs
    first = inputs[0] if len(inputs[0]) <= _LONGEST_PATH else PurePath(inputs[0]).name
    text = first if len(inputs) == 1 else f"{first} and {len(inputs) - 1} more"
    formats = ", ".join(dict.fromkeys(summary.meta.formats))
    totals = whole or summary
    where = f"{several(totals.ranks, 'rank')}, {several(totals.devices, 'GPU')}{_models(summary.meta.devices)}"
    return Group(
        Text.assemble((printable(text), "bold"), (f"   {formats}", "dim"), overflow="fold"),
        *(Text(printable(text), "yellow") for text in merged(summary.meta.left_out)),
        *([Text(printable(f"selected: {summary.selection}"), "yellow")] if summary.selection and whole is None else []),
        Text(f"{where}, {several(totals.streams, 'stream')}"),
    )


def totals_line(totals: Totals | Summary, summary: Summary) -> Text:
    """Span, busy time, idle time and sum in one line.

    Args:
        totals: of the selected part, or of the whole trace.
        summary: says whether idle time is known, and exact.
    """
    at_most = "at most " if summary.soundness.work_missing else ""
    span, busy, unknown = totals.span_ns, totals.busy_ns, bool(summary.idle_unknown)
    idle = f"{at_most}{format_ns(span - busy)} ({format_share(span - busy, span)})"
    shown = {
        "span": format_ns(span),
        "busy": format_ns(busy) if unknown else f"{format_ns(busy)} ({format_share(busy, span)})",
        "idle": "unknown" if unknown else idle,
        "sum": format_ns(totals.sum_ns),
    }
    texts = (Text.assemble((f"{name} ", "dim"), (text, "bold")) for name, text in shown.items())
    return Text("  ").join(texts)


def activity_counts(summary: Totals | Summary) -> str:
    """Number and total time of the kernels, memcpys and memsets: ``576 kernels 97.1 ms, 2 memcpys 3.1 us``."""
    return ", ".join(
        f"{several(n, kind, f'{kind}s')} {format_ns(summary.kind_ns[kind])}" for kind, n in summary.counts.items() if n
    )


def details_table(summary: Summary, width: int) -> RenderableType:
    """Why single CUDA graphs could not be matched, one line per reason."""
    headings = {"text": "CUDA graphs that could not be matched", "count": "activities", "total_ns": "total"}
    return frame_table(summary.details, headings, width)


def _models(devices: Iterable[Device]) -> str:
    names = sorted({device.name for device in devices if device.name})
    memory = {device.memory_bytes for device in devices}
    if not names:
        return ""
    size = memory.pop() if len(memory) == 1 else None
    return f" ({', '.join(names)}{', ' + format_bytes(size) if size else ''})"


def row_table(
    summary: Summary, top: int, width: int, depth: int | None = None, *, each: bool = False, work: bool = False
) -> RenderableType:
    """The table of GPU time by the summary's kind of place, with a line about the rows that are not shown.

    Args:
        top: most rows.
        width: of the terminal in characters.
        depth: shows the places as a tree of this many levels; None: as rows.
        each: whether every layer of a model has a row of its own.
        work: whether to show headroom and FLOP/s, where they are known; a tree has neither.
    """
    if depth is not None:
        return _tree_table(summary, top, width, depth, each=each)
    folded = summary.folded
    if each or folded is None or not folded["layers"].count():
        return _place_table(summary, top, width, work=work)
    return _folded_table(summary, folded, top, width, work=work)


def _folded_table(summary: Summary, folded: pl.DataFrame, top: int, width: int, *, work: bool) -> RenderableType:
    """Equal layers of a model as one row, with the spread between them and the layer that differs most."""
    rows = folded.head(top)
    share = rows["share"].to_list()
    columns = [
        _Column("layers", [format_cell("layers", n) for n in rows["layers"]], 2),
        _Column("count", [format_count(n) for n in rows["count"]], 6),
        _Column("total", [format_ns(ns) for ns in rows["total_ns"]], 0),
        _Column("mean", [format_ns(ns) for ns in rows["mean_ns"]], 7),
        *_exposed(summary, rows),
        *_backward(summary, rows),
        _Column("share", [format_share(ns, summary.sum_ns) for ns in rows["total_ns"]], 1),
        _Column("", _bars(share), _RANK_OF_BARS),
        _Column("per layer", [_spread(row) for row in rows.iter_rows(named=True)], 4),
        _Column("differs most", [_differs(row) for row in rows.iter_rows(named=True)], 3),
        *(
            _Column(text, [_known(row, name) for row in rows.iter_rows(named=True)], _RANK_OF_USE)
            for text, name in _work(summary, work=work)
        ),
    ]
    names = _Names(rows["name"].to_list(), [r is not None for r in rows["reason"]])
    said = (
        f"* stands for the number of a layer; --each lists all {format_count(summary.rows.height)} "
        "rows, --depth 3 makes a tree"
    )
    return Group(_fitting_table(summary, names, columns, width), *_more(folded, top, summary), Text(said, "dim"))


def _tree_table(summary: Summary, top: int, width: int, depth: int, *, each: bool) -> RenderableType:
    """The parts of a model, each indented below the part around it, with the time of everything inside."""
    nodes = summary.tree(depth, each=each).with_row_index("number")
    # A part is not smaller than those inside of it and comes before them, so the largest make a tree, too.
    largest = nodes.sort("total_ns", "number", descending=[True, False]).head(top)
    rows = largest.sort("number")
    columns = [
        _Column("layers", [format_cell("layers", n) for n in rows["layers"]], 2),
        _Column("count", [format_count(n) for n in rows["count"]], 5),
        _Column("total", [format_ns(ns) for ns in rows["total_ns"]], 0),
        _Column("itself", [format_ns(ns) if ns else "-" for ns in rows["self_ns"]], 3),
        *_backward(summary, rows),
        _Column("share", [format_share(ns, summary.sum_ns) for ns in rows["total_ns"]], 1),
        _Column("", _bars(rows["share"].to_list()), _RANK_OF_BARS),
    ]
    levels = [2 * (level - 1) for level in rows["depth"]]
    names = _Names(rows["part"].to_list(), [not held for held in rows["attributed"]], levels)
    parts: list[RenderableType] = [_fitting_table(summary, names, columns, width)]
    if nodes.height > top:
        said = f"... {format_count(nodes.height - top)} more; --top {nodes.height} shows all"
        parts.append(Text(said, "dim"))
    return Group(*parts, Text("total is the time of a part with everything inside of it", "dim"))


class _Column(NamedTuple):
    """A column next to the names.

    Attributes:
        heading: its heading.
        cells: its texts.
        rank: columns of the lowest rank get room first.
    """

    heading: str
    cells: Sequence[RenderableType | str]
    rank: int

    @property
    def width(self) -> int:
        """Characters that it needs."""
        return max(len(self.heading), *(len(str(cell)) for cell in self.cells), 0)


class _Names(NamedTuple):
    """The names of rows.

    Attributes:
        texts: the names.
        reasons: which of them are sentences, which are not shortened.
        indents: characters before each; none if empty.
    """

    texts: Sequence[str]
    reasons: Sequence[bool]
    indents: Sequence[int] = ()


def _fitting_table(summary: Summary, names: _Names, columns: Sequence[_Column], width: int) -> RenderableType:
    """A table of names and columns; names are shortened to `_MIN_FOLDED` before a column is left out."""
    indents = names.indents or [0] * len(names.texts)
    lengths = [indent + len(text) for indent, text in zip(indents, names.texts, strict=True)]
    longest = min(max([*lengths, len(_title(summary)), _MIN_NAME]), _NAME_WIDTH)
    room, chosen, least = width, set[str](), min(longest, _MIN_FOLDED)
    for column in sorted(columns, key=lambda column: column.rank):
        if not chosen or room - column.width - 2 >= least:
            chosen.add(column.heading)
            room -= column.width + 2
    kept = [column for column in columns if column.heading in chosen]
    name_width = max(_MIN_NAME, min(room, longest))
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold", show_edge=False)
    above = _add_names(table, summary, name_width)
    for column in kept:
        justify: JustifyMethod = "left" if column.heading == "" else "right"
        table.add_column(column.heading, justify=justify, min_width=column.width, no_wrap=True)
    for number, fitting in enumerate(_fitted(names, indents, name_width)):
        table.add_row(fitting, *(column.cells[number] for column in kept))
    hidden = [column.heading for column in columns if column not in kept and column.heading]
    return Group(*above, table, *([Text(not_shown(hidden), "dim")] if hidden else []))


def _fitted(names: _Names, indents: Sequence[int], width: int) -> list[Text]:
    """The names, shortened to the width that their indent leaves."""
    shown = {
        indent: dict(zip(texts, fitted(texts, width - indent), strict=True))
        for indent in {*indents}
        for texts in ([t for t, n in zip(names.texts, indents, strict=True) if n == indent],)
    }
    return [
        Text(printable(text), "dim italic") if said else Text(" " * n + printable(shown[n][text]))
        for text, said, n in zip(names.texts, names.reasons, indents, strict=True)
    ]


def _exposed(summary: Summary, rows: pl.DataFrame) -> list[_Column]:
    """The column of exposed time, if any work overlaps."""
    if not summary.overlapped_ns:
        return []
    return [_Column("exposed", [format_ns(ns) for ns in rows["exposed_ns"]], 5)]


def _backward(summary: Summary, rows: pl.DataFrame) -> list[_Column]:
    """The column of the backward pass, if there is one."""
    if not summary.rows["backward_ns"].max():
        return []
    return [_Column("backward", [format_ns(ns) if ns else "-" for ns in rows["backward_ns"]], 5)]


def _spread(row: Mapping[str, Any]) -> str:
    """The times of the single layers of a folded row, from the least to the largest."""
    if row["layer_min_ns"] is None:
        return "-"
    return format_range_ns(row["layer_min_ns"], row["layer_max_ns"])


def _differs(row: Mapping[str, Any]) -> str:
    """The layer whose time is farthest from the median, and by how much: ``17: +34.0 %``."""
    if row["differs"] is None or row["differs_share"] is None:
        return "-"
    return f"{row['differs']}: {signed_share(row['differs_share'])}"


def _bars(shares: Sequence[float]) -> list[Text]:
    largest = max([*shares, 1e-12])
    return [Text(_bar(share / largest), "cyan") for share in shares]


def _more(rows: pl.DataFrame, top: int, summary: Summary) -> list[Text]:
    """The line about the rows that are not shown."""
    hidden = rows.height - top
    if hidden <= 0:
        return []
    rest = int(rows["total_ns"].slice(top).sum())
    share = format_share(rest, summary.sum_ns)
    more = f"... {format_count(hidden)} more, {format_ns(rest)} ({share}); --top {rows.height} shows all"
    return [Text(more, "dim")]


def _place_table(summary: Summary, top: int, width: int, *, work: bool) -> RenderableType:
    """A row for each place."""
    every = _every_column(summary, work=work)
    shown = _shown_columns(summary, every, top, width)
    used = sum(columns + 2 for columns in shown.values())
    name_width, beside = _widths(summary, top, width - used - 2)
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold", show_edge=False)
    above = _add_names(table, summary, name_width)
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
            "exposed": format_ns(row["exposed_ns"]),
            "backward": format_ns(row["backward_ns"]) if row["backward_ns"] else "-",
            "share": format_share(row["total_ns"], summary.sum_ns),
            "": Text(_bar(row["share"] / largest), "cyan"),
            **{text: _known(row, name) for text, name in _work(summary, work=work)},
        }
        # A row without a place has a reason for its name, a sentence that is not shortened.
        name = Text(printable(row["short_name"]), "dim italic") if row["reason"] else Text(printable(fitting))
        said = [Text(printable(clip(row[c] or "-", 2 * w)), "dim") for c, w in beside.items()]
        table.add_row(name, *(values[column] for column in shown), *said)
    if summary.overlapped_ns and "exposed" in shown:
        cells = [*(_overlapped(summary, column) for column in shown), *("" for _ in beside)]
        table.add_row(Text(OVERLAPPED, "dim italic"), *cells)
    if summary.idle_inside_ns is not None:
        idle = {"total": format_ns(summary.idle_inside_ns), "": ""}
        cells = [*(idle.get(column, "-") for column in shown), *("" for _ in beside)]
        table.add_row(Text(IDLE_INSIDE, "dim italic"), *cells)
    parts: list[RenderableType] = [*above, table]
    if narrow := [column for column in every if column and column not in shown]:
        parts.append(Text(not_shown(narrow), "dim"))
    return Group(*parts, *_more(summary.rows, top, summary))


def _overlapped(summary: Summary, column: str) -> str:
    return {"exposed": format_ns(summary.overlapped_ns), "": ""}.get(column, "-")


def _widths(summary: Summary, top: int, room: int) -> tuple[int, dict[str, int]]:
    """The width of the names, and of the column of op_names if rows have op_names and there is room.

    The names of rows that are not attributed to a place are long: they are folded if op_names need the room.

    Args:
        top: number of rows.
        room: width for both columns in characters.
    """
    rows = summary.rows.head(top)
    more = [] if summary.idle_inside_ns is None else [IDLE_INSIDE]
    every = [*rows["short_name"], *more, _title(summary)]
    wide = max(_MIN_NAME, min(room, _NAME_WIDTH, max(map(len, every))))
    if "op_name" not in rows.columns or rows["op_name"].count() == 0:
        return wide, {}
    longest = max(map(len, rows["op_name"].drop_nulls()))
    places = rows.filter("attributed")["short_name"]
    narrow = max(_MIN_SEPARATE, len(_title(summary)), *map(len, places))
    for name_width in (wide, narrow):
        left = room - name_width - 2
        if left >= min(longest, _MIN_OP_NAME):
            return name_width, {"op_name": min(left, longest)}
    return wide, {}


def _add_names(table: Table, summary: Summary, width: int) -> list[Text]:
    """Adds the column of names; its heading is the table's title, which stands above the table if it is wider."""
    title = _title(summary)
    above = [] if len(title) <= width else [Text(title, "bold")]
    table.add_column(summary.heading if above else title, width=width, overflow="fold")
    return above


def _title(summary: Summary) -> str:
    return f"GPU time by {summary.heading}{summary.of_steps and f' in {summary.of_steps}'}"


def _work(summary: Summary, *, work: bool) -> list[tuple[str, str]]:
    """Headings and names of the columns about use of the GPU of which something is known."""
    rows = summary.rows
    covered = bool((rows["modelled_ns"] >= WELL_COVERED_SHARE * rows["total_ns"]).any())
    return [
        (text, name) for name, text in _USE.items() if work and rows[name].count() and (covered or name not in _OF_MOST)
    ]


def _known(row: Mapping[str, Any], name: str) -> str:
    """A figure of a row; those of `_OF_MOST` only where most of its time has a roofline."""
    covered = name not in _OF_MOST or (row["modelled_ns"] or 0) >= WELL_COVERED_SHARE * row["total_ns"]
    return format_cell(name, row[name]) if covered else "-"


def _every_column(summary: Summary, *, work: bool) -> dict[str, int]:
    """The columns next to the name, with their widths."""
    by_place = summary.by not in (*_OF_ACTIVITIES, "phase")
    backward = by_place and bool(summary.rows["backward_ns"].max())
    return {
        "count": max(5, len(format_count(sum(summary.counts.values())))),
        "total": 8,
        "mean": 8,
        **({"exposed": 8} if summary.overlapped_ns else {}),
        **({"backward": 8} if backward else {}),
        "share": 7,
        "": _BAR_WIDTH,
        **dict.fromkeys((text for text, _ in _work(summary, work=work)), 8),
    }


def _shown_columns(summary: Summary, every: Mapping[str, int], top: int, width: int) -> dict[str, int]:
    """The columns that leave room for the names, or for `_MIN_FOLDED` characters of them."""
    columns = dict(every)
    rows = summary.rows.head(top)
    names = rows.filter("attributed")["short_name"]
    wanted = max(len(_title(summary)), _MIN_NAME, *map(len, names))
    needed = min(wanted, _MIN_FOLDED)
    for column in _LAST:
        if width - sum(n + 2 for n in columns.values()) < needed:
            columns.pop(column, None)
    return columns


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
        width: width of the terminal in characters.
    """
    recorded = " of the work that was recorded" if summary.soundness.work_missing else ""
    shares = [
        f"{kind} {format_share(attributed, summary.sum_ns)}" for kind, attributed in summary.attributed_ns.items()
    ]
    title = f"attributed GPU time{recorded}"
    parts: list[RenderableType] = [Text(title, "bold"), Text(flowed(shares, width))]
    reasons = summary.reasons()
    if reasons:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(max_width=_KINDS_WIDTH)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(style="dim")
        for kinds, least_ns, reason in reasons[:_MAX_REASONS]:
            share = format_share(reason.total_ns, summary.sum_ns)
            if least_ns != reason.total_ns:
                share = f"up to {share}"
            table.add_row(", ".join(kinds), share, escape(printable(str(reason))))
        parts += [Text("the rest, and why", "bold"), table]
    hidden = len(reasons) - _MAX_REASONS
    if hidden > 0:
        parts.append(Text(f"... {several(hidden, 'more reason')}; --format json holds all", "dim"))
    return Group(*parts)
