"""A report as one self-contained HTML page: it needs no server, no network and no other file.

Names come from traces and may contain any characters. In the page they are escaped text, or JSON in which every
character that could end the script element is escaped, or part of the timeline's compressed data. The scripts show
them only as text, never as HTML.

A section of the page is a function that takes the `Page` and returns a `Section`, or None if the trace has nothing for
it; `SECTIONS` lists them in their order. Charts are in the page as SVG, tables as data that the page's script draws.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

import polars as pl

from thence.analysis.collectives.answer import with_device_names
from thence.analysis.explain.answer import gain_text
from thence.model.kernel_names import short_names
from thence.model.places import TABLE_KINDS_XLA
from thence.model.tables import named_inputs
from thence.model.words import WORDS
from thence.units import format_count, format_ns, format_share
from thence.writers.charts import results, runs
from thence.writers.page.flame_page import flame_html
from thence.writers.page.ranks_data import heat_map, heat_notes, rank_tables, reason_tables
from thence.writers.page.report_tables import (
    COMPILE_FIELDS,
    GAIN_FIELDS,
    GROWTH_FIELDS,
    IDLE_CAUSE_FIELDS,
    IDLE_FIELDS,
    IDLE_LATE_FIELDS,
    IDLE_WAIT_FIELDS,
    LAST_ARRIVAL_FIELDS,
    MAX_NAME,
    MAX_ROWS,
    MEMORY_FIELDS,
    OUTSIDE_FIELDS,
    PROGRAM_FIELDS,
    RECOMPUTE_FIELDS,
    ROOFLINE_FIELDS,
    SIZE_FIELDS,
    SPREAD_FIELDS,
    STREAM_FIELDS,
    Field,
    folded_data,
    frame_data,
    summary_data,
    tree_data,
)
from thence.writers.page.source_places import with_short_places
from thence.writers.page.template import as_data, filled, notes, scrolled
from thence.writers.page.timeline_data import timeline_data
from thence.writers.text.merged_sentences import merged
from thence.writers.text.printable import printable
from thence.writers.text.summary import activity_counts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from thence.analysis.explain.finding import Finding
    from thence.analysis.flame.answer import Flame
    from thence.analysis.report.page import Page
    from thence.analysis.report.summary import Summary, Totals
    from thence.analysis.report.verdict import Spread
    from thence.writers.charts.chart import Chart

_Card = tuple[str, str, str, float | None]
"""Title, value, note and share of a card."""

_FLAME_NODES = 4000


def report_html(page: Page) -> str:
    """The page of a report."""
    timeline, shown = timeline_data(page.timeline)
    page = with_short_places(dataclasses.replace(page, timeline=shown))
    sections = [section for section in (make(page) for make in SECTIONS) if section is not None]
    tables = {name: data for section in sections for name, data in section.tables.items()}
    maps = {section.name: section.heat for section in sections if section.heat is not None}
    return filled(
        "report.html",
        {
            "title": escape(f"thence: {_inputs(page)}"),
            "body": _body(page, sections),
            "flame": escape(flame_html(_named_as(page, page.flame.largest(_FLAME_NODES)))),
            "timeline": timeline,
            "data": as_data(json.dumps({"tables": tables, "maps": maps}, separators=(",", ":"))),
        },
    )


def _named_as(page: Page, flame: Flame) -> Flame:
    """The flame graph with the inputs as the user named them: of a store, it has those of which the store was made."""
    return dataclasses.replace(flame, meta=dataclasses.replace(flame.meta, inputs=page.summary.meta.inputs))


def _inputs(page: Page) -> str:
    return ", ".join(printable(name) for name in page.summary.meta.inputs)


# ---- The body: everything except tables, as escaped HTML


def _body(page: Page, sections: Iterable[Section]) -> str:
    content = "".join(section.to_html(page.in_full) for section in sections)
    links = "".join(f'<a href="#{section.name}">{escape(section.title)}</a>' for section in sections)
    navigation = f'<nav aria-label="Sections">{links}</nav>'
    return f"{_header(page)}<main>{_left_out(page)}{_unsound(page)}{_strip(page)}{navigation}{content}</main>"


def _header(page: Page) -> str:
    summary, whole = page.summary, page.whole
    models = sorted({device.name for device in summary.meta.devices if device.name})
    facts = (
        ", ".join(dict.fromkeys(summary.meta.formats)),
        f"{format_count(whole.ranks)} rank" + ("s" if whole.ranks != 1 else ""),
        f"{format_count(whole.devices)} GPU" + ("s" if whole.devices != 1 else ""),
        *models,
        activity_counts(whole),
    )
    inputs = escape(_inputs(page))
    facts_html = " · ".join(escape(printable(fact)) for fact in facts if fact)
    return (
        '<header><div class="titles"><h1>Where the GPU time came from</h1>'
        f'<p class="inputs" title="{inputs}">{inputs}</p>'
        f'<p class="facts">{facts_html}</p></div><div class="tools"><button id="theme" type="button">Dark</button>'
        '<button id="print" type="button">Print</button></div></header>'
    )


def _left_out(page: Page) -> str:
    """Which files of the inputs were not read; empty if all were."""
    left_out = page.summary.meta.left_out
    return notes(left_out, "warnings")


def _unsound(page: Page) -> str:
    """The findings that make the trace unsound, shown above all figures; empty for a sound trace."""
    soundness = page.soundness
    if soundness.sound:
        return ""
    texts = [*soundness.lines, *(finding.text for finding in soundness.findings[1:MAX_WARNINGS])]
    return notes(texts, "warnings unsound")


def _strip(page: Page) -> str:
    """The headline: cards of the step, or of the whole recording if it has no steps, and sentences below them."""
    summary, headline = page.whole, page.headline
    span = summary.span_ns
    of_steps = headline.steps is not None
    cards = [*_step_cards(page)] if of_steps else []
    cards.append(("Recording" if of_steps else "Span", format_ns(span), _span_note(summary), None))
    if not of_steps:
        cards += _whole_cards(page)
    if page.communication_ns or not of_steps:
        cards.append(_communication_card(page))
    kinds = sorted(page.summary.attributed_ns.items(), key=lambda item: -item[1])
    lines = "".join(f"<span>{escape(kind)} <b>{format_share(ns, page.summary.sum_ns)}</b></span>" for kind, ns in kinds)
    attributed = f'<div class="card wide"><h2>Attributed</h2><div class="kinds">{lines}</div></div>'
    late = "" if page.job.result is not None else headline.late  # which its section states
    sentences = [line for line in (headline.rest, headline.plain_text, late) if line]
    if headline.steps is not None:
        sentences.insert(0, f"steps: {headline.steps.basis}")
    if page.soundness.sound:
        sentences.append(page.soundness.verdict)
    verdict = f'<p class="verdict">{escape(printable(headline.verdict.text))}</p>'
    strip = "".join(_card(*card) for card in cards) + attributed
    return f'{verdict}<div class="strip">{strip}</div>{notes(sentences)}'


def _step_cards(page: Page) -> Iterator[_Card]:
    """Count, median, busy and idle share of a step."""
    steps = page.headline.steps
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
    devices = page.whole.devices
    for title, sign, share, spread in (
        ("Busy", at_least, busy, steps.busy_spread), ("Idle", at_most, idle, steps.busy_spread.rest),
    ):  # fmt: skip
        value, scope = _share_of_step(share, spread, devices)
        yield title, sign + value, scope, share


def _share_of_step(share: float, spread: Spread, devices: int) -> tuple[str, str]:
    """Value and note of a card: the median of the devices, or their range where they differ."""
    if devices == 1:
        return format_share(share, 1), "of a step"
    count, mean = format_count(devices), format_share(spread.mean, 1)
    if not spread.uneven:
        return format_share(share, 1), f"of a step, median of {count} GPUs; mean {mean}"
    ends = f"{format_share(spread.low, 1)} to {format_share(spread.high, 1)}"
    return ends, f"of a step, {count} GPUs; median {format_share(share, 1)}, mean {mean}"


def _whole_cards(page: Page) -> list[_Card]:
    """Busy and idle time of the whole recording, or of its selected part."""
    summary = page.whole
    span, busy = max(summary.span_ns, 1), summary.busy_ns
    at_most = "at most " if page.soundness.work_missing else ""
    cards: list[_Card] = [("Busy", format_ns(busy), "of the span", busy / span)]
    if page.summary.idle_unknown:
        return [*cards, ("Idle", "unknown", page.summary.idle_unknown, None)]
    idle_ns = summary.span_ns - busy
    return [*cards, ("Idle", at_most + format_ns(idle_ns), "of the span", idle_ns / span)]


def _span_note(summary: Totals | Summary) -> str:
    if summary.devices == 1:
        return "first start to last end"
    return f"first start to last end, sum of {format_count(summary.devices)} GPUs"


def _communication_card(page: Page) -> _Card:
    if not page.communication_ns:
        return "Exposed communication", "none", "no kernel communicates", None
    exposed = page.exposed_ns
    hidden = format_share(page.communication_ns - exposed, page.communication_ns)
    steps = page.headline.steps
    rest = f"{hidden} of communication is hidden"
    if steps is not None:
        share = steps.exposed_share
        value, of_step = _share_of_step(share, steps.exposed_spread, page.whole.devices)
        return "Exposed communication", value, of_step if page.in_full else f"{of_step}; {rest}", share
    share = exposed / max(page.whole.span_ns, 1)
    return "Exposed communication", format_ns(exposed), f"of the span; {rest}", share


def _card(title: str, value: str, note: str, share: float | None) -> str:
    meter = ""
    if share is not None:
        if not value.endswith("%"):
            note = f"{format_share(share, 1)} {note}"
        meter = f'<i class="meter"><i style="width:{min(100 * share, 100):.1f}%"></i></i>'
    meaning = WORDS.get(title.lower().removesuffix(" communication"))
    shown = title if meaning is None else f'<span class="term" title="{escape(meaning)}">{title}</span>'
    return f'<div class="card"><h2>{shown}</h2><p class="value">{value}</p>{meter}<p class="note">{note}</p></div>'


# ---- The sections


@dataclass(frozen=True)
class Section:
    """One section of a page.

    Attributes:
        name: id of the section on the page.
        title: heading.
        html: content, in which texts of a trace are escaped. `_table` returns the places that the script fills.
        tables: tables from `thence.writers.page.report_tables.frame_data`, by the names that were passed to `_table`.
        heat: the heat map of the section, which the script draws into the element ``heat-map``.
        of_all: whether it is of all ranks, also where a page has the tables of few.
    """

    name: str
    title: str
    html: str
    tables: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    heat: dict[str, Any] | None = None
    of_all: bool = False

    def to_html(self, in_full: str = "") -> str:
        """The section with its heading.

        Args:
            in_full: as `Page.in_full`.
        """
        heading = f'<h2 id="{self.name}-title">{escape(self.title)}</h2>'
        heading += "" if self.of_all or not in_full else notes([in_full])
        return f'<section id="{self.name}" aria-labelledby="{self.name}-title">{heading}{self.html}</section>'


def _table(name: str, title: str) -> str:
    """The place of a table; the title is its accessible name."""
    return f'<div class="table" data-table="{name}" data-title="{escape(title)}"></div>'


MAX_WARNINGS = 50
"""Most warnings that a page lists; of further warnings it shows only the number."""


_MAX_TREE = 20_000
"""Most rows of a kind of place from which the page makes a tree: a table shows 500 nodes of it anyway."""


_MAX_FINDINGS = 12


def _findings(page: Page) -> Section | None:
    """The findings of ``thence explain``; a button of each one shows its time on the timeline."""
    explanation = page.explanation
    if not explanation.findings:
        return None
    items = "".join(_finding(page, finding) for finding in explanation.findings[:_MAX_FINDINGS])
    missing = (f"not answered: {n.question}: {n.reason}; {n.how}" for n in explanation.not_answered)
    return Section("findings", "Findings", f'<ul class="findings">{items}</ul>' + notes(missing), of_all=True)


def _run(page: Page) -> Section | None:
    """The recording as a band, and its steps over time."""
    charts = []
    if sum(part.ns > 0 for part in page.headline.run) > 1:
        charts.append(runs.run_chart(page.headline.run))
    if page.steps.result is not None and page.steps.result.rows.height > 1:
        charts.append(runs.steps_chart(page.steps.result))
    return Section("run", "The run", "".join(map(_place, charts)), of_all=True) if charts else None


def _ranks(page: Page) -> Section | None:
    """Who is late and why, what a step of each rank is made of, a heat map of ranks and steps, and every rank."""
    job = page.job.result
    if job is None:
        return None
    html = f'<p class="statement">{escape(printable(job.statement))}</p>'
    tables = {}
    for name, sentence, data in reason_tables(job) if job.stragglers.height else ():
        tables[name] = data
        html += f"<h3>{escape(printable(sentence))}</h3>{_table(name, sentence)}"
    heat = heat_map(job)
    html += _place(runs.ranks_chart(job))
    if heat is not None:
        html += f'<h3>Ranks and steps</h3><div id="heat-map"></div>{notes(heat_notes(job))}'
    for name, title, data in rank_tables(job):
        tables[name] = data
        html += f"<h3>{title}</h3>{_table(name, title)}"
    return Section("ranks", "Ranks", html + notes(job.all_notes()), tables, heat, of_all=True)


def _finding(page: Page, finding: Finding) -> str:
    gain = "" if finding.gain is None or finding.kind == "gain" else f"; gain: {gain_text(finding.gain)}"
    command = escape(printable(finding.evidence.line("INPUT")))
    button = ""
    if (moment := finding.moment) is not None:
        begin = moment.start - page.shifts.get(moment.rank, 0) - page.timeline.start_ns
        where = f'data-from="{begin}" data-to="{begin + moment.duration}"'
        label = escape(f"Show finding {finding.id} on the timeline")
        button = f' <button type="button" class="moment" {where} aria-label="{label}">Timeline</button>'
    claim = re.sub("`([^`]+)`", r"<code>\1</code>", escape(printable(finding.claim + gain)))
    said = f'<b>{finding.severity}</b> <span class="claim">{claim}</span> <code>{command}</code>'
    return f'<li id="finding-{finding.id}">{said}{button}</li>'


def _timeline(page: Page) -> Section:
    return Section("timeline", "Timeline", '<div id="timeline-place"></div>' + notes(page.timeline.notes))


def _time(page: Page) -> Section:
    """A tab with GPU time for each kind of place that any activity has.

    The section on attribution also lists the other kinds.
    """
    divisions = [by for by, s in page.summaries.items() if s.rows["attributed"].any()]
    divisions.sort(key=_order(page.default_kind))
    titles = {by: _tab_title(page.summaries[by]) for by in divisions}
    buttons = "".join(
        f'<button type="button" role="tab" id="tab-{by}" aria-controls="panel-{by}">{escape(title)}</button>'
        for by, title in titles.items()
    )
    tables: dict[str, dict[str, Any]] = {}
    panels = ""
    for by, title in titles.items():
        parts = ""
        for number, (form, data) in enumerate(_tables_of(page.summaries[by]).items()):
            name = f"by-{by}" if not number else f"by-{by}-{number}"
            tables[name] = data
            place = _table(name, f"GPU time by {title}{f': {form}' if form else ''}")
            more = f"<details><summary>{escape(form)}</summary>{place}</details>"
            parts += more if form else place
        parts = (notes([page.in_full]) if page.in_full and by not in page.of_all else "") + parts
        panels += f'<div role="tabpanel" id="panel-{by}" aria-labelledby="tab-{by}">{parts}</div>'
    tabs = f'<div class="tabs" role="tablist" aria-label="GPU time by">{buttons}</div>'
    return Section("time", "Where the GPU time goes", notes(_of_steps(page)) + tabs + panels, tables, of_all=True)


def _order(first: str) -> Callable[[str], int]:
    """The order of tabs: the most informative kind, what names places in the program, and kernels and ranks last."""
    kinds = (first, *TABLE_KINDS_XLA)
    last = ("kernel", "rank")
    return lambda by: kinds.index(by) if by in kinds else len(kinds) + (1 + last.index(by) if by in last else 0)


def _of_steps(page: Page) -> list[str]:
    """A sentence that a section is about the typical steps, in a list; empty if it is not."""
    steps, of_steps = page.headline.steps, page.summary.of_steps
    if not of_steps or steps is None:
        return []
    return [f"in {of_steps} ({steps.basis})"]


def _tables_of(summary: Summary) -> dict[str, dict[str, Any]]:
    """The tables of a kind of place: one, or for the parts of a model, a tree of folded layers, these, and all rows."""
    folded = summary.folded
    if folded is None:
        return {"": summary_data(summary)}
    rows = {f"Every row: {format_count(summary.rows.height)}": summary_data(summary)}
    if folded["layers"].count():
        rows = {f"Without inclusive time: {format_count(folded.height)} rows": folded_data(summary, folded), **rows}
    if summary.rows.height <= _MAX_TREE:
        return {"": tree_data(summary), **rows}
    (_, first), *rest = rows.items()
    return {"": first, **dict(rest)}


def _tab_title(summary: Summary) -> str:
    """The title of a tab: capitalized, except for a framework's identifier such as op_name."""
    title = summary.heading
    return title if "_" in title else title[0].upper() + title[1:]


