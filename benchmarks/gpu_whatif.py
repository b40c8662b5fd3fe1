"""What-if predictions against counterfactual runs: the changed program is run, too.

Programs and changes are in whatif_programs.py, fixed before any run: steps limited by the device (gpu), by both
(mixed), by the host (host), with host and streams that overlap (overlap), and a training step of a small GPT-2 of
Hugging Face's transformers (model); on two GPUs a late rank, exposed communication, and that model under FSDP2.
Recording and checking are apart, because the recording machine needs torch and transformers alone::

    python benchmarks/gpu_whatif.py record FOLDER [--seconds 140]       # on one GPU
    python benchmarks/gpu_whatif.py record-two FOLDER [--seconds 55]    # on two; starts torchrun itself
    python benchmarks/gpu_whatif.py check FOLDER                        # anywhere, with thence

How a step is measured: in rounds, each a profile of its own, which every variant of a program takes part in, the
unchanged one twice (as base and as null control); the order is rotated from round to round. A variant runs a block of
4 or 8 steps between two synchronizations, on two ranks after a barrier. Before the blocks of a round come matrix
products until the clocks are up, and a block that does not count. The collector of garbage is off but between rounds.
What a change gains is the median over the rounds of its share of the unchanged block of the same round; the spread is
that of the medians of three thirds of the rounds. The trace of a program is the one of three whose step is the median.

``check`` prints every pair: predicted and measured change of the profiled step, the error as a share of the step, the
error beyond the spread of the repeats, and whether the interval covers what was measured. Then, by what limits the
program: median and worst error, coverage, how many were refused, and by how much null controls differ.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whatif_programs import ONE, TWO, Model, Planned, Program, changed

if TYPE_CHECKING:
    from collections.abc import Iterator

    Blocks = list[list[float]]

SECONDS = {"record": 140.0, "record-two": 55.0}
CANDIDATES, LEAST_ROUNDS, MOST_ROUNDS = 3, 6, 30
CLOCKS_MS = 100


@contextmanager
def profiled(program: Program) -> Iterator[Any]:
    """torch.profiler with waits for events, and with exact ids of their records where thence can be imported."""
    from torch.profiler import ProfilerActivity, profile

    settings = program.torch._C._profiler._ExperimentalConfig(  # noqa: SLF001 - there is no public one
        enable_cuda_sync_events=True
    )
    profiler = profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], experimental_config=settings
    )
    profiler.start()
    with exact_ids():  # ends after the profile, so that what it does is not in it
        try:
            yield profiler
        finally:
            profiler.stop()


@contextmanager
def exact_ids() -> Iterator[None]:
    """Exact ids of events, where thence can be imported and CUPTI has them; a warning otherwise."""
    with ExitStack() as stack:
        try:
            import thence
            from thence.errors import ThenceError
        except ImportError as error:
            warnings.warn(f"no exact ids of events: {error}", stacklevel=1)
        else:
            try:
                stack.enter_context(thence.torch.event_ids())
            except ThenceError as error:
                warnings.warn(f"no exact ids of events: {error}", stacklevel=1)
        yield


def block(program: Program, times: dict[str, float], steps: int, name: str = "warm-up") -> float:
    """Microseconds of a step, over some steps between two synchronizations."""
    program.together()
    begin = time.perf_counter_ns()
    for number in range(steps):
        program.step(times, f"{name}#{number}")
    program.torch.cuda.synchronize()
    return (time.perf_counter_ns() - begin) / steps / 1000


def write_trace(program: Program, plan: Planned, path: Path) -> None:
    """Traces of the unchanged program, of which the one with the median step is kept."""
    took = []
    for number in range(CANDIDATES):
        program.warm_up(CLOCKS_MS)
        with profiled(program) as profiler:
            block(program, plan.times, plan.steps)
            took.append(block(program, plan.times, plan.steps, "ProfilerStep"))
        profiler.export_chrome_trace(str(path.with_name(f"{number}_{path.name}")))
    chosen = agreed(program, took.index(statistics.median_low(took)))
    path.with_name(f"{chosen}_{path.name}").replace(path)
    for number in set(range(CANDIDATES)) - {chosen}:
        path.with_name(f"{number}_{path.name}").unlink()


def agreed(program: Program, number: int) -> int:
    """The number that rank 0 says."""
    if program.world == 1:
        return number
    said = program.torch.tensor([number], device="cuda")
    program.torch.distributed.broadcast(said, 0)
    return int(said.item())


def measured(program: Program, plan: Planned, until: float) -> Blocks:
    """Microseconds of a step, by variant (the unchanged one first, then one for each pair) and round."""
    variants = [plan.times, *(changed(plan.times, pair) for pair in plan.pairs)]
    result: Blocks = [[] for _ in variants]
    number, going = 0, 1
    while going:
        gc.collect()
        program.warm_up(CLOCKS_MS)
        with profiled(program):
            block(program, plan.times, plan.steps)
            for place in range(len(variants)):
                variant = (place + number) % len(variants)
                result[variant].append(block(program, variants[variant], plan.steps))
        number += 1
        left = number < LEAST_ROUNDS or time.monotonic() < until
        going = agreed(program, int(left and number < MOST_ROUNDS))
    return result


def record(folder: Path, plans: dict[str, Planned], until: float) -> None:
    """Runs every program with and without every change, and writes a trace of each program."""
    import torch

    local = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(local)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", local))
    folder.mkdir(parents=True, exist_ok=True)
    suffix = f"_rank{rank}" if world > 1 else ""
    runs: list[dict[str, Any]] = []
    simple = Program()
    for done, (name, plan) in enumerate(plans.items()):
        program = Model() if name in ("model", "fsdp2") else simple
        gc.collect()
        gc.freeze()
        gc.disable()
        now = time.monotonic()
        share = now + (until - now) / (len(plans) - done)
        for _ in range(3):
            block(program, plan.times, plan.steps)
        write_trace(program, plan, folder / f"{name}{suffix}.json.gz")
        blocks = measured(program, plan, share)
        every = [blocks]
        if world > 1:
            every = [[] for _ in range(world)]
            torch.distributed.all_gather_object(every, blocks)
        runs += [
            {"program": name, "limit": plan.limit, **vars(pair),
             "base": [of[0] for of in every], "after": [of[1 + place] for of in every]}
            for place, pair in enumerate(plan.pairs)
        ]  # fmt: skip
        if rank == 0:
            (folder / f"runs{world}.json").write_text(json.dumps(runs))
            medians = [round(statistics.median(of)) for of in blocks]
            print(f"{name}: {len(blocks[0])} rounds, us of a step: {medians}", flush=True)
    if world > 1:
        torch.distributed.destroy_process_group()


def record_two(folder: Path, until: float) -> None:
    """Starts itself on two GPUs, or records as one of these two processes."""
    if "WORLD_SIZE" in os.environ:
        record(folder, TWO, until)
        return
    left = str(until - time.monotonic())
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         __file__, "record-two", str(folder), "--seconds", left],
        check=True,
    )  # fmt: skip


def _step_us(run: dict[str, Any], side: str) -> list[float]:
    """Microseconds of a step by round: of the slowest rank, or of those for which a late one is in time."""
    of_ranks = run[side]
    if run["action"] == "on-time":
        late = int(run["text"].partition(":")[2])
        of_ranks = [us for rank, us in enumerate(of_ranks) if rank != late]
    return [max(us) for us in zip(*of_ranks, strict=True)]


def _spread(shares: list[float]) -> float:
    """How far the medians of three thirds of the rounds are apart."""
    third = max(len(shares) // 3, 1)
    medians = [statistics.median(shares[at : at + third]) for at in range(0, 3 * third, third)]
    return max(medians) - min(medians)


def check(folder: Path) -> int:
    """Predicts every change from the trace of its program, and compares."""
    import thence
    from thence.errors import ThenceError

    runs = [
        run for path in sorted(folder.glob("runs?.json")) for run in json.loads(path.read_text())
    ]
    columns = ("predicted", "measured", "error", "beyond", "spread", "low", "high")
    print(f"{'program':8} {'change':36}{'step us':>9}" + "".join(f"{name:>10}" for name in columns))
    rows: list[dict[str, Any]] = []
    opened: dict[str, Any] = {}
    for run in runs:
        name = run["program"]
        if name not in opened:
            several = sorted(folder.glob(f"{name}_rank*.json.gz"))
            opened[name] = thence.open(several or folder / f"{name}.json.gz")
        us = {side: _step_us(run, side) for side in ("base", "after")}
        base = statistics.median(us["base"])
        shares = [1 - after / before for before, after in zip(*us.values(), strict=True)]
        row = {**run, "measured": statistics.median(shares), "spread": _spread(shares)}
        rows.append(row)
        title = f"{name:8} {run['action'] + ' ' + run['text']:36}{base:9.0f}"
        try:
            answer = opened[name].what_if(**{run["action"].replace("-", "_"): [run["text"]]})
        except ThenceError as error:
            print(f"{title} refused: {error}")
            continue
        found = [one for one in answer.rows.to_dicts() if one["part"] == run["meaning"]]
        if not found or found[0]["gain_share"] is None:
            print(f"{title} {found[0]['verdict'] if found else 'no such meaning'}")
            continue
        (one,) = found
        row["error"] = one["gain_share"] - row["measured"]
        row["beyond"] = max(0.0, abs(row["error"]) - row["spread"])
        row["covers"] = one["low_share"] <= row["measured"] <= one["high_share"]
        row["recorded"] = answer.step_ns / 1000 / base - 1
        said = (one["gain_share"], row["measured"], row["error"], row["beyond"], row["spread"])
        said = (*said, one["low_share"], one["high_share"])
        shown = "".join(f"{100 * share:+9.1f}%" for share in said)
        print(f"{title}{shown} {'covers' if row['covers'] else 'MISSES'}")
    return _summary(rows)


def _summary(rows: list[dict[str, Any]]) -> int:
    """Prints errors by what limits the program; 1 when they are more than wanted."""
    for limit in (*dict.fromkeys(row["limit"] for row in rows), "all"):
        of = [row for row in rows if limit in (row["limit"], "all")]
        accepted = [row for row in of if "error" in row]
        if not accepted:
            print(f"{limit:7}: {len(of)} pairs, all refused")
            continue
        errors = [abs(row["error"]) for row in accepted]
        beyond = [row["beyond"] for row in accepted]
        print(
            f"{limit:7}: {len(of)} pairs, {len(of) - len(accepted)} refused; error of the step: median "
            f"{100 * statistics.median(errors):.1f} %, worst {100 * max(errors):.1f} %; beyond the repeats' spread: "
            f"median {100 * statistics.median(beyond):.1f} %, worst {100 * max(beyond):.1f} %; intervals cover "
            f"{100 * statistics.mean(row['covers'] for row in accepted):.0f} %"
        )
    nulls = {row["program"]: 100 * row["measured"] for row in rows if row["part"] == "none"}
    print("null controls differ: " + ", ".join(f"{name} {of:+.2f} %" for name, of in nulls.items()))
    traced = {row["program"]: 100 * row["recorded"] for row in rows if "recorded" in row}
    print(
        "the recorded step beside the median one: "
        + ", ".join(f"{name} {of:+.1f} %" for name, of in traced.items())
    )
    accepted = [row for row in rows if "error" in row]
    good = (
        len(rows) - len(accepted) <= 8
        and all("error" in row for row in rows if row["limit"] == "device")
        and statistics.median(row["beyond"] for row in accepted) <= 0.02
        and max(row["beyond"] for row in accepted) <= 0.05
        and statistics.mean(row["covers"] for row in accepted) >= 0.9
    )
    print("as wanted" if good else "NOT as wanted")
    return 0 if good else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("record", "record-two", "check"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, help="how long to record, about")
    given = parser.parse_args()
    if given.what == "check":
        sys.exit(check(given.folder))
    deadline = time.monotonic() + (given.seconds or SECONDS[given.what])
    if given.what == "record":
        record(given.folder, ONE, deadline)
    else:
        record_two(given.folder, deadline)
