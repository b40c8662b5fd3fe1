"""The answers of ``thence steps``.

`StepTable` has the steps in order of time with their idle time by cause, their spread, and outliers. `StepKinds` has
the time per step of an inference server, by what the step computes, and by layer and kernel inside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.idle.causes import idle_causes
from thence.analysis.idle.host_causes import CAUSES
from thence.analysis.selection.windows import cut_to_windows
from thence.analysis.steps.plain_step import of_some_steps, plain_step, why_no_plain_step
from thence.analysis.steps.windows import STEP, selected_steps, steps
from thence.attribution.serving import server_passes
from thence.errors import MissingData
from thence.model.answer import Answer, TableView
from thence.model.columns import mask_of, row_numbers
from thence.model.intervals import chain_to
from thence.model.kernel_names import short_names
from thence.model.layers import folded_names
from thence.model.reasons import REASONS
from thence.model.thresholds import OUTLIER_DEVIATIONS, OUTLIER_SHARE, STANDARD_DEVIATIONS_PER_MAD
from thence.model.totals import must
from thence.units import format_ns, several

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thence.analysis.steps.plain_step import PlainStep
    from thence.analysis.steps.windows import Steps
    from thence.model.arrays import Int64
    from thence.model.attributed import Attributed


@dataclass(frozen=True)
class StepTable(Answer):
    """The steps of a trace, one row per rank, device and step.

    Attributes:
        steps: the windows, as `thence.analysis.steps.windows.Steps`.
        frame: columns of `STEP`, then ``idle_<cause>_ns`` for each cause that occurs; these add up to idle_ns.
        spread: rank, device, steps (count), mean_ns, median_ns, std_ns (sample standard deviation; null for one step),
            min_ns, max_ns. Of the typical steps; of all steps of a device without a typical one.
        outliers: rank, device, step, duration, excess_ns (over the median of its device), because (the part of the
            step that exceeds its own median most: busy, exposed or ``idle_<cause>``), because_ns (by how much). A
            step is one if it exceeds the median by more than `OUTLIER_SHARE` of it and `OUTLIER_DEVIATIONS` robust
            standard deviations: the measure by which `thence.analysis.steps.windows` leaves steps out.
        plain: the step without recording; None if it is not known, as in traces that are no recordings, or if a range
            of steps is selected.
        no_plain: why it is not known; empty if it is, and for traces that are no recordings of steps.
    """

    steps: Steps
    frame: pl.DataFrame
    spread: pl.DataFrame
    outliers: pl.DataFrame
    plain: PlainStep | None = None
    no_plain: str = ""

    @property
    def count(self) -> int:
        """Number of steps: that of the device with most."""
        return int(str(self.frame.group_by("rank", "device").len()["len"].max() or 0))

    @property
    def basis(self) -> str:
        """What the steps are, and which of them are not typical, in words."""
        return self.steps.basis

    def about(self) -> tuple[str, ...]:
        """See `Answer`."""
        return (several(self.frame.height, "step"),)

    def views(self) -> tuple[TableView, ...]:
        """The steps with their idle time by cause, the largest first, and the spread of each device."""
        plain = list(self.plain_said())
        title = "\n".join([*plain, f"{several(self.count, 'step')}: {self.basis}"])
        steps = {
            "rank": "rank", "device": "GPU", "step": "step", "duration": "duration", "busy_ns": "busy",
            "exposed_ns": "exposed", "idle_ns": "idle",
        }  # fmt: skip
        causes = [name for name in self.frame.columns if name.startswith("idle_") and name != "idle_ns"]
        causes.sort(key=lambda name: -int(self.frame[name].to_numpy().sum()))
        spread = {
            "rank": "rank", "device": "GPU", "steps": "steps", "median_ns": "median", "mean_ns": "mean",
            "std_ns": "std", "min_ns": "shortest", "max_ns": "longest",
        }  # fmt: skip
        headings = steps | {name: name.removeprefix("idle_").removesuffix("_ns") for name in causes}
        return TableView(self.frame, headings, title, bar="duration"), TableView(self.spread, spread)

    def remarks(self) -> Iterator[str]:
        """The steps that stand out."""
        for row in self.outliers.iter_rows(named=True):
            yield (
                f"rank {row['rank']} GPU {row['device']}: {row['step']} took {format_ns(row['excess_ns'])} longer than "
                f"the median step; {row['because'].replace('idle_', 'idle by ')} grew most, by "
                f"{format_ns(row['because_ns'])}"
            )

    def to_frame(self) -> pl.DataFrame:
        """The steps."""
        return self.frame.drop("row")

    def self_check(self) -> None:
        """Checks that their times are possible and add up.

        Raises:
            Contradiction: a time is impossible, or times do not add up.
        """
        causes = [name for name in self.frame.columns if name not in STEP]
        ordered = (
            (pl.min_horizontal("exposed_ns", "idle_ns", *causes) >= 0)
            & (pl.col("exposed_ns") <= pl.col("communication_ns"))
            & (pl.col("communication_ns") <= pl.col("busy_ns"))
            & (pl.col("busy_ns") + pl.col("idle_ns") == pl.col("duration"))
        )
        possible = self.frame.select(ordered.all()).item()
        must(self.caveats.inputs, bool(possible), "the parts of a step do not add up to it")
        idle = self.frame.select((pl.sum_horizontal(*causes, pl.lit(0)) == pl.col("idle_ns")).all())
        must(self.caveats.inputs, bool(idle.item()), "the causes of a step's idle time do not add up to it")

    def plain_said(self) -> Iterator[str]:
        """One sentence on the step without recording, or on why it is not known."""
        if self.plain is not None:
            yield f"{self.plain.text} ({self.plain.basis})"
        elif self.no_plain:
            yield f"how long a step takes without being recorded is not known: {self.no_plain}"

    def to_json(self) -> dict[str, Any]:
        """The answer as JSON values; tables are data frames, which take a tenth of the memory of Python's objects."""
        times = {"start": "start_ns", "duration": "duration_ns", "host_start": "host_start_ns"}
        return {
            "kind": self.steps.kind,
            "what": self.steps.what,
            "idle_is": "at most" if self.caveats.work_missing else "exact",
            "plain_step_ns": None if self.plain is None else self.plain.to_json(),
            "no_plain_step": self.no_plain,
            "steps": self.frame.drop("row").rename(times),
            "spread": self.spread,
            "outliers": self.outliers.rename({"duration": "duration_ns"}),
        }


