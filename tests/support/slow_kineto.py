"""Kineto files read the slow and obvious way: what the tests compare thence with.

Nothing here comes from thence. Times are Decimal until they become whole nanoseconds, and every
question is answered by going through all events.
"""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

Event = dict[str, Any]

KINDS = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
LIBRARIES = ("Optimizer.", "nccl:", "FSDP::", "## Call CompiledFxGraph")
ENGINE = "autograd::engine::evaluate_function"
STEP = "ProfilerStep#"


@cache
def nanoseconds(microseconds: Any) -> int:
    """Decimal microseconds as whole nanoseconds."""
    value = Decimal(microseconds) * 1000
    assert value == int(value)
    return int(value)


def start(event: Event) -> int:
    return nanoseconds(event["ts"])


def end(event: Event) -> int:
    return nanoseconds(event["ts"]) + nanoseconds(event["dur"])


def union(intervals: list[tuple[int, int]]) -> int:
    """Length of what the intervals cover, counted from left to right."""
    covered, reached = 0, None
    for begin, finish in sorted(intervals):
        if reached is None or begin > reached:
            covered, reached = covered + finish - begin, finish
        elif finish > reached:
            covered, reached = covered + finish - reached, finish
    return covered


PHASES = {
    "Optimizer.": "optimizer",
    "FSDP::pre_forward": "forward",
    "FSDP::post_forward": "forward",
    "FSDP::pre_back": "backward",
    "FSDP::post_back": "backward",
    "FSDP::root_post_back": "backward",
}
"""Beginnings of the names of ranges that libraries open around a pass."""


