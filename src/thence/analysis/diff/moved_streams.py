"""Was it worth moving work to another stream? What moved, the overlap gained, and the contention paid for it.

Streams are numbered differently from run to run, so a stream is identified by the rows (kernels and copies, by name,
place and shape) that run on it: the streams of all runs are sorted into classes, each into the class with which it
has most time in common, but two streams that have work in the same step never into the same class. A row moved if
almost all of its time is in another class after than before. Of two parts of a stream that separate, the smaller one
moved.

Let M be the work that moved, and N all work that ran at the same time as M on either side. With the time in which some
of a set of work ran, T, a step consists of

    step = T(M or N) + time of other work alone + idle
    T(M or N) = T(M) + T(N) - time in which both ran

so the change of the step is, exactly,

    contention (change of T(M) + change of T(N)) - overlap gained + change of other work + change of idle time
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.diff.estimates import estimates, run_means
from thence.analysis.diff.explanation import signed_ns
from thence.analysis.diff.sample import PLACED, STEP
from thence.analysis.diff.streams import SHAPE
from thence.model.kernel_names import clip, short_names
from thence.units import format_ns, signed_share

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from thence.analysis.diff.sample import Sample
    from thence.analysis.diff.streams import Streams

    Float = npt.NDArray[np.float64]
    Mask = npt.NDArray[np.bool_]

__all__ = ["PARTS", "MovedWork", "moved_work"]

PARTS = ("moved", "beside", "both", "either", "other", "idle")
"""Times of a step: T(M), T(N), both, T(M or N), other work alone, idle."""
MIN_MOVED_SHARE = 0.95
"""Share of a row's time that must be on another stream than before for the row to have moved. Of a row with less, it is
not known which launches moved."""
MIN_PARTLY_SHARE = 0.05
"""Share of a row's time on another stream from which on the row is reported as partly moved."""
MIN_STEP_SHARE = 0.001
"""Share of a step that the moved rows must take on either side: the share below which no row is shown."""
MAX_COUNT_CHANGE = 0.02
"""Share by which the number of launches of the moved work and of the work beside it may differ between the sides: if it
differs more, their time also changed for that reason, and contention is not known."""
MAX_NAMES = 3
MAX_NAME = 60


@dataclass(frozen=True)
class MovedWork:
    """Work that moved to another stream. Times are ns per step and device.

    Attributes:
        rows: what moved, most time first: name, short_name, label, module, op_name, op, before_ns, after_ns,
            before_count, after_count, moved_share (of its time).
        partly: rows of which a part moved, with the share: as ``rows``; their time counts as not moved.
        streams: number of streams of the busiest device, before and after.
        parts: the times of `PARTS`: before_ns, after_ns, difference_ns, and low_ns and high_ns, the 95 % interval of
            the difference, None where the noise is unknown.
        same_launches: whether the moved work and the work beside it were launched as often on both sides; if not,
            contention is unknown.
        verdict: faster, slower, same or unknown: that of the step; unknown where the step changed for other reasons.
        text: one sentence.
    """

    rows: pl.DataFrame
    partly: pl.DataFrame
    streams: tuple[int, int]
    parts: Mapping[str, Mapping[str, float | None]]
    same_launches: bool
    verdict: str
    text: str

    @property
    def overlap_gained_ns(self) -> float:
        """How much more time moved work ran at the same time as other work."""
        return self._change("both")

    @property
    def contention_ns(self) -> float | None:
        """How much longer the moved work and the work beside it became; None if they were not launched as often."""
        longer = self._change("moved") + self._change("beside")
        return longer if self.same_launches else None

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
        }


def moved_work(
    before: Sequence[Sample],
    after: Sequence[Sample],
    renamed: Mapping[tuple[str, str], str],
    total: Mapping[str, Any],
    known_share: float | None,
) -> MovedWork | None:
    """The work that runs on another stream after than before; None if there is none.

    Args:
        before: runs.
        after: runs.
        renamed: by and name of rows that are shown under another name, to that name.
        total: the row of the step, as `Row.to_json` returns it.
        known_share: share of a step by which runs of one program are known to differ, for sides of one run; None if
            the noise between runs was measured.
    """
    samples = [*before, *after]
    found = [sample.streams for sample in samples if sample.streams is not None]
    if len(found) < len(samples) or max(map(_streams, found)) < 2:
        return None
    sides = range(len(before)), range(len(before), len(samples))
    keys, rows = _rows(found, renamed, sides)
    moved = rows["moved_share"].to_numpy() >= MIN_MOVED_SHARE
    times = rows.select(pl.max_horizontal("before_ns", "after_ns")).to_series()
    least = MIN_STEP_SHARE * max(total["before_ns"], total["after_ns"])
    if times.filter(pl.Series(moved)).sum() < least:
        return None
    beside = _beside(found, keys, moved)
    parts = _times(samples, found, keys, (moved, beside), sides)
    launched = (
        rows.filter(pl.Series(moved | beside)).select("before_count", "after_count").sum().row(0)
    )
    same_launches = abs(launched[1] - launched[0]) <= MAX_COUNT_CHANGE * max(launched)
    partly = rows["moved_share"].is_between(MIN_PARTLY_SHARE, MIN_MOVED_SHARE, closed="left")
    ordered = ["before_ns", "name"]
    told = rows.filter(pl.Series(moved)).sort(ordered, descending=[True, False])
    verdict, text = _verdict(told, parts, total, known_share, same_launches=same_launches)
    streams = [max(_streams(found[n]) for n in side) for side in sides]
    return MovedWork(
        told,
        rows.filter(partly & (times >= least)).sort(ordered, descending=[True, False]),
        (streams[0], streams[1]),
        parts,
        same_launches,
        verdict,
        text,
    )


