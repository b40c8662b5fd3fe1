"""Samples of SM clocks, with a driver and an NVML that are made of Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fake_nvml import FakeNvml
from thence.capture.cuda import nvml
from thence.capture.cuda.nvml import ClockSamples

if TYPE_CHECKING:
    import pytest


class ClocksNvml(FakeNvml):
    """Devices by bus; with each sample the clock rises by 1 MHz, and energy by 75 J. Power is 300 W."""

    def __init__(self) -> None:
        self.mhz = 1000
        self.millijoules = 5_000_000

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: Any, clock: Any) -> int:  # noqa: N802
        assert (handle.value, kind.value) == (7, 1)
        clock._obj.value = self.mhz
        self.mhz += 1
        return 0

    def nvmlDeviceGetPowerUsage(self, handle: Any, power: Any) -> int:  # noqa: N802
        power._obj.value = 300_000
        return 0 if handle.value == 7 else 1

    def nvmlDeviceGetTotalEnergyConsumption(self, _handle: Any, energy: Any) -> int:  # noqa: N802
        energy._obj.value = self.millijoules
        self.millijoules += 75_000
        return 0


def test_devices_in_use_are_sampled_at_most_four_times_a_second(moment: list[float]) -> None:
    samples = ClockSamples(ClocksNvml())
    for step in range(11):  # each tenth of a second: at 0, 0.3, 0.6 and 0.9
        moment[0] = 100 + step / 10
        samples.look()
    (of_device,) = samples.facts()
    assert of_device["device"] == 1
    assert of_device["mhz"] == [1000, 1001, 1002, 1003]
    assert of_device["times_ns"] == sorted(of_device["times_ns"])
    assert of_device["milliwatts"] == [300_000] * 4


def test_energy_between_two_samples_is_a_row(moment: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    unix = [1000]
    monkeypatch.setattr(nvml.time, "time_ns", lambda: unix[0])
    driver = ClocksNvml()
    samples = ClockSamples(driver)
    for _ in range(3):
        samples.look()
        moment[0] += 0.3
        unix[0] += 300
    rows = {name: column.tolist() for name, column in samples.take_energy().items()}
    assert rows == {"device": [1, 1], "start": [1000, 1300], "end": [1300, 1600], "energy_joules": [75.0, 75.0]}
    driver.millijoules = 0  # the driver was loaded anew: what was used meanwhile is not known
    samples.look()
    assert len(samples.take_energy()["start"]) == 0


def test_a_device_that_does_not_tell_its_energy_has_clocks_alone(
    moment: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(ClocksNvml, "nvmlDeviceGetTotalEnergyConsumption")
    monkeypatch.delattr(ClocksNvml, "nvmlDeviceGetPowerUsage")
    samples = ClockSamples(ClocksNvml())
    for _ in range(2):
        samples.look()
        moment[0] += 0.3
    (of_device,) = samples.facts()
    assert (of_device["mhz"], of_device["milliwatts"]) == ([1000, 1001], [None, None])
    assert len(samples.take_energy()["start"]) == 0


def test_a_long_recording_keeps_few_samples_over_all_of_its_time(moment: list[float]) -> None:
    samples = ClockSamples(ClocksNvml())
    for _ in range(3000):
        moment[0] += 0.25
        samples.look()
    (kept,) = (of_device["mhz"] for of_device in samples.facts())
    # 750 s: 513 samples in the first 128 s, then every other one is dropped and half as many are taken.
    assert 257 <= len(kept) <= 512
    assert kept[0] == 1000
    assert kept == sorted(kept)


def test_without_nvml_there_are_none(moment: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_name: str) -> None:
        raise OSError

    monkeypatch.setattr(nvml.ctypes, "CDLL", absent)
    samples = ClockSamples()
    samples.look()
    moment[0] += 10
    samples.look()
    assert samples.facts() == []
