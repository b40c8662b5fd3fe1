"""A recording that a training loop makes of itself, and that never stops the training."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Self

from thence.capture.recorder.process_facts import rank_of_environment, rank_of_framework
from thence.errors import ThenceError
from thence.importing import own_imports
from thence.integrations.logged import Logged
from thence.writers.text.printable import printable_lines

if TYPE_CHECKING:
    from types import TracebackType

    from thence.capture.recorder.options import RecordOptions, Schedule
    from thence.capture.session.record import Recording

_MAX_SUMMED_BYTES = 64 << 20
"""Size of a process's recording on disk up to which the process itself reads it for the summary, in seconds."""


class Training:
    """Records a training loop, and says at its end how long a step takes and what limits it.

        with thence.integrations.Training("run") as training:
            for batch in batches:
                ...
                training.step()

    If it cannot be recorded, as without a GPU, one sentence on standard error says why, and the training goes on. In a
    process that is recorded already, that recording goes on alone. Every process of a job writes a folder of its own,
    so all ranks name the same directory; rank 0 prints the summary.

    Args:
        directory: created if it does not exist.
        options: what to record; None: the defaults.
        schedule: which steps to record; None: all, but windows that show what recording costs.

    Attributes:
        recording: of this process, from `begin` on; None if there is none.
        trouble: why there is none, one sentence; empty otherwise.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        options: RecordOptions | None = None,
        *,
        schedule: Schedule | None = None,
    ) -> None:
        self._directory = directory
        self._options = options
        self._schedule = schedule
        self.recording: Recording | None = None
        self.trouble = ""

    def begin(self) -> None:
        """Begins to record; never raises. What an interrupted training left running is ended first."""
        self.end(summary=False)
        self.trouble = ""
        is_new = not os.path.isdir(self._directory)  # noqa: PTH112 - as other code of a recorded program
        try:
            with own_imports():
                from thence.capture.recorder.options import RecordOptions
                from thence.capture.session.record import record

            recording = record(self._directory, self._options or RecordOptions(), schedule=self._schedule)
            recording.start()
        except Exception as error:  # noqa: BLE001 - the training comes first
            self.trouble = str(error) if isinstance(error, ThenceError) else repr(error)
            _say(f"the training is not recorded, and goes on: {self.trouble} (thence doctor says what works here)")
            if is_new:
                with contextlib.suppress(OSError):  # it holds something, or was never made
                    os.rmdir(self._directory)  # noqa: PTH106
        else:
            self.recording = recording

    def step(self) -> None:
        """Notes that a step of the training has ended, and the next one begins."""
        if self.recording is not None:
            self.recording.step()

    def end(self, *, summary: bool = True) -> Logged | None:
        """Ends the recording; never raises.

        Args:
            summary: whether rank 0 reads its recording and prints the summary.

        Returns:
            what rank 0 recorded, for W&B, MLflow or TensorBoard; None on other ranks, and if nothing was recorded.
        """
        recording, self.recording = self.recording, None
        if recording is None:
            return None
        try:
            recording.stop()
            return _summary(recording, self._directory) if summary and _is_first() else None
        except Exception as error:  # noqa: BLE001 - the training comes first
            _say(str(error) if isinstance(error, ThenceError) else repr(error))
            return None

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.end(summary=kind is None)


class RecordsTraining:
    """What callbacks of trainers share: the arguments of `Training`, its recording, and what it logged."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        options: RecordOptions | None = None,
        *,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__()
        self.training = Training(directory, options, schedule=schedule)
        self.logged: Logged | None = None


def _summary(recording: Recording, directory: str | os.PathLike[str]) -> Logged | None:
    if recording.folder is None:
        _say("nothing was recorded, because this process did nothing on a GPU")
        return None
    size = sum(path.stat().st_size for path in recording.folder.rglob("*") if path.is_file())
    logged = Logged(recording.open()) if size <= _MAX_SUMMED_BYTES else None
    if logged is not None:
        _ = logged.scalars  # computed and kept here, where an error does not reach the training
        for line in logged.trace.headline.lines:
            _say(line)
    _say(f"recorded {recording.counts.get('kernels', 0):,} kernels of this process. See all: thence report {directory}")
    return logged


def _is_first() -> bool:
    """Whether this process is the first of its job, or the only one."""
    rank = rank_of_framework()
    return not (rank_of_environment() if rank is None else rank)


def _say(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(printable_lines(f"thence: {text}") + "\n")
