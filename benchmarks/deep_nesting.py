"""What very deep nesting costs: seconds and peak memory of every verb, by depth and kind of input.

    python benchmarks/deep_nesting.py [DEPTH...] [--kind KIND]...

Depths are 1,000, 10,000 and 100,000 if none is given. Kinds of input:

    ranges   Kineto: nested ranges of the user, a launch and a kernel at every depth
    modules  Kineto: nested nn.Module calls, likewise
    frames   Kineto: nested Python frames, likewise
    ops      Kineto: nested operators, likewise
    marks    a recording whose marks were never closed, each with metadata of its own, likewise
    graphs   Kineto: one replay of a graph with as many kernels; the eager run of `label` has one of them
             at every depth of nested ranges
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from command_line import documented_parser
from thence.model.column_file import encode
from thence.readers.recording.folder import SCHEMAS

if TYPE_CHECKING:
    from collections.abc import Iterable

NAMES = {
    "ranges": ("user_annotation", "range_{}"),
    "modules": ("python_function", "nn.Module: Block_{}"),
    "frames": ("python_function", "model.py({}): forward"),
    "ops": ("cpu_op", "aten::op_{}"),
}
KINDS = (*NAMES, "graphs", "marks")
VERBS = (
    *((f"report --by {by}", ("report", "--by", by)) for by in
      ("kernel", "label", "module", "op", "ops", "source", "stack", "phase", "stream")),
    *((f"flame --by {by} {form}", ("flame", "--by", by, "-o", f"out/flame.{form}"))
      for by in ("label", "module", "ops", "stack", "source")
      for form in ("html", "folded", "speedscope.json")),
    *((f"convert to {form}", ("convert", "-o", f"out/converted.{form}")) for form in ("pftrace", "json")),
    ("convert to parquet", ("convert", "-o", "out/converted.parquet/")),
    ("report -o html", ("report", "-o", "out/report.html")),
    ("label --eager", ("label", "--eager", "EAGER", "-o", "out/labelled.json")),
)  # fmt: skip


def write_kineto(path: Path, depth: int, category: str, name: str) -> None:
    """A trace with ``depth`` nested events; right after each begins, a launch of a kernel."""

    def events(level: int) -> list[str]:
        begin, end = 10 * level, 20 * depth - level
        return [
            (
                f'{{"ph": "X", "pid": 1, "tid": 2, "cat": "{category}", "name": "{name.format(level)}", '
                f'"ts": {begin}, "dur": {end - begin}}}'
            ),
            launch("cudaLaunchKernel", level + 1, begin + 1),
            kernel(level, level + 1, begin + 5),
        ]

    write_events(path, itertools.chain.from_iterable(map(events, range(depth))))


def write_replay(path: Path, depth: int) -> None:
    """A trace with the kernels of the same program as one graph."""
    kernels = (
        kernel(level, 1, 10 * level + 5, f', "graph id": 1, "graph node id": {level + 1}') for level in range(depth)
    )
    write_events(path, itertools.chain([launch("cudaGraphLaunch", 1, 1)], kernels))


def launch(name: str, correlation: int, start: int) -> str:
    return (
        f'{{"ph": "X", "pid": 1, "tid": 2, "cat": "cuda_runtime", "name": "{name}", "ts": {start}, '
        f'"dur": 1, "args": {{"correlation": {correlation}}}}}'
    )


def kernel(number: int, correlation: int, start: int, more: str = "") -> str:
    return (
        f'{{"ph": "X", "pid": 0, "tid": 7, "cat": "kernel", "name": "gemm_{number % 1000}", "ts": {start}, '
        f'"dur": 5, "args": {{"device": 0, "stream": 7, "correlation": {correlation}{more}}}}}'
    )


def write_events(path: Path, events: Iterable[str]) -> None:
    with path.open("w") as file:
        file.write('{"schemaVersion": 1, "traceEvents": [\n')
        for number, event in enumerate(events):
            file.write(f",\n{event}" if number else event)
        file.write("\n]}\n")


def write_recording(folder: Path, depth: int) -> None:
    """A recording of ``depth`` marks that were opened and never closed, with a launch inside each."""
    folder.mkdir()
    about = {"format": "thence.recording", "version": 1, "rank": 0, "pid": 77, "began_ns": 10**6,
             "stopped_ns": 10**6 + 100 * depth + 1000, "finished": True}  # fmt: skip
    (folder / "recording.json").write_text(json.dumps(about))
    level = pl.int_range(1, depth + 1, eager=True)
    numbers = pl.select(number=pl.int_range(1, 3 + 2 * depth)).to_series()
    texts = ["gemm", "cudaLaunchKernel", *(f"range_{i}" for i in level)]
    texts += [f'{{"fact_{i}": {i}}}' for i in level]
    start = 10**6 + 100 * level
    tables = {
        "names": {"number": numbers, "name": texts},
        "marks": {"what": 0, "serial": level, "forward": -1, "time": start, "thread": 9, "lane": 0,
                  "name": level + 2, "metadata": level + 2 + depth},
        "calls": {"start": start + 10, "end": start + 20, "thread": 9, "correlation": level,
                  "function": 2, "api": 5},
        "kernels": dict.fromkeys(SCHEMAS["kernels"], 1) | {
            "start": start + 30, "end": start + 80, "correlation": level, "graph": 0, "node": 0},
    }  # fmt: skip
    for table, columns in tables.items():
        given = pl.select(
            pl.lit(pl.Series(value) if isinstance(value, list) else value).alias(name)
            for name, value in columns.items()
        )
        frame = given.select(
            pl.col(name).cast(dtype) if name in columns else pl.lit(None, dtype).alias(name)
            for name, dtype in SCHEMAS[table].items()
        )
        content = encode(
            {
                name: frame[name].to_list() if dtype == pl.String else frame[name].fill_null(0).to_numpy()
                for name, dtype in SCHEMAS[table].items()
            }
        )
        (folder / f"{table}-000001.npz").write_bytes(content)


def write_input(folder: Path, kind: str, depth: int) -> Path:
    """One of the inputs."""
    if kind == "marks":
        write_recording(folder / "recording", depth)
        return folder / "recording"
    if kind == "graphs":
        write_kineto(folder / "eager.json", depth, *NAMES["ranges"])
        write_replay(folder / "trace.json", depth)
    else:
        write_kineto(folder / "trace.json", depth, *NAMES[kind])
    return folder / "trace.json"


def measured(arguments: tuple[str, ...], source: Path, folder: Path) -> str:
    """Seconds, seconds of all processors, peak memory, and what went wrong, if something did."""
    words = [word.replace("EAGER", str(folder / "eager.json")) for word in arguments[1:]]
    command = [sys.executable, "-m", "thence", arguments[0], str(source), *words]
    begin = time.perf_counter()
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds, busy = time.perf_counter() - begin, usage.ru_utime + usage.ru_stime
    said = "" if process.returncode == 0 else (folder / "output").read_text()[-300:].strip()
    return f"{seconds:6.1f} s, {busy:6.1f} s of processors, {usage.ru_maxrss / 1024:6,.0f} MB {said}"


def written(folder: Path) -> float:
    """Megabytes of output, which are removed."""
    files = [path for path in (folder / "out").rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    shutil.rmtree(folder / "out")
    return size / 1e6


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("depths", nargs="*", type=int, default=[1_000, 10_000, 100_000])
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--verb", action="append", help="only verbs that begin so")
    options = parser.parse_args()
    for depth, kind in itertools.product(options.depths, options.kind or KINDS):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            source = write_input(folder, kind, depth)
            for verb, arguments in VERBS:
                if options.verb and not verb.startswith(tuple(options.verb)):
                    continue
                if (kind == "graphs") != (verb == "label --eager"):
                    continue
                (folder / "out").mkdir()
                cost = measured(arguments, source, folder)
                size = written(folder)
                print(f"{depth:7,} {kind:7} {verb:34} {size:6.1f} MB in {cost}", flush=True)


if __name__ == "__main__":
    main()
