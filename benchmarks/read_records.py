"""What reading CUPTI's records costs: ms of one thread per 20,000 kernels, best and median of 15 rounds.

    python benchmarks/read_records.py

Needs no GPU: buffers are filled here as CUPTI fills them, and their records' sizes are those of CUDA 13.
Kernels only, kernels that take turns with one and with two API records, and both in bursts of 200. Buffers
are read in turn, so that none of them is in a processor's own cache; the last column adds what a
recording does with the columns: numbers for names, and a part in memory.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from typing import TYPE_CHECKING

import numpy as np

from command_line import documented_parser
from thence.capture.cuda.layouts import DRIVER, KERNEL, LAYOUTS, RUNTIME
from thence.capture.recorder.activity_parser import ActivityParser
from thence.capture.recorder.names import Names
from thence.model.column_file import encode

if TYPE_CHECKING:
    from collections.abc import Callable

BUFFER_BYTES, BUFFERS, ROUNDS = 4 << 20, 8, 15
SIZES = {KERNEL: 216, RUNTIME: 40, DRIVER: 40}
TEXTS = [ctypes.create_string_buffer(f"_Z6kernel{i:03}Pfi".encode()) for i in range(40)]
NAMES = np.array([ctypes.addressof(text) for text in TEXTS], np.uint64)
PATTERNS = {
    "kernels only": [KERNEL],
    "one API record a kernel": [RUNTIME, KERNEL],
    "two API records a kernel": [RUNTIME, DRIVER, KERNEL],
    "bursts of 200": [RUNTIME] * 200 + [KERNEL] * 200,
}


class Library:
    """Knows the sizes of records, as libcupti does."""

    def next_record(self, buffer: int, valid_bytes: int, record: int) -> int | None:
        following = record + SIZES[ctypes.c_uint32.from_address(record).value]
        return following if following < buffer + valid_bytes else None


def filled(pattern: list[int], seed: int) -> tuple[np.ndarray, int]:
    """A buffer, and how many of its bytes are records."""
    random = np.random.default_rng(seed)
    sizes = np.array([SIZES[kind] for kind in pattern])
    kinds = np.array(pattern * (BUFFER_BYTES // int(sizes.sum()) + 1))
    places = np.cumsum(np.array([SIZES[kind] for kind in kinds.tolist()]))
    kinds = kinds[places <= BUFFER_BYTES]
    places = np.concatenate([[0], places])[: len(kinds)]
    memory = np.zeros(BUFFER_BYTES, np.uint8)
    for kind, size in SIZES.items():
        own = places[kinds == kind]
        records = np.zeros(len(own), fields(kind, size))
        records["kind"] = kind
        records["start"] = 10**18 + 7000 * np.arange(len(own)) + random.integers(0, 999, len(own))
        records["end"] = records["start"] + random.integers(1000, 3000, len(own)).astype(np.uint64)
        records["correlation"] = np.arange(len(own)) + 1
        if kind == KERNEL:
            records["name"] = random.choice(NAMES, len(own))
            records["stream"], records["registers"] = 7, 40
            for axis in "xyz":
                records[f"grid_{axis}"], records[f"block_{axis}"] = random.integers(1, 12, 2)
        else:
            records["function"], records["thread"] = 211, 4321
        memory[own[:, None] + np.arange(size)] = records.view(np.uint8).reshape(len(own), size)
    return memory, int(places[-1]) + SIZES[int(kinds[-1])]


def fields(kind: int, size: int) -> np.dtype:
    offsets = {"kind": (0, "<u4"), **LAYOUTS[kind].fields}
    places, formats = zip(*offsets.values(), strict=True)
    return np.dtype({"names": list(offsets), "formats": formats, "offsets": places, "itemsize": size})


def measured(read: Callable[[np.ndarray, int], int], buffers: list[tuple[np.ndarray, int]]) -> str:
    """Best and median over rounds; `read` says how many kernels there were."""
    spent = []
    for _ in range(ROUNDS):
        begin, kernels = time.thread_time(), 0
        for memory, valid in buffers:
            kernels += read(memory, valid)
        spent.append(1e3 * 20_000 * (time.thread_time() - begin) / kernels)
    return f"{min(spent):6.2f} {statistics.median(spent):6.2f}"


def main() -> None:
    documented_parser(__doc__).parse_args()
    print(f"{'ms per 20,000 kernels':28}       columns    with names and a part")
    for name, pattern in PATTERNS.items():
        parser, names = ActivityParser(Library()), Names()
        buffers = [filled(pattern, seed) for seed in range(BUFFERS)]

        def columns(memory: np.ndarray, valid: int, parser: ActivityParser = parser) -> int:
            found = list(parser.read(int(memory.ctypes.data), valid))
            return sum(len(some["start"]) for kind, some in found if kind == KERNEL)

        def part(memory: np.ndarray, valid: int, parser: ActivityParser = parser, names: Names = names) -> int:
            kernels = 0
            for kind, some in parser.read(int(memory.ctypes.data), valid):
                named = {name: names.of_pointers(some[name]) for name in LAYOUTS[kind].names}
                encode({**some, **named})
                kernels += len(some["start"]) if kind == KERNEL else 0
            return kernels

        assert columns(*buffers[0]) > 9000
        print(f"{name:28} {measured(columns, buffers):>16} {measured(part, buffers):>20}")


if __name__ == "__main__":
    main()
