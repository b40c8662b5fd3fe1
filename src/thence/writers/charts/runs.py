"""Charts of a whole run: where its time went, its steps over time, and a step of each of its ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.units import format_ns, format_share, listed, several
from thence.writers.charts.chart import Chart
from thence.writers.charts.description import COLOURS, NEUTRAL, Axis, Series
from thence.writers.text.printable import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.analysis.ranks.answer import Job
    from thence.analysis.report.headline import RunPart
    from thence.analysis.steps.over_time import StepsOverTime

_BLUE, _ORANGE, _TEAL, _WINE, _LILAC, _RED, _BROWN, _VIOLET = COLOURS
_NO_WAITS = "No rank makes another one wait"
_STEPS = "typical steps"
_BAND = {
    "start_up": ("start-up", _BROWN),
    "first": ("first step", _ORANGE),
    "warm_up": ("warm-up steps", _LILAC),
    "steps": (_STEPS, _BLUE),
    "outlier": ("outlying steps", _WINE),
    "last": ("last step", _TEAL),
    "between": ("between steps", _VIOLET),
    "unrecorded": ("not recorded", NEUTRAL),
    "after": ("after the steps", NEUTRAL),
}
"""Name and colour of each part of a run, roughly in the order of time."""
_MAX_RANKS = 12
_NO_STEP = "no step"
_MAX_NAMED = 4


def run_chart(run: Sequence[RunPart]) -> Chart:
    """The parts of a recording as one bar, with compilation as a part of its own."""
    whole = max(sum(part.ns for part in run), 1)
    named = {part.part: part for part in run}
    series = []
    for key, (title, colour) in _BAND.items():
        part = named.get(key)
        if part is None or not part.ns:
            continue
        compiling = min(part.compile_ns, part.ns)
        busy = f"{format_share(part.ns, whole)} of the recording; GPU busy {format_ns(part.busy_ns)} of it"
        pieces = (("compiling", compiling, _RED), (title, part.ns - compiling, colour))
        series += [
            Series(name, "bar", pl.DataFrame({"name": ["recording"], "ns": [ns], "note": [busy]}), painted)
            for name, ns, painted in pieces
            if ns
        ]
    return Chart(
        "The recording",
        tuple(series),
        Axis("ns", "", "ns"),
        Axis("name", scale="rows"),
        "Mean over the GPUs; parts are in the order of time, equal ones together.",
        {"recording": format_ns(whole)},
    )


def steps_chart(steps: StepsOverTime) -> Chart:
    """Every step over time: compute, communication that nothing hides, and idle time."""
    rule = pl.format("{}: not typical ({})", "name", pl.col("left_out").str.replace("_", "-"))
    rows = steps.rows.with_columns(note=pl.coalesce(rule, "name"))
    parts = (
        ("compute and copies", "compute_ns", _BLUE),
        ("exposed communication", "exposed_ns", _ORANGE),
        ("idle", "idle_ns", NEUTRAL),
    )
    series = tuple(
        Series(name, "column", rows.select("start_ns", "end", "note", duration_ns=column), colour)
        for name, column, colour in parts
        if rows[column].sum()
    )
    mean = f", mean of {several(steps.devices, 'GPU')}" if steps.devices > 1 else ""
    lines = [f"{several(steps.steps, 'step')}{mean}."]
    if steps.too_long.height:
        named = [f"{printable(name)} ({format_ns(ns)})" for name, ns in steps.too_long.head(_MAX_NAMED).rows()]
        more = steps.too_long.height - len(named)
        lines.append(f"Too long to be drawn beside the others: {listed(named)}{f' and {more} more' if more else ''}.")
    return Chart(
        "Steps over time",
        series,
        Axis("start_ns", "since the first step", "ns"),
        Axis("duration_ns", "duration", "ns"),
        "\n".join(lines),
    )


def ranks_chart(job: Job) -> Chart:
    """What a step of a rank is made of: of the ranks that made the others wait most, and of the rank in the middle."""
    rows = job.ranks.head(_MAX_RANKS)
    why = job.reasons[0] if job.reasons else None
    if why is not None and why.median_rank is not None:
        compared = (pl.col("rank") == why.median_rank) & (pl.col("device") == why.median_device)
        rows = pl.concat([rows, job.ranks.filter(compared)]).unique(["rank", "device"], maintain_order=True)
    name = pl.format("rank {} GPU {}", "rank", "device") + pl.when("straggler").then(pl.lit(" - late")).otherwise(
        pl.lit("")
    )
    rows = rows.with_columns(name=name)
    parts = (
        ("compute", "compute_ns", _BLUE), ("waits for others", "exposed_wait_ns", _ORANGE),
        ("wait or transfer", "unknown_ns", _LILAC), ("transfers", "transfer_ns", _TEAL),
        ("memcpy", "copy_ns", _BROWN), ("idle", "idle_ns", NEUTRAL),
    )  # fmt: skip
    series = tuple(
        Series(title, "bar", rows.select("name", mean_ns=pl.col(column).fill_null(0)), colour)
        for title, column, colour in parts
        if rows[column].sum()
    )
    shown = "" if rows.height == job.ranks.height else f"{several(rows.height, 'rank')} of {job.ranks.height:,}. "
    title, caption = (
        "A step of each rank",
        "At the right: the mean step, and the waits of others that the rank caused, of a step.",
    )
    steps = [_NO_STEP if step is None else format_ns(step) for step in rows["step_ns"]]
    caused = [format_share(share or 0, 1) for share in rows["caused_share"]]
    texts = {name: f"{step}, caused {share}" for name, step, share in zip(rows["name"], steps, caused, strict=True)}
    if shown:
        title = "A step of the ranks for which the others wait most"
    if not job.ranks["caused_share"].sum():
        title = f"A step of {several(rows.height, 'rank')}" if shown else title
        waits = "Which rank waits for which is not known" if job.ranks["unknown_ns"].sum() else _NO_WAITS
        caption = f"{waits}. At the right: the mean step."
        texts = dict(zip(rows["name"], steps, strict=True))
    return Chart(
        title,
        series,
        Axis("mean_ns", f"mean {job.per}", "ns"),
        Axis("name", scale="rows"),
        f"{shown}Communication counts where nothing is computed meanwhile. {caption}",
        texts,
    )
