"""Flame graphs of memory: the bytes that are live at the peak, by the frames of the calls that allocated them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.flame.answer import Flame, Split, Weight
from thence.analysis.flame.prefix_tree import PHASE_SUMS, Groups, build_tree
from thence.analysis.grouping.time_by_place import heading_of
from thence.analysis.memory.answer import allocations, memory
from thence.analysis.memory.moments import PEAK, live_at, moments
from thence.analysis.memory.places import DEVICE, HOST_DEVICE, MemoryPlaces
from thence.attribution.launch_places import paths_of
from thence.errors import MissingData, UsageError
from thence.model.columns import values_or
from thence.model.graph_labels import FRAME_SEPARATOR
from thence.model.intervals import NO_ROW
from thence.model.own_code import OwnCode
from thence.model.phases import Phase
from thence.model.places import FLAME_KINDS, FLAMES

if TYPE_CHECKING:
    from thence.analysis.flame.prefix_tree import Entry
    from thence.model.arrays import Int64
    from thence.model.attributed import Attributed

FRAMES = tuple(kind for kind in FLAMES if kind != "op_name")
"""Kinds of frames."""
_BEFORE = "[allocated before the trace]"
_NOWHERE = "[no place known]"
_NOTE = (
    "Bytes live at the peak of each device; every allocation counts in full. thence memory shows what they are for and "
    "what was reserved."
)


def memory_flame(trace: Attributed, by: str | None) -> Flame:
    """The flame graph of what was live at the peak; of a job, of the peaks of all devices.

    Args:
        by: one of `FRAMES`; None: the first of `thence.model.places.FLAME_KINDS` that any allocation has.

    Raises:
        UsageError: ``by`` has another value.
        MissingData: the trace holds no events about memory.
    """
    if by is not None and by not in FRAMES:
        raise UsageError(f"there is no flame graph of memory by {by!r}; choose one of {', '.join(FRAMES)}")
    devices = memory(trace, None).allocators
    if trace.memory_totals.is_empty():
        raise MissingData(
            f"{trace.meta.named}: what is known of memory is the plan of XLA programs, which has no stacks: thence "
            "memory shows it by source, label and operator"
        )
    placed = allocations(trace)
    row = placed.join(moments(trace, PEAK).select(*DEVICE, "row"), on=DEVICE, how="left", maintain_order="left")["row"]
    live = live_at(placed, values_or(row, -1)) & row.is_not_null().to_numpy()
    shown = pl.any_horizontal(pl.col("start", "module", "source", "label", "op").is_not_null())
    table = placed.filter(pl.Series(live) & placed.select(shown).to_series())
    kind = by or next((name for name in FLAME_KINDS if name in FRAMES and any(_paths(trace, table, name))), "ops")
    groups = _groups(table, _paths(trace, table, kind), int(devices["before_bytes"].sum()))
    return Flame(
        meta=trace.meta,
        by=kind,
        heading=heading_of(trace, kind),
        split=Split.NONE,
        ranks=tuple(sorted(devices["rank"].unique().to_list())),
        devices=devices.height,
        span_ns=0,
        busy_ns=0,
        sum_ns=int(devices["peak_bytes"].sum()),
        nodes=build_tree(groups, _root_name(devices.height)),
        notes=(_NOTE,),
        weight=Weight.MEMORY,
    )


def _root_name(devices: int) -> str:
    return "peak of memory" if devices == 1 else f"peaks of memory of {devices} devices"


def _paths(trace: Attributed, table: pl.DataFrame, by: str) -> list[tuple[str, ...]]:
    """The frames of each allocation, outermost first; empty where none are known."""
    stated = {"stack": "stack", "source": "source", "module": "module", "label": "label"}.get(by)
    texts = table[stated].cast(pl.String).to_list() if stated else [None] * table.height
    separator = {"stack": FRAME_SEPARATOR, "module": "/", "label": "/"}.get(by)
    of_place = [() if text is None else tuple(text.split(separator)) if separator else (text,) for text in texts]
    if trace.host.is_empty():
        return of_place
    calls = table.with_columns(pl.when(pl.col("device") != HOST_DEVICE).then("device").alias("device"))
    host = pl.Series(MemoryPlaces(trace, calls).host).replace(NO_ROW, None).cast(pl.Int32)
    tree, node = paths_of(trace, host, by, OwnCode.of(trace.own, trace.installed))
    names = tree.name.cast(pl.String).to_list()
    known: dict[int, tuple[str, ...]] = {NO_ROW: ()}
    for number, (parent, name) in enumerate(zip(tree.parent.tolist(), names, strict=True)):
        known[number] = (*known[parent], name or "")
    return [known[number] or place for number, place in zip(node.tolist(), of_place, strict=True)]


def _groups(table: pl.DataFrame, paths: list[tuple[str, ...]], before: int) -> Groups:
    """Allocations with equal frames and operators together, and what was allocated before the trace."""
    leaf = table["op"].cast(pl.String).fill_null("(no operator)").to_list()
    sums: dict[tuple[Entry, ...], Int64] = {}
    phases = [phase.value for phase in Phase]
    for path, name, phase, size in zip(paths, leaf, table["phase"].cast(pl.String), table["bytes"], strict=True):
        frames: list[Entry] = [(frame, "frame", None) for frame in path] or [(_NOWHERE, "unattributed", None)]
        key = tuple(frames) if path[-1:] == (name,) else (*frames, (name, "frame", None))
        values = sums.setdefault(key, np.zeros(2 + len(phases), np.int64))
        values[:2] += (size, 1)
        if phase in phases:
            values[2 + phases.index(phase)] += size
    if before:
        sums[((_BEFORE, "unattributed", None),)] = np.array([before, 1, *[0] * len(phases)], np.int64)
    columns = ("self_ns", "count", *PHASE_SUMS)
    rows = np.array(list(sums.values()), np.int64).reshape(-1, len(columns))
    return Groups.of_paths(list(sums), pl.DataFrame(rows, schema=dict.fromkeys(columns, pl.Int64), orient="row"))
