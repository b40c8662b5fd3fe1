"""Was it worth moving work to another stream? What moved, the overlap gained, and the contention paid for it.

Streams are numbered differently from run to run, so a stream is identified by the rows (kernels and copies, by name,
place and shape) that run on it: the streams of all runs are sorted into classes, each into the class with which it
has most time in common, but two streams that have work in the same step never into the same class. A row moved if
almost all of its launches are in another class after than before, and moved partly if some of them are. Of two parts
of a stream that separate, the smaller one moved.

XLA numbers its kernels anew in each compilation (loop_add_fusion_2 may be another fusion after a change), and tunes
their grids anew. So rows of XLA are told apart by the names of kernels without numbers and by the functions that their
source lines are in, not by grid and op_name; matrix products, for which it also chooses the library anew, by function.

Let W be the work that moved or partly moved, and all work that ran on other streams at the same time as it on either
side. With T(s), the time in which work of W ran in class s, and T, the time in which any of W ran, a step is

    step = T + time of other work alone + idle
    T = sum of all T(s) - overlapped time

so the change of the step is, exactly,

    contention (change of the sum of all T(s)) - overlap gained + change of other work + change of idle time

It does not matter for this which launches of a row moved.

The HLO of XLA programs says where the compiler placed an instruction (`thence.model.hlo`), the streams where it ran:
both are stated, and work that was placed elsewhere and ran where it ran before is no move.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.diff.estimates import estimates, run_means
from thence.analysis.diff.explanation import signed_ns
from thence.analysis.diff.matching import family
from thence.analysis.diff.sample import PLACED, STEP
from thence.analysis.diff.streams import OWN_STREAM, SHAPE
from thence.analysis.grouping.kernel_groups import groups_of_names
from thence.model.columns import mask_of
from thence.model.intervals import NO_ROW
from thence.model.kernel_names import clip, short_names
from thence.model.thresholds import (
    MOVED_COUNT_SHARE,
    MOVED_SHARE,
    MOVED_VERDICT_SHARE,
    NEGLIGIBLE_STEP_SHARE,
    PARTLY_MOVED_SHARE,
)
from thence.units import format_ns, signed_share

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from thence.analysis.diff.sample import Sample
    from thence.analysis.diff.streams import Streams
    from thence.model.arrays import Float64, Int64, Mask


PARTS = ("streams", "overlapped", "any", "other", "idle")
"""Times of a step: the sum of all T(s), overlapped time, T, other work alone, idle."""
_LINE = r":\d+\b"
"""The number of a source line."""
MAX_NAMES = 3
MAX_NAME = 60


@dataclass(frozen=True)
class MovedWork:
    """Work that moved to another stream. Times are ns per step and device.

    Attributes:
        rows: what moved, most time first: name, short_name, label, module, op_name, op, before_ns, after_ns,
            before_count, after_count, moved_share (of its launches), before_placement and after_placement (where
            the HLO of XLA programs has at least 5 % of them, joined by "and": own stream, stream 1, asynchronous; null
            without HLO).
        partly: rows of which a part moved: as ``rows``.
        placed_only: rows that are placed elsewhere in HLO after than before, but did not move; as ``rows``.
        streams: number of streams of the busiest device, before and after.
        parts: the times of `PARTS`: before_ns, after_ns, difference_ns, and low_ns and high_ns, the 95 % interval of
            the difference, None where the noise is unknown.
        same_launches: whether the moved work and the work beside it were launched as often on both sides; if not,
            contention is unknown.
        verdict: faster, slower, same or unknown: that of the step; unknown where the step changed for other reasons.
            not_moved if work is placed elsewhere in HLO and none moved; the times are those of that work then.
        text: one sentence.
    """

    rows: pl.DataFrame
    partly: pl.DataFrame
    placed_only: pl.DataFrame
    streams: tuple[int, int]
    parts: Mapping[str, Mapping[str, float | None]]
    same_launches: bool
    verdict: str
    text: str

    @property
    def overlap_gained_ns(self) -> float:
        """How much more the streams with moved work and those beside it ran at the same time."""
        return self._change("overlapped")

    @property
    def contention_ns(self) -> float | None:
        """How much longer the moved work and the work beside it became; None if they were not launched as often."""
        return self._change("streams") if self.same_launches else None

    def _change(self, part: str) -> float:
        return float(self.parts[part]["difference_ns"] or 0)

    def to_json(self) -> dict[str, Any]:
        """As the command line prints it."""
        return {
            "verdict": self.verdict,
            "text": self.text,
            "overlap_gained_ns": self.overlap_gained_ns,
            "contention_ns": self.contention_ns,
            "other_ns": self._change("other"),
            "idle_ns": self._change("idle"),
            "parts": {name: dict(part) for name, part in self.parts.items()},
            "streams": {"before": self.streams[0], "after": self.streams[1]},
            "rows": self.rows.to_dicts(),
            "partly": self.partly.to_dicts(),
            "placed_only": self.placed_only.to_dicts(),
        }


def moved_work(
    before: Sequence[Sample],
    after: Sequence[Sample],
    renamed: Mapping[tuple[str, str], str],
    total: Mapping[str, Any],
    known_share: float | None,
) -> MovedWork | None:
    """The work that runs on another stream after than before, or that HLO places on another one; None if there is none.

    Args:
        before: runs.
        after: runs.
        renamed: by and name of rows that are shown under another name, to that name.
        total: the row of the step, as `Row.to_json` returns it.
        known_share: share of a step by which runs of one program are known to differ, for sides of one run; None if
            the noise between runs was measured.
    """
    samples = [*before, *after]
    recorded = [sample.streams for sample in samples if sample.streams is not None]
    if len(recorded) < len(samples) or min(map(_streams, recorded)) < 1 or not any(map(_may_move, recorded)):
        return None
    sides = range(len(before)), range(len(before), len(samples))
    keys, classes, rows = _rows(recorded, renamed, sides)
    share = pl.col("moved_share")
    most = rows.select(pl.max_horizontal("before_ns", "after_ns") * share).to_series()
    least = NEGLIGIBLE_STEP_SHARE * max(total["before_ns"], total["after_ns"])
    moved = (rows["moved_share"] >= PARTLY_MOVED_SHARE).to_numpy()
    placed = mask_of(rows["before_placement"] != rows["after_placement"]) & ~moved
    ran = bool(most.filter(pl.Series(moved)).sum() >= least)
    if (
        not ran
        and rows.filter(pl.Series(placed)).select(pl.max_horizontal("before_ns", "after_ns")).sum().item() < least
    ):
        return None
    concerned = moved if ran else placed
    work = concerned | _beside(recorded, keys, concerned)
    parts = _times(samples, recorded, keys, classes, work, sides)
    launched = rows.filter(pl.Series(work)).select("before_count", "after_count").sum().row(0)
    same_launches = abs(launched[1] - launched[0]) <= MOVED_COUNT_SHARE * max(launched)
    told = rows.with_columns(placed=placed).sort("before_ns", "name", descending=[True, False])
    chosen = (
        ran & (share >= MOVED_SHARE),
        ran
        & share.is_between(PARTLY_MOVED_SHARE, MOVED_SHARE, closed="left")
        & (pl.max_horizontal("before_ns", "after_ns") * share >= least),
        pl.col("placed"),
    )
    wholly, partly, placed_only = (told.filter(rule).drop("placed") for rule in chosen)
    if ran:
        verdict, text = _verdict((wholly, partly), parts, total, known_share, same_launches=same_launches)
    else:
        verdict, text = "not_moved", _not_moved(placed_only)
    streams = [max(_streams(recorded[n]) for n in side) for side in sides]
    return MovedWork(wholly, partly, placed_only, (streams[0], streams[1]), parts, same_launches, verdict, text)


def _may_move(run: Streams) -> bool:
    """Whether a run has several streams, or work that HLO places on another one than its program's own."""
    return _streams(run) > 1 or bool((run.rows["placement"] != OWN_STREAM).any())


