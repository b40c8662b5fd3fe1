"""Shows what a verb is doing if it takes longer than a second and standard error is a terminal."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thence.credentials import without_credentials

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import Progress

_QUIET_S = 1.0
"""Time before a display appears, in seconds."""


@contextmanager
def working(what: str) -> Iterator[None]:
    """Shows what is being done, and for how long already."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    with _late(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()) as bar:
        bar.add_task(what, total=None)
        yield


@contextmanager
def bytes_read() -> Iterator[Callable[[str, int, int], None]]:
    """Yields a function for readers to call with a file, the number of its bytes read, and its size (0: unknown)."""
    if not sys.stderr.isatty():
        yield lambda _name, _done, _size: None
        return
    from rich.progress import DownloadColumn, TransferSpeedColumn

    with _late(*_bar(), DownloadColumn(), TransferSpeedColumn()) as bar:
        tasks: dict[str, Any] = {}

        def show(name: str, done: int, size: int) -> None:
            if name not in tasks:
                shown = Path(without_credentials(name)).name
                tasks[name] = bar.add_task(shown, total=size or None)
            bar.update(tasks[name], completed=done)
            if size and done >= size:
                bar.update(tasks[name], visible=False)

        yield show


@contextmanager
def rows_written() -> Iterator[Callable[[int, int], None]]:
    """Yields a function for writers to call with the number of rows written, and the number of all rows."""
    if not sys.stderr.isatty():
        yield lambda _done, _all: None
        return
    from rich.progress import MofNCompleteColumn, TextColumn

    rate = TextColumn("{task.fields[rate]}")
    with _late(*_bar(), MofNCompleteColumn(), rate) as bar:
        task = bar.add_task("writing", total=None, rate="")

        def show(done: int, total: int) -> None:
            speed = bar.tasks[0].speed
            rate = "" if speed is None else f"{speed:,.0f} rows/s"
            bar.update(task, completed=done, total=total, rate=rate)

        yield show


def _bar() -> tuple[Any, ...]:
    from rich.progress import BarColumn, TextColumn

    return TextColumn("{task.description}", markup=False), BarColumn()


@contextmanager
def _late(*columns: Any) -> Iterator[Progress]:
    """A display that appears after a second, and disappears at the end."""
    from rich.progress import Progress

    from thence.cli.output import error_console

    bar = Progress(*columns, console=error_console(), transient=True, redirect_stdout=False, redirect_stderr=False)
    timer = threading.Timer(_QUIET_S, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield bar
    finally:
        timer.cancel()
        timer.join()
        bar.stop()
