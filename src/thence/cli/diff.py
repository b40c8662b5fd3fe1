"""``thence diff``: what changed between two sides of runs, and whether it is more than noise."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

from thence.cli.inputs import SELECTING, Inputs, check_inputs, runs_in, trace_options
from thence.cli.messages import put, say, wrote
from thence.cli.output import Result, choice_option, console, gate_options, print_table, result_options
from thence.cli.verb import VerbCommand
from thence.errors import UsageError
from thence.model.answer import TableView
from thence.model.places import COMPARED
from thence.writers.text.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import polars as pl

    from thence.analysis.diff.answer import Diff
    from thence.analysis.diff.gate import Bound, Gate
    from thence.analysis.diff.sample import Sample

_EXAMPLES = """\b
Examples:
  thence diff before.json.gz after.json.gz
  thence diff --before a1 a2 a3 --after b1 b2 b3     several runs per side: noise between them
  thence diff --baseline main_runs/ new1 new2 new3   every file or folder in main_runs/ is a run
  thence diff --baseline main_runs/ new* --fail-on 'step>5%' --fail-on 'new:kernel>0'
  thence diff --baseline main_runs/ new* --format markdown >> "$GITHUB_STEP_SUMMARY"
  thence diff A B -o diff.html                       one page with both sides
  thence diff A B -o diff.pftrace                    steps below each other, for Perfetto

A run is one file or folder: all ranks of one execution. Times are per step and GPU. Each row has the
95 % interval of its difference and a verdict: slower, faster, new, gone, same, or unknown, with the
number of further runs per side that would decide.

Exit code: 0; 1 if a bound is certainly exceeded (with --strict: if it may be, and the time did not
get less); 2 if the sides cannot be compared (--anyway does) or could not be read.
"""

_TABLE = {
    "by": "by",
    "row": "name",
    "before_ns": "before",
    "after_ns": "after",
    "change": "change",
    "interval": "95 % interval",
    "verdict": "verdict",
    "calls": "calls per step",
}
_RANKED = ("row", "change", "verdict", "by")
"""Columns that a narrow terminal shows before others."""
_SIDES = ("--before", "--after")
_ENDINGS = {".json": "json", ".csv": "csv", ".md": "markdown", ".html": "html", ".pftrace": "pftrace"}


class _SeveralEach(VerbCommand):
    """Lets ``--before`` and ``--after`` take all the inputs up to the next option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [*_one_each(args)])


def _one_each(arguments: Sequence[str]) -> Iterator[str]:
    """Rewrites ``--before a b`` as ``--before a --before b``."""
    option = ""
    for argument in arguments:
        if argument in _SIDES:
            option = argument
        elif option and not argument.startswith("-"):
            yield from (option, argument)
        else:
            option = ""
            yield argument


@click.command("diff", cls=_SeveralEach, epilog=_EXAMPLES)
@trace_options(*SELECTING, "own", "hlo", required=False)
@click.option("--before", "before", multiple=True, metavar="RUN...", help="Runs of the first side.")
@click.option("--after", "after", multiple=True, metavar="RUN...", help="Runs of the second side.")
@click.option(
    "--baseline",
    metavar="DIR",
    type=click.Path(file_okay=False),
    help="Runs of the first side: all in DIR. INPUT... is the second side.",
)
@click.option(
    "--by",
    "kinds",
    type=click.Choice(COMPARED),
    multiple=True,
    help="Kinds of rows besides the step. Repeatable. Default: all.",
)
@gate_options(
    "Exit with 1 if a change certainly exceeds this: step, busy, idle, communication, KIND:NAME or new:KIND, then > "
    "and a bound in %, ns, us, ms or s. Repeatable."
)
@click.option("--within-run", is_flag=True, help="With --fail-on and one run per side: use the noise within each run.")
@click.option("--anyway", is_flag=True, help="Compare although the sides are not comparable.")
@click.option("--each", is_flag=True, help="List every layer, not one row for equal layers.")
@click.option("--depth", type=click.IntRange(min=1), help="Show modules and labels as a tree of this many levels.")
@choice_option("--outliers", choices=("leave-out", "keep"), meaning="Outlier steps of runs of at least 8 steps.")
@choice_option(
    "--idle",
    choices=("auto", "causes", "total"),
    meaning="causes divides idle time by cause, 1 s per million host ranges; auto: up to a million.",
)
@result_options(
    _ENDINGS,
    "File ending in .json, .csv, .md, .html or .pftrace.",
    20,
    choice_option(
        "--format", "form", choices=("table", "json", "csv", "markdown"), meaning="json and csv hold every row."
    ),
)
def command(
    inputs: Inputs,
    before: tuple[str, ...],
    after: tuple[str, ...],
    baseline: str | None,
    result: Result,
    **options: object,
) -> int:
    """What changed between two sides of runs, because of what, and is it more than noise?"""
    from thence.analysis.diff.gate import parse_bound

    given = _Options.of(options)
    bounds = [parse_bound(text) for text in given.bounds]
    sides = _sides(inputs.paths, before, after, baseline)
    _check_gates(bounds, sides, within_run=given.within_run)
    first, second = ([_sample(inputs, run, given) for run in side] for side in sides)
    from thence.analysis.diff.answer import compare

    diff = compare(first, second)
    diff.self_check()
    if diff.refusals and not given.anyway:
        return _refuse(diff, result)
    gates = diff.judged(bounds)
    shown = diff.by(given.kinds) if given.kinds else diff
    if result.form == "pftrace":
        _write_sides(inputs, (sides[0][0], sides[1][0]), result)
    else:
        _emit(shown, gates, result, given)
    for gate in gates if result.form in ("csv", "pftrace", "html") else ():
        say(str(gate))
    return 1 if any(gate.fails(strict=given.strict) for gate in gates) else 0


