"""The same input gives the same bytes, whatever the seed of hashes, the number of threads and the time."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from helpers import TORCH

if TYPE_CHECKING:
    from pathlib import Path

RANKS = [str(TORCH / f"torch_fsdp_rank{rank}.json.gz") for rank in (0, 1)]
LABELLED = [str(TORCH / "graphs" / f"block_{what}") for what in ("replay.json.gz", "labels.json")]
FILES = ("x.pftrace", "x.json", "x.json.gz", "x.parquet", "f.html", "f.folded", "f.svg", "f.speedscope.json",
         "r.html", "l.json.gz")  # fmt: skip
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
folder, labelled, ranks = Path(sys.argv[1]), sys.argv[2:4], sys.argv[4:]
verb = {"f": "flame", "r": "report", "x": "convert"}
for name in sys.argv[0].split():
    target = str(folder / name)
    if name.startswith("l"):
        run("/dev/null", "label", labelled[0], "--labels", labelled[1], "-o", target)
    elif "." in name:
        run("/dev/null", verb[name[0]], *ranks, "-o", target)
    else:
        run(target + ".json", name, *ranks, "--format", "json")
        run(target + ".txt", name, *ranks)
"""


def outputs(folder: Path, seed: int, threads: int) -> dict[str, bytes]:
    folder.mkdir()
    code = RUN.replace("sys.argv[0].split()", repr([*FILES, *VERBS]))
    subprocess.run(
        [sys.executable, "-c", code, str(folder), *LABELLED, *RANKS],
        env={"PYTHONHASHSEED": str(seed), "POLARS_MAX_THREADS": str(threads), "PATH": "/usr/bin:/bin",
             "HOME": str(folder.parent)},
        check=True, timeout=600, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.mark.skipif(sys.platform == "win32", reason="writes to /dev/null")
def test_every_output_has_the_same_bytes_in_every_run(tmp_path: Path) -> None:
    first = outputs(tmp_path / "a", 1, 1)
    second = outputs(tmp_path / "b", 2, 3)
    assert len(first) >= len(FILES) + 2 * len(VERBS)
    assert all(first.values())
    assert [name for name in first if first[name] != second.get(name)] == []
    assert first.keys() == second.keys()
