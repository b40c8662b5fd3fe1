"""Buffers of in-kernel events made by hand: word by word, from what a kernel would have done."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from helpers import DATA, kernel, launch, opened
from thence.inside.decoding import decode
from thence.inside.description import Description

if TYPE_CHECKING:
    from pathlib import Path

    import thence
    from thence.inside.decoding import Decoded

RECORDED = DATA / "inside"
NAMES = ("load", "compute", "store")
LOAD, COMPUTE, STORE = range(3)
ENTER, EXIT, INSTANT = range(3)
START = 1_795_196_758_971_754_976  # a %globaltimer
EPOCH = 1_795_196_758_000_000_000  # where a trace's clock reads 0
LOW = 0xFFFF_FFFF

Event = tuple[int, int, int]  # kind, name, counter since the trace's start


@dataclass
class Trace:
    """One warp's doings; counters of events are in cycles unless ``in_ns``."""

    events: list[Event]
    start: int = START
    clock: int = 1_000_000
    ns: int = 10_000
    cycles: int = 19_700
    sm: int = 0
    in_ns: bool = False
    dropped: int = 0
    finished: bool = True
    patch: dict[int, int] = field(default_factory=dict)  # words of the header to overwrite


def ranges(*parts: tuple[int, int, int]) -> list[Event]:
    """Events of ranges one after another: name, start, end."""
    return [e for name, start, end in parts for e in ((ENTER, name, start), (EXIT, name, end))]


def description(blocks: int, capacity: int, **fields: Any) -> Description:
    return Description(names=NAMES, grid=(blocks, 1, 1), block=(128, 1, 1), capacity=capacity, kernel="gemm", **fields)


def launched(start: int, ns: int = 30_000, **fields: Any) -> Decoded:
    """A launch of gemm whose first block starts then, and whose last ends so much later."""
    half = Trace(ranges((LOAD, 0, 2000)), start=start, ns=10_000, cycles=20_000)
    last = Trace(ranges((STORE, 0, 2000)), start=start + ns - 10_000, ns=10_000, cycles=20_000)
    return decode(thence_buffer([half, half, half, last], 2), description(4, 2, overhead_cycles=0, **fields))


def recording(folder: Path, *kernels: tuple[int, int], epoch: int | None = EPOCH, **args: Any) -> thence.Trace:
    """A trace with launches of gemm: starts and durations in ns; each was called for 5 us before."""
    args = {"grid": [4, 1, 1], "block": [128, 1, 1]} | args
    events = [
        e
        for i, (start, ns) in enumerate(kernels, 1)
        for e in (
            launch(i, start / 1000 - 5),
            kernel(i, f"{start / 1000:.3f}", f"{ns / 1000:.3f}", name="gemm", args=args),
        )
    ]
    more = {} if epoch is None else {"baseTimeNanoseconds": epoch}
    return opened(folder, [*events, launch(99, 1), kernel(99, 2, name="other")], **more)


def thence_buffer(traces: list[Trace | None], capacity: int, per_block: int = 1) -> np.ndarray:
    """A buffer in thence's own layout; None leaves the trace unwritten."""
    words = np.zeros((len(traces), 16 + 2 * capacity), np.uint64)
    for number, trace in enumerate(traces):
        if trace is None:
            continue
        row = words[number]
        row[0], row[1] = 0x7E4CE001, 2 | trace.in_ns << 8
        row[2], row[3], row[4] = trace.sm, number // per_block, number % per_block
        row[5], row[6], row[7] = len(trace.events), trace.dropped, capacity
        whole = [trace.start, trace.start + trace.ns, trace.clock, trace.clock + trace.cycles]
        for place, value in zip((8, 10, 12, 14), whole, strict=True):
            if trace.finished or place in (8, 12):
                row[place], row[place + 1] = value & LOW, value >> 32
        base = trace.start if trace.in_ns else trace.clock
        for i, (kind, name, counter) in enumerate(trace.events[:capacity]):
            row[16 + 2 * i] = kind << 30 | name
            row[17 + 2 * i] = (base + counter) & LOW
        for place, value in trace.patch.items():
            row[place] = value
    return words.reshape(-1).astype(np.uint32)


def mosaic_buffer(traces: list[Trace | None], entries: int, *, counts_header: bool = False) -> np.ndarray:
    """A buffer of JAX's profiler; counters are cycles, the first event is the trace's start."""
    words = np.zeros((len(traces), entries), np.uint64)
    for row, trace in zip(words, traces, strict=True):
        if trace is None:
            continue
        row[0], row[1] = trace.start & LOW, trace.sm
        row[2] = 2 * len(trace.events) + 3 * counts_header
        for i, (kind, name, counter) in enumerate(trace.events[: (entries - 3) // 2]):
            row[3 + 2 * i] = kind << 31 | name
            row[4 + 2 * i] = (trace.clock + counter) & LOW
        for place, value in trace.patch.items():
            row[place] = value
    return words.reshape(-1).astype(np.uint32)


def flashinfer_buffer(traces: list[Trace | None], groups: int, room: int, flavour: str = "flashinfer") -> np.ndarray:
    """A buffer of FlashInfer's profiler: entries of (tag, %globaltimer), strided; counters are ns."""
    blocks = len(traces) // groups
    words = np.zeros((1 + room * len(traces), 2), np.uint64)
    words[0] = blocks, groups
    for number, trace in enumerate(traces):
        for i, (kind, name, ns) in enumerate(trace.events if trace else ()):
            if flavour == "flashinfer":
                tag = trace.sm << 24 | (number // groups) << 12 | name << 2 | kind
            elif flavour == "flashinfer-old":
                tag = number << 12 | name << 2 | kind
            else:
                tag = (i << 22 | number << 11 | name << 2 | kind) & LOW
            words[1 + i * len(traces) + number] = tag & LOW, (trace.start + ns) & LOW
    return words.reshape(-1).astype(np.uint32)


def proton_buffer(blocks: list[list[Trace]], ring: int, *, times: bool = True, clock_bits: int = 43) -> np.ndarray:
    """A host buffer of Proton: for each block the traces of its warps, ``ring`` events of room each."""
    warps = len(blocks[0])
    header = 10 if times else 4
    block_words = header + warps + 2 * ring * warps
    words = [1, 4, 40 + 4 * warps, 40 + 4 * warps, 4 * block_words * len(blocks), 1]
    words += [len(blocks), warps, 4 * block_words, warps, *range(warps)]
    for number, traces in enumerate(blocks):
        first = traces[0]
        words += [0xDEADBEEF, number, first.sm, 8 * ring * warps]
        if times:
            end = first.start + first.ns
            for moment in (first.start, end, end + 500):
                words += [moment & LOW, moment >> 32]
        words += [2 * len(trace.events) for trace in traces]
        for trace in traces:
            part = [0] * (2 * ring)
            for i, (kind, name, counter) in enumerate(trace.events):
                clock = (trace.clock + counter) % (1 << clock_bits)
                part[2 * (i % ring)] = kind << 31 | name << 23 | clock >> 32
                part[2 * (i % ring) + 1] = clock & LOW
            words += part
    return np.array(words, np.uint64).astype(np.uint32)


def rows(decoded: Any, *columns: str) -> list[tuple[Any, ...]]:
    """Rows of the ranges; names and kinds as text."""
    return decoded.ranges.select(columns or ("trace", "name", "start_ns", "duration_ns")).rows()
