"""The verbs of the command line, each of which is imported lazily.

``thence --help``, ``thence --version``, completion and a verb's usage errors import no other verb and no Polars.
"""

from __future__ import annotations

import importlib
from typing import cast

import click
from click.shell_completion import CompletionItem

from thence.cli.messages import put

VERBS = {
    "report": "Show where GPU time went and why the GPU was idle.",
    "explain": "Say what limits a trace, why, and what would help, in a page.",
    "convert": "Convert a trace to Perfetto, Chrome JSON or Parquet.",
    "flame": "Make a flame graph: HTML page, folded stacks or speedscope.",
    "programs": "List XLA programs: executions, busy and idle time, latency.",
    "collectives": "List collectives: size, bandwidth, waits, exposed time.",
    "ranks": "Find the ranks that make the others wait, and the reason.",
    "streams": "Show which kernels run on which stream, and what overlaps.",
    "compile": "Show compilation time by phase.",
    "idle": "Divide idle GPU time by cause and by line, module or op.",
    "roofline": "Show FLOP, bytes and headroom by module, line or kernel.",
    "memory": "Show what held memory at its peak, and what grows.",
    "steps": "List steps: duration, busy, idle and exposed time.",
    "whatif": "Predict the gain of a change by replaying the trace.",
    "check": "Check whether a trace is complete and consistent.",
    "diff": "Compare runs: what changed, why, and is it noise?",
    "history": "Say since which run a program is slower, and by what.",
    "ingest": "Store the ranks of a job as Parquet files.",
    "label": "Label the kernels of CUDA graphs.",
    "inside": "Analyse events recorded inside a kernel.",
    "record": "Run a command and record its GPU work.",
    "top": "Watch a program that is being recorded; serve metrics.",
    "sql": "Query the tables of a trace with SQL.",
    "mcp": "Serve agents' questions about the traces in a folder (MCP).",
    "doctor": "Check which features work on this machine.",
    "demo": "Show a report of a small recording in the package.",
    "help": "Explain a verb, the selection of work, or a term.",
}
"""Every verb, in the order of ``thence --help``, and its line of help, which fits in 80 columns.

The click command of a verb is ``command`` in the module ``thence.cli.<verb>``.
"""


def commands() -> tuple[click.Command, ...]:
    """The click command of every verb, in the order of `VERBS`; imports all of them."""
    return tuple(command_of(name) for name in VERBS)


def command_of(name: str) -> click.Command:
    """The click command of one verb."""
    return cast("click.Command", importlib.import_module(f"thence.cli.{name}").command)


class _Verbs(click.Group):
    """A group that takes names and lines of help from `VERBS`, without importing the verbs' modules."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's
        return command_of(cmd_name) if cmd_name in VERBS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = (name for name in VERBS if name.startswith(incomplete))
        verbs = [CompletionItem(name, help=VERBS[name]) for name in names]
        offered = [*verbs, *click.Command.shell_complete(self, ctx, incomplete)]
        # ``thence TRACE`` is a report: where no verb begins like the word, the shell completes files.
        return offered or [CompletionItem(incomplete, type="file")]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The verb and its arguments; if the first word is an input, it becomes an argument of ``report``.

        A word that is the name of a verb and of a file is the verb: ``./report`` names the file.
        """
        if args[0] not in VERBS:
            from thence.cli.inputs import names_inputs

            if names_inputs(args[0]):
                return "report", command_of("report"), args
            if not args[0].startswith("-") and not ctx.resilient_parsing:
                ctx.fail(_no_such_verb(args[0]))
        return super().resolve_command(ctx, args)


def _no_such_verb(name: str) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, VERBS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"No such command or file {name!r}.{hint}"


def _show_version(ctx: click.Context, _option: click.Parameter, asked: bool) -> None:  # noqa: FBT001 - click's
    if asked:
        from thence.doctor.versions import versions

        for name, version in versions().items():
            put(f"{name} {version}\n")
        ctx.exit()


group = _Verbs(
    "thence",
    help=(
        "Where did the GPU time come from?\n\n"
        "Every verb takes files, directories and globs, several ranks at once, or - for standard input. "
        "thence TRACE is short for thence report TRACE; write ./report for a file that is named like a verb."
    ),
    epilog='Shell completion: eval "$(_THENCE_COMPLETE=bash_source thence)" (or zsh_source, fish_source).',
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_show_version,
            help="Show the versions of thence and of the libraries that it uses.",
        )
    ],
)
"""The command line itself, which `thence.cli.manual` describes."""
