"""Which buffers of an XLA program are live together, from the heap simulator's trace."""

from __future__ import annotations

from thence.readers.jax.buffers import buffers_of, live_at_peak
from thence.readers.jax.protos.hlo_pb2 import BufferAssignmentProto, HeapSimulatorTrace

ALLOC, FREE, SHARE = range(3)


def trace_of(*events: tuple[int, ...]) -> HeapSimulatorTrace:
    """A trace of (kind, buffer[, canonical buffer])."""
    names = ("kind", "buffer_id", "share_with_canonical_id")
    return HeapSimulatorTrace(
        events=[HeapSimulatorTrace.Event(**dict(zip(names, event, strict=False))) for event in events]
    )


def test_a_buffer_lives_until_the_last_one_that_shares_its_memory_is_free() -> None:
    trace = trace_of(
        (ALLOC, 1), (ALLOC, 2), (SHARE, 3, 1), (FREE, 1), (FREE, 2), (ALLOC, 4), (FREE, 3), (FREE, 4), (ALLOC, 5)
    )  # fmt: skip
    # 1 and 2: 30; then 1 (by 3) and 4: 50; then 5 alone
    assert live_at_peak(trace, {1: 10, 2: 20, 3: 10, 4: 40, 5: 45}) == [1, 4]


def test_events_about_unknown_buffers_are_left_out() -> None:
    trace = trace_of((FREE, 7), (ALLOC, 9), (SHARE, 2, 8), (FREE, 2), (ALLOC, 1), (ALLOC, 1), (FREE, 9))
    assert live_at_peak(trace, {1: 10, 2: 20}) == [1]


def test_the_rows_of_an_allocation_add_up_to_its_size() -> None:
    assignment = BufferAssignmentProto()
    for number, size in ((1, 10), (2, 20), (3, 100)):
        buffer = assignment.logical_buffers.add(id=number, size=size)
        buffer.defined_at.instruction_id = 10 * number
    scratch = assignment.buffer_allocations.add(index=5, size=36)
    argument = assignment.buffer_allocations.add(index=6, size=100, is_entry_computation_parameter=True)
    assignment.buffer_allocations.add(index=7, size=1 << 20, color=5)  # of the host
    assignment.buffer_allocations.add(index=8, size=2, is_thread_local=True)
    for allocation, numbers in ((scratch, (1, 2)), (argument, (3,))):
        for number in numbers:
            allocation.assigned.add(logical_buffer_id=number)
    assignment.heap_simulator_traces.append(trace_of((ALLOC, 1), (ALLOC, 2)))
    assert buffers_of(assignment).select("allocation", "kind", "bytes", "instruction").rows() == [
        (5, "temporary", 10, 10),
        (5, "temporary", 20, 20),
        (5, None, 6, None),
        (6, "argument", 100, 30),
        (8, None, 2, None),
    ]


def test_memory_of_a_result_is_of_the_instruction_that_makes_it() -> None:
    """Other buffers of the same size may be in the same memory at other times."""
    assignment = BufferAssignmentProto()
    for number in (1, 2, 3):
        assignment.logical_buffers.add(id=number, size=8).defined_at.instruction_id = 10 * number
    result = assignment.buffer_allocations.add(index=0, size=8, maybe_live_out=True)
    for number in (1, 2, 3):
        result.assigned.add(logical_buffer_id=number)
    for interface, instruction in (((20, 99), 20), ((), 30)):
        assert buffers_of(assignment, interface)["instruction"].to_list() == [instruction]
