"""``thence history``: since which run a program is slower, and by which place."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from thence.cli.inputs import Inputs, check_inputs, runs_in, trace_options
from thence.cli.messages import say
from thence.cli.output import Result, gate_options, result_options
from thence.cli.verb import VerbCommand
from thence.errors import ThenceError, UsageError
from thence.model.places import COMPARED
from thence.readers.recording.sniffing import sniff_archive
from thence.readers.remote import is_url

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from thence.analysis.history.answer import LeftOut
    from thence.analysis.history.run_summary import RunSummary

_EXAMPLES = """\b
Examples:
  thence history main_runs/                        every file or folder in main_runs/ is a run
  thence history a1 a2 a3 b1 b2 b3                 each input is a run
  thence history main_runs/ -o history.html        one line a place
  thence history main_runs/ --keep history.jsonl   runs in that file are not read again
  thence history --keep history.jsonl --fail-on 'total>5%'

A run is a file, a folder with the traces of its ranks, a recording or a store. Runs are in the order of
the start that they state, else of the time of their files. At least ten runs are needed to tell a change
from noise. Times are per step and GPU; runs that diff would refuse to compare with the newest are left out.

Exit code: 0; 1 if a bound is certainly exceeded (with --strict: if it may be), or a run could not be read;
2 if no run could be read.
"""
_ENDINGS = {".json": "json", ".csv": "csv", ".html": "html"}


@click.command("history", cls=VerbCommand, epilog=_EXAMPLES)
@trace_options("own", required=False)
@click.option(
    "--new",
    multiple=True,
    metavar="RUN",
    type=click.Path(),
    help="A run, also if it is the only input and a folder. Repeatable.",
)
@click.option(
    "--keep",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Keep the summary of every run in this file; runs in it belong to the history, also without their traces.",
)
@click.option(
    "--by",
    "kinds",
    type=click.Choice(COMPARED),
    multiple=True,
    help="Kinds of places to list. Repeatable. Default: all.",
)
@gate_options(
    "Exit with 1 if the newest runs certainly exceed the earlier ones by more. Bounds as in diff. Repeatable."
)
@click.option("--anyway", is_flag=True, help="Keep runs that cannot be compared with the newest one.")
@result_options(_ENDINGS, "File ending in .json, .csv or .html.", 20)
def command(
    inputs: Inputs,
    new: tuple[str, ...],
    keep: str | None,
    kinds: tuple[str, ...],
    bounds: tuple[str, ...],
    strict: bool,  # noqa: FBT001 - a click flag
    anyway: bool,  # noqa: FBT001 - a click flag
    result: Result,
) -> int:
    """Since which run is a program slower, and by which place?"""
    from thence.analysis.diff.gate import parse_bound
    from thence.analysis.history.answer import history

    judged = [parse_bound(text) for text in bounds]
    runs, unreadable = _runs(inputs, _paths(inputs.paths, new, keep), keep)
    answer = history(runs, unreadable, anyway=anyway)
    answer.self_check()
    answer = answer.judged(judged) if judged else answer
    shown = answer.by(kinds) if kinds else answer
    if result.form == "html":
        from thence.writers.page.history_page import history_html

        result.text(history_html(shown))
    else:
        result.show(shown)
    for gate in answer.gates if result.form in ("csv", "html") else ():
        say(str(gate))
    return 1 if unreadable or any(gate.fails(strict=strict) for gate in answer.gates) else 0


def _paths(paths: Sequence[str], new: Sequence[str], keep: str | None) -> dict[str, str]:
    """The runs and their names: what is in a folder, if that is the only input, and else the inputs.

    Raises:
        UsageError: no run is named, or one is no file and no folder.
        InputError: a run does not exist.
    """
    from thence.store.layout import is_store

    check_inputs(new)
    for path in (*paths, *new):
        if path == "-" or is_url(path):
            raise UsageError(f"{path}: history reads files and folders; save the run as one")
    named = {path: path for path in (*paths, *new)}
    if len(paths) == 1 and Path(paths[0]).is_dir() and not (is_store(paths[0]) or sniff_archive(paths[0])):
        named = {path: Path(path).name for path in runs_in(paths[0])} | {path: path for path in new}
    if not named and keep is None:
        raise UsageError("no run is given: name a folder of runs, or several runs")
    kept = None if keep is None else Path(keep).resolve()
    return {path: name for path, name in named.items() if Path(path).resolve() != kept}


def _runs(inputs: Inputs, paths: Mapping[str, str], keep: str | None) -> tuple[list[RunSummary], list[LeftOut]]:
    """The summaries of the runs that are named or kept, and the runs that could not be read."""
    from thence.analysis.history.answer import LeftOut
    from thence.store.kept_runs import key_of, read_kept, write_kept

    kept, wrong = ({}, []) if keep is None else read_kept(Path(keep))
    for text in wrong:
        say(text)
    settings = (*inputs.own, str(inputs.run), str(inputs.add))
    unreadable = []
    wanted: dict[str, RunSummary] = {}
    for path, name in paths.items():
        key = key_of(path, settings)
        try:
            wanted[key] = kept[key] if key in kept else _read(inputs, path, name)
        except ThenceError as error:
            unreadable.append(LeftOut(name, "unreadable", str(error)))
    again = {run.conditions.identity for run in wanted.values()}
    runs = {key: run for key, run in kept.items() if key in wanted or run.conditions.identity not in again} | wanted
    if keep is not None and runs.keys() != kept.keys():
        write_kept(Path(keep), runs)
    return [*runs.values()], unreadable


def _read(inputs: Inputs, path: str, name: str) -> RunSummary:
    """Reads one run and sums it up; its activities are released then."""
    from thence.analysis.history.run_summary import summary_of
    from thence.analysis.no_device_work import no_device_work
    from thence.store.kept_runs import written_ns

    trace = dataclasses.replace(inputs, paths=(path,)).open()
    first = trace.tables.gpu["start"].min()
    if first is None:
        raise no_device_work(trace.tables)
    epoch = trace.meta.epoch_ns
    started = written_ns(path) if epoch is None else epoch + int(first)  # type: ignore[arg-type] # an integer
    return summary_of(trace.sample(), name, started, "files" if epoch is None else "recording")
