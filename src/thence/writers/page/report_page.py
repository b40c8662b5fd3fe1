"""A report as one HTML page that needs nothing else: no server, no network, no other file.

Names come from traces and may hold anything. In the page they are either escaped text or JSON in which
every character that could end the script element is escaped; its script shows them as text alone.
"""

from __future__ import annotations

import json
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any

from thence.analysis.timeline_overview import CLASSES
from thence.model.kernel_names import short_names
from thence.units import format_count, format_ns, format_share
from thence.writers.page import plots, wait_plots
from thence.writers.page.figures import new_figure
from thence.writers.page.flame_page import flame_html
from thence.writers.page.report_tables import (
    COMPILE_FIELDS,
    IDLE_CAUSE_FIELDS,
    IDLE_FIELDS,
    IDLE_LATE_FIELDS,
    IDLE_WAIT_FIELDS,
    MOST_NAME,
    MOST_ROWS,
    PROGRAM_FIELDS,
    SIZE_FIELDS,
    SPREAD_FIELDS,
    STRAGGLER_FIELDS,
    STREAM_FIELDS,
    Field,
    frame_data,
    summary_data,
)
from thence.writers.page.timeline_figure import (
    CLASS_COLOURS,
    CLASS_SCALE,
    lane_names,
    timeline_frame,
)
from thence.writers.text.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    import plotly.graph_objects as go
    import polars as pl

    from thence.analysis.compilation import Compilation
    from thence.analysis.programs import Programs
    from thence.analysis.report import Part, Report
    from thence.analysis.summary import Summary
    from thence.analysis.timeline_overview import Overview

__all__ = ["report_html"]

_FLAME_NODES = 4000
_MOST_WARNINGS = 50
_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def report_html(report: Report) -> str:
    """The page of a report.

    Raises:
        MissingRequirement: Plotly is not installed.
    """
    figures = {name: figure.to_plotly_json() for name, figure in _figures(report).items()}
    data = {
        "figures": figures,
        "tables": _tables(report),
        "timeline": _timeline(report.overview),
    }
    encoded = _json(data).translate(_ESCAPES)
    title = f"thence: {_inputs(report)}"
    parts = {
        "title": escape(title),
        "plotly": _plotly(),
        "body": _body(report),
        "flame": escape(flame_html(report.flame.largest(_FLAME_NODES))),
        "data": encoded,
    }
    template = resources.files("thence.writers.page") / "templates" / "report.html"
    pieces = template.read_text("utf-8").split("{{")
    filled = [pieces[0]]
    for piece in pieces[1:]:
        name, _, after = piece.partition("}}")
        filled += [parts[name], after]
    return "".join(filled)


def _json(data: Any) -> str:
    from plotly.utils import PlotlyJSONEncoder

    return json.dumps(data, cls=PlotlyJSONEncoder, separators=(",", ":"))


def _plotly() -> str:
    new_figure()  # says what to do where Plotly is missing
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs()).replace("</script", "<\\/script")


def _inputs(report: Report) -> str:
    return ", ".join(printable(name) for name in report.summary.meta.inputs)


def _figures(report: Report) -> dict[str, go.Figure]:
    figures = {
        "timeline": timeline_frame(report.overview),
        "groups": plots.groups_figure(report.streams),
        "spread": plots.spread_figure(report.spread),
    }
    if any(device.busy_streams_ns for device in report.streams.concurrency):
        figures["concurrency"] = plots.concurrency_figure(report.streams)
    if (collectives := report.collectives.result) is not None:
        figures["bandwidth"] = plots.bandwidth_figure(collectives)
        if collectives.instances["wait_ns"].count():
            figures["waits"] = plots.waits_figure(collectives)
            figures["wait-histogram"] = wait_plots.wait_histogram_figure(collectives)
            figures["wait-sizes"] = wait_plots.wait_sizes_figure(collectives)
            figures["stragglers"] = plots.stragglers_figure(collectives)
    if (programs := report.programs.result) is not None:
        figures["programs"] = plots.programs_figure(programs)
    if (compilation := report.compilation.result) is not None:
        figures["compile"] = plots.compile_figure(compilation)
    return figures


