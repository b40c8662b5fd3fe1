"""How fast a 500 MB SQLite export of Nsight Systems is read, and with how much memory.

The export is a recording repeated: rows again and again, with later times and further ids. Each
reading is a fresh process, which imports thence as well; the best of several counts. The yardsticks
read the same file on the same machine, in turns with thence: Python's own ``sqlite3`` and, where it is
installed, Pandas fetch all columns of the large tables, and do nothing with them. Memory is the most
that the process and all that it started held at once.
Targets: 5 s and 1.5 GB.

    python benchmarks/read_nsight.py [--megabytes 500] [--recording FILE.sqlite.gz] [--keep FILE.sqlite]
        [--times 3]
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from command_line import documented_parser

RECORDING = Path(__file__).parents[1] / "tests" / "data" / "nsight" / "torch_ddp.sqlite.gz"
SHIFTED_NS = ("start", "end")
SHIFTED_IDS = ("correlationId",)
TABLES = (
    *("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"),
    *("CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"),
)
TARGET_S, TARGET_MB = 5, 1500


def made(recording: Path, target: Path, megabytes: int) -> None:
    """An export of at least that size."""
    target.write_bytes(gzip.decompress(recording.read_bytes()))
    with closing(sqlite3.connect(target)) as connection:
        connection.execute("pragma journal_mode = off")
        connection.execute("pragma synchronous = off")
        span, ids = connection.execute(
            "select max(end) - min(start) + 1000000, max(correlationId) + 1 from CUPTI_ACTIVITY_KIND_RUNTIME"
        ).fetchone()
        times = 1
        while (missing := megabytes * 1_000_000 / target.stat().st_size - 1) > 0:
            for table in present(connection):
                (rows,) = connection.execute(f"select count(*) from {table}").fetchone()
                wanted = min(rows, int(rows * missing) + 1)
                columns = [row[1] for row in connection.execute(f"pragma table_info({table})")]
                chosen = ", ".join(
                    f"{c} + {span * times}" if c in SHIFTED_NS
                    else f"{c} + {ids * times}" if c in SHIFTED_IDS
                    else c
                    for c in columns
                )  # fmt: skip
                connection.execute(f"insert into {table} select {chosen} from {table} limit {wanted}")
            connection.commit()
            times *= 2


def present(connection: sqlite3.Connection) -> list[str]:
    names = {row[0] for row in connection.execute("select name from sqlite_master")}
    return [table for table in TABLES if table in names]


def with_thence(path: Path) -> str:
    import thence

    trace = thence.open(path)
    return f"{trace.tables.gpu.height:,} activities, {trace.tables.host.height:,} ranges"


def with_sqlite3(path: Path) -> str:
    with closing(sqlite3.connect(path)) as connection:
        rows = sum(len(connection.execute(f"select * from {t}").fetchall()) for t in present(connection))
    return f"{rows:,} rows"


def with_pandas(path: Path) -> str:
    import pandas as pd

    with closing(sqlite3.connect(path)) as connection:
        rows = sum(len(pd.read_sql(f"select * from {t}", connection)) for t in present(connection))
    return f"{rows:,} rows"


READERS = {"thence": with_thence, "sqlite3": with_sqlite3, "pandas": with_pandas}


def measured(reader: str, path: Path) -> None:
    """Reads in this process, and prints what was read; seconds, seconds of processors, megabytes."""
    begin, busy = time.perf_counter(), time.process_time()
    said = READERS[reader](path)
    seconds, busy = time.perf_counter() - begin, time.process_time() - busy
    peak = sum(resource.getrusage(who).ru_maxrss / 1000 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(f"{said}|{seconds}|{busy}|{peak}")


def compared(path: Path, times: int) -> None:
    readers = [r for r in READERS if r != "pandas" or importlib.util.find_spec("pandas")]
    best: dict[str, tuple[str, float, float, float]] = {}
    for _ in range(times):
        for reader in readers:
            command = [sys.executable, __file__, "--reader", reader, "--keep", str(path)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            said, *numbers = output.strip().split("|")
            seconds, busy, peak = map(float, numbers)
            if reader in best:
                known = best[reader]
                seconds, busy = min(seconds, known[1]), min(busy, known[2])
                peak = max(peak, known[3])
            best[reader] = said, seconds, busy, peak
    print(f"{path.stat().st_size / 1e6:.0f} MB, best of {times}, most memory of {times}")
    for reader, (said, seconds, busy, peak) in best.items():
        print(f"  {reader:8} {seconds:7.2f} s  {busy:7.2f} s CPU  {peak:6.0f} MB  {said}")
    _, seconds, _, peak = best["thence"]
    for reader in readers[1:]:
        print(f"  {best[reader][1] / seconds:.1f} times as fast as {reader},"
              f" with {peak / best[reader][3]:.2f} of its memory")  # fmt: skip
    met = seconds < TARGET_S and peak < TARGET_MB
    print(f"  target {TARGET_S} s and {TARGET_MB} MB: {'met' if met else 'not met'}")


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--recording", type=Path, default=RECORDING)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--reader", choices=READERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reader:
        measured(options.reader, options.keep)
        return
    with tempfile.TemporaryDirectory() as folder:
        target = options.keep or Path(folder) / "large.sqlite"
        if not target.exists():
            made(options.recording, target, options.megabytes)
        compared(target, options.times)


if __name__ == "__main__":
    main()
