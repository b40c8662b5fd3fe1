"""The metadata of a Kineto file: versions, devices, process groups, rank and clock."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from thence.model.tables import Device

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["accelerator", "described_devices", "epoch_ns", "facts", "process_groups", "rank_of"]

_FACTS = (
    "schemaVersion", "trace_id", "cupti_version", "cuda_runtime_version", "cuda_driver_version",
    "hip_runtime_version", "hip_driver_version", "record_shapes", "with_stack", "profile_memory",
    "with_modules", "with_flops", "traceName",
)  # fmt: skip
_HIP_CALL = re.compile(r"hip[A-Z]\w*")
_BY_CATEGORY = ("mtia", "xpu", "privateuse1", "cuda")
_RANK_IN_NAME = re.compile(r"rank[-_ ]?(\d+)", re.IGNORECASE)
# File names that tensorboard_trace_handler writes if the name of the worker is its rank.
_RANK_AS_WORKER = re.compile(r"(\d{1,9})\.[\w-]+\.pt\.trace\.json")


def facts(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Versions and settings; host names and job variables are left out."""
    result = {
        key: metadata[key] for key in _FACTS if isinstance(metadata.get(key), str | int | float)
    }
    distributed = _mapping(metadata.get("distributedInfo"))
    for key in ("backend", "world_size", "nccl_version"):
        if isinstance(distributed.get(key), str | int):
            result[key] = distributed[key]
    return result


def accelerator(
    metadata: Mapping[str, Any], categories: Iterable[str], names: Iterable[str]
) -> dict[str, str]:
    """The platform that the program used, as the fact ``accelerator``: rocm, cuda, xpu, mtia or privateuse1.

    Kineto for ROCm writes HIP's API calls under the category ``cuda_runtime``, so rocm is also recognised by the
    names of the calls.

    Args:
        metadata: of the file.
        categories: of the file's events.
        names: of the file's events.
    """
    hip = any(key.startswith("hip_") for key in metadata) or any(map(_HIP_CALL.fullmatch, names))
    prefixes = {category.partition("_")[0] for category in categories if "_" in category}
    found = next((name for name in _BY_CATEGORY if name in prefixes), None)
    if hip or "hip" in prefixes:
        found = "rocm"
    return {} if found is None else {"accelerator": found}


def rank_of(metadata: Mapping[str, Any], file_name: str) -> int | None:
    """The rank stated in the trace, or else in its file name; None if neither states one."""
    rank = _mapping(metadata.get("distributedInfo")).get("rank")
    if isinstance(rank, int) and 0 <= rank < 1 << 31:
        return rank
    name = PurePath(file_name).name
    match = _RANK_IN_NAME.search(name) or _RANK_AS_WORKER.match(name)
    return int(match[1]) if match and len(match[1]) < 10 else None


def epoch_ns(metadata: Mapping[str, Any], earliest: int | None) -> int | None:
    """Unix time at which the trace's clock reads 0.

    Kineto since April 2024 writes times relative to ``baseTimeNanoseconds``; before, they were Unix
    times.
    """
    base = metadata.get("baseTimeNanoseconds")
    if isinstance(base, int) and 0 <= base < 1 << 63:
        return base
    year_2001 = 10**18
    return 0 if earliest is not None and earliest > year_2001 else None


def described_devices(
    metadata: Mapping[str, Any], used: Iterable[tuple[int, int]]
) -> tuple[Device, ...]:
    """The devices in use, with their properties from ``deviceProperties``.

    Args:
        metadata: of the file.
        used: (rank, device) pairs that have activities.
    """
    listed = metadata.get("deviceProperties")
    properties_of = (
        {d["id"]: d for d in listed if isinstance(d, dict) and isinstance(d.get("id"), int)}
        if isinstance(listed, list)
        else {}
    )
    return tuple(
        _device(rank, device, properties_of.get(device, {})) for rank, device in sorted(used)
    )


def _device(rank: int, device: int, properties: Mapping[str, Any]) -> Device:
    def number(key: str) -> int | None:
        value = properties.get(key)
        return value if isinstance(value, int) else None

    name, major, minor = properties.get("name"), number("computeMajor"), number("computeMinor")
    return Device(
        rank,
        device,
        name if isinstance(name, str) else None,
        number("totalGlobalMem"),
        number("numSms"),
        None if major is None or minor is None else f"{major}.{minor}",
    )


def process_groups(metadata: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Name, description and ranks of each process group."""
    groups = _mapping(metadata.get("distributedInfo")).get("pg_config")
    if not isinstance(groups, list):
        return ()
    return tuple(
        {
            "name": str(group.get("pg_name", "")),
            "description": str(group.get("pg_desc", "")),
            "size": group.get("pg_size"),
            "ranks": group.get("ranks"),
        }
        for group in groups
        if isinstance(group, dict)
    )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
