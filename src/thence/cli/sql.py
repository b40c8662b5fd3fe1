"""``thence sql``: SQL queries over the tables of a trace."""

from __future__ import annotations

import click

from thence.cli.inputs import SELECTING, Inputs, trace_options
from thence.cli.messages import say
from thence.cli.output import Result, json_text, result_options
from thence.errors import UsageError

__all__ = ["command"]

_SQL_WIDTH = 200
"""What was asked for is shown, also where the terminal has to wrap it."""

_MOST_ROWS = 1_000_000
"""Of tables and JSON, whose values are objects in memory."""
_LONGEST_S = 1e6

_EXAMPLES = """\b
Tables: gpu, host, places, activities (gpu and places side by side), annotations
(metadata of marks, a column for each field), collectives, threads, programs,
events (records and waits of CUDA events), waits (host calls that wait).
Times are ns. A query reads these alone: no files.

\b
Examples:
  thence sql trace.json.gz "select label, sum(duration) as ns from activities group by label order by ns desc"
  thence sql traces/ "select rank, count(*) as n from gpu where kind = 'memcpy' group by rank" --format csv
"""


@click.command("sql", epilog=_EXAMPLES)
@trace_options(*SELECTING, "own", "hlo")
@click.argument("query")
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Most time that answering may take.",
)
@click.option(
    "--memory-limit",
    type=click.FloatRange(min=0, min_open=True),
    default=8.0,
    show_default=True,
    metavar="GB",
    help="Most memory that answering may take beside the tables.",
)
@result_options()
def command(
    inputs: Inputs, query: str, time_limit: float, memory_limit: float, result: Result
) -> None:
    """Answers an SQL query over the tables of a trace."""
    from thence.cli.bounded_query import bounded_answer

    trace = inputs.open()
    frames = trace.frames(query)
    answer = bounded_answer(frames, query, min(time_limit, _LONGEST_S), int(memory_limit * 1e9))
    if result.form != "csv" and answer.height > _MOST_ROWS:
        raise UsageError(
            f"the answer has {answer.height:,} rows; more than {_MOST_ROWS:,} are only written as CSV (--format csv), "
            "and LIMIT gives fewer"
        )
    if result.form == "json":
        result.text(json_text(answer.to_dicts()) + "\n")
    elif result.form == "csv":
        result.text(answer.write_csv())
    else:
        result.table(answer, {name: name for name in answer.columns}, _SQL_WIDTH)
    for line in trace.soundness.lines:
        say(line)
