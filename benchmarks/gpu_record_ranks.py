"""Two ranks recorded by one command: every rank has its part, its collectives and its labels.

    python benchmarks/gpu_record_ranks.py [--ranks 2]

Starts ``thence record -- torchrun ... this file --worker`` and checks what came of it: two ranks, as many
kernels of NCCL as collectives were called, each under its label, and the forward and backward pass of
DistributedDataParallel on both.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import polars as pl

import thence

STEPS, REDUCTIONS = 20, 15


def worker() -> None:
    """One rank: training steps, and reductions under a mark."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).cuda()
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(256, 1024, device="cuda")
    total = torch.ones(1 << 20, device="cuda")
    for _ in range(STEPS):
        with thence.mark("forward"):
            loss = model(data).square().mean()
        with thence.mark("backward"):
            loss.backward()
        with thence.mark("update"):
            optimizer.step()
            optimizer.zero_grad()
    for _ in range(REDUCTIONS):
        with thence.mark("reduce"):
            dist.all_reduce(total)
    torch.cuda.synchronize()
    dist.destroy_process_group()
    sys.exit(0)


def main() -> None:
    """Record the workers, and look at the recording."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--worker", action="store_true")
    options = arguments.parse_args()
    if options.worker:
        worker()
    directory = Path(tempfile.mkdtemp(prefix="thence-ranks-"), "recording")
    command = [
        *(sys.executable, "-m", "thence", "record", "-o", str(directory), "--"),
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={options.ranks}", __file__, "--worker"),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=180)
    print("exit code", done.returncode)
    print(done.stderr[-2000:])
    trace = thence.open(directory)
    rows = trace.activities.with_columns(pl.col("name", "label", "phase").cast(pl.String))
    print("folders", sorted(path.name for path in directory.iterdir()))
    print("warnings", trace.meta.warnings)
    print(rows.group_by("rank", "kind").len().sort("rank", "kind"))
    nccl = rows.filter(pl.col("name").str.contains("nccl"))
    print(nccl.group_by("rank", "label", "phase").len().sort("rank", "label"))
    reduced = nccl.filter(pl.col("label") == "reduce").group_by("rank").len().sort("rank").rows()
    expected = [(rank, REDUCTIONS) for rank in range(options.ranks)]
    print("reductions", "right" if reduced == expected else "WRONG", reduced)
    gemms = rows.filter(pl.col("name").str.contains("(?i)gemm|nvjet|cutlass"))
    print(gemms.group_by("rank", "label", "phase").len().sort("rank", "label", "phase"))
    print(trace.summary("label").rows.select("name", "count", "total_ns", "share"))


if __name__ == "__main__":
    main()