def _rows(
    runs: Sequence[Streams], renamed: Mapping[tuple[str, str], str], sides: tuple[range, range]
) -> tuple[list[npt.NDArray[np.int64]], pl.DataFrame]:
    """The key of each row of each run, and the rows by key: those of `_keys`, and the figures of `MovedWork.rows`."""
    keys, names = _keys(runs, renamed, len(sides[0]))
    times = _class_times(runs, keys, names.height, sides)
    sums = [side.sum(axis=1) for side in times]
    parts = [
        np.divide(s, t[:, None], out=np.zeros_like(s), where=t[:, None] > 0)
        for s, t in zip(times, sums, strict=True)
    ]
    share = np.abs(parts[1] - parts[0]).sum(axis=1) / 2
    counts = [
        _counts([runs[n] for n in side], [keys[n] for n in side], names.height) for side in sides
    ]
    return keys, names.with_columns(
        before_ns=sums[0],
        after_ns=sums[1],
        before_count=counts[0],
        after_count=counts[1],
        # Whether a row moved that one side does not have is not known.
        moved_share=np.where((sums[0] > 0) & (sums[1] > 0), share, 0.0),
    )


def _streams(run: Streams) -> int:
    """Number of streams with work of the device that has most."""
    counts = run.on.group_by("device").agg(pl.col("stream").n_unique())["stream"].to_list()
    return max(counts, default=0)


def _keys(
    runs: Sequence[Streams], renamed: Mapping[tuple[str, str], str], count: int
) -> tuple[list[npt.NDArray[np.int64]], pl.DataFrame]:
    """Which rows of the runs are the same row.

    Rows with the same name, places and shape are, and of the others those with the same name and shape.

    Args:
        runs: those before, and those after.
        renamed: as for `moved_work`.
        count: number of runs before.

    Returns:
        For each run the key of each of its rows, and one row for each key: name, short_name and places.
    """
    names = {name: new for (by, name), new in renamed.items() if by == "kernel"}
    table = pl.concat([
        run.rows.select(
            pl.lit(number).alias("run"), pl.col("name").replace(names), *PLACED, *SHAPE
        )
        for number, run in enumerate(runs)
    ])  # fmt: skip
    table = table.with_columns(side=pl.col("run") >= count)
    exact = ["name", *PLACED, *SHAPE]
    matched = table.select(both=pl.col("side").n_unique().over(exact) == 2)["both"]
    blank = [pl.when(matched).then(pl.col(kind)).alias(kind) for kind in PLACED]
    table = table.with_columns(blank).with_columns(matched=matched)
    distinct = table.select("matched", *exact).unique(maintain_order=True)
    numbers = table.join(
        distinct.with_row_index("key"),
        on=["matched", *exact],
        how="left",
        nulls_equal=True,
        maintain_order="left",
    )
    keys = [part["key"].to_numpy().astype(np.int64) for part in numbers.partition_by("run")]
    short = short_names(distinct["name"].unique().to_list())
    shown = distinct.select("name", pl.col("name").replace(short).alias("short_name"), *PLACED)
    return keys, shown


def _class_times(
    runs: Sequence[Streams],
    keys: Sequence[npt.NDArray[np.int64]],
    count: int,
    sides: tuple[range, range],
) -> list[Float]:
    """The time of each row in each class of streams: for each side an array of shape (rows, classes)."""
    streams = []
    for number, run in enumerate(runs):
        together: dict[int, set[int]] = {}
        for one, other in run.together.iter_rows():
            together.setdefault(one, set()).add(other)
        for (stream,), part in run.on.group_by("stream", maintain_order=True):
            times = np.bincount(
                keys[number][part["row"].to_numpy()], part["ns"].to_numpy(), count
            ).astype(np.float64)
            streams.append((number, int(str(stream)), times, together.get(int(str(stream)), set())))
    streams.sort(key=lambda entry: -float(entry[2].sum()))
    classes: list[Float] = []
    members: list[dict[int, set[int]]] = []
    result = [np.zeros((count, len(streams))) for _ in sides]
    for number, stream, times, conflicts in streams:
        whole = times.sum()
        common = [
            0.0
            if members[n].get(number, set()) & conflicts
            else float(np.minimum(times, known).sum() / max(1e-9, min(whole, known.sum())))
            for n, known in enumerate(classes)
        ]
        best = int(np.argmax(common)) if common and max(common) > 0 else len(classes)
        if best == len(classes):
            classes.append(np.zeros(count))
            members.append({})
        classes[best] = np.maximum(classes[best], times)
        members[best].setdefault(number, set()).add(stream)
        side = 0 if number in sides[0] else 1
        result[side][:, best] += times / len(sides[side])
    return result