def step_table(trace: Attributed) -> StepTable:
    """The steps with their idle time by cause, spread and outliers.

    Args:
        trace: the attributed trace; if a part of it is selected, the steps in which selected work was launched.

    Raises:
        MissingData: the trace holds no steps, or none of the selected ones.
    """
    selected = selected_steps(trace)
    # The columns are those of causes that occur in any step, whichever steps are selected.
    frame = _with_causes(trace.around, steps(trace).frame).join(
        selected.frame, on=["rank", "device", "row"], how="semi", maintain_order="left"
    )
    some = of_some_steps(trace)
    plain = None if some else plain_step(trace.step_times)
    if plain is not None:
        plain = plain.beside_other_processes(float(str(selected.typical["busy_ns"].median())))
    return StepTable(
        selected,
        frame,
        _spread(frame),
        _outliers(frame),
        plain,
        "" if some or plain is not None else why_no_plain_step(trace),
    )


def _with_causes(trace: Attributed, frame: pl.DataFrame) -> pl.DataFrame:
    """Adds a column of idle time for each cause that occurs."""
    pieces = idle_causes(trace, frame)
    piece, row, start, end = cut_to_windows(pieces, frame)
    return frame.hstack(_by_cause(row, pieces["cause"].gather(piece), end - start, frame.height))


