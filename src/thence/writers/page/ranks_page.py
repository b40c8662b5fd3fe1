"""A job as one HTML page: a heat map of ranks and steps, and a list of the ranks, two of them expanded.

The page needs no server and no network. It holds figures as base64 arrays of 32-bit floats, and texts as JSON in which
every character that could end the script element is escaped. The script shows texts only as text, never as HTML.
"""

from __future__ import annotations

import base64
import json
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.ranks.answer import GROUPS, LINKS, STAGES, not_caused, reason_rows, straggler_lines
from thence.analysis.ranks.timeline_rows import opened, step_columns
from thence.writers.page.template import as_data, filled
from thence.writers.text.printable import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from thence.analysis.ranks.answer import Job

MAX_CELLS = 1_500_000
"""Most cells of the heat map. With more, a column is the mean of several consecutive steps, which a note states."""

_MAPS = ("wait_ns", "compute_ns", "step_ns", "caused_ns")
_FIGURES = (
    *("wait_caused_ns", "caused_share", "times_last", "step_ns", "busy_ns", "compute_ns"),
    *("copy_ns", "exposed_wait_ns", "transfer_ns", "unknown_ns", "idle_ns", "steps_per_second"),
)


def ranks_html(job: Job, inputs: Sequence[str], notes: Sequence[str]) -> str:
    """The page of a job.

    Args:
        job: the job to show.
        inputs: names of the inputs.
        notes: sentences to list on the page.
    """
    shown = ", ".join(printable(name) for name in inputs[:4]) + (", ..." if len(inputs) > 4 else "")
    text = json.dumps(_data(job, shown, notes), separators=(",", ":"))
    title = escape(f"thence ranks - {shown}")
    return filled("ranks.html", {"title": title, "data": as_data(text)})


def _data(job: Job, inputs: str, notes: Sequence[str]) -> dict[str, Any]:
    columns, labels = step_columns(job, MAX_CELLS)
    maps = _maps(job, columns, len(labels))
    binned = len(labels) < len(job.keys)
    binned_note = [f"{len(job.keys):,} steps are shown in {len(labels):,} columns, the mean of each"] if binned else []
    return {
        "inputs": inputs,
        "statement": printable(job.statement),
        "per": job.per,
        "notes": [*binned_note, *(printable(note) for note in notes)],
        "rank": job.ranks["rank"].to_list(),
        "device": job.ranks["device"].to_list(),
        "straggler": job.ranks["straggler"].to_list(),
        "figures": {name: _packed(job.ranks[name].to_numpy()) for name in _FIGURES},
        "steps": [printable(label) for label in labels],
        "counted": _counted(job, columns, len(labels)),
        "maps": {name: _packed(values) for name, values in maps.items()},
        "reasons": _reasons(job),
        "open": [list(place) for place in opened(job)],
        "tables": [
            _table("Waits that no rank caused", *not_caused(job)),
            _table("Groups", job.groups, GROUPS),
            _table("Pipeline stages", job.stages, STAGES),
            _table("Slow links", job.links, LINKS),
        ],
    }


def _counted(job: Job, columns: npt.NDArray[np.int64], count: int) -> list[bool]:
    """For each column, whether it has a step that the figures include (`Job.counted`)."""
    counted = set(job.counted)
    counts = np.array([key in counted for key in job.keys], np.bool_)
    shown: list[bool] = (np.bincount(columns[counts], minlength=count) > 0).tolist()
    return shown


def _reasons(job: Job) -> list[dict[str, Any]]:
    reasons = []
    for (row, sentence), why in zip(straggler_lines(job), job.reasons, strict=True):
        lines = reason_rows(why)
        reasons.append(
            {
                "rank": row["rank"],
                "device": row["device"],
                "text": printable(sentence),
                "rows": [[c, ns, share, printable(where)] for c, ns, share, where in lines.iter_rows()],
            }
        )
    return reasons


def _maps(job: Job, columns: npt.NDArray[np.int64], count: int) -> dict[str, npt.NDArray[np.float32]]:
    """For each map the mean by device (in the order of `Job.ranks`) and column, flat; NaN where there is no step."""
    places = job.ranks.select("rank", "device", row=pl.int_range(pl.len()))
    steps = pl.DataFrame({"key": list(job.keys), "column": columns}, schema={"key": pl.String, "column": pl.Int64})
    cells = job.cells.join(places, on=["rank", "device"]).join(steps, on="key")
    cell = cells["row"].to_numpy() * count + cells["column"].to_numpy()
    many = np.bincount(cell, minlength=places.height * count)
    maps = {}
    for name in _MAPS:
        sums = np.bincount(cell, cells[name].to_numpy().astype(np.float64), minlength=places.height * count)
        maps[name] = np.divide(sums, many, out=np.full(len(sums), np.nan), where=many > 0).astype(np.float32)
    return maps


def _packed(values: npt.NDArray[Any]) -> str:
    """The values as little-endian 32-bit floats in base64."""
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


def _table(title: str, rows: pl.DataFrame, headings: Mapping[str, str]) -> dict[str, Any]:
    values = rows.select(*headings).head(200).rows()
    return {
        "title": title,
        "columns": list(headings),
        "headings": list(headings.values()),
        "rows": [[printable(v) if isinstance(v, str) else v for v in row] for row in values],
    }
