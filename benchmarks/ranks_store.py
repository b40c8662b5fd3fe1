"""Jobs of many ranks: how ingesting them grows, what a worker takes, and how long a store takes to answer.

Ranks are made from the four of a real FSDP recording: the recording again and again, later each time, until a rank
has the wanted size. Every rank gets a number, process groups and a clock of its own, and one kernel whose duration
says which rank it is; these are found again in the store, so no rank was mixed up or lost. Ranks are made while they
are read, through a file system of fsspec (pip install 'thence[remote]'), and lie nowhere.

    reader         one rank read and attributed in a process of its own: CPU seconds, which ingest is compared with
    ingest         for each count of ranks: wall seconds, CPU seconds of all workers, most memory of a worker and of
                   the process that hands out the work
    questions      ``thence report STORE --by rank``, ``thence report STORE``, ``thence ranks STORE``, each a process
    summaries      the same for a store that has the summaries of so many ranks, and no tables

    python benchmarks/ranks_store.py [--megabytes 80] [--ranks 8 64 512] [--processes 16] [--summaries 10000]

Times of a machine that does other work are too long; CPU seconds suffer less.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import polars as pl

import thence
from command_line import documented_parser
from kineto_input import write_repeated
from thence.store.ingest import Sources, ingest
from thence.store.layout import MANIFEST, SUMMARIES, Settings, read_manifest, write_json
from thence.store.workers import LocalWorkers

RECORDINGS = sorted((Path(__file__).parent.parent / "tests/data/torch").glob("torch_fsdp_rank?.json.gz"))
PROGRAM = """
import re, sys
from thence.cli import main
try:
    main(sys.argv[1:])
finally:
    print(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1], file=sys.stderr)
"""
"""A command line that ends with the most KiB of memory it has used."""
BODIES = "THENCE_RANKS_STORE"
"""Variable that tells workers where the bodies of the ranks are."""
MEMBERS = b"[0, 1, 2, 3]"
HEAD = b'"traceEvents": ['
STEP = re.compile(rb'"name": "ProfilerStep#(\d+)"')
QUESTIONS = (("report", "--by", "rank"), ("report",), ("report", "--by", "label"), ("ranks",))
HEADINGS = (
    "| ranks | s wall | CPU s a rank | of the reader alone | memory of a worker | CPU s to hand out | on disk, a rank |"
)
CLOCK_NS = 1_790_857_026_000_000_000


class Rank(io.RawIOBase):
    """The bytes of one rank: a head of its own, then the body of the recording that it is made of."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        group = rank // 4 * 4
        self._members = b"[%d, %d, %d, %d]" % (group, group + 1, group + 2, group + 3)
        self._body = (Path(os.environ[BODIES]) / f"{rank % 4}.json").open("rb")
        self._ahead = head(rank, self._members)
        self._kept = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ahead:
            more = self._body.read(1 << 20)
            text = self._kept + more
            # A list of members may lie across the end of what was read.
            cut = text.rfind(b"[") if more else -1
            cut = len(text) if cut < len(text) - len(MEMBERS) else cut
            self._ahead, self._kept = text[:cut].replace(MEMBERS, self._members), text[cut:]
            if not more:
                break
        given = self._ahead[: len(buffer)]
        self._ahead = self._ahead[len(given) :]
        buffer[: len(given)] = given
        return len(given)


def head(rank: int, members: bytes) -> bytes:
    """What a rank says of itself, and the kernel that is planted in it: it lasts ``rank`` + 1 us."""
    ranks = list(map(int, members.strip(b"[]").split(b",")))
    about = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": rank % 4, "name": "NVIDIA H200", "totalGlobalMem": 150109880320}],
        "distributedInfo": {
            "backend": "nccl", "rank": rank, "world_size": 1 << 20,
            "pg_config": [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": 4, "ranks": ranks}],
        },
        "baseTimeNanoseconds": CLOCK_NS + 1_000 * rank,
    }  # fmt: skip
    planted = {
        "ph": "X", "cat": "kernel", "name": "planted", "pid": 0, "tid": 7, "ts": 4338285600000, "dur": rank + 1,
        "args": {"device": rank % 4, "stream": 7, "correlation": 0},
    }  # fmt: skip
    text = msgspec.json.encode(about)[:-1] + b", " + HEAD
    return text + b"\n  " + msgspec.json.format(msgspec.json.encode(planted), indent=2).replace(b"\n", b"\n  ") + b","


class Ranks(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """Ranks as files: ``rank://17.json``."""

    protocol = "rank"

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        rank = int(Path(self._strip_protocol(path)).stem)
        size = (Path(os.environ[BODIES]) / f"{rank % 4}.json").stat().st_size
        return {"name": path, "size": size, "type": "file", "mtime": "0"}

    def ls(self, path: str, **_: Any) -> list[Any]:
        return [self.info(path)]

    def _open(self, path: str, *_: Any, **__: Any) -> Any:
        return Rank(int(Path(self._strip_protocol(path)).stem))


fsspec.register_implementation("rank", Ranks, clobber=True)  # in every worker, which imports this script


def write_bodies(folder: Path, size: int) -> None:
    """The events of every recording, repeated, without what stands before them."""
    for rank, recording in enumerate(RECORDINGS):
        whole = folder / "whole.json"
        write_repeated(recording, whole, size)
        text = whole.read_bytes()
        text = text[text.index(HEAD) + len(HEAD) :]
        text = numbered_steps(text)
        (folder / f"{rank}.json").write_bytes(text)
        whole.unlink()


def numbered_steps(text: bytes) -> bytes:
    """The events with their steps numbered one after the other."""
    number = itertools.count()
    return STEP.sub(lambda _: b'"name": "ProfilerStep#%d"' % next(number), text)


def reader_cpu() -> float:
    """CPU seconds of one rank read and attributed, and nothing written, in a process of its own."""
    code = (
        f"import sys, time; sys.path.insert(0, {str(Path(__file__).parent)!r}); import ranks_store\n"
        "from thence.readers.registry import read; from thence.attribution.attribute import attribute\n"
        "began = time.process_time(); trace = attribute(read(['rank://1.json'], cores=1))\n"
        "print(time.process_time() - began)"
    )
    environment = os.environ | {"POLARS_MAX_THREADS": "1"}
    done = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=environment) for _ in range(3)
    ]
    return min(float(one.stdout) for one in done)


