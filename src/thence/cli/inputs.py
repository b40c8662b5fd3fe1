"""The INPUT argument and the selection options that all subcommands share."""

from __future__ import annotations

import functools
import os
import shlex
from dataclasses import dataclass, field
from glob import glob
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from thence.cli.progress import bytes_read, working
from thence.cli.verb import SharedOption
from thence.credentials import without_credentials
from thence.errors import InputError, UsageError
from thence.model.selection import SEPARATE, WARM_UP, Selection, parse_steps, parse_window
from thence.readers.expansion import DEFAULT
from thence.readers.remote import is_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from thence.trace import Trace

Option = Literal["rank", "device", "steps", "window", "program", "only", "warm-up", "own", "hlo"]

SELECTING: tuple[Option, ...] = (*("rank", "device", "steps", "window", "program"), *("only", "warm-up"))
"""Options that choose a part of a trace."""

_GLOB = "*?["

_OPTIONS: dict[Option, Callable[[Any], Any]] = {
    "rank": click.option(
        "--rank",
        "ranks",
        cls=SharedOption,
        brief="Only this rank: --rank 0 --rank 3",
        type=int,
        multiple=True,
        help="Only this rank. Repeatable.",
    ),
    "device": click.option(
        "--device",
        "devices",
        cls=SharedOption,
        brief="Only the GPU of this index: --device 1",
        type=int,
        multiple=True,
        help="Only the GPU with this index. Repeatable.",
    ),
    "steps": click.option(
        "--steps",
        cls=SharedOption,
        brief="Only these steps: --steps 3:6, --steps typical",
        metavar="FIRST:LAST",
        help="Only work launched in these steps: 3:6 are 3, 4 and 5; typical are those without the first, warm-up and "
        "outliers; all are all of them, without what lies outside of steps.",
    ),
    "window": click.option(
        "--window",
        cls=SharedOption,
        brief="Only this time: --window 1.2s:1.4s, --window 300ms:",
        metavar="FROM:TO",
        help="Only work that started in this time after the first GPU activity: 1.2s:1.4s, 300ms: or :50us.",
    ),
    "program": click.option(
        "--program",
        cls=SharedOption,
        brief="Only this XLA program: --program jit_train_step, main",
        metavar="NAME",
        help="Only work of the XLA program of this name; main finds the programs of the steps.",
    ),
    "only": click.option(
        "--only",
        cls=SharedOption,
        brief="Only work that matches: --only 'attention|mlp'",
        metavar="REGEX",
        help="Only work whose name, label, module, op, HLO instruction or op_name matches.",
    ),
    "warm-up": click.option(
        "--warm-up",
        cls=SharedOption,
        brief="Warm-up of XLA programs: --warm-up heuristic",
        type=click.Choice((SEPARATE, *WARM_UP)),
        default=SEPARATE,
        show_default=True,
        help="How to treat warm-up executions of XLA programs and XLA's autotuner. separate: in rows and frames of "
        "their own. keep: like the rest. heuristic or first-compiled: leave them out of every figure, by that rule.",
    ),
    "own": click.option(
        "--own",
        cls=SharedOption,
        brief="More of your own code: --own transformers --own '!tests'",
        multiple=True,
        metavar="PATTERN",
        help="Also treat this as your own code in --by source: a package (transformers), a folder or a glob; "
        "a leading ! excludes it. Repeatable, the last match decides.",
    ),
    "hlo": click.option(
        "--hlo",
        cls=SharedOption,
        brief="HLO dumps for traces without HLO: --hlo dumps/",
        multiple=True,
        metavar="PATH",
        type=click.Path(),
        help="HLO dumps (*.hlo.pb, a folder, a glob) for traces that lack them. Repeatable.",
    ),
}

_RUNS = (
    click.option(
        "--run",
        cls=SharedOption,
        brief="Of a folder with several runs: --run 2026_01_02",
        metavar="NAME",
        help="Which run of a directory that holds several: the name of a folder, or a part of file names "
        "between dots. Default: the newest.",
    ),
    click.option(
        "--add",
        cls=SharedOption,
        brief="Read several files of one rank as ranks of their own",
        is_flag=True,
        help="Read several files of the same rank as separate ranks.",
    ),
    click.option(
        "--max-expansion",
        cls=SharedOption,
        brief="How much compressed input may grow: --max-expansion 500",
        type=click.IntRange(min=1),
        default=DEFAULT.ratio,
        show_default=True,
        metavar="RATIO",
        help="Refuse compressed input that becomes more than RATIO times as large and more than 64 MiB.",
    ),
)
"""Options of every verb that reads traces."""

warm_up_option = click.option(
    "--warm-up",
    type=click.Choice(WARM_UP),
    default="heuristic",
    show_default=True,
    help="Which executions of XLA programs count as warm-up and are left out.",
)
"""For subcommands whose analysis applies the warm-up rule itself and reports what it dropped."""


