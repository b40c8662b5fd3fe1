"""What commands cost whose input is tiny: CPU and wall seconds of every verb, of two versions beside each other.

    python benchmarks/command_start.py OTHER_SRC [--rounds 10] [--only report,idle]

``OTHER_SRC`` is the folder ``src`` of the other version (``git archive COMMIT src | tar x -C DIR``), given the same
Python and libraries. Each run is a process of its own, the versions in turns; one round before the others, uncounted,
writes the bytecode of both. Medians of the rounds, children included.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from command_line import documented_parser

ROOT = Path(__file__).parents[1]
OURS = ROOT / "src"
DATA = ROOT / "tests" / "data"
TORCH = DATA / "torch"
GRAPHS, LATER = (str(TORCH / f"{name}graph_replay_rank0.json.gz") for name in ("", "torch-2.12_"))
RANKS = [str(TORCH / f"torch_fsdp_rank{rank}.json.gz") for rank in range(3)]
XSPACE = str(DATA / "jax" / "jax_single.xplane.pb.gz")
NSIGHT = str(DATA / "nsight" / "torch_graph.sqlite.gz")


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


def measured(source: Path, arguments: list[str], folder: Path) -> tuple[float, float]:
    """CPU seconds of a process and its children, and seconds until it ended; nothing is left of the last one."""
    for made in ("store", "recording"):
        shutil.rmtree(folder / made, ignore_errors=True)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments], env=environment | {"PYTHONPATH": str(source)},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    _, _, used = os.wait4(process.pid, 0)
    process.returncode = 0
    return used.ru_utime + used.ru_stime, time.perf_counter() - began


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("other", type=Path, metavar="OTHER_SRC")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", help="with commas between them")
    options = parser.parse_args()
    print("| command | CPU s other | ours | ratio | wall s other | ours |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "ranks").mkdir()
        for trace in RANKS:
            (folder / "ranks" / Path(trace).name).symlink_to(trace)
        for shown, arguments in commands(folder).items():
            if options.only and shown not in options.only.split(","):
                continue
            rounds = [
                [measured(source, arguments, folder) for source in (options.other, OURS)]
                for _ in range(options.rounds + 1)
            ][1:]
            other, ours = (
                [statistics.median(values) for values in zip(*side, strict=True)] for side in zip(*rounds, strict=True)
            )
            print(
                f"| {shown} | {other[0]:.3f} | {ours[0]:.3f} | {ours[0] / other[0]:.2f} "
                f"| {other[1]:.3f} | {ours[1]:.3f} |", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
