"""Compiles JAX programs for an H200 without a GPU, and keeps what XLA planned: their HLO and lists of thunks.

    python make.py OUT [PROGRAM ...]

Needs ``jax[cuda13]`` (1.4 GB of wheels; made with jax 0.11.2), no GPU and no driver: the CUDA plugin compiles for a
description of the device, ``h200.txtpb``. For each program OUT gets

``PROGRAM.hlo.pb.xz``    the optimized HLO
``PROGRAM.thunks.xz``    the sequence of thunks after the passes that make command buffers, as XLA prints it (for
                         several devices XLA prints the one before them alone)
``PROGRAM.metadata.xz``  which HLO op each thunk is of, as XLA prints it

Run it at a path that may be seen by others: the HLO names the files and lines of the programs.
"""

from __future__ import annotations

import lzma
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve()
KEPT = {
    "hlo.pb": "*gpu_after_optimizations.hlo.pb",
    "thunks": "*thunk_sequence*.txt",  # of two, the one after the passes, which sorts last
    "metadata": "*thunk_metadata.txt",
}


def programs() -> dict[str, object]:  # noqa: C901, PLR0915 - programs, one after the other
    """The programs by their names; each takes a matrix and a number."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def some(x, count=3):
        for _ in range(count):
            x = jnp.sin(x) @ jnp.ones((x.shape[-1], x.shape[-1]), x.dtype) * 0.1
        return x

    def straight(x, p):
        return some(jnp.tanh(some(x))).sum() + jnp.cumsum(x).max() + p

    def cond(x, p):
        y = lax.cond(p > 0, lambda y: jnp.cumsum(jnp.tanh(y), 0), lambda y: y * 2, some(x))
        return some(y).sum()

    def switch(x, p):
        def branch(k):
            return lambda y: jnp.sort(y * k, 0) if k % 3 == 0 else jnp.tanh(y) * k

        return some(lax.switch(p, [branch(k) for k in range(10)], some(x))).sum()

    def nested_cond(x, p):
        def outer(y):
            inner = lax.cond(p > 5, lambda z: jnp.cumsum(jnp.sin(z), 0), lambda z: z @ z, y)
            return jnp.tanh(inner) + y

        return some(lax.cond(p > 0, outer, lambda y: jnp.cos(y) * 2, some(x))).sum()

    def empty_branch(x, p):
        y = lax.cond(p > 0, lambda y: jnp.cumsum(jnp.tanh(y), 0), lambda y: y, some(x))
        return some(y).sum()

    def multi_steps(x, p):
        """The shape of optax.MultiSteps: gradients are added up, and applied every fourth time."""
        weights = jnp.ones((64, 64)) * p
        gradient = jax.grad(lambda w: (jnp.tanh(x @ w) @ w).sum())(weights)

        def applied(added):
            step = added / (1 + jnp.sqrt((added * added).sum()))
            return weights - 0.1 * step, jnp.zeros_like(added)

        return lax.cond(p % 4 == 3, applied, lambda a: (weights, a), gradient + weights)

    def scan_carry(x, p):
        def step(c, _):
            y = jnp.tanh(c @ c) @ c
            return ((jax.nn.softmax(y, -1) @ c) * 0.1 + jnp.tanh(y)).T, None

        return lax.scan(step, x, None, length=100)[0].sum() + p

    def scan_xs(x, p):
        def step(c, t):
            y = jnp.tanh(c @ c) @ t
            return ((jax.nn.softmax(y, -1) @ c) * 0.1 + jnp.tanh(y)).T, None

        return lax.scan(step, x, jnp.ones((100, 64, 64)) * p)[0].sum()

    def scan_ys(x, p):
        def step(c, _):
            z = jax.nn.softmax(jnp.tanh(c @ c) @ c, -1)
            ordered = jnp.sort(z, 1)
            return (ordered @ c * 0.1).T, (z.sum(0), ordered)

        carried, ys = lax.scan(step, x, None, length=100)
        return carried.sum() + ys[0].sum() + ys[1].sum() + p

    def scan_cond(x, p):
        def step(c, t):
            y = jnp.tanh(c @ c) @ c
            y = lax.cond(t > p, lambda y: jax.nn.softmax(y @ y, -1), lambda y: jnp.cos(y) + 1, y)
            return (y @ c * 0.1).T, y.sum(0)

        carried, ys = lax.scan(step, x, jnp.arange(100))
        return carried.sum() + ys.sum()

    def sort(x, p):
        y = some(x)
        z = jnp.sort(y, 0)
        return some(z).sum() + jnp.argsort(z[:, ::-1], 1).sum() + lax.top_k(y, 5)[0].sum() + p

    def permutation(x, p):
        key = jax.random.key(p)
        noisy = some(x + jax.random.normal(key, x.shape))
        return noisy.sum() + jax.random.permutation(key, x).sum()

    def copies(x, p):
        """Results that are arguments: XLA copies them, and runs nothing else."""
        return x, p, x, p, x

    def collectives_in_loop(x, p):
        """A loop whose body ends in an all-reduce of two devices: collectives divide command buffers."""

        def body(x, p):
            def step(c, _):
                y = jnp.tanh(c @ c) @ c
                y = lax.psum(y, "d")
                return (jax.nn.softmax(y, -1) @ c * 0.1 + jnp.tanh(y)).T, None

            return lax.scan(step, x, None, length=20)[0] + p

        mesh = jax.sharding.Mesh(devices(2), ("d",))
        spec = jax.sharding.PartitionSpec
        mapped = jax.shard_map(body, mesh=mesh, in_specs=(spec("d"), spec()), out_specs=spec("d"), check_vma=False)
        return mapped(x, p)

    return {name: f for name, f in locals().items() if callable(f) and name not in ("some", "branch")}


@cache
def devices(count: int):
    """Described GPUs."""
    from jax.experimental import topologies

    described = (HERE.parent / "h200.txtpb").read_text()
    topology = topologies.get_topology_desc(f"h200x{count}", "cuda", target_config=described, topology=f"1x1x{count}")
    return topology.devices


def compile_one(name: str) -> None:
    """Compiles one program; XLA dumps it where XLA_FLAGS say."""
    import jax
    import jax.numpy as jnp

    function = programs()[name]
    function.__name__ = f"prog_{name}"
    if name == "collectives_in_loop":
        mesh = jax.sharding.Mesh(devices(2), ("d",))
        spec = jax.sharding.PartitionSpec
        shardings = [jax.sharding.NamedSharding(mesh, s) for s in (spec("d"), spec())]
        shape = (128, 64)
    else:
        shardings = 2 * [jax.sharding.SingleDeviceSharding(devices(1)[0])]
        shape = (64, 64)
    arguments = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=shardings[0]),
        jax.ShapeDtypeStruct((), jnp.int32, sharding=shardings[1]),
    )
    jax.jit(function).lower(*arguments).compile()


def main(out: Path, names: list[str]) -> None:
    """Each program in a process of its own."""
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        with tempfile.TemporaryDirectory() as dump:
            flags = (
                f"--xla_dump_to={dump} --xla_dump_hlo_module_re=.*prog.* --xla_gpu_autotune_level=0 "
                "--xla_dump_hlo_as_proto --xla_dump_hlo_as_text"
            )
            env = {**os.environ, "XLA_FLAGS": flags, "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "JAX_PLATFORMS": "cpu"}
            done = subprocess.run(
                [sys.executable, str(HERE), "--one", name],
                env=env, capture_output=True, text=True, check=False,
            )  # fmt: skip
            kept = []
            for ending, pattern in KEPT.items():
                found = sorted(Path(dump).glob(pattern))
                if found:
                    packed = lzma.compress(found[-1].read_bytes(), preset=9)
                    (out / f"{name}.{ending}.xz").write_bytes(packed)
                    kept.append(len(packed))
            print(  # noqa: T201 - a script
                name, "exit", done.returncode, kept, done.stderr[-600:] if done.returncode else ""
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        compile_one(sys.argv[2])
    else:
        wanted = sys.argv[2:] or [
            *("straight", "cond", "switch", "nested_cond", "empty_branch", "multi_steps", "scan_carry", "scan_xs"),
            *("scan_ys", "scan_cond", "sort", "permutation", "copies", "collectives_in_loop"),
        ]
        main(Path(sys.argv[1]), wanted)