def _by_cause(row: Int64, cause: pl.Series, ns: Int64, rows: int) -> pl.DataFrame:
    """Columns ``idle_<cause>_ns`` with a value for each row."""
    columns = {}
    for name in CAUSES:
        of_cause = mask_of(cause == name)
        if of_cause.any():
            columns[f"idle_{name}_ns"] = sums = np.zeros(rows, np.int64)
            np.add.at(sums, row[of_cause], ns[of_cause])
    return pl.DataFrame(columns)


def _spread(frame: pl.DataFrame) -> pl.DataFrame:
    duration = pl.col("duration")
    typical = pl.col("left_out").is_null()
    return (
        frame.filter(typical | ~typical.any().over("rank", "device"))
        .group_by("rank", "device", maintain_order=True)
        .agg(
            steps=pl.len().cast(pl.Int64),
            mean_ns=duration.mean(),
            median_ns=duration.median(),
            std_ns=duration.std(),
            min_ns=duration.min(),
            max_ns=duration.max(),
        )
    )


def _outliers(frame: pl.DataFrame) -> pl.DataFrame:
    """Steps that take much longer than the others of their device, with the part that grew most."""
    causes = [name for name in frame.columns if name not in STEP]
    parts = {
        "busy": pl.col("busy_ns") - pl.col("exposed_ns"),
        "exposed": pl.col("exposed_ns"),
        **{name.removesuffix("_ns"): pl.col(name) for name in causes},
    }
    device = ("rank", "device")
    duration = pl.col("duration")
    grown = {name: part - part.median().over(device) for name, part in parts.items()}
    excess = duration - duration.median().over(device)
    exceeding = frame.with_columns(excess_ns=excess)
    deviation = STANDARD_DEVIATIONS_PER_MAD * pl.col("excess_ns").abs().median().over(device)
    outside = (pl.col("excess_ns") > OUTLIER_SHARE * duration.median().over(device)) & (
        pl.col("excess_ns") > OUTLIER_DEVIATIONS * deviation
    )
    # How much each part grew is computed for devices with an outlier alone: there may be a hundred thousand devices.
    devices = exceeding.filter(outside).select(device).unique()
    of_devices = exceeding.join(devices, on=device, how="semi", maintain_order="left")
    chosen = of_devices.with_columns(**{f"grew {n}": part for n, part in grown.items()}).filter(outside)
    grew = chosen.select(f"grew {name}" for name in parts).to_numpy()
    largest = grew.argmax(axis=1) if len(grew) else np.empty(0, np.int64)
    return chosen.select(*device, "step", "duration", pl.col("excess_ns").cast(pl.Int64)).with_columns(
        because=pl.Series(list(parts), dtype=pl.String).gather(largest),
        because_ns=pl.Series(grew[np.arange(len(grew)), largest] if len(grew) else [], dtype=pl.Int64),
    )


_STEP_HEADINGS = {
    "step_kind": "kind of step", "steps": "steps", "total_ns": "total", "per_step_ns": "per step",
}  # fmt: skip
_PART_HEADINGS = {
    "step_kind": "kind of step", "layer": "layer", "layers": "layers", "kernel": "kernel", "count": "count",
    "total_ns": "total", "per_step_ns": "per step",
}  # fmt: skip
_LAYERS = ("module", "label", "op")
"""Kinds of places that name the layer: the first one that is known counts."""