_MIN_MODELLED = 0.01
"""Share of the GPU time that must have a model for a section on its use."""


def _use(page: Page) -> Section | None:
    """How well the GPU was used, with the roofline, and what its hardware counted."""
    roofline = page.roofline.result
    if roofline is None:
        return None
    counted = roofline.counted_view(roofline.rows["name"])
    modelled = roofline.modelled_share >= _MIN_MODELLED
    if not modelled and counted is None:
        return None
    name, title, tables = "use", "Use of the GPU", {}
    html = notes([*_of_steps(page), *roofline.about()])
    if modelled:
        chart = results.roofline_chart(roofline)
        tables[name] = frame_data(roofline.rows, (Field("name", roofline.heading, "text"), *ROOFLINE_FIELDS))
        html += (_place(chart) if chart.series else "") + _table(name, title)
    if counted is not None:
        fields = [Field(column, heading, "text") for column, heading in counted.headings.items()]
        fields = [dataclasses.replace(f, kind="share") if f.column == "sampled_share" else f for f in fields]
        tables["counted"] = frame_data(counted.rows, fields)
        html += f"<h3>Counted by the hardware</h3>{notes([counted.title])}{_table('counted', counted.title)}"
    return Section(name, title, html + notes(roofline.remarks()), tables)


def _memory(page: Page) -> Section | None:
    """What was live at the peak, over time, what grows, and what recomputing would save."""
    memory = page.memory.result
    if memory is None:
        return None
    over_time = page.memory_over_time.result
    name, title = "memory", "Memory"
    html = notes(memory.about()) + (_place(results.memory_chart(over_time)) if over_time is not None else "")
    tables = {name: frame_data(memory.held, (Field("name", memory.heading, "text"), *MEMORY_FIELDS))}
    html += _table(name, "memory at its peak")
    outside_fields = (Field("name", memory.heading, "text"), *OUTSIDE_FIELDS)
    for part, frame, fields, heading in (
        ("memory-outside", memory.outside, outside_fields, "What was asked of CUDA itself, outside of the allocator"),
        ("memory-growth", memory.growth, GROWTH_FIELDS, "What every step leaves behind"),
        ("memory-recompute", memory.recomputed, RECOMPUTE_FIELDS, "What recomputing a module would save of the peak"),
    ):
        if not frame.is_empty():
            tables[part] = frame_data(frame, fields)
            html += f"<h3>{heading}</h3>{_table(part, heading)}"
    return Section(name, title, html + notes(memory.remarks()), tables)