def _tables(report: Report) -> dict[str, Any]:
    tables = {f"by-{by}": summary_data(report.summaries[by]) for by in _divisions(report)}
    tables["streams"] = frame_data(report.streams.streams, STREAM_FIELDS)
    tables["spread"] = _spread(report.spread)
    frames: tuple[tuple[str, pl.DataFrame | None, tuple[Field, ...]], ...] = (
        ("sizes", _of(report.collectives, "by_size"), SIZE_FIELDS),
        ("stragglers", _of(report.collectives, "stragglers"), STRAGGLER_FIELDS),
        ("programs", _of(report.programs, "programs"), PROGRAM_FIELDS),
        ("compile", _of(report.compilation, "phases"), COMPILE_FIELDS),
    )
    idle = (
        ("idle-causes", report.idle.causes, IDLE_CAUSE_FIELDS),
        ("idle", report.idle.rows, IDLE_FIELDS),
        ("idle-waits", report.idle.waits, IDLE_WAIT_FIELDS),
        ("idle-late", report.idle.late, IDLE_LATE_FIELDS),
    )
    always = ("idle-causes", "idle")
    tables |= {n: frame_data(f, fields) for n, f, fields in idle if n in always or not f.is_empty()}
    tables |= {name: frame_data(f, fields) for name, f, fields in frames if f is not None}
    return tables


def _spread(spread: pl.DataFrame) -> dict[str, Any]:
    """Computations that ran more than once, most time first, with short names."""
    repeated = spread.filter(spread["count"] > 1)
    rows = repeated.sort(repeated["mean_ns"] * repeated["count"], descending=True).head(
        MOST_ROWS + 1
    )
    names = rows["operation"].to_list()
    short = short_names(name for name in names if name is not None)
    shown = rows.with_columns(rows["operation"].replace(short))
    named = rows["program"].count() > 0
    data = frame_data(shown, [f for f in SPREAD_FIELDS if named or f.column != "program"])
    return data | {"full": [(name or "")[:MOST_NAME] for name in names[:MOST_ROWS]]}


def _of(part: Part[Any], name: str) -> pl.DataFrame | None:
    return None if part.result is None else getattr(part.result, name)


def _divisions(report: Report) -> list[str]:
    """The kinds for which any activity has a place; the section on attribution lists the others."""
    return [by for by, summary in report.summaries.items() if summary.rows["attributed"].any()]


def _timeline(overview: Overview) -> dict[str, Any]:
    return {
        "span": overview.span_ns,
        "bin": overview.bin_ns,
        "count": overview.bin_count,
        "lanes": lane_names(overview),
        "classes": list(CLASSES),
        "colours": list(CLASS_COLOURS.values()),
        "scale": CLASS_SCALE,
        "names": [printable(name) for name in overview.names],
        "bins": overview.bins.to_dict(as_series=False),
        "slices": overview.slices.to_dict(as_series=False),
    }


# ---- The body: everything that is no table and no figure, as escaped HTML


def _body(report: Report) -> str:
    sections = (
        _section("timeline", "Timeline", _chart("timeline") + _notes(report.overview.notes)),
        _section("time", "GPU time", _tabs(report)),
        _section("idle", "Idle time", _idle(report)),
        _section("flame", f"Flame graph by {report.flame.by}", '<div id="flame-place"></div>'),
        _section("streams", "Streams and concurrency", _streams(report)),
        _section("collectives", "Collectives", _collectives(report)),
        _section("programs", "XLA programs", _xla(report, report.programs, "programs")),
        _section("compile", "Compile time", _xla(report, report.compilation, "compile")),
        _section("spread", "Spread of the same computation", _chart("spread") + _table("spread")),
        _section("attribution", "Attribution and warnings", _attribution(report)),
    )
    return (
        _header(report)
        + _unsound(report)
        + _strip(report)
        + "<main>"
        + "".join(sections)
        + "</main>"
    )


