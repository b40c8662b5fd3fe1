"""A running recording: takes buffers of records from CUPTI and writes them to disk as parts.

Buffers that CUPTI filled wait in a queue. One thread of the recorder decodes each of them into columns,
recycles the buffer, and writes the columns as parts from time to time. So few buffers are in use, and their
memory stays in the processor's caches. Nothing here may harm the program: records that cannot be kept are
counted and reported, and nothing is raised from a callback.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from thence.capture.boundaries.log import BoundaryLog
from thence.capture.boundaries.probe import Followed
from thence.capture.boundaries.samples import HostSamples, why_not_sampled
from thence.capture.cuda import layouts
from thence.capture.cuda.cuda_events import load_driver
from thence.capture.cuda.cupti import MAX_CALLBACK_IDS, TAKEN, CuptiError, load
from thence.capture.cuda.cupti_owner import taken
from thence.capture.cuda.synchronization import synchronize
from thence.capture.recorder.activity_parser import ActivityParser
from thence.capture.recorder.buffers import Buffers, Filled
from thence.capture.recorder.counter_windows import LOOPS, CounterWindows, graphs_loops
from thence.capture.recorder.counting import Counting
from thence.capture.recorder.names import Names
from thence.capture.recorder.parts import Parts
from thence.capture.recorder.process_facts import folder_name, process_facts, rank_of_environment, rank_of_framework
from thence.capture.recorder.ring import Ring
from thence.capture.recorder.stalls import Stalls
from thence.errors import MissingRequirement, ThenceError, UsageError
from thence.model.counter_names import COUNTERS_TABLE
from thence.model.formats import RECORDING, RECORDING_VERSION
from thence.model.stall_reasons import STALLS_TABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from thence.capture.recorder.options import RecordOptions
    from thence.capture.recorder.parts import Taken

_LOG = logging.getLogger("thence.capture.recorder")
_MAX_WAITING_BYTES = 8 << 20
"""Size of waiting columns at which they are written at once. About 100,000 kernels."""
_SHARE_OF_TIME = 500
"""The time between two rounds of parts is at least a 500th of the time so far, so that long runs write few files."""
_FIRST_FLUSH_SECONDS = 0.1
"""Time to the first part. It doubles up to that of the options, so that short programs that are killed keep records."""
_ROUND_SECONDS = 0.05
"""Lower bound for the longest duration of a round of parts; records that come during a round wait for the next one."""
_MAX_WINDOW_SECONDS = 10.0
"""How long parts of a sampled window wait for its end."""
_REST_SECONDS = 30.0
"""How much longer parts without activities wait, where steps are sampled."""
_LOOK_SECONDS, _LOOK_AT_REST_SECONDS = 0.25, 1.0
"""Longest time between two calls of `looks`, and where steps are sampled and none is recorded: the delay at which
SIGTERM ends an idle process. A look takes 0.3 ms in which the program may wait for the GIL."""
_DETACHABLE = 24
"""The lowest CUPTI_API_VERSION that is detached: of CUDA 12.6, since which PyTorch's profiler detaches CUPTI."""
_PATIENCE_SECONDS = 10.0
"""How long `stop` waits for the device, and then for the thread that reads and writes."""
_SUFFIX = re.compile(r"(_v\d+)?(_pt[ds][sz])?(_v\d{4,})?$")
_OF_GRAPHS = re.compile(r"cu(da)?(Graph|Stream(Begin|End)Capture)")
"""Calls that capture, build or launch CUDA graphs."""
_ALLOCATES = re.compile(r"cu(da)?(EventRecord|Malloc|Free|HostAlloc|Mem(Alloc|Free|Create))")
"""Noted calls that neither launch nor wait. The thread of a data loader that pins memory makes no others: on an H100,
CUPTI was detached up to 200 times beside such a thread, without a crash."""
_OF_AUTOGRAD = "pt_autograd"
"""How PyTorch names the threads of autograd."""
_NO_DRIVER = (15, 999)
"""CUPTI_ERROR_NOT_INITIALIZED, CUPTI_ERROR_UNKNOWN: the errors where there is no driver."""

