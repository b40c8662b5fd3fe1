"""Memory of an XLA program, from the buffer assignment of its HloProto: what is live when it needs most.

XLA plans the memory of a program when it compiles it. An allocation holds arguments, results or constants, or it is
scratch memory in which buffers follow each other in time; of these the heap simulator's trace tells which are live
together. This is exact, and known without running the program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.model.hlo import BUFFERS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from thence.readers.jax.protos.hlo_pb2 import (
        BufferAllocationProto,
        BufferAssignmentProto,
        HeapSimulatorTrace,
        LogicalBufferProto,
    )

_ALLOC, _FREE, _SHARE = range(3)
"""Kinds of events of the heap simulator."""
_MAX_BYTES = 1 << 44
"""More than any device has; with a larger size, nothing of the plan is believed."""
_HOST_SPACE = 5
"""Color of allocations in the host's memory."""
_Row = tuple[int, str | None, int, int | None, str | None]


def buffers_of(assignment: BufferAssignmentProto, interface: Collection[int] = ()) -> pl.DataFrame:
    """The buffers of a program on its device, in the columns of `BUFFERS`; none if a size is impossible.

    Args:
        assignment: which buffers are in which allocation.
        interface: ids of the instructions that are the program's parameters and make its results. An allocation for a
            result is that of the instruction that makes it, also if others use the memory at other times.
    """
    logical = {buffer.id: buffer for buffer in assignment.logical_buffers}
    size = {number: buffer.size for number, buffer in logical.items()}
    place = {held.logical_buffer_id: a.index for a in assignment.buffer_allocations for held in a.assigned}
    live: dict[int, list[LogicalBufferProto]] = {}
    # A trace states the number that its allocation had before XLA joined the allocations of scratch memory.
    for trace in assignment.heap_simulator_traces:
        for number in live_at_peak(trace, size):
            live.setdefault(place.get(number, -1), []).append(logical[number])
    rows: list[_Row] = []
    sizes = (*size.values(), *(allocation.size for allocation in assignment.buffer_allocations))
    if any(not 0 <= each <= _MAX_BYTES for each in sizes):
        return pl.DataFrame(schema=BUFFERS)
    for allocation in assignment.buffer_allocations:
        if allocation.color != _HOST_SPACE:
            rows += _buffers(allocation, logical, live.get(allocation.index, []), interface)
    frame = pl.DataFrame(rows, schema={**BUFFERS, "name": pl.String()}, orient="row")
    return frame.with_columns(pl.col("name").replace("", None))


def _buffers(
    allocation: BufferAllocationProto,
    logical: Mapping[int, LogicalBufferProto],
    live: Sequence[LogicalBufferProto],
    interface: Collection[int],
) -> Iterator[_Row]:
    """The rows of one allocation, which add up to its size; ``live``: what a trace says is live in it."""
    if allocation.is_thread_local:  # inside of fusions: registers and shared memory
        yield allocation.index, None, allocation.size, None, None
        return
    kind = _kind(allocation)
    free = allocation.size - sum(buffer.size for buffer in live)
    if kind == "temporary" and live and free >= 0:
        for buffer in live:
            yield allocation.index, kind, buffer.size, *_instruction(buffer)
        if free:
            yield allocation.index, None, free, None, None
        return
    held = [
        logical[assigned.logical_buffer_id] for assigned in allocation.assigned if assigned.logical_buffer_id in logical
    ]
    stated = kind in ("argument", "output") and [b for b in held if b.defined_at.instruction_id in interface]
    owner = max(stated or held, key=lambda buffer: (buffer.size, buffer.id), default=None)
    yield allocation.index, kind, allocation.size, *((None, None) if owner is None else _instruction(owner))


def _kind(allocation: BufferAllocationProto) -> str:
    if allocation.is_entry_computation_parameter:
        return "argument"
    if allocation.is_constant:
        return "constant"
    return "output" if allocation.maybe_live_out else "temporary"


def _instruction(buffer: LogicalBufferProto) -> tuple[int | None, str | None]:
    return buffer.defined_at.instruction_id or None, buffer.defined_at.instruction_name


def live_at_peak(trace: HeapSimulatorTrace, size: Mapping[int, int]) -> list[int]:
    """The buffers that are live when an allocation is used most, ascending; of buffers that share memory, the first.

    Args:
        trace: of the heap simulator.
        size: bytes of each buffer; others are left out.
    """
    owner: dict[int, int] = {}
    users: dict[int, int] = {}
    live = most = 0
    changes: list[tuple[bool, int]] = []
    at_best = 0
    for event in trace.events:
        number = event.buffer_id
        if event.kind == _SHARE:
            canonical = owner.get(event.share_with_canonical_id, event.share_with_canonical_id)
            if canonical in users:
                owner[number] = canonical
                users[canonical] += 1
        elif event.kind == _ALLOC and number in size and number not in users:
            owner[number], users[number] = number, 1
            live += size[number]
            changes.append((True, number))
            if live > most:
                most, at_best = live, len(changes)
        elif event.kind == _FREE and (canonical := owner.pop(number, -1)) in users:
            users[canonical] -= 1
            if not users[canonical]:
                del users[canonical]
                live -= size[canonical]
                changes.append((False, canonical))
    held: set[int] = set()
    for begins, number in changes[:at_best]:
        (held.add if begins else held.discard)(number)
    return sorted(held)
