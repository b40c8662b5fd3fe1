"""What commands cost, of two versions beside each other: CPU and wall seconds and peak memory of verbs.

    python benchmarks/command_start.py OTHER_SRC [--rounds 10] [--only report,idle]
    python benchmarks/command_start.py OTHER_SRC --inputs TRACE... [--verbs report,streams] [--rounds 3]

``OTHER_SRC`` is the folder ``src`` of the other version (``git archive COMMIT src | tar x -C DIR``), given the same
Python and libraries. Without ``--inputs`` every verb gets a tiny input, so that the figures are those of starting.
Each run is a process of its own, the versions in turns; one round before the others, uncounted, writes the bytecode of
both. Medians of the rounds, children included.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from command_line import documented_parser

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[1]
OURS = ROOT / "src"
DATA = ROOT / "tests" / "data"
TORCH = DATA / "torch"
GRAPHS, LATER = (str(TORCH / f"{name}graph_replay_rank0.json.gz") for name in ("", "torch-2.12_"))
RANKS = [str(TORCH / f"torch_fsdp_rank{rank}.json.gz") for rank in range(3)]
XSPACE = str(DATA / "jax" / "jax_single.xplane.pb.gz")
NSIGHT = str(DATA / "nsight" / "torch_graph.sqlite.gz")


@dataclass(frozen=True)
class Used:
    """What a process and its children used: seconds until it ended, CPU seconds, the largest resident set in MB."""

    wall: float
    cpu: float
    peak_mb: float
    code: int


def commands(folder: Path) -> dict[str, list[str]]:
    """Arguments of Python, by the name that the table shows; what is written goes to a folder."""
    verbs = {
        "report": [GRAPHS],
        "report of XSpace": [XSPACE],
        "report of Nsight": [NSIGHT],
        "report of a folder": [str(folder / "ranks")],
        "idle": [GRAPHS],
        "steps": [RANKS[0]],
        "diff": [GRAPHS, LATER],
        "convert": [GRAPHS, "-o", str(folder / "trace.pftrace"), "--force"],
        "flame": [GRAPHS, "-o", str(folder / "flame.html"), "--force"],
        "collectives": [RANKS[0]],
        "ranks": RANKS,
        "sql": [GRAPHS, "select count(*) from gpu"],
        "streams": [GRAPHS],
        "whatif": [GRAPHS],
        "check": [GRAPHS],
        "programs": [XSPACE],
        "compile": [XSPACE],
        "ingest": [GRAPHS, "-o", str(folder / "store")],
        "doctor": [],
        "demo": [],
        "record": ["-o", str(folder / "recording"), "--", "true"],
        "report --help": ["--help"],
    }
    named = {name: ["-m", "thence", name.split()[0], *arguments] for name, arguments in verbs.items()}
    opening = f"import thence; thence.open({GRAPHS!r})"
    return named | {
        "--help": ["-m", "thence", "--help"],
        "--version": ["-m", "thence", "--version"],
        "import thence": ["-c", "import thence"],
        "thence.open": ["-c", opening],
    }


def of_inputs(inputs: list[str], verbs: str) -> dict[str, list[str]]:
    """Arguments of Python for each verb and each input, by the name that the table shows."""
    return {
        f"{verb} {Path(given.split(',')[0]).name}": ["-m", "thence", *verb.split(), *given.split(",")]
        for given in inputs
        for verb in verbs.split(",")
    }


def measured(source: Path, arguments: list[str], folder: Path) -> Used:
    """What a process used; nothing is left of the last one."""
    for made in ("store", "recording"):
        shutil.rmtree(folder / made, ignore_errors=True)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = str(source)
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return Used(time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1000, process.returncode)


def table_row(cells: Iterable[object]) -> str:
    """A row of a table in Markdown."""
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("other", type=Path, metavar="OTHER_SRC")
    parser.add_argument("--inputs", nargs="+", help="several files of one trace with commas")
    parser.add_argument("--verbs", default="report", help="of --inputs, with commas between them")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", help="with commas between them")
    options = parser.parse_args()
    print(table_row(["command", "CPU s other", "ours", "ratio", "wall s other", "ours", "MB other", "ours", "exit"]))
    print(table_row(["---"] * 9))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "ranks").mkdir()
        for trace in RANKS:
            (folder / "ranks" / Path(trace).name).symlink_to(trace)
        chosen = of_inputs(options.inputs, options.verbs) if options.inputs else commands(folder)
        for shown, arguments in chosen.items():
            if options.only and shown not in options.only.split(","):
                continue
            rounds = [
                [measured(source, arguments, folder) for source in (options.other, OURS)]
                for _ in range(options.rounds + 1)
            ][1:]
            codes = {used.code for pair in rounds for used in pair}
            (cpu, other_cpu), (wall, other_wall), (peak, other_peak) = (
                [statistics.median(getattr(pair[side], what) for pair in rounds) for side in (1, 0)]
                for what in ("cpu", "wall", "peak_mb")
            )
            cells = [f"{other_cpu:.3f}", f"{cpu:.3f}", f"{cpu / other_cpu:.2f}", f"{other_wall:.3f}", f"{wall:.3f}"]
            cells += [f"{other_peak:.0f}", f"{peak:.0f}", ", ".join(map(str, sorted(codes)))]
            print(table_row([shown, *cells]), flush=True)


if __name__ == "__main__":
    main()
