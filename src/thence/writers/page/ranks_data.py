"""The ranks of a job for the page: a heat map of ranks and steps, and tables.

The heat map's figures are base64 arrays of little-endian 32-bit floats, row by row in the order of `Job.ranks`; NaN
where a rank has no such step. ``templates/heat_map.js`` draws them.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.ranks.answer import LINKS, STAGES, not_caused, reason_rows, shown_groups, straggler_lines
from thence.analysis.ranks.timeline_rows import step_columns
from thence.writers.page.report_tables import Field, frame_data
from thence.writers.text.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

    from thence.analysis.ranks.answer import Job

MAX_CELLS = 60_000
"""Most cells of the heat map. With more, a column is the mean of several consecutive steps, which the page states."""
MAX_COLUMNS = 200
"""Most columns: so many can be told apart on a narrow screen."""
MAX_RANKS = 4096
"""Most ranks in the table, and rows of the heat map: those that made the others wait most."""
MAPS = {"wait_ns": "waits", "compute_ns": "compute", "step_ns": "step", "caused_ns": "wait caused"}
"""Columns of `Job.cells` that the heat map can show, with their titles. What is 0 in all counted steps is left out."""

_RANK_FIELDS = (
    Field("name", "rank", "text"),
    Field("caused_share", "waits it caused, of a step", "share", bar=True),
    Field("times_last", "times last", "count"),
    Field("since_step", "late since", "text"),
    Field("step_ns", "step", "ns"),
    Field("compute_ns", "compute", "ns"),
    Field("exposed_wait_ns", "exposed waits", "ns"),
    Field("unknown_ns", "wait or transfer", "ns"),
    Field("transfer_ns", "transfers", "ns"),
    Field("copy_ns", "memcpy", "ns"),
    Field("idle_ns", "idle", "ns"),
    Field("steps_per_second", "steps/s", "number"),
)
_REASON_FIELDS = (
    Field("cause", "cause of its extra time", "text"),
    Field("per_step_ns", "a step", "ns", bar=True),
    Field("share", "share", "share"),
    Field("where", "where", "text"),
)


def heat_map(job: Job) -> dict[str, Any] | None:
    """The heat map as JSON values; None for a job without several ranks and steps, or without any figure above 0."""
    ranks = job.ranks.head(MAX_RANKS)
    if ranks.height < 2 or len(job.keys) < 2:
        return None
    columns, labels = step_columns(job, min(MAX_CELLS, MAX_COLUMNS * ranks.height))
    counted = _counted(job, columns, len(labels))
    maps = {title: _map(job, ranks, columns, len(labels), name) for name, title in MAPS.items()}
    coloured = np.tile(np.array(counted) if any(counted) else np.ones(len(labels), np.bool_), ranks.height)
    maps = {title: values for title, values in maps.items() if (values[coloured] > 0).any()}
    if not maps:
        return None
    return {
        "names": [f"rank {rank} GPU {device}" for rank, device in ranks.select("rank", "device").rows()],
        "by_rank": ranks.with_row_index("row").sort("rank", "device")["row"].to_list(),
        "late": ranks["straggler"].to_list(),
        "steps": [printable(label) for label in labels],
        "counted": counted,
        "maps": [{"title": title, "values": _packed(values)} for title, values in maps.items()],
    }


def heat_notes(job: Job) -> Iterator[str]:
    """What must be said of the heat map."""
    ranks = min(job.ranks.height, MAX_RANKS)
    columns, labels = step_columns(job, min(MAX_CELLS, MAX_COLUMNS * ranks))
    if len(labels) < len(columns):
        yield f"{len(job.keys):,} steps are shown in {len(labels):,} columns, the mean of each"
    if ranks < job.ranks.height:
        yield f"{ranks:,} of {job.ranks.height:,} ranks are shown: those that made the others wait most"


def rank_tables(job: Job) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, title and data of each table of a job: every rank, then what it holds of groups, stages and links."""
    unknown = job.ranks["unknown_ns"].sum()
    some = job.stragglers.height > 0
    nobody = not job.ranks["caused_share"].sum()
    left_out = {"unknown_ns": not unknown, "since_step": not some, "caused_share": nobody, "times_last": nobody}
    rows = job.ranks.with_columns(
        name=pl.format("rank {} GPU {}", "rank", "device"),
        since_step=pl.when("straggler").then(pl.col("since_step").cast(pl.String)),
    )
    fields = [field for field in _RANK_FIELDS if not left_out.get(field.column)]
    yield "ranks", "Every rank", frame_data(rows, fields, "times are means of a step", most=MAX_RANKS)
    waits, of_waits = not_caused(job)
    for name, title, (frame, headings) in (
        ("waits-not-caused", "Waits that no rank caused", (waits, of_waits | {"why": "why"})),
        ("groups", "Groups", shown_groups(job)),
        ("stages", "Pipeline stages", (job.stages, STAGES)),
        ("links", "Slow links", (job.links, LINKS)),
    ):
        if frame.height:
            yield name, title, frame_data(frame, _fields(frame, headings))


def reason_tables(job: Job) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """For each rank that is late: its number in a name, a sentence about it, and why it is late as a table."""
    for number, ((_, sentence), why) in enumerate(zip(straggler_lines(job), job.reasons, strict=True)):
        yield f"late-{number}", sentence, frame_data(reason_rows(why), _REASON_FIELDS)


def _fields(frame: pl.DataFrame, headings: Mapping[str, str]) -> list[Field]:
    """Fields of columns, whose kinds are those of their types and units."""
    fields = []
    for column, title in headings.items():
        kind = "ns" if column.endswith("_ns") else "share" if column.endswith("share") else "count"
        fields.append(Field(column, title, kind if frame[column].dtype.is_numeric() else "text"))
    return fields


def _counted(job: Job, columns: npt.NDArray[np.int64], count: int) -> list[bool]:
    """For each column, whether it has a step that the figures include (`Job.counted`)."""
    counted = set(job.counted)
    counts = np.array([key in counted for key in job.keys], np.bool_)
    shown: list[bool] = (np.bincount(columns[counts], minlength=count) > 0).tolist()
    return shown


def _map(
    job: Job, ranks: pl.DataFrame, columns: npt.NDArray[np.int64], count: int, name: str
) -> npt.NDArray[np.float64]:
    """The mean of a column of `Job.cells` by rank and column, flat; NaN where there is no step."""
    places = ranks.select("rank", "device", row=pl.int_range(pl.len()))
    steps = pl.DataFrame({"key": list(job.keys), "column": columns}, schema={"key": pl.String, "column": pl.Int64})
    cells = job.cells.join(places, on=["rank", "device"]).join(steps, on="key")
    cell = cells["row"].to_numpy() * count + cells["column"].to_numpy()
    many = np.bincount(cell, minlength=places.height * count)
    sums = np.bincount(cell, cells[name].to_numpy().astype(np.float64), minlength=places.height * count)
    means: npt.NDArray[np.float64] = np.divide(sums, many, out=np.full(len(sums), np.nan), where=many > 0)
    return means


def _packed(values: npt.NDArray[Any]) -> str:
    """The values as little-endian 32-bit floats in base64."""
    return base64.b64encode(values.astype("<f4").tobytes()).decode()
