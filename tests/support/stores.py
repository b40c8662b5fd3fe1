"""Stores for tests: written in this process, and workers that die or stop on the way."""

from __future__ import annotations

import functools
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thence.store import task
from thence.store.ingest import Ingested, ingest, sources_of
from thence.store.layout import Settings
from thence.store.task import Job, Outcome, ingest_one

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


_kept: list[tempfile.TemporaryDirectory[str]] = []
"""Folders that are removed when the process ends."""


class Killed(Exception):
    """Stands for the end of the process."""


@dataclass
class InProcess:
    """Workers that are this process; it ends before the job of a certain number.

    Attributes:
        asked: sources of the jobs that were run.
    """

    killed_before: int | None = None
    asked: list[str] = field(default_factory=list)

    def run(self, task: Callable[[Job], Outcome], jobs: Iterable[Job]) -> Iterator[Outcome]:
        for number, job in enumerate(jobs):
            if number == self.killed_before:
                raise Killed
            self.asked.append(Path(job.source).name)
            yield task(job)


@functools.cache
def kept(inputs: tuple[Path, ...], *, host: bool = False) -> Path:
    """A store of files of the tests' data, which no test changes, written once for all tests of a process."""
    folder = tempfile.TemporaryDirectory()
    _kept.append(folder)
    stored(Path(folder.name) / "store", inputs, host=host)
    return Path(folder.name) / "store"


def settings(**given: Any) -> Settings:
    return Settings(**({"max_expansion": 200, "thence": "test"} | given))


def stored(store: Path, inputs: Sequence[str | Path], workers: Any = None, **given: Any) -> Ingested:
    """An ingest in this process, of which ``given`` are settings, or ``add``."""
    add = given.pop("add", False)
    sources = sources_of([str(name) for name in inputs], add=add)
    return ingest(sources, store, settings(**given), workers=workers or InProcess())


def kill_worker_once(job: Job) -> Outcome:
    """Claims to read an input, but of rank 1 kills its own process the first time, as the system without memory."""
    mark = Path(job.store) / "killed"
    if "rank1" in job.source and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return Outcome(job.source, "a part")


def kill_worker_always(job: Job) -> Outcome:
    """Claims to read an input, but of rank 1 kills its own process."""
    if "rank1" in job.source:
        os.kill(os.getpid(), signal.SIGKILL)
    return Outcome(job.source, "a part")


def wait_while_writing(job: Job) -> Outcome:
    """Reads an input, but of every rank except 0 comes to no end: it says so when half of it is written."""
    if "rank0" not in job.source:
        task.write_table = _wait  # in this process, which is to be ended
    return ingest_one(job)


def _wait(_frame: object, path: Path) -> None:
    path.write_bytes(b"PAR1")
    sys.stderr.write(f"started {os.getpid()}\n")
    sys.stderr.flush()
    time.sleep(600)
