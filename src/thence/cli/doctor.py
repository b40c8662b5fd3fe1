"""``thence doctor``: what works on this machine, what does not, and why."""

from __future__ import annotations

import click

from thence.cli.messages import say
from thence.cli.output import console, print_json, print_table
from thence.cli.verb import VerbCommand

_EXAMPLES = """\b
Examples:
  thence doctor
  thence doctor --need recording --need jax && thence record -- python train.py
  thence doctor --format json
"""

_NAMES = (
    *("driver", "libcupti", "recording", "counters", "stalls", "variable", "nvtx", "graphs", "measure", "torch"),
    *("jax", "nsys"),
    *("inside", "scanner", "unpickler", "disk"),
)


@click.command("doctor", cls=VerbCommand, epilog=_EXAMPLES)
@click.option(
    "--need", "needed", multiple=True, type=click.Choice(_NAMES), help="Exit with 1 unless this works. Repeatable."
)
@click.option("--format", "form", type=click.Choice(("table", "json")), default="table", show_default=True)
@click.pass_context
def command(ctx: click.Context, needed: tuple[str, ...], form: str) -> None:
    """What works on this machine, what does not, and why.

    A kernel is launched and recorded in a process of its own, to be sure. torch and jax are not imported.
    """
    from thence.doctor.examine import examine

    capabilities = examine()
    failed = [c.name for c in capabilities if c.name in needed and not c.works]
    if form == "json":
        print_json({"capabilities": [c.to_json() for c in capabilities], "failed": failed})
    else:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        for capability in capabilities:
            mark = Text("yes", "green") if capability.works else Text("no", "yellow")
            finding = Text(capability.found)
            if capability.cure:
                finding.append(f"\n{capability.cure}", "dim")
            table.add_row(mark, capability.name, finding)
        print_table(console(), table)
    for name in failed:
        say(f"thence: {name} is needed, and does not work")
    ctx.exit(1 if failed else 0)
