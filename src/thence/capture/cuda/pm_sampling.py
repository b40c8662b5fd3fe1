"""Sampling of hardware counters of a whole device by CUPTI ("PM sampling"), beside records of activities.

The hardware adds a sample to a buffer after each interval, whatever runs; nothing of the program is slowed down for
it. When a window is over, libcupti decodes the buffer into an image in memory, from which the amounts of each sample
are read. Times of samples are on the clock of activity records. A long window can be read part by part while it lasts.

The buffer could also be a ring that holds the latest samples (KEEP_LATEST). But of a ring that has wrapped, CUPTI 13.0
decodes only what came after it wrapped the last time: between none and all of its room.

Structs are those of ``cupti_pmsampling.h`` and ``cupti_profiler_host.h`` of CUDA 12.8 to 13.5, in which no field moved;
each states its size, so that later versions, which add fields at the end, know what they were given.
"""

from __future__ import annotations

import ctypes
import time
from ctypes import POINTER, addressof, byref, c_char_p, c_int, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from thence.capture.cuda.cupti import CuptiError
from thence.errors import MissingRequirement

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import ModuleType

    from thence.capture.cuda.cupti import Cupti

OLDEST = 26
"""CUPTI_API_VERSION of CUDA 12.8: before, the buffer of the hardware had no mode."""
_HOST_LIBRARY = "libnvperf_host.so"
_PM_SAMPLING = 1
"""CUPTI_PROFILER_TYPE_PM_SAMPLING"""
_TIME_INTERVAL, _KEEP_OLDEST = 1, 0
"""CUPTI_PM_SAMPLING_TRIGGER_MODE_GPU_TIME_INTERVAL, and CUPTI_PM_SAMPLING_HARDWARE_BUFFER_APPEND_MODE_KEEP_OLDEST"""
_OUT_OF_MEMORY = 8
"""CUPTI_ERROR_OUT_OF_MEMORY: decoding a buffer that was full returns it, and no samples."""
_PIECE, _REST_SECONDS = 32, 1e-4
"""Samples that are read without another thread of Python running, where there is no compiled probe, and the time after
them: some 0.7 ms, and 0.1 ms."""


class _Parameters(ctypes.Structure):
    """The one argument of a call: it begins with its size, which leaves out what follows the last field."""

    def __init__(self, **values: Any) -> None:
        last = getattr(type(self), self._fields_[-1][0])
        super().__init__(size=last.offset + last.size, **values)


def _struct(**fields: Any) -> Any:
    known = [("size", c_size_t), ("private", c_void_p), *fields.items()]
    return type("Parameters", (_Parameters,), {"_fields_": known})


_TEXTS = POINTER(c_char_p)
_Initialize = _struct()
_ChipName = _struct(device=c_size_t, name=c_char_p)
_Availability = _struct(device=c_size_t, bytes=c_size_t, image=c_void_p)
_HostInitialize = _struct(type=c_int, chip=c_char_p, availability=c_void_p, host=c_void_p)
_Host = _struct(host=c_void_p)
_AddMetrics = _struct(host=c_void_p, metrics=_TEXTS, count=c_size_t)
_ConfigImageSize = _struct(host=c_void_p, bytes=c_size_t)
_ConfigImage = _struct(host=c_void_p, bytes=c_size_t, image=c_void_p)
_Passes = _struct(bytes=c_size_t, image=c_void_p, passes=c_size_t)
_Enable = _struct(device=c_size_t, sampler=c_void_p)
_Sampler = _struct(sampler=c_void_p)
_SetConfig = _struct(
    sampler=c_void_p,
    bytes=c_size_t,
    image=c_void_p,
    hardware_bytes=c_size_t,
    interval=c_uint64,
    trigger=c_int,
    append=c_int,
)
_DataSize = _struct(sampler=c_void_p, metrics=_TEXTS, count=c_size_t, samples=c_uint32, bytes=c_size_t)
_DataInitialize = _struct(sampler=c_void_p, bytes=c_size_t, image=c_void_p)
_Decode = _struct(sampler=c_void_p, image=c_void_p, bytes=c_size_t, reason=c_int, overflow=c_uint8)
_DataInfo = _struct(image=c_void_p, bytes=c_size_t, total=c_size_t, populated=c_size_t, completed=c_size_t)
_SampleInfo = _struct(sampler=c_void_p, image=c_void_p, bytes=c_size_t, index=c_size_t, start=c_uint64, end=c_uint64)
_Evaluate = _struct(
    host=c_void_p, image=c_void_p, bytes=c_size_t, index=c_size_t, metrics=_TEXTS, count=c_size_t, values=c_void_p
)
"""What the functions take, by the fields of CUPTI's structs, after their size and a pointer that is 0."""


