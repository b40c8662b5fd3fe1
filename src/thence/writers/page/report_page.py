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
    from collections.abc import Iterable, Iterator

    from thence.analysis.report import Report
    from thence.analysis.summary import Summary, Totals
    from thence.writers.page.sections import Section

_Card = tuple[str, str, str, float | None]
"""Title, value, note and share of a card."""

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
    summary, whole = report.summary, report.whole
    models = sorted({device.name for device in summary.meta.devices if device.name})
    facts = (
        ", ".join(dict.fromkeys(summary.meta.formats)),
        f"{format_count(whole.ranks)} rank" + ("s" if whole.ranks != 1 else ""),
        f"{format_count(whole.devices)} GPU" + ("s" if whole.devices != 1 else ""),
        *models,
        activity_counts(whole),
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
    """The headline: cards of the step, or of the whole recording if it has no steps, and sentences below them."""
    summary, headline = report.whole, report.headline
    span = summary.span_ns
    of_steps = headline.steps is not None
    cards = [*_step_cards(report)] if of_steps else []
    cards.append(("Recording" if of_steps else "Span", format_ns(span), _span_note(summary), None))
    if not of_steps:
        cards += _whole_cards(report)
    if report.communication_ns or not of_steps:
        cards.append(_communication_card(report))
    kinds = sorted(report.summary.attributed_ns.items(), key=lambda item: -item[1])
    lines = "".join(
        f"<span>{escape(kind)} <b>{format_share(ns, report.summary.sum_ns)}</b></span>" for kind, ns in kinds
    )
    attributed = f'<div class="card wide"><h2>Attributed</h2><div class="kinds">{lines}</div></div>'
    said = [line for line in (headline.rest, headline.plain_text, headline.late) if line]
    if headline.steps is not None:
        said.insert(0, f"steps: {headline.steps.basis}")
    verdict = f'<p class="verdict">{escape(printable(headline.verdict.text))}</p>'
    strip = "".join(_card(*card) for card in cards) + attributed
    return f'{verdict}<div class="strip">{strip}</div>{notes(said)}'


def _step_cards(report: Report) -> Iterator[_Card]:
    """Count, median, busy and idle share of a step."""
    steps = report.headline.steps
    if steps is None:
        return
    typical = f"median of {format_count(steps.typical)} of {format_count(steps.count)} steps"
    if steps.plain is None:
        yield "Step", format_ns(steps.median_ns), typical, None
    else:
        plain = steps.plain.plain
        counted = f"without recording; median of {format_count(plain.count)} steps"
        yield "Step", format_ns(plain.median_ns), counted, None
        yield "Recorded step", format_ns(steps.median_ns), typical, None
    at_least, at_most = ("at least ", "at most ") if steps.idle_is == "at most" else ("", "")
    busy, idle = steps.busy_share, steps.idle_share
    yield "Busy", at_least + format_share(busy, 1), "of a step", busy
    yield "Idle", at_most + format_share(idle, 1), "of a step", idle


def _whole_cards(report: Report) -> list[_Card]:
    """Busy and idle time of the whole recording, or of its selected part."""
    summary = report.whole
    span, busy = max(summary.span_ns, 1), summary.busy_ns
    at_most = "at most " if report.soundness.work_missing else ""
    cards: list[_Card] = [("Busy", format_ns(busy), "of the span", busy / span)]
    if report.summary.idle_unknown:
        return [*cards, ("Idle", "unknown", report.summary.idle_unknown, None)]
    idle_ns = summary.span_ns - busy
    return [*cards, ("Idle", at_most + format_ns(idle_ns), "of the span", idle_ns / span)]


def _span_note(summary: Totals | Summary) -> str:
    if summary.devices == 1:
        return "first start to last end"
    return f"first start to last end, sum of {format_count(summary.devices)} GPUs"


def _communication_card(report: Report) -> _Card:
    if not report.communication_ns:
        return "Exposed communication", "none", "no kernel communicates", None
    exposed = report.exposed_ns
    hidden = format_share(report.communication_ns - exposed, report.communication_ns)
    steps = report.headline.steps
    rest = f"{hidden} of communication is hidden"
    if steps is not None:
        share = steps.exposed_share
        return "Exposed communication", format_share(share, 1), f"of a step; {rest}", share
    share = exposed / max(report.whole.span_ns, 1)
    return "Exposed communication", format_ns(exposed), f"of the span; {rest}", share


def _card(title: str, value: str, note: str, share: float | None) -> str:
    meter = ""
    if share is not None:
        if not value.endswith("%"):
            note = f"{format_share(share, 1)} {note}"
        meter = f'<i class="meter"><i style="width:{min(100 * share, 100):.1f}%"></i></i>'
    return f'<div class="card"><h2>{title}</h2><p class="value">{value}</p>{meter}<p class="note">{note}</p></div>'