def _idle(page: Page) -> Section | None:
    """Idle time by cause and by place, idle time after calls that emptied the queue, and waits for the last rank."""
    idle = page.idle.result
    if idle is None:
        return None
    if idle.causes.is_empty() and idle.waits.is_empty() and idle.late.is_empty() and not idle.notes:
        return None
    tables = {
        "idle-causes": frame_data(idle.causes, IDLE_CAUSE_FIELDS),
        "idle": frame_data(idle.shown_rows, IDLE_FIELDS),
    }
    sums = [f"times are sums over {format_count(page.whole.devices)} GPUs"] if page.whole.devices > 1 else []
    html = notes([*_of_steps(page), *sums]) + _table("idle-causes", "idle time by cause")
    html += _table("idle", "idle time by place")
    if not idle.waits.is_empty():
        tables["idle-waits"] = frame_data(idle.waits, IDLE_WAIT_FIELDS)
        title = "After calls that emptied the queue"
        html += f"<h3>{title}</h3>{_table('idle-waits', title)}"
    if not idle.late.is_empty():
        tables["idle-late"] = frame_data(idle.late, IDLE_LATE_FIELDS)
        title = "Busy, but waiting for the last rank"
        html += f"<h3>{title}</h3>{_table('idle-late', title)}"
    return Section("idle", "Idle time", html + notes(idle.notes), tables=tables)


