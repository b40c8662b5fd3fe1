"""``thence.record``: a recording from inside the program."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from thence.capture.boundaries.log import BoundaryLog
from thence.capture.cuda.nvml import RARE_SECONDS, SAMPLE_SECONDS, ClockSamples, ProcessMemorySamples
from thence.capture.cuda.nvtx import collect_nvtx, leave_nvtx
from thence.capture.jax.programs import XlaPrograms
from thence.capture.marks import (
    follow_boundaries,
    listen,
    mark,
    save_known_labels,
    save_labels,
    unlisten,
    watch_backward,
)
from thence.capture.marks.frames import top
from thence.capture.recorder.options import RecordOptions, Schedule
from thence.capture.recorder.process_facts import rank_of_environment, rank_of_framework
from thence.capture.recorder.recorder import Recorder
from thence.capture.session.endings import Endings
from thence.capture.session.mark_log import MarkLog
from thence.capture.session.noted_places import NotedPlaces
from thence.capture.session.rank_requests import RankRequests
from thence.capture.session.step_plans import TIME_SPAN, AllButWindows, SampledSteps, ScheduledSteps
from thence.capture.session.step_times import ANNOUNCED, StepTimes, call_on_main_thread
from thence.capture.session.time_spans import SPAN_SECONDS, TimeSpans
from thence.capture.session.triggers import Triggers
from thence.capture.torch.collectives import CollectiveLabels
from thence.capture.torch.hooks import Hooks
from thence.capture.torch.memory_history import MemoryHistory
from thence.capture.torch.own_files import OwnFiles
from thence.capture.torch.profiler_handover import ProfilerHandover
from thence.errors import MissingData, ThenceError, UsageError
from thence.importing import jax_uses_cuda
from thence.model.counter_names import COUNTERS_TABLE
from thence.model.formats import LABELS_FILE

if TYPE_CHECKING:
    from types import FrameType, TracebackType

    from thence.capture.marks.watching import Frame
    from thence.capture.recorder.names import Names
    from thence.capture.session.step_plans import StepPlan
    from thence.trace import Trace

_EVERYTHING = RecordOptions()
_LOG = logging.getLogger("thence.capture.recorder")
_COMPLETE_SECONDS = 4.0
"""How long a process that is about to end (``os._exit``, SIGTERM) waits for its recording; 50 ms are usual."""


def record(
    directory: str | os.PathLike[str], options: RecordOptions = _EVERYTHING, *, schedule: Schedule | None = None
) -> Recording:
    """Records what this process does on its GPUs: kernels, copies, launches, marks, NVTX ranges, collectives.

        with thence.record("recording") as recording:
            train()
        recording.open().summary("label")

    Or call `start` and `stop`, from any thread; with a schedule, call `step` after every step. A recording
    that is still running at the end of the program is finished then. Every process writes a folder of its
    own, so all ranks of a job can name the same directory.

    Args:
        directory: created if it does not exist.
        schedule: which steps to record; None records all the time.

    Raises:
        UsageError: the directory cannot be written to, or what is sampled all the time is to follow a schedule.
    """
    if options.stays_attached and schedule is not None:
        raise UsageError(
            "stalls, and counters of the last seconds, are sampled all the time, so a schedule of steps cannot have "
            "them"
        )
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path}: a recording cannot be written there: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"{path}: a recording cannot be written there: this user may not write to it")
    return Recording(path, options, schedule)


class Recording:
    """A recording of this process, made by `record`.

    Attributes:
        directory: as named by the user; folders of other processes may be in it too.
        noted: the places of the program, which hooks number, and the log of its boundaries.
    """

    def __init__(self, directory: Path, options: RecordOptions, schedule: Schedule | None) -> None:
        self.directory = directory
        self._options = options
        self._schedule = schedule
        self._endings = Endings(directory, self.stop, self._complete)
        self._recorder: Recorder | None = None
        self._log = MarkLog()
        self.noted = NotedPlaces(BoundaryLog(lambda: 0))
        self._hooks: Hooks | None = None
        self._known: dict[str, Any] = {}
        between = SAMPLE_SECONDS if options.sampling is None else RARE_SECONDS
        self._clocks = ClockSamples(seconds=between)
        self._process_memory = ProcessMemorySamples(seconds=between)
        self._collects_nvtx = False
        self._forget()

    def _forget(self) -> None:
        """Nothing is known of the program and its steps yet, as before each start."""
        self._xla = XlaPrograms()
        self._collectives = CollectiveLabels()
        self._handover = ProfilerHandover(self._stop_for_profiler)
        self._memory = MemoryHistory()
        self._ranks = RankRequests(self._agree, self._step_number)
        self._steps = StepTimes(self, self._plan())
        self._spans = TimeSpans(self._steps, self._begin_span, call_on_main_thread)
        self._triggers = Triggers(self.directory, self.request)
        self._announced = 0
        self._notes_step = True
        self._labelled = 0

    @property
    def folder(self) -> Path | None:
        """The folder of this process; None as long as nothing has been written."""
        return None if self._recorder is None else self._recorder.folder

    @property
    def dropped(self) -> int:
        """Number of records that were lost, because they came faster than they could be written."""
        return 0 if self._recorder is None else self._recorder.dropped

    @property
    def counts(self) -> dict[str, int]:
        """Rows on disk by table, such as kernels, copies, sets, calls, ranges, marks, collectives and names."""
        return {} if self._recorder is None else dict(self._recorder.parts.counts)

    def start(self) -> None:
        """Begins to record.

        Raises:
            UsageError: this process is being recorded already.
            MissingRequirement: CUPTI cannot be used; the message says why and what to do.
        """
        self._forget()
        recorder = Recorder(
            self.directory, _for_frameworks(self._options), self._rows, self._facts, jax_uses_cuda, self._look
        )
        recorder.start()
        self._recorder = recorder
        repeats = self._options.sampling is not None
        self.noted = NotedPlaces(recorder.log, recorder.samples, OwnFiles(self._options.own), repeats=repeats)
        self._log = MarkLog(recorder.log if recorder.counts else None)
        self._collects_nvtx = self._options.nvtx and collect_nvtx()
        self._xla.look()
        self._note_open_marks()
        listen(self._log)
        if self._options.collectives:
            self._collectives.begin()
        self._handover.look()
        if self._options.memory:
            self._memory.begin(lambda: self.folder)
        _alive.add(self)
        self._endings.expect()
        if self._listens:
            self._triggers.begin()
        self._start_hooks()
        self._begin_step()

    def request(self, why: str) -> None:
        """Records a window of steps, and keeps it, or keeps the last seconds of counters; only where that was chosen.

        A window begins with the next step, or, where `torch.distributed` has several ranks, with a step some seconds
        ahead that all of them record.

        Args:
            why: the reason, which the recording states of a window of steps.
        """
        if isinstance(self._steps.plan, SampledSteps):
            self._steps.plan.request(why)
        if self._options.keeps_last and self._recorder is not None:
            self._recorder.keep_counters()

    @property
    def _listens(self) -> bool:
        """Whether somebody may ask for something, see `request`."""
        return self._options.sampling is not None or self._options.keeps_last

    def _agree(self, why: str, step: int) -> None:
        if isinstance(self._steps.plan, SampledSteps):
            self._steps.plan.agree(why, step)

    def _step_number(self) -> int:
        plan = self._steps.plan
        return plan.number if isinstance(plan, SampledSteps) else 0

    def _own_ns(self) -> int:
        """CPU time that the recorder has taken besides recording: of its thread, and at steps that are not recorded."""
        return self._steps.own_ns + (0 if self._recorder is None else self._recorder.cpu_ns)

    def _plan(self) -> StepPlan:
        if self._schedule is not None:
            return ScheduledSteps(self._schedule)
        if self._options.sampling is not None:
            return SampledSteps(self._options.sampling, _is_alone, self._ranks.ask, self._own_ns)
        # While stalls are sampled, CUPTI enables no records, as it would have to after a window.
        return AllButWindows() if self._options.baseline and not self._options.stays_attached else ScheduledSteps(None)

    def step(self) -> None:
        """Notes that one step of the program has ended and the next one begins."""
        if self._recorder is None:
            return
        self._announced += 1
        if self._steps.passes(self._announced, ANNOUNCED):
            return  # the most frequent case, which asks for nothing else
        if self._recorder.alive:
            recorded = self._begin_step()
            if self._hooks is not None:
                self._hooks.step(recorded=recorded)

    # What `StepTimes` switches.

    def why_attached(self) -> str | None:
        """See `thence.capture.session.step_times.Switch`."""
        return "there is no recording" if self._recorder is None else self._recorder.why_attached()

    def pause(self) -> bool:
        """See `thence.capture.session.step_times.Switch`."""
        if self._recorder is None:
            return False
        followed = self._hooks is not None and not self._hooks.pause()
        watch_backward(on=False)  # marks themselves cost little
        self._recorder.pause(anywhere=self._steps.kind == TIME_SPAN)
        return not (followed or self._recorder.attached)

    def resume(self, frame: FrameType | None) -> None:
        """See `thence.capture.session.step_times.Switch`."""
        if self._recorder is not None:
            self._recorder.resume()
            if self._hooks is not None:
                self._hooks.resume(frame)
            watch_backward(on=True)
            if self._options.sampling is not None:
                self._note_open_marks()  # the parts with their beginnings may be deleted

    def stop(self) -> None:
        """Waits for the device, writes what is left, and ends the recording. A second call does nothing."""
        recorder = self._recorder
        if recorder is None or not recorder.alive:
            return
        with self._endings.finishing():
            self._stop_hooks()
            if self._collects_nvtx:
                leave_nvtx()  # before unlisten: marks without a listener check whether a tool collects NVTX
            unlisten(self._log)
            watch_backward(on=True)
            self._collectives.end()
            self._handover.end()
            self._triggers.end()
            self._ranks.end()
            self._xla.end()
            recorder.stop(self._steps.end)
            if recorder.folder is not None:
                self._xla.save(recorder.folder)
                _save_labels(recorder.folder)
            self._memory.end()
            self._endings.forget(recorder.parts.trouble)

    def open(self) -> Trace:
        """Opens what was recorded in this process.

        Raises:
            UsageError: it is still being recorded.
            MissingData: there was nothing to record.
        """
        from thence.opening import open_trace  # readers and Polars, which a recorded program must not import

        if self._recorder is not None and self._recorder.alive:
            raise UsageError("the recording is still running: stop it before you open it")
        if self.folder is None:
            raise MissingData(f"{self.directory}: nothing was recorded, because this process did nothing on a GPU")
        return open_trace(self.folder)

    def _facts(self) -> dict[str, Any]:
        sampled = {"clocks": self._clocks.facts(), "process_memory": self._process_memory.facts()}
        return {**self._known, **sampled}

    def _rows(self, names: Names) -> dict[str, dict[str, Any]]:
        """Rows of marks, collectives, boundaries and places, for the recorder to write with its own.

        Each call also saves new HLO modules and labels of CUDA graphs, and hooks into JAX and torch's profiler once
        they have been imported.
        """
        self._xla.look()
        self._handover.look()
        if self._recorder is not None:
            self._recorder.plain_steps = {"trouble": self._steps.trouble, "since_ns": self._steps.since}
            plan = self._steps.plan
            ring = self._recorder.parts.ring
            if isinstance(plan, SampledSteps) and ring is not None:
                self._recorder.sampling = plan.facts()
                ring.begin_round(plan.windows, [request["window"] for request in tuple(plan.requests)])
        if self._recorder is not None and self._recorder.folder is not None:
            self._xla.save(self._recorder.folder)
            self._keep_labels(self._recorder.folder / LABELS_FILE)
        noted = {**self._log.take(names), **self.noted.take(names)}
        return {**noted, "steps": self._steps.take(), COUNTERS_TABLE: self._clocks.take_energy()}

    def _note_open_marks(self) -> None:
        for frame in _open_frames():
            self._log.opened(frame[1], frame[2].name, frame[2].lane, frame[2].metadata)

    def _keep_labels(self, path: Path) -> None:
        """Writes the labels of the graphs captured so far, so that a program that is killed keeps them."""
        try:
            self._labelled = save_known_labels(path, self._labelled)
        except UsageError as error:  # a full disk: records matter more, and `stop` tries again
            _LOG.warning("thence: %s", error)
            self._labelled = sys.maxsize

    def _start_hooks(self) -> None:
        """Starts the hooks that note boundaries of modules and lines."""
        self._hooks = hooks = Hooks(
            self.noted.log, self.noted.places, self._options, self._step_begins, call_on_main_thread
        )
        self._known = {"lines": hooks.forward_method()}
        hooks.start()
        follow_boundaries((self.noted.log, self.noted.places))

    def _stop_hooks(self) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None and self._recorder is not None:
            follow_boundaries(None)
            self._ask_hooks(hooks, self._recorder)
            hooks.stop()

    def _ask_hooks(self, hooks: Hooks, recorder: Recorder) -> None:
        self._known = {"lines": hooks.forward_method(), "backward": hooks.backward_method()}
        for sentence in hooks.warnings():
            recorder.warn(sentence)

    def _complete(self) -> None:
        """Writes what is recorded so far, because the process is about to end."""
        recorder, hooks = self._recorder, self._hooks
        if recorder is None or not recorder.alive:
            return
        if hooks is not None:
            self._ask_hooks(hooks, recorder)
        if recorder.complete(_COMPLETE_SECONDS):
            self._endings.completed(recorder.parts.trouble)

    def _begin_step(self) -> bool:
        """A step begins that the program announced, or the first one; returns whether it is recorded."""
        frame = sys._getframe()  # noqa: SLF001 - no other way to a frame
        first = self._announced == 0
        # Before the program announces a step, steps are those that hooks detect.
        detected = first and self._schedule is None
        recorded = detected or self._steps.begins(frame, self._announced, ANNOUNCED)
        self._note_step(self._announced, recorded=recorded)
        return recorded

    def _begin_span(self) -> None:
        """A span of time begins in a program that has no steps; called on the main thread."""
        if self._recorder is None or not self._recorder.alive:
            return
        if not self._steps.passes(kind=TIME_SPAN):
            recorded = self._steps.begins(sys._getframe(), kind=TIME_SPAN)  # noqa: SLF001 - no other way to a frame
            self._note_step(self._step_number(), recorded=recorded)

    def _note_step(self, number: int, *, recorded: bool) -> None:
        # Of the steps that are not recorded, the first ends one that is; the others would only fill the log.
        if recorded or self._notes_step:
            self._log.step(number, recorded=recorded)
        self._notes_step = recorded

    def _step_begins(self, frame: FrameType | None, kind: str) -> bool:
        """A step begins that hooks detected; returns whether it is recorded."""
        if self._schedule is not None:
            return True  # its steps are those that the program announces
        return not self._steps.passes(kind=kind) and self._steps.begins(frame, kind=kind)

    def _look(self) -> None:
        self._endings.end_if_signalled()
        self._clocks.look()
        if self._options.memory:
            self._process_memory.look()
        self._steps.resume_if_overdue()
        if self._listens:
            self._triggers.look()
        if self._options.sampling is not None:
            self._ranks.look()
            self._look_at_time()
        if self._hooks is not None and self._schedule is None and self.counts.get("kernels") and not jax_uses_cuda():
            self._hooks.look()

    def _look_at_time(self) -> None:
        """Divides the time of a program that has no steps; JAX may launch between any two instructions of it."""
        recorder = self._recorder
        if recorder is not None and not jax_uses_cuda() and self._spans.look(recorder.parts.numbers.get("kernels", 0)):
            recorder.look_seconds = SPAN_SECONDS
            recorder.warn(
                f"the program has no steps that thence knows: spans of {SPAN_SECONDS:g} s count as steps, and windows "
                "of these are recorded"
            )

    def _stop_for_profiler(self) -> None:
        """Ends the recording, because the program starts a profiler of its own, which needs CUPTI."""
        if self._recorder is not None and self._recorder.alive:
            self._recorder.warn(
                "the program started torch.profiler, and CUPTI serves one profiler at a time: the recording ended "
                "at that point; later activities are missing"
            )
            self.stop()

    def _forked(self) -> None:
        """Detaches a forked child process from the recording, which belongs to its parent."""
        if self._hooks is not None:
            follow_boundaries(None)
            self._hooks.forked()
            self._hooks = None
        self._steps.forget()
        unlisten(self._log)
        self._collectives.forked()
        self._memory.forked()
        self._xla.forked()
        self._log = MarkLog()
        self.noted = NotedPlaces(BoundaryLog(lambda: 0))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.stop()


def _for_frameworks(options: RecordOptions) -> RecordOptions:
    """The options, with launches if JAX uses CUDA: XLA's graphs are distinguished by the calls that build them."""
    if options.launches is None and jax_uses_cuda():
        return dataclasses.replace(options, launches=True)
    return options


_alive: weakref.WeakSet[Recording] = weakref.WeakSet()


def _after_fork() -> None:
    for recording in tuple(_alive):
        recording._forked()  # noqa: SLF001 - of this module


os.register_at_fork(after_in_child=_after_fork)


def _open_frames() -> list[Frame]:
    """The marks that are already open here, outermost first."""
    frames, frame = [], top.get()
    while frame is not None:
        if isinstance(frame[2], mark):
            frames.append(frame)
        frame = frame[0]
    return frames[::-1]


def _is_alone() -> bool:
    """Whether this process is the only one of its job, as far as its launcher and its framework say."""
    rank = rank_of_framework()
    return os.environ.get("WORLD_SIZE", "1") == "1" and not (rank_of_environment() if rank is None else rank)


def _save_labels(folder: Path) -> None:
    try:
        save_labels(folder / LABELS_FILE)
    except MissingData:
        pass  # no graph was captured
    except ThenceError as error:
        _LOG.error("thence: %s", error)