def _rows(
    runs: Sequence[Streams], renamed: Mapping[tuple[str, str], str], sides: tuple[range, range]
) -> tuple[list[Int64], list[Int64], pl.DataFrame]:
    """What the rows of the runs are.

    Returns:
        For each run the key of each of its rows, as `_keys` returns it; for each run the class of each row's stream;
        and the rows by key, with the figures of `MovedWork.rows`.
    """
    keys, names = _keys(runs, renamed, len(sides[0]))
    classes = _classes(runs, keys, names.height)
    count = 1 + max(int(each.max(initial=-1)) for each in classes)
    times, launches = [], []
    for side in sides:
        ns, by_class = np.zeros(names.height), np.zeros((names.height, count))
        for number in side:
            on, key = runs[number].on, keys[number]
            row = on["row"].to_numpy()
            np.add.at(ns, key[row], on["ns"].to_numpy() / len(side))
            place = (key[row], classes[number][row])
            np.add.at(by_class, place, on["count"].to_numpy() / len(side))
        times.append(ns)
        launches.append(by_class)
    counts = [by_class.sum(axis=1) for by_class in launches]
    parts = [
        np.divide(by_class, whole[:, None], out=np.zeros_like(by_class), where=whole[:, None] > 0)
        for by_class, whole in zip(launches, counts, strict=True)
    ]
    share = np.abs(parts[1] - parts[0]).sum(axis=1) / 2
    rows = names.with_columns(
        before_ns=times[0],
        after_ns=times[1],
        before_count=counts[0],
        after_count=counts[1],
        # Whether a row moved that one side does not have is not known.
        moved_share=np.where((counts[0] > 0) & (counts[1] > 0), share, 0.0),
        before_placement=_placements(runs, keys, sides[0], names.height),
        after_placement=_placements(runs, keys, sides[1], names.height),
    )
    return keys, classes, rows


