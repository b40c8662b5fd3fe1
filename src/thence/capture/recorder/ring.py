"""Which parts of a recording that samples steps stay on disk: those of the latest windows, and of those asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from thence.model.formats import REFERRED_TO

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.capture.recorder.options import Sampling

_MAX_STEPS_BYTES = 16 << 20
"""Size of the times of steps that stay: half a million steps."""


class Part(NamedTuple):
    """One part on disk."""

    table: str
    number: int
    rows: int
    bytes: int


class Ring:
    """Keeps account of parts, which are written in rounds.

    Args:
        sampling: how many windows and megabytes stay.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._window, self._asked_for = 0, False
        self._written: list[Part] = []
        self._rounds: list[tuple[int, list[Part]]] = []
        self._asked_rounds: list[tuple[int, list[Part]]] = []
        self._steps: list[tuple[int, list[Part]]] = []
        self._dropped = self._asked_dropped = 0
        self._rows: dict[str, int] = {}
        self._numbers: dict[str, list[int]] = {}

    def begin_round(self, window: int, asked_for: Sequence[int]) -> None:
        """The next parts have rows of windows up to this one; they stay if one of these was asked for.

        Args:
            window: number of the last window that has begun.
            asked_for: numbers of windows that were asked for.
        """
        self._asked_for = any(self._window <= number <= window for number in asked_for)
        self._window = window

    def wrote(self, part: Part) -> None:
        """A part was written. Tables to which later rows refer stay; times of steps outlast their windows."""
        if part.table == "steps":
            self._steps.append((self._window, [part]))
        elif part.table not in REFERRED_TO:
            self._written.append(part)

    def end_round(self) -> list[Part]:
        """The parts that no longer fit; they count as deleted from here on."""
        if self._written:
            rounds = self._asked_rounds if self._asked_for else self._rounds
            rounds.append((self._window, self._written))
        self._written = []
        # The newest window may have just begun.
        room = self._sampling.ring_megabytes << 20
        dropped, old = _fit(self._rounds, self._window - self._sampling.ring, room)
        asked, more = _fit(self._asked_rounds, 0, room)
        self._dropped, self._asked_dropped = max(self._dropped, dropped), max(self._asked_dropped, asked)
        old = [*old, *more, *_fit(self._steps, 0, min(room, _MAX_STEPS_BYTES))[1]]
        for part in old:
            self._count(part)
        return old

    def facts(self) -> dict[str, Any]:
        """The entry ``ring`` of the description.

        ``windows`` up to this number were deleted, and those that were asked for up to number ``asked``, with these
        ``rows`` by table; ``parts`` are the numbers of deleted parts by table, as pairs of the first and last of each
        run.
        """
        return {"windows": self._dropped, "asked": self._asked_dropped, "rows": self._rows, "parts": self._numbers}

    def _count(self, part: Part) -> None:
        self._rows[part.table] = self._rows.get(part.table, 0) + part.rows
        runs = self._numbers.setdefault(part.table, [])
        if runs and runs[-1] == part.number - 1:
            runs[-1] = part.number
        else:
            runs += [part.number, part.number]


def _fit(rounds: list[tuple[int, list[Part]]], first: int, room: int) -> tuple[int, list[Part]]:
    """Removes rounds of windows before ``first``, and more until the others fit: the last window, and the parts."""
    size = sum(part.bytes for _, parts in rounds for part in parts)
    dropped, old = 0, list[Part]()
    while rounds:
        window, parts = rounds[0]
        if window >= first and size <= room:
            break
        del rounds[0]
        dropped = window
        size -= sum(part.bytes for part in parts)
        old += parts
    return dropped, old
