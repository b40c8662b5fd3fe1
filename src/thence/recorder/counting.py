"""Setting up the reading of CUPTI's counter of launches, and trying it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thence.boundaries.probe import choose_probe
from thence.cuda.cuda_events import load_driver
from thence.cuda.cupti import DRIVER_API, RUNTIME_API, CuptiError
from thence.cuda.libraries import find_libcudart
from thence.errors import MissingRequirement

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thence.boundaries.log import BoundaryLog
    from thence.cuda.cupti import Cupti

__all__ = ["Counting"]


@dataclass(frozen=True)
class _Function:
    """A CUDA function that does nearly nothing and takes a pointer to an int."""

    domain: int
    name: str
    library: str
    address: int


class Counting:
    """CUPTI's counter in one process.

    Attributes:
        callback: address of the function to subscribe with.
        function: CUDA function whose call tells the counter; None before `begin`, and where none does.
        log: notes boundaries; None where the counter cannot be read.
        trouble: why it cannot, in words.
    """

    def __init__(self) -> None:
        self._probe = choose_probe()
        self.callback = self._probe.callback
        self.function: str | None = None
        self.log: BoundaryLog | None = None
        self.trouble = "this process has neither a CUDA runtime of its own file nor a driver"

    def begin(self, cupti: Cupti, subscription: int) -> None:
        """Look for a function that tells the counter; `log` says whether there is one.

        It has to tell two different numbers in a row: then they are unique, and in order.
        """
        for function in _functions():
            callback_id = cupti.callback_id(function.domain, function.name)
            if callback_id is None:
                self.trouble = f"libcupti does not know {function.name}"
                continue
            try:
                cupti.enable_callback(subscription, function.domain, callback_id, on=True)
            except CuptiError as error:
                self.trouble = str(error)
                continue
            log = self._probe.log(function.address)
            first, second = log.note(0), log.note(0)
            log.take()
            if 0 < first != second > 0:
                self.log, self.function = log, f"{function.name} of {function.library}"
                return
            self.trouble = f"CUPTI did not number calls of {function.name}"
            cupti.enable_callback(subscription, function.domain, callback_id, on=False)

    def facts(self) -> dict[str, str | None]:
        """For ``recording.json``: which probe ran, and by which function, or why not."""
        if self.log is None:
            return {"kind": None, "function": None, "trouble": self.trouble}
        return {"kind": self._probe.name, "function": self.function, "trouble": None}


def _functions() -> Iterator[_Function]:
    runtime = find_libcudart()
    if runtime is not None:
        yield from _function(RUNTIME_API, "cudaDriverGetVersion", runtime)
    yield from _function(DRIVER_API, "cuDriverGetVersion", None)


def _function(domain: int, name: str, path: str | None) -> Iterator[_Function]:
    try:
        library = load_driver() if path is None else ctypes.CDLL(path)
        address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    except (OSError, AttributeError, MissingRequirement):
        return
    if address:
        yield _Function(domain, name, path or "the driver", address)