def _placements(runs: Sequence[Streams], keys: Sequence[Int64], side: range, count: int) -> pl.Series:
    """Where the HLO of one side has each of ``count`` rows, as text; null where it is not known."""
    ran = pl.concat([
        runs[number].on.select(
            "count",
            key=pl.lit(pl.Series(keys[number])).gather("row"),
            placement=pl.lit(runs[number].rows["placement"]).gather("row"),
        )
        for number in side
    ])  # fmt: skip
    share = pl.col("count") / pl.col("count").sum().over("key")
    of_key = (
        ran.drop_nulls()
        .group_by("key", "placement")
        .agg(pl.col("count").sum())
        .filter(share >= PARTLY_MOVED_SHARE)
        .sort("placement")
        .group_by("key")
        .agg(pl.col("placement").str.join(" and "))
    )
    return pl.DataFrame({"key": np.arange(count)}).join(of_key, on="key", how="left", maintain_order="left")[
        "placement"
    ]


def _streams(run: Streams) -> int:
    """Number of streams with work of the device that has most."""
    counts = run.on.group_by("device").agg(pl.col("stream").n_unique())["stream"].to_list()
    return max(counts, default=0)


def _keys(
    runs: Sequence[Streams], renamed: Mapping[tuple[str, str], str], count: int
) -> tuple[list[Int64], pl.DataFrame]:
    """Which rows of the runs are the same row.

    Rows with the same name, places and shape are, and of the others those with the same name and shape. For XLA,
    names are without numbers, and the place is the function of the source line.

    Args:
        runs: those before, and those after.
        renamed: as for `moved_work`.
        count: number of runs before.

    Returns:
        For each run the key of each of its rows, and one row for each key: name, short_name and places.
    """
    names = {name: new for (by, name), new in renamed.items() if by == "kernel"}
    table = pl.concat([
        run.rows.select(pl.lit(number).alias("run"), "name", *PLACED, *SHAPE, "xla", "source")
        for number, run in enumerate(runs)
    ])  # fmt: skip
    ours = table.filter("xla")["name"].unique()
    built = {
        name: group if group == "GEMM" else family(name)
        for name, group in zip(ours, groups_of_names(ours), strict=True)
    }
    function = pl.col("source").str.replace(_LINE, "")
    xla = {
        "name": pl.col("name").replace(built),
        "op_name": function,
        **{name: pl.lit(None, table.schema[name]) for name in ("op", *SHAPE[:3])},
    }
    table = table.with_columns(
        pl.when("xla").then(value).otherwise(pl.col(name).replace(names) if name == "name" else name).alias(name)
        for name, value in xla.items()
    ).drop("xla", "source")
    table = table.with_columns(side=pl.col("run") >= count)
    exact = ["name", *PLACED, *SHAPE]
    matched = table.select(both=pl.col("side").n_unique().over(exact) == 2)["both"]
    blank = [pl.when(matched).then(pl.col(kind)).alias(kind) for kind in PLACED]
    table = table.with_columns(blank).with_columns(matched=matched)
    distinct = table.select("matched", *exact).unique(maintain_order=True)
    numbers = table.join(
        distinct.with_row_index("key"), on=["matched", *exact], how="left", nulls_equal=True, maintain_order="left"
    )
    keys = [part["key"].to_numpy().astype(np.int64) for part in numbers.partition_by("run")]
    short = short_names(distinct["name"].unique().to_list())
    shown = distinct.select("name", pl.col("name").replace(short).alias("short_name"), *PLACED)
    return keys, shown


