"""Selection of a part of a trace: ranks, devices, steps, time window, programs, names, warm-up.

This module imports little (`thence.errors`, `thence.units`), because the command line validates options with it
before it reads a trace.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from thence.errors import UsageError
from thence.units import format_ns

if TYPE_CHECKING:
    from collections.abc import Callable

WARM_UP = ("keep", "heuristic", "first-compiled")
"""Which executions of XLA programs are left out: see `thence.analysis.programs.warmup.WarmUp`."""
SEPARATE = "separate"
"""None are left out; tables show warm-up executions (by the heuristic) and XLA's autotuner in separate rows."""

TYPICAL: Final = "typical"
"""The steps that no rule of `thence.analysis.steps.windows` leaves out."""
MAIN = "main"
"""The XLA programs of the steps, see `thence.analysis.selection.select.main_programs`."""
StepChoice = tuple[int | None, int | None] | Literal["typical"]
"""First step and the step after the last, None without a limit; or `TYPICAL`."""

_UNITS_NS = {"ns": 1, "us": 1_000, "µs": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
_TIME = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)(ns|us|µs|ms|s)")
_STEP = re.compile(r"\d{1,18}")


@dataclass(frozen=True, slots=True)
class Selection:
    """Which device activities are selected. Every condition that is given must hold.

    Attributes:
        ranks: the activity is of one of these ranks; empty: any.
        devices: it is on a device with one of these indices; empty: any.
        steps: it was launched in a step from the first number on and before the second, as in Python slices; None
            leaves an end open. Numbers are those of `thence.model.tables.STEPS` (ProfilerStep#3). `TYPICAL`: it was
            launched in a typical step.
        window_ns: it began at or after the first time and before the second, in ns after the trace's first
            device activity; None leaves an end open.
        program: it is part of XLA programs of this name, or of the `MAIN` ones.
        only: its name, label, module, op, HLO instruction or op_name matches this regular expression.
        warm_up: `SEPARATE`, or one of `WARM_UP`: which executions of XLA programs are left out.
    """

    ranks: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()
    steps: StepChoice | None = None
    window_ns: tuple[int | None, int | None] | None = None
    program: str | None = None
    only: str | None = None
    warm_up: str = SEPARATE

    def __bool__(self) -> bool:
        return self != Selection()

    @property
    def idle_unknown(self) -> str:
        """Why the idle time of the selection is unknown, as a part of a sentence; empty if it is known.

        Steps and programs have a beginning and an end, and the device is idle if nothing runs in between. Work that
        was found by its name has neither, and what ran while it did not run is not idle time.
        """
        if self.steps is not None or self.program is not None:
            return ""
        if self.only is not None:
            return "other work ran between what --only selected; --steps selects time"
        if self.warm_up not in (SEPARATE, "keep"):
            return f"--warm-up {self.warm_up} left out work, and the time in which it ran; --steps selects time"
        return ""

    @property
    def of_ranks_and_devices_only(self) -> bool:
        """Whether all work of the selected ranks and devices is selected."""
        warm_up = "keep" if self.warm_up == "keep" else SEPARATE
        return self == Selection(self.ranks, self.devices, warm_up=warm_up)

    @property
    def of_ranks_and_devices(self) -> Selection:
        """The same ranks and devices without any other condition."""
        return Selection(self.ranks, self.devices)

    def __post_init__(self) -> None:
        if self.warm_up not in (SEPARATE, *WARM_UP):
            choices = ", ".join((SEPARATE, *WARM_UP))
            raise UsageError(f"warm-up is one of {choices}; got {self.warm_up!r}")
        if self.only is not None:
            try:
                re.compile(self.only)
            except re.error as error:
                raise UsageError(f"{self.only!r} is not a valid regular expression: {error}") from error

    def __str__(self) -> str:
        parts = [
            f"rank {', '.join(map(str, self.ranks))}" if self.ranks else "",
            f"device {', '.join(map(str, self.devices))}" if self.devices else "",
            _steps(self.steps) if self.steps else "",
            f"window {_range(self.window_ns, format_ns)}" if self.window_ns else "",
            f"program {self.program}" if self.program is not None else "",
            f"only {self.only}" if self.only is not None else "",
            f"without warm-up ({self.warm_up})" if self.warm_up not in (SEPARATE, "keep") else "",
        ]
        return "; ".join(filter(None, parts))


def parse_steps(text: str) -> StepChoice:
    """The steps of ``3:6``, ``3:``, ``:6``, ``3`` (that step alone), ``typical`` or ``all``.

    Raises:
        UsageError: the text has another form.
    """
    if text == TYPICAL:
        return TYPICAL
    if text == "all":
        return None, None
    first, colon, last = text.partition(":")
    if not text.strip(":") or any(part and not _STEP.fullmatch(part) for part in (first, last)):
        raise UsageError(f"cannot read the steps {text!r}: write 3:6 (3, 4 and 5), 3:, :6, 3, typical or all")
    if not colon:
        return int(first), int(first) + 1
    return (int(first) if first else None), (int(last) if last else None)


def parse_window(text: str) -> tuple[int | None, int | None]:
    """The times of ``1.2s:1.4s``, in ns; either may be left out, and is then None.

    Raises:
        UsageError: the text has another form.
    """
    parts = [_TIME.fullmatch(part.strip()) for part in text.split(":")]
    given = [bool(part.strip()) for part in text.split(":")]
    whole = all(match is not None or not wanted for match, wanted in zip(parts, given, strict=True))
    if len(parts) != 2 or not whole or not any(given):
        raise UsageError(
            f"cannot read the window {text!r}: write two times after the first device activity, such as "
            "1.2s:1.4s, 300ms: or :50us"
        )
    first, last = (None if match is None else _exact_ns(match[1], match[2]) for match in parts)
    return first, last


def parse_time(text: str) -> int:
    """The time of ``1.2s``, in ns.

    Raises:
        UsageError: the text has another form.
    """
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"cannot read the time {text!r}: write a time after the first device activity, such as 1.2s")
    return _exact_ns(match[1], match[2])


def _exact_ns(number: str, unit: str) -> int:
    whole, _, decimals = number.partition(".")
    scale = _UNITS_NS[unit]
    return int(whole) * scale + int((decimals or "0").ljust(9, "0")) * scale // 1_000_000_000


def _steps(choice: StepChoice) -> str:
    if isinstance(choice, str):
        return "typical steps"
    return "all steps" if choice == (None, None) else f"steps {_range(choice, str)}"


def _range(ends: tuple[int | None, int | None], text: Callable[[int], str]) -> str:
    return ":".join("" if end is None else text(end) for end in ends)
