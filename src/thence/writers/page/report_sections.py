"""The sections of the HTML report. `SECTIONS` lists their functions in the order on the page.

To add a section, add a function that takes the report and returns a `Section` with HTML, figures and tables.
"""

from __future__ import annotations

from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any

from thence.model.kernel_names import short_names
from thence.units import format_count, format_share
from thence.writers.page import plots, wait_plots
from thence.writers.page.report_tables import (
    COMPILE_FIELDS,
    IDLE_CAUSE_FIELDS,
    IDLE_FIELDS,
    IDLE_LATE_FIELDS,
    IDLE_WAIT_FIELDS,
    LAST_ARRIVAL_FIELDS,
    MOST_NAME,
    MOST_ROWS,
    PROGRAM_FIELDS,
    SIZE_FIELDS,
    SPREAD_FIELDS,
    STREAM_FIELDS,
    folded_data,
    frame_data,
    summary_data,
    tree_data,
)
from thence.writers.page.sections import Section, absent, chart, notes, scrolled, table
from thence.writers.text.merged_sentences import merged
from thence.writers.text.printable import printable
from thence.writers.text.ranks import with_device_names

if TYPE_CHECKING:
    from collections.abc import Callable

    import plotly.graph_objects as go
    import polars as pl

    from thence.analysis.report import Report
    from thence.analysis.summary import Summary

MOST_WARNINGS = 50
"""Most warnings that a page lists; of further warnings it shows only the number."""


_MAX_TREE = 20_000
"""Most rows of a kind of place from which the page makes a tree: a table shows 500 nodes of it anyway."""


def _timeline(report: Report) -> Section:
    return Section("timeline", "Timeline", '<div id="timeline-place"></div>' + notes(report.timeline.notes))


def _time(report: Report) -> Section:
    """A tab with GPU time for each kind of place that any activity has.

    The section on attribution also lists the other kinds.
    """
    divisions = [by for by, s in report.summaries.items() if s.rows["attributed"].any()]
    divisions.sort(key=lambda by: by != report.default_kind)
    titles = {by: _tab_title(report.summaries[by]) for by in divisions}
    buttons = "".join(
        f'<button type="button" role="tab" id="tab-{by}" aria-controls="panel-{by}">{escape(title)}</button>'
        for by, title in titles.items()
    )
    tables: dict[str, dict[str, Any]] = {}
    panels = ""
    for by, title in titles.items():
        parts = ""
        for number, (form, data) in enumerate(_tables_of(report.summaries[by]).items()):
            name = f"by-{by}" if not number else f"by-{by}-{number}"
            tables[name] = data
            place = table(name, f"GPU time by {title}{f': {form}' if form else ''}")
            more = f"<details><summary>{escape(form)}</summary>{place}</details>"
            parts += more if form else place
        panels += f'<div role="tabpanel" id="panel-{by}" aria-labelledby="tab-{by}">{parts}</div>'
    tabs = f'<div class="tabs" role="tablist" aria-label="GPU time by">{buttons}</div>'
    return Section("time", "GPU time", notes(_of_steps(report)) + tabs + panels, tables=tables)


def _of_steps(report: Report) -> list[str]:
    """A sentence that a section is about the typical steps, in a list; empty if it is not."""
    steps, of_steps = report.headline.steps, report.summary.of_steps
    if not of_steps or steps is None:
        return []
    return [f"in {of_steps} ({steps.basis})"]


def _tables_of(summary: Summary) -> dict[str, dict[str, Any]]:
    """The tables of a kind of place: one, or for the parts of a model, folded layers, a tree, and every layer."""
    folded = summary.folded
    if folded is None:
        return {"": summary_data(summary)}
    tree = {"As a tree": tree_data(summary)} if summary.rows.height <= _MAX_TREE else {}
    if not folded["layers"].count():
        return {"": summary_data(summary), **tree}
    rows = format_count(summary.rows.height)
    return {"": folded_data(summary, folded), **tree, f"Every layer: {rows} rows": summary_data(summary)}


def _tab_title(summary: Summary) -> str:
    """The title of a tab: capitalized, except for a framework's identifier such as op_name."""
    title = summary.heading
    return title if "_" in title else title[0].upper() + title[1:]


