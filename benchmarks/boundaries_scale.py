"""Ten million kernels between two million boundaries: bytes on disk, time to stop, and time to read them.

    python benchmarks/boundaries_scale.py [--kernels 10000000] [--boundaries 2000000]

No GPU: the libcupti of the tests hands the recorder its records as the real one does. The program is in 200
modules and on 600 lines, five calls deep, by turns; one thread launches. Needs a C compiler. Recording and reading
run in processes of their own, so that each one's memory is its own.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from command_line import documented_parser

SUPPORT = Path(__file__).parents[1] / "tests" / "support"
MODULES, LINES, DEPTH = 200, 600, 5


def memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def record(directory: Path, kernels: int, boundaries: int) -> None:
    """The program that is recorded."""
    import fake_cupti

    fake = fake_cupti.Fake(os.environ["THENCE_LIBCUPTI"])
    import thence
    from thence.capture.boundaries.places import LINE, MODULE, STEP, Place

    name = fake.text("_Z3addPfi")
    kernel = fake.record("CONCURRENT_KERNEL", name=name, deviceId=0, streamId=7, gridX=4, blockX=128)
    recording = thence.record(directory, thence.RecordOptions(nvtx=False))
    recording.start()
    idle = memory_mb()
    places, log = recording.noted.places, recording.noted.log
    numbers = []
    for kind, count in ((MODULE, MODULES), (LINE, LINES)):
        parent = 0
        for i in range(count):
            text = f"model.layers.{i}" if kind == MODULE else f"function_{i // 20}"
            parent = 0 if i % DEPTH == 0 else parent
            parent = places.number(Place(kind, parent, text, "train.py", i if kind == LINE else 0))
            numbers.append(parent)
    each, steps = kernels // boundaries, 0
    begin = time.perf_counter()
    noting = 0.0
    for i in range(boundaries):
        if i % 10_000 == 0:
            steps += 1
            log.note(places.number(Place(STEP, 0, f"step {steps}")))
        moment = time.perf_counter()
        log.note(numbers[i % len(numbers)])
        noting += time.perf_counter() - moment
        fake.kernels(kernel, each, time.time_ns() + 5_000, 1_000)
    took = time.perf_counter() - begin
    begin = time.perf_counter()
    recording.stop()
    stop = time.perf_counter() - begin
    folder = recording.folder
    assert folder is not None
    sizes = {}
    for path in folder.iterdir():
        table = path.name.partition("-")[0]
        sizes[table] = sizes.get(table, 0) + path.stat().st_size
    total, rows = sum(sizes.values()), recording.counts["kernels"]
    print(f"recorded {recording.counts} in {took:.1f} s, dropped {recording.dropped}; stop {stop:.2f} s")
    print(f"{total / 1e6:.0f} MB on disk, {total / rows:.1f} bytes a kernel:",
          {table: f"{size / 1e6:.1f} MB" for table, size in sizes.items()})  # fmt: skip
    print(f"a boundary took {noting / boundaries * 1e9:.0f} ns with its two clocks; memory at most "
          f"{memory_mb():.0f} MB, {memory_mb() - idle:+.0f} since it began")  # fmt: skip


def read(directory: Path) -> None:
    """The recording as a trace, and its places."""
    begin = time.perf_counter()
    import thence

    trace = thence.open(str(directory))
    opened = time.perf_counter()
    summary = trace.report("source")
    done = time.perf_counter()
    shares = {kind: f"{ns / summary.sum_ns:.4f}" for kind, ns in summary.attributed_ns.items()}
    gpu, host = trace.tables.gpu, trace.tables.host
    print(f"opened in {opened - begin:.1f} s: {gpu.height:,} activities, {host.height:,} host rows; "
          f"attributed in {done - opened:.1f} s; memory at most {memory_mb():.0f} MB")  # fmt: skip
    print("share of the time with a place:", shares, trace.meta.warnings)


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--kernels", type=int, default=10_000_000)
    parser.add_argument("--boundaries", type=int, default=2_000_000)
    parser.add_argument("--part", choices=("record", "read"), help="as this script calls itself")
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
    sys.path.insert(0, str(SUPPORT))
    if options.part == "record":
        record(options.directory, options.kernels, options.boundaries)
        return
    if options.part == "read":
        read(options.directory)
        return
    from fake_cupti import library_path

    library = library_path()
    environment = {**os.environ, "THENCE_LIBCUPTI": library, "THENCE_LIBCUDART": library}
    with tempfile.TemporaryDirectory() as scratch:
        for part in ("record", "read"):
            command = [sys.executable, __file__, "--part", part, "--directory", f"{scratch}/out"]
            numbers = ["--kernels", str(options.kernels), "--boundaries", str(options.boundaries)]
            subprocess.run([*command, *numbers], check=True, env=environment)


if __name__ == "__main__":
    main()
