"""Jobs of several ranks whose waits are known, because this program delays a rank by a known time.

    python tests/gpu/waits.py record DIR [JOB...]   on a machine with 4 GPUs: runs every job below, or those named
    python tests/gpu/waits.py check DIR [JOB...]    anywhere: what thence says against the raw events of each job

Every job writes one torch.profiler trace per rank. Delays are made on the GPU by a kernel that waits for
a number of clock cycles, so that the kernel's own duration in the trace is the delay. ``check`` prints waits,
transfers and late ranks, by hand and by thence, and exits with 1 where they differ by more than 1 us.

    late        all-reduces of two message sizes; one rank is delayed before some of them, and the profiler
                of another rank begins one all-reduce later
    pipeline    four stages that pass activations on by send and receive; one stage computes for longer
    schedule    the 1F1B schedule of torch.distributed.pipelining, forward and backward
    broadcast   the root broadcasts early, the other ranks are delayed
    group       a process group that is used for the first time while the profiler runs
    overlap     collectives of two groups at the same time, partly under a matrix multiplication
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support import documented_parser

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS = 4
CYCLES_PER_MS = 1_700_000
"""About one ms on an H100 or H200; the trace holds the exact duration."""
LATE_RANK, LATE_PROFILER, LATE_STEPS = 2, 3, (3, 5, 8)
SLOW_STAGE = 2


def delay(milliseconds: float) -> None:
    """Keeps the GPU's current stream busy."""
    import torch

    torch.cuda._sleep(int(milliseconds * CYCLES_PER_MS))


def late(rank: int, profiler: Any) -> None:
    """Rank 2 is 3 ms late at some steps; the profiler of rank 3 starts after the first all-reduce."""
    import torch
    import torch.distributed as dist

    small, large = torch.ones(4_194_304, device="cuda"), torch.ones(7_340_032, device="cuda")
    for tensor in (small, large) * 3:
        dist.all_reduce(tensor)
    settle()
    if rank != LATE_PROFILER:
        profiler.start()
    settle()
    for step in range(10):
        if step in LATE_STEPS and rank == LATE_RANK:
            delay(3)
        dist.all_reduce(small if step % 2 == 0 else large)
        if step == 0:
            settle()
            if rank == LATE_PROFILER:
                profiler.start()
            settle()
    settle()


def pipeline(rank: int, profiler: Any) -> None:
    """Four stages, four microbatches a step; stage 2 takes four times as long as the others."""
    import torch
    import torch.distributed as dist

    received, weight = (torch.ones(2048, 2048, device="cuda") for _ in range(2))

    def step() -> None:
        for _ in range(4):
            if rank > 0:
                dist.recv(received, rank - 1)
            for _ in range(4 if rank == SLOW_STAGE else 1):
                result = received @ weight
                delay(0.5)
            if rank < RANKS - 1:
                dist.send(result, rank + 1)

    step()
    settle()
    profiler.start()
    settle()
    for _ in range(3):
        step()
    settle()


def schedule(rank: int, profiler: Any) -> None:
    """Training steps of torch.distributed.pipelining: 1F1B, eight microbatches."""
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    layers = [torch.nn.Linear(1024, 1024) for _ in range(4 if rank == SLOW_STAGE else 2)]
    stage = PipelineStage(torch.nn.Sequential(*layers).cuda(), rank, RANKS, torch.device("cuda", rank))
    loss = torch.nn.functional.mse_loss if rank == RANKS - 1 else None
    runner = Schedule1F1B(stage, 8, loss_fn=loss or torch.nn.functional.mse_loss)
    data = torch.randn(2048, 1024, device="cuda")

    def step() -> None:
        if rank == 0:
            runner.step(data)
        elif rank == RANKS - 1:
            runner.step(target=data)
        else:
            runner.step()

    for _ in range(2):
        step()
    settle()
    profiler.start()
    settle()
    for _ in range(2):
        step()
        profiler.step()
    settle()


def broadcast(rank: int, profiler: Any) -> None:
    """The root's small broadcasts can end before the other ranks have begun to receive."""
    import torch
    import torch.distributed as dist

    small, large = torch.ones(256, device="cuda"), torch.ones(16_777_216, device="cuda")
    for tensor in (small, large):
        dist.broadcast(tensor, 0)
    settle()
    profiler.start()
    settle()
    for number in range(8):
        if rank:
            delay(0.5 + 0.25 * rank)
        dist.broadcast(small if number % 2 == 0 else large, 0)
        settle()


def group(rank: int, profiler: Any) -> None:
    """Pairs of ranks reduce within groups of their own, whose first call makes their communicator."""
    import torch
    import torch.distributed as dist

    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    data = torch.ones(4_194_304, device="cuda")
    dist.all_reduce(data)
    settle()
    profiler.start()
    settle()
    for _ in range(6):
        if rank in (1, 3):
            delay(1)
        dist.all_reduce(data, group=pairs[rank // 2])
    dist.all_reduce(data)
    settle()


def overlap(_rank: int, profiler: Any) -> None:
    """Two groups communicate at the same time on streams of their own, while a GEMM runs for a part."""
    import torch
    import torch.distributed as dist

    everyone = dist.new_group(list(range(RANKS)))
    one, two = (torch.ones(16_777_216, device="cuda") for _ in range(2))
    square = torch.ones(4096, 4096, device="cuda")
    dist.all_reduce(one)
    dist.all_reduce(two, group=everyone)
    settle()
    profiler.start()
    settle()
    for _ in range(4):
        works = [dist.all_reduce(one, async_op=True)]
        works.append(dist.all_reduce(two, group=everyone, async_op=True))
        square @ square
        for work in works:
            work.wait()
    settle()


JOBS: dict[str, Callable[[int, Any], None]] = {
    job.__name__: job for job in (late, pipeline, schedule, broadcast, group, overlap)
}


def settle() -> None:
    """Waits until all ranks have finished, without a collective on the GPU."""
    import torch
    import torch.distributed as dist

    torch.cuda.synchronize()
    dist.barrier(group=_HOSTS[0])


_HOSTS: list[Any] = []


def worker(name: str, folder: Path) -> None:
    """One rank of one job."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    _HOSTS.append(dist.new_group(backend="gloo"))
    dist.all_reduce(torch.ones(1, device="cuda"))
    # The first profile of a process initialises CUPTI, which takes long and differs by rank.
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]):
        torch.ones(1, device="cuda")
    profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    JOBS[name](rank, profiler)
    profiler.stop()
    profiler.export_chrome_trace(str(folder / f"{name}_rank{rank}.json.gz"))
    dist.destroy_process_group()


def record(folder: Path, names: list[str]) -> None:
    """Runs jobs under torchrun."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={RANKS}", __file__, "worker", str(folder), name]
        done = subprocess.run(command, timeout=120, check=False, capture_output=True, text=True)
        print(name, "ok" if done.returncode == 0 else done.stderr[-3000:], flush=True)


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("what", choices=("record", "worker", "check"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=", ".join(JOBS))
    given = parser.parse_args()
    if unknown := set(given.jobs) - set(JOBS):
        parser.error(f"there is no job {', '.join(sorted(unknown))}; there are {', '.join(JOBS)}")
    names = given.jobs or list(JOBS)
    if given.what == "record":
        record(given.folder, names)
    elif given.what == "worker":
        worker(names[0], given.folder)
    else:
        from waits_by_hand import check

        if not check(given.folder, names):
            sys.exit(1)


if __name__ == "__main__":
    main()
