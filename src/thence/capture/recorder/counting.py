"""Sets up and tests the reading of CUPTI's counter of launches."""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from thence.capture.boundaries.probe import Followed, choose_probe
from thence.capture.cuda.cuda_events import load_driver
from thence.capture.cuda.cupti import DRIVER_API, RUNTIME_API, CuptiError
from thence.capture.cuda.layouts import DRIVER, RUNTIME
from thence.capture.cuda.libraries import find_libcudart
from thence.errors import MissingRequirement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from thence.capture.boundaries.log import BoundaryLog
    from thence.capture.cuda.cupti import Cupti

_COUNTER_FUNCTIONS = ("cudaDriverGetVersion", "cuDriverGetVersion")
"""Functions whose calls show the value of the counter: they do nearly nothing and take a pointer to an int."""


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
        function: CUDA function whose calls show the counter; None before `begin`, and if no function does.
        address: of that function; 0 for none.
        log: log of boundaries; None if the counter cannot be read.
        trouble: a sentence on why the counter cannot be read.
        numbers_before: the last number before CUPTI was attached for the last time; CUPTI counts from 1 each time.
        notes_launches: whether the probe is fast enough for a callback at every launch.
    """

    def __init__(self) -> None:
        self._probe = choose_probe()
        self.callback = self._probe.callback
        self.notes_launches = self._probe.notes_launches
        self._lost_before = self._probe.lost_calls
        self.function: str | None = None
        self.address = 0
        self._counter_callback = (0, 0)
        self.numbers_before = 0
        self.log: BoundaryLog | None = None
        self._functions: dict[tuple[int, int], str] = {}
        self.trouble = "every launch is recorded, so none is counted"
        if self.compiled is not None:
            self.compiled.count_from(0)

    def begin(self, cupti: Cupti, subscription: int) -> None:
        """Searches for a function whose calls show the counter; `log` stays None if there is none.

        Two calls in a row must show different numbers: then the numbers are unique and in order.
        """
        self.trouble = "this process has loaded neither a shared library of the CUDA runtime nor a CUDA driver"
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
                self.address = function.address
                self._counter_callback = (function.domain, callback_id)
                return
            # Measured with CUPTI 13.0: before cuInit, no call of the driver has a number.
            self.trouble = f"CUPTI did not number calls of {function.name}, which it does once CUDA is initialised"
            cupti.enable_callback(subscription, function.domain, callback_id, on=False)

    @property
    def compiled(self) -> ModuleType | None:
        """The compiled probe; None if the probe in Python is used."""
        return self._probe.compiled

    def listen(self, cupti: Cupti, subscription: int, wanted: Callable[[str], bool]) -> None:
        """Enables callbacks for other functions until the recording ends; `follow` sets what is noted of the calls.

        Callbacks are never disabled while the program runs: if another thread launches at the same time, CUPTI 13.0
        crashes, or gives two calls the same number.

        `wanted` is asked for each function, named as in CUDA's headers.
        """
        self._functions = {
            (domain, callback_id): name
            for domain in (RUNTIME_API, DRIVER_API)
            for callback_id, name in cupti.callbacks(domain)
            if wanted(name) and not name.startswith(_COUNTER_FUNCTIONS)
        }

        self._enable(cupti, subscription)

    def _enable(self, cupti: Cupti, subscription: int) -> None:
        for domain, callback_id in self._functions:
            with contextlib.suppress(CuptiError):  # a function that this driver does not have
                cupti.enable_callback(subscription, domain, callback_id, on=True)

    def detach(self, cupti: Cupti) -> bool:
        """Detaches CUPTI from the process on this thread; the counter stays at its last number until `attach`.

        cuptiFinalize is called in a callback, as CUPTI's documentation recommends.

        Returns:
            whether it is detached; it may be if there is a compiled probe.
        """
        compiled = self.compiled
        if compiled is None or self.log is None:
            return False
        result, last = compiled.call_at_exit(self.address, cupti.address("cuptiFinalize"))
        if result:
            return False
        self.numbers_before += last
        compiled.stay_at(self.numbers_before)
        return True

    def attach(self, cupti: Cupti, subscription: int) -> None:
        """Enables the callbacks again, of a new subscription; numbers of calls go on where they were."""
        domain, callback_id = self._counter_callback
        cupti.enable_callback(subscription, domain, callback_id, on=True)
        self._enable(cupti, subscription)
        if self.compiled is not None:
            self.compiled.count_from(self.numbers_before)

    def follow(self, what: Followed) -> None:
        """Sets what is noted of the calls of those functions from now on."""
        self._probe.follow(what)

    def take_calls(self, number_of: Callable[[str], int]) -> dict[str, np.ndarray[Any, Any]]:
        """Rows of ``calls`` since the last call of this method; `number_of` returns the number of a function's name."""
        rows = self._probe.take_calls()
        keys = rows["domain"].astype(np.int64) << 32 | rows["function"]
        ids, which = np.unique(keys, return_inverse=True)
        names = [self._functions.get(divmod(number, 1 << 32), "(unknown)") for number in ids.tolist()]
        numbers = np.array([number_of(name) for name in names], np.uint32)
        return {
            "start": rows["begin"],
            "end": rows["end"],
            "thread": rows["thread"],
            "correlation": rows["number"],
            "function": numbers[which],
            "api": np.where(rows["domain"] == RUNTIME_API, RUNTIME, DRIVER).astype(np.uint8),
        }

    @property
    def lost_calls(self) -> int:
        """Number of calls that could not be noted for lack of memory."""
        return self._probe.lost_calls - self._lost_before

    def facts(self) -> dict[str, str | None]:
        """An entry of ``recording.json``: which probe read the counter, by which function, or why none did."""
        if self.log is None:
            return {"kind": None, "function": None, "trouble": self.trouble}
        return {"kind": self._probe.name, "function": self.function, "trouble": None}


def _functions() -> Iterator[_Function]:
    runtime = find_libcudart()
    if runtime is not None:
        yield from _function(RUNTIME_API, _COUNTER_FUNCTIONS[0], runtime)
    yield from _function(DRIVER_API, _COUNTER_FUNCTIONS[1], None)


def _function(domain: int, name: str, path: str | None) -> Iterator[_Function]:
    try:
        library = load_driver() if path is None else ctypes.CDLL(path)
        address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    except (OSError, AttributeError, MissingRequirement):
        return
    if address:
        yield _Function(domain, name, path or "the driver", address)
