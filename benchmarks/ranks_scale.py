"""What `thence ranks` takes for thousands of ranks: time and memory from summaries, and its page in a browser.

    python benchmarks/ranks_scale.py [--ranks 512 4096 10000] [--groups all apart unnumbered]
                                     [--steps 10] [--page 4096]

Summaries are those of jobs made of a real step (tests/support/rank_jobs.py), written as Parquet and read lazily as
from a store; kernels, places and idle time are written for a hundred ranks, as these are read of two ranks only.
Groups: all ranks are one; groups of eight that share no rank, so that each is matched and has its clocks compared by
itself (apart); the same without the numbers by which calls are matched (unnumbered). Printed are CPU seconds, wall
time and the most memory of a process of its own. The page is opened in headless Chromium (on the path, or named in
CHROMIUM), which says when the page stood.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import polars as pl

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from rank_jobs import Plant, RankJob
from thence.analysis.ranks.job import Job, job_of
from thence.analysis.ranks.summary_tables import SUMMARY
from thence.writers.page.ranks_page import ranks_html

APART = 8
"""Ranks of a group of jobs whose groups share no rank."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
STOOD = "  draw(); relist();\n  window"
TIMED = '  draw(); relist();\n  document.title = "stood after " + performance.now().toFixed(0) + " ms";\n  window'


def write(folder: Path, ranks: int, steps: int, groups: str) -> None:
    """The summaries of a job with one late rank."""
    late = ranks // 2
    detailed = (*range(0, ranks, max(ranks // 100, 1)), late)
    small = 0 if groups == "all" else APART
    job = RankJob(
        ranks=ranks, steps=steps, small=small, plant=Plant("kernel", late, 0.2), detailed=detailed
    )
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


def measured(folder: Path) -> None:
    """Runs in a process of its own: prints what the answer took."""
    begun, used = time.monotonic(), time.process_time()
    found = read(folder)
    wall, cpu = time.monotonic() - begun, time.process_time() - used
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    stragglers = found.stragglers["rank"].to_list()
    print(f"{cpu:.1f} s of CPU, {wall:.1f} s, {most:.2f} GB, stragglers {stragglers}")


def opened(folder: Path) -> str:
    """When the page of a job stood in the browser."""
    browser = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        return "no Chromium"
    page = ranks_html(read(folder), ["run/"], [])
    assert STOOD in page
    file = folder / "page.html"
    file.write_text(page.replace(STOOD, TIMED, 1), encoding="utf-8")
    flags = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}")
    run = subprocess.run(
        [browser, *flags, "--dump-dom", file.as_uri()], capture_output=True, timeout=120, check=True
    )
    title = re.search(r"<title>(.*?)</title>", run.stdout.decode())
    return f"{len(page) / 1e6:.1f} MB, {title[1] if title else 'no title'}"


def main() -> None:
    """Prints a line for each size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[512, 4096, 10_000])
    parser.add_argument("--groups", nargs="*", default=["all", "apart", "unnumbered"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--page", type=int, default=4096)
    parser.add_argument("--measured", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measured:
        measured(given.measured)
        return
    sizes = dict.fromkeys([*given.ranks, *([given.page] if given.page else [])])
    for groups, ranks in product(given.groups, sizes):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            # A child's peak memory begins at its parent's, so the job is not made here.
            make = get_context("spawn").Process(
                target=write, args=(folder, ranks, given.steps, groups)
            )
            make.start()
            make.join()
            size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
            run = [sys.executable, __file__, "--measured", name]
            said = subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()
            job = f"{groups}: {ranks:,} ranks, {given.steps} steps, {size:.0f} MB of summaries"
            print(f"{job}: {said}", flush=True)
            if ranks == given.page and groups == "all":
                print(f"page of {ranks:,} ranks: {opened(folder)}; load {os.getloadavg()[0]:.0f}")


if __name__ == "__main__":
    main()