def _flame(page: Page) -> Section:
    html = notes(_of_steps(page)) + '<div id="flame-place"></div>'
    return Section("flame", f"Flame graph by {page.flame.by}", html)


def _streams(page: Page) -> Section:
    charts = [results.groups_chart(page.streams)]
    if any(device.busy_streams_ns for device in page.streams.concurrency):
        charts.append(results.concurrency_chart(page.streams))
    return Section(
        "streams",
        "Streams and concurrency",
        _pair(map(_place, charts)) + _table("streams", "streams") + notes(page.streams.notes),
        {"streams": frame_data(page.streams.streams, STREAM_FIELDS)},
    )


def _collectives(page: Page) -> Section | None:
    collectives = page.collectives.result
    if collectives is None:
        return None
    tables = {"sizes": frame_data(collectives.by_size, SIZE_FIELDS)}
    places = []
    if collectives.instances["wait_ns"].count():
        last = "Last arrivals by device"
        tables["last-arrivals"] = frame_data(with_device_names(collectives.last_arrivals), LAST_ARRIVAL_FIELDS)
        places = [
            _place(results.last_arrivals_chart(collectives)),
            f'<div class="place"><h3>{last}</h3>{_table("last-arrivals", last)}</div>',
            _place(results.waits_chart(collectives)),
            _place(results.wait_histogram_chart(collectives)),
            _place(results.wait_sizes_chart(collectives)),
        ]
    bandwidth = results.bandwidth_chart(collectives)
    if bandwidth.series:
        places.append(_place(bandwidth))
    texts = [collectives.verdict, collectives.statement, *collectives.notes, collectives.clocks]
    return Section(
        "collectives",
        "Collectives",
        _pair(places) + _table("sizes", "collectives by size") + notes(filter(None, texts)),
        tables,
    )


