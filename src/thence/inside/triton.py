# ruff: noqa: N803 - Triton writes compile-time arguments in capitals
"""In-kernel profiles of Triton kernels: functions for @triton.jit code, and the host side.

    from thence.inside import triton as inside

    LOAD = tl.constexpr(0)                                   # index of the name in the profile's names

    @triton.jit
    def kernel(x, y, events, blocks, CAPACITY: tl.constexpr, SIZE: tl.constexpr):
        trace = inside.begin(events, blocks, CAPACITY)
        at = 0                                               # events so far; every call returns the next
        at = inside.enter(trace, at, LOAD, CAPACITY)
        value = tl.load(x + tl.arange(0, SIZE))
        at = inside.exit_after(trace, at, LOAD, value, CAPACITY)
        ...
        inside.end(trace, at, CAPACITY)

    profile = inside.Profile(["load", "compute", "store"], capacity=64, num_warps=4)
    launch = profile.launch(grid)
    kernel[grid](x, y, *launch.arguments, CAPACITY=profile.capacity, SIZE=1024, num_warps=4)
    profile.save("kernel.npz")

A trace covers one Triton program (a thread block). Its first thread reads the clock and writes the events
directly to global memory, because Triton code cannot allocate shared memory for them.

Order of instructions: the clock reads keep their order relative to each other, but nothing else is
guaranteed. The compiler moves loads and arithmetic across them, and a clock read after a load waits only
until the load is issued. On an H200, `exit` after `tl.load` recorded 64 ns of "load"; the wait for the
data was in the next range. `exit_after(..., value, ...)` reads the clock in every thread once the
thread's part of ``value`` is available, and records the latest of these times, so that the computation of
``value`` is before it. Software pipelining (``num_stages``) still moves the loads of a loop into earlier
iterations; the ranges then show what the kernel really does.

This module imports Triton; `thence` does not import this module unless the user does.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from thence.errors import MissingRequirement, UsageError
from thence.inside.description import HEADER_WORDS, Description
from thence.inside.launches import Launches, arrays_of, three

try:
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
except ImportError as error:
    raise MissingRequirement("Triton is not installed: pip install triton.") from error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.inside.launches import Launch

# Constants of a record; see thence_inside.cuh. Signed, because the buffer is int32 in Triton.
_HEADER = tl.constexpr(16)
_MAGIC = tl.constexpr(0x7E4CE001)
_EXIT = tl.constexpr(1 << 30)
_INSTANT = tl.constexpr(-(1 << 31))


@triton.jit  # type: ignore[untyped-decorator, misc, unused-ignore]
def _clock() -> tl.tensor:
    return tl.inline_asm_elementwise("mov.u32 $0, %clock;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit  # type: ignore[untyped-decorator, misc, unused-ignore]
def _store_long(at: tl.tensor, value: tl.tensor) -> None:
    tl.store(at, value.to(tl.int32))
    tl.store(at + 1, (value >> 32).to(tl.int32))


@triton.jit  # type: ignore[untyped-decorator, misc, unused-ignore]
def _store_clocks(at: tl.tensor) -> None:
    timer = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    clock = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    _store_long(at, timer)
    _store_long(at + 4, clock)


@triton.jit  # type: ignore[untyped-decorator, misc, unused-ignore]
def _event(trace: tl.tensor, at: tl.tensor, tag: tl.tensor, clock: tl.tensor, CAPACITY: tl.constexpr) -> tl.tensor:
    slot = trace + _HEADER + 2 * at
    tl.store(slot, tag, mask=at < CAPACITY)
    tl.store(slot + 1, clock, mask=at < CAPACITY)
    return at + 1


@triton.jit  # type: ignore[untyped-decorator, misc, unused-ignore]
def begin(events: tl.tensor, blocks: tl.tensor, CAPACITY: tl.constexpr) -> tl.tensor:
    """Start the trace of this program and return it. Device code; first call in the kernel.

    Args:
        events: the buffer of `Profile.launch`.
        blocks: programs that the buffer has room for; further programs write to a spare record that is
            not decoded.
        CAPACITY: events that fit into a trace.
    """
    block = tl.program_id(0) + tl.num_programs(0) * (tl.program_id(1) + tl.num_programs(1) * tl.program_id(2))
    trace = events + tl.minimum(block, blocks).to(tl.int64) * (_HEADER + 2 * CAPACITY)
    smid = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(trace, _MAGIC)
    tl.store(trace + 1, 1)  # a thread block's trace; events count clock64
    tl.store(trace + 2, smid)
    tl.store(trace + 3, block)
    tl.store(trace + 7, CAPACITY)  # words 4 to 6, index, count and dropped, are written at the end
    _store_clocks(trace + 8)
    return trace


@triton.jit  # type: ignore[untyped-decorator, misc, unused-ignore]
def enter(trace: tl.tensor, at: tl.tensor, name: tl.tensor, CAPACITY: tl.constexpr) -> tl.tensor:
    """Record the start of a range; returns the number of events so far. Device code.

    Args:
        trace: the return value of `begin`.
        at: the return value of the previous event; 0 for the first event.
        name: index of the range's name in the profile's names.
        CAPACITY: events that fit into a trace; further events are only counted.
    """
    return _event(trace, at, name, _clock(), CAPACITY)


@triton.jit  # type: ignore[untyped-decorator, misc, unused-ignore]
def exit(trace: tl.tensor, at: tl.tensor, name: tl.tensor, CAPACITY: tl.constexpr) -> tl.tensor:
    """Record the end of a range, without waiting for its data; arguments as in `enter`. Device code."""
    return _event(trace, at, name + _EXIT, _clock(), CAPACITY)


@triton.jit  # type: ignore[untyped-decorator, misc, unused-ignore]
def instant(trace: tl.tensor, at: tl.tensor, name: tl.tensor, CAPACITY: tl.constexpr) -> tl.tensor:
    """Record an instant; arguments as in `enter`. Device code."""
    return _event(trace, at, name + _INSTANT, _clock(), CAPACITY)


@triton.jit  # type: ignore[untyped-decorator, misc, unused-ignore]
def exit_after(trace: tl.tensor, at: tl.tensor, name: tl.tensor, value: tl.tensor, CAPACITY: tl.constexpr) -> tl.tensor:
    """Record the end of a range at the time when all of ``value``, a tensor of numbers, is computed. Device code.

    This costs a reduction over the block, which takes place after the recorded time.
    """
    bits = value.to(tl.float32).to(tl.int32, bitcast=True)
    # Reads the clock in each thread; the threads share the clock of their SM, so the largest value is
    # the latest. The predicate makes the read wait for the element: without it, the assembler may read
    # the clock first. For an element with exactly these bits (a NaN) the read does not wait.
    reached = tl.inline_asm_elementwise(
        """{
        .reg .pred p; .reg .b32 t;
        setp.ne.b32 p, $1, 0x7FC05EED;
        mov.b32 t, $2;
        @p mov.u32 t, %clock;
        mov.b32 $0, t;
        }""",
        "=r,r,r",
        [bits, _clock()],
        dtype=tl.uint32,
        is_pure=False,
        pack=1,
    )
    # If the clock wraps between the reads of two threads, this takes a read before the wrap.
    last = tl.max(tl.ravel(reached), axis=0)
    return _event(trace, at, name + _EXIT, last.to(tl.int32, bitcast=True), CAPACITY)


@triton.jit  # type: ignore[untyped-decorator, misc, unused-ignore]
def end(trace: tl.tensor, at: tl.tensor, CAPACITY: tl.constexpr) -> None:
    """End the trace. Device code; last call in the kernel."""
    _store_clocks(trace + 10)
    stored = tl.minimum(at, CAPACITY)
    tl.store(trace + 5, stored)
    tl.store(trace + 6, at - stored)


class Profile(Launches):
    """An instrumented Triton kernel and its launches.

    Attributes:
        names: names of ranges and instants; the index of a name is its number in the kernel.
        capacity: events that fit into a trace.
        launches: the launches, in the order in which `launch` was called.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        capacity: int = 64,
        num_warps: int = 4,
        kernel: str = "",
        overhead_cycles: float | None = None,
    ) -> None:
        """Prepare launches.

        Args:
            names: names of ranges and instants.
            capacity: events that fit into a trace; a range has two. Further events are only counted.
            num_warps: the kernel's ``num_warps`` at launch; a warp has 32 threads.
            kernel: name of the kernel, for the report.
            overhead_cycles: cycles for recording one event; None: measured once for each device.

        Raises:
            UsageError: a number is out of range.
        """
        super().__init__()
        if not 1 <= capacity <= 1 << 24:
            raise UsageError(f"capacity={capacity}: between 1 and 2**24 events fit into a trace.")
        self.names = tuple(names)
        self.capacity = capacity
        self._block = three(32 * num_warps, "32 * num_warps")
        self._kernel, self._overhead_cycles = kernel, overhead_cycles

    def describe(self, grid: int | Sequence[int], device: int = 0) -> Description:
        """The description of the buffer of a launch with ``grid``.

        Raises:
            UsageError: the grid is larger than CUDA allows, or a dimension is below 1.
        """
        return Description(
            names=self.names,
            grid=three(grid, "grid"),
            block=self._block,
            capacity=self.capacity,
            kernel=self._kernel,
            device=device,
            overhead_cycles=self._overhead_cycles,
        )

    def launch(self, grid: int | Sequence[int]) -> Launch:
        """A zeroed buffer on PyTorch's current device for one launch with ``grid``.

        Raises:
            UsageError: the buffer does not fit into the device's memory.
            MissingRequirement: PyTorch is not installed, or sees no GPU.
        """
        library = arrays_of("torch")
        description = self.describe(grid, library.device())
        description.check(library.limits(), staged=False)
        # One spare record: `begin` lets further programs write there.
        buffer = library.zeros(description.words + description.trace_words)
        arguments = (buffer, description.blocks)
        return self._launched(library, description, arguments, _overhead_on)


