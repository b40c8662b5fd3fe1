"""Details of single activities: names, places, launches. Texts are stored once and referred to by number.

A trace may hold any number of different texts. The `MOST_TEXTS` texts of each sort whose activities took the most
time are kept; all others are replaced by one text that states their number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.intervals import NO_ROW
from thence.model.kernel_names import short_names
from thence.model.places import PLACES, STATED, STATED_XLA
from thence.model.reasons import text_of

if TYPE_CHECKING:
    from thence.model.attributed import Attributed

MOST_TEXTS = 5_000
"""How many different names, places or calls are kept."""
LONGEST_TEXT = 600
"""How many characters of one text are kept."""
_SHORT = 160
_REPEATED = (
    "step",
    "iteration",
)  # numbered separately: as parts of places, they would make the places of every step different
_LONG = ("ops", "stack")
_SAID = tuple(
    kind for kind in PLACES if kind not in (*_REPEATED, *_LONG, "hlo")
)  # the HLO instruction is already the name


@dataclass(frozen=True)
class Details:
    """Facts about each activity, as the timeline shows them.

    Attributes:
        columns: one row per row of gpu, in its order: name (index in ``names``), place (index in ``places``), step
            and iteration (indices in ``steps``; null if none), call (index in ``calls``; null if the launch is
            unknown), lead_ns (from the start of the launch to the start of the activity; negative if clocks
            disagree) and call_ns (duration of the launch), both null without a launch.
        names: short name, and the recorded name if it differs, else None.
        kinds: kinds of the texts in ``places``, of `thence.model.places.KINDS`.
        places: for each place and kind, its text (None if there is none), and a sentence on why there is no text
            (else None).
        steps: names of steps and iterations.
        calls: the launching call and its thread, as text.
    """

    columns: pl.DataFrame
    names: tuple[tuple[str, str | None], ...]
    kinds: tuple[str, ...]
    places: tuple[tuple[tuple[str | None, str | None], ...], ...]
    steps: tuple[str, ...]
    calls: tuple[str, ...]


def activity_details(trace: Attributed) -> Details:
    """The facts about each activity of a trace.

    Args:
        trace: the attributed trace, with at least one activity.
    """
    name, names = _names(trace)
    kinds = _kinds(trace)
    place, places = _places(trace, kinds)
    steps, texts = _steps(trace)
    launches, calls = _launches(trace)
    columns = pl.DataFrame([name, place, *steps]).hstack(launches)
    return Details(columns, names, kinds, places, texts, calls)


def _numbered(trace: Attributed, keys: pl.DataFrame) -> tuple[pl.Series, pl.DataFrame, int]:
    """The number of each row's combination of values, the combinations with most time, and how many are left out.

    Rows whose values are all null have no combination; the number that they get is meaningless.
    """
    columns = keys.columns
    some = keys.with_columns(ns=trace.gpu["duration"]).filter(pl.any_horizontal(pl.col(columns).is_not_null()))
    counted = some.group_by(columns).agg(pl.col("ns").sum())
    kept = counted.sort("ns", *columns, descending=[True, *[False] * len(columns)])
    kept = kept.head(MOST_TEXTS).drop("ns").with_row_index("number")
    found = keys.join(kept, on=columns, how="left", nulls_equal=True, maintain_order="left")
    number = found["number"].fill_null(kept.height).cast(pl.Int32)
    return number, kept, counted.height - kept.height


def _names(trace: Attributed) -> tuple[pl.Series, tuple[tuple[str, str | None], ...]]:
    """Names of activities: the HLO instruction if it is known, else the recorded name."""
    keys = trace.gpu.select("name", "hlo").with_columns(pl.col("hlo", "name").cast(pl.Categorical))
    number, kept, left = _numbered(trace, keys)
    recorded = kept["name"].cast(pl.String).to_list()
    shown = kept.select(pl.coalesce(pl.col("hlo", "name").cast(pl.String))).to_series().to_list()
    short = short_names(text for text in shown if text is not None)
    names = [
        (short[text][:_SHORT], None if full == short[text] else full[:LONGEST_TEXT])
        for text, full in zip(shown, recorded, strict=True)
    ]
    return number.alias("name"), (*names, *_others(left, "names"))


def _others(left: int, what: str) -> list[tuple[str, None]]:
    return [(f"one of {left:,} other {what}, which took less time", None)] if left else []


def _kinds(trace: Attributed) -> tuple[str, ...]:
    """The kinds of places that any activity has, and the kinds whose absence is explained."""
    stated = STATED if trace.programs.is_empty() else STATED_XLA
    return tuple(kind for kind in _SAID if kind in stated or trace.places[kind].null_count() < trace.places.height)


def _places(
    trace: Attributed, kinds: tuple[str, ...]
) -> tuple[pl.Series, tuple[tuple[tuple[str | None, str | None], ...], ...]]:
    columns = [name for kind in kinds for name in (kind, f"{kind}_rule")]
    number, kept, left = _numbered(trace, trace.places.select(columns))
    texts = kept.select(pl.col(columns).cast(pl.String))
    places = [
        tuple(
            (row[i] and row[i][-LONGEST_TEXT:], None if row[i] else text_of(row[i + 1]))
            for i in range(0, len(columns), 2)
        )
        for row in texts.iter_rows()
    ]
    if left:
        said = f"one of {left:,} other places, which took less time"
        places.append(tuple((None, said) for _ in kinds))
    return number.alias("place"), tuple(places)


def _steps(trace: Attributed) -> tuple[list[pl.Series], tuple[str, ...]]:
    """Columns of indices for step and iteration, and the list of texts that both refer to."""
    texts: dict[str, int] = {}
    columns = []
    for kind in _REPEATED:
        column = trace.places[kind].cast(pl.String)
        for text in column.unique(maintain_order=True).drop_nulls().head(MOST_TEXTS):
            texts.setdefault(text, len(texts))
        of = {text: number for text, number in texts.items() if text is not None}
        columns.append(
            column.replace_strict(of, default=None, return_dtype=pl.Int32).alias(kind)
            if of
            else pl.Series(kind, [None], pl.Int32).new_from_index(0, len(column))
        )
    return columns, tuple(text[:_SHORT] for text in texts)


def _launches(trace: Attributed) -> tuple[pl.DataFrame, tuple[str, ...]]:
    """The launch of each activity: the host's call, else the launch of its XLA program."""
    gpu, host = trace.gpu, trace.host
    row = trace.places["launch"].cast(pl.UInt32)
    call = host.select("rank", "process", "thread", "name")[row.fill_null(0)] if len(host) else None
    begin = host["start"].gather(row) if call is not None else _nothing(len(row))
    took = host["duration"].gather(row) if call is not None else _nothing(len(row))
    keys = (
        pl.DataFrame({"name": _nothing(len(row)).cast(pl.String)})
        if call is None
        else call.select(*(pl.when(row.is_not_null()).then(name).alias(name) for name in call.columns))
    )
    program = pl.Series("program", _programs_without_a_call(trace, row))
    keys = keys.with_columns(program)
    begin = begin.fill_null(trace.programs["launch"].gather(program))
    took = took.fill_null(trace.programs["launch_duration"].gather(program))
    named = trace.programs["name"].cast(pl.String).gather(program)
    number, kept, left = _numbered(trace, keys.with_columns(program=named))
    known = begin.is_not_null()
    calls = [_call(texts) for texts in _with_threads(trace, kept).iter_rows(named=True)]
    frame = pl.DataFrame({"call": number, "lead_ns": gpu["start"] - begin, "call_ns": took})
    shown = frame.select(pl.when(known).then(name).alias(name) for name in frame.columns)
    return shown, (*calls, *(text for text, _ in _others(left, "calls")))


