"""A report as one self-contained HTML page: it needs no server, no network and no other file.

Names come from traces and may contain any characters. In the page they are escaped text, or JSON in which every
character that could end the script element is escaped, or part of the timeline's compressed data. The scripts show
them only as text, never as HTML.
"""

from __future__ import annotations

import dataclasses
import json
from html import escape
from typing import TYPE_CHECKING, Any

from thence.units import format_count, format_ns, format_share
from thence.writers.page.figures import new_figure
from thence.writers.page.flame_page import flame_html
from thence.writers.page.report_sections import MOST_WARNINGS, SECTIONS
from thence.writers.page.sections import notes
from thence.writers.page.template import as_data, filled
from thence.writers.page.timeline_data import timeline_data
from thence.writers.text.printable import printable
from thence.writers.text.summary import activity_counts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from thence.analysis.report import Report
    from thence.analysis.summary import Summary
    from thence.writers.page.sections import Section

__all__ = ["report_html"]

_FLAME_NODES = 4000


def report_html(report: Report) -> str:
    """The page of a report.

    Raises:
        MissingRequirement: Plotly is not installed.
    """
    new_figure()  # raises early if Plotly is missing
    timeline, shown = timeline_data(report.timeline)
    report = dataclasses.replace(report, timeline=shown)
    sections = [section(report) for section in SECTIONS]
    return filled(
        "report.html",
        {
            "title": escape(f"thence: {_inputs(report)}"),
            "plotly": _plotly(),
            "body": _body(report, sections),
            "flame": escape(flame_html(report.flame.largest(_FLAME_NODES))),
            "timeline": timeline,
            "data": as_data(_json(sections)),
        },
    )


def _json(sections: Iterable[Section]) -> str:
    """Figures and tables of all sections as JSON."""
    from plotly.utils import PlotlyJSONEncoder

    data: dict[str, dict[str, Any]] = {"figures": {}, "tables": {}}
    for section in sections:
        data["figures"] |= {n: figure.to_plotly_json() for n, figure in section.figures.items()}
        data["tables"] |= section.tables
    return json.dumps(data, cls=PlotlyJSONEncoder, separators=(",", ":"))


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs()).replace("</script", "<\\/script")


def _inputs(report: Report) -> str:
    return ", ".join(printable(name) for name in report.summary.meta.inputs)


# ---- The body: everything except tables and figures, as escaped HTML


def _body(report: Report, sections: Iterable[Section]) -> str:
    content = "".join(section.to_html() for section in sections)
    return f"{_header(report)}<main>{_unsound(report)}{_strip(report)}{content}</main>"


def _header(report: Report) -> str:
    summary = report.summary
    models = sorted({device.name for device in summary.meta.devices if device.name})
    facts = (
        ", ".join(dict.fromkeys(summary.meta.formats)),
        f"{format_count(summary.ranks)} rank" + ("s" if summary.ranks != 1 else ""),
        f"{format_count(summary.devices)} GPU" + ("s" if summary.devices != 1 else ""),
        *models,
        activity_counts(summary),
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
    """The findings that make the trace unsound, shown above all figures; empty for a sound trace."""
    soundness = report.soundness
    if soundness.sound:
        return ""
    texts = [*soundness.lines, *(finding.text for finding in soundness.findings[1:MOST_WARNINGS])]
    return notes(texts, "warnings unsound")


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
    kinds = sorted(summary.attributed_ns.items(), key=lambda item: -item[1])
    lines = "".join(
        f"<span>{escape(kind)} <b>{format_share(ns, summary.sum_ns)}</b></span>"
        for kind, ns in kinds
    )
    attributed = f'<div class="card wide"><h2>Attributed</h2><div class="kinds">{lines}</div></div>'
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
        f"of the span; {hidden} of communication is hidden",
        exposed / max(span, 1),
    )


def _card(title: str, value: str, note: str, share: float | None) -> str:
    meter = ""
    if share is not None:
        note = f"{format_share(share, 1)} {note}"
        meter = f'<i class="meter"><i style="width:{min(100 * share, 100):.1f}%"></i></i>'
    return f'<div class="card"><h2>{title}</h2><p class="value">{value}</p>{meter}<p class="note">{note}</p></div>'