class Room(NamedTuple):
    """Memory for a window: its samples at most, bytes of each in the buffer of the hardware, and bytes of all at most.

    If the buffer of the hardware overflows, the window is lost. If decoded samples do not fit beside it, fewer do.
    """

    samples: int
    sample_bytes: int
    most_bytes: int


class Samples(NamedTuple):
    """Samples of a window: start and end (ns on CUPTI's clock), amounts by sample and counter; whether it is lost."""

    start: np.ndarray[Any, Any]
    end: np.ndarray[Any, Any]
    values: np.ndarray[Any, Any]
    overflow: bool


class PmSampler:
    """Samples the counters of one device in one window; one sampler of a device exists at a time on a machine.

    Args:
        cupti: of this process.
        device: CUDA's number of it; the process has a context on it.
        wanted: CUPTI's metrics by the names of counters.
        interval_ns: from sample to sample.
        room: memory for the samples.
        compiled: the compiled probe, which reads samples without the GIL; None if there is none.

    Attributes:
        metrics: those of `wanted` that this chip can sample together.
        left_out: why the others are not sampled, by counter.
        samples: the most that fit.
        image_bytes: memory of the decoded samples.

    Raises:
        MissingRequirement: counters cannot be sampled here; the message says why.
    """

    def __init__(
        self,
        cupti: Cupti,
        device: int,
        wanted: Mapping[str, str],
        interval_ns: int,
        room: Room,
        compiled: ModuleType | None = None,
    ) -> None:
        why = why_not_sampled(cupti)
        if why is not None:
            raise MissingRequirement(why)
        self._cupti = cupti
        self._compiled = compiled
        self._host: int | None = None
        self._sampler: int | None = None
        self._taken = False
        self.image_bytes = 0
        cupti.call_with("cuptiProfilerInitialize", _Initialize())
        self._chip = self._named(device)
        self._availability = self._available(device)
        try:
            self.metrics, self.left_out = self._choose(wanted)
            self._names = _texts(self.metrics.values())
            self._config = self._configured(self.metrics)
            self._enable(device, interval_ns, room)
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Begins the window."""
        self._cupti.call_with("cuptiPmSamplingStart", _Sampler(sampler=self._sampler))

    def stop(self) -> None:
        """Ends the window; its samples are read by `take`."""
        self._cupti.call_with("cuptiPmSamplingStop", _Sampler(sampler=self._sampler))

    def take(self) -> Samples:
        """The samples since the last call, or since the beginning; after an overflow, there are no more.

        The first one of the window is left out: it begins where the last window on the device ended. While the window
        lasts, that works for intervals of 100 us and more: at 20 us, most samples were lost.
        """
        if self._taken:
            self._clear()
        image, size = self._image.ctypes.data, self.image_bytes
        decode = _Decode(sampler=self._sampler, image=image, bytes=size)
        info = _DataInfo(image=image, bytes=size)
        try:
            self._cupti.call_with("cuptiPmSamplingDecodeData", decode)
        except CuptiError as error:
            if error.code != _OUT_OF_MEMORY:
                raise
            decode.overflow = 1
        self._cupti.call_with("cuptiPmSamplingGetCounterDataInfo", info)
        start, end, values = self._evaluated(int(info.completed))
        first = 0 if self._taken or not len(start) else 1
        self._taken = self._taken or first == 1
        return Samples(start[first:], end[first:], values[first:], bool(decode.overflow))

    def close(self) -> None:
        """Gives back the device's counters; a second call does nothing. The sampler cannot be used any more."""
        sampler, self._sampler = self._sampler, None
        host, self._host = self._host, None
        try:
            if sampler is not None:
                self._cupti.call_with("cuptiPmSamplingDisable", _Sampler(sampler=sampler))
        finally:
            if host is not None:
                self._cupti.call_with("cuptiProfilerHostDeinitialize", _Host(host=host))

    def _named(self, device: int) -> bytes:
        chip = _ChipName(device=device)
        self._cupti.call_with("cuptiDeviceGetChipName", chip)
        return bytes(chip.name or b"")

    def _available(self, device: int) -> np.ndarray[Any, Any]:
        asked = _Availability(device=device)
        self._cupti.call_with("cuptiPmSamplingGetCounterAvailability", asked)
        image = np.zeros(asked.bytes, dtype=np.uint8)
        asked.image = image.ctypes.data
        self._cupti.call_with("cuptiPmSamplingGetCounterAvailability", asked)
        return image

    def _choose(self, wanted: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
        """The metrics that can be sampled together in the order of `wanted`, and why the others cannot be."""
        if self._passes(wanted) == 1:
            return dict(wanted), {}
        chosen: dict[str, str] = {}
        left_out = {}
        for name, metric in wanted.items():  # one that a chip lacks fails the whole set
            together = self._passes({**chosen, name: metric})
            if together == 1:
                chosen[name] = metric
            elif together is None:
                left_out[name] = f"{self._chip.decode(errors='replace')} cannot sample {metric}"
            else:
                left_out[name] = f"{metric} does not fit into one pass with the other counters"
        if not chosen:
            raise MissingRequirement(f"the chip of this device ({self._chip.decode()}) can sample none of them")
        return chosen, left_out

    def _passes(self, metrics: Mapping[str, str]) -> int | None:
        """Passes that a set of metrics needs; None if the chip lacks one of them."""
        try:
            config = self._configured(metrics)
            passes = _Passes(bytes=len(config), image=config.ctypes.data)
            self._cupti.call_with("cuptiProfilerHostGetNumOfPasses", passes)
        except CuptiError:
            return None
        return int(passes.passes)

    def _configured(self, metrics: Mapping[str, str]) -> np.ndarray[Any, Any]:
        """The image that configures a set of metrics, on a host object of its own, which replaces the last one."""
        host, self._host = self._host, None
        if host is not None:
            self._cupti.call_with("cuptiProfilerHostDeinitialize", _Host(host=host))
        made = _HostInitialize(type=_PM_SAMPLING, chip=self._chip, availability=self._availability.ctypes.data)
        self._cupti.call_with("cuptiProfilerHostInitialize", made)
        self._host = made.host
        names = _texts(metrics.values())
        added = _AddMetrics(host=self._host, metrics=names, count=len(names))
        self._cupti.call_with("cuptiProfilerHostConfigAddMetrics", added)
        size = _ConfigImageSize(host=self._host)
        self._cupti.call_with("cuptiProfilerHostGetConfigImageSize", size)
        config = np.zeros(size.bytes, dtype=np.uint8)
        image = _ConfigImage(host=self._host, bytes=len(config), image=config.ctypes.data)
        self._cupti.call_with("cuptiProfilerHostGetConfigImage", image)
        return config

    def _enable(self, device: int, interval_ns: int, room: Room) -> None:
        enabled = _Enable(device=device)
        self._cupti.call_with("cuptiPmSamplingEnable", enabled)
        self._sampler = enabled.sampler
        settings = _SetConfig(
            sampler=self._sampler,
            bytes=len(self._config),
            image=self._config.ctypes.data,  # libcupti keeps the address
            hardware_bytes=room.samples * room.sample_bytes,
            interval=interval_ns,
            trigger=_TIME_INTERVAL,
            append=_KEEP_OLDEST,
        )
        self._cupti.call_with("cuptiPmSamplingSetConfig", settings)
        self.samples, self.image_bytes = room.samples, self._image_size(room.samples)
        left = max(1, room.most_bytes - room.samples * room.sample_bytes)
        if self.image_bytes > left:
            self.samples = self.samples * left // self.image_bytes
            self.image_bytes = self._image_size(self.samples)
        self._image = np.empty(self.image_bytes, dtype=np.uint8)
        self._clear()

    def _clear(self) -> None:
        made = _DataInitialize(sampler=self._sampler, bytes=self.image_bytes, image=self._image.ctypes.data)
        self._cupti.call_with("cuptiPmSamplingCounterDataImageInitialize", made)

    def _image_size(self, samples: int) -> int:
        size = _DataSize(sampler=self._sampler, metrics=self._names, count=len(self._names), samples=samples)
        self._cupti.call_with("cuptiPmSamplingGetCounterDataSize", size)
        return int(size.bytes)

    def _evaluated(self, count: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        start, end = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        values = np.full((count, len(self._names)), np.nan)
        image = self._image.ctypes.data
        info = _SampleInfo(sampler=self._sampler, image=image, bytes=self.image_bytes)
        amounts = _Evaluate(host=self._host, image=image, bytes=self.image_bytes, metrics=self._names)
        amounts.count = len(self._names)
        functions = [self._cupti.address(name) for name in _OF_SAMPLES]
        read = getattr(self._compiled, "read_samples", None)  # one that was built for an older thence lacks it
        if read is not None:
            columns = [array.ctypes.data for array in (start, end, values)]
            code = read(functions[0], addressof(info), functions[1], addressof(amounts), count, *columns)
        else:
            code = _read_samples(functions, info, amounts, start, end, values)
        self._cupti.check(_OF_SAMPLES[1], code)
        return start, end, values


_OF_SAMPLES = ("cuptiPmSamplingCounterDataGetSampleInfo", "cuptiProfilerHostEvaluateToGpuValues")
"""The functions that are called for each sample."""


def _read_samples(functions: list[int], info: Any, amounts: Any, start: Any, end: Any, values: Any) -> int:
    """What ``read_samples`` of the compiled probe does. It keeps the GIL for a piece of samples at a time.

    If each call let it go, another thread that computes in Python would keep it for 5 ms after each.
    """
    ask, evaluate = (ctypes.PYFUNCTYPE(c_int, c_void_p)(function) for function in functions)
    row = values.shape[1] * values.itemsize
    for first in range(0, len(start), _PIECE):
        for index in range(first, min(first + _PIECE, len(start))):
            info.index = amounts.index = index
            amounts.values = values.ctypes.data + index * row
            code = ask(byref(info)) or evaluate(byref(amounts))
            if code:
                return int(code)
            start[index], end[index] = info.start, info.end
        time.sleep(_REST_SECONDS)
    return 0


def why_not_sampled(cupti: Cupti) -> str | None:
    """Why this libcupti cannot sample counters, as far as can be told without a device; None if it can."""
    if cupti.version() < OLDEST or not cupti.has("cuptiPmSamplingEnable"):
        return f"{cupti.path} is older than that of CUDA 12.8"
    if "/" in cupti.path and not any(Path(cupti.path).parent.glob(f"{_HOST_LIBRARY}*")):
        return (
            f"{_HOST_LIBRARY} is not beside {cupti.path}: the wheel nvidia-cuda-cupti has both, and so has the toolkit"
        )
    return None


def _texts(texts: Iterable[str]) -> Any:
    encoded = [text.encode() for text in texts]
    return (c_char_p * len(encoded))(*encoded)
