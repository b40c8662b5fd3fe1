"""Does `thence diff` call noise noise, and a change a change? On real runs, and on simulated ones.

    python benchmarks/diff_noise.py check RUNS [--draws 1000]     what gpu_diff.py recorded
    python benchmarks/diff_noise.py power                         simulated runs: the curves of docs/diff.md
    python benchmarks/diff_noise.py speed [--megabytes 1000]      two large traces: opening them, and comparing them
    python benchmarks/diff_noise.py processes JOB...              how much processes of one program differ

check: draws of 5 runs of the unchanged program against 5 others of it, of 20 steps each: in how many is any row
called slower, faster, new or gone? 5 % are allowed, with a 95 % upper bound (Clopper and Pearson) of 7 %. Draws of 5
planted runs against 5 unchanged ones: in how many is the planted label called slower, and how often is a row that
holds none of the planted work called different? Then what the first line says of each real change, and whether a
gate lets the program pass that our own recorder records: it may take 2 % longer than under torch.profiler.

processes: JOB is a job of several GPUs that ran one program. For each pair of its GPUs: by how much the time per step
of each kernel differs that is no collective and ran equally often (median, 95th percentile), and the sum of these
kernels. What a comparison of two single runs cannot call different (`thence.analysis.diff.answer.ONE_RUN_WORK`) is the
largest 95th percentile of pairs whose kernels did not share the device with waiting collectives.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

import thence
from command_line import documented_parser
from kineto_input import write_repeated
from thence.analysis.diff.answer import compare
from thence.analysis.diff.estimates import RunMeans, discoveries, estimates
from thence.analysis.diff.gate import judge, parse_bound
from thence.analysis.student_t import highest_share
from thence.model.selection import Selection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.analysis.diff.answer import Diff
    from thence.analysis.diff.sample import Sample

RECORDING = Path(__file__).parent.parent / "tests/data/torch/torch_eager_rank0.json.gz"
RUNS, STEPS = 5, 20
PLANTED = "planted"
DIFFERENT = ["slower", "faster", "new", "gone"]
ALLOWED, MOST = 0.05, 0.07
RECORDED, GATE = "recorded_by_thence", "total>2%"
EQUAL = 0.01
"""Kernels whose number per step differs by less ran equally often."""


def samples_of(folder: Path) -> list[Sample]:
    runs = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    return [thence.open(run).sample() for run in runs]


def first_steps(sample: Sample, steps: int) -> Sample:
    """The sample as if only so many steps had counted."""
    number = sample.steps["left_out"].is_null().cum_sum()
    return dataclasses.replace(
        sample, steps=sample.steps.filter(number <= steps), rows=sample.rows.filter(pl.col("step") < steps)
    )


def different(diff: Diff) -> pl.DataFrame:
    """Rows that are called different, the whole step among them."""
    rows = diff.rows.select("by", "name", "verdict", "difference_ns")
    whole = pl.DataFrame(
        [("step", "all", diff.total.verdict, diff.total.difference_ns)], schema=rows.schema, orient="row"
    )
    return pl.concat([whole, rows]).filter(pl.col("verdict").is_in(DIFFERENT))


def false_rows(base: Sequence[Sample], draws: int, generator: np.random.Generator) -> None:
    wrong, rows, tested = 0, Counter[tuple[str, str]](), []
    begin = time.perf_counter()
    for _ in range(draws):
        chosen = generator.permutation(len(base))[: 2 * RUNS]
        diff = compare([base[n] for n in chosen[:RUNS]], [base[n] for n in chosen[RUNS:]])
        found = different(diff)
        wrong += not found.is_empty()
        rows.update(found.select("by", "name").iter_rows())
        tested.append(diff.rows.height)
    bound = highest_share(wrong, draws)
    verdict = "ok" if wrong <= ALLOWED * draws and bound <= MOST else "TOO MANY"
    print(
        f"{draws} draws of {RUNS} against {RUNS} unchanged runs, {STEPS} steps, {np.median(tested):.0f} rows: any row "
        f"different in {wrong} ({wrong / draws:.1%}), upper bound {bound:.1%}: {verdict} "
        f"({time.perf_counter() - begin:.0f} s)"
    )
    for (by, name), count in rows.most_common(5):
        print(f"    {count} times {by} {name[:100]}")


def power(base: Sequence[Sample], planted: Sequence[Sample], draws: int, generator: np.random.Generator) -> None:
    found = quiet = total = 0
    others = Counter[tuple[str, str]]()
    ours = _holding(planted[0])
    shares = []
    for _ in range(draws):
        one = [base[n] for n in generator.permutation(len(base))[:RUNS]]
        other = [planted[n] for n in generator.permutation(len(planted))[:RUNS]]
        rows = different(compare(one, other))
        label = rows.filter(pl.col("by") == "label", pl.col("name").str.contains(PLANTED))
        found += "slower" in label["verdict"].to_list()
        rest = [row for row in rows.select("by", "name").iter_rows() if row not in ours]
        quiet += not rest
        total += ("step", "all") in rows.select("by", "name").rows()
        others.update(rest)
        shares.append(label["difference_ns"].max() or 0.0)
    print(
        f"{draws} draws of {RUNS} planted against {RUNS} unchanged runs: the label found slower in {found / draws:.1%} "
        f"(by {np.median(np.array(shares, float)) / 1e3:.1f} us), all other rows quiet in {quiet / draws:.1%}, "
        f"the whole step called different in {total / draws:.1%}"
    )
    for (by, name), count in others.most_common(5):
        print(f"    {count} times {by} {name[:100]}")


def _holding(sample: Sample) -> set[tuple[str, str]]:
    """Rows that hold planted work: its label and the paths around it, its kernel and operator, and the whole."""
    places = sample.kernels.filter(pl.col("label").str.contains(PLANTED))
    kernels, ops = places["name"].unique(), places["op"].drop_nulls().unique()
    labels = {
        f"{head}{end}"
        for label in places["label"].unique()
        for head in (label, label.split("/")[0])
        for end in ("", "/...")
    }
    return {
        *(("kernel", name) for name in kernels),
        *(("op", name) for name in ops),
        *(("label", name) for name in labels),
        *(("step", "all"), ("busy", "all")),
    }


def check(folder: Path, draws: int) -> None:
    variants = {path.name: path for path in sorted(folder.iterdir()) if path.is_dir()}
    generator = np.random.default_rng(22)
    begin = time.perf_counter()
    base = samples_of(variants.pop("base"))
    print(f"{len(base)} unchanged runs, opened and summed up in {time.perf_counter() - begin:.0f} s")
    counted = [sample.counted for sample in base]
    print(f"steps that count: {min(counted)} to {max(counted)} of {base[0].steps.height}")
    short = [first_steps(sample, STEPS) for sample in base]
    false_rows(short, draws, generator)
    if "planted" in variants:
        planted = [first_steps(s, STEPS) for s in samples_of(variants.pop("planted"))]
        power(short, planted, min(draws, 200), generator)
    for name, path in variants.items():
        changed = samples_of(path)
        diff = compare(base[:RUNS], changed)
        refused = f" [not comparable: {', '.join(r.code for r in diff.refusals)}]" if diff.refusals else ""
        print(f"\n{name} ({len(changed)} runs){refused}\n    {diff.explanation[0]}")
        if name == RECORDED:
            # The gate on the overhead of our own recorder, beside torch.profiler's.
            print(f"    {judge(diff, [parse_bound(GATE)])[0]}")


def simulated(rows: int, runs: int, noise: float, shift: float, generator: np.random.Generator, trials: int) -> float:
    """How often the first of some rows is found if it takes longer by a share, and all vary by a share."""
    mean = 1 + noise * generator.standard_normal((trials, rows, 2 * runs))
    mean[:, 0, runs:] += shift
    of_rows = mean.reshape(trials * rows, 2 * runs)
    zero = np.zeros_like(of_rows)
    keys = [("label", "")] * len(of_rows)
    steps = np.full(2 * runs, STEPS)
    means = RunMeans(keys, of_rows, zero, zero, zero + 1, zero, zero + 1, steps)
    p = estimates(means, range(runs), range(runs, 2 * runs)).p.reshape(trials, rows)
    return float(np.mean([discoveries(of_trial)[0] for of_trial in p]))


def curves(trials: int) -> None:
    """The probability to find a change of one row among others, by runs a side, for noise of 0.5 % between runs."""
    generator = np.random.default_rng(0)
    changes = (0.5, 1, 2, 3, 5)
    for rows in (1, 50, 200):
        print(f"\nOne changed row among {rows}; change of the row in multiples of the noise between runs\n")
        print("| runs a side |" + "".join(f" {change:g}x |" for change in changes))
        print("|--:|" + "--:|" * len(changes))
        for runs in (2, 3, 5, 8, 12, 20):
            found = (simulated(rows, runs, 0.005, 0.005 * change, generator, trials) for change in changes)
            print(f"| {runs} |" + "".join(f" {share:.0%} |" for share in found))


SPEED = """
import sys, time
import thence
from thence.analysis.diff.answer import compare

