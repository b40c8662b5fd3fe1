"""What-if predictions against counterfactual runs: the changed program is run, too.

Programs and changes are in whatif_programs.py, fixed before any run: steps limited by the device (gpu), by both
(mixed), by the host (host, and with one long pause: pauses, rests), with host and streams that overlap (overlap), by
the host as soon as attention is free (freed), and a training step of a small GPT-2 of Hugging Face's transformers
(model); on two GPUs a late rank (late, uneven), exposed communication, and that model under FSDP2.
Recording and checking are apart, because the recording machine needs torch and transformers alone::

    python benchmarks/gpu_whatif.py record FOLDER [--seconds 240]       # on one GPU
    python benchmarks/gpu_whatif.py record-two FOLDER [--seconds 90]    # on two; starts torchrun itself
    python benchmarks/gpu_whatif.py check FOLDER                        # anywhere, with thence

How a step is measured: in rounds, each a profile of its own, which every variant of a program takes part in, the
unchanged one twice (as base and as null control); the order is rotated from round to round. A variant runs a block of
4 or 8 steps between two synchronizations, on two ranks after a barrier. Before the blocks of a round come matrix
products until the clocks are up, and a block that does not count. The collector of garbage is off but between rounds.
What a change gains is its share of the unchanged block of the same round.

Every round begins with two traces: of the unchanged program, from which that round is predicted, and of one of the
changed ones, in turns. A trace that is older tells of a host that was faster or slower: within a process the same work
of a host takes 0.6 to 1.5 times as long from second to second. ``check`` says what it finds (whatif_checks.py).
"""

from __future__ import annotations

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

from command_line import documented_parser
from whatif_checks import check
from whatif_programs import ONE, TWO, Model, Planned, Program, changed

if TYPE_CHECKING:
    from collections.abc import Iterator

    Blocks = list[list[float]]

SECONDS = {"record": 240.0, "record-two": 90.0}
LEAST_ROUNDS, MOST_ROUNDS = 6, 30
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


if __name__ == "__main__":
    parser = documented_parser(__doc__)
    parser.add_argument("what", choices=("record", "record-two", "check"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, help="how long to record, about")
    parser.add_argument("--only", nargs="+", help="programs, all else")
    given = parser.parse_args()
    if given.what == "check":
        sys.exit(check(given.folder))
    deadline = time.monotonic() + (given.seconds or SECONDS[given.what])
    known = ONE if given.what == "record" else TWO
    chosen = {name: known[name] for name in given.only or known}
    (record if given.what == "record" else record_two)(given.folder, chosen, deadline)
