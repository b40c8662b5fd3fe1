"""`Trace.self_check`, and the references between tables, which every trace must hold before it is analysed.

Figures that contradict each other are worse than none, so they are an error. What a user's input can break is checked
in every run: references (files of a store may be damaged, or come from elsewhere) and the totals of each answer
(`Answer.self_check`; those of a store are sums of the files of its ranks). Readers bound all times, so that sums fit
int64. Everything else that must hold of an answer only a defect of thence can break; tests check it on all recordings
and on random traces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from thence.model.answer import Answer, TableView
from thence.model.places import PLACES
from thence.model.totals import must
from thence.units import format_ns, format_share

if TYPE_CHECKING:
    from thence.analysis.report.summary import Summary
    from thence.model.attributed import Attributed
    from thence.units import Ns


def row_references(trace: Attributed) -> tuple[tuple[str, pl.Series, int], ...]:
    """The columns of row numbers: what they refer to, in words; the column; the number of rows there are."""
    rows, ranges = trace.gpu.height, trace.host.height
    return (
        ("parents of host ranges", trace.host["parent"], ranges),
        ("forward ranges", trace.host["forward"], ranges),
        ("launches", trace.places["launch"], ranges),
        ("steps of activities", trace.places["step_row"], trace.steps.height),
        ("activities of collectives", trace.collectives["gpu"], rows),
        ("activities of parts of collectives", trace.collective_parts["gpu"], rows),
        ("host ranges of parts of collectives", trace.collective_parts["host"], ranges),
        ("host ranges of collectives", trace.collectives["host"], ranges),
        ("host ranges that describe collectives", trace.host_collectives["host"], ranges),
        ("calls of CUDA events", trace.events["host"], ranges),
        ("records of CUDA events", trace.events["record"], trace.events.height),
        ("calls that wait", trace.waits["host"], ranges),
        ("records that are waited for", trace.waits["record"], trace.events.height),
        ("activities in CUDA graphs", trace.graph_places["gpu"], rows),
        ("activities of programs", trace.gpu["program"], trace.programs.height),
        ("begins of allocations", trace.memory["opened"], trace.memory_totals.height),
        ("ends of allocations", trace.memory["closed"], trace.memory_totals.height),
        ("failed allocations", trace.memory_failures["after"], trace.memory_totals.height),
        ("HLO modules of programs", trace.programs["hlo"], len(trace.hlo)),
    )


def checked_references(trace: Attributed) -> Attributed:
    """Returns the trace after checking that its row references point into their tables.

    Raises:
        Contradiction: a row reference is out of bounds, or an activity has neither a place nor a reason for having
            none.
    """
    rows = trace.gpu.height
    for what, column, count in row_references(trace):
        numbers: Any = column.min(), column.max()  # None if all are null
        inside = numbers[0] is None or bool(numbers[0] >= 0 and numbers[1] < count)
        must(trace.meta.inputs, inside, f"{what} refer to rows that do not exist")
    must(trace.meta.inputs, trace.places.height == rows, "activities have no place in the table of places")
    of_whole = rows if trace.part_of is None else len(trace.part_of[1])
    must(trace.meta.inputs, of_whole == rows, "activities of a part are not those of the whole trace")
    parts = trace.collective_parts["gpu"]
    belong = parts.is_empty() or parts.is_in(trace.collectives["gpu"].implode()).all()
    must(trace.meta.inputs, belong, "parts of collectives belong to no collective")
    unique = trace.graph_places["gpu"].n_unique() == trace.graph_places.height
    must(trace.meta.inputs, unique, "an activity has two places in CUDA graphs")
    for kind in PLACES:
        known = rows == 0 or trace.places[f"{kind}_rule"].null_count() == 0
        must(trace.meta.inputs, known, f"activities have neither a {kind} nor a reason why not")
    return trace


@dataclass(frozen=True)
class SelfCheck(Answer):
    """Sums that were computed in two ways and are equal. All times are ns.

    Attributes:
        activities: number of device activities.
        references: number of references to rows of other tables that were checked to exist.
        span_ns, busy_ns, sum_ns: as in `thence.analysis.report.summary`; busy is at most span, and at most sum.
        kinds: kind, attributed_ns, unattributed_ns (of all reasons), together_ns (their sum), sum_ns; together_ns
            and sum_ns are equal.
    """

    activities: int
    references: int
    span_ns: Ns
    busy_ns: Ns
    sum_ns: Ns
    kinds: pl.DataFrame

    def __str__(self) -> str:
        kinds = ", ".join(
            f"{kind} {format_share(attributed, self.sum_ns)}"
            for kind, attributed in self.kinds["kind", "attributed_ns"].rows()
        )
        return (
            f"proved: of {self.activities:,} activities, {self.sum_ns:,} ns, attributed and unattributed time add up "
            f"for every kind ({kinds}); busy {format_ns(self.busy_ns)} <= span {format_ns(self.span_ns)}; "
            f"{self.references:,} references point to existing rows"
        )

    def about(self) -> tuple[str, ...]:
        """See `Answer`."""
        return (
            "proved: attributed and unattributed time add up",
            f"{self.activities:,} activities; busy {format_ns(self.busy_ns)} <= span {format_ns(self.span_ns)}",
            f"{self.references:,} references point to existing rows",
        )

    def views(self) -> tuple[TableView, ...]:
        """The sums of each kind of place."""
        headings = {
            "kind": "kind", "attributed_ns": "attributed", "unattributed_ns": "unattributed",
            "together_ns": "together", "sum_ns": "sum of all work",
        }  # fmt: skip
        return (TableView(self.kinds, headings),)

    def known(self) -> dict[str, float]:
        """See `Answer`."""
        return {
            kind: attributed / max(self.sum_ns, 1) for kind, attributed in self.kinds["kind", "attributed_ns"].rows()
        }


def self_check_result(trace: Attributed, summary: Summary | None) -> SelfCheck:
    """The figures that were checked.

    Args:
        trace: trace whose references were checked.
        summary: summary that was checked; None if there is no device activity.
    """
    references = [column for _, column, _ in row_references(trace)]
    rows = [] if summary is None else [_row(summary, kind) for kind in summary.attributed_ns]
    names = ("attributed_ns", "unattributed_ns", "together_ns", "sum_ns")
    schema = {"kind": pl.String, **dict.fromkeys(names, pl.Int64)}
    times = (summary.span_ns, summary.busy_ns, summary.sum_ns) if summary else (0, 0, 0)
    return SelfCheck(
        trace.gpu.height,
        sum(len(column) - column.null_count() for column in references),
        *times,
        pl.DataFrame(rows, schema=schema, orient="row"),
    )


def _row(summary: Summary, kind: str) -> tuple[str, Ns, Ns, Ns, Ns]:
    attributed = summary.attributed_ns[kind]
    rest = sum(reason.total_ns for reason in summary.unattributed[kind])
    return kind, attributed, rest, attributed + rest, summary.sum_ns
