"""The result of `Trace.self_check`: the figures of a trace that were checked to add up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from thence.analysis.consistency import row_references
from thence.model.answer import Answer, TableView
from thence.units import format_ns, format_share

if TYPE_CHECKING:
    from thence.analysis.summary import Summary
    from thence.model.attributed import Attributed
    from thence.units import Ns


@dataclass(frozen=True)
class Proof(Answer):
    """Sums that were computed in two ways and are equal. All times are ns.

    Attributes:
        activities: number of device activities.
        references: number of references to rows of other tables that were checked to exist (`proof` counts them).
        span_ns, busy_ns, sum_ns: as in `thence.analysis.summary`; busy is at most span, and at most sum.
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


def proof(trace: Attributed, summary: Summary | None) -> Proof:
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
    return Proof(
        trace.gpu.height,
        sum(len(column) - column.null_count() for column in references),
        *times,
        pl.DataFrame(rows, schema=schema, orient="row"),
    )


def _row(summary: Summary, kind: str) -> tuple[str, Ns, Ns, Ns, Ns]:
    attributed = summary.attributed_ns[kind]
    rest = sum(reason.total_ns for reason in summary.unattributed[kind])
    return kind, attributed, rest, attributed + rest, summary.sum_ns
