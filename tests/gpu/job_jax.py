"""A training step of JAX under shard_map, recorded by jobs.py: one process with all devices, or one for each.

    python tests/gpu/job_jax.py 1 --devices 2 --out FOLDER --name jax_one
    python tests/gpu/job_jax.py 2 --devices 2 --out FOLDER --name jax_many

Weights are sharded and gathered layer by layer, as under FSDP; activations are exchanged and shifted once. Each
process writes FOLDER/NAME.rankR.json: time of a step, and how many collectives of each kind one execution of the
compiled program has on a device. With ``--device cpu`` it runs small, on as many devices of the host.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from job_turns import Turns
from support import documented_parser

STEPS, SETTLING, LAYERS = 15, 5, 4
COLLECTIVES = re.compile(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
"""An instruction in the text of a compiled program; an asynchronous one counts where it starts."""


def worker(name: str, processes: int, devices: int, out: Path, *, small: bool) -> None:
    """One process."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    index = int(os.environ.get("JOB_PROCESS", "0"))
    if processes > 1:
        local = None if small else [index]
        jax.distributed.initialize(os.environ["JOB_ADDRESS"], processes, index, local)
    found = jax.devices()
    turns = Turns.mine()
    turns.take(index)
    if len(found) != devices:
        sys.exit(f"{len(found)} devices instead of {devices}")
    mesh = Mesh(found, ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    hidden = 64 if small else 2048
    tokens = 32 * devices if small else 4096 * devices
    make = jax.jit(lambda: arrays(hidden, tokens), out_shardings=([split] * LAYERS, split))
    weights, batch = make()
    step = jax.jit(train_step(mesh, devices)).lower(weights, batch).compile()
    kinds = Counter(COLLECTIVES.findall(step.as_text()))
    begin = 0.0
    loss: Any = None
    for number in range(STEPS):
        if number == SETTLING:
            jax.block_until_ready(weights)
            begin = time.perf_counter()
        weights, loss = step(weights, batch)
    jax.block_until_ready(weights)
    took = (time.perf_counter() - begin) / (STEPS - SETTLING) * 1e3
    facts = {
        "program": name,
        "rank": index,
        "ranks": processes,
        "devices": devices,
        "steps": STEPS,
        "step_ms": round(took, 4),
        "loss": float(loss),
        "collectives_per_step": dict(kinds),
    }
    (out / f"{name}.rank{index}.json").write_text(json.dumps(facts))
    print(json.dumps(facts), flush=True)
    turns.leave(index)


def arrays(hidden: int, tokens: int) -> Any:
    """Weights, and what goes in."""
    import jax.numpy as jnp

    return [jnp.full((hidden, hidden), 1e-3 * i) for i in range(1, LAYERS + 1)], jnp.ones((tokens, hidden))


def train_step(mesh: Any, devices: int) -> Any:
    """A step of gradient descent over all devices of the mesh."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    ring = [(device, (device + 1) % devices) for device in range(devices)]

    def loss(weights, batch):
        x = batch
        for number, shard in enumerate(weights):
            with jax.named_scope(f"layer{number}"):
                x = jnp.tanh(x @ jax.lax.all_gather(shard, "data", tiled=True))
            if number == 0:
                x = jax.lax.ppermute(x, "data", ring)
            if number == 1:
                x = jax.lax.all_to_all(x, "data", 0, 0, tiled=True)
        return (x * x).mean()

    def step(weights, batch):
        value, gradients = jax.value_and_grad(loss)(weights, batch)
        new = [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]
        return new, jax.lax.pmean(value, "data")

    data = PartitionSpec("data")
    options = {"in_specs": ([data] * LAYERS, data), "out_specs": ([data] * LAYERS, PartitionSpec())}
    return jax.shard_map(step, mesh=mesh, check_vma=False, **options)


def launched(arguments: list[str], processes: int) -> int:
    """Start the processes of a job, as a launcher would; the first bad exit code."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    running = [
        subprocess.Popen(
            [sys.executable, __file__, *arguments, "--worker"],
            env={**os.environ, "JOB_PROCESS": str(index), "JOB_ADDRESS": address},
        )
        for index in range(processes)
    ]
    return next((code for code in [one.wait() for one in running] if code), 0)


def main() -> int:
    """A process with all devices, or as many processes."""
    parser = documented_parser(__doc__)
    parser.add_argument("processes", type=int)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--worker", action="store_true")
    given = parser.parse_args()
    small = given.device == "cpu"
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if small:
        os.environ["JAX_PLATFORMS"] = "cpu"
        count = given.devices // given.processes
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count}"
    if given.processes > 1 and not given.worker:
        return launched(sys.argv[1:], given.processes)
    worker(given.name, given.processes, given.devices, given.out, small=small)
    return 0


if __name__ == "__main__":
    sys.exit(main())
