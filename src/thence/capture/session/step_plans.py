"""Which steps of a program are recorded: all, those of a schedule, all but windows that show the cost, or few of many.

Windows are given by numbers of steps, so that they are the same on all ranks of a job: a step of one rank is only plain
if those of the others are.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from thence.capture.session.rank_requests import SECONDS_BETWEEN_REQUESTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from thence.capture.recorder.options import Sampling, Schedule

TIME_SPAN = "span of time"
"""The kind of the steps of a program that has none: see `thence.capture.session.time_spans`."""
PLAIN_STEPS = 6
"""Plain steps of a window that count, at least: the fewest whose extremes contain the median with 95 % probability."""
MAX_PLAIN_STEPS = 20
"""The same, at most: what happens in a window is not in the recording."""
_ONE_IN = 10
"""At most every tenth step is not recorded."""
_SHARE = 50
"""The plain steps of a window are this part of the steps before it, within those limits."""
_GROWTH = 1.5
"""A window begins after at least so many times the steps before the previous one: long runs have few windows."""
_COMPARED = 6
"""Plain steps before and after a sampled window that are compared with its steps."""
_LATEST_WINDOWS, _LATEST_STEPS = 16, 64
"""Windows and plain steps of which medians are taken."""
_MIN_STEPS = 32
"""Plain steps that are needed before a step is called slow."""
_JUDGED_EVERY = 64
"""Steps after which the limit of a slow step is computed again."""
_SLOW_DEVIATIONS, _SLOW_SHARE = 8, 0.5
"""A step is slow if it is longer than the median by this many deviations (1.48 times the median absolute deviation) and
by this share of the median."""
_T95 = 2.1
"""Half a 95 % interval over the error of a mean, of 20 values or so."""
_NORMAL = 1.4826
"""The standard deviation of normally distributed values over their median absolute deviation."""
_MIN_SECONDS_BETWEEN_SLOW = 60.0
"""Slow steps are followed by a window of their own at most this often."""
_FOLLOWING = 3
"""Steps after a sampled window that count for what it costs: parts are written meanwhile, and caches are cold."""
_FEW_WINDOWS = 4
"""Of fewer windows than these, the largest cost counts; else the upper end of the 95 % interval of their mean."""
_MAX_MEDIANS = 4
"""A cost counts as so many times their median, at most: a checkpoint in a window is not what recording costs."""
_AIM = 0.5
"""Part of the budget that the measured cost is kept to: not all that recording costs can be measured in one process."""
_LONGEST_NS = 600 * 10**9
"""Time from a window to the next one, at most, whatever the recorder itself takes in it."""
_LATEST_REQUESTS = 200
"""Requests that the description states; earlier ones are counted."""


def plain_windows() -> Iterator[tuple[int, int]]:
    """First step and number of steps of each window that is not recorded; of each, the first step does not count.

    At no time was more than a tenth of the steps not recorded. So the first window begins with step 63, counted from 0:
    none of the first twenty steps, in which programs compile and warm up, is in it.
    """
    before = start = 0
    while True:
        length = 1 + min(MAX_PLAIN_STEPS, max(PLAIN_STEPS, start // _SHARE))
        start = max(_ONE_IN * (before + length) - length, int(start * _GROWTH))
        yield start, length
        before += length


class StepPlan(Protocol):
    """Decides which steps are recorded.

    Attributes:
        only_plain: whether a pause whose steps would not be plain is not made.
        on_one_thread: whether nothing is left out any more once steps begin on several threads.
    """

    only_plain: bool
    on_one_thread: bool

    @property
    def length(self) -> int:
        """Number of steps of the current window that is not recorded; 0 if its end is not known."""

    def records(self, number: int) -> bool:
        """Whether a step is recorded; called once for each, with ascending numbers."""

    def compares(self, number: int) -> bool:
        """Whether the duration of a step is compared with others."""

    def passes(self, number: int, duration: int) -> bool:
        """Whether neither a step nor the one before it, which lasted ``duration`` ns, is recorded or compared.

        If so, both calls of `records` and `lasted` for them are made up for.
        """

    def lasted(self, number: int, duration: int, *, recorded: bool, counted: bool) -> None:
        """A step has ended; ``duration`` in ns."""

    def again(self, kind: str) -> StepPlan:
        """The plan for steps of another kind, which are counted from 0."""


class ScheduledSteps:
    """The steps of a schedule of the program; of no schedule, all steps."""

    only_plain = on_one_thread = False
    length = 0

    def __init__(self, schedule: Schedule | None) -> None:
        self._schedule = schedule

    def records(self, number: int) -> bool:
        """See `StepPlan`."""
        return self._schedule is None or self._schedule.records(number)

    def compares(self, number: int) -> bool:  # noqa: ARG002 - of the protocol
        """See `StepPlan`."""
        return self._schedule is not None

    def passes(self, number: int, duration: int) -> bool:  # noqa: ARG002 - of the protocol
        """See `StepPlan`."""
        return False

    def lasted(self, number: int, duration: int, *, recorded: bool, counted: bool) -> None:
        """See `StepPlan`."""

    def again(self, kind: str) -> StepPlan:  # noqa: ARG002 - of the protocol
        """See `StepPlan`."""
        return self


class AllButWindows:
    """All steps but those of `plain_windows`."""

    only_plain = on_one_thread = True

    def __init__(self) -> None:
        self._windows = plain_windows()
        self._window, self._previous = next(self._windows), (0, 0)

    @property
    def length(self) -> int:
        """See `StepPlan`."""
        return self._window[1]

    def records(self, number: int) -> bool:
        """See `StepPlan`."""
        while number >= sum(self._window):
            self._previous, self._window = self._window, next(self._windows)
        return number < self._window[0]

    def compares(self, number: int) -> bool:
        """See `StepPlan`."""
        (start, length), (earlier, count) = self._window, self._previous
        return start - length <= number < start + length or earlier <= number < earlier + 2 * count

    def passes(self, number: int, duration: int) -> bool:  # noqa: ARG002 - of the protocol
        """See `StepPlan`."""
        return False

    def lasted(self, number: int, duration: int, *, recorded: bool, counted: bool) -> None:
        """See `StepPlan`."""

    def again(self, kind: str) -> StepPlan:  # noqa: ARG002 - of the protocol
        """See `StepPlan`."""
        return AllButWindows()


class SampledSteps:
    """Windows of few steps, far apart; between them nothing is recorded.

    A window has one step more than the sampling states, because CUPTI is attached at the beginning of its first step.
    What a window costs is measured: by how much its steps, and the first ones after it, are longer than as many plain
    ones, and the CPU time that the recorder itself took since the window before: the program may have waited for it.
    Spans of time last as long as ever, whatever the program did in them, so all the time of a window of these counts.
    Where the process is alone, windows are as far apart as keeps the mean, at its upper end, within half of the budget.

    Args:
        sampling: the options.
        alone: returns whether the process is the only one of its job: others would have to record the same steps.
        share: takes the reason why a window is wanted, and returns whether all ranks will agree on its step.
        own: returns the CPU time in ns that the recorder has taken so far, but for what makes steps of windows longer.
        spans: whether steps are spans of time.

    Attributes:
        interval: steps from the beginning of a window to that of the next one.
        windows: windows that have begun.
        number: of the step that is running.
        requests: why the latest windows out of turn were recorded, and before which step.
    """

    only_plain = on_one_thread = False
    length = 0

    def __init__(
        self,
        sampling: Sampling,
        alone: Callable[[], bool],
        share: Callable[[str], bool] = lambda _why: False,
        own: Callable[[], int] = lambda: 0,
        *,
        spans: bool = False,
    ) -> None:
        self._sampling = sampling
        self._spans = spans
        self._judges = sampling.slow_steps and not spans
        self._alone = alone
        self._share = share
        self._own = own
        self._own_before = 0
        self._steps = 1 + sampling.steps
        self._counted = self._steps + min(_FOLLOWING, sampling.every - self._steps)
        self.interval = sampling.every
        self.windows = 0
        self.number = 0
        self.requests: deque[dict[str, Any]] = deque(maxlen=_LATEST_REQUESTS)
        self._requested = 0
        self._begin, self._next = -self._steps, 0
        self._moves = False
        self._asked: str | None = None
        self._agreed: tuple[int, str] | None = None
        self._ask_after = 0.0
        self._slow_after = 0.0
        # The host's times of steps far from windows are not those of the device, so costs are not measured by them.
        self._plain: deque[int] = deque(maxlen=_LATEST_STEPS)
        self._latest: deque[int] = deque(maxlen=_LATEST_STEPS)
        self._costs: deque[int] = deque(maxlen=_LATEST_WINDOWS)
        self._of_window: list[int] = []
        self._limit, self._judged, self._usual = math.inf, 0, ""

    def records(self, number: int) -> bool:
        """See `StepPlan`."""
        self.number = number
        asked = self._due(number)
        if number >= self._next:
            # At multiples of the interval: on all ranks the same steps, also if one of them had a window out of turn.
            # Where the cost moves the interval, windows at its multiples would be closer together than it.
            self._begin = number if self._moves else number - number % self.interval
            self._next = self._begin + self.interval
        elif asked is not None:
            self._begin = number
        if number == self._begin or self.windows == 0:
            self.windows += 1
        if asked is not None:
            self.requests.append({"step": number, "window": self.windows, "why": asked})
            self._requested += 1
        return number < self._begin + self._steps

    def _due(self, number: int) -> str | None:
        """Why a window out of turn begins with this step; None if none does."""
        why = None
        if self._agreed is not None and number >= self._agreed[0]:
            (_, why), self._agreed = self._agreed, None
        elif self._asked is not None and monotonic() >= self._ask_after:
            why, self._asked = self._asked, None
            self._ask_after = monotonic() + SECONDS_BETWEEN_REQUESTS
        return why

    def compares(self, number: int) -> bool:
        """See `StepPlan`."""
        after = number - self._begin
        return 0 <= after <= self._steps + _COMPARED or number >= self._next - _COMPARED

    def passes(self, number: int, duration: int) -> bool:
        """See `StepPlan`."""
        if self._asked is not None or self._agreed is not None or self._of_window:
            return False
        if not self._begin + self._steps + _COMPARED + 1 < number < self._next - _COMPARED:
            return False
        if self._judges:
            if self._judged <= 0 or duration > self._limit:
                return False
            self._judged -= 1
            self._latest.append(duration)
        self.number = number
        return True

    def request(self, why: str) -> None:
        """Record a window and keep it: from the next step on, or from one on which all ranks agree.

        May be called on any thread. Of several requests within `SECONDS_BETWEEN_REQUESTS` the last one is heard.
        """
        if not self._share(why):
            self._asked = why

    def agree(self, why: str, step: int) -> None:
        """Record a window from a step on, as the other ranks do; may be called on any thread."""
        self._agreed = (step, why)

    def lasted(self, number: int, duration: int, *, recorded: bool, counted: bool) -> None:
        """See `StepPlan`."""
        if recorded or self._of_window:
            self._of_window.append(duration)
            if not recorded and len(self._of_window) >= self._counted:
                self._window_lasted()
        else:
            if self._judges:
                self._judge(number, duration)
                self._latest.append(duration)
            if counted:
                self._plain.append(duration)

    def _window_lasted(self) -> None:
        """A window and the steps that follow it have ended."""
        durations, self._of_window = self._of_window, []
        own = self._own()
        spent, self._own_before = own - self._own_before, own
        # The first window also has the start of the program.
        if len(durations) != self._counted or len(self._plain) < PLAIN_STEPS or self.windows < 2:
            return
        plain = statistics.median(self._plain)
        longer = sum(durations[: self._steps]) if self._spans else sum(durations) - round(plain * len(durations))
        self._costs.append(longer + spent)
        if self._alone() and self._sampling.budget > 0 and plain > 0:
            needed = math.ceil(self._most_cost() / (_AIM * self._sampling.budget * plain))
            self.interval = max(self._sampling.every, min(needed, math.ceil(_LONGEST_NS / plain)))
            self._next, self._moves = self._begin + self.interval, True
        elif self._moves:  # it has joined a job meanwhile
            self.interval, self._moves = self._sampling.every, False
            self._next = (self._begin // self.interval + 1) * self.interval

    def _most_cost(self) -> float:
        """What a window costs, ns, at the upper end of the 95 % interval of the mean of the latest ones."""
        most = _MAX_MEDIANS * statistics.median_low(map(abs, self._costs))
        costs = [min(cost, most) for cost in self._costs]
        if len(costs) < _FEW_WINDOWS:
            return max(costs)
        return statistics.fmean(costs) + _T95 * statistics.stdev(costs) / math.sqrt(len(costs))

    def _judge(self, number: int, duration: int) -> None:
        """Ask for a window if a plain step was slow."""
        if self._judged <= 0 and len(self._latest) >= _MIN_STEPS:
            median = statistics.median(self._latest)
            deviation = statistics.median(abs(value - median) for value in self._latest)
            self._limit = median + max(_SLOW_DEVIATIONS * _NORMAL * deviation, _SLOW_SHARE * median)
            self._usual = f"{median / 1e6:.3f} ms, their deviation {_NORMAL * deviation / 1e6:.3f} ms"
            self._judged = _JUDGED_EVERY
        self._judged -= 1
        if duration > self._limit and monotonic() >= self._slow_after:
            self._slow_after = monotonic() + _MIN_SECONDS_BETWEEN_SLOW
            took = f"{duration / 1e6:.3f} ms"
            self.request(f"step {number} took {took}; the median of {len(self._latest)} before it is {self._usual}")

    def again(self, kind: str) -> StepPlan:
        """See `StepPlan`."""
        plan = SampledSteps(self._sampling, self._alone, self._share, self._own, spans=kind == TIME_SPAN)
        plan._own_before = self._own_before
        plan.windows, plan.requests, plan._requested = self.windows, self.requests, self._requested
        plan._asked, plan._agreed, plan._ask_after = self._asked, self._agreed, self._ask_after
        return plan

    def facts(self) -> dict[str, Any]:
        """The entry ``sampling`` of the description."""
        plain = statistics.median(self._plain) if self._plain else None
        cost = max(0.0, statistics.fmean(self._costs)) if self._costs and plain else None
        return {
            "every": self._sampling.every,
            "steps": self._sampling.steps,
            "interval": self.interval,
            "windows": self.windows,
            "requests": list(self.requests),
            "requested": self._requested,
            "plain_step_ns": plain,
            "window_cost_ns": cost,
            "cost_share": None if cost is None or not plain else cost / (self.interval * plain),
        }
