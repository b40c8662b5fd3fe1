"""How long one nsys-jax archive takes to load, and with how much memory, in processes of its own.

    python benchmarks/read_nsys_jax.py ARCHIVE... [--times 7] [--report]

Prints the best of several runs of each, and the median:

    open         `thence.open`, nothing imported before: all that `report` and every other verb start with
    with import  the whole life of that process: starting Python and importing thence and Polars too
    hlo          decoding the HLO modules, unpacked before
    yardstick    what this machine needs to parse the same HLO with protobuf (the full messages of HLO
                 that thence reads) and to read the same tables with Polars; nothing is made of either
    report, programs   the commands, from start to end (only with --report)

Targets: open in 1 s, 350 MB.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import resource
import statistics
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from command_line import documented_parser

TABLES = (".parquet", ".csv.xz")


def opened(path: str) -> dict[str, float]:
    """Seconds and peak memory in MB of `thence.open` in this process."""
    begin = time.perf_counter()
    import thence

    trace = thence.open(path)
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    return {"open": seconds, "peak_mb": peak, "activities": trace.tables.gpu.height}


def decoded(path: str) -> dict[str, float]:
    """Seconds that decoding the optimized HLO takes, and number of instructions."""
    from thence.readers.jax.hlo import decode_hlo

    protos = hlo(path)
    begin = time.perf_counter()
    modules = [decode_hlo(data, path) for data in protos]
    seconds = time.perf_counter() - begin
    return {"hlo": seconds, "instructions": sum(m.instructions.height for m in modules)}


def yardstick(path: str) -> dict[str, float]:
    """Seconds to parse the same HLO and to read the same tables, without doing anything with them."""
    import polars as pl

    from thence.readers.jax.protos.hlo_pb2 import HloProto, OpMetadata, ShapeProto

    protos, tables = hlo(path), members(path, TABLES)
    begin = time.perf_counter()
    for data in protos:
        for computation in HloProto.FromString(data).hlo_module.computations:
            for instruction in computation.instructions:
                ShapeProto.FromString(instruction.shape)
                OpMetadata.FromString(instruction.metadata)
    parsing = time.perf_counter() - begin
    begin = time.perf_counter()
    for name, data in tables.items():
        if name.endswith(".xz"):
            pl.read_csv(lzma.decompress(data), infer_schema_length=10_000)
        else:
            pl.read_parquet(io.BytesIO(data))
    return {"parse_hlo": parsing, "read_tables": time.perf_counter() - begin}


def hlo(path: str) -> list[bytes]:
    return [
        lzma.decompress(data) if name.endswith(".xz") else data
        for name, data in members(path, ("after_optimizations.hlo.pb", ".hlo.pb.xz")).items()
        if "after_optimizations" in name
    ]


def members(path: str, ends: tuple[str, ...]) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist() if name.endswith(ends)}


MEASURES = {measure.__name__: measure for measure in (opened, decoded, yardstick)}


def runs(command: list[str], times: int) -> list[tuple[float, str]]:
    """Seconds and output of a command, from start to end, in a new process each time."""
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found.append((time.perf_counter() - begin, done.stdout))
    return found


def text(seconds: list[float]) -> str:
    return f"{min(seconds):.3f} s (median {statistics.median(seconds):.3f})"


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("archives", nargs="+")
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument("--report", action="store_true", help="also the commands report, programs")
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(MEASURES[options.measure](options.archives[0])))
        return
    for archive in options.archives:
        found: dict[str, list[float]] = {}
        for name in MEASURES:
            command = [sys.executable, __file__, archive, "--measure", name]
            for whole, output in runs(command, options.times):
                row = json.loads(output)
                if name == "opened":
                    row["with_import"] = whole
                for key, value in row.items():
                    found.setdefault(key, []).append(value)
        show(archive, found)
        for verb in ("report", "programs") if options.report else ():
            command = [sys.executable, "-m", "thence", verb, archive]
            print(f"  {verb}: {text([s for s, _ in runs(command, options.times)])}")


def show(archive: str, found: dict[str, list[float]]) -> None:
    ratio = min(found["hlo"]) / min(found["parse_hlo"])
    both = min(found["parse_hlo"]) + min(found["read_tables"])
    print(f"{Path(archive).name}: {found['activities'][0]:,.0f} activities")
    print(f"  open: {text(found['open'])}, {max(found['peak_mb']):.0f} MB at most")
    print(f"  with import: {text(found['with_import'])}")
    print(f"  hlo, {found['instructions'][0]:,.0f} instructions: {text(found['hlo'])}")
    print(f"  yardstick, parsing HLO with protobuf: {text(found['parse_hlo'])}: {ratio:.1f} times it")
    print(f"  yardstick, reading tables with Polars: {text(found['read_tables'])}")
    print(f"  open is {min(found['open']) / both:.1f} times both yardsticks")


if __name__ == "__main__":
    main()