def _section(name: str, title: str, content: str) -> str:
    return f'<section id="{name}"><h2>{escape(title)}</h2>{content}</section>'


def _chart(name: str, title: str = "") -> str:
    heading = f"<h3>{escape(title)}</h3>" if title else ""
    return f'<div class="figure">{heading}<div class="chart" data-figure="{name}"></div></div>'


def _table(name: str) -> str:
    return f'<div class="table" data-table="{name}"></div>'


def _notes(notes: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(printable(note))}</li>" for note in notes)
    return f'<ul class="notes">{items}</ul>' if items else ""


def _absent(reason: str, inputs: Iterable[str]) -> str:
    sentence = reason.removeprefix(", ".join(inputs) + ": ")
    if sentence.startswith(("holds ", "describes ")):
        sentence = f"The trace {sentence}"
    return f'<p class="absent">{escape(printable(sentence))}.</p>'


def _header(report: Report) -> str:
    summary = report.summary
    models = sorted({device.name for device in summary.meta.devices if device.name})
    facts = (
        ", ".join(dict.fromkeys(summary.meta.formats)),
        f"{format_count(summary.ranks)} rank" + ("s" if summary.ranks != 1 else ""),
        f"{format_count(summary.devices)} GPU" + ("s" if summary.devices != 1 else ""),
        *models,
        ", ".join(f"{format_count(n)} {kind}s" for kind, n in summary.counts.items() if n),
    )
    inputs = escape(_inputs(report))
    facts_html = " · ".join(escape(printable(fact)) for fact in facts if fact)
    return (
        '<header><div class="titles"><h1>Where the GPU time came from</h1>'
        f'<p class="inputs" title="{inputs}">{inputs}</p>'
        f'<p class="facts">{facts_html}</p></div><div class="tools"><button id="theme" type="button">Dark</button>'
        '<button id="print" type="button">Print</button></div></header>'
    )


def _unsound(report: Report) -> str:
    """What makes the trace unsound, above all figures; nothing for a sound one."""
    soundness = report.soundness
    if soundness.sound:
        return ""
    texts = [*soundness.lines, *(finding.text for finding in soundness.findings[1:_MOST_WARNINGS])]
    return _notes(texts).replace('"notes"', '"notes warnings unsound"')


def _strip(report: Report) -> str:
    summary = report.summary
    span = summary.span_ns
    idle = "Idle at most" if report.soundness.work_missing else "Idle"
    cards = [
        ("Span", format_ns(span), _span_note(summary), None),
        ("Busy", format_ns(summary.busy_ns), "of the span", summary.busy_ns / max(span, 1)),
        (idle, format_ns(summary.idle_ns), "of the span", summary.idle_ns / max(span, 1)),
        _communication_card(report, span),
    ]
    best = sorted(summary.attributed_ns.items(), key=lambda item: -item[1])
    lines = "".join(
        f"<span>{escape(kind)} <b>{format_share(ns, summary.sum_ns)}</b></span>"
        for kind, ns in best
        if ns
    )
    attributed = f'<div class="card wide"><h4>Attributed</h4><div class="kinds">{lines or "nothing"}</div></div>'
    return '<div class="strip">' + "".join(_card(*card) for card in cards) + attributed + "</div>"


def _span_note(summary: Summary) -> str:
    if summary.devices == 1:
        return "first start to last end"
    return f"first start to last end, sum of {format_count(summary.devices)} GPUs"


def _communication_card(report: Report, span: int) -> tuple[str, str, str, float | None]:
    if not report.communication_ns:
        return "Exposed communication", "none", "no kernel communicates", None
    exposed = report.exposed_ns
    hidden = format_share(report.communication_ns - exposed, report.communication_ns)
    return (
        "Exposed communication",
        format_ns(exposed),
        f"of the span; {hidden} of it all is hidden",
        exposed / max(span, 1),
    )


