"""Description of a buffer written inside a kernel: its layout, the names of its ranges, the launch.

A buffer cannot be decoded without its description. The description is stored with the buffer as JSON: one
object with the fields of `Description` and ``"format": "thence.inside", "version": 1``.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from thence.errors import DamagedInput, UsageError
from thence.model.json_fields import JsonInt64, NotAsWritten, decoded
from thence.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping


_FORMAT = "thence.inside"
_VERSION = 1
HEADER_WORDS = 16
"""Words before the events of each trace in thence's own layout."""

FLAVOURS = ("thence", "mosaic", "mosaic-2024", "flashinfer", "flashinfer-old", "mirage", "proton")
"""Layouts that can be decoded. mosaic: JAX Mosaic GPU since jax 0.8. mosaic-2024: JAX Mosaic GPU before
jax 0.8, where the word count in a trace's header includes the three words of the header. flashinfer: tags
with block and SM. flashinfer-old: tags with block and group. mirage: tags with block, group and a number
for each event. proton: Triton's instrumentation."""

_EVENT_WORDS = 2
_MOSAIC_HEADER_WORDS = 3
_WARP, _WARPGROUP = 32, 128
_MAX_INT32 = (1 << 31) - 1

Triple = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a device.

    Attributes:
        shared_memory_bytes: most shared memory of one block, with opt-in (227 KiB on an H200).
        global_memory_bytes: global memory that is free to allocate.
        threads_per_block: most threads of one block; 1024 on every CUDA device so far.
    """

    shared_memory_bytes: int
    global_memory_bytes: int
    threads_per_block: int = 1024


@dataclass(frozen=True)
class Description:
    """A buffer's layout, names and launch.

    Attributes:
        names: names of the ranges and instants; the index of a name is its id. Ids without a name are
            shown as numbers.
        grid: blocks in x, y, z.
        block: threads in x, y, z.
        traces_per_block: warps or warpgroups of a block that are traced, or 1.
        capacity: events that fit into one trace.
        kernel: name of the kernel; empty when unknown.
        flavour: the layout, one of `FLAVOURS`.
        device: index of the device that the kernel ran on.
        overhead_cycles: cycles for recording one event, where measured; else None.
        words_per_trace: words (4 bytes) of one trace where the layout has unused words at its end; None
            where header and capacity give the size.
        launch: further facts of the launch, as JSON values. host_ns: when the buffer was made, before
            the launch. taken_ns: when the buffer was read, after the launch. next_ns: host_ns of the
            next launch's buffer. previous_ns: taken_ns of the buffer before. All four in ns of Unix
            time. pid: id of the launching process.
    """

    names: tuple[str, ...] = ()
    grid: Triple = (1, 1, 1)
    block: Triple = (1, 1, 1)
    traces_per_block: int = 1
    capacity: int = 0
    kernel: str = ""
    flavour: str = "thence"
    device: int = 0
    overhead_cycles: float | None = None
    words_per_trace: int | None = None
    launch: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.flavour not in FLAVOURS:
            flavours = ", ".join(FLAVOURS)
            raise UsageError(f"{self.flavour!r} is not a layout of in-kernel events; the layouts are {flavours}")
        positive = (*self.grid, *self.block, self.traces_per_block)
        if not all(0 < n <= _MAX_INT32 for n in positive) or not 0 <= self.capacity <= _MAX_INT32:
            raise UsageError(
                f"grid {self.grid}, block {self.block} and {self.traces_per_block} traces of"
                f" {self.capacity} events for each block: all must be at least 1; the number of events may be 0"
            )
        if self.blocks > _MAX_INT32 or self.threads > _MAX_INT32:
            raise UsageError(f"grid {self.grid} of blocks {self.block}: CUDA cannot launch such a grid")

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return math.prod(self.grid)

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return math.prod(self.block)

    @property
    def traces(self) -> int:
        """Traces of all blocks."""
        return self.blocks * self.traces_per_block

    @property
    def trace_words(self) -> int:
        """Words of one trace: header and events."""
        if self.words_per_trace is not None:
            return self.words_per_trace
        header = _MOSAIC_HEADER_WORDS if self.flavour.startswith("mosaic") else HEADER_WORDS
        return header + _EVENT_WORDS * self.capacity

    @property
    def words(self) -> int:
        """Words of the whole buffer in the layouts thence and mosaic."""
        return self.traces * self.trace_words

    @property
    def global_bytes(self) -> int:
        """Global memory that the buffer takes."""
        return 4 * self.words

    @property
    def shared_bytes(self) -> int:
        """Shared memory that one block takes when its events are staged there, without headers."""
        return 4 * _EVENT_WORDS * self.capacity * self.traces_per_block

    def check(self, limits: Limits, *, staged: bool = True, shared_bytes_used: int = 0) -> None:
        """Checks before a launch that the device has room for this buffer.

        Args:
            staged: events are staged in shared memory; otherwise they need none.
            shared_bytes_used: shared memory that the kernel itself uses, per block.

        Raises:
            UsageError: the launch is not possible; the message states what to reduce, and to what size.
        """
        if self.threads > limits.threads_per_block:
            raise UsageError(
                f"block {self.block} has {self.threads:,} threads; the device allows {limits.threads_per_block:,}"
            )
        free = limits.shared_memory_bytes - shared_bytes_used
        if staged and self.shared_bytes > free:
            most = max(free // (4 * _EVENT_WORDS * self.traces_per_block), 0)
            raise UsageError(
                f"{self.capacity:,} events for each of {self.traces_per_block} traces take"
                f" {format_bytes(self.shared_bytes)} of shared memory per block, and the kernel"
                f" {format_bytes(shared_bytes_used)}; the device has"
                f" {format_bytes(limits.shared_memory_bytes)}: a capacity of {most:,} fits"
            )
        if self.global_bytes > limits.global_memory_bytes:
            room = limits.global_memory_bytes // 4 // self.traces - HEADER_WORDS
            raise UsageError(
                f"the buffer of {self.traces:,} traces takes {format_bytes(self.global_bytes)}, the"
                f" device has {format_bytes(limits.global_memory_bytes)}: a capacity of"
                f" {max(room // _EVENT_WORDS, 0):,} fits"
            )

    def to_json(self) -> dict[str, Any]:
        """The description as JSON values."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("names", "grid", "block"):
            fields[name] = list(fields[name])
        fields["launch"] = dict(self.launch)
        if self.words_per_trace is None:
            del fields["words_per_trace"]
        return {"format": _FORMAT, "version": _VERSION, **fields}

    def to_bytes(self) -> bytes:
        """The description as JSON text in UTF-8."""
        return msgspec.json.encode(self.to_json())

    @classmethod
    def from_json(cls, values: Any, path: str = "the description") -> Description:
        """The description from decoded JSON values.

        Args:
            values: the output of `to_json`, or the attributes of a Mosaic ``ProfilerSpec``:
                ``{"names": {name: id}, "entries": words of a trace, "grid", "block"}``, and
                ``"scope": "warp"`` where a trace belongs to a warp instead of a warpgroup.
            path: name of the input in errors.

        Raises:
            DamagedInput: a field is missing, has another type or has an impossible value.
        """
        try:
            if isinstance(values, dict) and "format" not in values and "entries" in values:
                return _of_profiler_spec(msgspec.convert(values, _ProfilerSpec))
            given = msgspec.convert(values, _Fields)
            if (given.format, given.version) != (_FORMAT, _VERSION):
                raise DamagedInput(
                    path,
                    f"describes {given.format!r}, version {given.version}; this thence reads"
                    f" {_FORMAT!r}, version {_VERSION}",
                )
            fields = {f.name: getattr(given, f.name) for f in dataclasses.fields(cls) if f.name != "names"}
            return cls(names=tuple(given.names), **fields)
        except (msgspec.ValidationError, UsageError) as error:
            raise DamagedInput(path, f"is not a description of in-kernel events: {error}{_mixed(values)}") from error

    @classmethod
    def from_bytes(cls, text: bytes, path: str = "the description") -> Description:
        """The description from JSON text; see `from_json`.

        Raises:
            DamagedInput: the text is not JSON, or not a description.
        """
        try:
            values = decoded(text, object)
        except NotAsWritten as error:
            raise DamagedInput(path, f"is not valid JSON: {error}") from error
        return cls.from_json(values, path)


