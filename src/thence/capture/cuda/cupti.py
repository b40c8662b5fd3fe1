"""Bindings of libcupti through ctypes: only what recording and labelling need.

Every call that fails raises `CuptiError` with the call, the code and its meaning. Signatures and
codes are those of ``cupti_activity.h``, ``cupti_callbacks.h`` and ``cupti_result.h`` of CUDA 11.7 to
13.5. Two copies of libcupti in one process share no state, so the copy that the process already uses
is preferred (`thence.capture.cuda.libraries`).
"""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import POINTER, byref, c_char_p, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any

from thence.capture.cuda.cuda_events import load_driver
from thence.capture.cuda.libraries import find_libcupti, mapped_copies
from thence.errors import MissingRequirement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DRIVER_API = 1
"""CUPTI_CB_DOMAIN_DRIVER_API"""
RUNTIME_API = 2
"""CUPTI_CB_DOMAIN_RUNTIME_API"""
MAX_CALLBACK_IDS = 4096
"""More callback ids than any domain has."""

BUSY = 26
"""CUPTI_ERROR_HARDWARE_BUSY: another process samples the device; seen on an H200."""
TAKEN = 39
"""CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED: another profiler uses CUPTI."""

BufferRequested = ctypes.CFUNCTYPE(None, POINTER(c_void_p), POINTER(c_size_t), POINTER(c_size_t))
"""CUpti_BuffersCallbackRequestFunc(buffer, size, most records)"""
BufferCompleted = ctypes.CFUNCTYPE(None, c_void_p, c_uint32, c_void_p, c_size_t, c_size_t)
"""CUpti_BuffersCallbackCompleteFunc(context, stream, buffer, size, valid size)"""
_Callback = ctypes.CFUNCTYPE(None, c_void_p, ctypes.c_int, c_uint32, c_void_p)

_SYSTEM_THREAD_IDS = 1
"""CUPTI_ACTIVITY_THREAD_ID_TYPE_SYSTEM: thread ids are those of gettid."""
_ZEROED_BUFFERS = 5
"""CUPTI_ACTIVITY_ATTR_ZEROED_OUT_ACTIVITY_BUFFER"""
_FORCED = 1
"""CUPTI_ACTIVITY_FLAG_FLUSH_FORCED"""
_MAX_LIMIT_REACHED = 12  # CUPTI_ERROR_MAX_LIMIT_REACHED: no further record is in the buffer

RIGHTS_CURE = (
    "run as root, give the container --cap-add SYS_ADMIN, or let the administrator load the driver with "
    "NVreg_RestrictProfilingToAdminUsers=0"
)
"""How a user gets the right to profile."""
MEANINGS = {
    1: "a parameter was refused",
    2: "the device is not valid",
    3: "the CUDA context is not valid",
    7: "the operation is not possible now",
    8: "there is no memory left",
    9: "the hardware reported an error",
    11: "this libcupti does not implement the call",
    12: "there are no more records",
    13: "CUPTI is not ready",
    14: "libcupti does not fit the driver: use the libcupti that came with the CUDA version in use",
    15: (
        "CUPTI could not start: there is no NVIDIA driver, or it is older than this libcupti; update "
        "the driver, or use the libcupti of the driver's own CUDA version (THENCE_LIBCUPTI names one)"
    ),
    21: "this libcupti does not know the kind of record",
    BUSY: "another tool, or another process, samples the counters of this device",
    27: "it is not supported on this device",
    33: "profiling is not possible on this virtual device",
    35: f"the user has no right to profile: {RIGHTS_CURE}",
    36: "the old profiler interface is in use in this process",
    38: "profiling is not supported on this device",
    TAKEN: "another profiler in this process uses CUPTI, which serves one at a time",
    40: "the hypervisor gives this virtual device no right to profile",
    41: "profiling is switched off in confidential computing mode",
    42: "profiling is not supported on CMP devices",
    43: "profiling is not supported on this MIG device",
    44: "profiling is not supported on SLI devices",
    45: "profiling is not supported under WSL here: update the Windows driver, or allow profiling in it",
    999: "an unknown internal error",
}
"""Meanings of CUptiResult codes, for users."""


class CuptiError(MissingRequirement):
    """A CUPTI call that failed.

    Attributes:
        call: name of the function.
        code: its CUptiResult.
    """

    def __init__(self, call: str, code: int, message: str) -> None:
        super().__init__(message)
        self.call = call
        self.code = code


