"""Setting up the reading of CUPTI's counter of launches, and trying it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from thence.boundaries.probe import choose_probe
from thence.cuda.cuda_events import load_driver
from thence.cuda.cupti import DRIVER_API, MOST_CALLBACK_IDS, RUNTIME_API, CuptiError
from thence.cuda.layouts import DRIVER, RUNTIME
from thence.cuda.libraries import find_libcudart
from thence.errors import MissingRequirement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
        self._called_back: dict[tuple[int, int], str] = {}
        self._known: dict[
            tuple[int, int], str
        ] = {}  # also of those that are not called back for any more
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

    def call_back(self, cupti: Cupti, subscription: int, wanted: Callable[[str], bool]) -> None:
        """Have calls of other functions noted, named as in CUDA's headers: these, and no others any more."""
        for domain in (RUNTIME_API, DRIVER_API):
            for callback_id in range(1, MOST_CALLBACK_IDS):
                name = cupti.callback_name(domain, callback_id)
                if name is None:
                    break
                on, key = wanted(name), (domain, callback_id)
                if on == (key in self._called_back):
                    continue
                try:
                    cupti.enable_callback(subscription, domain, callback_id, on=on)
                except CuptiError:
                    continue  # one that this driver does not have
                if on:
                    self._called_back[key] = name
                else:
                    del self._called_back[key]

    def take_calls(self, number_of: Callable[[str], int]) -> dict[str, np.ndarray[Any, Any]]:
        """Rows of ``calls`` since this was last asked; `number_of` numbers the names of functions."""
        rows = self._probe.take_calls()
        keys = rows["domain"].astype(np.int64) << 32 | rows["function"]
        ids, which = np.unique(keys, return_inverse=True)
        self._known |= self._called_back
        names = [
            self._known.get((one >> 32, one & 0xFFFFFFFF), "(unknown)") for one in ids.tolist()
        ]
        numbers = np.array([number_of(name) for name in names], np.uint32)
        return {
            "start": rows["begin"],
            "end": rows["end"],
            "thread": rows["thread"],
            "correlation": rows["number"],
            "function": numbers[which],
            "api": np.where(rows["domain"] == RUNTIME_API, RUNTIME, DRIVER).astype(np.uint8),
        }

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