_running: Recorder | None = None
_graphs_under_cupti = False
"""Whether a finished recording of this process saw CUDA graphs, which may still be launched."""
_lock = threading.RLock()  # a signal handler may stop a recording that the same thread is just beginning


class Recorder:
    """One recording of this process.

    Args:
        directory: where its folder goes.
        options: what to record.
        source: returns the rows of other tables since its last call: table name to columns, every one an
            array or a list of strings. It is called on the thread that writes.
        facts: returns further entries of ``recording.json``.
        uses_xla: whether XLA may launch in this process; called before each flush.
        looks: called every `look_seconds` or more often, on the thread that writes.

    Attributes:
        look_seconds: longest time between two calls of ``looks``; None for the usual ones.
        parts: writes the parts, and counts what is on disk.
        dropped: number of records that CUPTI dropped for lack of a buffer.
        log: log of boundaries, from `start` on; its counter is always 0 if every launch is recorded.
        counts: whether launches are counted instead of recorded.
        samples: samples of threads while they launch nothing; None if they are not taken.
        attached: whether CUPTI is attached to the process.
        cpu_ns: CPU time of the thread that reads and writes.
        sampling: entry of the description: see `thence.capture.session.step_plans.SampledSteps.facts`.
        plain_steps: entry of the description, see `thence.readers.recording.folder.Description`.
    """

    def __init__(
        self,
        directory: Path,
        options: RecordOptions,
        source: Callable[[Names], Mapping[str, Mapping[str, Any]]] = lambda _names: {},
        facts: Callable[[], Mapping[str, Any]] = dict,
        uses_xla: Callable[[], bool] = lambda: False,
        looks: Callable[[], None] = lambda: None,
    ) -> None:
        ring = None if options.sampling is None else Ring(options.sampling)
        self.parts = Parts(directory, lambda: folder_name(self._known_rank()), ring)
        self.dropped = 0
        self.log = BoundaryLog(lambda: 0)
        self.counts = False
        self.samples: HostSamples | None = None
        self.sampling: dict[str, Any] | None = None
        self.plain_steps: dict[str, str | int | None] = {"trouble": None, "since_ns": 0}
        self._no_samples: str | None = "the option samples is off"
        self._counting = Counting()
        self._counters = CounterWindows(options.counters, partial(self.parts.add, COUNTERS_TABLE), self.warn)
        self._stalls = Stalls(partial(self.parts.add, STALLS_TABLE), self.warn, wanted=options.stalls)
        self._options = options
        self._source = source
        self._facts = facts
        self._uses_xla = uses_xla
        self._looks = looks
        self.look_seconds: float | None = None
        self._names = Names()
        self._buffers = Buffers(options.buffer_megabytes << 20)
        # A quarter of the buffers' bytes.
        self._max_waiting_bytes = min(_MAX_WAITING_BYTES, options.buffer_megabytes << 20 >> 2)
        self._rank: int | None = None
        self._subscription = 0
        self._pid = os.getpid()
        self._stopping = threading.Event()
        self._orders: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = queue.SimpleQueue()
        self._finished = False
        self._paused = True
        self._pausing = self._has_paused = self._anywhere = self._uncounted = False
        self.attached = False
        self.cpu_ns = 0
        self._using_cupti = threading.Lock()
        self._taking = threading.Lock()  # a sampled window begins before or after rows are taken for the next parts
        self._detachments = 0
        self._launching: set[int] = set()  # threads that launched or waited
        self._allocating: set[int] = set()  # numbers of the names of `_ALLOCATES`
        self._graphs = _graphs_under_cupti  # whether graphs were captured, built or launched while CUPTI was attached
        self._began_ns = 0
        self._began = 0.0
        self._stopped_ns: int | None = None
        self._due = 0.0
        self._flushes = True
        self._flush_seconds = min(_FIRST_FLUSH_SECONDS, options.flush_seconds)
        self._round_seconds = _ROUND_SECONDS
        self._warnings: list[str] = []
        self._functions: dict[int, np.ndarray[Any, Any]] = {}
        self._unwanted: dict[int, list[int]] = {}

    @property
    def folder(self) -> Path | None:
        """The folder of this process's recording; None as long as nothing has been written."""
        return self.parts.folder

    @property
    def alive(self) -> bool:
        """Whether it is not finished and belongs to this process: False in a forked child."""
        return not self._finished and self._pid == os.getpid()

    def start(self) -> None:
        """Subscribes to CUPTI and begins to record.

        Raises:
            UsageError: this process records already.
            MissingRequirement: there is no driver, no libcupti or one of an unknown version, no permission, or
                another profiler uses CUPTI.
        """
        global _running  # noqa: PLW0603 - CUPTI serves one at a time
        with _lock:
            if _running is not None and _running.alive:
                raise UsageError(
                    "this process is already being recorded, and only one recording can run at a time: stop the other "
                    f"one first (it writes to {_running.parts.directory})"
                )
            self._cupti = load()
            self._began_ns = time.time_ns()
            self._take_cupti()
            self.attached = True
            _running = self
        self._thread = threading.Thread(target=self._work, name="thence-recorder", daemon=True)
        self._thread.start()

    def pause(self, *, anywhere: bool = False) -> None:
        """Records nothing until `resume`.

        Where that is safe (`why_attached`), CUPTI is detached, and the program then runs as without a recorder.

        Args:
            anywhere: whether this may be within a step. Then another thread may launch, although the ones that did
                have ended, or are autograd's.
        """
        self._anywhere = anywhere
        if not self._paused and self.alive:
            self._paused = self._pausing = self._has_paused = True
            try:
                self._pause()
            finally:
                self._pausing = False
                self._buffers.filled.put(None)  # now is the time to write parts

    def _pause(self) -> None:
        self._counting.follow(Followed.NOTHING)  # callbacks stay enabled: see `Counting.listen`
        if self._options.counters is not None:  # no device is sampled while CUPTI is detached
            self._counters.hurry()
            self._by_thread(self._counters.finish, _PATIENCE_SECONDS)
        detaches = self.why_attached() is None and synchronize(_PATIENCE_SECONDS)
        if detaches:
            self._flush(unfinished=True)
        for kind in self._options.kinds():
            self._cupti.disable(kind)
        if detaches:
            self._detach()
        if self.attached:
            self._say_why_attached()

    def resume(self) -> None:
        """Records again after `pause`."""
        if self._paused and self.alive and self._attach():
            with self._taking:
                self._enable()
                self._paused = False
            if self._options.counters is not None and self._options.sampling is not None:
                self._by_thread(self._look_at_counters, _PATIENCE_SECONDS)  # the window of steps is soon over

    def keep_counters(self) -> None:
        """Has the thread that reads and writes keep the last seconds of counters, where they are sampled."""
        self._counters.ask()
        self._buffers.filled.put(None)

    def complete(self, seconds: float) -> bool:
        """Writes what is recorded so far as a finished recording, because the process is about to end.

        The recording goes on, in case the process does not end. Nothing waits for the device: activities that have
        not ended are missing.

        Args:
            seconds: time to wait for the thread that reads and writes.

        Returns:
            whether it was written; False also if it was finished before.
        """
        if not self.alive:
            return False
        self._counters.hurry()
        return self._by_thread(self._complete, seconds)

    def _by_thread(self, work: Callable[[], None], seconds: float) -> bool:
        """Has the thread that reads and writes do something; returns whether it was done within so many seconds."""
        if self._thread is threading.current_thread():
            work()
            return True
        done = threading.Event()
        self._orders.put((work, done))
        self._buffers.filled.put(None)
        return done.wait(seconds)

    def stop(self, idle: Callable[[], None] = lambda: None) -> None:
        """Waits for the device, writes what is left, and releases CUPTI.

        CUPTI is detached unless graphs of the program may depend on it (`_graphs_need_cupti`): the program may go on.
        """
        global _running, _graphs_under_cupti  # noqa: PLW0603
        with _lock:
            if not self.alive:
                return
            self._finished = True
        if not self._paused and not synchronize(_PATIENCE_SECONDS):
            self.warn(
                f"the device was still busy {_PATIENCE_SECONDS:g} s after the recording should have "
                "ended: activities that had not finished by then are missing"
            )
        self._stopped_ns = time.time_ns()
        idle()
        self._flush(unfinished=True)
        for kind in self._options.kinds() if not self._paused else ():
            self._try(lambda kind=kind: self._cupti.disable(kind))  # type: ignore[misc]
        self._stopping.set()
        self._counters.hurry()
        if self.samples is not None:
            self.samples.end()
        self._buffers.filled.put(None)
        self._thread.join(_PATIENCE_SECONDS)
        if self.attached:
            self._try(lambda: self._cupti.unsubscribe(self._subscription))
            if self._buffers.outstanding == 0 and not self._thread.is_alive():
                if self._graphs_need_cupti() is None:
                    self._try(self._cupti.finalize)
                self._buffers.release()
        with _lock:
            _running = None
            _graphs_under_cupti = self._graphs

    def warn(self, message: str) -> None:
        """Logs a warning and adds it to ``recording.json``, once."""
        if message not in self._warnings:
            self._warnings.append(message)
            _LOG.warning("thence: %s", message)

    # Setting CUPTI up.

    def _take_cupti(self) -> None:
        version = self._cupti.version()
        layouts.require_known(version)
        self._version = version
        self._parser = ActivityParser(self._cupti)
        if _running is not None and not _running.alive:  # the parent's recording, inherited by fork
            inherited = _running._subscription  # noqa: SLF001 - of this class
            self._try(lambda: self._cupti.unsubscribe(inherited))
        try:
            self._subscription = self._cupti.subscribe(self._counting.callback)
        except CuptiError as error:
            raise _explained(error) from error
        try:
            self._prepare_cupti()
            self._count_launches()
            self._enable()
        except CuptiError as error:
            self._try(lambda: self._cupti.unsubscribe(self._subscription))
            raise _explained(error) from error
        self._paused = False
        self._stalls.begin(self._cupti, self._counting.compiled, self._subscription)

    def _prepare_cupti(self) -> None:
        self._try(self._cupti.buffers_are_zeroed)
        self._cupti.register(self._buffers.requested, self._buffers.completed)
        self._cupti.system_thread_ids()
        with contextlib.suppress(CuptiError):
            if self._options.memory:
                self._cupti.allocation_sources()
        with contextlib.suppress(CuptiError):
            self._cupti.dropped(None, 0)  # forgets records that another profiler lost before

    def _detach(self) -> None:
        """Detaches CUPTI from the process; called when no kind is recorded and all buffers were delivered."""
        # Reading may ask libcupti for the size of a record, and any call would attach it again.
        if not self._by_thread(self._read_all, _PATIENCE_SECONDS) or self.why_attached():
            return
        with self._using_cupti:
            self.attached = not self._counting.detach(self._cupti)
            self._detachments += not self.attached

    def _say_why_attached(self) -> None:
        why = self.why_attached() or "detaching failed"
        self.warn(
            f"CUPTI stays attached while the recording is paused, because {why}: steps that are not recorded take "
            "longer, too"
        )

    def _attach(self) -> bool:
        """Attaches CUPTI again if it is detached; False if another profiler uses it."""
        if self.attached:
            return True
        with self._using_cupti:
            try:
                self._subscription = self._cupti.subscribe(self._counting.callback)
            except CuptiError as error:
                self.warn(f"the recording could not be continued: {_explained(error)}")
                return False
            self._buffers.numbers_before = self._counting.numbers_before
            self._prepare_cupti()
            self._counting.attach(self._cupti, self._subscription)
            self.attached = True
        return True

    def _graphs_need_cupti(self) -> str | None:
        """Why launches of CUDA graphs may fail once CUPTI is detached; None if there are none.

        On an H100 with CUPTI 13.0, 4,399 detachments from twelve programs lost no record and crashed none, although
        some of them replayed CUDA graphs. JAX with loops in command buffers crashed, and
        so did training with `torch.cuda.make_graphed_callables`, whose graphs were captured while CUPTI was attached:
        "unspecified launch failure" in two of two runs (`benchmarks/gpu_plain_step.py`). Which graphs are harmless is
        not known, so CUPTI stays attached once it has seen any. A step in a graph and a JAX training step failed alike
        when they were recorded for some steps, and ran on (`benchmarks/gpu_always.py --part blocks`).
        """
        if self._uses_xla():
            return "JAX is used"
        return "CUDA graphs were captured or launched while it was attached" if self._graphs else None

    def why_attached(self) -> str | None:
        """Why CUPTI stays attached if the recording is paused; None if it can be detached on this thread.

        libcupti once crashed when a thread launched meanwhile. Threads of autograd launch during backward passes only,
        so not between two steps.
        """
        if self._uses_xla():
            return self._graphs_need_cupti()
        if not self.counts or not self._counting.notes_launches or self._options.launches:
            return "launches are not noted by the compiled probe"
        if self._version < _DETACHABLE:
            return "CUPTI is older than that of CUDA 12.6"
        others = self._launching - {threading.get_native_id()}
        if others and (self._anywhere or any(_may_launch(thread) for thread in others)):
            return "several threads launch or wait for the device"
        if not self._graphs and not self._by_thread(self._take_calls, _PATIENCE_SECONDS):
            return "it is not known in time what was launched"
        return self._graphs_need_cupti()

    def _flush(self, *, unfinished: bool) -> None:
        with self._using_cupti:
            if self.attached:
                self._try(lambda: self._cupti.flush(unfinished=unfinished))

    def _count_launches(self) -> None:
        """Sets up counting of launches; if that fails, every launch is recorded, where the options leave that open."""
        if not self._options.launches:
            self._counting.begin(self._cupti, self._subscription)
        if self._counting.log is not None:
            self.log, self.counts = self._counting.log, True
            noted = self._counting.notes_launches and self._options.notes_launches
            if noted:
                self.log.stack_reader = self._counting.compiled
            else:
                # If CUPTI refuses, the time of a launch is only known to be between two boundaries.
                with contextlib.suppress(CuptiError):
                    self._cupti.latency_timestamps(on=True)
            if not self._options.records_calls:
                wanted = partial(self._options.calls_back, launches=noted)
                self._counting.listen(self._cupti, self._subscription, wanted)
            if self._options.samples:
                self._begin_samples(noted=noted)
        elif self._options.launches is None:
            self._options = replace(self._options, launches=True)
            self._uncounted = True
        elif not self._options.launches:
            self.warn(
                f"launches cannot be counted here ({self._counting.trouble}), and launches=False excludes recording "
                "them: which call and which label a kernel belongs to is unknown; remove launches=False"
            )

    def _say_uncounted(self) -> None:
        """Says that every launch is recorded, once something was; not to a program of JAX, where that is always so."""
        if self._uncounted and self.parts.holds_activities:
            self._uncounted = False
            if not self._uses_xla():
                self.warn(
                    f"launches cannot be counted here ({self._counting.trouble}), so every launch is recorded, which "
                    "costs more time"
                )

    def _begin_samples(self, *, noted: bool) -> None:
        """Takes samples from now on, where the probe notes launches (`noted`) and can read other threads."""
        compiled = self._counting.compiled
        self._no_samples = why_not_sampled(compiled) if noted else "launches are not noted by callbacks"
        if self._no_samples is None and compiled is not None:
            self.samples = HostSamples(compiled)

    def xla_is_used(self) -> None:
        """Records every launch from now on, if the options leave that open, and does not flush before the end.

        While XLA launches graphs, cuptiActivityFlushAll on another thread makes cuGraphLaunch crash inside the driver
        (CUPTI 13.0, driver 580). The full buffers that CUPTI delivers by itself do not cause this.
        """
        self._flushes = False
        if self._options.launches is None and self.alive:
            self._options = replace(self._options, launches=True)
            if not self._paused:
                self._try(self._enable)

    def _enable(self) -> None:
        for kind in self._options.kinds():
            self._cupti.enable(kind)
            if kind in layouts.CALLS:
                self._choose_calls(kind)
        self._counting.follow(Followed.STACKS if self._options.records_calls else Followed.CALLS)

    def _choose_calls(self, kind: int) -> None:
        """Disables the API calls that are not wanted, which are a hundred times as many as the wanted calls."""
        domain = layouts.CALLS[kind]
        if kind not in self._functions:
            self._functions[kind], self._unwanted[kind] = self._known_calls(domain)
        for callback_id in self._unwanted[kind]:
            self._cupti.api(domain, callback_id, on=False)

    def _known_calls(self, domain: int) -> tuple[np.ndarray[Any, Any], list[int]]:
        """For wanted API functions, the number of their name by callback id; and the callback ids of all others."""
        numbers = np.zeros(MAX_CALLBACK_IDS, dtype=np.uint32)
        unwanted = []
        for callback_id, name in self._cupti.callbacks(domain):
            if self._options.wants_call(name):
                numbers[callback_id] = self._function_number(name)
            else:
                unwanted.append(callback_id)
        return numbers, unwanted

    # The thread that reads and writes.

    def _work(self) -> None:
        self._began = time.monotonic()
        self._due = self._began + self._flush_seconds
        self._buffers.stock()
        while True:
            filled = self._next()
            self._looks()
            if filled is not None:
                self._read(filled)
            elif self._stopping.is_set():
                break
            if not self._orders.empty():
                work, done = self._orders.get()
                work()
                done.set()
            self._look_at_counters()
            self._counters.finish()
            now = time.monotonic()
            if now >= self._due and not self._rests(now):
                self._write_round(now)
            self.cpu_ns = time.thread_time_ns()
        self._counters.finish()
        self._read_all()
        self._stalls.take(self._names, last=True)
        self._save()
        self._describe(finished=True)

    def _write_round(self, now: float) -> None:
        with self._taking:
            if self._waits_for_window(now):
                return
            # Without a flush, records of threads that launch little would stay in half-full buffers.
            self._flush_and_read(unfinished=False)
            self._stalls.take(self._names)
            rows = self._take_rows()
        age = now - self._began
        self._flush_seconds = min(2 * self._flush_seconds, self._options.flush_seconds)
        self._flush_seconds = max(self._flush_seconds, age / _SHARE_OF_TIME)
        self._write_parts(rows)  # states the time to the next round: so much may be lost
        self._due = now + self._flush_seconds
        self._round_seconds = max(self._round_seconds, time.monotonic() - now)

    def _flush_and_read(self, *, unfinished: bool) -> None:
        """Reads what CUPTI holds, as far as it can be flushed; ``unfinished``: also of activities that still run."""
        if self._uses_xla():
            self.xla_is_used()
        if self._flushes:
            self._flush(unfinished=unfinished)
        self._read_all()

    def _look_at_counters(self) -> None:
        if self._options.counters is None:
            return
        if self._uses_xla() and graphs_loops():
            self._counters.refuse(LOOPS)
        seen = self.parts.folder is not None or self.parts.holds_activities or self._uses_xla()
        recording = seen and self.attached and not self._paused and not self._stopping.is_set()
        self._counters.look(self._cupti, self._counting.compiled, recording=recording)

    def _waits_for_window(self, now: float) -> bool:
        """Whether parts are written later, because a sampled window is being recorded: its rows stay together.

        The program waits at the end of a window until all buffers are read (`_detach`), and is not to wait for parts.
        """
        sampled = self._options.sampling is not None and self._has_paused
        recording = self._pausing or not self._paused
        return sampled and recording and now < self._due + _MAX_WINDOW_SECONDS

    def _rests(self, now: float) -> bool:
        """Whether parts are written later, because nothing was recorded since the last ones: steps are not sampled now.

        A round takes some 10 ms in which the program may wait for the GIL. It would be the largest cost between two
        windows. A program that is killed loses times of steps that were not recorded.
        """
        sampled = self._options.sampling is not None and self._paused and not self.attached
        return sampled and not self.parts.holds_activities and now < self._due + _REST_SECONDS

    def _complete(self) -> None:
        self._counters.finish()
        self._flush_and_read(unfinished=True)
        self._stalls.take(self._names)
        self._save()
        self._stopped_ns = time.time_ns()
        self._describe(finished=self._flushes)
        self._stopped_ns = None

    def _next(self) -> Filled | None:
        now = time.monotonic()
        rests = self._rests(now)
        longest = self.look_seconds or (_LOOK_AT_REST_SECONDS if rests else _LOOK_SECONDS)
        patience = 0.0 if self._stopping.is_set() else longest if rests else self._due - now
        # Seldom enough that records are written in batches, but when counters are due.
        patience = min(max(0.01, patience), longest, max(0.001, self._counters.due - now))
        if not self._orders.empty():
            patience = 0.0  # what should have woken this thread was taken from the queue while parts were written
        try:
            return self._buffers.filled.get(timeout=patience)
        except queue.Empty:
            return None

    def _read_all(self) -> None:
        while True:
            try:
                filled = self._buffers.filled.get_nowait()
            except queue.Empty:
                self._take_calls()
                return
            if filled is not None:
                self._read(filled)

    def _read(self, filled: Filled) -> None:
        """Decodes a buffer into columns, and recycles it."""
        try:
            for kind, columns in self._parser.read(filled.address, filled.valid_bytes):
                _count_on(columns, filled.numbers_before)
                self._graphs = self._graphs or bool("graph" in columns and columns["graph"].any())
                self.parts.add(layouts.LAYOUTS[kind].table, self._named(kind, columns))
            self._take_calls()
            self._count_dropped(filled.context, filled.stream)
        except Exception as error:  # noqa: BLE001 - the program must go on, whatever happens here
            self.warn(f"up to one buffer of records could not be read and is lost: {error!r}")
        finally:
            self._buffers.recycle(filled)
        if self.parts.pending_bytes >= self._max_waiting_bytes:
            self._save()

    def _named(self, kind: int, columns: dict[str, Any]) -> dict[str, Any]:
        for name in filter(columns.__contains__, layouts.LAYOUTS[kind].names):
            columns[name] = self._names.of_pointers(columns[name])
        if kind in layouts.CALLS:
            known = self._functions[kind]
            columns["function"] = known[np.minimum(columns["function"], len(known) - 1)]
            columns["api"] = np.full(len(columns["function"]), kind, dtype=np.uint8)
        return columns

    def _count_dropped(self, context: int | None, stream: int) -> None:
        with self._using_cupti:
            if not self.attached:
                return
            try:
                dropped = self._cupti.dropped(context, stream)
            except CuptiError:
                return  # the context is gone
        if dropped and not self.dropped:
            _LOG.warning("thence: records are being dropped, because they come faster than they can be written")
        self.dropped += dropped

    def _take_calls(self) -> None:
        """Adds the calls that callbacks noted; called after each buffer, so that few of them wait in memory."""
        if self.counts:
            calls = self._counting.take_calls(self._called)
            works = np.ones(len(calls["function"]), dtype=np.bool_)
            for number in self._allocating:
                works &= calls["function"] != number
            threads = np.sort(calls["thread"][works].astype(np.int64))  # np.unique would import numpy.ma
            self._launching.update(threads[np.diff(threads, prepend=-1) > 0].tolist())
            self.parts.add("calls", calls)

    def _called(self, name: str) -> int:
        """The number of the name of a function that was called."""
        self._graphs = self._graphs or _OF_GRAPHS.match(name) is not None
        number = self._function_number(name)
        if _ALLOCATES.match(name):
            self._allocating.add(number)
        return number

    def _function_number(self, name: str) -> int:
        return self._names.of_text(_SUFFIX.sub("", name))

    def _save(self) -> None:
        self._write_parts(self._take_rows())

    def _take_rows(self) -> Taken:
        """All rows for the next parts."""
        try:
            for table, columns in self._source(self._names).items():
                self.parts.add(table, columns)
            self._take_calls()
            self._say_uncounted()
        except Exception as error:  # noqa: BLE001 - as above; and CUPTI's records do not depend on it
            self.warn(f"some marks could not be written and are lost: {error!r}")
        return self.parts.take(self._names.new())

    def _write_parts(self, rows: Taken) -> None:
        try:
            self._known_rank()
            self.parts.write(rows, lambda: self._description(finished=False))
        except Exception as error:  # noqa: BLE001 - as above
            self.warn(f"some records could not be written and are lost: {error!r}")

    def _describe(self, *, finished: bool) -> None:
        try:
            self.parts.describe(self._description(finished=finished))
        except Exception as error:  # noqa: BLE001 - as above
            self.warn(f"the recording could not be finished: {error!r}")

    def _description(self, *, finished: bool) -> dict[str, Any]:
        return {
            "format": RECORDING,
            "version": RECORDING_VERSION,
            **process_facts(self._known_rank()),
            **self._facts(),
            "cupti": {"version": self._version, "path": self._cupti.path},
            "probe": self._counting.facts(),
            "samples": {"trouble": self._no_samples, **(self.samples.facts() if self.samples else {})},
            "launches": bool(self._options.launches),
            "calls": self._calls_held(),
            "detachments": self._detachments,
            "plain_steps": self.plain_steps,
            "counters": self._counters.facts(),
            "stalls": self._stalls.facts(),
            "sampling": self.sampling,
            "ring": None if self.parts.ring is None else self.parts.ring.facts(),
            "began_ns": self._began_ns,
            "stopped_ns": self._stopped_ns,
            "finished": finished,
            "counts": self.parts.counts,
            "parts": self.parts.numbers,
            "written_ns": time.time_ns(),
            "flush_seconds": self._flush_seconds + self._round_seconds if self._flushes else None,
            "lost": self._lost(),
            "dropped": self.dropped,
            "unknown_kinds": {str(kind): n for kind, n in self._parser.unknown.items()},
            "warnings": self._warnings,
        }

    def _calls_held(self) -> list[str]:
        """Which calls the table ``calls`` holds, with their begin and end: "waits", "launches", both or none."""
        if self._options.launches:
            return ["waits", "launches"]
        if not self.counts:
            return []
        return ["waits", *(["launches"] if self.log.stack_reader is not None else [])]

    def _lost(self) -> dict[str, int]:
        """Rows that could not be kept or written, by table."""
        lost = dict(self.parts.lost)
        samples = 0 if self.samples is None else self.samples.lost
        noted = {"calls": self._counting.lost_calls, "boundaries": self.log.lost, "samples": samples}
        for table, rows in noted.items():
            if rows:
                lost[table] = lost.get(table, 0) + rows
        return lost

    def _known_rank(self) -> int | None:
        """The rank that the framework last reported, which it may have forgotten at the end; else the environment's."""
        rank = rank_of_framework()
        if rank is not None:
            self._rank = rank
        return rank_of_environment() if self._rank is None else self._rank

    def _try(self, call: Callable[[], None]) -> None:
        """Makes a call whose failure is only reported as a warning."""
        try:
            call()
        except CuptiError as error:
            self.warn(str(error))


def _count_on(columns: dict[str, Any], before: int) -> None:
    """Adds the last number of a launch before CUPTI was attached to those of records."""
    if before and "correlation" in columns:
        numbers = columns["correlation"]
        columns["correlation"] = np.where(numbers, numbers + np.uint32(before), 0).astype(np.uint32)


def _may_launch(thread: int) -> bool:
    """Whether a thread that launched may do so between two steps: autograd's threads do not."""
    try:
        name = Path(f"/proc/self/task/{thread}/comm").read_text()
    except OSError:  # the thread has ended
        return False
    return not name.startswith(_OF_AUTOGRAD)


def running() -> Recorder | None:
    """The recorder that is recording this process and so uses CUPTI; None if there is none."""
    return _running if _running is not None and _running.alive else None


def _explained(error: CuptiError) -> ThenceError:
    if error.code == TAKEN:
        return MissingRequirement(taken())
    if error.code in _NO_DRIVER:
        try:
            load_driver()
        except MissingRequirement as missing:
            return missing
    return error
