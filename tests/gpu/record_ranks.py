"""Several ranks recorded by one command: every rank has its part, its collectives and its labels.

    python tests/gpu/record_ranks.py [--ranks 2]

Starts ``thence record -- torchrun ... this file --worker`` and checks what came of it: all ranks, as many
kernels of NCCL as collectives were called, each under its label, and the forward and backward pass of
DistributedDataParallel. The worker asks for nothing but marks; what its collectives moved, those that
DistributedDataParallel starts from C++ included, is compared with what torch.profiler writes of the same
worker, run once more without thence.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import polars as pl

import thence
from support import documented_parser, end, judge

STEPS, REDUCTIONS, OTHERS = 20, 15, 5
SECONDS = 60
"""What a torchrun may take."""
COMPARED = ("collective", "in_elements", "out_elements", "element_type", "group_size")


def worker(profiled: Path | None) -> None:
    """One rank: training steps, reductions under a mark, and other collectives."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    with profiler(profiled, rank):
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
        training(rank, profiled)
        total = torch.ones(1 << 20, device="cuda")
        for _ in range(REDUCTIONS):
            with mark("reduce", profiled):
                dist.all_reduce(total)
        others()
        torch.cuda.synchronize()
    dist.destroy_process_group()


def mark(name: str, profiled: Path | None) -> AbstractContextManager[Any]:
    """A mark of thence; none where torch.profiler is alone."""
    return nullcontext() if profiled else thence.mark(name)


def profiler(profiled: Path | None, rank: int) -> AbstractContextManager[Any]:
    """torch.profiler, if it is wanted, which writes a file for this rank."""
    if profiled is None:
        return nullcontext()
    from torch.profiler import ProfilerActivity, profile

    return profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
        on_trace_ready=lambda p: p.export_chrome_trace(str(profiled / f"rank{rank}.json")),
    )


def training(rank: int, profiled: Path | None) -> None:
    """Steps of DistributedDataParallel."""
    import torch

    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).cuda()
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(256, 1024, device="cuda")
    for _ in range(STEPS):
        with mark("forward", profiled):
            loss = model(data).square().mean()
        with mark("backward", profiled):
            loss.backward()
        with mark("update", profiled):
            optimizer.step()
            optimizer.zero_grad()


def others() -> None:
    """Collectives of other kinds, element types and groups."""
    import torch
    import torch.distributed as dist

    ranks = dist.get_world_size()
    group = dist.new_group(list(range(ranks)))
    part = torch.ones(1000, device="cuda", dtype=torch.bfloat16)
    whole = torch.ones(1000 * ranks, device="cuda", dtype=torch.bfloat16)
    numbers = torch.arange(64 * ranks, device="cuda")
    for _ in range(OTHERS):
        dist.all_gather_into_tensor(whole, part)
        dist.reduce_scatter_tensor(part, whole, group=group)
        dist.broadcast(part, 0, group=group)
        dist.all_to_all_single(torch.empty_like(numbers), numbers)
        dist.all_reduce(part, op=dist.ReduceOp.MAX, group=group)


def torchrun(ranks: int, *arguments: str, before: tuple[str, ...] = ()) -> bool:
    """Run the worker; whether it succeeded."""
    command = [
        *before,
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={ranks}", __file__, "--worker", *arguments),
    ]
    begin = time.perf_counter()
    # Its output goes to a file: workers that outlive a time limit would keep a pipe open.
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            code: int | str = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()
            code = f"none after {SECONDS} s"
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
        output.seek(0)
        told = output.read()[-3000:]
    print(f"exit code {code} after {time.perf_counter() - begin:.1f} s")
    print(told)
    return code == 0


