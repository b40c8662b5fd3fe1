"""Samples of the memory of this process, with a driver and an NVML that are made of Python."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Any

import pytest

from thence.capture.cuda import nvml
from thence.capture.cuda.process_memory import ProcessMemorySamples


class FakeDriver:
    """Two devices, of which the program uses the second: CUDA's number 1, at bus ``0000:0A``."""

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 2
        return 0

    def cuDevicePrimaryCtxGetState(self, device: Any, _flags: Any, active: Any) -> int:  # noqa: N802
        active._obj.value = device.value == 1
        return 0

    def cuDeviceGetPCIBusId(self, text: Any, _size: Any, device: Any) -> int:  # noqa: N802
        text.value = b"0000:0A" if device.value == 1 else b"0000:0B"
        return 0


class FakeNvml:
    """Devices by bus.

    Attributes:
        processes: numbers of the processes on the device, and bytes that they hold.
    """

    def __init__(self) -> None:
        self.processes: list[tuple[int, int]] = []

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus: Any, handle: Any) -> int:  # noqa: N802
        handle._obj.value = 7 if bus.value == b"0000:0A" else 0
        return 0 if handle._obj.value else 6

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, rows: Any) -> int:  # noqa: N802
        assert handle.value == 7
        if count._obj.value < len(self.processes):
            return 7  # NVML_ERROR_INSUFFICIENT_SIZE
        count._obj.value = len(self.processes)
        # nvmlProcessInfo_v2_t: unsigned int, 4 bytes of padding, unsigned long long, two unsigned int
        content = b"".join(struct.pack("=I4xQII", pid, used, 0xFFFFFFFF, 0xFFFFFFFF) for pid, used in self.processes)
        ctypes.memmove(rows, content, len(content))
        return 0


@pytest.fixture
def moment(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(nvml, "load_driver", FakeDriver)
    monkeypatch.setattr(nvml.time, "monotonic", lambda: now[0])
    return now


def test_memory_is_that_of_this_process_as_the_driver_counts_it(moment: list[float]) -> None:
    driver = FakeNvml()
    samples = ProcessMemorySamples(driver)
    unknown = (1 << 64) - 1
    for processes in (
        [(1, 100), (os.getpid(), 5 << 30), (2, 300)],
        [(1, 100)],  # not shown, as in containers
        [(os.getpid(), unknown)],
        [(os.getpid(), 6 << 30)],
        [(1, 1)] * 1000,  # more than there is room for
    ):
        driver.processes = processes
        samples.look()
        moment[0] += 1
    (of_device,) = samples.facts()
    assert (of_device["device"], of_device["bytes"]) == (1, [5 << 30, 6 << 30])


@pytest.mark.usefixtures("moment")
def test_a_driver_without_the_function_has_no_memory_of_processes() -> None:
    class Older(FakeNvml):
        nvmlDeviceGetComputeRunningProcesses_v3 = property()  # noqa: N815

    samples = ProcessMemorySamples(Older())
    samples.look()
    assert samples.facts() == []