def _gains(page: Page) -> Section | None:
    """The changes with the largest predicted gain."""
    predicted = page.gains.result
    if predicted is None or predicted.rows.is_empty():
        return None
    rows = predicted.rows.drop_nulls("after_ns").with_columns(change=pl.format("{} without time", "change"))
    name, title = "gains", "What would help"
    html = notes(["each change alone, predicted by replaying the program"]) + _table(name, title)
    return Section(name, title, html + notes(predicted.remarks()), {name: frame_data(rows, GAIN_FIELDS)})


def _programs(page: Page) -> Section | None:
    programs = page.programs.result
    if programs is None:
        return None
    name, title = "programs", "XLA programs"
    html = _place(results.programs_chart(programs)) + _table(name, title) + notes([programs.phases.statement])
    return Section(name, title, html, {name: frame_data(programs.programs, PROGRAM_FIELDS)})


def _compilation(page: Page) -> Section | None:
    compilation = page.compilation.result
    if compilation is None:
        return None
    name, title = "compile", "Compile time"
    html = _place(results.compile_chart(compilation)) + _table(name, title)
    return Section(name, title, html, {name: frame_data(compilation.phases, COMPILE_FIELDS)})


def _spread(page: Page) -> Section | None:
    chart = results.spread_chart(page.spread)
    if chart.to_frame().is_empty():
        return None
    name, title = "spread", "Spread of the same computation"
    return Section(name, title, _place(chart) + _table(name, title), {name: _spread_data(page.spread)})


