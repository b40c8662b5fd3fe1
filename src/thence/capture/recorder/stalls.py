"""Samples of program counters in a recording: by kernel, line of its source, and reason of the stall.

Sampling begins with the recording, goes on beside everything else, and ends with it. Everything here runs on the
recorder's thread, except for the beginning. Lines are found where an instruction is sampled first, so that a program
that is killed has them too.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from thence.capture.cuda.cupti import BUSY
from thence.capture.cuda.pc_sampling import PcSampler, SourceLines
from thence.errors import MissingRequirement
from thence.model.stall_reasons import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from thence.capture.cuda.cupti import Cupti
    from thence.capture.cuda.pc_sampling import OfContext
    from thence.capture.recorder.names import Names

Columns = dict[str, np.ndarray[Any, Any]]

PERIOD = 16
"""A multiprocessor is sampled each 2 to the power of this cycles."""
_HARDWARE_BYTES = 64 << 20
"""The buffer of the hardware, on each device."""
_READ_MILLISECONDS = 100
"""How often CUPTI reads it."""
_MAX_IMAGE_BYTES = 256 << 20
"""Of modules with lines."""
_MAX_NEW = 20_000
"""Instructions whose lines are looked up each time that samples are taken: a quarter of a second. Others have none."""
_NO_KERNELS = ", and meanwhile CUPTI may record no kernels of this process either: record it without stalls"
"""Seen on an H200 and an H100."""
_Key = tuple[int, int, int]


class Stalls:
    """The samples of one recording.

    Args:
        wanted: whether there are any.
        keep: takes rows of the table ``stalls``.
        warn: takes a sentence about what was not sampled.
    """

    def __init__(self, keep: Callable[[Columns], None], warn: Callable[[str], None], *, wanted: bool) -> None:
        self._wanted = wanted
        self._keep = keep
        self._warn = warn
        self._sampler: PcSampler | None = None
        self._lines: SourceLines | None = None
        self._known: dict[_Key, tuple[int, int]] = {}
        self._sums: list[OfContext] = []
        self._unlooked = self._unseen = 0
        self._over = False
        self._trouble: str | None = None

    def begin(self, cupti: Cupti, compiled: ModuleType | None, subscription: int) -> None:
        """Samples all contexts from here on; to be called once the records of activities are enabled."""
        if not self._wanted:
            return
        try:
            self._sampler = PcSampler(cupti, compiled, subscription, PERIOD, _HARDWARE_BYTES, _READ_MILLISECONDS)
            self._lines = SourceLines(cupti, _MAX_IMAGE_BYTES)
        except MissingRequirement as error:
            self._fail(str(error))

    def take(self, names: Names, *, last: bool = False) -> None:
        """Keeps what was sampled since the last call; `last`: sampling ends."""
        sampler, lines = self._sampler, self._lines
        if sampler is None or lines is None or self._over:
            return
        try:
            self._sums = sampler.take(last=last)
            for image in sampler.images():  # after it: modules of all samples were loaded before
                lines.add(image)
        except MissingRequirement as error:
            self._fail(str(error))
            return
        for sums in self._sums:
            if sums.error is not None:
                self._fail(f"{sums.error}{_NO_KERNELS if sums.error.code == BUSY else ''}")
            if len(sums.rows):
                self._keep(self._placed(sums, names, lines))
        self._over = last

    def facts(self) -> dict[str, Any] | None:
        """The entry ``stalls`` of the description; None where nobody asked for them.

        ``period_cycles`` is from one sample of a multiprocessor to the next; ``samples`` are all of them. ``unplaced``
        belong to code that CUPTI does not name, ``unseen`` to modules that were loaded before sampling began.
        ``dropped`` were lost by the hardware, ``overflows`` is how often its buffer was full. ``missed`` are contexts
        that were not sampled, ``ended`` those that ended before, with their last samples. ``unlooked`` are
        instructions, and ``left_out`` modules, whose lines were not looked up for lack of time or memory; ``trouble``
        is why there are none.
        """
        if not self._wanted:
            return None
        sampler, lines = self._sampler, self._lines
        return {
            "period_cycles": 1 << PERIOD,
            **{name: sum(getattr(sums, name) for sums in self._sums) for name in _SUMMED},
            "missed": 0 if sampler is None else sampler.missed,
            "unseen": self._unseen,
            "unlooked": self._unlooked,
            "left_out": (0 if lines is None else lines.left_out) + (0 if sampler is None else sampler.lost_images),
            "trouble": self._trouble,
        }

    def _placed(self, of_context: OfContext, names: Names, lines: SourceLines) -> Columns:
        """Rows of the table: sums by function, line and reason, without what each sample is counted a second time."""
        reasons = {number: reason_of(name) for number, name in of_context.reasons.items()}
        counted = np.array([number for number, reason in reasons.items() if reason is not None], np.uint32)
        rows = of_context.rows[np.isin(of_context.rows["reason"], counted)]
        seen = np.isin(rows["cubin"], np.fromiter(lines.seen, np.uint64))
        self._unseen += int(rows["samples"][~seen].sum(dtype=np.int64))
        functions = names.of_pointers(rows["function"])
        file, line = self._looked_up(rows, functions, lines, names)
        keys = np.stack([functions.astype(np.int64), file, line, rows["reason"].astype(np.int64)])
        distinct, which = np.unique(keys, axis=1, return_inverse=True)
        samples = np.zeros(distinct.shape[1], np.int64)
        np.add.at(samples, which.reshape(-1), rows["samples"].astype(np.int64))
        numbers = [names.of_text(reasons[number] or "") for number in distinct[3].tolist()]
        return {
            "device": np.full(len(samples), of_context.device, np.int32),
            "kernel": distinct[0],
            "file": distinct[1],
            "line": distinct[2],
            "reason": np.array(numbers, np.uint32),
            "samples": samples,
        }

    def _looked_up(
        self, rows: np.ndarray[Any, Any], functions: np.ndarray[Any, Any], lines: SourceLines, names: Names
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Numbers of the names of files, and lines, by row; 0: unknown."""
        keys = np.stack([rows["cubin"], functions.astype(np.uint64), rows["pc"]])
        distinct, first, which = np.unique(keys, axis=1, return_index=True, return_inverse=True)
        known = np.zeros((distinct.shape[1], 2), np.int64)
        looked = 0
        texts = _texts(rows["function"][first])
        for number, (cubin, function, pc) in enumerate(distinct.T.tolist()):
            place = self._known.get((cubin, function, pc))
            if place is None and lines.knows(cubin):
                if looked == _MAX_NEW:
                    self._unlooked += 1
                    continue
                looked += 1
                place_text = lines.line(cubin, texts[number], pc)
                place = (0, 0) if place_text is None else (names.of_text(place_text[0]), place_text[1])
                self._known[cubin, function, pc] = place
            known[number] = place or (0, 0)
        return known[which.reshape(-1), 0], known[which.reshape(-1), 1]

    def _fail(self, why: str) -> None:
        self._trouble = f"program counters cannot be sampled: {why}"
        self._warn(self._trouble)


_SUMMED = ("samples", "unplaced", "dropped", "overflows", "ended")


def _texts(pointers: np.ndarray[Any, Any]) -> list[bytes]:
    known = {address: ctypes.string_at(address) if address else b"" for address in np.unique(pointers).tolist()}
    return [known[address] for address in pointers.tolist()]