def recorded(ranks: int, directory: Path) -> thence.Trace | None:
    """The workers as thence records them, and what is to be found there."""
    before = (sys.executable, "-m", "thence", "record", "-o", str(directory), "--")
    torchrun(ranks, before=before)
    if not directory.is_dir():
        judge(False, "there is a recording")
        return None
    trace = thence.open(directory)
    rows = trace.activities.with_columns(pl.col("name", "label", "phase").cast(pl.String))
    print("folders", sorted(path.name for path in directory.iterdir()))
    print("warnings", trace.meta.warnings)
    print(rows.group_by("rank", "kind").len().sort("rank", "kind"))
    nccl = rows.filter(pl.col("name").str.contains("nccl"))
    print(nccl.group_by("rank", "label", "phase").len().sort("rank", "label"))
    reduced = nccl.filter(pl.col("label") == "reduce").group_by("rank").len().sort("rank").rows()
    expected = [(rank, REDUCTIONS) for rank in range(ranks)]
    judge(reduced == expected, f"reductions {reduced}")
    gemms = rows.filter(pl.col("name").str.contains("(?i)gemm|nvjet|cutlass"))
    print(gemms.group_by("rank", "label", "phase").len().sort("rank", "label", "phase"))
    print(trace.report("label").rows.select("name", "count", "total_ns", "share"))
    command = [sys.executable, "-m", "thence", "collectives", str(directory)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=SECONDS)
    print(done.stdout + done.stderr)
    return trace


def moved(trace: thence.Trace, rank: int) -> Counter[tuple[Any, ...]]:
    """How often the NCCL kernels of a rank moved what, by the columns that are compared."""
    if rank not in trace.recorded.ranks:  # the profile of one rank that does not say which
        (rank,) = trace.recorded.ranks
    kernels = trace.tables.gpu.with_row_index("gpu").select(
        pl.col("gpu").cast(pl.Int32), "rank", pl.col("name").cast(pl.String)
    )
    ran = kernels.filter((pl.col("rank") == rank) & pl.col("name").str.contains("(?i)nccl"))
    name = pl.col("collective").cast(pl.String)
    even = (name == "all_to_allv") & (pl.col("in_splits") == "[]")  # torch 2.11 says so of both
    described = trace.tables.collectives.join(ran, on="gpu", how="semi").with_columns(
        collective=pl.when(even).then(pl.lit("all_to_all")).otherwise(name)
    )
    facts = Counter(described.select(*COMPARED).rows())
    facts[("NCCL kernels without facts",)] = ran.join(trace.tables.collectives, on="gpu", how="anti").height
    return +facts


def compare(trace: thence.Trace, profiles: Path, ranks: int) -> None:
    """Prints how many collectives read as in the profile, and which do not."""
    print("columns", COMPARED)
    for rank in range(ranks):
        file = profiles / f"rank{rank}.json"
        if not file.is_file():
            judge(False, f"rank {rank} has a profile to compare with")
            continue
        ours, theirs = moved(trace, rank), moved(thence.open(file), rank)
        right, all_of_them = (ours & theirs).total(), (ours | theirs).total()
        judge(right == all_of_them > 0, f"rank {rank}: {right} of {all_of_them} collectives as in the profile")
        for facts in sorted(ours.keys() | theirs.keys(), key=str):
            if ours[facts] != theirs[facts] or rank == 0:
                print(f"    {facts}: {ours[facts]} recorded, {theirs[facts]} in the profile")


def main() -> None:
    """Record the workers, profile them, and compare."""
    arguments = documented_parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--worker", action="store_true")
    arguments.add_argument("--profiled", type=Path)
    options = arguments.parse_args()
    if options.worker:
        worker(options.profiled)
        return
    scratch = Path(tempfile.mkdtemp(prefix="thence-ranks-"))
    trace = recorded(options.ranks, scratch / "recording")
    profiles = scratch / "profiles"
    profiles.mkdir()
    torchrun(options.ranks, "--profiled", str(profiles))
    if trace is not None:
        compare(trace, profiles, options.ranks)
    end()


if __name__ == "__main__":
    main()