def _nothing(rows: int) -> pl.Series:
    return pl.Series([None], dtype=pl.Int64).new_from_index(0, rows)


def _programs_without_a_call(trace: Attributed, launch: pl.Series) -> pl.Series:
    """The row in programs of each activity whose own launch is unknown; null for other activities."""
    of = trace.gpu["program"].cast(pl.Int64).fill_null(NO_ROW).to_numpy()
    return pl.Series(np.where(launch.is_null().to_numpy(), of, NO_ROW)).replace(NO_ROW, None)


def _with_threads(trace: Attributed, kept: pl.DataFrame) -> pl.DataFrame:
    if "thread" not in kept.columns:
        return kept.with_columns(thread=None, thread_name=None, process=None)
    keys = ["rank", "process", "thread"]
    names = trace.threads.select(*keys, thread_name="name").unique(keys, keep="first")
    return kept.join(names, on=keys, how="left", maintain_order="left")


def _call(found: dict[str, object]) -> str:
    """The launching call and its thread, as text."""
    if found["name"] is None:
        return f"the launch of {found['program']}"[:LONGEST_TEXT]
    thread = f"thread {found['thread']}"
    name = str(found["thread_name"] or "")
    if name:  # some producers name a thread by its number
        thread = name if thread in name else f"{thread} ({name})"
    return f"{str(found['name'])[:_SHORT]} on {thread}"[:LONGEST_TEXT]
