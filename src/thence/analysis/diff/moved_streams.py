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
from thence.analysis.diff.sample import PLACED, STEP
from thence.analysis.diff.streams import SHAPE
from thence.model.kernel_names import clip, short_names
from thence.units import format_ns, signed_share

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from thence.analysis.diff.compare import Row
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
MAX_NAMES = 3
MAX_NAME = 60


@dataclass(frozen=True)
class MovedWork:
    """Work that moved to another stream. Times are ns per step and device.

    Attributes:
        rows: what moved, most time first: name, short_name, label, module, op_name, op, before_ns, after_ns, count.
        partly: rows of which a part moved, with the share: as ``rows``; their time counts as not moved.
        streams: number of streams of the busiest device, before and after.
        parts: the times of `PARTS`: before_ns, after_ns, difference_ns, and low_ns and high_ns, the 95 % interval of
            the difference, None where the noise is unknown.
        verdict: faster, slower, same or unknown: that of the step; unknown where the step changed for other reasons.
        text: one sentence.
    """

    rows: pl.DataFrame
    partly: pl.DataFrame
    streams: tuple[int, int]
    parts: Mapping[str, Mapping[str, float | None]]
    verdict: str
    text: str

    @property
    def overlap_gained_ns(self) -> float:
        """How much more time moved work ran at the same time as other work."""
        return self._change("both")

    @property
    def contention_ns(self) -> float:
        """How much longer the moved work and the work beside it became."""
        return self._change("moved") + self._change("beside")

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
    total: Row,
    known_share: float | None,
) -> MovedWork | None:
    """The work that runs on another stream after than before; None if there is none.

    Args:
        before: runs.
        after: runs.
        renamed: by and name of rows that are shown under another name, to that name.
        total: the row of the step.
        known_share: share of a step by which runs of one program are known to differ, for sides of one run; None if
            the noise between runs was measured.
    """
    samples = [*before, *after]
    found = [sample.streams for sample in samples if sample.streams is not None]
    if len(found) < len(samples) or max(map(_streams, found)) < 2:
        return None
    sides = range(len(before)), range(len(before), len(samples))
    keys, names = _keys(found, renamed, len(before))
    shares = _class_times(found, keys, names.height, sides)
    sums = [side.sum(axis=1) for side in shares]
    known = (sums[0] > 0) & (sums[1] > 0)
    parts = [
        np.divide(s, t[:, None], out=np.zeros_like(s), where=t[:, None] > 0)
        for s, t in zip(shares, sums, strict=True)
    ]
    changed = np.where(known, np.abs(parts[1] - parts[0]).sum(axis=1) / 2, 0.0)
    moved = changed >= MIN_MOVED_SHARE
    step_ns = max(total.before_ns, total.after_ns)
    if max(float(side[moved].sum()) for side in sums) < MIN_STEP_SHARE * step_ns:
        return None
    times = _times(samples, found, keys, moved, sides)
    rows = names.with_columns(before_ns=sums[0], after_ns=sums[1], moved_share=changed)
    rows = rows.sort("before_ns", "name", descending=[True, False])
    partly = pl.col("moved_share").is_between(MIN_PARTLY_SHARE, MIN_MOVED_SHARE, closed="left")
    least = pl.max_horizontal("before_ns", "after_ns") >= MIN_STEP_SHARE * step_ns
    told = rows.filter(pl.col("moved_share") >= MIN_MOVED_SHARE)
    verdict, text = _verdict(told, times, total, known_share)
    streams = [max(_streams(found[n]) for n in side) for side in sides]
    return MovedWork(
        told, rows.filter(partly & least), (streams[0], streams[1]), times, verdict, text
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


def _times(
    samples: Sequence[Sample],
    found: Sequence[Streams],
    keys: Sequence[npt.NDArray[np.int64]],
    moved: Mask,
    sides: tuple[range, range],
) -> dict[str, dict[str, float | None]]:
    """The times of `PARTS`, with their differences and intervals."""
    beside = np.zeros(len(moved), np.bool_)
    runs = []
    for run, key in zip(found, keys, strict=True):
        members = run.members
        number, row = members["set"].to_numpy(), key[members["row"].to_numpy()]
        has_moved = np.zeros(int(number.max(initial=-1)) + 1, np.bool_)
        has_moved[number[moved[row]]] = True
        beside[row[has_moved[number] & ~moved[row]]] = True
        runs.append((number, row, has_moved))
    parts = []
    for sample, run, (number, row, has_moved) in zip(samples, found, runs, strict=True):
        has_beside = np.zeros(len(has_moved), np.bool_)
        has_beside[number[beside[row]]] = True
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
    total: Row,
    known_share: float | None,
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
    others = ", ".join(
        f"{name} {'+' if value(part) >= 0 else '-'}{format_ns(abs(value(part)))}"
        for name, part in (("idle", "idle"), ("other work", "other"))
    )
    own, verdict = contention - gained, total.verdict
    if verdict in ("faster", "slower") and own * total.difference_ns <= 0:
        verdict = "unknown"
        judged = f"the step is {total.verdict}, but not because of what moved"
    else:
        judged = {
            "faster": "moving it paid",
            "slower": "moving it did not pay",
            "same": "moving it changed nothing: the step is the same within 1 %",
        }.get(verdict, "whether it paid is not known: the step changed by no more than noise")
    share = total.to_json()
    change = (
        "" if share["difference_share"] is None else f" ({signed_share(share['difference_share'])}"
    )
    if change and share["low_share"] is not None and known_share is None:
        low, high = (f"{100 * share[key]:+.1f}" for key in ("low_share", "high_share"))
        change += f", 95 % interval {low} to {high} %"
    elif change and known_share is not None:
        change += f"; runs of one program differ by up to {100 * known_share:.0f} %"
    change += ")" if change else ""
    return verdict, (
        f"on another stream: {', '.join(names[:MAX_NAMES])}{more}, "
        f"{format_ns(value('moved', 'before_ns'))} of a step: {overlap}, {paid}, {others}; "
        f"step {format_ns(total.before_ns)} -> {format_ns(total.after_ns)}{change}: {judged}"
    )