def _classes(runs: Sequence[Streams], keys: Sequence[Int64], count: int) -> list[Int64]:
    """The class of the stream of each row, for each run; `NO_ROW` for rows that ran in no counted step."""
    streams = []
    result = [np.full(run.rows.height, NO_ROW, np.int64) for run in runs]
    for number, run in enumerate(runs):
        together: dict[int, set[int]] = {}
        for stream_number, other_number in run.together.iter_rows():
            together.setdefault(stream_number, set()).add(other_number)
        for (stream,), part in run.on.group_by("stream", maintain_order=True):
            rows = part["row"].to_numpy()
            times = np.bincount(keys[number][rows], part["ns"].to_numpy(), count)
            name = int(str(stream))
            streams.append((number, name, rows, times, together.get(name, set())))
    streams.sort(key=lambda entry: -float(entry[3].sum()))
    classes: list[Float64] = []
    members: list[dict[int, set[int]]] = []
    for number, name, rows, times, conflicts in streams:
        whole = times.sum()
        common = [
            0.0
            if members[n].get(number, set()) & conflicts
            else float(np.minimum(times, known).sum() / max(1e-9, min(whole, known.sum())))  # a stream may have no time
            for n, known in enumerate(classes)
        ]
        best = int(np.argmax(common)) if common and max(common) > 0 else len(classes)
        if best == len(classes):
            classes.append(np.zeros(count))
            members.append({})
        classes[best] = np.maximum(classes[best], times)
        members[best].setdefault(number, set()).add(name)
        result[number][rows] = best
    return result


def _sets_with(run: Streams, rows: Mask) -> Mask:
    """Which sets of a run contain any of its rows."""
    number = run.members["set"].to_numpy()
    result = np.zeros(int(number.max(initial=-1)) + 1, np.bool_)
    result[number[rows[run.members["row"].to_numpy()]]] = True
    return result


def _beside(runs: Sequence[Streams], keys: Sequence[Int64], moved: Mask) -> Mask:
    """The rows that ran at the same time as moved ones in any run."""
    result = np.zeros(len(moved), np.bool_)
    for run, key in zip(runs, keys, strict=True):
        row = key[run.members["row"].to_numpy()]
        result[row[_sets_with(run, moved[key])[run.members["set"].to_numpy()]]] = True
    return result


def _times(
    samples: Sequence[Sample],
    runs: Sequence[Streams],
    keys: Sequence[Int64],
    classes: Sequence[Int64],
    work: Mask,
    sides: tuple[range, range],
) -> dict[str, dict[str, float | None]]:
    """The times of `PARTS`, with their differences and intervals; ``work``: the rows of W."""
    parts = []
    for sample, run, key, of_row in zip(samples, runs, keys, classes, strict=True):
        ours, step, ns = (run.sets[name].to_numpy() for name in ("set", "step", "ns"))
        length = sample.rows.filter(pl.col("by") == STEP).sort("step")["ns"].to_numpy()
        within = np.where(work[key], of_row, np.int64(NO_ROW))
        having = [_sets_with(run, within == n)[ours] for n in np.unique(within[within != NO_ROW])]
        some = np.any(having, axis=0) if having else np.zeros(len(ours), np.bool_)
        # of no rows, bincount returns integers
        any_of, other, *each = (
            np.bincount(step[mask], ns[mask], len(length)).astype(np.float64) for mask in (some, ~some, *having)
        )
        streams = np.sum(each, axis=0) if each else np.zeros(len(length))
        sums = (streams, streams - any_of, any_of, other, length - any_of - other)
        frames = [
            pl.DataFrame({"step": np.arange(len(length), dtype=np.int32), "ns": values})
            .with_columns(by=pl.lit("streams"), name=pl.lit(name), count=pl.lit(0.0))
            .select(sample.rows.columns)
            for name, values in zip(PARTS, sums, strict=True)
        ]
        parts.append(replace(sample, rows=pl.concat(frames)))
    means = run_means(parts, {})
    between = estimates(means, *sides)
    result: dict[str, dict[str, float | None]] = {}
    for name in PARTS:
        row = means.keys.index(("streams", name))
        result[name] = {
            "before_ns": float(between.before[row]),
            "after_ns": float(between.after[row]),
            "difference_ns": float(between.after[row] - between.before[row]),
            "low_ns": _finite(between.low[row]),
            "high_ns": _finite(between.high[row]),
        }
    return result


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _verdict(
    rows: tuple[pl.DataFrame, pl.DataFrame],
    parts: Mapping[str, Mapping[str, float | None]],
    total: Mapping[str, Any],
    known_share: float | None,
    *,
    same_launches: bool,
) -> tuple[str, str]:
    """The verdict and its sentence; ``rows``: those that moved, and partly; others as in `MovedWork`, `moved_work`."""

    def change(part: str) -> float:
        return float(parts[part]["difference_ns"] or 0)

    gained, contention = change("overlapped"), change("streams")
    longest = max(float(parts["overlapped"][f"{side}_ns"] or 0) for side in ("before", "after"))
    if longest < NEGLIGIBLE_STEP_SHARE * max(total["before_ns"], total["after_ns"]):
        overlap, paid = "hardly any overlap", f"their own time {signed_ns(contention)}"
    else:
        overlap = f"overlap {'gained' if gained >= 0 else 'lost'} {format_ns(abs(gained))}"
        paid = f"contention {'paid' if contention >= 0 else 'saved'} {format_ns(abs(contention))}"
        if not same_launches:
            paid = f"contention unknown (other numbers of launches: {signed_ns(contention)})"
    verdict = total["verdict"]
    reasons = {
        "the moved work": contention - gained,
        "idle time, which includes waits at the joins": change("idle"),
        "other work": change("other"),
    }
    sign = -1 if verdict == "faster" else 1
    reason = max(reasons, key=lambda name: sign * reasons[name])
    own = sign * reasons["the moved work"]
    if not same_launches:
        verdict = "unknown"
        judged = "whether it paid is not known: the work changed, too"
    elif verdict in ("faster", "slower") and own < MOVED_VERDICT_SHARE * abs(total["difference_ns"]):
        judged = f"the step is {verdict} because of {reason}"
        verdict = "unknown"
    else:
        judged = {
            "faster": "moving it paid",
            "slower": "moving it did not pay",
            "same": "moving it changed nothing: the step is the same within 1 %",
        }.get(verdict, "whether it paid is not known, because the change of the step may be noise")
    return verdict, (
        f"on another stream: {_names(*rows)}{_in_hlo(pl.concat(rows))}: {overlap}, {paid}, "
        f"idle {signed_ns(change('idle'))}, "
        f"other work {signed_ns(change('other'))}; "
        f"step {format_ns(total['before_ns'])} -> {format_ns(total['after_ns'])}"
        f"{_change_of_step(total, known_share)}: {judged}"
    )


