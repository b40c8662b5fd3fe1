"""``thence whatif``: predicts the gain of a change by replaying the recorded program with the change."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from thence.cli.inputs import Inputs, trace_options
from thence.cli.output import Result, console, document_of, notes_of, print_notes, print_table, result_options
from thence.units import format_ns

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    import polars as pl

_EXAMPLES = """\b
Examples:
  thence whatif traces/                                the ten changes with the largest gain
  thence whatif trace.json.gz --free label:attention
  thence whatif trace.json.gz --scale 'kernel:gemm=0.5' --no-wait item
  thence whatif traces/ --free collective:all-gather --on-time rank:3

Each change is predicted by itself. --free and --scale take KIND:REGEX: label, module, op, source and
other places, or kernel, collective, or cause (of "thence idle").
A label, module, op or source is predicted twice: for its kernels alone, and with what the host did for
them. So is a collective: without its waiting for late ranks (only moving data is free), and with it.

The prediction is a replay of the recorded program over threads, streams, events, waits and ranks; the
replay of what was recorded is exact. It holds for the profiled program, whose host code is slower; where
a recording by thence tells how long a step is without being recorded, it holds for that program.
Gains within the interval count as noise. Nothing is predicted where activities began later than the
trace explains by more than 5 % of the time, inside CUDA graphs whose edges are unknown, or for other numbers of GPUs.
The critical path shows what every moment waited for last; a long time on it does not mean a large gain.
"""

_ROWS = {
    "change": "change", "part": "part", "after_ns": "after", "gain_share": "gain", "within_share": "+-",
    "verdict": "verdict",
}  # fmt: skip
_PATH = {"kind": "on the critical path", "name": "name", "total_ns": "time", "share": "share"}
_PATH_SHOWN = 8
_LEFT_OUT = (
    "changes that gain no more than their interval are left out; --free, --scale, --no-wait and --on-time predict a "
    "given change"
)
_NOTHING = (
    "no single change gains more than its interval; --free, --scale, --no-wait and --on-time predict a given change"
)
_WIDTH, _LEAST_WIDTH = 60, 26
_OTHER_COLUMNS = 54
"""Characters that the columns of the table take, other than the change."""


def _repeated(name: str, meaning: str, metavar: str) -> Callable[[Any], Any]:
    return click.option(f"--{name}", multiple=True, metavar=metavar, help=f"{meaning} Repeatable.")


@click.command("whatif", epilog=_EXAMPLES)
@trace_options("own", "hlo")
@_repeated("free", "This work takes no time.", "KIND:REGEX")
@_repeated("scale", "This work takes its time multiplied by FACTOR.", "KIND:REGEX=FACTOR")
@_repeated("no-wait", "Calls that wait return at once: item, all, a kind (stream, event, device) or a place.", "WHAT")
@_repeated("on-time", "No rank waits for this one in collectives.", "rank:N")
@result_options(without=f"all changes and {_PATH_SHOWN} rows of the critical path")
def command(inputs: Inputs, result: Result, **asked: tuple[str, ...]) -> None:
    """What a change would gain: the recorded program replayed with it."""
    from thence.analysis.whatif.changes import parse_change
    from thence.analysis.whatif.critical_path import path_summary

    for action, texts in asked.items():
        for text in texts:
            # Raises before anything is read if a change cannot be parsed.
            parse_change(action.replace("_", "-"), text)
    trace = inputs.open()
    found = trace.what_if(**asked)
    path = path_summary(trace.whole, trace.critical_path())
    health = found.health
    said = [
        (
            f"of {found.program}: {found.steps:,} step{'s' * (found.steps != 1)} of "
            f"{format_ns(found.step_ns)}; intervals are at least +-{100 * health.noise:.1f} % of it"
        ),
        (
            f"activities that began later than the replay explains: {100 * health.unexplained:.1f} % of the time; "
            f"waits for events whose record is inferred or unknown: {100 * health.inferred:.0f} %"
        ),
    ]
    if not any(asked.values()):
        said.insert(0, _LEFT_OUT if found.rows.height else _NOTHING)
    notes = notes_of(trace, said)
    if result.form != "table":
        document = {**found.to_json(), "critical_path": path.to_dicts()}
        result.emit(document_of(trace, document), found.rows, {}, notes)
        return

    output = console()
    width = min(max(output.width - _OTHER_COLUMNS, _LEAST_WIDTH), _WIDTH)
    if not found.rows.is_empty():
        result.table(_shown(found.rows, width), _ROWS)
        print_table(output, "")
    Result(result.form, None, result.top or _PATH_SHOWN).table(path.with_columns(_short(path["name"], width)), _PATH)
    print_notes(output, notes)


def _shown(rows: pl.DataFrame, width: int) -> pl.DataFrame:
    """The rows with changes of at most ``width`` characters, and with half the length of their intervals."""
    import polars as pl

    return rows.with_columns(
        change=_short(rows["change"], width, "free kernel:"),
        within_share=(pl.col("high_share") - pl.col("low_share")) / 2,
    )


def _short(names: pl.Series, width: int, prefix: str = "") -> pl.Series:
    """Names of at most ``width`` characters; kernels, whose names begin with ``prefix``, get their short names."""
    import polars as pl

    from thence.model.kernel_names import clip, short_names

    given = [name or "-" for name in names]
    kernels = [name.removeprefix(prefix) for name in given if name.startswith(prefix)]
    short = short_names(kernels)
    shown = [prefix + short.get(name.removeprefix(prefix), name) if name.startswith(prefix) else name for name in given]
    return pl.Series(names.name, [clip(name, width) for name in shown], dtype=pl.String)