@dataclass(frozen=True)
class StepKinds(Answer):
    """Steps of a server by kind. Times are ns: plain sums of durations of activities launched in the steps.

    Attributes:
        rows: ``step_kind``, ``serving``, ``batch_size``, ``tokens`` (each null if the step's name does not contain
            it), ``steps`` (number of passes of all ranks that launched something), ``total_ns``, ``per_step_ns``; the
            most time first.
        parts: the same time by ``step_kind``, ``layer`` (module, else label, else operator; null if none is known)
            and ``kernel``: ``count``, ``total_ns``, ``per_step_ns``; the most time first in each kind.
    """

    rows: pl.DataFrame
    parts: pl.DataFrame

    def about(self) -> tuple[str, ...]:
        """See `Answer`."""
        return f"{several(int(self.rows['steps'].sum()), 'step')} of a server", "time of what was launched in them"

    def views(self, *, each: bool = False) -> tuple[TableView, ...]:
        """The kinds of steps, and the layers and kernels of each; with ``each``, without folding equal layers."""
        parts = self.parts if each else self.folded_parts
        kernels = short_names(parts["kernel"].drop_nulls().unique().to_list())
        headings = {name: text for name, text in _PART_HEADINGS.items() if name in parts.columns}
        return (
            TableView(self.rows, _STEP_HEADINGS, bar="total_ns"),
            TableView(parts.with_columns(pl.col("kernel").replace(kernels)), headings),
        )

    @property
    def folded_parts(self) -> pl.DataFrame:
        """The parts with equal layers of the model as one row, for tables: with ``layers``, how many are in the row."""
        names = folded_names(self.parts["layer"].drop_nulls().unique(maintain_order=True))
        held = self.parts.join(
            names.rename({"layer": "index"}), left_on="layer", right_on="name", how="left", maintain_order="left"
        )
        group = ["step_kind", "folded", "kernel"]
        return (
            held.group_by(group, maintain_order=True)
            .agg(
                pl.col("count", "total_ns", "per_step_ns").sum(),
                layer=pl.when(pl.len() > 1).then(pl.col("folded").first()).otherwise(pl.col("layer").first()),
                layers=pl.when(pl.len() > 1).then(pl.col("index").n_unique()),
            )
            .with_columns(order=pl.col("step_kind").rle_id())
            .sort("order", "total_ns", descending=[False, True], maintain_order=True)
            .select("step_kind", "layer", "layers", "kernel", "count", "total_ns", "per_step_ns")
        )

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {"step_kinds": self.rows.to_dicts(), "step_kind_parts": self.parts.to_dicts()}


def step_kinds(trace: Attributed) -> StepKinds:
    """Divides the time of an inference server's steps by kind, layer and kernel.

    Raises:
        MissingData: the trace holds no steps of an inference server.
    """
    parent = row_numbers(trace.host["parent"])
    top, server_steps = server_passes(trace.host, parent)
    if not server_steps:
        raise MissingData(f"{', '.join(trace.meta.inputs)}: {REASONS['no_server_steps']}")
    known = pl.DataFrame(
        {
            "step": pl.Series(list(server_steps), dtype=pl.Int64),
            "step_kind": [str(step) for step in server_steps.values()],
            "serving": [step.serving and step.serving.value for step in server_steps.values()],
            "batch_size": pl.Series([step.requests for step in server_steps.values()], dtype=pl.Int64),
            "tokens": pl.Series([step.tokens for step in server_steps.values()], dtype=pl.Int64),
        },
        schema_overrides={"serving": pl.String},
    )
    of_launch = chain_to(parent, row_numbers(trace.places["launch"]), top)
    launched = pl.DataFrame(
        {
            "step": of_launch,
            "layer": pl.select(pl.coalesce(trace.places[kind].cast(pl.String) for kind in _LAYERS)).to_series(),
            "kernel": trace.gpu["name"].cast(pl.String),
            "duration": trace.gpu["duration"],
        }
    ).join(known, on="step")
    facts = [pl.col(name).first() for name in ("serving", "batch_size", "tokens")]
    rows = (
        launched.group_by("step_kind")
        .agg(*facts, steps=pl.col("step").n_unique(), total_ns=pl.col("duration").sum())
        .with_columns(per_step_ns=pl.col("total_ns") / pl.col("steps"))
        .sort("total_ns", "step_kind", descending=[True, False])
    )
    order = rows.select("step_kind", "steps").with_row_index("order")
    parts = (
        launched.group_by("step_kind", "layer", "kernel")
        .agg(count=pl.len(), total_ns=pl.col("duration").sum())
        .join(order, on="step_kind")
        .with_columns(per_step_ns=pl.col("total_ns") / pl.col("steps"))
        .sort("order", "total_ns", "layer", "kernel", descending=[False, True, False, False])
        .drop("order", "steps")
    )
    return StepKinds(rows, parts)
