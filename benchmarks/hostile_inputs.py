"""What inputs made to hurt cost: CPU seconds and peak memory of a verb, beside the size of what they hold.

    python benchmarks/hostile_inputs.py [NAME...] [--most-memory GB] [--most-seconds S]

Every input is made here, in a folder that is removed, and given to a process of its own, whose peak memory is
that of the largest of it and its children. `allowed` is what docs/rooms/readers.md promises: 200 MB and five
times the decompressed size. A result of `refused` is an error of one sentence.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import lzma
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import zipfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from command_line import documented_parser

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MB = 10**6
ALWAYS_ALLOWED_MB, ALLOWED_RATIO = 200, 5
CSV_HEADER = (
    "Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Reg/Trd,StcSMem (B),DymSMem (B),"
    "Bytes (B),Throughput (B/s),SrcMemKd,DstMemKd,Device,Ctx,GreenCtx,Strm,Name\n"
)


@dataclass(frozen=True)
class Made:
    """An input: the arguments of a verb that reads it, its size on disk, and what it decompresses to."""

    arguments: tuple[str, ...]
    stored: int
    decompressed: int


def whole(path: Path, decompressed: int | None = None, *verb: str) -> Made:
    size = path.stat().st_size
    return Made((*(verb or ("report",)), str(path)), size, size if decompressed is None else decompressed)


def zipped_to(path: Path, parts: Iterator[bytes]) -> int:
    """Writes parts through gzip; the size of all of them."""
    size = 0
    with gzip.open(path, "wb", compresslevel=6) as stream:
        for part in parts:
            stream.write(part)
            size += len(part)
    return size


def kineto_events(path: Path, events: Iterator[str]) -> Made:
    with path.open("w") as stream:
        stream.write('{"schemaVersion": 1, "traceEvents": [\n')
        for i, text in enumerate(events):
            stream.write(text if i == 0 else ",\n" + text)
        stream.write("\n]}")
    return whole(path)


def kernels(count: int, names: Callable[[int], str], streams: Callable[[int], int]) -> Iterator[str]:
    for i in range(count):
        yield json.dumps({
            "ph": "X", "cat": "kernel", "name": names(i), "pid": 0, "tid": streams(i), "ts": 10 * i, "dur": 25,
            "args": {"device": 0, "stream": streams(i), "correlation": i + 1},
        })  # fmt: skip


def csv_of_one_line(folder: Path) -> Made:
    path = folder / "trace.csv.gz"
    line = CSV_HEADER + "1,2,3,"
    return whole(path, zipped_to(path, itertools.chain([line.encode()], itertools.repeat(b"7" * MB, 2000))))


def csv_of_empty_rows(folder: Path) -> Made:
    path = folder / "trace.csv"
    path.write_text(CSV_HEADER + "1,2" + "," * 18 + "k\n" + "," * 20 + "\n" + ("1\n" * 10_000_000))
    return whole(path)


def nsys_jax_rows(folder: Path) -> Made:
    rows = 20_000_000
    name = pl.repeat("TSL:Thunk:#hlo_op=a.1#", rows, eager=True)
    one = pl.repeat(1, rows, dtype=pl.Int64, eager=True)
    numbers = ("Projected Start", "Projected Duration", "Orig Start", "Orig Duration", "PID", "TID",
               "RangeId", "ParentId")  # fmt: skip
    content = io.BytesIO()
    frame = pl.DataFrame({"Name": name, **dict.fromkeys(numbers, one)})
    frame.write_parquet(content, row_group_size=rows)
    path = folder / "archive.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("nvtx_gpu_proj_trace/trace.parquet", content.getvalue())
    return whole(path, content.tell())


def nsys_jax_zeros(folder: Path) -> Made:
    path = folder / "archive.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("nvtx_gpu_proj_trace/trace.parquet", bytes(1 << 30))
    return whole(path, 1 << 30)


def hlo_of_zeros(folder: Path) -> Made:
    kineto_events(folder / "trace.json", kernels(10, str, lambda _: 7))
    path = folder / "module_0001.a.sm_9.0_gpu_after_optimizations.hlo.pb.xz"
    path.write_bytes(lzma.compress(bytes(1 << 29), preset=1))
    return Made(("report", str(folder / "trace.json"), "--hlo", str(path)), path.stat().st_size, 1 << 29)


def labels_beside(folder: Path) -> Made:
    kineto_events(folder / "trace.json", kernels(10, str, lambda _: 7))
    path = folder / "labels.json.gz"
    head = b'{"format": "thence.graph-labels", "version": 1, "notes": ["'
    size = zipped_to(path, itertools.chain([head], itertools.repeat(b"n" * MB, 1000)))
    return Made(("report", str(folder / "trace.json")), path.stat().st_size, size)


def labels_of_objects(folder: Path) -> Made:
    path = folder / "labels.json"
    labels = ",".join(['{"path":[]}'] * 4_000_000)
    path.write_text(f'{{"format": "thence.graph-labels", "version": 1, "labels": [{labels}]}}')
    return whole(path)


def annotations_of_objects(folder: Path) -> Made:
    path = folder / "kernel_annotations_rank0.json"
    path.write_text('{"1":[' + ",".join(["{}"] * 15_000_000) + "]}")
    return whole(path)


def pickled_dict(path: Path, keys: Iterator[bytes]) -> Made:
    """A dict with keys given as opcodes, made without making the dict, which would take as long as reading it."""
    path.write_bytes(b"\x80\x02}(" + b"".join(key + b"K\x01" for key in keys) + b"u.")
    return whole(path)


def collisions(folder: Path) -> Made:
    tuples = itertools.islice(itertools.product((b"J\xff\xff\xff\xff", b"J\xfe\xff\xff\xff"), repeat=16), 60_000)
    keys = (b"(" + b"".join(parts) + b"t" for parts in tuples)
    return pickled_dict(folder / "kernel_annotations_rank0.pkl", keys)


def large_collisions(folder: Path) -> Made:
    multiples = ((i * ((1 << 61) - 1)).to_bytes(16, "little") for i in range(60_000))
    keys = (b"\x8a\x10" + digits for digits in multiples)
    return pickled_dict(folder / "kernel_annotations_rank0.pkl", keys)


def annotations_of_aliases(folder: Path) -> Made:
    """A list of 7,000 references to a list of 7,000 references to an empty list."""
    content = b"\x80\x02]q\x00"
    for number in range(2):
        content += b"](" + b"h%c" % number * 7000 + b"eq%c" % (number + 1)
    path = folder / "kernel_annotations_rank0.pkl"
    path.write_bytes(content + b".")
    return whole(path)


def many_streams(folder: Path) -> Made:
    made = kineto_events(folder / "trace.json", kernels(100_000, lambda _: "k", lambda i: i))
    return Made(("streams", *made.arguments[1:]), made.stored, made.decompressed)


def timeline_of_many_streams(folder: Path) -> Made:
    made = kineto_events(folder / "trace.json", kernels(200_000, lambda _: "k", lambda i: i))
    target = str(folder / "timeline.pftrace")
    return Made(("convert", made.arguments[1], "-o", target), made.stored, made.decompressed)


def many_streams_together(folder: Path) -> Made:
    def events() -> Iterator[str]:
        for text in kernels(100_000, lambda _: "k", lambda i: i):
            yield text.replace('"dur": 25', '"dur": 99999999')

    made = kineto_events(folder / "trace.json", events())
    return Made(("streams", *made.arguments[1:]), made.stored, made.decompressed)


def many_devices(folder: Path) -> Made:
    def events() -> Iterator[str]:
        for i, text in enumerate(kernels(200_000, lambda _: "k", lambda i: 7 + i % 2)):
            yield text.replace('"device": 0', f'"device": {i // 2}')

    made = kineto_events(folder / "trace.json", events())
    return Made(("streams", *made.arguments[1:]), made.stored, made.decompressed)


def stepping_devices(path: Path, devices: int) -> Made:
    """Four steps of one process, and on each of its devices four kernels with their launches in them."""
    span = 40 * devices

    def events() -> Iterator[str]:
        for i in range(4):
            yield json.dumps({
                "ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{i}", "pid": 1, "tid": 1,
                "ts": i * span, "dur": span - 1,
            })  # fmt: skip
        for i in range(4 * devices):
            yield json.dumps({
                "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": 40 * i,
                "dur": 1, "args": {"correlation": i + 1},
            })  # fmt: skip
            yield json.dumps({
                "ph": "X", "cat": "kernel", "name": f"k{i // devices}", "pid": 0, "tid": 7, "ts": 40 * i + 2, "dur": 3,
                "args": {"device": i % devices, "stream": 7, "correlation": i + 1},
            })  # fmt: skip

    return kineto_events(path, events())


def steps_of_many_devices(folder: Path) -> Made:
    made = stepping_devices(folder / "trace.json", 100_000)
    return Made(("steps", "--format", "json", *made.arguments[1:]), made.stored, made.decompressed)


def ranks_of_many_devices(folder: Path) -> Made:
    made = stepping_devices(folder / "trace.json", 2_000)
    return Made(("ranks", *made.arguments[1:]), made.stored, made.decompressed)


def rank_files(folder: Path, ranks: int) -> int:
    """A trace of 18.8 kB for each rank: four steps of eight operators with their kernels, and one all_reduce each."""
    (folder / "ranks").mkdir()
    size = 0
    for rank in range(ranks):
        events, now = [], 1000
        for i in range(4 * 9):
            step, k = divmod(i, 9)
            if k == 0:
                events.append(complete("user_annotation", f"ProfilerStep#{step}", rank, 1, now, 259))
            call = {"correlation": i + 1, "External id": i + 1}
            events.append(complete("cuda_runtime", "cudaLaunchKernel", rank, 1, now + 2, 5, call))
            of_kernel = call | {"device": 0, "grid": [8, 1, 1], "block": [128, 1, 1]}
            if k < 8:
                events.append(complete("cpu_op", f"aten::op{k}", rank, 1, now, 9, {"External id": i + 1}))
                events.append(
                    complete(
                        "kernel",
                        f"void gemm_{k}(float*)",
                        0,
                        7,
                        now + 10,
                        8 + (rank + i) % 3,
                        of_kernel | {"stream": 7},
                    )
                )
                now += 20
                continue
            described = {
                "stream": 20, "Collective name": "allreduce", "In msg nelems": 1024, "Out msg nelems": 1024,
                "Group size": ranks, "dtype": "Float", "Process Group Name": "0",
                "Process Group Description": "default_pg", "Process Group Ranks": "[]", "Seq": step,
            }  # fmt: skip
            name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
            events.append(complete("kernel", name, 0, 20, now + 10 + rank % 3, 60, of_kernel | described))
            now += 100
        events.append(complete("cuda_runtime", "cudaDeviceSynchronize", rank, 1, now, 50, {"correlation": 99}))
        trace = {
            "schemaVersion": 1, "baseTimeNanoseconds": 1_700_000_000_000_000_000, "traceEvents": events,
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": ranks},
        }  # fmt: skip
        size += (folder / "ranks" / f"rank{rank}.json").write_text(json.dumps(trace))
    return size


def complete(
    category: str, name: str, pid: int, tid: int, ts: int, dur: int, args: dict[str, object] | None = None
) -> dict[str, object]:
    """A complete event of Kineto; times in us."""
    event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur}
    return event | {"args": args or {}}


def ranks_of_many_files(folder: Path) -> Made:
    size = rank_files(folder, 5000)
    return Made(("ranks", str(folder / "ranks")), size, size)


def report_of_many_files(folder: Path) -> Made:
    size = rank_files(folder, 5000)
    return Made(("report", "--by", "rank", str(folder / "ranks")), size, size)


def diff_of_many_devices(folder: Path) -> Made:
    made = stepping_devices(folder / "trace.json", 20_000)
    path = made.arguments[1]
    arguments = ("diff", "--anyway", "--format", "json", path, path)
    return Made(arguments, made.stored, made.decompressed)


def many_names(folder: Path) -> Made:
    return kineto_events(folder / "trace.json", kernels(1_000_000, lambda i: f"kernel_{i}", lambda _: 7))


def many_templates(folder: Path) -> Made:
    name = "void at::native::vectorized_elementwise_kernel<{}, at::native::FillFunctor<float>>(int)"
    return kineto_events(folder / "trace.json", kernels(200_000, name.format, lambda _: 7))


def one_long_name(folder: Path) -> Made:
    return kineto_events(folder / "trace.json", kernels(2, lambda i: f"k{i}" + "a<" * 50 * MB, lambda _: 7))


def kineto_of_spaces(folder: Path) -> Made:
    path = folder / "trace.json.gz"
    head = b'{"schemaVersion": 1, "traceEvents": ['
    return whole(path, zipped_to(path, itertools.chain([head], itertools.repeat(b" " * MB, 2000))))


def kineto_of_empty_events(folder: Path) -> Made:
    return kineto_events(folder / "trace.json", itertools.repeat("{}", 20_000_000))


def kineto_of_brackets(folder: Path) -> Made:
    path = folder / "trace.json"
    path.write_text('{"schemaVersion": 1, "traceEvents": [' + "[" * 100 * MB)
    return whole(path)


def kineto_of_backslashes(folder: Path) -> Made:
    return kineto_events(folder / "trace.json", kernels(12, lambda i: f"k{i}" + "\\" * 3 * MB, lambda _: 7))


def xplane_of_zeros(folder: Path) -> Made:
    path = folder / "a.xplane.pb.gz"
    plane = b"\x0a\x07\x12\x05/host\x0a\x80\x80\x80\x80\x06"  # a plane of 1.6 GB follows
    return whole(path, zipped_to(path, itertools.chain([plane], itertools.repeat(bytes(MB), 1600))))


def xplane_of_empty_planes(folder: Path) -> Made:
    path = folder / "a.xplane.pb"
    path.write_bytes(b"\x0a\x02\x12\x00" * 25_000_000)
    return whole(path)


def sqlite_of_zeros(folder: Path) -> Made:
    with closing(sqlite3.connect(folder / "a.sqlite")) as database:
        database.execute("create table StringIds (id integer primary key, value text)")
        database.execute("insert into StringIds values (1, zeroblob(900000000))")
        database.commit()
    content = folder / "a.sqlite"
    size = content.stat().st_size
    path = folder / "b.sqlite.gz"
    with content.open("rb") as plain, gzip.open(path, "wb", compresslevel=6) as stream:
        shutil.copyfileobj(plain, stream, MB)
    content.unlink()
    return whole(path, size)


def sqlite_of_expressions(folder: Path) -> Made:
    """A generated column, for each of whose values SQLite writes 200 MB."""
    with closing(sqlite3.connect(folder / "a.sqlite")) as database:
        database.execute("create table CUPTI_ACTIVITY_KIND_KERNEL (start, end, streamId, correlationId, globalPid)")
        database.executemany(
            "insert into CUPTI_ACTIVITY_KIND_KERNEL values (?, ?, 7, ?, 1)",
            ((10 * i, 10 * i + 5, i) for i in range(5000)),
        )
        database.execute(
            "alter table CUPTI_ACTIVITY_KIND_KERNEL add deviceId as (length(hex(zeroblob(100000000 + start)))) virtual"
        )
        database.commit()
    return whole(folder / "a.sqlite")


CASES: tuple[Callable[[Path], Made], ...] = (
    csv_of_one_line, csv_of_empty_rows, nsys_jax_rows, nsys_jax_zeros, hlo_of_zeros, labels_beside, labels_of_objects,
    annotations_of_objects, annotations_of_aliases, collisions, large_collisions, many_streams,
    timeline_of_many_streams, many_streams_together, many_devices,
    steps_of_many_devices, ranks_of_many_devices, ranks_of_many_files, report_of_many_files, diff_of_many_devices,
    many_names, many_templates,
    one_long_name, kineto_of_spaces, kineto_of_empty_events, kineto_of_brackets, kineto_of_backslashes,
    xplane_of_zeros, xplane_of_empty_planes, sqlite_of_zeros, sqlite_of_expressions,
)  # fmt: skip


def measured(made: Made, most_bytes: int, most_seconds: int) -> tuple[str, float, float]:
    """What came of it, seconds of CPU time, and peak MB of the process or of its largest child."""
    code = (
        "import resource, subprocess, sys;"
        "done = subprocess.run([sys.executable, '-m', 'thence', *sys.argv[2:]], stdout=subprocess.DEVNULL,"
        " stderr=subprocess.PIPE);"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN);"
        "print(used.ru_maxrss, used.ru_utime + used.ru_stime, done.returncode);"
        "sys.stdout.flush(); sys.stdout.buffer.write(done.stderr[:2000])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "-", *made.arguments],
        stdout=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes)),  # noqa: PLW1509
    )
    try:
        told = process.communicate(timeout=most_seconds)[0].decode("utf-8", "replace")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        return f"stopped after {most_seconds} s", most_seconds, float("nan")
    numbers, _, message = told.partition("\n")
    peak, seconds, status = numbers.split()
    lines = message.strip().splitlines() or [""]
    what = {"0": "read", "2": "refused"}.get(status, f"exit {status}")
    if "Traceback" in message or "should not happen" in message:
        what = "TRACEBACK"
    print(f"    {lines[-1][:180]}", file=sys.stderr)
    return what, float(seconds), int(peak) / 1000


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of inputs; all without it")
    parser.add_argument("--most-memory", type=int, default=16, metavar="GB", help="of address space")
    parser.add_argument("--most-seconds", type=int, default=120, metavar="S")
    options = parser.parse_args()
    headings = ("input", "stored MB", "decompressed MB", "result", "seconds", "peak MB", "allowed MB")
    print(f"| {' | '.join(headings)} |\n|{'---|' * len(headings)}")
    for make in CASES:
        if options.names and make.__name__ not in options.names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            made = make(Path(folder))
            what, seconds, peak = measured(made, options.most_memory << 30, options.most_seconds)
        allowed = ALWAYS_ALLOWED_MB + ALLOWED_RATIO * made.decompressed / MB
        sizes = f"{made.stored / MB:,.1f} | {made.decompressed / MB:,.0f}"
        name = make.__name__.replace("_", " ")
        print(f"| {name} | {sizes} | {what} | {seconds:.1f} | {peak:,.0f} | {allowed:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
