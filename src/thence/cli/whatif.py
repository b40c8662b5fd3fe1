"""``thence whatif``: what a change would gain, by replaying the recorded program with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from thence.cli.inputs import Inputs, trace_options
from thence.cli.output import (
    Result,
    console,
    document_of,
    notes_of,
    print_table,
    result_options,
)
from thence.model.questions import FREE_BY
from thence.units import format_ns

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    import polars as pl

__all__ = ["command"]

_EXAMPLES = f"""\b
Examples:
  thence whatif traces/                                the ten changes with the largest gain
  thence whatif trace.json.gz --free label:attention
  thence whatif trace.json.gz --scale 'kernel:gemm=0.5' --no-wait item
  thence whatif traces/ --free collective:all-gather --on-time rank:3
\b
Each change is by itself. --free and --scale take KIND:REGEX, the kind one of
{", ".join(FREE_BY)}.
A label, module, op or source is answered twice: for its kernels alone, and with what the host did for
them. So is a collective: without its waiting for late ranks (only moving data is free), and with.
\b
The answer is a replay of the recorded program over threads, streams, events, waits and ranks; the
replay of what was recorded is exact. It is of the profiled program, whose host is slower. Gains within
the interval count as noise. Nothing is predicted where activities began later than the trace explains
by more than 5 % of the time, inside CUDA graphs, or for other numbers of GPUs.
The critical path says what every moment waited for last; being on it for long is no gain.
"""

_ROWS = {
    "change": "change", "part": "part", "after_ns": "after", "gain": "gain", "interval": "interval",
    "verdict": "verdict",
}  # fmt: skip
_PATH = {"kind": "on the critical path", "name": "name", "total_ns": "time", "share": "share"}
_PATH_SHOWN = 8
_WIDTH = 30


def _repeated(name: str, meaning: str, metavar: str) -> Callable[[Any], Any]:
    return click.option(f"--{name}", multiple=True, metavar=metavar, help=f"{meaning} Repeatable.")


@click.command("whatif", epilog=_EXAMPLES)
@trace_options("own", "hlo")
@_repeated("free", "Takes no time.", "KIND:REGEX")
@_repeated("scale", "Takes this part of its time.", "KIND:REGEX=FACTOR")
@_repeated(
    "no-wait",
    "Calls that wait return at once: item, all, a kind (stream, event, device) or a place.",
    "WHAT",
)
@_repeated("on-time", "No rank waits for this one in collectives.", "rank:N")
@result_options()
def command(inputs: Inputs, result: Result, **asked: tuple[str, ...]) -> None:
    """What a change would gain: the recorded program replayed with it."""
    from thence.analysis.critical_path import path_summary
    from thence.analysis.whatif_changes import parse_change

    for action, texts in asked.items():
        for text in texts:
            parse_change(
                action.replace("_", "-"), text
            )  # says what is wrong before anything is read
    trace = inputs.open()
    found = trace.what_if(**asked)
    path = path_summary(trace.whole, trace.critical_path())
    health = found.health
    said = [
        (
            f"of the profiled program: {found.steps:,} steps of {format_ns(found.step_ns)}; intervals are "
            f"+-{100 * health.noise:.1f} % of it"
        ),
        (
            f"began later than explained: {100 * health.unexplained:.1f} % of the time; records of events "
            f"waited for, inferred or unknown: {100 * health.inferred:.0f} %"
        ),
    ]
    if found.rows.is_empty():
        said.insert(0, "no single change gains more than the interval")
    notes = notes_of(trace, said)
    if result.form != "table":
        document = {**found.to_json(), "critical_path": path.to_dicts()}
        result.emit(document_of(trace, document), found.rows, {}, notes)
        return
    from rich.text import Text

    from thence.writers.text.printable import printable

    output = console()
    result.table(_shown(found.rows), _ROWS)
    print_table(output, "")
    Result(result.form, None, result.top or _PATH_SHOWN).table(
        path.with_columns(_short(path["name"])), _PATH
    )
    for note in notes:
        print_table(output, Text(printable(note), "dim"))


def _shown(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows with gains and intervals as text, kernels with short names."""
    import polars as pl

    def percent(name: str) -> pl.Expr:
        return (100 * pl.col(name)).round(1).cast(pl.String)

    return rows.with_columns(
        change=_short(rows["change"], "free kernel:"),
        gain=percent("gain_share") + " %",
        interval=percent("low_share") + " to " + percent("high_share"),
    )


def _short(names: pl.Series, prefix: str = "") -> pl.Series:
    """Names of kernels as tables show them; others stay, but are cut."""
    import polars as pl

    from thence.model.kernel_names import clip, short_names

    given = [name or "" for name in names]
    kernels = [name.removeprefix(prefix) for name in given if name.startswith(prefix)]
    short = short_names(kernels)
    shown = [
        prefix + short.get(name.removeprefix(prefix), name) if name.startswith(prefix) else name
        for name in given
    ]
    return pl.Series(names.name, [clip(name, _WIDTH) for name in shown], dtype=pl.String)