def _counts(runs: Sequence[Streams], keys: Sequence[npt.NDArray[np.int64]], count: int) -> Float:
    """Launches of each row per step, mean over the runs of a side."""
    each = [
        np.bincount(key[run.on["row"].to_numpy()], run.on["count"].to_numpy(), count)
        for run, key in zip(runs, keys, strict=True)
    ]
    return np.asarray(np.mean(each, axis=0), np.float64)


def _sets_with(run: Streams, key: npt.NDArray[np.int64], rows: Mask) -> Mask:
    """Which sets of a run contain any of the rows."""
    number = run.members["set"].to_numpy()
    result = np.zeros(int(number.max(initial=-1)) + 1, np.bool_)
    result[number[rows[key[run.members["row"].to_numpy()]]]] = True
    return result


def _beside(runs: Sequence[Streams], keys: Sequence[npt.NDArray[np.int64]], moved: Mask) -> Mask:
    """The rows that ran at the same time as moved ones in any run, and did not move."""
    result = np.zeros(len(moved), np.bool_)
    for run, key in zip(runs, keys, strict=True):
        row = key[run.members["row"].to_numpy()]
        result[row[_sets_with(run, key, moved)[run.members["set"].to_numpy()]]] = True
    return result & ~moved


def _times(
    samples: Sequence[Sample],
    found: Sequence[Streams],
    keys: Sequence[npt.NDArray[np.int64]],
    which: tuple[Mask, Mask],
    sides: tuple[range, range],
) -> dict[str, dict[str, float | None]]:
    """The times of `PARTS`, with their differences and intervals; ``which``: the rows that moved, those beside them."""
    parts = []
    for sample, run, key in zip(samples, found, keys, strict=True):
        has_moved, has_beside = (_sets_with(run, key, rows) for rows in which)
        ours, step, ns = (run.sets[name].to_numpy() for name in ("set", "step", "ns"))
        length = sample.rows.filter(pl.col("by") == STEP).sort("step")["ns"].to_numpy()
        one, other = has_moved[ours], has_beside[ours]
        masks = (one, other, one & other, one | other, ~(one | other))
        sums = [np.bincount(step[mask], ns[mask], len(length)).astype(np.float64) for mask in masks]
        sums.append(length - sums[3] - sums[4])
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
    rows: pl.DataFrame,
    parts: Mapping[str, Mapping[str, float | None]],
    total: Mapping[str, Any],
    known_share: float | None,
    *,
    same_launches: bool,
) -> tuple[str, str]:
    """The verdict and its sentence; arguments as in `MovedWork` and `moved_work`."""

    def value(part: str, key: str = "difference_ns") -> float:
        return float(parts[part][key] or 0)

    names = [clip(name, MAX_NAME) for name in rows["short_name"].unique(maintain_order=True)]
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    gained, contention = value("both"), value("moved") + value("beside")
    overlap = (
        f"overlap gained {format_ns(gained)}"
        if gained >= 0
        else f"overlap lost {format_ns(-gained)}"
    )
    paid = (
        f"contention paid {format_ns(contention)}"
        if contention >= 0
        else f"contention saved {format_ns(-contention)}"
    )
    if not same_launches:
        paid = f"contention unknown (other numbers of launches: {signed_ns(contention)})"
    others = ", ".join(
        f"{name} {signed_ns(value(part))}"
        for name, part in (("idle", "idle"), ("other work", "other"))
    )
    own, verdict = contention - gained, total["verdict"]
    if not same_launches:
        verdict = "unknown"
        judged = "whether it paid is not known: the work changed, too"
    elif verdict in ("faster", "slower") and own * total["difference_ns"] <= 0:
        verdict = "unknown"
        judged = f"the step is {total['verdict']}, but not because of what moved"
    else:
        judged = {
            "faster": "moving it paid",
            "slower": "moving it did not pay",
            "same": "moving it changed nothing: the step is the same within 1 %",
        }.get(verdict, "whether it paid is not known, because the change of the step may be noise")
    change = (
        "" if total["difference_share"] is None else f" ({signed_share(total['difference_share'])}"
    )
    if change and total["low_share"] is not None and known_share is None:
        low, high = (f"{100 * total[key]:+.1f}" for key in ("low_share", "high_share"))
        change += f", 95 % interval {low} to {high} %"
    elif change and known_share is not None:
        change += f"; runs of one program differ by up to {100 * known_share:.0f} %"
    change += ")" if change else ""
    return verdict, (
        f"on another stream: {', '.join(names[:MAX_NAMES])}{more}, "
        f"{format_ns(value('moved', 'before_ns'))} of a step: {overlap}, {paid}, {others}; "
        f"step {format_ns(total['before_ns'])} -> {format_ns(total['after_ns'])}{change}: {judged}"
    )
