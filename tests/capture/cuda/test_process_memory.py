"""Samples of the memory of this process, with a driver and an NVML that are made of Python."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Any

import pytest

from fake_nvml import FakeNvml
from thence.capture.cuda.nvml import ProcessMemorySamples


class MemoryNvml(FakeNvml):
    """Devices by bus.

    Attributes:
        processes: numbers of the processes on the device, and bytes that they hold.
    """

    def __init__(self) -> None:
        self.processes: list[tuple[int, int]] = []

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, rows: Any) -> int:  # noqa: N802
        assert handle.value == 7
        if count._obj.value < len(self.processes):
            return 7  # NVML_ERROR_INSUFFICIENT_SIZE
        count._obj.value = len(self.processes)
        # nvmlProcessInfo_v2_t: unsigned int, 4 bytes of padding, unsigned long long, two unsigned int
        content = b"".join(struct.pack("=I4xQII", pid, used, 0xFFFFFFFF, 0xFFFFFFFF) for pid, used in self.processes)
        ctypes.memmove(rows, content, len(content))
        return 0


def test_memory_is_that_of_this_process_as_the_driver_counts_it(moment: list[float]) -> None:
    driver = MemoryNvml()
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
    class Older(MemoryNvml):
        nvmlDeviceGetComputeRunningProcesses_v3 = property()  # noqa: N815

    samples = ProcessMemorySamples(Older())
    samples.look()
    assert samples.facts() == []
