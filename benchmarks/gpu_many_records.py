"""Whether millions of kernels in CUDA graphs are recorded with nothing lost that is not counted, in bounded memory.

    python benchmarks/gpu_many_records.py OUT [--millions 25] [--part full|always|cupti]      # on a GPU with torch

A graph of 1,000 small kernels is replayed 100 times a step. ``full`` records every step. ``always`` records two steps
of four, as `thence record --always` does, until as many records were made; the last windows stay on disk. ``cupti`` has
CUPTI make the same records and drops them unread: the memory of CUPTI itself. Another process watches the program's
memory and the size of what it writes. What the program launched while it was recorded has to be what is on disk, plus
what the recording says that it deleted, dropped or lost; else the exit code is 1.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from command_line import documented_parser

if TYPE_CHECKING:
    from collections.abc import Callable

    from thence.capture.recorder.buffers import Buffers

NODES, REPLAYS = 1000, 100
EVERY, RING, RING_MEGABYTES = 4, 20, 64
MAX_SECONDS = 110
_LOOK_SECONDS = 0.1
_ARENA_BYTES = 64 << 20
"""Where glibc begins the heap of a thread."""
_LEAST_MB = 0.5


def make_records(part: str, out: Path, millions: float) -> None:
    """The program that is recorded; prints what it launched, and MB of memory before."""
    import torch

    import thence

    x = torch.zeros(16, device="cuda")
    x.add_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(NODES):
            x.add_(1)

    def step() -> None:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()

    step()
    sampling = thence.Sampling(every=EVERY, ring=RING, ring_megabytes=RING_MEGABYTES, budget=0, slow_steps=False)
    options = thence.RecordOptions(baseline=False, sampling=sampling if part == "always" else None)
    out.mkdir(parents=True)  # from here on, memory is that of the recording
    time.sleep(2 * _LOOK_SECONDS)
    before, launched, steps = resident_mb("self"), 0, 0
    times: dict[bool, list[float]] = {False: [], True: []}
    began = time.monotonic()
    if part == "cupti":
        make_unread_records(step, millions)
        return
    with thence.record(out, options) as recording:
        while launched < millions * 1e6 and time.monotonic() - began < MAX_SECONDS:
            recorded = recording._steps._recording  # noqa: SLF001 - it has no public name
            launched += NODES * REPLAYS * recorded
            steps += 1
            begin = time.perf_counter()
            step()
            times[recorded].append(time.perf_counter() - begin)
            recording.step()
        stepped = time.monotonic() - began
    usual = {
        "recorded" if on else "not": 1e9 * sorted(some)[len(some) // 2] / NODES / REPLAYS
        for on, some in times.items()
        if some
    }
    print(
        json.dumps(
            {
                "launched": launched,
                "steps": steps,
                "before_mb": before,
                "seconds": round(stepped, 1),
                "seconds_to_end": round(time.monotonic() - began - stepped, 1),
                "ns_a_kernel": {name: round(value) for name, value in usual.items()},
                "device": torch.cuda.get_device_name(),
            }
        )
    )


def make_unread_records(step: Callable[[], None], millions: float) -> None:
    """Has CUPTI make records that nobody reads; prints how many, and MB of memory before."""
    from thence.capture.cuda import layouts
    from thence.capture.cuda.cupti import load
    from thence.capture.recorder.buffers import Buffers

    buffers, cupti = Buffers(160 << 20), load()
    before, launched = resident_mb("self"), 0
    cupti.subscribe()
    cupti.buffers_are_zeroed()
    cupti.register(buffers.requested, buffers.completed)
    cupti.enable(layouts.KERNEL)
    threading.Thread(target=recycle, args=(buffers,), daemon=True).start()
    began = time.monotonic()
    while launched < millions * 1e6 and time.monotonic() - began < MAX_SECONDS:
        step()
        launched += NODES * REPLAYS
    print(json.dumps({"before_mb": before, "launched": launched, "buffers": len(buffers._memory)}))  # noqa: SLF001


def recycle(buffers: Buffers) -> None:
    """Gives CUPTI its buffers back, unread."""
    while (filled := buffers.filled.get()) is not None:
        buffers.recycle(filled)


def resident_mb(process: int | str) -> float:
    """MB of a process in memory; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmRSS")), 0.0)