def _idle(report: Report) -> Section:
    """Idle time by cause and by place, idle time after calls that emptied the queue, and waits for the last rank."""
    found = report.idle
    tables = {
        "idle-causes": frame_data(found.causes, IDLE_CAUSE_FIELDS),
        "idle": frame_data(found.shown_rows, IDLE_FIELDS),
    }
    html = notes(_of_steps(report)) + table("idle-causes", "idle time by cause")
    html += table("idle", "idle time by place")
    if not found.waits.is_empty():
        tables["idle-waits"] = frame_data(found.waits, IDLE_WAIT_FIELDS)
        title = "After calls that emptied the queue"
        html += f"<h3>{title}</h3>{table('idle-waits', title)}"
    if not found.late.is_empty():
        tables["idle-late"] = frame_data(found.late, IDLE_LATE_FIELDS)
        title = "Busy, but waiting for the last rank"
        html += f"<h3>{title}</h3>{table('idle-late', title)}"
    return Section("idle", "Idle time", html + notes(found.notes), tables=tables)


def _flame(report: Report) -> Section:
    html = notes(_of_steps(report)) + '<div id="flame-place"></div>'
    return Section("flame", f"Flame graph by {report.flame.by}", html)


def _streams(report: Report) -> Section:
    figures = {"groups": plots.groups_figure(report.streams)}
    charts = chart("groups", "Bars: time of each stream by group of kernels", "By group of kernels")
    if any(device.busy_streams_ns for device in report.streams.concurrency):
        figures["concurrency"] = plots.concurrency_figure(report.streams)
        charts += chart("concurrency", "Bars: how long one, two, or more streams were busy", "Streams busy at once")
    return Section(
        "streams",
        "Streams and concurrency",
        f'<div class="pair">{charts}</div>' + table("streams", "streams") + notes(report.streams.notes),
        figures,
        {"streams": frame_data(report.streams.streams, STREAM_FIELDS)},
    )


def _collectives(report: Report) -> Section:
    collectives = report.collectives.result
    if collectives is None:
        return _missing("collectives", "Collectives", report.collectives.reason, report)
    figures: dict[str, go.Figure] = {"bandwidth": plots.bandwidth_figure(collectives)}
    charts = ""
    if collectives.instances["wait_ns"].count():
        figures |= {
            "waits": plots.waits_figure(collectives),
            "wait-histogram": wait_plots.wait_histogram_figure(collectives),
            "wait-sizes": wait_plots.wait_sizes_figure(collectives),
            "last-arrivals": plots.last_arrivals_figure(collectives),
        }
        last = "Last arrivals"
        says = "Bars: how long the others waited when a device arrived last; the table has the numbers"
        charts += chart("last-arrivals", says, last)
        charts += f'<div class="figure"><h3>By device</h3>{table("last-arrivals", last)}</div>'
        for name, title in (
            ("waits", "Wait for the last device"),
            ("wait-histogram", "How many waited for how long"),
            ("wait-sizes", "Wait against message size"),
        ):
            charts += chart(name, f"{title}; the table by size has means and maxima", title)
    title = "Bus bandwidth against message size"
    charts += chart("bandwidth", f"{title}; the table by size has the numbers", title)
    texts = [
        *filter(None, [collectives.verdict]),
        plots.bandwidth_says(collectives),
        collectives.statement,
        *collectives.notes,
        *filter(None, [collectives.clocks]),
    ]
    return Section(
        "collectives",
        "Collectives",
        f'<div class="pair">{charts}</div>' + table("sizes", "collectives by size") + notes(texts),
        figures,
        {
            "sizes": frame_data(collectives.by_size, SIZE_FIELDS),
            "last-arrivals": frame_data(with_device_names(collectives.last_arrivals), LAST_ARRIVAL_FIELDS),
        },
    )


def _programs(report: Report) -> Section:
    title = "XLA programs"
    programs = report.programs.result
    if programs is None:
        return _missing("programs", title, report.programs.reason, report)
    section = _chart_and_table(
        "programs",
        title,
        "Bars: busy and idle time of each program; the table has the numbers",
        plots.programs_figure(programs),
        frame_data(programs.programs, PROGRAM_FIELDS),
    )
    return replace(section, html=section.html + notes([programs.phases.statement]))


