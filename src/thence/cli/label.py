"""``thence label``: labels the kernels that ran in CUDA graphs."""

from __future__ import annotations

import functools
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from thence.atomic_files import atomic_open_text
from thence.cli.inputs import Inputs, check_inputs, trace_options
from thence.cli.messages import say
from thence.cli.output import (
    check_output,
    choice_option,
    console,
    force_option,
    output_option,
    print_command,
    print_json,
    print_notes,
    print_table,
)
from thence.cli.verb import VerbCommand
from thence.errors import MissingData, UsageError
from thence.model.reasons import text_of
from thence.writers.text.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import polars as pl

    from thence.analysis.cuda_graphs.replayed_graph import ReplayedGraph
    from thence.trace import Trace

_SHOWN_BY = ("label", "module", "op", "source")
"""Kinds of places of nodes, of which the command that is suggested shows the first that is known."""
_ENDINGS = (".json", ".json.gz", ".pftrace", ".perfetto-trace")

_EXAMPLES = """\b
Examples:
  thence label replay.json.gz --labels labels.json -o labelled.json.gz
  thence label replay.json.gz --labels labels.json -o labelled.pftrace   for ui.perfetto.dev
  thence label replay.json.gz --eager eager.json.gz -o labelled.json.gz  no labels: an eager run
  thence label replay.json.gz --eager 'captures/*.json.gz'               or traces of the captures
  thence label replay.json.gz --labels labels.json                       only report
  thence label traces/ -o labelled.pftrace                               labels beside them
  thence label replay.json.gz --labels labels.json --edges               waits of nodes
  thence label run/ --graph graph.html                                   and the critical path

Labels are written by thence.save_labels() at the end of the program that captured the graphs, or are PyTorch's
annotation files (kernel_annotations_rank0_fwd.pkl or .json, named by rank). Labels in the folder of a trace, or one
folder up, are found without --labels; traces that PyTorch annotated itself need none. Every kernel has the rule
that gave it its label: the id of the graph node, alignment with the captured graph or the eager run, or its
position in a trace of the capture (launches without device work, which inference servers record). If that trace
names no kernels (NVIDIA), only the order is used, and the summary states for how much time. If nothing fits,
nothing is written and the exit code is 2.
"""


class _Sources(NamedTuple):
    """Where labels come from.

    Attributes:
        labels: files saved at capture.
        eager: traces of a run without graphs.
    """

    labels: tuple[str, ...]
    eager: tuple[str, ...]