def asked(*arguments: str) -> str:
    """Wall and CPU seconds, and peak memory, of a command line in a process of its own."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments, "--format", "json"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    told = process.stderr.read().split() if process.stderr else []
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - began
    cpu = used.ru_utime + used.ru_stime
    words = " ".join(Path(word).name for word in arguments)
    if process.returncode not in (0, 1):
        raise RuntimeError(f"thence {words} ended with {process.returncode}")
    return f"{words}: {wall:.1f} s wall, {cpu:.1f} s CPU, {int(told[-1]) / 1024:,.0f} MiB, exit {process.returncode}"


def grown(folder: Path, count: int, processes: int, alone: float) -> Path:
    """Ingests so many ranks and prints what it took; the store."""
    store = folder / f"{count}.store"
    sources = Sources(tuple(f"rank://{rank}.json" for rank in range(count)))
    settings = Settings(max_expansion=200, thence=thence.__version__)
    began, before = time.perf_counter(), time.process_time()
    done = ingest(sources, store, settings, workers=LocalWorkers(processes))
    wall, here = time.perf_counter() - began, time.process_time() - before
    entries = done.manifest.entries
    cpu = sum(entry.cpu_seconds for entry in entries)
    peak = max(entry.peak_bytes for entry in entries)
    found = thence.open(store).sql("select rank, duration from gpu where name = 'planted' order by rank")
    assert found.rows() == [(rank, 1000 * (rank + 1)) for rank in range(count)], "ranks were mixed up"
    size = sum(file.stat().st_size for file in store.rglob("*.parquet"))
    print(
        f"| {count:,} | {wall:.1f} | {cpu / count:.2f} | {cpu / count / alone:.2f} x | {peak / 1e9:.2f} GB | "
        f"{here:.1f} | {size / count / 2**20:.2f} MiB |",
        flush=True,
    )
    return store


def many_summaries(folder: Path, like: Path, count: int) -> Path:
    """A store with the summaries of so many ranks: those of a few, with other numbers and process groups."""
    store = folder / f"{count}.summaries"
    manifest = read_manifest(like)
    known = len(manifest.entries) // 4 * 4
    for name in manifest.summaries:
        whole = pl.read_parquet(like / SUMMARIES / name / "*.parquet")
        whole = whole.filter(pl.col("rank") < known)
        (store / SUMMARIES / name).mkdir(parents=True)
        for first in range(0, count, 256):
            parts = [renumbered(whole, rank, known) for rank in range(first, min(first + 256, count), known)]
            joined = pl.concat(parts).filter(pl.col("rank") < count)
            joined.write_parquet(store / SUMMARIES / name / f"{first:07}.parquet", compression="lz4")
    entries = tuple(
        msgspec.structs.replace(manifest.entries[rank % known], ranks=(rank,), written=(rank,)) for rank in range(count)
    )
    write_json(store / MANIFEST, msgspec.structs.replace(manifest, entries=entries, warnings=()))
    return store


def renumbered(frame: pl.DataFrame, first: int, known: int) -> pl.DataFrame:
    """Rows of the ranks 0 to ``known`` as those of the ranks from ``first`` on."""
    changes = [pl.col("rank") + first]
    if "members" in frame.columns:
        old = [str([g, g + 1, g + 2, g + 3]) for g in range(0, known, 4)]
        new = [str([first + g, first + g + 1, first + g + 2, first + g + 3]) for g in range(0, known, 4)]
        changes.append(pl.col("members").replace(old, new))
    if "total_ns" in frame.columns and "step" in frame.columns:
        # No two ranks take equally long; tables of equal rows are refused, as bombs are made of such.
        changes.append(pl.col("total_ns") + (pl.int_range(pl.len()).hash(first) % 1000).cast(pl.Int64))
    return frame.with_columns(changes)


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--megabytes", type=float, default=80, help="of JSON a rank")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--summaries", type=int, default=10_000, help="ranks; 0 for none")
    parser.add_argument("--folder", type=Path, help="for temporary files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ranks-", dir=options.folder) as name:
        folder = Path(name)
        os.environ[BODIES] = name
        write_bodies(folder, int(options.megabytes * 1e6))
        size = (folder / "1.json").stat().st_size
        alone = reader_cpu()
        print(f"a rank has {size / 1e6:.1f} MB; read and attributed alone: {alone:.2f} s CPU")
        print(f"{options.processes} processes; planted kernels of all ranks found")
        print(HEADINGS)
        store = None
        for count in options.ranks:
            if store is not None:
                shutil.rmtree(store)
            store = grown(folder, count, options.processes, alone)
            for arguments in QUESTIONS if count == options.ranks[-1] else ():
                print("       ", asked(arguments[0], str(store), *arguments[1:]), flush=True)
        if options.summaries and store is not None:
            began = time.perf_counter()
            many = many_summaries(folder, store, options.summaries)
            print(f"summaries of {options.summaries:,} ranks, made in {time.perf_counter() - began:.0f} s")
            for arguments in (("report", "--by", "rank"), ("report",), ("ranks",)):
                print("       ", asked(arguments[0], str(many), *arguments[1:]), flush=True)


if __name__ == "__main__":
    main()