@dataclass(frozen=True)
class Inputs:
    """Inputs of a subcommand, and the selected part of them.

    Attributes:
        paths: files, directories, globs, URLs, a store, or ``-`` for standard input.
        hlo: HLO dumps.
        own: patterns of further files that count as the user's own code.
        selection: the part to analyse.
        run: the run to read from directories that hold several; None: the newest.
        add: whether several files of the same rank are all read, each as a rank of its own.
        max_expansion: most decompressed bytes for each stored byte.
    """

    paths: tuple[str, ...]
    hlo: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    selection: Selection = field(default_factory=Selection)
    run: str | None = None
    add: bool = False
    max_expansion: int = DEFAULT.ratio

    def open(self) -> Trace:
        """The selected part of the trace, attributed."""
        whole = self.whole()
        with working("attributing"):
            return whole.selected(self.selection)

    @property
    def typed(self) -> str:
        """The inputs as a command line names them.

        Three or more inputs in one folder become a glob, if one matches exactly these. Credentials in URLs are left
        out, because the command is printed.
        """
        if len(self.paths) < 3:
            return shlex.join(map(without_credentials, self.paths))
        before = _common_start(self.paths)
        after = _common_start([path[len(before) :][::-1] for path in self.paths])[::-1]
        one_folder = len({*map(os.path.dirname, self.paths)}) == 1
        matches = glob(f"{before}*{after}") if one_folder else []  # noqa: PTH207 - as a shell finds them
        if sorted(matches) == sorted(self.paths):
            return f"{shlex.quote(before) if before else ''}*{shlex.quote(after) if after else ''}"
        return f"{shlex.quote(without_credentials(self.paths[0]))} ..."

    def whole(self) -> Trace:
        """Reads the trace; shows its progress if standard error is a terminal."""
        from thence.opening import open_trace

        with bytes_read() as progress:
            return open_trace(
                *self.paths,
                hlo=self.hlo,
                own=self.own,
                run=self.run,
                add=self.add,
                max_expansion=self.max_expansion,
                progress=progress,
            )


def trace_options(*offered: Option, required: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds the argument INPUT... and options to a command, which gets them as one parameter ``inputs``.

    The inputs and options are validated before anything is read.

    Args:
        offered: names of the options.
        required: whether at least one input must be given; a verb may also take inputs from options of its own.
    """

    def decorated(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def called(**options: Any) -> Any:
            paths, hlo = options.pop("inputs"), options.pop("hlo", ())
            check_inputs((*paths, *hlo))
            steps, window = options.pop("steps", None), options.pop("window", None)
            selection = Selection(
                ranks=options.pop("ranks", ()),
                devices=options.pop("devices", ()),
                steps=None if steps is None else parse_steps(steps),
                window_ns=None if window is None else parse_window(window),
                program=options.pop("program", None),
                only=options.pop("only", None),
                warm_up=options.pop("warm_up") if "warm-up" in offered else SEPARATE,
            )
            own, run, add = options.pop("own", ()), options.pop("run"), options.pop("add")
            most = options.pop("max_expansion")
            inputs = Inputs(paths, hlo, own, selection, run, add, most)
            return command(inputs=inputs, **options)

        wrapped: Callable[..., Any] = called
        for option in reversed((*(_OPTIONS[name] for name in offered), *_RUNS)):
            wrapped = option(wrapped)
        return click.argument(
            "inputs",
            nargs=-1,
            required=required,
            metavar="INPUT..." if required else "[INPUT]...",
            type=click.Path(allow_dash=True),
        )(wrapped)

    return decorated


def _common_start(texts: Sequence[str]) -> str:
    return "".join(same[0] for same in takewhile(lambda same: len({*same}) == 1, zip(*texts, strict=False)))


def names_inputs(text: str) -> bool:
    """Whether a word of the command line is an input: an existing file or folder, a glob, a path, or -."""
    return text == "-" or os.path.lexists(text) or any(c in text for c in _GLOB) or _is_path(text)


def _is_path(text: str) -> bool:
    """Whether a word looks like a path, so that the error is a missing file and not an unknown verb."""
    return os.sep in text or Path(text).suffix != ""


def check_inputs(paths: Iterable[str]) -> None:
    """Checks that all paths exist before anything is read, because reading may take long.

    Raises:
        InputError: a path does not exist. Globs and URLs are left to the reader.
    """
    for path in paths:
        named = path == "-" or is_url(path) or any(c in path for c in _GLOB)
        if not named and not os.path.lexists(path):
            raise InputError(path, f"no such file or directory{_who_writes(path)}")


def _who_writes(path: str) -> str:
    """Of a folder that does not exist: what would have written it, as the end of a sentence; else empty."""
    if Path(path).suffix:
        return ""
    parent = Path(path).absolute().parent
    if not parent.exists():
        return f"; {parent} does not exist either: is it relative to another folder, or on another machine?"
    return "; thence record -o FOLDER -- COMMAND writes such a folder, unless it says that nothing was recorded"


def runs_in(folder: str) -> tuple[str, ...]:
    """Every file and folder in a directory that may be a run.

    Raises:
        InputError: the directory does not exist.
        UsageError: it has no file and no folder.
    """
    check_inputs([folder])
    runs = sorted(path for path in Path(folder).iterdir() if not path.name.startswith("."))
    # Leave out notes, which are often in the same folder as the runs.
    runs = [path for path in runs if path.suffix not in (".md", ".txt", ".log")]
    if not runs:
        raise UsageError(f"{folder}: is empty; every file or folder in it is read as a run")
    return tuple(map(str, runs))