def _source_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--labels`` and ``--eager``, as one parameter ``sources``."""

    @functools.wraps(command)
    def called(labels: tuple[str, ...], eager: tuple[str, ...], **given: Any) -> Any:
        if labels and eager:
            raise UsageError("give either --labels or --eager, not both")
        return command(sources=_Sources(labels, eager), **given)

    wrapped: Callable[..., Any] = called
    for option in (
        click.option(
            "--eager", multiple=True, metavar="TRACE", type=click.Path(),
            help="Trace of the same code run without graphs, or of the capture itself, to take labels, ops, modules "
            "and sources from. Repeatable, for several captures or ranks.",
        ),
        click.option(
            "--labels", multiple=True, metavar="PATH", type=click.Path(),
            help="Labels saved at capture. Repeatable, for several ranks.",
        ),
    ):  # fmt: skip
        wrapped = option(wrapped)
    return wrapped


@click.command("label", cls=VerbCommand, epilog=_EXAMPLES)
@trace_options("own")
@_source_options
@click.option("--edges", is_flag=True, help="Also show the edges of the captured graphs, from the labels.")
@click.option(
    "--graph",
    "page",
    metavar="OUT.html",
    type=click.Path(),
    help="Also write a page of one captured graph: nodes with label, module and mean time, edges, critical path.",
)
@click.option(
    "--graph-id",
    type=int,
    metavar="ID",
    help="Which graph --graph shows, by the id of its capture or executable. Default: the one with the most GPU time.",
)
@output_option("File ending in .json, .json.gz or .pftrace. Without it nothing is written.", metavar="OUT")
@force_option
@choice_option("--format", "form", choices=("table", "json"), meaning="Of the summary.")
def command(
    inputs: Inputs,
    sources: _Sources,
    edges: bool,  # noqa: FBT001 - click passes it by name
    page: str | None,
    graph_id: int | None,
    output: str | None,
    force: bool,  # noqa: FBT001 - click passes it by name
    form: str,
) -> None:
    """Give kernels that ran in CUDA graphs their labels back."""
    if output is not None:
        if not output.lower().endswith(_ENDINGS):
            raise UsageError(f"{output}: must end in {', '.join(_ENDINGS)}")
        check_output(output, force=force)  # before anything is read
    _check_page(page, output, graph_id, force=force)
    check_inputs((*sources.labels, *sources.eager))
    recorded = inputs.open()
    from thence.opening import open_runs

    if sources.labels:
        trace = recorded.label(list(sources.labels))
    elif sources.eager:
        trace = recorded.label(eager=open_runs(*sources.eager))
    else:
        trace = recorded
        if page is None and not trace.graph_coverage.labelled:
            advice = trace.meta.warnings
            if trace.tables.places["op_name"].is_not_null().any():
                advice = ("thence report --by op_name shows what JAX named itself", *advice)
            raise MissingData(
                f"{', '.join(inputs.paths)}: there are no matching labels next to it; name them "
                "with --labels, or an eager run with --eager" + "".join(f"; {text}" for text in advice)
            )
    graph = None if page is None else trace.replayed_graph(graph_id)
    if output is not None:
        _write(trace, inputs.paths, output)
    if page is not None and graph is not None:
        from thence.writers.page.graph_page import graph_html

        with atomic_open_text(Path(page)) as stream:
            stream.write(graph_html(graph, trace.meta))
    written = [path for path in (output, page) if path is not None]
    _show(trace, written, form, trace.graph_edges() if edges else None, graph)


def _check_page(page: str | None, output: str | None, graph_id: int | None, *, force: bool) -> None:
    """Checks the options of the graph's page before anything is read.

    Raises:
        UsageError: the page cannot be written, or is not asked for.
    """
    if page is None:
        if graph_id is not None:
            raise UsageError("--graph-id chooses the graph for --graph OUT.html, which is missing")
        return
    if not page.lower().endswith((".html", ".htm")):
        raise UsageError(f"{page}: the page of --graph must end in .html")
    check_output(page, force=force)
    if output is not None and Path(output).resolve() == Path(page).resolve():
        raise UsageError(f"{page}: -o and --graph name the same file")


def _write(trace: Trace, inputs: tuple[str, ...], output: str) -> None:
    """Writes the labelled trace: a copy of the Kineto file with added arguments if possible, else the tables."""
    from thence.writers.timelines.relabelled import Unmatched, can_relabel, write_relabelled

    if output.lower().endswith((".json", ".json.gz")) and can_relabel(trace.tables, inputs):
        try:
            write_relabelled(trace.tables, inputs[0], output)
        except Unmatched as error:
            say(f"{error}; the output holds what could be read")
        else:
            return
    trace.convert(output, lanes=("lane", "label"))


def _show(
    trace: Trace, written: Sequence[str], form: str, edges: pl.DataFrame | None, graph: ReplayedGraph | None
) -> None:
    """Prints the coverage, and the kernels in graphs per recorded stream and per labelled lane."""
    covered = trace.graph_coverage
    lanes = trace.graph_lanes()
    if form == "json":
        document: dict[str, Any] = {
            "inputs": list(trace.meta.inputs),
            "output": next((path for path in written if path.lower().endswith(_ENDINGS)), None),
            **covered.to_json(),
            "streams": lanes.streams.to_dicts(),
            "lanes": lanes.lanes.to_dicts(),
            **({} if edges is None else {"edges": edges.to_dicts()}),
            **({} if graph is None else {"graph": graph.to_json()}),
            "notes": list(trace.meta.notes),
            "warnings": list(trace.meta.warnings),
        }
        print_json(document)
        return
    from rich.text import Text

    from thence.attribution.cuda_graphs.labelling import LABELS_NOTE
    from thence.writers.text.frame_table import frame_table

    screen = console()
    headings = {"count": "activities", "kernels": "kernels", "total_ns": "total"}
    for frame, first in ((lanes.streams, "stream"), (lanes.lanes, "lane")):
        print_table(screen, frame_table(frame, {first: f"{first} (in graphs)", **headings}, screen.width))
    if edges is not None:
        for line in _edge_lines(edges):
            print_table(screen, Text(line))
    rules = "; ".join(f"{n:,} by {text_of(rule)}" for rule, n in covered.rules.items())
    lines = [f"{covered}", f"how: {rules}" if rules else ""]
    if covered.confidence is not None:
        lines.append(f"lowest confidence of an alignment: {covered.confidence:.2f}")
    if graph is not None:
        lines += graph.sentences
    lines += [f"wrote {path}" for path in written]
    of_files = [note for note in trace.meta.notes if note.startswith(LABELS_NOTE)]
    for line in filter(None, lines):
        print_table(screen, Text(line))
    print_notes(screen, (*of_files, *trace.meta.warnings))
    for path in written:
        if path.lower().endswith((".json", ".json.gz")):
            known = next((kind for kind in _SHOWN_BY if covered.places.get(kind)), None)
            command = printable(f"thence report {shlex.quote(path)}" + (f" --by {known}" if known else ""))
            print_command(screen, Text.assemble(("next  ", "bold"), (command, "green")))
            print_table(screen, Text("      of the typical steps; the figures above are of the whole trace", "dim"))


def _edge_lines(edges: pl.DataFrame) -> Iterator[str]:
    """One line for each edge, with short names of the kernels."""
    from thence.model.kernel_names import short_names

    short = short_names({*edges["kernel"].to_list(), *edges["next_kernel"].to_list()})
    for edge in edges.iter_rows(named=True):
        ends = (
            f"{edge[f'{side}node']} {short[edge[f'{side}kernel']]} ({edge[f'{side}label'] or 'no label'})"
            for side in ("", "next_")
        )
        yield f"graph {edge['graph']}: {' -> '.join(ends)}"