def _place(chart: Chart) -> str:
    return f'<div class="place">{chart.to_html()}</div>'


def _pair(places: Iterable[str]) -> str:
    """Places side by side where there is room."""
    return f'<div class="pair">{"".join(places)}</div>'


def _spread_data(spread: pl.DataFrame) -> dict[str, Any]:
    """The table of computations that ran more than once, with short names, by decreasing total time."""
    repeated = spread.filter(spread["count"] > 1)
    rows = repeated.sort(repeated["mean_ns"] * repeated["count"], descending=True).head(MAX_ROWS + 1)
    names = rows["operation"].to_list()
    short = short_names(name for name in names if name is not None)
    shown = rows.with_columns(rows["operation"].replace(short))
    named = rows["program"].count() > 0
    data = frame_data(shown, [f for f in SPREAD_FIELDS if named or f.column != "program"])
    return data | {"full": [(name or "")[:MAX_NAME] for name in names[:MAX_ROWS]]}


def _attribution(page: Page) -> Section:
    summary = page.summary
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
    shown = [*warnings[:MAX_WARNINGS]]
    if len(warnings) > MAX_WARNINGS:
        shown.append(f"{format_count(len(warnings) - MAX_WARNINGS)} more warnings")
    listed = notes(shown, "warnings") or '<p class="none">No warnings.</p>'
    warned = f"<h3>Warnings</h3>{listed}"
    missing = notes(_missing(page))
    absent = f"<h3>Not in this trace</h3>{missing}" if missing else ""
    html += notes((*summary.meta.left_out, *summary.notes)) + warned + absent
    return Section("attribution", "Attribution and warnings", html)


def _missing(page: Page) -> Iterator[str]:
    """The reasons why the page has no section on collectives, programs, compilation or the use of the GPU."""
    prefix = f"{named_inputs(page.summary.meta.inputs)}: "
    used = page.roofline.result
    if used is not None and used.modelled_share < _MIN_MODELLED and not used.reasons.is_empty():
        yield f"FLOP and bytes of the work are not known: {used.reasons['text'][0]}."
    for part in (page.idle, page.collectives, page.programs, page.compilation, page.roofline):
        if part.result is None:
            reason = part.reason.removeprefix(prefix)
            sentence = f"The trace {reason}" if reason.startswith(("holds ", "describes ")) else reason
            yield f"{sentence}."


SECTIONS: tuple[Callable[[Page], Section | None], ...] = (
    _findings,
    _run,
    _ranks,
    _time,
    _flame,
    _idle,
    _timeline,
    _gains,
    _collectives,
    _streams,
    _programs,
    _compilation,
    _use,
    _memory,
    _spread,
    _attribution,
)