def resident_by_kind(process: int) -> dict[str, float]:
    """MB of a process in memory: anonymous, its heap, the heaps of threads, and files by name; none if it has ended."""
    kinds, kind = dict[str, float](), ""
    try:
        lines = Path(f"/proc/{process}/smaps").read_text().splitlines()
    except OSError:
        return {}
    for line in lines:
        name, _, rest = line.partition(" ")
        if name.endswith(":"):
            if name == "Rss:":
                kinds[kind] = kinds.get(kind, 0.0) + int(rest.split()[0]) / 1e3
            continue
        begin = int(name.partition("-")[0], 16)
        path = "".join(rest.split(None, 4)[4:])
        of_thread = begin % _ARENA_BYTES == 0 and not path
        kind = Path(path).name if path else "heaps of threads" if of_thread else "anonymous"
    return kinds


def written_mb(folder: Path) -> float:
    """MB of the files in a folder."""
    size = 0
    for path in folder.rglob("*"):
        try:
            size += path.stat().st_size
        except OSError:  # it was deleted meanwhile
            continue
    return size / 1e6


def watched(part: str, out: Path, millions: float) -> bool:
    """Runs the program and prints what it took; whether everything is accounted for."""
    command = [sys.executable, __file__, str(out), "--part", part, "--millions", str(millions), "--program"]
    memory, disk = 0.0, 0.0
    first, most = dict[str, float](), dict[str, float]()
    with tempfile.TemporaryFile("w+") as said, subprocess.Popen(command, stdout=said) as child:
        while child.poll() is None:
            now, disk = resident_mb(child.pid), max(disk, written_mb(out))
            if not first and out.exists():
                first = resident_by_kind(child.pid)
            elif now > memory and first:
                most = resident_by_kind(child.pid)
            memory = max(memory, now)
            time.sleep(_LOOK_SECONDS)
        said.seek(0)
        lines = said.read().splitlines()
    if child.returncode:
        print(f"{part}: exit code {child.returncode}")
        return False
    facts = json.loads(lines[-1])
    grown = {kind: round(mb - first.get(kind, 0.0), 1) for kind, mb in most.items()}
    print(f"{part}: MB more than before, by kind: { {k: mb for k, mb in grown.items() if abs(mb) > _LEAST_MB} }")
    if part == "cupti":
        print(f"  {facts['before_mb']:.0f} MB before, {memory:.0f} MB at most; {facts}")
        return True
    about = json.loads(next(out.rglob("recording.json")).read_text())
    ring = about["ring"] or {"windows": 0, "rows": {}}
    held, deleted = about["counts"].get("kernels", 0), ring["rows"].get("kernels", 0)
    dropped, lost = about["dropped"], about["lost"].get("kernels", 0)
    missing = facts["launched"] - held - deleted - dropped - lost
    print(
        f"{part}: {facts['launched']:,} kernels recorded in {facts['steps']:,} steps and {facts['seconds']} s, "
        f"{facts['seconds_to_end']} s to end; ns a kernel {facts['ns_a_kernel']}; {facts['device']}\n"
        f"  on disk {held:,}, deleted {deleted:,} ({ring['windows']} windows), dropped {dropped:,}, lost {lost:,}: "
        f"{missing:,} not accounted for\n"
        f"  memory {facts['before_mb']:.0f} MB before, {memory:.0f} MB at most; disk {disk:.1f} MB at most, "
        f"{written_mb(out):.1f} MB at the end; warnings {about['warnings']}",
        flush=True,
    )
    return missing == 0


def main() -> int:
    """Reads the options."""
    parser = documented_parser(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--millions", type=float, default=25)
    parser.add_argument("--part", choices=("full", "always", "cupti"))
    parser.add_argument("--program", action="store_true", help="be the program that is recorded")
    given = parser.parse_args()
    if given.program:
        make_records(given.part, given.out, given.millions)
        return 0
    parts = (given.part,) if given.part else ("full", "always", "cupti")
    right = [watched(part, given.out / part, given.millions) for part in parts]
    return int(not all(right))


if __name__ == "__main__":
    sys.exit(main())
