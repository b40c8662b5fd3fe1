"""Divides the time of a program that has no steps, so that a recording of few steps of many records it, too.

A server that calls functions of CuPy, Triton or PyTorch on several threads announces no steps, calls no model, and runs
no loop on its main thread. Where nothing has begun a step for a while although kernels are recorded, spans of
`SPAN_SECONDS` are the steps: windows, their distance and their ring are then those of other programs. A span begins on
the main thread, between two instructions of its Python code: only there may CUPTI be detached, where no other thread
launches. While that thread waits in a library, the span that is running lasts. A step of the program ends the spans.
"""

from __future__ import annotations

from time import monotonic_ns
from typing import TYPE_CHECKING

from thence.capture.session.step_plans import TIME_SPAN

if TYPE_CHECKING:
    from collections.abc import Callable

    from thence.capture.session.step_times import StepTimes

SPAN_SECONDS = 0.1
"""Length of a span, at least."""
_SILENCE_NS, _SILENT_STEPS = 10_000_000_000, 20
"""Spans begin where no step has begun for so long, and for so many times the longest one before."""


class TimeSpans:
    """Begins spans of time.

    Args:
        steps: those of the program, and these.
        begin: called on the main thread as a span begins.
        on_main_thread: has the main thread call a function soon.
    """

    def __init__(
        self, steps: StepTimes, begin: Callable[[], None], on_main_thread: Callable[[Callable[[], None]], None]
    ) -> None:
        self._steps = steps
        self._begin = begin
        self._on_main_thread = on_main_thread
        self._asked = False
        self._work = 0
        self._idle_since = self._worked = monotonic_ns()

    def look(self, work: int) -> bool:
        """Begin a span if it is time for one; called every now and then, on any thread.

        Args:
            work: a number that grows while kernels are recorded.

        Returns:
            whether time is divided.
        """
        now = monotonic_ns()
        if work != self._work:
            self._work, self._worked = work, now
        silent = self._steps.silent_ns()
        if self._steps.kind == TIME_SPAN:
            due = silent is not None and silent >= 0.9 * SPAN_SECONDS * 1e9
        else:
            since = self._idle_since if silent is None else now - silent
            patience = max(_SILENCE_NS, _SILENT_STEPS * self._steps.longest_ns())
            # What is written late may have been recorded before the last step.
            due = now - since > patience and self._worked - since > patience // 2
        if due and not self._asked:
            self._asked = True
            self._on_main_thread(self._began)
        return self._steps.kind == TIME_SPAN

    def _began(self) -> None:
        self._asked = False
        if self._steps.divisible:
            self._begin()