@dataclasses.dataclass(frozen=True)
class _Options:
    """The options of the command, other than inputs and output."""

    kinds: tuple[str, ...]
    bounds: tuple[str, ...]
    strict: bool
    within_run: bool
    anyway: bool
    outliers: bool
    causes: bool | None
    each: bool
    depth: int | None

    @classmethod
    def of(cls, options: dict[str, object]) -> _Options:
        keep = options.pop("outliers") == "keep"
        causes = {"auto": None, "causes": True, "total": False}[str(options.pop("idle"))]
        return cls(**options, outliers=keep, causes=causes)  # type: ignore[arg-type]


def _sides(
    paths: Sequence[str], before: Sequence[str], after: Sequence[str], baseline: str | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The runs of both sides.

    Raises:
        UsageError: the arguments do not name two sides.
        InputError: a run does not exist.
    """
    if baseline is not None:
        if before:
            raise UsageError("--before and --baseline both name the first side; give one of them")
        sides = runs_in(baseline), (*paths, *after)
    elif before or after:
        if paths:
            raise UsageError(f"{paths[0]}: with --before and --after, every run must follow one of them")
        sides = tuple(before), tuple(after)
    elif len(paths) == 2:
        sides = (paths[0],), (paths[1],)
    else:
        raise UsageError(
            f"diff compares two runs, or two sides of several; got {len(paths)}: write thence diff A B, or "
            "thence diff --before a1 a2 --after b1 b2"
        )
    for name, side in zip(("before", "after"), sides, strict=True):
        if not side:
            raise UsageError(f"no run is given for the side {name!r}; name one or more")
    for side in sides:
        check_inputs(side)
        if side.count("-"):
            raise UsageError("diff reads files and folders, not standard input")
    return sides


def _check_gates(bounds: Sequence[Bound], sides: tuple[Sequence[str], Sequence[str]], *, within_run: bool) -> None:
    from thence.analysis.diff.gate import needs_runs

    if bounds and needs_runs(*map(len, sides)) and not within_run:
        raise UsageError(
            "--fail-on with one run per side cannot distinguish a change from the noise between runs: give several "
            "runs per side (--before, --after, --baseline), or --within-run to judge by the noise within these two"
        )


def _sample(inputs: Inputs, run: str, given: _Options) -> Sample:
    """Reads one run and sums it up; its activities are released then."""
    from thence.parallel import give_back_memory

    trace = dataclasses.replace(inputs, paths=(run,)).open()
    if trace.tables.gpu.is_empty():
        from thence.analysis.no_device_work import no_device_work

        raise no_device_work(trace.tables)
    sample = trace.sample(outliers=given.outliers, causes=given.causes)
    del trace
    give_back_memory()  # the next run is read then
    return sample


def _refuse(diff: Diff, result: Result) -> int:
    """Prints why the sides are not compared, and returns the exit code."""
    if result.form == "json":
        whole = diff.to_json()
        left_out: dict[str, object] = {"total": {}, "rows": [], "moved": [], "explanation": []}
        result.json({**whole, **left_out})
    for refusal in diff.refusals:
        say(f"not comparable ({refusal.code}): {refusal.text}")
    say("thence: these sides cannot be compared; --anyway compares them anyway")
    return 2


def _emit(diff: Diff, gates: Sequence[Gate], result: Result, given: _Options) -> None:
    from thence.writers.text.diff import markdown, shown_rows

    rows = shown_rows(diff, given.depth, each=given.each)
    if result.form == "json":
        result.json({**diff.to_json(), "gates": [gate.to_json() for gate in gates]})
    elif result.form == "csv":
        result.csv(diff.rows, diff.notes)
    elif result.form == "markdown":
        result.text(markdown(diff, gates, result.top, rows))
    elif result.form == "html":
        from thence.writers.page.diff_page import diff_html

        result.text(diff_html(diff, gates, rows))
    else:
        _show(diff, rows, gates, result)


def _show(diff: Diff, rows: pl.DataFrame, gates: Sequence[Gate], result: Result) -> None:
    """Prints the explanation, the rows, gates and notes on the terminal."""
    from rich.text import Text

    output = console()

    def line(text: str, style: str = "") -> None:
        print_table(output, Text(printable(text), style))

    for refusal in diff.refusals:
        line(f"not comparable ({refusal.code}), compared anyway: {refusal.text}", "bold red")
    for number, text in enumerate(diff.explanation):
        line(text, "" if number else "bold")
    put("\n")
    result.views([TableView(rows, _TABLE, ranked=_RANKED)])
    hidden = diff.rows.height - diff.shown_rows.height
    if hidden > 0 and rows.height < diff.rows.height:
        line("* stands for the number of a layer; --each lists every layer, --depth 3 makes a tree", "dim")
    put("\n")
    for gate in gates:
        line(str(gate), "bold red" if gate.verdict == "exceeded" else "bold")
    for entry in diff.not_checked:
        line(f"not checked ({entry.code}): {entry.text}", "dim")
    for note in diff.notes:
        line(note, "dim")


def _write_sides(inputs: Inputs, runs: tuple[str, str], result: Result) -> None:
    """Writes one Perfetto trace with the steps of the first run of each side."""
    from thence.analysis.diff.aligned_steps import aligned_steps
    from thence.writers.timelines.perfetto.sides import write_sides_file

    traces = [dataclasses.replace(inputs, paths=(run,)).open().tables for run in runs]
    assert result.path is not None
    write_sides_file(aligned_steps(*traces), result.path)
    wrote(result.path)
