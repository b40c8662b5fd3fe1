"""The structs of PM sampling, against what the C compiler sees in CUPTI's headers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers import DATA
from thence.capture.cuda import pm_sampling

HEADERS: dict[str, dict[str, list[str]]] = json.loads((DATA / "cupti" / "pm_sampling.json").read_text())
OURS: dict[str, Any] = {
    "Profiler_Initialize": pm_sampling._Initialize,
    "Device_GetChipName": pm_sampling._ChipName,
    "PmSampling_GetCounterAvailability": pm_sampling._Availability,
    "Profiler_Host_Initialize": pm_sampling._HostInitialize,
    "Profiler_Host_Deinitialize": pm_sampling._Host,
    "Profiler_Host_ConfigAddMetrics": pm_sampling._AddMetrics,
    "Profiler_Host_GetConfigImageSize": pm_sampling._ConfigImageSize,
    "Profiler_Host_GetConfigImage": pm_sampling._ConfigImage,
    "Profiler_Host_GetNumOfPasses": pm_sampling._Passes,
    "PmSampling_Enable": pm_sampling._Enable,
    "PmSampling_Disable": pm_sampling._Sampler,
    "PmSampling_Start": pm_sampling._Sampler,
    "PmSampling_Stop": pm_sampling._Sampler,
    "PmSampling_SetConfig": pm_sampling._SetConfig,
    "PmSampling_GetCounterDataSize": pm_sampling._DataSize,
    "PmSampling_CounterDataImage_Initialize": pm_sampling._DataInitialize,
    "PmSampling_DecodeData": pm_sampling._Decode,
    "PmSampling_GetCounterDataInfo": pm_sampling._DataInfo,
    "PmSampling_CounterData_GetSampleInfo": pm_sampling._SampleInfo,
    "Profiler_Host_EvaluateToGpuValues": pm_sampling._Evaluate,
}


def test_there_are_structs_of_each_version_since_cuda_12_8() -> None:
    versions = {version for layouts in HEADERS.values() for of_layout in layouts.values() for version in of_layout}
    assert {version.rpartition(".")[0] for version in versions} == {
        "12.8", "12.9", "13.0", "13.1", "13.2", "13.3", "13.4", "13.5",
    }  # fmt: skip
    assert len(HEADERS) == len(OURS)


@pytest.mark.parametrize("name", OURS)
def test_structs_are_those_of_the_headers(name: str) -> None:
    """Field by field; a layout of later versions may go on after ours, whose size we state."""
    ours = [getattr(OURS[name], field) for field, _ in OURS[name]._fields_]
    for layout in HEADERS[f"CUpti_{name}_Params"]:
        size, *fields = layout.split()
        offsets = [int(field.partition("=")[2]) for field in fields]
        assert [field.offset for field in ours] == offsets[: len(ours)]
        assert OURS[name]().size in (int(size), offsets[len(ours)] if len(offsets) > len(ours) else -1)
