"""Samples of program counters by CUPTI ("PC sampling"), and the lines of source that they belong to.

Each multiprocessor that holds warps notes one of them every so many cycles: its function, its instruction and why it
does not issue one. Kernels run as without it. The calls at contexts and modules are made by the compiled probe
(``_stalls.c``); what is taken from it, and the lines, are here, for the thread that writes.

CUPTI has threads of its own for it, which read the buffer of the hardware.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_size_t, c_uint32, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from thence.capture.cuda.cuda_events import load_driver
from thence.capture.cuda.cupti import CuptiError
from thence.capture.cuda.synchronization import primary_contexts
from thence.errors import MissingRequirement

if TYPE_CHECKING:
    from types import ModuleType

    from thence.capture.cuda.cupti import Cupti

OLDEST = 26
"""CUPTI_API_VERSION of CUDA 12.8, the oldest whose structs are known to be these."""
_RESOURCES = 3
"""CUPTI_CB_DOMAIN_RESOURCE"""
_WATCHED = (1, 2, 6)
"""CUPTI_CBID_RESOURCE_CONTEXT_CREATED, .._CONTEXT_DESTROY_STARTING and .._MODULE_LOADED"""
_CALLS = {
    "enable": "cuptiPCSamplingEnable",
    "count": "cuptiPCSamplingGetNumStallReasons",
    "list": "cuptiPCSamplingGetStallReasons",
    "configure": "cuptiPCSamplingSetConfigurationAttribute",
    "start": "cuptiPCSamplingStart",
    "data": "cuptiPCSamplingGetData",
    "stop": "cuptiPCSamplingStop",
    "disable": "cuptiPCSamplingDisable",
    "device": "cuptiGetDeviceId",
}
"""Functions of libcupti as the compiled probe names them, in the order in which it takes their addresses."""
_HAS_LINES = b".debug_line"
"""Name of a section of images that have lines; libraries of CUDA have none."""
ROW = np.dtype([("cubin", "<u8"), ("pc", "<u8"), ("function", "<u8"), ("reason", "<u4"), ("samples", "<u4")])
"""Samples of one instruction and reason: CRC of the image, offset, address of the function's name, number of the reason
(``Row`` of _stalls.c)."""


class _CrcParameters(ctypes.Structure):
    """CUpti_GetCubinCrcParams."""

    _fields_ = (("size", c_size_t), ("bytes", c_size_t), ("image", c_char_p), ("crc", c_uint64))


class _LineParameters(ctypes.Structure):
    """CUpti_GetSassToSourceCorrelationParams."""

    _fields_ = (
        ("size", c_size_t),
        ("image", c_char_p),
        ("function", c_char_p),
        ("bytes", c_size_t),
        ("line", c_uint32),
        ("pc", c_uint64),
        ("file", c_void_p),
        ("folder", c_void_p),
    )


class OfContext(NamedTuple):
    """What was sampled in one context.

    Attributes:
        device: CUDA's number of it; -1: unknown.
        ended: 1 if the context ended before sampling did: its last samples are missing.
        error: of the call that failed, after which nothing is sampled; None: none did.
        samples: all of them since the beginning, placed or not.
        unplaced: those of code that CUPTI does not name, such as its own.
        dropped: those that the hardware lost.
        overflows: how often the buffer of the hardware was full, and its samples were lost.
        reasons: CUPTI's names by number.
        rows: of `ROW`, since they were taken last.
    """

    device: int
    ended: int
    error: CuptiError | None
    samples: int
    unplaced: int
    dropped: int
    overflows: int
    reasons: dict[int, str]
    rows: np.ndarray[Any, Any]


class PcSampler:
    """Samples all contexts of this process, from where they are created on; to be made once records are enabled.

    Args:
        cupti: of this process.
        compiled: the compiled probe; its callback is subscribed.
        subscription: of that callback.
        period: a sample is taken each 2 to the power of this cycles, on each multiprocessor.
        hardware_bytes: size of the buffer of the hardware.
        milliseconds: how often CUPTI reads it.

    Attributes:
        lost_images: modules whose images could not be kept.
        missed: contexts that are not sampled, because there are too many.

    Raises:
        MissingRequirement: nothing can be sampled here; the message says why.
    """

    def __init__(
        self,
        cupti: Cupti,
        compiled: ModuleType | None,
        subscription: int,
        period: int,
        hardware_bytes: int,
        milliseconds: int,
    ) -> None:
        why = why_not_sampled(cupti)
        if why is not None:
            raise MissingRequirement(why)
        if compiled is None or not hasattr(compiled, "stalls_begin"):
            raise MissingRequirement("the compiled probe was not built, or is not used (thence doctor says why)")
        self._cupti = cupti
        self._compiled: Any = compiled
        self.lost_images = self.missed = 0
        functions = tuple(map(cupti.address, _CALLS.values()))
        self._compiled.stalls_begin(functions, period, hardware_bytes, milliseconds)
        for what in _WATCHED:
            cupti.enable_callback(subscription, _RESOURCES, what, on=True)
        for context in primary_contexts(load_driver()):
            self._compiled.stalls_context(context)

    def take(self, *, last: bool) -> list[OfContext]:
        """Samples since the last call, by context; `last`: sampling ends."""
        return [self._of_context(**context) for context in self._compiled.stalls_take(last)]

    def images(self) -> list[bytes]:
        """Images of modules that were loaded since the last call."""
        taken, self.lost_images, self.missed = self._compiled.stalls_images()
        return taken  # type: ignore[no-any-return]

    def _of_context(self, *, failed: str | None, code: int, full: int, rows: bytes, **more: Any) -> OfContext:
        error = None
        if failed is not None:
            try:
                self._cupti.check(_CALLS[failed], code)
            except CuptiError as raised:
                error = raised
        return OfContext(error=error, overflows=full, rows=np.frombuffer(rows, ROW), **more)


class SourceLines:
    """Lines of instructions, by the images of their modules.

    Args:
        cupti: of this process.
        most_bytes: of images that are kept; of the others, lines are unknown.

    Attributes:
        seen: CRCs of all images.
        left_out: images with lines that are not kept.
    """

    def __init__(self, cupti: Cupti, most_bytes: int) -> None:
        self._cupti = cupti
        self._room = most_bytes
        self._images: dict[int, bytes] = {}
        self.seen: set[int] = set()
        self.left_out = 0

    def add(self, image: bytes) -> None:
        """Notes an image, and keeps it if it has lines."""
        asked = _CrcParameters(size=_size(_CrcParameters), bytes=len(image), image=image)
        self._cupti.call_with("cuptiGetCubinCrc", asked)
        if asked.crc in self.seen:
            return
        self.seen.add(asked.crc)
        if _HAS_LINES not in image:
            return
        if len(image) > self._room:
            self.left_out += 1
            return
        self._room -= len(image)
        self._images[asked.crc] = image

    def knows(self, cubin: int) -> bool:
        """Whether an image with lines has this CRC."""
        return cubin in self._images

    def line(self, cubin: int, function: bytes, pc: int) -> tuple[str, int] | None:
        """File and line of an instruction of an image that is known; None if it has none. Takes some 12 us."""
        image = self._images[cubin]
        asked = _LineParameters(size=_size(_LineParameters), image=image, function=function, bytes=len(image), pc=pc)
        try:
            self._cupti.call_with("cuptiGetSassToSourceCorrelation", asked)
        except CuptiError:
            return None
        file, folder = _text(asked.file), _text(asked.folder)
        if not asked.line or not file:
            return None
        return (f"{folder}/{file}" if folder and not file.startswith("/") else file), int(asked.line)


def why_not_sampled(cupti: Cupti) -> str | None:
    """Why this libcupti cannot sample program counters, as far as can be told without a device; None if it can."""
    if cupti.version() < OLDEST or not all(map(cupti.has, _CALLS.values())):
        return f"{cupti.path} is older than that of CUDA 12.8"
    return None


def _size(parameters: type[ctypes.Structure]) -> int:
    """The size of a struct without what follows its last field."""
    last = getattr(parameters, parameters._fields_[-1][0])
    return int(last.offset + last.size)


def _text(address: int | None) -> str:
    """A text that CUPTI allocated, and that is freed."""
    if not address:
        return ""
    text = ctypes.string_at(address).decode(errors="replace")
    _FREE(address)
    return text


_FREE = ctypes.CDLL(None).free
_FREE.argtypes = [c_void_p]
_FREE.restype = None
