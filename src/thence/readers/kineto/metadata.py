"""The metadata of a Kineto file: versions, devices, process groups, rank and clock."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from thence.model.json_fields import Count, JsonInt64, Rank, field
from thence.model.tables import Device

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_FACTS = (
    "schemaVersion", "trace_id", "cupti_version", "cuda_runtime_version", "cuda_driver_version",
    "hip_runtime_version", "hip_driver_version", "record_shapes", "with_stack", "profile_memory",
    "with_modules", "with_flops", "traceName",
)  # fmt: skip
_DISTRIBUTED_FACTS = ("backend", "world_size", "nccl_version")
_Fact = str | JsonInt64 | float | bool
_HIP_CALL = re.compile(r"hip[A-Z]\w*")
_BY_CATEGORY = ("mtia", "xpu", "privateuse1", "cuda")
_RANK_IN_NAME = re.compile(r"rank[-_ ]?(\d+)", re.IGNORECASE)
# File names that tensorboard_trace_handler writes if the name of the worker is its rank.
# ... and if it is that of the process; and folders of the machines of a job.
_NODE_AS_WORKER = re.compile(r"([\w.-]{1,250})_\d{1,10}\.\d{10,20}\.pt\.trace\.json(?:\.gz)?")
_NO_NODES = ("rank", "local_rank", "worker", "gpu", "device", "process", "proc")
_NODE_FOLDER = re.compile(r"(?:node|host)[-_]?\d{1,9}", re.IGNORECASE)
_RANK_AS_WORKER = re.compile(r"(\d{1,9})\.[\w-]+\.pt\.trace\.json")


def facts(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Versions and settings; host names and job variables are left out."""
    distributed = field(metadata, "distributedInfo", dict[str, Any]) or {}
    given = {key: field(metadata, key, _Fact) for key in _FACTS}
    given |= {key: field(distributed, key, _Fact) for key in _DISTRIBUTED_FACTS}
    return {key: value for key, value in given.items() if value is not None}


def accelerator(metadata: Mapping[str, Any], categories: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """The platform that the program used, as the fact ``accelerator``: rocm, cuda, xpu, mtia or privateuse1.

    Kineto for ROCm writes HIP's API calls under the category ``cuda_runtime``, so rocm is also recognised by the
    names of the calls.
    """
    hip = any(key.startswith("hip_") for key in metadata) or any(map(_HIP_CALL.fullmatch, names))
    prefixes = {category.partition("_")[0] for category in categories if "_" in category}
    vendor = next((name for name in _BY_CATEGORY if name in prefixes), None)
    if hip or "hip" in prefixes:
        vendor = "rocm"
    return {} if vendor is None else {"accelerator": vendor}


def rank_of(metadata: Mapping[str, Any], file_name: str) -> int | None:
    """The rank stated in the trace, or else in its file name; None if neither states one."""
    distributed = field(metadata, "distributedInfo", dict[str, Any]) or {}
    rank: int | None = field(distributed, "rank", Rank)
    if rank is not None:
        return rank
    name = PurePath(file_name).name
    match = _RANK_IN_NAME.search(name) or _RANK_AS_WORKER.match(name)
    return int(match[1]) if match and len(match[1]) < 10 else None


def node_of(file_name: str) -> str | None:
    """The machine that the name of a trace states, or that of a folder that it is in; None if neither does."""
    path = PurePath(file_name)
    worker = _NODE_AS_WORKER.fullmatch(path.name)
    if worker and worker[1].lower() not in _NO_NODES:
        return worker[1]
    return next((part for part in reversed(path.parts[:-1]) if _NODE_FOLDER.fullmatch(part)), None)


def epoch_ns(metadata: Mapping[str, Any], earliest: int | None) -> int | None:
    """Unix time at which the trace's clock reads 0.

    Kineto since April 2024 writes times relative to ``baseTimeNanoseconds``; before, they were Unix
    times.
    """
    base: int | None = field(metadata, "baseTimeNanoseconds", Count)
    if base is not None:
        return base
    year_2001 = 10**18
    return 0 if earliest is not None and earliest > year_2001 else None


def described_devices(
    metadata: Mapping[str, Any], used: Iterable[tuple[int, int]], node: str | None
) -> tuple[Device, ...]:
    """The devices in use, with their properties from ``deviceProperties``.

    Args:
        used: (rank, device) pairs that have activities.
        node: the machine, as `node_of` returns it.
    """
    listed = field(metadata, "deviceProperties", list[Any]) or []
    described = [d for d in listed if isinstance(d, dict)]
    properties_of = {field(d, "id", Rank): d for d in described}
    return tuple(_device(rank, device, properties_of.get(device, {}), node) for rank, device in sorted(used))


def _device(rank: int, device: int, properties: Mapping[str, Any], node: str | None) -> Device:
    major, minor = (field(properties, f"compute{part}", Count) for part in ("Major", "Minor"))
    return Device(
        rank,
        device,
        field(properties, "name", str),
        field(properties, "totalGlobalMem", Count),
        field(properties, "numSms", Count),
        None if major is None or minor is None else f"{major}.{minor}",
        node=node,
    )


def process_groups(metadata: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Name, description and ranks of each process group."""
    distributed = field(metadata, "distributedInfo", dict[str, Any]) or {}
    return tuple(
        {
            "name": _text(group, "pg_name"),
            "description": _text(group, "pg_desc"),
            "size": field(group, "pg_size", Count),
            "ranks": field(group, "ranks", list[Rank]),
        }
        for group in field(distributed, "pg_config", list[Any]) or []
        if isinstance(group, dict)
    )


def _text(values: Mapping[str, Any], name: str) -> str:
    value = field(values, name, str | JsonInt64)
    return "" if value is None else str(value)
