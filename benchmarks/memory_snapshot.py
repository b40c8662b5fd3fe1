"""CPU seconds and peak memory of reading a large snapshot of PyTorch's memory.

    python benchmarks/memory_snapshot.py [--megabytes 500] [--depth 40]

The snapshot has the shape of those of torch 2.11: every event has a list of frames of its own, of C++ and Python, and
lists share their frames. A program of the model of PyTorch's allocator (`tests/support/torch_allocator.py`) is repeated
until the file has its size; its peak is known, and compared. Needs no GPU. With ``--depth 0`` events have no frames, as
with ``context=None``: then a file of one size has the most events.
"""

from __future__ import annotations

import random
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from command_line import documented_parser

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from torch_allocator import Allocator, snapshot

if TYPE_CHECKING:
    from typing import BinaryIO

_READ = """
import resource, sys, time
from thence.readers import registry
before = time.process_time()
tables = registry.read([sys.argv[1]])
rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
print(tables.memory_totals["allocated"].max(), len(tables.memory_totals), time.process_time() - before, rss)
"""


class Pickler:
    """Writes what Python's pickler would, for a history that is too long to be held as objects."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream
        self.written = self.memoized = 0
        self.shared: dict[Any, int] = {}
        self.buffer = bytearray()

    def flush(self) -> None:
        """Writes what was built."""
        self.stream.write(self.buffer)
        self.written += len(self.buffer)
        self.buffer.clear()

    def begin(self, opcode: bytes) -> None:
        """An empty container, with its memo index."""
        self.buffer += opcode + b"\x94"
        self.memoized += 1

    def value(self, value: Any) -> None:  # noqa: C901 - a case for each type
        """Any value of a snapshot; frames and texts are shared."""
        key = (
            value if isinstance(value, str) else id(value) if isinstance(value, dict) and "filename" in value else None
        )
        if key is not None and key in self.shared:
            self.buffer += b"j" + struct.pack("<I", self.shared[key])
            return
        if key is not None:
            self.shared[key] = self.memoized
        if isinstance(value, bool):
            self.buffer += b"\x88" if value else b"\x89"
        elif isinstance(value, int):
            content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self.buffer += b"K" + bytes([value]) if 0 <= value < 256 else b"\x8a" + bytes([len(content)]) + content
        elif isinstance(value, float):
            self.buffer += b"G" + struct.pack(">d", value)
        elif isinstance(value, str):
            content = value.encode()
            self.begin(b"X" + struct.pack("<I", len(content)) + content)
        elif isinstance(value, tuple):
            for element in value:
                self.value(element)
            self.begin(b"\x86")
        elif isinstance(value, list):
            self.begin(b"]")
            self.extend(value)
        else:
            self.begin(b"}")
            self.buffer += b"("
            for name, element in value.items():
                self.value(name)
                self.value(element)
            self.buffer += b"u"

    def extend(self, values: list[Any]) -> None:
        """Appends to the list below, in batches."""
        for begin in range(0, len(values), 1000):
            self.buffer += b"("
            for value in values[begin : begin + 1000]:
                self.value(value)
            self.buffer += b"e"


def program(depth: int) -> Allocator:
    """A cycle of 20,000 allocations at most 300 of which are live, and which ends with none."""
    dice = random.Random(1)
    frames = [
        {"filename": f"/usr/lib/python3/site-packages/torch/nn/f{n % 30}.py", "line": n, "name": f"f{n % 500}"}
        for n in range(5000)
    ]
    stacks = [dice.sample(frames, depth) for _ in range(2000)]
    allocator, live = Allocator(), []
    for _ in range(20_000):
        if len(live) == 300:
            allocator.free(live.pop(dice.randrange(300)))
        live.append(allocator.malloc(int(2 ** dice.uniform(8, 25)), dice.choice(stacks)))
    for block in live:
        if block is not None:
            allocator.free(block)
    allocator.empty_cache()
    return allocator


def write(path: Path, megabytes: int, depth: int) -> int:
    """Writes a snapshot of this size; returns the peak of its program."""
    allocator = program(depth)
    state = snapshot(allocator)
    with path.open("wb") as stream:
        pickler = Pickler(stream)
        pickler.buffer += b"\x80\x04"
        pickler.begin(b"}")
        pickler.buffer += b"("
        for name in ("segments", "allocator_settings"):
            pickler.value(name)
            pickler.value(state[name])
        pickler.value("device_traces")
        pickler.begin(b"]")
        pickler.buffer += b"("
        pickler.begin(b"]")
        span = allocator.trace[-1]["time_us"] - allocator.trace[0]["time_us"] + 1
        while pickler.written < megabytes * 1_000_000:
            pickler.extend([entry | {"frames": list(entry["frames"])} for entry in allocator.trace])
            pickler.flush()
            for entry in allocator.trace:
                entry["time_us"] += span
        pickler.buffer += b"eu."
        pickler.flush()
    return allocator.peak


def main() -> None:
    """Writes the snapshot, and reads it in a process of its own."""
    parser = documented_parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=500, help="size of the snapshot")
    parser.add_argument("--depth", type=int, default=40, help="frames of a stack")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot.pickle"
        peak = write(path, options.megabytes, options.depth)
        run = subprocess.run([sys.executable, "-c", _READ, str(path)], capture_output=True, text=True, check=True)
        found, events, seconds, gigabytes = map(float, run.stdout.split())
        size = path.stat().st_size / 1e6
    print(f"{size:,.0f} MB, {events:,.0f} changes: {seconds:.1f} CPU s, {gigabytes:.2f} GB at most")
    print("the peak is that of the program" if found == peak else f"WRONG: the peak is {found:,.0f}, not {peak:,}")


if __name__ == "__main__":
    main()
