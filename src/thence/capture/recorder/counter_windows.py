"""When the hardware counters of the devices are sampled, and what becomes of the samples.

Everything here runs on the recorder's thread. A device is sampled for a window; then the buffer of the hardware is
decoded, which takes longer than the window did, and the device's counters are given back: so nothing is held between
two windows, and CUPTI may be detached then.

Where the last seconds are asked for, there is one window without an end. Its samples are decoded part by part and stay
in memory until they are too old; they are kept when somebody asks, and at the end.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from thence.capture.cuda.cuda_events import load_driver
from thence.capture.cuda.cupti import BUSY, MEANINGS, CuptiError
from thence.capture.cuda.pm_sampling import PmSampler, Room, Samples
from thence.capture.cuda.synchronization import active_devices
from thence.capture.recorder.options import HARDWARE_BYTES, MAX_COUNTER_BYTES
from thence.errors import MissingRequirement
from thence.model.counter_names import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from thence.capture.cuda.cupti import Cupti
    from thence.capture.recorder.options import Counters

Columns = dict[str, np.ndarray[Any, Any]]

_FIRST_GAP_SECONDS = 0.5
"""From the first window to the second. It doubles up to what was asked for."""
_MANY_WINDOWS = 1000
"""The time between two windows is at least a thousandth of the time since the first, so that long runs have few."""
_POLL_SECONDS = 0.1
"""Time from one look to the next where a window is due but nothing is being recorded."""
_MAX_SAMPLE_BYTES = 2 * HARDWARE_BYTES
"""Of one sample in the buffer of the hardware. What it takes on other chips is not known, so an overflow doubles it."""
LOOPS = (
    "hardware counters are not sampled, because XLA_FLAGS puts loops or branches into command buffers: a JAX program "
    "with such graphs ended with an illegal memory access while it was sampled"
)
"""On an H200, once. Whether it would have ended so without counters is not known."""
_GRAPHED_LOOPS = re.compile(r"xla_gpu_enable_command_buffer=\S*(?<!-)(WHILE|CONDITIONAL)", re.IGNORECASE)
_NEVER = float("inf")
_NO_TIMES = np.zeros(0, dtype=np.int64)
_Result = TypeVar("_Result")


class CounterWindows:
    """The windows of one recording.

    Args:
        wanted: what to sample; None: nothing.
        keep: takes the samples, as rows of the table ``counters``.
        warn: takes a sentence about what was not sampled.

    Attributes:
        due: when `look` has something to do, on the clock of `time.monotonic`.
    """

    def __init__(self, wanted: Counters | None, keep: Callable[[Columns], None], warn: Callable[[str], None]) -> None:
        self._wanted = wanted
        self._keep = keep
        self._warn = warn
        self._samplers: dict[int, PmSampler] = {}
        self._lasting = wanted is not None and wanted.last_seconds > 0
        self._last: dict[int, deque[Samples]] = {}
        self._began_ns = 0
        self._interval_ns = round(wanted.interval_us * 1000) if wanted else 0
        self._gap = min(_FIRST_GAP_SECONDS, wanted.every_seconds) if wanted else 0.0
        self._first, self._next = _NEVER, 0.0 if wanted else _NEVER
        self._looked = 0.0
        self._over = threading.Event()
        self._asked = False
        self._ends = _NEVER
        self._sample_bytes = HARDWARE_BYTES
        self._failed: set[int] = set()
        self._trouble: str | None = None
        self._metrics: dict[str, str] = {}
        self._left_out: dict[str, str] = {}
        self._windows: list[dict[str, Any]] = []

    @property
    def due(self) -> float:
        """See above."""
        return self._ends if self._samplers else max(self._next, self._looked + _POLL_SECONDS)

    def look(self, cupti: Cupti, compiled: ModuleType | None, *, recording: bool) -> None:
        """Begins a window if it is time for that; `finish` is to be called next.

        Args:
            compiled: see `PmSampler`.
            recording: whether activities are being recorded, and some were: a window begins only then.
        """
        self._looked = time.monotonic()
        if self._wanted is not None and recording and self._looked >= self._next and not self._samplers:
            self._over.clear()
            self._asked = False
            self._begin(self._wanted, cupti, compiled)

    def refuse(self, why: str) -> None:
        """Begins no window any more, and says why, once."""
        if self._next < _NEVER:
            self._next = _NEVER
            self._trouble = why
            self._warn(why)

    def hurry(self) -> None:
        """Has `finish` end the window at once; on any thread."""
        self._over.set()

    def ask(self) -> None:
        """Has `finish` keep the last seconds, if there are any; on any thread, also in the handler of a signal."""
        self._asked = True

    def finish(self) -> None:
        """Waits for the end of the window that is being sampled, if there is one, and decodes it.

        Nothing else is done meanwhile: the buffer of the hardware has little room for a window that ends late. Where
        the last seconds are kept, nothing is waited for: the next part is decoded if it is time for that.
        """
        if not self._samplers:
            return
        if self._wanted is not None and self._lasting:
            self._finish_part(self._wanted)
            return
        self._over.wait(max(0.0, self._ends - time.monotonic()))
        samplers, self._samplers = self._samplers, {}
        for device, sampler in samplers.items():
            self._try(device, sampler.stop)
        ended_ns = time.time_ns()
        for device, sampler in samplers.items():
            self._try(device, self._take, device, sampler, ended_ns)
            self._try(device, sampler.close)

    def _finish_part(self, wanted: Counters) -> None:
        """Decodes what was sampled since the last part; keeps the last seconds where they are asked for."""
        over, asked = self._over.is_set(), self._asked
        if not over and not asked and time.monotonic() < self._ends:
            return
        self._asked = False
        for device, sampler in self._samplers.items():
            if over:
                self._try(device, sampler.stop)
            samples = self._try(device, sampler.take)
            overflowed = samples is not None and samples.overflow
            if samples is not None and len(samples.start):
                last = self._last.setdefault(device, deque())
                last.append(samples)
                while last[0].end[-1] < samples.end[-1] - 1e9 * wanted.last_seconds:
                    last.popleft()
            if over or asked or overflowed:
                self._keep_last(device, sampler, wanted, overflow=overflowed)
            over = over or overflowed or device in self._failed  # the buffer takes no more samples: all begin again
        if over:
            samplers, self._samplers = self._samplers, {}
            for device, sampler in samplers.items():
                self._try(device, sampler.close)
        self._ends = time.monotonic() + wanted.part_seconds

    def _keep_last(self, device: int, sampler: PmSampler, wanted: Counters, *, overflow: bool) -> None:
        parts = self._last.pop(device, deque())
        start, end, values = (
            np.concatenate([getattr(part, name) for part in parts] or [empty])
            for name, empty in (
                ("start", _NO_TIMES),
                ("end", _NO_TIMES),
                ("values", np.zeros((0, len(sampler.metrics)))),
            )
        )
        since = int(np.searchsorted(start, end[-1] - int(1e9 * wanted.last_seconds))) if len(end) else 0
        last = Samples(start[since:], end[since:], values[since:], overflow)
        self._write(device, sampler, last, time.time_ns())

    def facts(self) -> dict[str, Any] | None:
        """The entry ``counters`` of the description; None where no counters were asked for.

        ``metrics`` and ``left_out`` are by counter: CUPTI's metric, and why it is not sampled; ``windows`` have device,
        start, end (ns on CUPTI's clock), samples and whether the buffer of the hardware overflowed; ``trouble`` is why
        there are none.
        """
        if self._wanted is None:
            return None
        return {
            "interval_ns": self._interval_ns,
            "metrics": self._metrics,
            "left_out": self._left_out,
            "windows": self._windows,
            "trouble": None if self._windows else self._trouble,
        }

    def _begin(self, wanted: Counters, cupti: Cupti, compiled: ModuleType | None) -> None:
        try:
            devices = [device for device in active_devices(load_driver()) if device not in self._failed]
        except MissingRequirement:
            return
        if not devices:
            return  # the program has no context yet
        opened = {}
        for device in devices:
            sampler = self._try(device, self._open, device, wanted, cupti, compiled)
            if sampler is not None:
                opened[device] = sampler
        began = time.monotonic()
        self._began_ns = time.time_ns()
        self._first = min(self._first, began)
        for device, sampler in opened.items():
            self._samplers[device] = sampler
            self._try(device, sampler.start)
        fits = min((sampler.samples for sampler in opened.values()), default=wanted.samples) / wanted.samples
        self._ends = began + (wanted.part_seconds if self._lasting else fits * wanted.window_seconds)
        self._next = began + (_FIRST_GAP_SECONDS if self._lasting else max(self._gap, wanted.window_seconds))
        self._gap = max(min(2 * self._gap, wanted.every_seconds), (began - self._first) / _MANY_WINDOWS)

    def _open(self, device: int, wanted: Counters, cupti: Cupti, compiled: ModuleType | None) -> PmSampler:
        metrics = {name: metric for name in wanted.names if (metric := BY_NAME[name].metric)}
        room = Room(wanted.samples, self._sample_bytes, MAX_COUNTER_BYTES)
        sampler = PmSampler(cupti, device, metrics, self._interval_ns, room, compiled)
        self._metrics |= sampler.metrics
        self._left_out |= sampler.left_out
        return sampler

    def _take(self, device: int, sampler: PmSampler, ended_ns: int) -> None:
        if device not in self._failed:
            self._write(device, sampler, sampler.take(), ended_ns)

    def _write(self, device: int, sampler: PmSampler, samples: Samples, ended_ns: int) -> None:
        count = len(samples.start)
        start, end = (int(samples.start[0]), int(samples.end[-1])) if count else (self._began_ns, ended_ns)
        self._windows.append(
            {"device": device, "start": start, "end": end, "samples": count, "overflow": samples.overflow}
        )
        columns = {name: np.ascontiguousarray(samples.values[:, number]) for number, name in enumerate(sampler.metrics)}
        devices = np.full(count, device, dtype=np.int32)
        self._keep({"device": devices, "start": samples.start, "end": samples.end, **columns})
        if samples.overflow:
            self._sample_bytes = min(2 * self._sample_bytes, _MAX_SAMPLE_BYTES)
            self._warn(
                "a window of hardware counters is lost, because the buffer of the hardware was full before the window "
                "could be ended; a shorter window, or a longer interval between samples, needs less of it"
            )

    def _try(self, device: int, call: Callable[..., _Result], *arguments: Any) -> _Result | None:
        """The result of a call; None if it failed: the reason is said, and the device is not sampled any more.

        Unless another process samples it at this moment: the next window is tried.
        """
        try:
            return call(*arguments)
        except (MissingRequirement, MemoryError) as error:
            why = str(error) or "no memory is left"
            if isinstance(error, CuptiError) and error.code == BUSY:
                why = MEANINGS[BUSY]  # which call finds it differs from time to time
            else:
                self._failed.add(device)
            self._trouble = f"hardware counters of device {device} cannot be sampled: {why}"
            self._warn(self._trouble)
            return None


def graphs_loops() -> bool:
    """Whether XLA is asked to put loops or branches into command buffers, which it does not by default."""
    return _GRAPHED_LOOPS.search(os.environ.get("XLA_FLAGS", "")) is not None
