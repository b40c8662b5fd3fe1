"""Does `thence ranks` name the late rank and why, and nobody where nobody is late? On jobs made of a real step.

    python benchmarks/ranks_planted.py [--null 1000] [--planted 100] [--seed 0]

Jobs of 2 to 32 ranks and 4 to 40 steps are made of a step that was recorded under FSDP2 (tests/support/rank_jobs.py):
noise from 0.5 to 15 % of each stretch, ranks that are a little slower, pauses, clocks apart, collectives that are
awaited at once or overlap with compute. --null of them have no fault: in how many is a straggler named? 1 % are
allowed. --planted of each kind have one, of 3 to 30 % of a step: in how many is the rank named, alone, with the
cause, line and module, and the step since which it is late? The faults with wall times equal on all ranks are all:
everyone waits for the late one. As many jobs have two late ranks, of which both must be named and no other; and as many
have a late rank whose trace is missing, where nobody may be named.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

from command_line import documented_parser

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from rank_jobs import LINE, MODULE, Plant, RankJob
from thence.analysis.ranks.answer import Job, job_of
from thence.analysis.student_t import highest_share

EXPECTED = {
    "backward": "python",
    "kernel": "compute",
    "slow_gpu": "slower_gpu",
    "loader": "loader",
    "batch": "more_work",
    "link": "transfer",
}
"""The kinds of fault, and the cause that is to be named; tests/analysis/ranks/test_nodes.py has those of nodes."""


def quiet(random: np.random.Generator, seed: int) -> RankJob:
    """A job in which nobody is late."""
    return RankJob(
        ranks=int(random.choice([2, 4, 8, 16, 32])),
        steps=int(random.integers(4, 41)),
        noise=float(np.exp(random.uniform(np.log(0.005), np.log(0.15)))),
        uneven=float(random.choice([0.0, 0.002, 0.005])),
        pauses=float(random.choice([0.0, 0.02, 0.1])),
        overlapped=bool(random.random() < 0.5),
        drift=float(random.choice([0.0, 20_000.0])),
        seed=seed,
    )


def faulty(random: np.random.Generator, kind: str, seed: int) -> RankJob:
    """A job with one fault."""
    link = kind == "link"
    ranks = int(random.choice([12, 16, 32])) if link else int(random.choice([2, 4, 8, 16, 32]))
    steps = int(random.integers(10, 41))
    since = int(random.integers(0, steps // 2)) if random.random() < 0.5 else 0
    share = float(random.uniform(0.05, 0.3))
    return RankJob(
        ranks=ranks,
        steps=steps,
        plant=Plant(kind, int(random.integers(ranks)), share, since),
        noise=float(random.choice([0.005, 0.01, 0.02])),
        small=4 if link else 0,
        overlapped=not link and bool(random.random() < 0.5),
        seed=seed,
    )


def named(job: RankJob, found: Job) -> Counter[str]:
    """What of the fault is named."""
    plant = job.plant
    assert plant is not None
    told = Counter({"jobs": 1})
    stragglers = found.stragglers["rank"].to_list()
    if plant.kind == "link":
        first = plant.rank // job.small * job.small
        members = str(list(range(first, first + job.small)))
        told["link named"] = int(found.links["members"].to_list() == [members])
        told["others named"] = int(any(not first <= rank < first + job.small for rank in stragglers))
        return told
    told["rank named"] = int(plant.rank in stragglers)
    told["others named"] = int(any(rank != plant.rank for rank in stragglers))
    if plant.rank not in stragglers:
        return told
    since = found.stragglers.filter(rank=plant.rank)["since_step"][0]
    told["since named"] = int(abs(found.keys.index(since) - plant.since) <= 1)
    reasons = next(r for r in found.reasons if r.rank == plant.rank).rows
    told["cause named"] = int(reasons["cause"][0] == EXPECTED[plant.kind])
    if plant.kind in ("backward", "kernel"):
        names = set(reasons["name"])
        told["line and module named"] = int({LINE, MODULE} <= names)
    return told


def two_late(random: np.random.Generator, seed: int) -> RankJob:
    """A job in which the hosts of two ranks sleep in every step, for different times or for the same time.

    Collectives overlap with compute only if the times are the same: else the shorter sleep may cost nothing, because
    what the longer one delays hides it.
    """
    ranks = int(random.choice([4, 8, 16, 32]))
    first, second = (int(rank) for rank in random.choice(ranks, 2, replace=False))
    share = float(random.uniform(0.05, 0.3))
    other = share if random.random() < 0.5 else float(random.uniform(0.05, 0.3))
    return RankJob(
        ranks=ranks,
        steps=int(random.integers(10, 41)),
        plant=Plant("backward", first, share),
        second=Plant("backward", second, other),
        noise=float(random.choice([0.005, 0.01, 0.02])),
        overlapped=other == share and bool(random.random() < 0.5),
        seed=seed,
    )


def without_the_late_rank(random: np.random.Generator, seed: int) -> RankJob:
    """A job with a late rank, and its summaries without that rank; half of the jobs have groups of four, too."""
    kind = str(random.choice(["backward", "kernel", "slow_gpu", "loader", "batch"]))
    job = replace(faulty(random, kind, seed), small=4 if random.random() < 0.5 else 0)
    if job.small and job.ranks % job.small:
        job = replace(job, small=0)
    assert job.plant is not None
    return replace(job, overlapped=job.overlapped and not job.small, missing=(job.plant.rank,))


def several(count: int, seed: int) -> None:
    """Prints the counts for jobs with two late ranks, and for jobs whose late rank is missing."""
    random = np.random.default_rng(seed + 1)
    counts: Counter[str] = Counter()
    for number in range(count):
        job = two_late(random, seed + number)
        assert job.plant is not None
        assert job.second is not None
        late = {job.plant.rank, job.second.rank}
        names = set(job_of(job.summaries()).stragglers["rank"])
        counts.update({"jobs": 1, "both named": int(late <= names), "others named": int(bool(names - late))})
    print("two late ranks: " + ", ".join(f"{what} {count}" for what, count in counts.items()))
    counts.clear()
    for number in range(count):
        job = without_the_late_rank(random, seed + number)
        found = job_of(job.summaries())
        named_ranks = not found.stragglers.is_empty()
        missed = found.shown.missing_ranks != list(job.missing)
        counts.update({"jobs": 1, "somebody named": int(named_ranks), "missing rank not named": int(missed)})
    print("late rank missing: " + ", ".join(f"{what} {count}" for what, count in counts.items()))


def main() -> None:
    """Prints the counts."""
    parser = documented_parser(__doc__)
    parser.add_argument("--null", type=int, default=1000)
    parser.add_argument("--planted", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    random = np.random.default_rng(given.seed)
    begun = time.monotonic()
    wrong = []
    for number in range(given.null):
        job = quiet(random, given.seed + number)
        found = job_of(job.summaries())
        if not found.stragglers.is_empty() or not found.links.is_empty():
            wrong.append((job.ranks, job.steps, round(job.noise, 3), job.pauses, job.overlapped))
    if given.null:
        bound = highest_share(len(wrong), given.null)
        print(
            f"without a fault: {len(wrong)} of {given.null} jobs name a straggler or link "
            f"({100 * len(wrong) / given.null:.1f} %, at most {100 * bound:.1f} % with 95 % confidence); "
            f"{(time.monotonic() - begun) / given.null:.2f} s a job"
        )
        for facts in wrong:
            print("  ranks, steps, noise, pauses, overlapped:", *facts)
    for kind in EXPECTED:
        counts: Counter[str] = Counter()
        for number in range(given.planted):
            job = faulty(random, kind, given.seed + number)
            counts.update(named(job, job_of(job.summaries())))
        print(f"{kind}: " + ", ".join(f"{what} {count}" for what, count in counts.items()))
    several(given.planted, given.seed)


if __name__ == "__main__":
    main()
