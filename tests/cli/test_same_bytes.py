"""The same input gives the same bytes, whatever the seed of hashes, the number of threads and the time."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from fsdp_jobs import FsdpJob
from helpers import DATA, TORCH

if TYPE_CHECKING:
    from pathlib import Path

RANKS = ["RANK0", "RANK1"]
"""Stand for the files of two ranks, with two recorded steps: more rows than Polars needs to use several threads."""
WAITS = [str(TORCH / "waits" / f"group_rank{rank}.json.gz") for rank in (0, 1)]
LABELLED = [str(TORCH / "graphs" / f"block_{what}") for what in ("replay.json.gz", "labels.json")]
OTHERS = [
    ["ingest", *WAITS, "-o", "OUT/store", "--workers", "1"], ["ranks", "OUT/store"],
    ["diff", "--anyway", *RANKS, "-o", "OUT/diff.html"],
    ["whatif", str(TORCH / "torch_eager_rank0.json.gz"), "--free", "kernel:.", "--format", "json"],
    ["roofline", str(TORCH / "torch_eager_rank0.json.gz"), "--format", "json"],
    ["label", LABELLED[0], "--labels", LABELLED[1], "-o", "OUT/l.json.gz", "--graph", "OUT/graph.html"],
    ["inside", str(DATA / "inside/gpu_triton.npz"), "--clock-ghz", "1.7", "-o", "OUT/inside.json"],
    ["inside", str(DATA / "inside/gpu_triton.npz"), "--clock-ghz", "1.7", "-o", "OUT/inside.pftrace"],
    ["report", *RANKS, "--format", "csv"], ["explain", *RANKS],
    ["sql", *RANKS, "select name, sum(duration) from activities group by name"],
]  # fmt: skip
"""Commands; OUT is the folder of outputs."""
FILES = ("x.pftrace", "x.json.gz", "x.parquet", "f.html", "f.folded", "f.svg", "f.speedscope.json",
         "r.html")  # fmt: skip
VERBS = ("report", "streams", "collectives", "idle", "steps", "check", "ranks")
RUN = """
import contextlib, sys
from pathlib import Path
from thence import opening
from thence.cli import main
really, traces = opening.open_trace, {}
def opened_once(*inputs, **options):
    if inputs not in traces: traces[inputs] = really(*inputs, **options)
    return traces[inputs]
opening.open_trace = opened_once
def run(output, *arguments):
    with open(output, "w") as stream, contextlib.redirect_stdout(stream), contextlib.suppress(SystemExit):
        main(list(arguments))
folder, ranks = Path(sys.argv[1]), sys.argv[2:]
given = {f"RANK{number}": path for number, path in enumerate(ranks)}
verb = {"f": "flame", "r": "report", "x": "convert"}
for name in sys.argv[0].split():
    target = str(folder / name)
    if "." in name:
        run("/dev/null", verb[name[0]], *ranks, "-o", target)
    else:
        run(target + ".json", name, *ranks, "--format", "json")
        run(target + ".txt", name, *ranks)
for number, command in enumerate(OTHERS):
    said = "/dev/null" if command[0] == "ingest" else folder / f"other-{number}"  # which states its time
    run(said, *(given.get(word) or word.replace("OUT", str(folder)) for word in command))
"""


def outputs(folder: Path, ranks: list[Path], seed: int, threads: int) -> dict[str, bytes]:
    folder.mkdir()
    code = RUN.replace("sys.argv[0].split()", repr([*FILES, *VERBS])).replace("OTHERS", repr(OTHERS))
    subprocess.run(
        [sys.executable, "-c", code, str(folder), *map(str, ranks)],
        env={"PYTHONHASHSEED": str(seed), "POLARS_MAX_THREADS": str(threads), "PATH": "/usr/bin:/bin",
             "HOME": str(folder.parent)},
        check=True, timeout=600, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    files = (path for path in folder.rglob("*") if path.is_file())
    read = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    place = str(folder).encode()  # which some outputs name
    return {name: _without_cost(name, content).replace(place, b"OUT") for name, content in read.items()}


def _without_cost(name: str, content: bytes) -> bytes:
    """A file of a store without what writing it took."""
    if not name.endswith(("/manifest.json", "/part.json")):
        return content
    return re.sub(rb'"(?:cpu_seconds|peak_bytes)": *[\d.]+', b"", content)


@pytest.mark.skipif(sys.platform == "win32", reason="writes to /dev/null")
def test_every_output_has_the_same_bytes_in_every_run(tmp_path: Path) -> None:
    ranks = FsdpJob(steps=2).write(tmp_path, missing=(2, 3))
    first, second = outputs(tmp_path / "a", ranks, 1, 1), outputs(tmp_path / "b", ranks, 2, 3)
    assert len(first) >= len(FILES) + 2 * len(VERBS) + len(OTHERS)
    said = {"store/.thence-ingest"} | {
        f"other-{n}" for n, command in enumerate(OTHERS) if "-o" in command or "--graph" in command
    }
    assert {name for name, content in first.items() if not content} <= said
    written = {"diff.html", "graph.html", "inside.json", "inside.pftrace", "l.json.gz"}
    assert written | {"store/manifest.json"} <= first.keys()
    assert [name for name in first if first[name] != second.get(name)] == []
    assert first.keys() == second.keys()
