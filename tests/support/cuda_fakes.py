"""A CUPTI and a driver that only pretend, for tests without a GPU."""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING, Any

from thence.capture.cuda import cupti

if TYPE_CHECKING:
    from collections.abc import Callable

KERNEL_BYTES = 216  # CUpti_ActivityKernel10, CUDA 13.0
COPY_BYTES = 96  # CUpti_ActivityMemcpy6 rounded up


class FakeCupti:
    """Gives records of the kernels that were `launched`, when it is flushed."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.waiting: list[bytes] = []
        self.lost = 0
        self.known_version = 130000
        self.taken = False
        self.enabled = False
        self._names: dict[str, Any] = {}

    def launched(self, name: str, start: int, end: int, kind: int = 10) -> None:
        if not self.enabled:
            return
        text = self._names.setdefault(name, ctypes.create_string_buffer(name.encode()))
        record = bytearray(KERNEL_BYTES if kind == 10 else COPY_BYTES)
        struct.pack_into("<I", record, 0, kind)
        struct.pack_into("<QQ", record, 16, start, end)
        if kind == 10:
            struct.pack_into("<Q", record, 104, ctypes.addressof(text))
        self.waiting.append(bytes(record))

    path = "/w/libcupti.so.13"

    def has(self, function: str) -> bool:
        return function != "cuptiGetGraphExecId"

    def graph_node_id(self, node: int) -> int:
        return 1 << 32 | node

    def version(self) -> int:
        return self.known_version

    def subscribe(self) -> int:
        if self.taken:
            raise cupti.CuptiError("cuptiSubscribe", 39, "taken")
        self.calls.append("subscribe")
        return 5

    def unsubscribe(self, handle: int) -> None:
        assert handle == 5
        self.calls.append("unsubscribe")

    def register(self, requested: Any, completed: Any) -> None:
        self._requested, self._completed = requested, completed

    def enable(self, kind: int) -> None:
        self.calls.append(f"enable {kind}")
        self.enabled = True

    def disable(self, kind: int) -> None:
        self.calls.append(f"disable {kind}")
        self.enabled = False

    def finalize(self) -> None:
        self.calls.append("finalize")

    def dropped(self, _context: int | None, _stream: int) -> int:
        lost, self.lost = self.lost, 0
        return lost

    def flush(self, *, unfinished: bool) -> None:
        assert unfinished
        data, self.waiting = b"".join(self.waiting), []
        if not data:
            return
        buffer, size, most = (ctypes.c_size_t * 1)(), (ctypes.c_size_t * 1)(), [0]
        self._requested(buffer, size, most)
        assert size[0] >= len(data)
        ctypes.memmove(buffer[0], data, len(data))
        self._completed(None, 0, buffer[0], size[0], len(data))

    def next_record(self, buffer: int, valid_bytes: int, record: int | None) -> int | None:
        assert record is not None
        kind = struct.unpack("<I", ctypes.string_at(record, 4))[0]
        after = record + (KERNEL_BYTES if kind == 10 else COPY_BYTES)
        return after if after < buffer + valid_bytes else None


class FakeDriver:
    """libcuda's events; notes contexts and calls."""

    def __init__(self, launched: Callable[[str], None] = str) -> None:
        self.launched = launched
        self.log: list[str] = []
        self.context = 0xC1
        self.failing: str | None = None
        self.capability = (9, 0)

    def _code(self, name: str) -> int:
        self.log.append(name)
        return 700 if name == self.failing else 0

    def cuStreamGetCtx(self, _stream: Any, context: Any) -> int:  # noqa: N802
        context._obj.value = self.context
        return self._code("cuStreamGetCtx")

    def cuCtxPushCurrent_v2(self, context: Any) -> int:  # noqa: N802
        return self._code(f"push {context.value:#x}")

    def cuCtxPopCurrent_v2(self, _context: Any) -> int:  # noqa: N802
        return self._code("pop")

    def cuEventCreate(self, event: Any, flags: Any) -> int:  # noqa: N802
        assert flags.value == 0  # with timing
        event._obj.value = 0xE0 + len(self.log)
        return self._code("cuEventCreate")

    def cuEventRecord(self, event: Any, stream: Any) -> int:  # noqa: N802
        return self._code(f"record {event.value:#x} on {stream.value or 0}")

    def cuEventDestroy_v2(self, event: Any) -> int:  # noqa: N802
        return self._code(f"destroy {event.value:#x}")

    def cuEventSynchronize(self, event: Any) -> int:  # noqa: N802
        return self._code(f"wait for {event.value:#x}")

    def cuEventElapsedTime(self, time: Any, start: Any, end: Any) -> int:  # noqa: N802
        assert start.value < end.value
        time._obj.value = 1.25
        return self._code("elapsed")

    def cuInit(self, _flags: Any) -> int:  # noqa: N802
        return self._code("cuInit")

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
        version._obj.value = 13000
        return self._code("cuDriverGetVersion")

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 2
        return self._code("cuDeviceGetCount")

    def cuDeviceGetName(self, name: Any, size: Any, device: Any) -> int:  # noqa: N802
        assert size.value == len(name)
        name.value = f"GPU {device.value}".encode()
        return self._code("cuDeviceGetName")

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:  # noqa: N802
        context._obj.value = self.context
        return self._code(f"retain {device.value}")

    def cuCtxSetCurrent(self, context: Any) -> int:  # noqa: N802
        return self._code(f"set {context.value:#x}")

    def cuCtxSynchronize(self) -> int:  # noqa: N802
        return self._code("cuCtxSynchronize")

    def cuGraphCreate(self, graph: Any, _flags: Any) -> int:  # noqa: N802
        graph._obj.value = 0x6A
        return self._code("cuGraphCreate")

    def cuGraphAddEmptyNode(  # noqa: N802
        self, node: Any, graph: Any, before: Any, count: Any
    ) -> int:
        assert (graph.value, before, count.value) == (0x6A, None, 0)
        node._obj.value = 0x6B
        return self._code("cuGraphAddEmptyNode")

    def cuCtxGetDevice(self, device: Any) -> int:  # noqa: N802
        device._obj.value = 1
        return self._code("cuCtxGetDevice")

    def cuDeviceGetAttribute(self, number: Any, attribute: Any, device: Any) -> int:  # noqa: N802
        number._obj.value = {75: self.capability[0], 76: self.capability[1]}[attribute.value]
        return self._code(f"attribute of {device.value}")

    def cuModuleLoadData(self, module: Any, code: Any) -> int:  # noqa: N802
        module._obj.value = 0xA0
        self.code = code.value.decode()
        return self._code("cuModuleLoadData")

    def cuModuleGetFunction(self, function: Any, module: Any, name: Any) -> int:  # noqa: N802
        assert module.value == 0xA0
        assert f".entry {name.value.decode()}(" in self.code
        self.function = name.value.decode()
        function._obj.value = 0xF0
        return self._code("cuModuleGetFunction")

    def cuLaunchKernel(self, function: Any, *rest: Any) -> int:  # noqa: N802
        *shape, shared, stream, parameters, extra = rest
        assert [value.value for value in shape] == [1] * 6
        assert (function.value, shared.value, extra) == (0xF0, 0, None)
        self.launched(self.function)
        duration = ctypes.c_uint64.from_address(parameters[0]).value
        return self._code(f"launch for {duration} on {stream.value or 0}")

    def cuGetErrorString(self, code: int, text: Any) -> int:  # noqa: N802
        text._obj.value = b"an illegal memory access" if code == 700 else None
        return 0
