"""``thence sql``: SQL queries over the tables of a trace."""

from __future__ import annotations

import click

from thence.cli.inputs import SELECTING, Inputs, trace_options
from thence.cli.messages import say
from thence.cli.output import Result, json_text, result_options

__all__ = ["command"]

_SQL_WIDTH = 200
"""What was asked for is shown, also where the terminal has to wrap it."""

_EXAMPLES = """\b
Tables: gpu, host, places, activities (gpu and places side by side), annotations
(metadata of marks, a column for each field), collectives, threads, programs,
events (records and waits of CUDA events), waits (host calls that wait).
Times are ns.

\b
Examples:
  thence sql trace.json.gz "select label, sum(duration) as ns from activities group by label order by ns desc"
  thence sql traces/ "select rank, count(*) as n from gpu where kind = 'memcpy' group by rank" --format csv
"""


@click.command("sql", epilog=_EXAMPLES)
@trace_options(*SELECTING, "own", "hlo")
@click.argument("query")
@result_options()
def command(inputs: Inputs, query: str, result: Result) -> None:
    """Answers an SQL query over the tables of a trace."""
    trace = inputs.open()
    answer = trace.sql(query)
    if result.form == "json":
        result.text(json_text(answer.to_dicts()) + "\n")
    elif result.form == "csv":
        result.text(answer.write_csv())
    else:
        result.table(answer, {name: name for name in answer.columns}, _SQL_WIDTH)
    for line in trace.soundness.lines:
        say(line)
