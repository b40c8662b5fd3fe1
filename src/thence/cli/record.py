"""``thence record``: run a command, and record what it does on the GPUs."""

from __future__ import annotations

import contextlib
import functools
import shlex
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from thence.capture.cuda.cuda_events import load_driver
from thence.capture.launcher.launch import claimed_directory, run
from thence.capture.recorder.options import Counters, RecordOptions, Sampling
from thence.cli.messages import say
from thence.cli.verb import VerbCommand
from thence.errors import MissingRequirement, ThenceError, UsageError
from thence.model.formats import MEASURED_PEAKS_FILE
from thence.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from thence.capture.launcher.content import Content

_INCOMPLETE = 2
"""Exit code with ``--strict``."""
_SAMPLING = {"every": "every", "steps": "steps", "ring": "ring", "budget": "budget"}
"""Options that need --always, and what they are in `thence.Sampling`."""
_COUNTERS = {
    "counters_interval": "interval_us",
    "counters_window": "window_seconds",
    "counters_every": "every_seconds",
    "counters_only": "metrics",
    "counters_last": "last_seconds",
}
"""Options that need --counters, and what they are in `thence.Counters`."""
_NO_PROCESS = (
    "no Python process of the command began to record. Either none used a GPU, or Python was started with -I, -E or "
    "-S or without the environment variables PYTHONPATH and THENCE_RECORD, or those that did were forked after their "
    "parent had imported what uses the GPU (gunicorn --preload), or a message above says why. thence doctor shows what "
    "works here"
)


def _no_driver() -> str | None:
    """Why no process on this machine can use a GPU, and what to do; None if one can, as far as is known."""
    try:
        load_driver()
    except MissingRequirement as error:
        return f"{error}; thence doctor says what works here"
    return None


