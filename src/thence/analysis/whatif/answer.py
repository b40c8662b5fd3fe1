"""Predicts the gain of a change by simulating the recorded program with it.

A prediction holds for the profiled program: profiling makes the host slower, and therefore all work that waits for it.
Where a recording tells how long a step is without being recorded, it holds for that program. Nothing is predicted if
the graph does not explain enough of the time. `thence.analysis.whatif.prediction` describes both, and the width of
intervals. Changes of work inside CUDA graphs whose edges are unknown are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.idle.host_causes import CAUSES, host_causes
from thence.analysis.whatif.changes import Change, modelled_share
from thence.analysis.whatif.prediction import (
    Base,
    PlainPace,
    health,
    largest_gains,
    missing_calls,
    predicted,
    without_pauses,
)
from thence.errors import MissingData
from thence.model.answer import Answer, TableView
from thence.model.collective_kinds import kind_of
from thence.model.kernel_names import clip, short_names
from thence.model.thresholds import MAX_UNEXPLAINED_SHARE, MAX_WITHOUT_EDGES_SHARE
from thence.model.totals import must
from thence.units import format_ns, format_share, several

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from thence.analysis.whatif.graph import Program
    from thence.analysis.whatif.prediction import Health
    from thence.model.attributed import Attributed

PROGRAMS = (
    "the profiled program",
    "the recorded program (with what recording cost it: no plain step is known)",
    "the program without its recorder",
)
"""Of which program predictions are: of traces of profilers, and of recordings without and with a plain step."""
_MAX_PLACES = 6
"""Of each kind, for which changes are suggested."""
_PATH_SHOWN = 8
"""Parts of the critical path that a terminal shows."""
_LONGEST_SUGGESTED = 4096
"""Bytes of a name: a longer one is in no suggestion, because a pattern of it takes a second for each megabyte."""
_MAX_NAME = 60
"""Characters of a name in tables."""
FREEABLE = ("loader", "gc", "compile", "first_use", "allocation", "sync", "lock", "sleep", "python", "host")
_ROWS = {
    "change": pl.String(), "part": pl.String(), "before_ns": pl.Int64(), "after_ns": pl.Int64(), "gain_ns": pl.Int64(),
    "gain_share": pl.Float64(), "low_share": pl.Float64(), "high_share": pl.Float64(), "verdict": pl.String(),
}  # fmt: skip
_EDGES_ADVICE = (
    "of PyTorch's graphs, recordings and labels by thence.save_labels() tell it; a run without graphs needs neither"
)
"""How to record which activities of CUDA graphs wait for which."""
_XLA_EDGES_ADVICE = "a run without command buffers needs none: XLA_FLAGS=--xla_gpu_enable_command_buffer= (no value)"
_WAITS_ADVICE = (
    "nsys profile --trace=cuda,nvtx, or torch.profiler with enable_cuda_sync_events and thence.torch.event_ids(), all "
    "ranks of the job"
)
"""How to record the waits between streams."""
_XLA_WAITS_ADVICE = "thence record or nsys profile --trace=cuda,nvtx, all processes of the job"


@dataclass(frozen=True)
class WhatIf(Answer):
    """Predicted gains of changes.

    Attributes:
        steps: number of steps from the first typical one to the last; 1 if the trace has none, so that the whole trace
            counts as one step.
        step_ns: mean time of a step of the program.
        program: of which program the predictions are, one of `PROGRAMS`.
        health: whether the graph explains the trace.
        rows: change, part (its meaning, see `Change.part`), before_ns and after_ns (mean step), gain_ns, gain_share
            (of the step; negative if it becomes slower), low_share and high_share (the interval), verdict: gain,
            loss, noise (the interval contains 0), refused (inside CUDA graphs without edges) or absent (the trace
            holds nothing that it applies to), and modelled_share (of at-roofline: share of the time of its activities
            that has a known roofline; the rest keeps its time; null of other changes). If nothing is predicted, the
            columns from after_ns to high_share are null.
        suggested: whether thence chose the changes: those with the largest gain.
        causes: the causes of idle time that are work of the host in this trace, so that ``free`` can be asked of them.
        edges_advice: how to record which activities of CUDA graphs wait for which.
        path: what is on the critical path of the recorded program, as
            `thence.analysis.whatif.critical_path.path_summary` returns it.
    """

    steps: int
    step_ns: int
    health: Health
    rows: pl.DataFrame
    program: str = PROGRAMS[0]
    suggested: bool = False
    causes: frozenset[str] = frozenset(FREEABLE)
    edges_advice: str = _EDGES_ADVICE
    path: pl.DataFrame = field(default_factory=pl.DataFrame)

    def about(self) -> tuple[str, ...]:
        """See `Answer`."""
        return (f"a step takes {format_ns(self.step_ns)}; predicted gains",)

    def views(self) -> tuple[TableView, ...]:
        """The changes, if any, and the largest parts of the critical path."""
        changes = {
            "change": "change", "part": "part", "after_ns": "after", "gain_share": "gain", "within_share": "+-",
            "verdict": "verdict",
        }  # fmt: skip
        path = {"kind": "on the critical path", "name": "name", "total_ns": "time", "share": "share"}
        rows = self.rows.with_columns(
            change=_short(self.rows["change"], "free kernel:"),
            within_share=(pl.col("high_share") - pl.col("low_share")) / 2,
        )
        shown = (TableView(rows, changes, bar="gain_share", ranked=("change", "gain_share", "within_share")),)
        whole = format_ns(int(self.path["total_ns"].sum())) if self.path.height else ""
        title = f"what decided when the recorded program ended: {whole} from its first step on" if whole else ""
        parts = TableView(self.path.with_columns(_short(self.path["name"])), path, title=title, rows_shown=_PATH_SHOWN)
        return (*(shown if rows.height else ()), parts)

    def remarks(self) -> Iterator[str]:
        """What the predictions are of, and whether the graph explains the trace."""
        if self.suggested:
            left_out = "changes that gain no more than their interval are left out"
            nothing = "no single change that is predicted gains more than its interval"
            given = "--free, --scale, --no-wait and --on-time predict a given change"
            yield f"{left_out if self.rows.height else nothing}; {given}"
        for title, share in (
            self.rows.filter(pl.col("modelled_share") < 1).select("change", "modelled_share").iter_rows()
        ):
            yield f"{title}: {format_share(share, 1)} of the time of its activities has a roofline; the rest stays"
        health = self.health
        if health.opaque > MAX_WITHOUT_EDGES_SHARE:
            yield f"refused: {self.refusal}; {self.edges_advice}"
        yield (
            f"of {self.program}: {several(self.steps, 'step')} of {format_ns(self.step_ns)}; intervals are at least "
            f"+-{100 * health.noise:.1f} % of it"
        )
        yield (
            f"activities that began later than the simulation explains: {100 * health.unexplained:.1f} % of the time; "
            f"waits for events whose record is inferred or unknown: {100 * health.inferred:.0f} %"
        )

    @property
    def refusal(self) -> str:
        """Why changes of activities inside CUDA graphs are not predicted, and the way out."""
        return (
            f"{100 * self.health.opaque:.1f} % of the GPU time is inside CUDA graphs (command buffers) of which the "
            "trace does not tell which activity waits for which, so changes of these activities are not predicted"
        )

    def known(self) -> dict[str, float]:
        """See `Answer`."""
        return {"explained": 1 - self.health.unexplained}

    def to_frame(self) -> pl.DataFrame:
        """The changes."""
        return self.rows

    def self_check(self) -> None:
        """Checks that no step has a negative duration and that gains are differences.

        Raises:
            Contradiction: a duration is negative, a gain is not the difference of its durations, or bounds are swapped.
        """
        rows = self.rows.drop_nulls("after_ns")
        possible = rows.select(
            (
                (pl.col("after_ns") >= 0)
                & (pl.col("before_ns") - pl.col("after_ns") == pl.col("gain_ns"))
                & (pl.col("low_share") <= pl.col("high_share"))
            ).all()
        ).item()
        must(self.caveats.inputs, bool(possible), "a predicted step has a negative duration, or gains do not add up")

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "of": self.program,
            "steps": self.steps,
            "step_ns": self.step_ns,
            "health": {
                "unexplained_share": self.health.unexplained,
                "inferred_share": self.health.inferred,
                "noise_share": self.health.noise,
                "opaque_share": self.health.opaque,
            },
            "rows": self.rows.to_dicts(),
            "critical_path": self.path.to_dicts(),
        }


def _short(names: pl.Series, prefix: str = "") -> pl.Series:
    """Names of at most `_MAX_NAME` characters; kernels, whose names begin with ``prefix``, get their short names."""
    given = [name or "-" for name in names]
    short = short_names([name.removeprefix(prefix) for name in given if name.startswith(prefix)])
    shown = [prefix + short.get(name.removeprefix(prefix), name) if name.startswith(prefix) else name for name in given]
    return pl.Series(names.name, [clip(name, _MAX_NAME) for name in shown], dtype=pl.String)


def what_if(trace: Attributed, program: Program, changes: Sequence[Change], plain: PlainPace | None = None) -> WhatIf:
    """Predicts the gain of changes, each by itself.

    Args:
        program: from `program_graph`, of this trace.
        changes: the changes; if empty, those of `suggestions`, of which the ten with the largest gain above the noise
            are kept.
        plain: how long a step is without being recorded, if that is known; else it is that of the trace.

    Raises:
        MissingData: the graph explains too little of the device activity, or the trace is a recording without the calls
            that wait or the ends of launches.
    """
    if missing := missing_calls(trace):
        raise MissingData(
            f"{trace.meta.named}: the recording does not hold {' and '.join(missing)}, so waiting would count as work "
            "of the host and no change could be predicted; record the program again with this version of thence, with "
            "its compiled probe (thence doctor) or with --with launches"
        )
    program, time = without_pauses(trace, program)
    plain = plain or PlainPace.of(trace)
    checked = health(trace, program, time)
    if checked.unexplained > MAX_UNEXPLAINED_SHARE:
        raise MissingData(
            f"{trace.meta.named}: activities began later than the trace explains by {100 * checked.unexplained:.1f} % "
            f"of the time, more than {100 * MAX_UNEXPLAINED_SHARE:.0f} %, so a simulation would be meaningless; record "
            f"the waits between streams: {_WAITS_ADVICE if trace.programs.is_empty() else _XLA_WAITS_ADVICE}"
        )
    causes = _present_causes(trace)
    asked = [part for change in (changes or suggestions(trace, causes)) for part in change.parts]
    base = Base.of(trace, program, checked, time, plain)
    rows = predicted(base, asked) if changes else largest_gains(base, asked)
    shares = {change.title: share for change in asked if (share := modelled_share(trace, change)) is not None}
    frame = pl.DataFrame(rows, schema=_ROWS, orient="row").with_columns(
        modelled_share=pl.col("change").replace_strict(shares, default=None, return_dtype=pl.Float64)
    )
    profiled, recorded, unrecorded = PROGRAMS
    is_recording = any("calls" in facts for facts in trace.meta.facts)
    kind = unrecorded if plain else recorded if is_recording else profiled
    return WhatIf(
        base.count,
        base.before // base.count,
        checked,
        frame,
        kind,
        suggested=not changes,
        causes=causes,
        edges_advice=_EDGES_ADVICE if trace.programs.is_empty() else _XLA_EDGES_ADVICE,
    )


def _present_causes(trace: Attributed) -> frozenset[str]:
    """`WhatIf.causes`."""
    return frozenset(CAUSES[number] for number in np.unique(host_causes(trace.host, trace.meta.formats)))


def suggestions(trace: Attributed, causes: frozenset[str]) -> list[Change]:
    """Changes that may be worth predicting: the largest places and kernels, and collectives, causes, waits, ranks.

    Args:
        causes: as `WhatIf.causes`.
    """
    result = [Change(f"cause:{cause}", "free", "cause", cause) for cause in FREEABLE if cause in causes]
    kind = next((k for k in ("label", "module", "op") if trace.places[k].null_count() < trace.gpu.height), None)
    if kind is not None:
        result += _largest(trace, kind, trace.places[kind])
    result += _largest(trace, "kernel", trace.gpu["name"])
    collectives = trace.collectives.select(name=kind_of(pl.col("collective")))["name"].drop_nulls().unique().sort()
    result += [
        Change(f"collective:{name}", "free", "collective", f"^{re.escape(name)}$")
        for name in collectives.cast(pl.String)
    ]
    waits = sorted(set(trace.waits["kind"].cast(pl.String)))
    result += [Change(name, "no-wait", "", f"^{name}$") for name in waits]
    if len(trace.ranks) > 1:
        result += [Change(f"rank:{rank}", "on-time", "", str(rank)) for rank in trace.ranks]
    return result


def _largest(trace: Attributed, by: str, names: pl.Series) -> list[Change]:
    rows = pl.DataFrame({"name": names.cast(pl.String), "ns": trace.gpu["duration"]}).drop_nulls()
    rows = rows.filter(pl.col("name").str.len_bytes() <= _LONGEST_SUGGESTED)
    largest = rows.group_by("name").agg(pl.col("ns").sum()).sort("ns", "name", descending=[True, False])
    return [Change(f"{by}:{name}", "free", by, f"^{re.escape(name)}$") for name in largest["name"].head(_MAX_PLACES)]