class SlowTrace:
    """One file of one process and one device."""

    def __init__(self, path: Path) -> None:
        with gzip.open(path) as file:
            self.document = json.load(file, parse_float=Decimal)
        self.events: list[Event] = self.document["traceEvents"]
        self._complete: dict[tuple[str, ...], list[Event]] = {}
        self._times: dict[int, tuple[list[Event], Any, Any]] = {}  # of lists of ranges, which stay as they are

    def complete(self, *categories: str) -> list[Event]:
        if categories not in self._complete:
            found = [e for e in self.events if e["ph"] == "X" and e.get("cat") in categories]
            self._complete[categories] = found
        return self._complete[categories]

    @cached_property
    def activities(self) -> list[Event]:
        return self.complete(*KINDS)

    @property
    def sum_ns(self) -> int:
        return sum(nanoseconds(e["dur"]) for e in self.activities)

    @property
    def busy_ns(self) -> int:
        return union([(start(e), end(e)) for e in self.activities])

    @property
    def span_ns(self) -> int:
        return max(map(end, self.activities)) - min(map(start, self.activities))

    @cached_property
    def _launches(self) -> dict[int, list[Event]]:
        found: dict[int, list[Event]] = {}
        for call in self.complete("cuda_runtime", "cuda_driver"):
            found.setdefault(call["args"].get("correlation"), []).append(call)
        return found

    def launch(self, activity: Event) -> Event | None:
        """The one API call with the activity's correlation id."""
        calls = self._launches.get(activity["args"]["correlation"], [])
        return calls[0] if len(calls) == 1 else None

    def _open(self, ranges: list[Event], thread: Any, moment: int) -> list[Event]:
        """Ranges of the thread that are open at the moment, outermost first."""
        if id(ranges) not in self._times:
            self._times[id(ranges)] = (ranges, *(np.array([of(r) for r in ranges], np.int64) for of in (start, end)))
        _, starts, ends = self._times[id(ranges)]
        around = np.flatnonzero((starts <= moment) & (moment < ends))
        found = [r for r in (ranges[at] for at in around) if r["tid"] == thread]
        return sorted(found, key=lambda r: (start(r), -end(r)))

    @cached_property
    def labels(self) -> list[Event]:
        """Ranges that the user named."""
        ranges = self.complete("user_annotation")
        return [r for r in ranges if not r["name"].startswith((STEP, *LIBRARIES))]

    @cached_property
    def library_ranges(self) -> list[Event]:
        return [r for r in self.complete("user_annotation") if r["name"].startswith(LIBRARIES)]

    @cached_property
    def modules(self) -> list[Event]:
        frames = self.complete("python_function")
        return [f for f in frames if f["name"].startswith("nn.Module: ")]

    @cached_property
    def frames(self) -> list[Event]:
        frames = self.complete("python_function")
        return [f for f in frames if not f["name"].startswith("nn.Module: ")]

    @cached_property
    def _forward_of(self) -> list[tuple[Event, Event]]:
        """(backward op, forward op) of every forward-backward arrow: the ops that begin where it does."""
        at: dict[tuple[Any, int], Event] = {}
        for op in self.complete("cpu_op"):
            known = at.get((op["tid"], start(op)))
            if "Sequence number" in op["args"] and (known is None or end(op) <= end(known)):
                at[op["tid"], start(op)] = op
        ends: dict[str, dict[int, Event]] = {"s": {}, "f": {}}
        for arrow in self.events:
            if arrow.get("cat") == "fwdbwd":
                ends[arrow["ph"]][arrow["id"]] = at[arrow["tid"], start(arrow)]
        linked = [(backward, ends["s"][number]) for number, backward in ends["f"].items()]
        return linked + self._wrapped(linked)

    def _wrapped(self, linked: list[tuple[Event, Event]]) -> list[tuple[Event, Event]]:
        """The engine's own op around each linked one: what it runs beside that belongs to it as well."""
        ends = {(b["tid"], b["args"]["Sequence number"]): (b, f) for b, f in linked}
        found = []
        for op in self.complete("cpu_op"):
            inner = ends.get((op["tid"], op["args"].get("Sequence number")))
            if op["name"].startswith(ENGINE) and inner is not None:
                assert start(op) <= start(inner[0])
                assert end(inner[0]) <= end(op)
                found.append((op, inner[1]))
        return found

    @cached_property
    def _backward_ops(self) -> list[Event]:
        return [backward for backward, _ in self._forward_of]

    @cached_property
    def _engine_ops(self) -> list[Event]:
        return self._backward_ops + [o for o in self.complete("cpu_op") if o["name"].startswith(ENGINE)]

    @cached_property
    def _forward_ops(self) -> list[Event]:
        return [forward for _, forward in self._forward_of]

    def _around(self, ranges: list[Event], activity: Event) -> list[Event]:
        """Ranges around the launch; around the forward op where the launch is a backward op's.

        A range that is open inside the backward op itself comes before both.
        """
        call = self.launch(activity)
        if call is None:
            return []
        own = self._open(ranges, call["tid"], start(call))
        backward = self._open(self._backward_ops, call["tid"], start(call))
        if not backward or (own and start(own[-1]) > start(backward[-1])):
            return own
        forward = next(f for b, f in self._forward_of if b is backward[-1])
        outside = self._open(ranges, forward["tid"], start(forward))
        return [r for r in outside if end(r) >= end(forward)] or own

    def label(self, activity: Event) -> str | None:
        """Path of the user's ranges; of a library's where there is none of the user's."""
        found = self._around(self.labels, activity)
        call = self.launch(activity)
        if not found and call is not None:
            found = self._open(self.library_ranges, call["tid"], start(call))
        return "/".join(r["name"] for r in found) or None

    def module(self, activity: Event) -> str | None:
        found = self._around(self.modules, activity)
        return "/".join(m["name"].removeprefix("nn.Module: ") for m in found) or None

    def stack(self, activity: Event) -> list[str]:
        """Names of the Python frames, outermost first."""
        return [f["name"] for f in self._around(self.frames, activity)]

    def phase(self, activity: Event) -> str | None:
        call = self.launch(activity)
        if call is None:
            return None
        if self._open(self._engine_ops, call["tid"], start(call)):
            return "backward"
        if self._open(self._forward_ops, call["tid"], start(call)):
            return "forward"
        named = self._open(self.complete("user_annotation"), call["tid"], start(call))
        for name in (r["name"] for r in reversed(named)):
            for beginning, phase in PHASES.items():
                if name.startswith(beginning):
                    return phase
        for module in self._open(self.modules, call["tid"], start(call)):
            inside = (f for f in self._forward_ops if f["tid"] == module["tid"])
            if any(start(module) <= start(f) and end(f) <= end(module) for f in inside):
                return "forward"
        return "other"

    def step(self, activity: Event) -> str | None:
        """The step that is open when the launch begins, on whatever thread."""
        call = self.launch(activity)
        steps = [r for r in self.complete("user_annotation") if r["name"].startswith(STEP)]
        for step in steps:
            if call is not None and start(step) <= start(call) < end(step):
                return str(step["name"])
        return None
