"""``thence sql``: SQL queries over the tables of a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from thence.cli.inputs import SELECTING, Inputs, trace_options
from thence.cli.messages import say
from thence.cli.output import Result, console, flat_cells, print_table, result_options
from thence.cli.verb import VerbCommand
from thence.errors import UsageError
from thence.model.answer import TableView

if TYPE_CHECKING:
    import polars as pl

_MAX_ROWS = 1_000_000
"""Most rows of an answer as a table or JSON, whose values are Python objects in memory."""
_LONGEST_S = 1e6
_MAX_GB = 1e9
_ROWS_SHOWN = 100
_RECORDS_SHOWN = 10

_EXAMPLES = """Tables: gpu, host, places, activities (gpu joined with places), annotations
(metadata of marks, a column for each field), collectives, threads, programs,
events (records and waits of CUDA events), waits (host calls that wait).
--tables lists their columns. Times are ns. A query can read these tables and no files.
A terminal shows 100 rows, or 10 as lists of values if the table is wider than the terminal;
--top shows more, --format csv and json have all rows.

\b
Examples:
  thence sql --tables
  thence sql trace.json.gz "select label, sum(duration) as ns from activities group by label"
  thence sql traces/ "select rank, count(*) from gpu group by rank" --format csv
"""


def _list_tables(ctx: click.Context, _parameter: click.Parameter, asked: bool) -> None:  # noqa: FBT001 - click's
    """Prints every table with its columns, and ends the command."""
    if not asked:
        return
    from thence.analysis.sql import DESCRIBED_TABLES
    from thence.writers.text.records import columns_of

    output = console()
    for table in DESCRIBED_TABLES:
        print_table(output, columns_of(table))
        print_table(output, "")
    ctx.exit(0)


@click.command("sql", cls=VerbCommand, epilog=_EXAMPLES)
@trace_options(*SELECTING, "own", "hlo")
@click.argument("query")
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Time limit of the query.",
)
@click.option(
    "--memory-limit",
    type=click.FloatRange(min=0, min_open=True),
    default=8.0,
    show_default=True,
    metavar="GB",
    help="Memory limit of the query, in addition to the tables.",
)
@click.option(
    "--tables",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_tables,
    help="List every table with its columns, their types, units and meanings, and exit.",
)
@result_options(without=f"{_ROWS_SHOWN}, or {_RECORDS_SHOWN} where a row takes several lines")
def command(inputs: Inputs, query: str, time_limit: float, memory_limit: float, result: Result) -> None:
    """Answer an SQL query over the tables of a trace."""
    from thence.analysis.sql import check_query
    from thence.cli.bounded_query import bounded_answer

    check_query(query)
    trace = inputs.open()
    frames = trace.frames(query)
    answer = bounded_answer(frames, query, min(_LONGEST_S, time_limit), int(min(_MAX_GB, memory_limit) * 1e9))
    if result.form != "csv" and answer.height > _MAX_ROWS:
        raise UsageError(
            f"the answer has {answer.height:,} rows; more than {_MAX_ROWS:,} are only written as "
            "CSV (--format csv); a LIMIT in the query reduces them"
        )
    if result.form == "json":
        result.json(answer)
    elif result.form == "csv":
        from thence.writers.text.csv import csv_text

        result.text(csv_text(flat_cells(answer)))
    else:
        _show(flat_cells(answer), result)
    for line in trace.check().lines:
        say(line)


def _show(answer: pl.DataFrame, result: Result) -> None:
    """Prints the first rows of an answer, and the number of the others."""
    from thence.writers.text.frame_table import fits
    from thence.writers.text.records import records

    output = console()
    shown = answer.head(result.top or _ROWS_SHOWN)
    if fits(shown, output.width):
        result.views([TableView(answer, {name: name for name in answer.columns}, rows_shown=_ROWS_SHOWN)])
        return
    shown = answer.head(result.top or _RECORDS_SHOWN)
    print_table(output, records(shown))
    if shown.height < answer.height:
        left = answer.height - shown.height
        print_table(output, f"... {left:,} more rows; --top {answer.height} shows all, --format csv too")
