"""The verbs that mutated inputs go through, and the options that some cases get beside."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from thence.cli.verbs import commands

if TYPE_CHECKING:
    import random

VERBS = (
    ("report",), ("report", "--by", "label"), ("report", "--by", "source"), ("report", "--by", "hlo"),
    ("report", "--by", "step"), ("streams",), ("programs",), ("collectives",), ("compile",), ("check",),
    ("flame", "-o", "OUT/a.folded"), ("flame", "--stalls", "-o", "OUT/stalls.folded"), ("inside",),
    ("flame", "-o", "OUT/a.html"), ("convert", "-o", "OUT/a.pftrace"), ("convert", "-o", "OUT/a.json"),
    ("convert", "-o", "OUT/a.parquet/"), ("label", "-o", "OUT/labelled.json"), ("report", "--steps", "0:2"),
    ("report", "--only", "kernel"), ("report", "--by", "collective"), ("report", "--details"),
    ("report", "-o", "OUT/a.html"), ("explain",), ("idle",), ("idle", "--by", "step"), ("steps",), ("whatif",),
    ("roofline",),
    ("memory",), ("memory", "--by", "source", "--at", "1ms"),
    ("whatif", "--free", "kernel:.", "--no-wait", "all"), ("diff", "GOOD"), ("diff", "--anyway", "INPUT"),
    ("diff", "--anyway", "INPUT", "-o", "OUT/a.pftrace"),
    ("sql", "INPUT", "select * from activities order by start limit 5"),
    ("label", "--eager", "INPUT", "-o", "OUT/labelled.pftrace"), ("label", "--eager", "GOOD"),
    ("label", "--graph", "OUT/graph.html"),
    ("collectives", "--warm-up", "keep"), ("compile", "--autotuning", "detail"), ("streams", "--expect", "GEMM>=2"),
    ("history", "--new", "GOOD", "--new", "INPUT"), ("history", "--new", "INPUT", "--keep", "OUT/history.jsonl"),
    ("ranks",), ("ranks", "--what-if", "--clocks"), ("ranks", "-o", "OUT/ranks.json"),
    ("ingest", "-o", "OUT/a.store"), ("ingest", "--host", "-o", "OUT/a.store"),
)  # fmt: skip
"""OUT is a folder, GOOD a sound trace, INPUT the mutated one once more."""
OTHERS = {
    "record": "starts programs",
    "top": "reads summaries, a format of their own that no other verb reads",
    "doctor": "reads no trace",
    "mcp": "serves a folder; what it answers are the verbs above",
    "demo": "reads the trace of the package",
    "help": "reads no trace",
}
"""Verbs that mutated traces do not go through, and why."""
VALUES = {
    "--rank": ("0", "1", "-1", "99999999999"),
    "--device": ("0", "1", "-5"),
    "--steps": ("0:1", "1:", ":3", "5:2", "typical"),
    "--window": ("0:1ms", ":50us", "1s:", "2us:1us"),
    "--only": ("Kernel|kernel", "forward", "^$", "("),
    "--own": ("torch", "!*", "a/**"),
    "--run": ("host", "nothing"),
    "--max-expansion": ("1", "1000000"),
    "--program": ("main", "jit_train_step", "nothing"),
    "--depth": ("1", "3", "1099511627776"),
    "--top": ("1", "3", "1099511627776"),
    "--graph-id": ("1", "-1", "99999999999"),
    "--group": ("A=a", "B=(", "C=.*"),
    "--expect": ("A>=1", "GEMM<3"),
    "--max-chars": ("1000", "1099511627776"),
    "--peak": ("bf16=989", "float32=1e300", "x=1"),
    "--bandwidth": ("3350", "1e-300"),
    "--at-roofline": ("op:mm", "label:forward=0.5", "kernel:.=2", "module:("),
    "--free": ("kernel:.", "label:x", "idle:python"),
    "--scale": ("kernel:.=0.5", "kernel:.=-1", "stream:7=2"),
    "--no-wait": ("all", "nccl"),
    "--on-time": ("rank:0", "rank:7"),
    "--fail-on": ("total>5%", "kernel:.>1us", "new:kernel>0"),
    "--at": ("peak", "oom", "1ms", "soon"),
    "--clock-ghz": ("1.7",),
    "--launch": ("0", "1099511627776"),
    "--time-limit": ("5",),
    "--memory-limit": ("0.5",),
}
"""Values of options that take a number or a text; those of choices and flags follow from the command line."""
OTHER_OPTIONS = {
    "--output": "verbs above have it",
    "--format": "each case has one",
    "--force": "nothing is there before",
    "--install-skill": "reads no trace",
    "--annotate": "convert writes the same form",
    "--hlo": "a format of its own here",
    "--merge": "of buffers, which are formats of their own here",
    "--labels": "a format of its own here",
    "--eager": "verbs above have it",
    "--graph": "verbs above have it",
    "--before": "two inputs say the same",
    "--after": "two inputs say the same",
    "--baseline": "two inputs say the same",
    "--new": "verbs above have it",
    "--keep": "verbs above have it",
    "--workers": "ingest reads in this process here",
    "--ray": "ingest reads in this process here",
}
"""Options that no case gets at random, and why."""
_WITH_OPTION = 0.25


def drawn(dice: random.Random) -> list[str]:
    """A verb with its arguments, and sometimes one more option."""
    verb = list(dice.choice(VERBS))
    if dice.random() < _WITH_OPTION:
        verb += _option(dice, verb)
    return verb


def options_of(command: click.Command) -> dict[str, click.Option]:
    """The options of a verb that cases get at random, by their long names."""
    named = {max(option.opts, key=len): option for option in command.params if isinstance(option, click.Option)}
    return {name: option for name, option in named.items() if name not in OTHER_OPTIONS}


def _option(dice: random.Random, verb: list[str]) -> list[str]:
    command = next(command for command in commands() if command.name == verb[0])
    name, option = dice.choice(list(options_of(command).items()))
    if name in verb:
        return []
    if option.is_flag:
        return [name]
    values = option.type.choices if isinstance(option.type, click.Choice) else VALUES[name]
    return [name, str(dice.choice(list(values)))]
