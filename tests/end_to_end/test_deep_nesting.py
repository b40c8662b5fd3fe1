"""Nesting as deep as it gets: what is made of it is right, and memory does not grow with its square."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

import forking
import thence
from helpers import event, kernel, launch, run_thence
from recording_data import write_part
from thence.attribution.launch_places import MAX_CHARACTERS, MAX_MEMBERS, merge_metadata
from thence.readers.recording.folder import SCHEMAS

if TYPE_CHECKING:
    from pathlib import Path

BEGAN = 10**6
MAX_BYTES = 700 << 20
"""Of addresses beyond those of the process when it begins: what these cases need, and half as much again."""
DEEP = 11_000
"""Levels of which a number of eight bytes for each level of each, or their paths as text, are more than that."""
LONG = "r{} of ranges whose names are " + "much " * 150 + "longer than those of the modules of a large model"
WRITTEN = 1_500
"""Levels of such names whose paths, as text in any output, are more than that."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits memory by what Linux says of it")


def nested(path: Path, depth: int, **names: str) -> Path:
    """A Kineto trace of nested ranges; inside each begins a launch of a kernel that lasts 5 us.

    Args:
        path: of the file.
        depth: levels.
        names: of the ranges, by category; a level has one of each.
    """
    with path.open("w") as file:
        file.write('{"traceEvents": [')
        for level in range(depth):
            begin = 10 * level
            ranges = names or {"user_annotation": "r{}"}
            events = [
                *(event(kind, name.format(level), begin, 20 * depth - level - begin) for kind, name in ranges.items()),
                launch(level + 1, begin + 1),
                kernel(level + 1, begin + 5),
            ]
            file.write(("," if level else "") + json.dumps(events)[1:-1])
        file.write("]}")
    return path


def never_closed(folder: Path, depth: int, metadata: str | None = None) -> Path:
    """A recording whose marks were never closed, with a launch of a kernel of 50 ns in each."""
    folder.mkdir()
    about = {
        "format": "thence.recording", "version": 1, "rank": 0, "pid": 77, "began_ns": BEGAN,
        "stopped_ns": BEGAN + 100 * depth + 1000, "finished": True,
    }  # fmt: skip
    (folder / "recording.json").write_text(json.dumps(about))
    names = ["gemm", "cudaLaunchKernel", metadata or "{}", *(f"r{level}" for level in range(depth))]
    levels = [(level, BEGAN + 100 * level) for level in range(depth)]
    tables: dict[str, list[dict[str, Any]]] = {
        "names": [{"number": n, "name": name, "demangled": None} for n, name in enumerate(names, 1)],
        "marks": [
            {"what": 0, "serial": level + 1, "forward": -1, "time": time, "thread": 9, "lane": 0,
             "name": level + 4, "metadata": 3 if metadata else 0}
            for level, time in levels
        ],
        "calls": [
            {"start": time + 10, "end": time + 20, "thread": 9, "correlation": level + 1, "function": 2, "api": 5}
            for level, time in levels
        ],
        "kernels": [
            dict.fromkeys(SCHEMAS["kernels"], 1)
            | {"start": time + 30, "end": time + 80, "correlation": level + 1, "graph": 0, "node": 0}
            for level, time in levels
        ],
    }  # fmt: skip
    for table, rows in tables.items():
        write_part(folder, table, 1, pl.DataFrame(rows, schema=SCHEMAS[table]))
    return folder


LIMIT = """
import resource
with open("/proc/self/statm") as file:
    limit = int(file.read().split()[0]) * resource.getpagesize() + MAX_BYTES
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
"""


def limited(script: str, *arguments: str | Path) -> str:
    """What a script prints that may not have more than `MAX_BYTES` of memory for itself."""
    code = LIMIT.replace("MAX_BYTES", str(MAX_BYTES)) + script
    one = {"POLARS_MAX_THREADS": "1"}  # each thread has addresses of its own
    done = forking.run(["-c", code, *map(str, arguments)], timeout=200, env=os.environ | one)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.decode()


EVERYTHING = """
import sys
from thence import opening
from thence.cli import main
really, traces = opening.open_trace, []
def opened_once(*inputs, **options):
    if not traces: traces.append(really(*inputs, **options))
    return traces[0]
opening.open_trace = opened_once
def run(*words):
    try: main(list(words))
    except SystemExit as end: assert not end.code, words
source, folder, by = sys.argv[1:4]
run("report", source, "--by", by)
run("report", source, "-o", folder + "/report.html")
for form in ("html", "folded", "speedscope.json"):
    run("flame", source, "--by", by, "-o", folder + "/flame." + form)
for form in ("pftrace", "json"):
    run("convert", source, "-o", folder + "/converted." + form)
run("convert", source, "-o", folder + "/converted.parquet")
"""


def everything(source: Path, folder: Path, by: str) -> None:
    """Every verb and format, in one process of little memory, which reads and attributes the source once."""
    folder.mkdir()
    limited(EVERYTHING, source, folder, by)


