"""Checks that every trace and every result must pass before it is shown.

Figures that contradict each other are worse than none. If a check fails, thence has a defect, or a reader accepted
a malformed input. The checks are cheap compared to the analyses: sums of results, bounds of row references.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.errors import Contradiction
from thence.model.places import PLACES
from thence.model.tables import named_inputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.analysis.flame.flame import Flame
    from thence.analysis.streams import Streams
    from thence.analysis.summary import Summary
    from thence.model.attributed import Attributed


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
        ("HLO modules of programs", trace.programs["hlo"], len(trace.hlo)),
    )


def consistent_references(trace: Attributed) -> Attributed:
    """Returns the trace after checking that its row references point into their tables.

    Raises:
        Contradiction: a row reference is out of bounds, or an activity has neither a place nor a reason for having
            none.
    """
    rows = trace.gpu.height
    for what, column, count in row_references(trace):
        inside = column.drop_nulls().is_between(0, count - 1).all()
        must(trace.meta.inputs, inside, f"{what} refer to rows that do not exist")
    must(trace.meta.inputs, trace.places.height == rows, "activities have no place in the table of places")
    parts = trace.collective_parts["gpu"].is_in(trace.collectives["gpu"].implode()).all()
    must(trace.meta.inputs, parts, "parts of collectives belong to no collective")
    unique = trace.graph_places["gpu"].is_unique().all()
    must(trace.meta.inputs, unique, "an activity has two places in CUDA graphs")
    for kind in PLACES:
        told = rows == 0 or trace.places[f"{kind}_rule"].null_count() == 0
        must(trace.meta.inputs, told, f"activities have neither a {kind} nor a reason why not")
    return trace


def consistent_summary(summary: Summary) -> Summary:
    """Returns the summary after checking that its totals are possible and add up.

    Raises:
        Contradiction: a total is impossible, or totals do not add up.
    """
    inputs = summary.meta.inputs
    # In the windows of a selection, other work runs, too.
    most = summary.span_ns if summary.selection else min(summary.span_ns, summary.sum_ns)
    possible = 0 <= summary.busy_ns <= most
    must(inputs, possible, "devices are busy for longer than they span, or than their work lasts")
    totals = summary.rows["total_ns"]
    adds_up = int(totals.sum()) == summary.sum_ns and (totals.is_empty() or int(str(totals.min())) >= 0)
    must(inputs, adds_up, f"the rows by {summary.by} do not add up to the sum of all work")
    if not summary.selection:
        alone = int(summary.rows["exposed_ns"].sum()) + summary.overlapped_ns
        must(
            inputs,
            alone == summary.busy_ns,
            f"exposed time by {summary.by} and overlapped time do not add up to the busy time",
        )
    if summary.folded is not None:
        sums = ("count", "total_ns", "exposed_ns", "backward_ns")
        folded, rows = (frame.select(sums).sum() for frame in (summary.folded, summary.rows))
        must(inputs, folded.equals(rows), f"the folded rows by {summary.by} do not add up to the rows")
    for kind, attributed in summary.attributed_ns.items():
        rest = sum(reason.total_ns for reason in summary.unattributed[kind])
        whole = attributed >= 0 and attributed + rest == summary.sum_ns
        must(inputs, whole, f"the time with a {kind} and the time without do not add up to the sum")
    return summary


def consistent_streams(streams: Streams) -> Streams:
    """Returns the streams after checking that their times are possible and add up.

    Raises:
        Contradiction: a time is impossible, or times do not add up.
    """
    for device in streams.concurrency:
        depths = device.busy_streams_ns
        must(
            streams.meta.inputs,
            not depths or sum(depths) == device.busy_ns,
            "times with one, two and more busy streams do not add up to the busy time",
        )
        possible = 0 <= device.hidden_ns <= device.communication_ns <= device.busy_ns
        must(streams.meta.inputs, possible, "more communication is hidden than there is")
    lanes = streams.streams
    bounded = lanes.select(
        ((pl.col("busy_ns") >= 0) & (pl.col("concurrent_ns").fill_null(0) <= pl.col("busy_ns"))).all()
    ).item()
    must(streams.meta.inputs, bool(bounded), "a stream is busy concurrently with others for longer than it is busy")
    return streams


def consistent_flame(flame: Flame) -> Flame:
    """Returns the flame graph after checking that its frames add up.

    Raises:
        Contradiction: the frames do not add up.
    """
    nodes = flame.nodes
    work = nodes.filter(~pl.col("idle").fill_null(value=False))["self_ns"]
    must(flame.meta.inputs, int(work.sum()) == flame.sum_ns, "frames do not add up to the sum of all work")
    least = nodes["self_ns"].min()
    must(flame.meta.inputs, least is None or int(str(least)) >= 0, "a frame has a negative duration")
    whole = int(nodes["self_ns"].sum()) == int(nodes["total_ns"][0])
    must(flame.meta.inputs, whole, "the outermost frame is not the sum of all others")
    return flame


def must(inputs: Sequence[str], holds: bool, what: str) -> None:  # noqa: FBT001 - as assert
    """Raises an error if a condition that figures must meet does not hold.

    Args:
        inputs: the inputs of the trace, for the message.
        holds: whether the condition holds.
        what: what is wrong if it does not, for the message.

    Raises:
        Contradiction: the condition does not hold.
    """
    if not holds:
        raise Contradiction(
            f"{named_inputs(inputs)}: {what}; no figures are shown, because they contradict each other: please "
            "report this and attach the trace"
        )