@triton.jit  # type: ignore[untyped-decorator, misc, unused-ignore]
def _calibration(events: tl.tensor, blocks: tl.tensor, CAPACITY: tl.constexpr) -> None:
    trace = begin(events, blocks, CAPACITY)
    at = 0
    for _ in range(32):
        at = enter(trace, at, 0, CAPACITY)
        at = exit(trace, at, 0, CAPACITY)
    end(trace, at, CAPACITY)


def event_overhead(repeats: int = 5) -> float:
    """Cycles that recording one event takes on PyTorch's current device.

    This is the median distance of two events without work between them, in a loop. Only the last of
    ``repeats`` launches counts, when the kernel's instructions are in the instruction cache.

    Raises:
        MissingRequirement: PyTorch is not installed, or sees no GPU.
    """
    profile = Profile(["event"], num_warps=1, overhead_cycles=0.0)
    for _ in range(repeats):
        launch = profile.launch(1)
        _calibration[(1,)](*launch.arguments, CAPACITY=profile.capacity, num_warps=1)
    clocks = launch.words()[HEADER_WORDS + 1 :: 2]
    return float(np.median(clocks[1::2] - clocks[::2]))  # correct across a wrap: uint32 subtraction


@functools.cache
def _overhead_on(device: int) -> float:
    import torch  # type: ignore[import-not-found, unused-ignore]

    with torch.cuda.device(device):
        return event_overhead()