class Clock:
    def __init__(self): self.wall = self.cpu = 0.0
    def __enter__(self): self.begin = time.perf_counter(), time.process_time()
    def __exit__(self, *_):
        self.wall += time.perf_counter() - self.begin[0]
        self.cpu += time.process_time() - self.begin[1]
    def __str__(self): return f"{self.wall:.2f} s ({self.cpu:.2f} s of CPU)"

opening, more = Clock(), Clock()
samples = []
for path in sys.argv[1:]:
    with opening:
        trace = thence.open(path)
        trace.tables, trace.check()
    with more:
        samples.append(trace.sample())
    del trace
with more:
    compare(samples[:1], samples[1:]).to_json()
rows = sum(sample.kernels["count"].sum() * sample.counted for sample in samples)
print(f"{rows:,.0f} activities, {samples[0].steps.height:,} steps: opened, attributed and checked in {opening}; "
      f"summed up and compared in {more} more (1 s wanted)")
"""


def speed(megabytes: int) -> None:
    with tempfile.TemporaryDirectory(prefix="thence-diff-") as folder:
        paths = [Path(folder) / f"{side}.json" for side in ("before", "after")]
        for path in paths:
            write_repeated(RECORDING, path, megabytes * 1_000_000)
        print(f"two traces of {paths[0].stat().st_size / 1e6:,.0f} MB")
        subprocess.run([sys.executable, "-c", SPEED, *map(str, paths)], check=True)


COLLECTIVES = "(?i)nccl|rccl|all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all"
"""Names of kernels and thunks that are collectives."""


def processes(jobs: Sequence[str]) -> None:
    for job in jobs:
        trace = thence.open(job)
        devices = trace.tables.gpu.select("rank", "device").unique().sort("rank", "device").rows()
        samples = {
            place: trace.selected(Selection(ranks=place[:1], devices=place[1:])).sample(causes=False)
            for place in devices
        }
        print(job)
        for one, other in combinations(devices, 2):
            diff = compare([samples[one]], [samples[other]])
            equal = (pl.col("before_count") - pl.col("after_count")).abs() < EQUAL
            rows = diff.rows.filter(pl.col("by") == "kernel", equal, ~pl.col("name").str.contains(COLLECTIVES))
            share = rows["difference_share"].abs()
            whole = rows["difference_ns"].sum() / max(rows["before_ns"].sum(), 1)
            print(
                f"    rank {one[0]} GPU {one[1]} and rank {other[0]} GPU {other[1]}: {samples[one].counted} and "
                f"{samples[other].counted} steps, {rows.height} kernels: median {share.median() or 0:.1%}, 95th "
                f"percentile {share.quantile(0.95) or 0:.1%}; their sum {abs(whole):.1%}"
            )


def main() -> None:
    parser = documented_parser(__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    checking = verbs.add_parser("check")
    checking.add_argument("runs", type=Path)
    checking.add_argument("--draws", type=int, default=1000)
    verbs.add_parser("power").add_argument("--trials", type=int, default=400)
    verbs.add_parser("speed").add_argument("--megabytes", type=int, default=1000)
    verbs.add_parser("processes").add_argument("jobs", nargs="+", metavar="JOB")
    given = parser.parse_args()
    if given.verb == "processes":
        processes(given.jobs)
    elif given.verb == "check":
        check(given.runs, given.draws)
    elif given.verb == "power":
        curves(given.trials)
    else:
        speed(given.megabytes)


if __name__ == "__main__":
    main()
