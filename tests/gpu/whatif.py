"""What-if predictions against counterfactual runs: the changed program is run, too.

Programs and changes are in whatif_programs.py, fixed before any run: steps limited by the device (gpu), by both
(mixed), by the host (host, and with one long pause: pauses, rests), with host and streams that overlap (overlap), by
the host as soon as attention is free (freed), and a training step of a small GPT-2 of Hugging Face's transformers
(model); on two GPUs a late rank (late, uneven), exposed communication, and that model under FSDP2.
Recording and checking are apart, because the recording machine needs torch and transformers alone::

    python tests/gpu/whatif.py record FOLDER [--seconds 240]       # on one GPU
    python tests/gpu/whatif.py record-two FOLDER [--seconds 90]    # on two; starts torchrun itself
    python tests/gpu/whatif.py record-own FOLDER [--seconds 480]   # on one, with thence: its own recordings
    python tests/gpu/whatif.py check FOLDER                        # anywhere, with thence

How a step is measured: in rounds, each a profile of its own, which every variant of a program takes part in, the
unchanged one twice (as base and as null control); the order is rotated from round to round. A variant runs a block of
4 or 8 steps between two synchronizations, on two ranks after a barrier. Before the blocks of a round come matrix
products until the clocks are up, and a block that does not count. The collector of garbage is off but between rounds.
What a change gains is its share of the unchanged block of the same round.

Every round begins with two traces: of the unchanged program, from which that round is predicted, and of one of the
changed ones, in turns. A trace that is older tells of a host that was faster or slower: within a process the same work
of a host takes 0.6 to 1.5 times as long from second to second. ``check`` says what it finds (whatif_checks.py).

record-own: the source of the predictions is what ``thence record`` writes of the unchanged program, in a process of its
own. What a change gains is measured without thence, in the same kind of rounds, by a process before all recordings and
by one after them. What thence does not know is not told: predictions are of the plain program.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support import documented_parser
from whatif_checks import check
from whatif_programs import ONE, RECORDED, TWO, Model, Planned, Program, changed

if TYPE_CHECKING:
    from collections.abc import Iterator

    Blocks = list[list[float]]

SECONDS = {"record": 240.0, "record-two": 90.0, "record-own": 480.0}
LEAST_ROUNDS, MOST_ROUNDS = 6, 30
RECORDED_STEPS, RECORDED_SECONDS = 240, 20.0
"""Steps of each recording, and about how long it takes with all that its process does."""
CLOCKS_MS = 100


@contextmanager
def profiled(program: Program) -> Iterator[Any]:
    """torch.profiler with waits for events, and with exact ids of their records where thence can be imported."""
    from torch.profiler import ProfilerActivity, profile

    settings = program.torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True)
    profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], experimental_config=settings)
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


def write_trace(program: Program, times: dict[str, float], steps: int, path: Path) -> None:
    """A trace of a block, in a profile of its own."""
    program.warm_up(CLOCKS_MS)
    with profiled(program) as profiler:
        block(program, times, steps)
        block(program, times, steps, "ProfilerStep")
    profiler.export_chrome_trace(str(path))


def agreed(program: Program, number: int) -> int:
    """The number that rank 0 says."""
    if program.world == 1:
        return number
    said = program.torch.tensor([number], device="cuda")
    program.torch.distributed.broadcast(said, 0)
    return int(said.item())


def measured(program: Program, plan: Planned, until: float, path: Path) -> Blocks:
    """Microseconds of a step, by variant (the unchanged one first, then one for each pair) and round.

    Args:
        program: what runs.
        plan: its parts and changes.
        until: monotonic time of the end, about.
        path: of the traces of this rank; each name gets the round and the variant in front.
    """
    variants = [plan.times, *(changed(plan.times, pair) for pair in plan.pairs)]
    result: Blocks = [[] for _ in variants]
    number, going = 0, 1
    while going:
        for variant in (0, 1 + number % len(plan.pairs)):
            file = path.with_name(f"{number:02}_{variant:02}_{path.name}")
            write_trace(program, variants[variant], plan.steps, file)
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
        blocks = measured(program, plan, share, folder / f"{name}{suffix}.json.gz")
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


def made(name: str) -> Program:
    """A program that is recorded by thence."""
    models = {"model": False, "ahead": True}
    return Model(nvtx=True, long=models[name]) if name in models else Program(nvtx=True)


def plain(file: Path, plans: dict[str, Planned], seconds: float) -> None:
    """Runs every variant of every program in rounds, without thence, and writes us of a step by program."""
    result: dict[str, Blocks] = {}
    gc.disable()
    for name, plan in plans.items():
        until = time.monotonic() + seconds / len(plans)
        program = made(name)
        variants = [plan.times, *(changed(plan.times, pair) for pair in plan.pairs)]
        blocks: Blocks = [[] for _ in variants]
        for _ in range(3):
            block(program, plan.times, plan.steps)
        number = 0
        while number < LEAST_ROUNDS or (time.monotonic() < until and number < MOST_ROUNDS):
            gc.collect()
            program.warm_up(CLOCKS_MS)
            block(program, plan.times, plan.steps)
            for place in range(len(variants)):
                variant = (place + number) % len(variants)
                blocks[variant].append(block(program, variants[variant], plan.steps))
            number += 1
        result[name] = blocks
        print(f"{name}: {number} rounds, us of a step: {[round(statistics.median(of)) for of in blocks]}", flush=True)
    file.write_text(json.dumps(result))


def steps(name: str, plan: Planned) -> None:
    """Runs the unchanged program for so many steps, in blocks as `plain`; a process of its own is recorded doing so."""
    gc.disable()
    program = made(name)
    program.warm_up(CLOCKS_MS)
    us = [block(program, plan.times, plan.steps) for _ in range(RECORDED_STEPS // plan.steps)]
    print(f"{name}: recorded, us of a step: {statistics.median(us[3:]):.0f}", flush=True)


def record_own(folder: Path, plans: dict[str, Planned], until: float) -> None:
    """Runs all programs without thence, then records each, then runs all without thence again."""
    folder.mkdir(parents=True, exist_ok=True)
    seconds = max((until - time.monotonic() - RECORDED_SECONDS * (len(plans) + 1)) / 2, 1.0)
    this = [sys.executable, __file__]
    measured_by: list[dict[str, Blocks]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for turn in range(2):
            file = Path(scratch, f"plain{turn}.json")
            given = ["--seconds", str(seconds), "--only", *plans]
            subprocess.run([*this, "plain", str(file), *given], check=True)
            measured_by.append(json.loads(file.read_text()))
            for name in plans if turn == 0 else ():
                recording = Path(scratch, name)
                record = [sys.executable, "-m", "thence", "record", "-o", str(recording), "--"]
                command = [*record, *this, "steps", str(folder), "--only", name]
                subprocess.run(command, check=True)
                if not recording.exists():
                    print(f"{name}: nothing was recorded", flush=True)
                    continue
                with tarfile.open(folder / f"{name}.tar.xz", "w:xz", preset=1) as packed:
                    packed.add(recording, name)
    runs = []
    for name, plan in plans.items():
        first, second = (of[name] for of in measured_by)
        blocks = [[*one, *other] for one, other in zip(first, second, strict=True)]
        runs += [
            {"program": name, "limit": plan.limit, **vars(pair), "base": [blocks[0]], "after": [after]}
            for pair, after in zip(plan.pairs, blocks[1:], strict=True)
        ]  # fmt: skip
    (folder / "runs1.json").write_text(json.dumps(runs))


def record_two(folder: Path, plans: dict[str, Planned], until: float) -> None:
    """Starts itself on two GPUs, or records as one of these two processes."""
    if "WORLD_SIZE" in os.environ:
        record(folder, plans, until)
        return
    left = str(until - time.monotonic())
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         __file__, "record-two", str(folder), "--seconds", left, "--only", *plans],
        check=True,
    )  # fmt: skip


VERBS = {"record": record, "record-two": record_two, "record-own": record_own}

if __name__ == "__main__":
    parser = documented_parser(__doc__)
    parser.add_argument("what", choices=(*VERBS, "check", "plain", "steps"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, help="how long to record, about")
    parser.add_argument("--only", nargs="+", help="programs, all else")
    given = parser.parse_args()
    if given.what == "check":
        sys.exit(check(given.folder))
    known = {"record": ONE, "record-two": TWO}.get(given.what, RECORDED)
    chosen = {name: known[name] for name in given.only or known}
    if given.what == "plain":
        plain(given.folder, chosen, given.seconds)
    elif given.what == "steps":
        for its_name, its_plan in chosen.items():
            steps(its_name, its_plan)
    else:
        deadline = time.monotonic() + (given.seconds or SECONDS[given.what])
        VERBS[given.what](given.folder, chosen, deadline)
