"""Experimental: where inside kernels multiprocessors spent their time, and what their warps waited for.

Each multiprocessor that holds warps notes one of them every so many cycles: so samples are shares of the time in which
multiprocessors held warps. Shares are of all samples, also of those whose kernel is not known: rows and these add up
to 1. The standard error of a share s of n samples is sqrt(s (1 - s) / n): by so much it would differ if the same
kernels were sampled at other cycles. What differs from run to run is not in it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import polars as pl

from thence.errors import MissingData
from thence.model.answer import Answer, TableView
from thence.model.kernel_names import short_names
from thence.model.stall_reasons import STALL_REASONS
from thence.units import format_count, format_share, several

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from thence.model.attributed import Attributed

_REASONS_SHOWN, _MIN_SHOWN = 3, 0.1
"""Reasons of a line that are shown, and the smallest share of its samples that those after the first have."""
_LINES_SHOWN = 20
_LACKING = "the trace holds no samples of program counters: thence record --stalls takes them"
_COUNTED = ("samples", "unplaced", "dropped", "overflows", "missed", "ended", "unseen", "unlooked", "left_out")


@dataclass(frozen=True)
class Stalls(Answer):
    """Samples of program counters by kernel, line and reason.

    Attributes:
        rows: kernel, file and line (null: unknown), reason (code), samples, share (of all samples), error (standard
            error of the share); the largest first, over all ranks and devices.
        samples: all of them that were not lost; `unplaced`: of code that CUPTI does not name.
        dropped: samples that the hardware lost; `overflows`: how often its buffer was full, and its samples were lost.
        period_cycles: cycles of a multiprocessor from one sample to the next.
        notes: what is missing, one sentence each.
    """

    rows: pl.DataFrame
    samples: int
    unplaced: int
    dropped: int
    overflows: int
    period_cycles: int
    notes: tuple[str, ...]

    @property
    def lines(self) -> pl.DataFrame:
        """The kernel (short), place (file:line), samples, share, its error, and the main reasons; largest first."""
        keys = ("kernel", "file", "line")
        of_reason = pl.col("samples") / pl.col("samples").sum()
        lines = self.rows.group_by(keys, maintain_order=True).agg(
            pl.col("samples").sum(), reasons=pl.struct("reason", part=of_reason).head(_REASONS_SHOWN)
        )
        lines = with_share(lines, self.samples).sort("samples", *keys, descending=[True, False, False, False])
        file_lines = lines.select("file", "line").rows()
        places = [f"{PurePath(file).name}:{line}" if file else "-" for file, line in file_lines]
        words = [_in_words(reasons) for reasons in lines["reasons"].to_list()]
        return lines.select(
            pl.col("kernel").replace_strict(short_names(lines["kernel"].unique()), return_dtype=pl.String),
            pl.Series("place", places, pl.String),
            "samples",
            "share",
            error_share=pl.col("error"),
            waits_for=pl.Series(words, dtype=pl.String),
        )

    def about(self) -> tuple[str, ...]:
        """How many samples there are, and of how many the kernel is not known."""
        unknown = f", {format_share(self.unplaced, self.samples)} of them in code that has no name"
        text = f"{several(self.samples, 'sample')} of program counters{unknown if self.unplaced else ''}"
        return (f"{text}, one each {format_count(self.period_cycles)} cycles of a multiprocessor",)

    def views(self) -> tuple[TableView, ...]:
        """The largest lines."""
        headings = {
            "kernel": "kernel",
            "place": "line",
            "share": "share",
            "error_share": "error",
            "waits_for": "waits for",
        }
        return (TableView(self.lines.head(_LINES_SHOWN), headings, self.about()[0], bar="share"),)

    def remarks(self) -> tuple[str, ...]:
        """How many lines are not shown, and what is missing."""
        more = self.rows.select("kernel", "file", "line").n_unique() - _LINES_SHOWN
        return (*([f"{several(more, 'more line')}: json and csv have all"] if more > 0 else ()), *self.notes)

    def to_frame(self) -> pl.DataFrame:
        """`rows`."""
        return self.rows

    def to_json(self) -> dict[str, Any]:
        """The rows as ``stalls``, and the sums as ``stall_samples``."""
        return {
            "stalls": self.rows.to_dicts(),
            "stall_samples": {
                "samples": self.samples,
                "unplaced": self.unplaced,
                "dropped": self.dropped,
                "overflows": self.overflows,
                "period_cycles": self.period_cycles,
            },
        }


def _in_words(reasons: Sequence[Mapping[str, Any]]) -> str:
    """The main reasons of a line, and their shares of its samples."""
    shown = [reason for number, reason in enumerate(reasons) if not number or reason["part"] >= _MIN_SHOWN]
    return ", ".join(
        f"{STALL_REASONS.get(item['reason'], item['reason'])} {100 * item['part']:.0f} %" for item in shown
    )


def stalls(trace: Attributed) -> Stalls:
    """Samples of program counters of a trace.

    Raises:
        MissingData: it has none; the message says why, where the recording does.
    """
    facts = [fact["stalls"] for fact in trace.meta.facts if fact.get("stalls")]
    sums = Counter[str]()
    for fact in facts:
        sums.update({name: fact[name] for name in _COUNTED})
    placed = int(trace.stalls["samples"].sum())
    if not placed:
        troubles = [fact["trouble"] for fact in facts if fact["trouble"]]
        raise MissingData(next(iter(troubles), _LACKING))
    samples = max(sums["samples"] - sums["dropped"], placed + sums["unplaced"]) if _is_whole(trace) else placed
    unplaced = samples - placed
    keys = ("kernel", "file", "line", "reason")
    texts = trace.stalls.with_columns(pl.col(pl.Categorical).cast(pl.String))
    rows = texts.group_by(keys, maintain_order=True).agg(pl.col("samples").sum())
    rows = with_share(rows, samples).sort("samples", *keys, descending=[True, *[False] * 4])
    period = max((fact["period_cycles"] for fact in facts), default=0)
    return Stalls(rows, samples, unplaced, sums["dropped"], sums["overflows"], period, tuple(_notes(sums)))


def with_share(rows: pl.DataFrame, samples: int) -> pl.DataFrame:
    """Rows with the share of their samples in all samples, and its standard error."""
    share = pl.col("samples") / samples
    return rows.with_columns(share=share, error=(share * (1 - share) / samples).sqrt())


def _is_whole(trace: Attributed) -> bool:
    """Whether all ranks and devices are selected: sums of the recording are of all of them."""
    return not (trace.selection.ranks or trace.selection.devices)


def _notes(sums: Mapping[str, int]) -> list[str]:
    texts = {
        "unplaced": "{} belong to code that CUPTI does not name, such as its own",
        "unseen": "{} belong to modules that were loaded before sampling began: these have no lines",
        "dropped": "{} were lost by the hardware",
    }
    notes = [text.format(several(sums[name], "sample")) for name, text in texts.items() if sums[name]]
    if sums["overflows"]:
        notes.append(f"the buffer of the hardware was full {several(sums['overflows'], 'time')}: its samples were lost")
    if sums["ended"]:
        notes.append(f"the last samples of {several(sums['ended'], 'context')} that ended are missing")
    if sums["missed"]:
        notes.append(f"{several(sums['missed'], 'context')} were not sampled, because there are too many")
    if sums["unlooked"] or sums["left_out"]:
        notes.append(
            f"lines of {several(sums['unlooked'], 'instruction')} and {several(sums['left_out'], 'module')} were not "
            "looked up, for lack of time and memory: these are by function"
        )
    return notes
