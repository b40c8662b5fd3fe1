"""CUPTI's activity records: kinds, sizes and the offsets of their fields.

Source: ``cupti_activity.h`` of CUDA 11.7 to 13.5, as the C compiler lays the records out
(``tests/data/cupti/layouts.json`` holds that table, and the tests compare). In all of these versions
no field that is read here has moved: newer records only grew at their end. So one table of offsets
holds for all versions, and only the size of a record depends on the version; libcupti itself is queried
for it (`thence.capture.recorder.activity_parser`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from thence.errors import MissingRequirement

MEMCPY = 1
MEMSET = 2
DRIVER = 4
RUNTIME = 5
KERNEL = 10  # CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, which does not serialise kernels
MARKER = 12
OVERHEAD = 17
MEMCPY2 = 22
MEMORY2 = 49

OLDEST = 17
"""CUPTI_API_VERSION of CUDA 11.7"""
NEWEST_MAJOR = 13
"""From CUDA 13.0 on, CUPTI_API_VERSION divided by 10000 is the major version."""

Offsets = dict[str, tuple[int, str]]


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of records of one kind.

    Attributes:
        table: name of the table for these records.
        smallest: size in bytes of the shortest record that holds all fields.
        fields: offset in bytes and NumPy type by column name.
        names: columns that hold addresses of C strings.
        later: fields that only longer records have, those of newer versions.
    """

    table: str
    smallest: int
    fields: Offsets
    names: tuple[str, ...] = field(default=())
    later: Offsets = field(default_factory=dict)


_WHEN: Offsets = {"start": (16, "<u8"), "end": (24, "<u8")}
_COPY: Offsets = {
    "copy_kind": (4, "u1"),
    "source_memory": (5, "u1"),
    "destination_memory": (6, "u1"),
    "bytes": (8, "<u8"),
    **_WHEN,
    "device": (32, "<u4"),
    "stream": (40, "<u4"),
}
_CALL = Layout(
    "calls",
    40,
    {
        "function": (4, "<u4"),
        "start": (8, "<u8"),
        "end": (16, "<u8"),
        "thread": (28, "<u4"),
        "correlation": (32, "<u4"),
    },
)

LAYOUTS = {
    KERNEL: Layout(
        "kernels",
        176,
        {
            "registers": (6, "<u2"),
            **_WHEN,
            "device": (40, "<u4"),
            "stream": (48, "<u4"),
            "grid_x": (52, "<u4"),
            "grid_y": (56, "<u4"),
            "grid_z": (60, "<u4"),
            "block_x": (64, "<u4"),
            "block_y": (68, "<u4"),
            "block_z": (72, "<u4"),
            "static_shared": (76, "<u4"),
            "dynamic_shared": (80, "<u4"),
            "correlation": (92, "<u4"),
            "name": (104, "<u8"),
            "queued": (120, "<u8"),
            "node": (144, "<u8"),
            "graph": (156, "<u4"),
        },
        ("name",),
    ),
    MEMCPY: Layout("copies", 88, {**_COPY, "correlation": (44, "<u4"), "node": (64, "<u8"), "graph": (72, "<u4")}),
    MEMCPY2: Layout("copies", 96, {**_COPY, "correlation": (60, "<u4"), "node": (72, "<u8"), "graph": (80, "<u4")}),
    MEMSET: Layout(
        "sets",
        88,
        {
            "bytes": (8, "<u8"),
            **_WHEN,
            "device": (32, "<u4"),
            "stream": (40, "<u4"),
            "correlation": (44, "<u4"),
            "memory": (50, "<u2"),
            "node": (64, "<u8"),
            "graph": (72, "<u4"),
        },
    ),
    RUNTIME: _CALL,
    DRIVER: _CALL,
    MARKER: Layout(
        "ranges",
        56,
        {
            "flags": (4, "<u4"),
            "time": (8, "<u8"),
            "id": (16, "<u4"),
            "thread": (28, "<u4"),
            "name": (40, "<u8"),
            "domain": (48, "<u8"),
        },
        ("name", "domain"),
    ),
    MEMORY2: Layout(
        "allocations",
        56,
        {
            "operation": (4, "<u4"),
            "memory": (8, "<u4"),
            "correlation": (12, "<u4"),
            "address": (16, "<u8"),
            "bytes": (24, "<u8"),
            "time": (32, "<u8"),
            "device": (52, "<u4"),
        },
        ("source",),
        {"source": (120, "<u8")},
    ),
    OVERHEAD: Layout(
        "overheads",
        40,
        {
            "overhead_kind": (4, "<u4"),
            "object_kind": (8, "<u4"),
            "thread": (16, "<u4"),
            "start": (24, "<u8"),
            "end": (32, "<u8"),
        },
    ),
}
"""The fields that are read, by kind of record."""

CALLS = {RUNTIME: 2, DRIVER: 1}
"""Callback domain of each kind that records API calls."""


def require_known(version: int) -> None:
    """Refuse a libcupti whose record layouts are not known.

    Args:
        version: CUPTI_API_VERSION.

    Raises:
        MissingRequirement: the libcupti is older than CUDA 11.7 or of a major version after 13.
    """
    # CUPTI's versions were small numbers before that of CUDA 13, 130000.
    major = version // 10000 if version >= 10000 else None
    if version < OLDEST or (major is not None and major > NEWEST_MAJOR):
        raise MissingRequirement(
            f"thence does not know the record layout of this libcupti (version {version}): it "
            "reads those of CUDA 11.7 to 13; name another libcupti in THENCE_LIBCUPTI, or "
            "update thence"
        )
