"""The trial of `thence doctor` with the tests' libcupti."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recorder_programs import program

if TYPE_CHECKING:
    from pathlib import Path


def test_counters_are_tried_as_recordings_sample_them(tmp_path: Path) -> None:
    said = program(
        """
        from thence.doctor.probe import _counters
        from thence.errors import MissingRequirement
        assert "tensor_cycles" in _counters()["sampled"]
        for call, code in (("cuptiPmSamplingEnable", 43), ("cuptiPmSamplingStart", 26)):
            fake.fail(call, code)
            try:
                _counters()
            except MissingRequirement as error:
                print(error.code, error)
            fake.fail(call, 0)
        assert not fake.library.fake_pm_hosts() and not fake.library.fake_pm_enabled()
        """,
        tmp_path,
    )
    mig, busy = said.stdout.splitlines()
    assert mig.startswith("43 cuptiPmSamplingEnable failed")
    assert "profiling is not supported on this MIG device" in mig
    assert busy.startswith("26 cuptiPmSamplingStart failed")
    assert "another process, samples the counters of this device" in busy