def _mixed(values: Any) -> str:
    """The end of a sentence about a description that has fields of both forms; empty for others."""
    names = values.get("names") if isinstance(values, dict) else None
    if not isinstance(names, dict if "format" in (values or ()) else list):
        return ""
    return (
        '; it mixes two forms: either {"format": "thence.inside", "version": 1, "flavour": ..., "names": [...], ...}, '
        'or, as a Mosaic ProfilerSpec has them, {"names": {name: id}, "entries": ..., "grid": ..., "block": ...} '
        "without a format"
    )


_Count = Annotated[int, msgspec.Meta(ge=0, le=_MAX_INT32)]
_Counts = tuple[_Count, _Count, _Count]


class _Fields(msgspec.Struct):
    """The fields of the JSON that are read; other fields are ignored."""

    format: str
    version: JsonInt64
    flavour: str
    names: list[str] = []
    grid: _Counts = (1, 1, 1)
    block: _Counts = (1, 1, 1)
    traces_per_block: _Count = 1
    capacity: _Count = 0
    kernel: str | None = ""
    device: _Count = 0
    overhead_cycles: float | None = None
    words_per_trace: Annotated[int, msgspec.Meta(ge=_MOSAIC_HEADER_WORDS, le=_MAX_INT32)] | None = None
    launch: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.kernel = self.kernel or ""
        self.launch = self.launch or {}


class _ProfilerSpec(msgspec.Struct):
    names: dict[str, Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]]
    entries: Annotated[int, msgspec.Meta(ge=_MOSAIC_HEADER_WORDS, le=_MAX_INT32)]
    grid: list[_Count]
    block: list[_Count]
    scope: str = "warpgroup"
    kernel: str = ""
    flavour: str = "mosaic"


def _of_profiler_spec(spec: _ProfilerSpec) -> Description:
    names = [""] * (max(spec.names.values(), default=-1) + 1)
    for name, number in spec.names.items():
        names[number] = name
    if len(spec.grid) > 3 or len(spec.block) > 3:
        raise UsageError(f"grid {spec.grid}, block {spec.block}: CUDA has three dimensions")
    if spec.scope not in ("warp", "warpgroup"):
        raise UsageError(f"a trace belongs to a warp or a warpgroup, not to a {spec.scope!r}")
    scope = _WARP if spec.scope == "warp" else _WARPGROUP
    threads = math.prod(spec.block)
    if threads % scope:
        raise UsageError(f"block {spec.block} is not a whole number of {spec.scope}s")
    return Description(
        names=tuple(names),
        grid=_three(spec.grid),
        block=_three(spec.block),
        traces_per_block=threads // scope,
        capacity=(spec.entries - _MOSAIC_HEADER_WORDS) // _EVENT_WORDS,
        kernel=spec.kernel,
        flavour=spec.flavour,
        words_per_trace=spec.entries,
    )


def _three(dimensions: list[int]) -> Triple:
    x, y, z = (*dimensions, 1, 1, 1)[:3]
    return (x, y, z)