def _card(title: str, value: str, note: str, share: float | None) -> str:
    meter = ""
    if share is not None:
        note = f"{format_share(share, 1)} {note}"
        meter = f'<i class="meter"><i style="width:{min(100 * share, 100):.1f}%"></i></i>'
    return f'<div class="card"><h4>{title}</h4><p class="value">{value}</p>{meter}<p class="note">{note}</p></div>'


def _tabs(report: Report) -> str:
    divisions = _divisions(report)
    buttons = "".join(
        f'<button type="button" role="tab" data-tab="by-{by}">{escape(_title(report.summaries[by]))}</button>'
        for by in divisions
    )
    panels = "".join(
        f'<div class="panel" data-panel="by-{by}">{_table(f"by-{by}")}</div>' for by in divisions
    )
    return f'<div class="tabs" role="tablist">{buttons}</div>{panels}'


def _idle(report: Report) -> str:
    """Causes, places, and beside them what is no cause."""
    found = report.idle
    content = _table("idle-causes") + _table("idle")
    if not found.waits.is_empty():
        content += f"<h3>After calls that emptied the queue</h3>{_table('idle-waits')}"
    if not found.late.is_empty():
        content += f"<h3>Busy, but waiting for a late rank</h3>{_table('idle-late')}"
    return content + _notes(found.notes)


def _streams(report: Report) -> str:
    charts = _chart("groups", "By group of kernels")
    if any(device.busy_streams_ns for device in report.streams.concurrency):
        charts += _chart("concurrency", "Streams busy at once")
    return f'<div class="pair">{charts}</div>' + _table("streams") + _notes(report.streams.notes)


def _collectives(report: Report) -> str:
    collectives = report.collectives.result
    if collectives is None:
        return _absent(report.collectives.reason, report.summary.meta.inputs)
    charts = ""
    if collectives.instances["wait_ns"].count():
        charts += _chart("stragglers", "Which device the others waited for")
        charts += f'<div class="figure"><h3>By device</h3>{_table("stragglers")}</div>'
        charts += _chart("waits", "Wait for the last device")
        charts += _chart("wait-histogram", "How many waited for how long")
        charts += _chart("wait-sizes", "Wait against message size")
    charts += _chart("bandwidth", "Bus bandwidth against message size")
    notes = [collectives.statement, *collectives.notes, *filter(None, [collectives.clocks])]
    return f'<div class="pair">{charts}</div>' + _table("sizes") + _notes(notes)


def _xla(report: Report, part: Part[Programs] | Part[Compilation], name: str) -> str:
    if part.result is None:
        return _absent(part.reason, report.summary.meta.inputs)
    notes = (
        [report.programs.result.phases.statement]
        if part is report.programs and report.programs.result
        else []
    )
    return _chart(name) + _table(name) + _notes(notes)


def _title(summary: Summary) -> str:
    """The title of a tab: capitalized, except for a framework's identifier such as op_name."""
    title = summary.heading
    return title if "_" in title else title[0].upper() + title[1:]


def _attribution(report: Report) -> str:
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
    table = (
        '<table class="plain"><thead><tr><th>kind of place</th><th>attributed</th></tr></thead>'
        f"<tbody>{shares}</tbody></table>"
    )
    if reasons:
        table += (
            '<table class="plain"><thead><tr><th>the rest of</th><th>at most</th><th class="text">why</th>'
            f"</tr></thead><tbody>{reasons}</tbody></table>"
        )
    warnings = summary.meta.warnings
    shown = [*warnings[:_MOST_WARNINGS]]
    if len(warnings) > _MOST_WARNINGS:
        shown.append(f"{format_count(len(warnings) - _MOST_WARNINGS)} more warnings")
    listed = (
        _notes(shown).replace('"notes"', '"notes warnings"') or '<p class="absent">No warnings.</p>'
    )
    return f"{table}{_notes(summary.notes)}<h3>Warnings</h3>{listed}"