def _compilation(report: Report) -> Section:
    title = "Compile time"
    compilation = report.compilation.result
    if compilation is None:
        return _missing("compile", title, report.compilation.reason, report)
    return _chart_and_table(
        "compile",
        title,
        "Bars: compile time by phase; the table has the numbers",
        plots.compile_figure(compilation),
        frame_data(compilation.phases, COMPILE_FIELDS),
    )


def _spread(report: Report) -> Section:
    return _chart_and_table(
        "spread",
        "Spread of the same computation",
        "Points: spread of each computation against its mean duration; the table has the numbers",
        plots.spread_figure(report.spread),
        _spread_data(report.spread),
    )


def _missing(name: str, title: str, reason: str, report: Report) -> Section:
    """A section that gives the reason why the trace has no data for it."""
    return Section(name, title, absent(reason, report.summary.meta.inputs))


def _chart_and_table(name: str, title: str, says: str, figure: go.Figure, data: dict[str, Any]) -> Section:
    """A section of one figure and one table, which have the section's name.

    Args:
        name: name of the section, the figure and the table.
        title: heading of the section, and accessible name of the table.
        says: description of the figure for assistive technology.
        figure: a figure of `thence.writers.page.plots`.
        data: the table, as `thence.writers.page.report_tables.frame_data` returns it.
    """
    html = chart(name, says) + table(name, title)
    return Section(name, title, html, {name: figure}, {name: data})


def _spread_data(spread: pl.DataFrame) -> dict[str, Any]:
    """The table of computations that ran more than once, with short names, by decreasing total time."""
    repeated = spread.filter(spread["count"] > 1)
    rows = repeated.sort(repeated["mean_ns"] * repeated["count"], descending=True).head(MOST_ROWS + 1)
    names = rows["operation"].to_list()
    short = short_names(name for name in names if name is not None)
    shown = rows.with_columns(rows["operation"].replace(short))
    named = rows["program"].count() > 0
    data = frame_data(shown, [f for f in SPREAD_FIELDS if named or f.column != "program"])
    return data | {"full": [(name or "")[:MOST_NAME] for name in names[:MOST_ROWS]]}


def _attribution(report: Report) -> Section:
    summary = report.summary
    shares = "".join(
        f'<tr><th scope="row">{escape(kind)}</th><td>{format_share(ns, summary.sum_ns)}</td></tr>'
        for kind, ns in summary.attributed_ns.items()
    )
    reasons = "".join(
        f'<tr><th scope="row">{escape(", ".join(kinds))}</th><td>{format_share(reason.total_ns, summary.sum_ns)}'
        f'</td><td class="text">{escape(printable(str(reason)))}</td></tr>'
        for kinds, _, reason in summary.reasons()
    )
    html = (
        '<table class="plain"><thead><tr><th scope="col">kind of place</th><th scope="col">attributed</th></tr>'
        f"</thead><tbody>{shares}</tbody></table>"
    )
    if reasons:
        why = (
            '<table class="plain"><thead><tr><th scope="col">the rest of</th><th scope="col">at most</th>'
            f'<th scope="col" class="text">why</th></tr></thead><tbody>{reasons}</tbody></table>'
        )
        html += scrolled(why, "Why a part is not attributed")
    warnings = merged(summary.meta.warnings)
    shown = [*warnings[:MOST_WARNINGS]]
    if len(warnings) > MOST_WARNINGS:
        shown.append(f"{format_count(len(warnings) - MOST_WARNINGS)} more warnings")
    listed = notes(shown, "warnings") or '<p class="absent">No warnings.</p>'
    return Section(
        "attribution", "Attribution and warnings", f"{html}{notes(merged(summary.notes))}<h3>Warnings</h3>{listed}"
    )


SECTIONS: tuple[Callable[[Report], Section], ...] = (
    _timeline,
    _time,
    _idle,
    _flame,
    _streams,
    _collectives,
    _programs,
    _compilation,
    _spread,
    _attribution,
)
