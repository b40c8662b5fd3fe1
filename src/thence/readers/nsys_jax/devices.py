"""Which device a launching thread drives, as XLA's own thread names say."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from thence.model.tables import Device

if TYPE_CHECKING:
    from collections.abc import Mapping

    import polars as pl

__all__ = ["Launchers", "launchers"]

_PLACE = re.compile(
    r"#global=(?P<device>\d{1,9}),local=(?P<local>\d{1,9}),process=(?P<rank>\d{1,9})"
    r",(?:slice|partition)=\d{1,9}#"
)
_GPU = "('TARGET_INFO_GPU', '{}')"
_NVTX_NAME = "('TARGET_INFO_NVTX_CUDA_DEVICE', 'name')"


@dataclass(frozen=True)
class Launchers:
    """Threads and the devices they launch on.

    Attributes:
        rank: of the process: XLA's process number, 0 where nothing says it.
        process: process id of the launching threads, 0 where unknown.
        devices: (process id, thread id) to device, XLA's local number within the process.
        properties: device to what is known about it.
        warnings: what had to be assumed.
    """

    rank: int = 0
    process: int = 0
    devices: Mapping[tuple[int, int], int] = field(default_factory=dict)
    properties: Mapping[int, Device] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def first(self) -> int:
        """The device that threads without a mapping of their own are taken to launch on."""
        return min([*self.devices.values(), *([] if self.devices else self.properties)], default=0)


def launchers(threads: pl.DataFrame | None, devices: pl.DataFrame | None) -> Launchers:
    """From the archive's thread and device metadata, either of which may be missing.

    Threads named ``XlaLauncher:#global=G,local=L,process=P,slice=S#`` tell their device and rank;
    NVTX names of devices (``Xla:#global=...#``) tell the same where no thread does.
    """
    places: dict[tuple[int, int], int] = {}
    ranks: list[int] = []
    for process, thread, name in _rows(threads, ("PID", "TID", "Name")):
        match = (
            _PLACE.search(name)
            if isinstance(name, str) and name.startswith("XlaLauncher:")
            else None
        )
        if match and _is_id(process) and _is_id(thread):
            places[process, thread] = int(match["local"])
            ranks.append(int(match["rank"]))
    named = [_PLACE.search(str(row[0])) for row in _rows(devices, (_NVTX_NAME,))]
    ranks += [int(match["rank"]) for match in named if match]
    rank = ranks[0] if ranks else 0
    warnings = []
    if not ranks:
        warnings.append("no thread or device tells its rank: taken as rank 0")
    elif len(set(ranks)) > 1:
        warnings.append(
            f"its threads belong to the ranks {sorted(set(ranks))}; shown as rank {rank}"
        )
    process = next(iter(places), (0, 0))[0]
    return Launchers(rank, process, places, _properties(devices, rank), tuple(warnings))


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 1 << 63


def _rows(frame: pl.DataFrame | None, columns: tuple[str, ...]) -> list[tuple[Any, ...]]:
    if frame is None or not set(columns) <= set(frame.columns):
        return []
    return frame.select(columns).rows()


def _properties(devices: pl.DataFrame | None, rank: int) -> dict[int, Device]:
    keys = [
        _GPU.format(key)
        for key in ("name", "totalMemory", "smCount", "computeMajor", "computeMinor")
    ]
    found = {}
    for number, (label, *values) in enumerate(_rows(devices, (_NVTX_NAME, *keys))):
        match = _PLACE.search(str(label))
        device = int(match["local"]) if match else number
        name, memory, multiprocessors, major, minor = values
        known = isinstance(major, int) and isinstance(minor, int)
        found[device] = Device(
            rank,
            device,
            name if isinstance(name, str) else None,
            memory if isinstance(memory, int) else None,
            multiprocessors if isinstance(multiprocessors, int) else None,
            f"{major}.{minor}" if known else None,
        )
    return found
