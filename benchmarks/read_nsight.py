"""How fast a 500 MB SQLite export of Nsight Systems is read, and with how much memory.

The export is a recording repeated: rows again and again, with later times and further ids.
Targets: 5 s and 1.5 GB.

    python benchmarks/read_nsight.py [--megabytes 500] [--recording FILE.sqlite.gz] [--keep FILE.sqlite]
"""

from __future__ import annotations

import argparse
import gzip
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

RECORDING = Path(__file__).parents[1] / "tests" / "data" / "nsight" / "torch_ddp.sqlite.gz"
SHIFTED_NS = ("start", "end")
SHIFTED_IDS = ("correlationId",)
TABLES = (
    *("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"),
    *("CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"),
)


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
            for table in TABLES:
                (rows,) = connection.execute(f"select count(*) from {table}").fetchone()
                wanted = min(rows, int(rows * missing) + 1)
                columns = [row[1] for row in connection.execute(f"pragma table_info({table})")]
                chosen = ", ".join(
                    f"{c} + {span * times}" if c in SHIFTED_NS
                    else f"{c} + {ids * times}" if c in SHIFTED_IDS
                    else c
                    for c in columns
                )  # fmt: skip
                connection.execute(
                    f"insert into {table} select {chosen} from {table} limit {wanted}"
                )
            connection.commit()
            times *= 2


def measured(path: Path) -> None:
    """Reads in a process of its own, and prints."""
    import thence

    begin = time.perf_counter()
    trace = thence.open(path)
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    size = path.stat().st_size / 1e6
    print(
        f"{size:.0f} MB, {trace.gpu.height:,} activities, {trace.host.height:,} ranges:"
        f" {seconds:.2f} s, {peak:.0f} MB at most"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--recording", type=Path, default=RECORDING)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        measured(options.read)
        return
    with tempfile.TemporaryDirectory() as folder:
        target = options.keep or Path(folder) / "large.sqlite"
        if not target.exists():
            made(options.recording, target, options.megabytes)
        subprocess.run([sys.executable, __file__, "--read", str(target)], check=True)


if __name__ == "__main__":
    main()
