"""A measured GPU time, and what lies beside it: gaps, copies, the time before the first and after the last activity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np

from thence.units import format_ns

if TYPE_CHECKING:
    from thence.timing.kernel_times import Activities

_NS = 1e6  # ns of a millisecond


class GpuTime(float):
    """A time in milliseconds, a float like any other, with what else the same measurement tells.

    All attributes are in milliseconds; None: this mode cannot tell. In mode "cupti" they add up:
    ``kernels_ms + copies_ms - overlap_ms + gaps_ms == span_ms``, and ``before_ms + span_ms + after_ms`` is the time
    from the call to the end of waiting for it on the host.

    Attributes:
        mode: "cupti" or "events".
        kernels_ms: sum of the durations of all kernels; the value in mode "cupti".
        copies_ms: sum of the durations of memcpys and memsets.
        overlap_ms: time that these sums count more than once, because activities ran at the same time.
        gaps_ms: time between the first start and the last end in which nothing ran, on any device.
        span_ms: from the start of the first activity to the end of the last one.
        before_ms: from the call on the host to the start of the first activity: launching.
        after_ms: from the end of the last activity to the end of waiting on the host.
        between_events_ms: time between the two events; the value in mode "events".
        host_launch_ms: time in which the host launched the work, in mode "events" with PyTorch.
        head_start_ms: time for which the GPU was kept busy before the first event, so that the host could launch.
    """

    mode: str
    kernels_ms: float | None = None
    copies_ms: float | None = None
    overlap_ms: float | None = None
    gaps_ms: float | None = None
    span_ms: float | None = None
    before_ms: float | None = None
    after_ms: float | None = None
    between_events_ms: float | None = None
    host_launch_ms: float | None = None
    head_start_ms: float | None = None

    @classmethod
    def of_activities(cls, activities: Activities, called_ns: int, returned_ns: int) -> Self:
        """The time of the kernels of one call.

        Args:
            activities: of the call, at least one kernel.
            called_ns: Unix time in ns at which the call began; the times of CUPTI are on the same clock.
            returned_ns: Unix time in ns at which the host had waited for its work.
        """
        start = np.concatenate([activities.start, activities.copy_start])
        end = np.concatenate([activities.end, activities.copy_end])
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
        reached = np.maximum.accumulate(end)
        gaps = np.maximum(start[1:] - reached[:-1], 0).sum()
        span = reached[-1] - start[0]
        kernels = (activities.end - activities.start).sum()
        copies = (activities.copy_end - activities.copy_start).sum()
        result = cls(kernels / _NS)
        result.mode = "cupti"
        result.kernels_ms, result.copies_ms = float(result), float(copies / _NS)
        result.gaps_ms, result.span_ms = float(gaps / _NS), float(span / _NS)
        result.overlap_ms = float((kernels + copies - (span - gaps)) / _NS)
        # The clocks of host and GPU are aligned by CUPTI; a contradiction means that they are not.
        if called_ns <= start[0] and reached[-1] <= returned_ns:
            result.before_ms = float((start[0] - called_ns) / _NS)
            result.after_ms = float((returned_ns - reached[-1]) / _NS)
        return result

    @classmethod
    def of_events(cls, ms: float, head_start_ms: float, host_launch_ms: float | None = None) -> Self:
        """The time between two events."""
        result = cls(ms)
        result.mode = "events"
        result.between_events_ms = float(ms)
        result.head_start_ms, result.host_launch_ms = head_start_ms, host_launch_ms
        return result

    @property
    def waiting_for_host_ms(self) -> float | None:
        """In mode "events": the longest time that the GPU can have waited for the host; None if not known."""
        if self.host_launch_ms is None or self.head_start_ms is None:
            return None
        return min(max(0.0, self.host_launch_ms - self.head_start_ms), float(self))

    def to_json(self) -> dict[str, Any]:
        """The mode, the value as ``ms``, and all attributes; null where this mode cannot tell."""
        names = [name for name in GpuTime.__annotations__ if name != "mode"]
        waiting = {"waiting_for_host_ms": self.waiting_for_host_ms}
        return {
            "mode": self.mode, "ms": float(self), **{name: getattr(self, name) for name in names}, **waiting,
        }  # fmt: skip

    def __repr__(self) -> str:
        """The value, and what lies beside it, as sentences."""
        if self.mode == "events":
            return f"{_text(self)} between two CUDA events; {self._events()}"
        span = f"{_text(self.span_ms)} from the first start to the last end"
        gaps = f"with {_text(self.gaps_ms)} of gaps in which nothing ran"
        parts = [f"{_text(self)} in kernels; {span}, {gaps}"]
        if self.copies_ms:
            parts.append(f"{_text(self.copies_ms)} in memcpys and memsets")
        if self.overlap_ms:
            parts.append(f"{_text(self.overlap_ms)} counted more than once (activities at the same time)")
        parts.append(
            "launch and return unknown: the clocks of host and GPU differ"
            if self.before_ms is None
            else f"{_text(self.before_ms)} from the call to the first start, {_text(self.after_ms)} from the last end "
            "to the return"
        )
        return "; ".join(parts)

    def __str__(self) -> str:
        """The number alone."""
        return float.__repr__(self)

    def _events(self) -> str:
        waiting = self.waiting_for_host_ms
        gaps = "gaps between activities are included, and only mode='cupti' tells how long they are"
        if waiting is None:
            return f"{gaps}; how long launching took is not known"
        if not waiting:
            return (
                f"{gaps}; none is the GPU waiting for the host: launching took {_text(self.host_launch_ms)}, less than "
                f"the {_text(self.head_start_ms)} for which the GPU was kept busy before the first event"
            )
        return (
            f"{gaps}; up to {_text(waiting)} may be the GPU waiting for the host, which launched for "
            f"{_text(self.host_launch_ms)}, {_text(self.head_start_ms)} of it before the first event"
        )


def _text(ms: float | None) -> str:
    return "unknown" if ms is None else format_ns(float(ms) * _NS)
