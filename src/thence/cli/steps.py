"""``thence steps``: how long every step took, and how its time divides."""

from __future__ import annotations

import click

from thence.cli.inputs import Inputs, trace_options
from thence.cli.output import Result, console, document_of, notes_of, print_notes, print_table, result_options
from thence.units import format_ns, several

_EXAMPLES = """\b
Examples:
  thence steps traces/                       every rank of a job
  thence steps trace.json.gz --rank 0 --format csv

A step begins on a GPU when the host has begun it and the work of earlier steps has ended; it ends
when the host has ended it and its own work has finished. Its time is busy or idle; exposed is the part
of the busy time in which it communicates and computes nothing. The causes of idle time are those of
"thence idle" and add up to it. A step stands out if it takes 5 % and 4 robust standard deviations
longer than the median of its GPU; the part that grew most is shown next to it. Steps that nothing
marks are found by what repeats: the passes of a server, the executions of the main XLA program, the
steps of an optimizer, launches of CUDA graphs, or calls of the outermost module; the first line says
which. The statistics of a GPU are of its typical steps: without the first, warm-up and outliers.
"""

_STEPS = {
    "rank": "rank",
    "device": "GPU",
    "step": "step",
    "duration": "duration",
    "busy_ns": "busy",
    "exposed_ns": "exposed",
    "idle_ns": "idle",
}
_SPREAD = {
    "rank": "rank", "device": "GPU", "steps": "steps", "median_ns": "median", "mean_ns": "mean", "std_ns": "std",
    "min_ns": "shortest", "max_ns": "longest",
}  # fmt: skip


@click.command("steps", epilog=_EXAMPLES)
@trace_options("rank", "device", "steps", "program")
@result_options()
def command(inputs: Inputs, result: Result) -> None:
    """Steps in order of time: duration, busy, exposed communication, idle time by cause; outliers."""
    trace = inputs.open()
    found = trace.steps()
    notes = [
        f"rank {row['rank']} GPU {row['device']}: {row['step']} took {format_ns(row['excess_ns'])} longer than the "
        f"median step; {row['because'].replace('idle_', 'idle by ')} grew most, by {format_ns(row['because_ns'])}"
        for row in found.outliers.iter_rows(named=True)
    ]
    notes = list(notes_of(trace, notes))
    if result.form != "table":
        document = {
            "kind": found.steps.kind,
            "what": found.steps.what,
            "idle_is": trace.soundness.idle_is(),
            **found.plain_json(),
            **found.json_tables(),
        }
        result.emit(document_of(trace, document), found.frame.drop("row"), {}, notes)
        return

    output = console()
    for line in found.plain_said():
        print_table(output, line)
    print_table(output, f"{several(found.count, 'step')}: {found.basis}")
    causes = [name for name in found.frame.columns if name.startswith("idle_") and name != "idle_ns"]
    causes.sort(key=lambda name: -int(found.frame[name].to_numpy().sum()))
    headings = {name: name.removeprefix("idle_").removesuffix("_ns") for name in causes}
    result.table(found.frame, _STEPS | headings)
    print_table(output, "")
    result.table(found.spread, _SPREAD)
    print_notes(output, notes)