class Cupti:
    """One loaded libcupti.

    Attributes:
        path: of the library file.
    """

    def __init__(self, library: ctypes.CDLL, path: str) -> None:
        self.path = path
        self._library = library
        self._kept: list[Any] = []  # callbacks must outlive their registration

    def version(self) -> int:
        """CUPTI_API_VERSION: 17 to 28 for CUDA 11.7 to 12.9, from 13.0 on 130000 and up."""
        return self._number("cuptiGetVersion", c_uint32)

    def graph_node_id(self, node: int) -> int:
        """Id of a CUgraphNode handle: graph id in the high 32 bits, node number in the low ones."""
        return self._number("cuptiGetGraphNodeId", c_uint64, c_void_p(node))

    def graph_id(self, graph: int) -> int:
        """Id of a CUgraph handle."""
        return self._number("cuptiGetGraphId", c_uint32, c_void_p(graph))

    def graph_exec_id(self, graph_exec: int) -> int:
        """Id of a CUgraphExec handle."""
        return self._number("cuptiGetGraphExecId", c_uint32, c_void_p(graph_exec))

    def has(self, function: str) -> bool:
        """Whether this libcupti knows a function."""
        return hasattr(self._library, function)

    def subscribe(self, callback: int | None = None) -> int:
        """Become the one subscriber of CUPTI in this process; returns the handle for `unsubscribe`.

        Args:
            callback: address of a CUpti_CallbackFunc that lives as long as the process; None: no callbacks
                are needed.

        Raises:
            CuptiError: code 39 if another profiler is the subscriber, 15 without a usable driver.
        """
        if callback is None:
            nothing = _Callback(lambda *_: None)
            self._kept.append(nothing)
            callback = ctypes.cast(nothing, c_void_p).value
        handle = c_void_p()
        self._call("cuptiSubscribe", byref(handle), c_void_p(callback), None)
        return handle.value or 0

    def enable_callback(self, handle: int, domain: int, callback_id: int, *, on: bool) -> None:
        """Switch calls of the subscriber's callback for one API function on or off."""
        self._call(
            "cuptiEnableCallback",
            c_uint32(on), c_void_p(handle), ctypes.c_int(domain), c_uint32(callback_id),
        )  # fmt: skip

    def callback_id(self, domain: int, function: str) -> int | None:
        """Callback id of an API function, named as in CUDA's headers; None if this libcupti has none."""
        for callback_id, name in self.callbacks(domain):
            if name == function or name.startswith(f"{function}_v"):
                return callback_id
        return None

    def callbacks(self, domain: int) -> Iterator[tuple[int, str]]:
        """Callback ids and names of the API functions of a domain."""
        for callback_id in range(1, MAX_CALLBACK_IDS):
            name = self.callback_name(domain, callback_id)
            if name is None:
                return
            yield callback_id, name

    def latency_timestamps(self, *, on: bool) -> None:
        """Have kernel records hold the time at which the host queued them; call it before their kind is enabled."""
        self._call("cuptiActivityEnableLatencyTimestamps", c_uint8(on))

    def unsubscribe(self, handle: int) -> None:
        """Stop being the subscriber of CUPTI."""
        self._call("cuptiUnsubscribe", c_void_p(handle))

    def register(
        self,
        requested: Callable[[Any, Any, Any], None],
        completed: Callable[[int | None, int, int | None, int, int], None],
    ) -> None:
        """Set the callbacks that provide buffers and take filled buffers; CUPTI calls them from any thread."""
        callbacks = BufferRequested(requested), BufferCompleted(completed)
        self._kept.extend(callbacks)
        self._call("cuptiActivityRegisterCallbacks", *callbacks)

    def system_thread_ids(self) -> None:
        """Have records hold the thread ids of gettid; call it before any kind is enabled."""
        self._call("cuptiSetThreadIdType", ctypes.c_int(_SYSTEM_THREAD_IDS))

    def buffers_are_zeroed(self) -> None:
        """Tell CUPTI that buffers are zeroed already: otherwise it zeroes them, in the program's own threads."""
        value, size = c_uint8(1), c_size_t(1)
        self._call("cuptiActivitySetAttribute", ctypes.c_int(_ZEROED_BUFFERS), byref(size), byref(value))

    def allocation_sources(self) -> None:
        """Have records of memory name the library that asked for it; of CUDA 12.6 and newer."""
        self._call("cuptiActivityEnableAllocationSource", c_uint8(1))

    def enable(self, kind: int) -> None:
        """Record a CUpti_ActivityKind; works before there is a CUDA context."""
        self._call("cuptiActivityEnable", ctypes.c_int(kind))

    def disable(self, kind: int) -> None:
        """Stop recording a CUpti_ActivityKind."""
        self._call("cuptiActivityDisable", ctypes.c_int(kind))

    def api(self, domain: int, callback_id: int, *, on: bool) -> None:
        """Switch records of calls of one API function on or off, while the activity kind of its API is enabled."""
        name = "cuptiActivityEnableRuntimeApi" if domain == RUNTIME_API else ("cuptiActivityEnableDriverApi")
        self._call(name, c_uint32(callback_id), c_uint8(on))

    def callback_name(self, domain: int, callback_id: int) -> str | None:
        """Name of an API function such as ``cudaLaunchKernel_v7000``; None beyond the last one."""
        name = c_char_p()
        code = self._function("cuptiGetCallbackName")(ctypes.c_int(domain), c_uint32(callback_id), byref(name))
        return name.value.decode(errors="replace") if not code and name.value else None

    def flush(self, *, unfinished: bool) -> None:
        """Have CUPTI deliver filled buffers; `unfinished`: also buffers that still have room."""
        self._call("cuptiActivityFlushAll", c_uint32(_FORCED if unfinished else 0))

    def dropped(self, context: int | None, stream: int) -> int:
        """The number of records lost since the last call because there was no buffer."""
        return self._number("cuptiActivityGetNumDroppedRecords", c_size_t, c_void_p(context), c_uint32(stream))

    def next_record(self, buffer: int, valid_bytes: int, record: int | None) -> int | None:
        """Address of the record after `record` (None: the first); None after the last."""
        pointer = c_void_p(record)
        code = self._function("cuptiActivityGetNextRecord")(c_void_p(buffer), c_size_t(valid_bytes), byref(pointer))
        if code == _MAX_LIMIT_REACHED:
            return None
        self.check("cuptiActivityGetNextRecord", code)
        return pointer.value

    def address(self, function: str) -> int:
        """Address of a function of this libcupti.

        Raises:
            CuptiError: it has no such function.
        """
        return ctypes.cast(self._function(function), c_void_p).value or 0  # type: ignore[arg-type]

    def finalize(self) -> None:
        """Detach CUPTI from the process, so that another profiler can use it."""
        self._call("cuptiFinalize")

    def call_with(self, name: str, parameters: ctypes.Structure) -> None:
        """Call a function that takes one struct of parameters, and fills in what it answers."""
        self._call(name, byref(parameters))

    def check(self, name: str, code: int) -> None:
        """Raise the error of a call of a function that returned a code; 0 is none."""
        if code:
            raise CuptiError(name, code, f"{name} failed with CUPTI error {code}: {self._text(code)}")

    def _number(self, name: str, kind: type[ctypes._SimpleCData[int]], *arguments: Any) -> int:
        """Call a function that writes its result through its last argument, and return that result."""
        result = kind()
        self._call(name, *arguments, byref(result))
        return int(result.value)

    def _call(self, name: str, *arguments: Any) -> None:
        self.check(name, self._function(name)(*arguments))

    def _text(self, code: int) -> str:
        if code in MEANINGS:
            return MEANINGS[code]
        text = c_char_p()
        if self.has("cuptiGetResultString"):
            self._library.cuptiGetResultString(ctypes.c_int(code), byref(text))
        return text.value.decode(errors="replace") if text.value else "not a known error"

    def _function(self, name: str) -> Callable[..., int]:
        try:
            return getattr(self._library, name)  # type: ignore[no-any-return]
        except AttributeError:
            raise CuptiError(name, 11, f"{self.path} has no {name}: this libcupti is too old") from None


def load() -> Cupti:
    """The libcupti of this process, which is loaded if necessary.

    Without a driver, every call of CUPTI 13.2 recurses until the stack overflows, so the driver is loaded first; only
    a library that THENCE_LIBCUPTI names may do without.

    Raises:
        MissingRequirement: there is no libcupti or no driver, or one cannot be loaded.
    """
    path = find_libcupti()
    if not os.environ.get("THENCE_LIBCUPTI"):
        load_driver()
    return _open(path)


@functools.cache
def _open(path: str) -> Cupti:
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise MissingRequirement(f"libcupti cannot be loaded: {error}") from error
    if not hasattr(library, "cuptiGetVersion"):
        raise MissingRequirement(f"{path} is not a libcupti: it has no cuptiGetVersion")
    if "/" not in path:  # found by the dynamic linker, which has mapped the file
        path = next(iter(mapped_copies()), path)
    return Cupti(library, path)
