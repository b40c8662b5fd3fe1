"""What tests of samples through NVML share."""

from __future__ import annotations

import pytest

from fake_nvml import FakeDriver
from thence.capture.cuda import nvml


@pytest.fixture
def moment(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of `time.monotonic`, which the test moves, with the driver."""
    now = [100.0]
    monkeypatch.setattr(nvml, "load_driver", FakeDriver)
    monkeypatch.setattr(nvml.time, "monotonic", lambda: now[0])
    return now