def _window_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--always``, ``--counters``, what needs them and ``--stalls``, as one parameter: three of `RecordOptions`."""

    @functools.wraps(command)
    def called(*, always: bool, counters: bool, stalls: bool, **given: Any) -> Any:
        sampling = _stated(given, _SAMPLING, "--always", on=always)
        sampled = _stated(given, _COUNTERS, "--counters", on=counters)
        if "budget" in sampling:
            sampling["budget"] /= 100
        if "metrics" in sampled:
            sampled["metrics"] = tuple(sampled["metrics"].replace(",", " ").split())
        windows = {
            "sampling": Sampling(**sampling) if always else None,
            "counters": Counters(**sampled) if counters else None,
            "stalls": stalls,
        }
        return command(windows=windows, **given)

    wrapped: Callable[..., Any] = called
    for option in reversed((*_always_options(), *_counter_options())):
        wrapped = option(wrapped)
    return wrapped


def _stated(given: dict[str, Any], names: dict[str, str], needed: str, *, on: bool) -> dict[str, Any]:
    """Takes the options of one group out of those given; ``on``: whether the one that they need is."""
    stated = {option: value for option in names if (value := given.pop(option)) is not None}
    if stated and not on:
        raise UsageError(f"--{next(iter(stated)).replace('_', '-')} needs {needed}")
    return {names[option]: value for option, value in stated.items()}


def _always_options() -> tuple[Callable[..., Any], ...]:
    number = click.IntRange(min=1)
    return (
        click.option(
            "--always", is_flag=True, help="Record windows of few steps, far apart, as long as the program runs."
        ),
        click.option(
            "--every", type=number, metavar="STEPS", help="With --always: one window in so many steps, or more (50)."
        ),
        click.option("--steps", type=number, metavar="STEPS", help="With --always: steps of a window (1)."),
        click.option("--ring", type=number, metavar="WINDOWS", help="With --always: windows that stay on disk (20)."),
        click.option(
            "--budget",
            type=click.FloatRange(min=0, max=99),
            metavar="PERCENT",
            help="With --always: what it may cost by its own measurement (1); 0 keeps --every as it is.",
        ),
    )


def _counter_options() -> tuple[Callable[..., Any], ...]:
    return (
        click.option(
            "--counters",
            is_flag=True,
            help="Sample hardware counters of the GPUs in short windows: work of tensor cores and multiprocessors, "
            "bytes of memory and caches. Needs the right to profile.",
        ),
        click.option(
            "--counters-interval",
            type=float,
            metavar="MICROSECONDS",
            help="With --counters: from one sample to the next (10).",
        ),
        click.option(
            "--counters-window", type=float, metavar="SECONDS", help="With --counters: how long a window is (0.04)."
        ),
        click.option(
            "--counters-every", type=float, metavar="SECONDS", help="With --counters: one window in so long (5)."
        ),
        click.option(
            "--counters-only", metavar="NAME,...", help="With --counters: which ones, as docs/recording.md names them."
        ),
        click.option(
            "--counters-last",
            type=click.FloatRange(min=0, min_open=True),
            metavar="SECONDS",
            help="With --counters and an interval of 100 or more: no windows, but the last seconds before the end, and "
            "before SIGUSR2 or a touched file asks.",
        ),
        click.option(
            "--stalls",
            is_flag=True,
            help="Experimental: sample where inside kernels warps wait, and for what, by line (thence inside shows "
            "it). Not with --counters or --always.",
        ),
    )


@click.command("record", cls=VerbCommand, context_settings={"allow_interspersed_args": False})
@click.option(
    "-o", "--output", metavar="DIR", help="Folder to record to. Default: thence-recording, numbered if it exists."
)
@click.option(
    "--with",
    "added",
    multiple=True,
    type=click.Choice(("launches", "memory", "overhead", "peaks")),
    help="Also record every API call that launches work or waits as CUPTI's records (else callbacks note them, which "
    "costs far less), every allocation of PyTorch's allocator and of CUDA, the overhead of CUPTI itself, or, before "
    "the command runs, what this machine's GPU attains (ten seconds with PyTorch), for thence roofline.",
)
@click.option(
    "--without",
    "left_out",
    multiple=True,
    type=click.Choice(("launches", "nvtx", "collectives", "modules", "lines", "samples")),
    help="Do not record launches of JAX programs (their kernels get few places then), NVTX ranges, sizes of "
    "collectives, modules with phases and steps, lines of the program, or samples of what the host does while "
    "it launches nothing.",
)
@click.option(
    "--own",
    multiple=True,
    metavar="PACKAGE",
    help="Also record lines of this package, as if it were the program's own code; a leading ! excludes it.",
)
@click.option(
    "--flush",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="How often records are written to disk. A killed program loses those since the last write.",
)
@click.option(
    "--without-baseline",
    "no_baseline",
    is_flag=True,
    help="Record every step. By default some are left out, at most a tenth of them, to measure what recording costs.",
)
@_window_options
@click.option(
    "--strict", is_flag=True, help="Exit with code 2 if the command succeeds but its recording is empty or incomplete."
)
@click.argument("program", nargs=-1, required=True, metavar="[--] COMMAND...")
@click.pass_context
def command(
    context: click.Context,
    output: str | None,
    added: tuple[str, ...],
    left_out: tuple[str, ...],
    own: tuple[str, ...],
    flush: float,
    program: tuple[str, ...],
    windows: dict[str, Any],
    *,
    no_baseline: bool,
    strict: bool,
) -> None:
    """Run a command and record the GPU work of every Python process in it.

    The exit code is the command's own, whatever happens to the recording (but see --strict). Nothing of the program
    needs to change:

    \b
        thence record -- python train.py
        thence record -o run1 -- torchrun --nproc-per-node 8 train.py
        thence record --own transformers -- python finetune.py
        thence record --always --every 100 -o run2 -- python train.py
        thence record --counters -o run3 -- python train.py
        thence record --stalls -o run4 -- python train.py
    """  # noqa: D301 - click's mark of lines that stay as they are
    from thence.capture.launcher.content import content

    options = RecordOptions(
        **_kinds(added, left_out), **windows, own=own, baseline=not no_baseline, flush_seconds=flush
    )
    directory = claimed_directory(output)
    shown = output or directory.name
    try:
        if "peaks" in added:
            from thence.timing.measured_peaks import measure_into

            measure_into(directory / MEASURED_PEAKS_FILE)
        with _summaries(directory) if options.sampling is not None else contextlib.nullcontext():
            outcome = run(program, directory, options)
        recorded = content(directory)
    finally:
        _remove_if_empty(directory)
    with contextlib.suppress(ThenceError):  # standard error cannot be written
        say(f"thence: {_sentence(recorded, shown, outcome.unseen)}")
    context.exit(_INCOMPLETE if strict and not outcome.code and _lacks(recorded) else outcome.code)


def _summaries(directory: Path) -> contextlib.AbstractContextManager[None]:
    """Writes summaries of windows beside the recording meanwhile, by a process that needs what reads recordings."""
    from thence.watch.follow import sidecar

    return sidecar(directory)


def _kinds(added: tuple[str, ...], left_out: tuple[str, ...]) -> dict[str, Any]:
    """What ``--with`` and ``--without`` mean in `RecordOptions`."""
    return {
        "launches": True if "launches" in added else False if "launches" in left_out else None,
        **{name: name not in left_out for name in ("nvtx", "collectives", "modules", "lines", "samples")},
        **{name: name in added for name in ("overhead", "memory")},
    }


def _lacks(recorded: Content) -> bool:
    missing = recorded.dropped or recorded.cut or recorded.unwritten or recorded.troubles
    return not recorded.rows or bool(missing)


def _sentence(recorded: Content, shown: str, unseen: str | None) -> str:
    missing = [_unwritten(recorded.unwritten)] if recorded.unwritten else []
    for trouble, count in Counter(recorded.troubles).items():
        which = "1 process" if count == 1 else f"{count} processes"
        missing.append(f"{which} could not be recorded, or not completely: {trouble}")
    reasons = dict.fromkeys([*([unseen] if unseen else []), *recorded.unseen])
    missing += [f"a Python process did not record itself: {reason}" for reason in reasons]
    if not recorded.rows:
        return f"nothing was recorded: {'; '.join(missing) or _no_driver() or _NO_PROCESS}"
    text = (
        f"recorded {recorded.kernels:,} kernels and {recorded.rows - recorded.kernels:,} memcpys and memsets "
        f"of {recorded.processes} process{'es' * (recorded.processes > 1)} "
        f"({format_bytes(recorded.bytes)})"
    )
    if recorded.dropped:
        text += f"; {recorded.dropped:,} records were lost"
    if recorded.cut:
        text += f"; {recorded.cut} of the processes ended before they could finish their recording"
    text = "; ".join([text, *missing])
    return f"{text}. See it: thence report {shlex.quote(shown)}"


def _unwritten(processes: int) -> str:
    which = "1 process" if processes == 1 else f"{processes} processes"
    return (
        f"{which} began to use a GPU and ended by a signal, or crashed, before the first records were "
        "written, 0.1 s later"
    )


def _remove_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()
