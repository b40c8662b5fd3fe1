"""Times of the kernels, memory copies and memory sets of a few calls, recorded with CUPTI.

Nothing else is recorded, and only in memory. At the end CUPTI is finalized by default, so that other
profilers can use it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import queue
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from thence.capture.cuda import cupti as libcupti
from thence.capture.cuda.cupti_owner import taken
from thence.capture.cuda.layouts import KERNEL, MEMCPY, MEMCPY2, MEMSET, require_known
from thence.capture.recorder.activity_parser import ActivityParser
from thence.capture.recorder.buffers import Buffers
from thence.errors import MissingData, UsageError
from thence.model.kernel_names import demangle

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from thence.capture.recorder.buffers import Filled
    from thence.model.arrays import Int64


_KINDS = (KERNEL, MEMCPY, MEMCPY2, MEMSET)
_FIELDS = ("name", "start", "end")
_MAX_BYTES = 256 << 20
"""Room for about a million kernels between one `KernelTimes.take` and the next."""


@dataclass(frozen=True)
class Activities:
    """The activities of a call; times are Unix time in ns.

    Attributes:
        names: of the kernels, demangled where they are C++, in order of start.
        start, end: of the kernels, in the same order.
        copy_start, copy_end: of memcpys and memsets, in order of start.
    """

    names: list[str]
    start: Int64
    end: Int64
    copy_start: Int64
    copy_end: Int64

    @property
    def ms(self) -> list[float]:
        """Duration of each kernel, milliseconds."""
        result: list[float] = ((self.end - self.start) / 1e6).tolist()
        return result


class KernelTimes:
    """Records activities within a ``with`` block; `take` returns those since the previous `take`.

    Args:
        finalize: whether CUPTI is finalized at the end, so that other profilers can use it.

    Raises:
        UsageError: on entering the block: thence records this process already.
        MissingRequirement: on entering the block: there is no CUPTI, or another profiler uses it.
    """

    def __init__(self, *, finalize: bool = True) -> None:
        self._finalize = finalize
        self._exit = contextlib.ExitStack()
        self._buffers = _buffers()

    def __enter__(self) -> Self:
        _check_not_recorded()
        self._cupti = libcupti.load()
        require_known(self._cupti.version())
        with contextlib.ExitStack() as undo:
            handle = self._subscribed()
            if self._finalize:
                undo.callback(self._cupti.finalize)
            undo.callback(self._cupti.unsubscribe, handle)
            self._cupti.register(self._buffers.requested, self._buffers.completed)
            self._forget()
            for kind in _KINDS:
                self._cupti.enable(kind)
                undo.callback(self._cupti.disable, kind)
            self._parser = ActivityParser(self._cupti)
            self._exit = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.__exit__(kind, error, trace)
        self._forget()

    def take(self) -> Activities:
        """The activities since the previous `take`. They must have finished: synchronize before the call.

        Raises:
            MissingData: records were lost, or have no times.
        """
        self._cupti.flush(unfinished=True)
        lost = self._cupti.dropped(None, 0)
        if lost:
            raise MissingData(
                f"CUPTI lost {lost} records for lack of memory, so times would be too short: measure a "
                "part of the function, or use thence record"
            )
        kernels: list[dict[str, Any]] = [dict.fromkeys(_FIELDS, np.zeros(0, np.uint64))]
        copies = kernels.copy()
        for filled in self._filled():
            for kind, columns in self._parser.read(filled.address, filled.valid_bytes):
                if kind in _KINDS:
                    (kernels if kind == KERNEL else copies).append(columns)
            self._buffers.recycle(filled)
        if any(kind in self._parser.unknown for kind in _KINDS):
            raise MissingData(
                "CUPTI wrote records of a kind that thence cannot read: update thence, or use mode='events'"
            )
        order, start, end = _in_order(kernels)
        pointers = np.concatenate([columns["name"] for columns in kernels])[order]
        return Activities(_names(pointers), start, end, *_in_order(copies)[1:])

    def _subscribed(self) -> int:
        try:
            return self._cupti.subscribe()
        except libcupti.CuptiError as error:
            if error.code != libcupti.TAKEN:
                raise
            raise libcupti.CuptiError(error.call, error.code, taken()) from error

    def _filled(self) -> Iterator[Filled]:
        with contextlib.suppress(queue.Empty):
            while True:
                filled = self._buffers.filled.get_nowait()
                if filled is not None:
                    yield filled

    def _forget(self) -> None:
        """Discards buffers that CUPTI completed after the last `take`, of this recording or an earlier one."""
        for filled in self._filled():
            self._buffers.recycle(filled)


@functools.cache
def _buffers() -> Buffers:
    """The buffers of the whole process: CUPTI may keep some buffers from one recording to the next."""
    return Buffers(_MAX_BYTES)


def _check_not_recorded() -> None:
    recorder = sys.modules.get("thence.capture.recorder.recorder")  # a recording would have imported it
    if recorder is not None and recorder.running() is not None:
        raise UsageError(
            "thence records this process, and CUPTI serves one at a time: stop the recording first, or "
            "leave measure out; the recording has every kernel's time"
        )


def _in_order(parts: list[dict[str, Any]]) -> tuple[Int64, Int64, Int64]:
    """The order of activities by start and end, and their starts and ends in that order.

    Raises:
        MissingData: some have no times.
    """
    start, end = (np.concatenate([columns[name] for columns in parts]) for name in ("start", "end"))
    if not (start.all() and end.all()):
        raise MissingData("CUPTI has no times for some activities: call again")
    order = np.lexsort((end, start))
    return order, start[order].astype(np.int64), end[order].astype(np.int64)


def _names(pointers: np.ndarray[Any, Any]) -> list[str]:
    """The demangled names at addresses of C strings. CUPTI owns the strings until it is finalized."""
    unique, inverse = np.unique(pointers, return_inverse=True)
    texts = [ctypes.string_at(p).decode(errors="replace") if p else "?" for p in unique.tolist()]
    readable = [demangle(text) for text in texts]
    return [readable[i] for i in inverse]
