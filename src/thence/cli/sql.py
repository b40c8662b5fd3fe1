"""``thence sql``: any other question."""

from __future__ import annotations

import click

from thence.cli.common import (
    console,
    format_option,
    hlo_option,
    inputs_argument,
    open_with_progress,
    print_json,
    print_table,
)

__all__ = ["command"]

_SQL_WIDTH = 200
"""What was asked for is shown, also where the terminal has to wrap it."""

_EXAMPLES = """\b
Tables: gpu, host, places, activities (gpu and places side by side), collectives, threads, programs.
Times are ns.

\b
Examples:
  thence sql trace.json.gz "select label, sum(duration) as ns from activities group by label order by ns desc"
  thence sql traces/ "select rank, count(*) as n from gpu where kind = 'memcpy' group by rank" --format csv
"""


@click.command("sql", epilog=_EXAMPLES)
@inputs_argument
@click.argument("query")
@hlo_option
@format_option
def command(inputs: tuple[str, ...], query: str, hlo: tuple[str, ...], form: str) -> None:
    """Answers an SQL query over the tables of a trace."""
    answer = open_with_progress(inputs, hlo).sql(query)
    if form == "json":
        print_json(answer.to_dicts())
    elif form == "csv":
        click.echo(answer.write_csv(), nl=False)
    else:
        from thence.writers.frames import frame_table

        output = console()
        columns = {name: name for name in answer.columns}
        print_table(output, frame_table(answer, columns, max(output.width, _SQL_WIDTH)))