def _not_moved(placed: pl.DataFrame) -> str:
    """The sentence for work that is placed elsewhere in HLO and runs where it ran."""
    names = placed["short_name"].unique(maintain_order=True).to_list()
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    named = ", ".join(clip(name, MAX_NAME) for name in names[:MAX_NAMES])
    return (
        f"HLO places {named}{more} elsewhere{_in_hlo(placed)}, but at run time it is on the same stream: nothing moved"
    )


def _in_hlo(rows: pl.DataFrame) -> str:
    """Where HLO has these rows, before and after; empty if it is not known of both sides."""
    sides = []
    for side in ("before", "after"):
        places = rows[f"{side}_placement"].drop_nulls().str.split(" and ").explode().unique().sort().to_list()
        sides.append(" and ".join(places))
    return f" (in HLO: {sides[0]} -> {sides[1]})" if all(sides) else ""


def _names(rows: pl.DataFrame, partly: pl.DataFrame) -> str:
    """What moved, and how long it takes; names of what moved partly with the share."""
    by_name = (
        pl.concat([rows, partly])
        .group_by("short_name", maintain_order=True)
        .agg(pl.col("before_ns").sum(), moved=(pl.col("before_ns") * pl.col("moved_share")).sum())
    )
    moved = float(by_name["moved"].sum())
    shown = by_name.sort("moved", descending=True, maintain_order=True)
    names = []
    for name, whole, part in shown.iter_rows():
        share = "" if part >= MOVED_SHARE * whole else f" ({100 * part / whole:.0f} % of its launches)"
        names.append(clip(name, MAX_NAME) + share)
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{', '.join(names[:MAX_NAMES])}{more}, {format_ns(moved)} of a step"


def _change_of_step(total: Mapping[str, Any], known_share: float | None) -> str:
    """The change of the step and its interval, in parentheses."""
    if total["difference_share"] is None:
        return ""
    text = signed_share(total["difference_share"])
    if known_share is not None:
        text += f"; runs of one program differ by up to {100 * known_share:.0f} %"
    elif total["low_share"] is not None:
        low, high = (f"{100 * total[key]:+.1f}" for key in ("low_share", "high_share"))
        text += f", 95 % interval {low} to {high} %"
    return f" ({text})"
