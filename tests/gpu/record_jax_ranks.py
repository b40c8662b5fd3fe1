"""JAX on several GPUs, recorded: one process with all of them, and one process for each.

    python tests/gpu/record_jax_ranks.py [--gpus 2]

A sharded training step (data parallel, gradients summed over all devices) runs both ways under ``thence
record``. Every kernel of the step must have its HLO op, every device as many kernels of NCCL as the
others, and the recording of several processes one rank for each.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import polars as pl

import thence
from support import documented_parser, end, judge

STEPS = 20
MIN_KNOWN = {"hlo": 1.0, "source": 0.9}
"""Least share of the step's time with a place; kernels that XLA adds have no line."""


def worker(processes: int) -> None:
    """A process: all devices, or (of several) its own."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    if processes > 1:
        index = int(os.environ["BENCHMARK_PROCESS"])
        address = os.environ["BENCHMARK_ADDRESS"]
        jax.distributed.initialize(address, processes, index, local_device_ids=[index])
    mesh = Mesh(jax.devices(), ("data",))
    replicated, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))

    @jax.jit
    def train_step(weights, batch):
        def loss(weights):
            x = batch
            for i, w in enumerate(weights):
                with jax.named_scope(f"layer{i}"):
                    x = jnp.tanh(x @ w)
            return (x * x).mean()

        gradients = jax.grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]

    make = jax.jit(lambda: [jnp.full((1024, 1024), 1e-3 * i) for i in range(1, 5)], out_shardings=replicated)
    weights = make()
    batch = jax.jit(lambda: jnp.ones((256 * len(jax.devices()), 1024)), out_shardings=split)()
    for _ in range(STEPS):
        weights = train_step(weights, batch)
    jax.block_until_ready(weights)


def launched(processes: int) -> int:
    """Start the processes of a job, as a launcher would; the first bad exit code."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    running = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", "--processes", str(processes)],
            env={**os.environ, "BENCHMARK_PROCESS": str(i), "BENCHMARK_ADDRESS": address},
        )
        for i in range(processes)
    ]
    return next((code for code in [one.wait() for one in running] if code), 0)


def shown(processes: int) -> None:
    """Record a job of so many processes, and say what came of it."""
    directory = Path(tempfile.mkdtemp(prefix="thence-jax-ranks-"), "recording")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "thence", "record", "-o", str(directory), "--"),
            *(sys.executable, __file__, "--launch", "--processes", str(processes)),
        ],
        env={**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": ".3"},
        check=False, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    judge(done.returncode == 0, f"=== {processes} process(es): exit {done.returncode}")
    print(done.stderr[-1500:])
    print("folders", len(list(directory.iterdir())))
    trace = thence.open(directory)
    print("warnings", trace.meta.warnings)
    programs = trace.tables.programs.with_row_index("row").filter(pl.col("name").cast(pl.String) == "jit_train_step")
    rows = trace.activities.with_columns(
        pl.col("name", "hlo", "source", "kind").cast(pl.String), row=trace.tables.gpu["program"]
    )
    step = rows.filter(pl.col("row").is_in(programs["row"].cast(pl.Int32).implode()))
    print(
        f"executions of the step: {len(programs)}, kernels in it {len(step)}, "
        f"in CUDA graphs {step['graph'].is_not_null().mean():.2%}"
    )
    total = step["duration"].sum()
    for what in ("hlo", "source"):
        known = step.filter(pl.col(what).is_not_null())["duration"].sum()
        judge(known >= MIN_KNOWN[what] * total, f"  time with {what}: {known / total:.4%}")
    by = ["rank", "device", "kind"]
    print(rows.group_by(by).agg(pl.len(), without_hlo=pl.col("hlo").is_null().sum()).sort(by))
    nccl = step.filter(pl.col("name").str.contains("(?i)nccl"))
    print(nccl.group_by("rank", "device", "hlo").len().sort("rank", "device", "hlo"))
    counts = nccl.group_by("rank", "device").len()["len"].to_list()
    judge(len(counts) > 1 and len(set(counts)) == 1, f"  kernels of NCCL on each device: {counts}")
    for verb in ("collectives", "programs"):
        said = subprocess.run(
            [sys.executable, "-m", "thence", verb, str(directory)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        print(f"--- thence {verb}: exit {said.returncode}")
        print(*(said.stdout + said.stderr).splitlines()[:16], sep="\n")


def main() -> None:
    """Both ways."""
    arguments = documented_parser(__doc__)
    arguments.add_argument("--gpus", type=int, default=2)
    arguments.add_argument("--processes", type=int)
    arguments.add_argument("--worker", action="store_true")
    arguments.add_argument("--launch", action="store_true")
    options = arguments.parse_args()
    if options.worker:
        worker(options.processes)
    elif options.launch and options.processes > 1:
        sys.exit(launched(options.processes))
    elif options.launch:
        worker(1)
    else:
        for processes in (1, options.gpus):
            try:
                shown(processes)
            except Exception as error:  # noqa: BLE001 - the other way still says something
                judge(False, f"{type(error).__name__} {str(error)[-1500:]}")
        end()


if __name__ == "__main__":
    main()