def folded(path: Path) -> list[tuple[list[str], int]]:
    """Frames and time of each line."""
    lines = [line.rpartition(" ") for line in path.read_text().splitlines()]
    return [(frames.split(";"), int(ns)) for frames, _, ns in lines]


def test_marks_that_were_never_closed(tmp_path: Path) -> None:
    source = never_closed(tmp_path / "recording", 300, '{"step": 7}')
    done = run_thence("flame", source, "--by", "label", "-o", tmp_path / "flame.folded")
    assert done.returncode == 0, done.stderr
    stacks = [(frames, ns) for frames, ns in folded(tmp_path / "flame.folded") if frames[-1] == "gemm"]
    assert [ns for _, ns in stacks] == [50] * 300
    whole = [f"r{level}" for level in range(300)]
    shallow = {len(frames): frames for frames, _ in stacks if "levels left out" not in str(frames)}
    assert shallow == {n + 1: [*whole[:n], "gemm"] for n in range(1, 256)}
    # The deepest has 301 frames, of which 16 stand at either end.
    assert [*whole[:16], "[269 levels left out]", *whole[285:], "gemm"] in [f for f, _ in stacks]
    places = thence.open(source).tables.places
    assert set(places["metadata"].cast(pl.String)) == {'{"step":7}'}
    assert places["label"].cast(pl.String)[2] == "r0/r1/r2"


def test_every_kind_of_path(tmp_path: Path) -> None:
    names = {"label": "r{}", "stack": "model.py({}): forward"}
    source = nested(tmp_path / "trace.json", DEEP, user_annotation=names["label"], python_function=names["stack"])
    script = """
import sys, thence
trace = thence.open(sys.argv[1])
for by in ("label", "stack"):
    places = trace.tables.places[by].cast(str)
    times = [ns for frames, ns in trace.flame(by).stacks() if frames[-1] == "gemm"]
    print(places.n_unique(), len(times), set(times), places[-1], sep="|")
"""
    for name, line in zip(names.values(), limited(script, source).splitlines(), strict=True):
        places, stacks, times, last = line.split("|")
        assert (places, stacks, times) == (str(DEEP), str(DEEP), "{5000}")
        levels = [name.format(level) for level in range(DEEP)]
        # So many different paths of long names keep fewer levels than 16 at either end.
        kept = last.split("/[")[0].count("/") + 1
        assert 1 < kept <= 16
        left_out = f"[{DEEP - 2 * kept:,} levels left out]"
        assert last == "/".join([*levels[:kept], left_out, *levels[-kept:]])


def test_every_verb_on_the_deepest_nesting(tmp_path: Path) -> None:
    everything(nested(tmp_path / "trace.json", WRITTEN, user_annotation=LONG), tmp_path / "out", "label")
    stacks = [ns for frames, ns in folded(tmp_path / "out" / "flame.folded") if frames[-1] == "gemm"]
    assert stacks == [5_000] * WRITTEN
    document = json.loads((tmp_path / "out" / "flame.speedscope.json").read_text())
    assert max(map(len, document["profiles"][0]["samples"])) == 256


def test_the_deepest_marks_with_metadata(tmp_path: Path) -> None:
    source = never_closed(tmp_path / "recording", DEEP, '{"step": 7}')
    script = "import sys, thence; print(thence.open(sys.argv[1]).tables.places['metadata'].n_unique())"
    assert limited(script, source).strip() == "1"


def test_metadata_of_marks_around_is_bounded_and_the_innermost_stays() -> None:
    def merged(outer: dict[str, Any], inner: dict[str, Any]) -> dict[str, Any]:
        one, other = (pl.Series([json.dumps(o)]).cast(pl.Categorical()) for o in (outer, inner))
        found: dict[str, Any] = json.loads(str(merge_metadata(one, other).cast(pl.String)[0]))
        return found

    many = {f"key{i}": i for i in range(MAX_MEMBERS + 3)}
    expected = dict(list(many.items())[3:])
    assert merged(many, {"own": 1}) == {**expected, "own": 1}
    assert list(merged(expected, {"own": 1})) == [*expected, "own"]
    long = {"far": 1, "big": "x" * MAX_CHARACTERS, "near": 2}
    assert merged(long, {"own": 1}) == {"near": 2, "own": 1}
    assert merged({"own": 0}, long) == {"own": 0, **long}  # its own are never cut


def test_labels_of_an_eager_run_that_nests_deeply(tmp_path: Path) -> None:
    depth = 300
    eager = nested(tmp_path / "eager.json", depth)
    graph = [launch(1, 1) | {"name": "cudaGraphLaunch"}]
    graph += [kernel(1, 10 * level + 5, args={"graph id": 1, "graph node id": level + 1}) for level in range(depth)]
    replay = tmp_path / "replay.json"
    replay.write_text(json.dumps({"traceEvents": graph}))
    done = run_thence("label", replay, "--eager", eager, "-o", tmp_path / "labelled.json")
    assert done.returncode == 0, done.stderr
    labels = thence.open(tmp_path / "labelled.json").tables.places["label"].cast(pl.String)
    assert labels[1] == "r0/r1"
    assert labels[-1].startswith("r0/r1/")
    assert labels[-1].endswith("/r298/r299")
