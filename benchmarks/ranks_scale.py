"""What thousands of ranks take: `thence ranks` from summaries, and the timeline of the job.

    python benchmarks/ranks_scale.py [--ranks 64 512 4096 10000] [--groups all apart unnumbered]
                                     [--steps 10]

Summaries are those of jobs made of a real step (tests/support/rank_jobs.py), written as Parquet and read lazily as
from a store; kernels, places and idle time are written for a hundred ranks, as these are read of two ranks only.
Groups: all ranks are one; groups of eight that share no rank, so that each is matched and has its clocks compared by
itself (apart); the same without the numbers by which calls are matched (unnumbered). Printed are CPU seconds, wall
time and the most memory of a process of its own. The timeline (.pftrace) has two ranks of a real recording in full,
whichever they are, and a row for every other.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

import thence
from command_line import documented_parser

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from rank_jobs import Plant, RankJob
from thence.analysis.ranks.answer import Job, job_of
from thence.analysis.ranks.summary import SUMMARY
from thence.folding import folded_timeline
from thence.writers.timelines.write import write_timeline

if TYPE_CHECKING:
    from thence.model.selection import Selection

RECORDED = sorted((Path(__file__).parents[1] / "tests" / "data" / "torch").glob("torch_fsdp_rank?.json.gz"))
APART = 8
"""Ranks of a group of jobs whose groups share no rank."""


def write(folder: Path, ranks: int, steps: int, groups: str) -> None:
    """The summaries of a job with one late rank."""
    late = ranks // 2
    detailed = (*range(0, ranks, max(ranks // 100, 1)), late)
    small = 0 if groups == "all" else APART
    job = RankJob(ranks=ranks, steps=steps, small=small, plant=Plant("kernel", late, 0.2), detailed=detailed)
    tables = job.summaries()
    if small:
        tables |= {name: tables[name].filter(group=1) for name in ("collectives", "groups")}
    if groups == "unnumbered":
        unnumbered = tables["collectives"].with_columns(sequence=pl.lit(None, pl.Int64))
        tables["collectives"] = unnumbered
    for name, frame in tables.items():
        frame.write_parquet(folder / f"{name}.parquet")


def read(folder: Path) -> Job:
    return job_of({name: pl.scan_parquet(folder / f"{name}.parquet") for name in SUMMARY})


class Summarised(thence.Trace):
    """A job of which all but two ranks are summaries."""

    folder: Path

    def ranks(self, *, explain: bool = True) -> Job:
        del explain
        return read(self.folder)

    def selected(self, selection: Selection) -> thence.Trace:
        """Two recorded ranks, whichever are asked for."""
        del selection
        return thence.open(*RECORDED[:2])


def measured(folder: Path, *, timeline: bool) -> None:
    """Runs in a process of its own: prints what the answer or the timeline took."""
    begun, used = time.monotonic(), time.process_time()
    if timeline:
        job = Summarised(thence.open(RECORDED[0]).recorded)
        vars(job)["folder"] = folder
        target = folder / "job.pftrace"
        write_timeline(folded_timeline(job), target)
        said = f"{target.stat().st_size / 1e6:.1f} MB"
    else:
        said = f"stragglers {read(folder).stragglers['rank'].to_list()}"
    wall, cpu = time.monotonic() - begun, time.process_time() - used
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{cpu:.1f} s of CPU, {wall:.1f} s, {most:.2f} GB, {said}")


def main() -> None:
    """Prints a line for each size."""
    parser = documented_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 512, 4096, 10_000])
    parser.add_argument("--groups", nargs="*", default=["all", "apart", "unnumbered"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--measured", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--timeline", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measured:
        measured(given.measured, timeline=given.timeline)
        return
    for groups, ranks in product(given.groups, given.ranks):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            # A child's peak memory begins at its parent's, so the job is not made here.
            make = get_context("spawn").Process(target=write, args=(folder, ranks, given.steps, groups))
            make.start()
            make.join()
            size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
            run = [sys.executable, __file__, "--measured", name]
            said = subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()
            job = f"{groups}: {ranks:,} ranks, {given.steps} steps, {size:.0f} MB of summaries"
            print(f"{job}: {said}", flush=True)
            if groups == "all":
                run.append("--timeline")
                told = subprocess.run(run, capture_output=True, text=True, check=True).stdout
                print(f"timeline of {ranks:,} ranks: {told.strip()}", flush=True)


if __name__ == "__main__":
    main()
