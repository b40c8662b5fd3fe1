"""On a GPU: what thence says of a fresh jax.profiler trace against JAX's own decoding of the same file.

Trains a small transformer, once with command buffers switched off and once as JAX does by default,
and compares with ``jax.profiler.ProfileData``: number, total and busy time of the device activities
to the nanosecond, and the time of each HLO op. Prints what share of the device time led to an HLO op,
a source line and a named scope.

    python tests/gpu/read_jax.py [FOLDER for the traces]

Each run is a process of its own, since XLA reads its flags once. Exits with 1 if anything differs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from support import documented_parser, folder_argument

FLAGS = {"no command buffers": "--xla_gpu_enable_command_buffer=", "default": ""}


def train(folder: Path) -> None:
    """Profiles five steps; runs in a process of its own."""
    import jax
    import jax.numpy as jnp

    width, heads, layers = 512, 8, 2
    keys = jax.random.split(jax.random.key(0), 4 * layers)

    def layer_parameters(i: int) -> dict[str, Any]:
        def normal(n: int, *shape: int) -> Any:
            return jax.random.normal(keys[4 * i + n], shape) / width**0.5

        return {
            "qkv": normal(0, width, 3 * width),
            "out": normal(1, width, width),
            "up": normal(2, width, 4 * width),
            "down": normal(3, 4 * width, width),
        }

    parameters = [layer_parameters(i) for i in range(layers)]

    def attention(p: dict[str, Any], x: Any) -> Any:
        q, k, v = jnp.split((x @ p["qkv"]).reshape(*x.shape[:2], heads, -1), 3, axis=-1)
        scores = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) / (width // heads) ** 0.5)
        return jnp.einsum("bhts,bshd->bthd", scores, v).reshape(x.shape) @ p["out"]

    def loss(parameters: list[dict[str, Any]], x: Any) -> Any:
        for i, p in enumerate(parameters):
            with jax.named_scope(f"block{i}"):
                with jax.named_scope("attention"):
                    x = x + attention(p, x)
                with jax.named_scope("mlp"):
                    x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
        return jnp.square(x).mean()

    @jax.jit
    def train_step(parameters: list[dict[str, Any]], x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(parameters, x)
        return value, jax.tree.map(lambda p, g: p - 1e-3 * g, parameters, gradients)

    x = jax.random.normal(jax.random.key(1), (8, 256, width))
    for _ in range(3):
        value, parameters = train_step(parameters, x)
    value.block_until_ready()
    jax.profiler.start_trace(str(folder))
    for step in range(5):
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            value, parameters = train_step(parameters, x)
    value.block_until_ready()
    jax.profiler.stop_trace()
    print("jax", jax.__version__, jax.devices()[0].device_kind)


def union(intervals: list[tuple[float, float]]) -> float:
    total, reach = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total


def decoded_by_jax(path: Path) -> tuple[list[tuple[float, float]], Counter[str]]:
    """Intervals of the device activities in ns, and ns by HLO op, as ProfileData gives them."""
    from jax.profiler import ProfileData

    intervals, by_op = [], Counter[str]()
    for plane in ProfileData.from_file(str(path)).planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                stats = dict(event.stats)
                intervals.append((event.start_ns, event.start_ns + event.duration_ns))
                by_op[str(stats.get("hlo_op"))] += event.duration_ns
    return intervals, by_op


def compare(title: str, folder: Path) -> int:
    import polars as pl

    import thence

    path = next(folder.rglob("*.xplane.pb"))
    trace = thence.open(folder)
    trace.self_check()
    summary = trace.report("hlo")
    intervals, by_op = decoded_by_jax(path)
    failures = 0

    def check(what: str, ours: float, theirs: float, tolerance: float) -> None:
        nonlocal failures
        same = abs(ours - theirs) <= tolerance
        failures += not same
        print(f"{'agree ' if same else 'DIFFER'} {title}: {what}: thence {ours:,.0f}, jax {theirs:,.0f}")

    count = len(intervals)
    check("activities", trace.tables.gpu.height, count, 0)
    # thence counts whole ns, rounding start and end of each activity down; jax keeps picoseconds.
    check("sum ns", summary.sum_ns, sum(end - start for start, end in intervals), count)
    check("busy ns", summary.busy_ns, union(intervals), count)
    ours = dict(summary.rows.filter("attributed").select("name", "total_ns").iter_rows())
    ops = {op: ns for op, ns in by_op.items() if op != "None" and not op.startswith("command_buffer")}
    check("HLO ops", len(ours), len(ops), 0)
    worst = max((abs(ours.get(op, 0) - ns) for op, ns in ops.items()), default=0)
    check("largest difference of one op, ns", worst, 0, count)
    shares = {kind: ns / summary.sum_ns for kind, ns in summary.attributed_ns.items()}
    print(f"       {title}: attributed", {kind: f"{share:.4f}" for kind, share in shares.items()})
    print(f"       {title}: streams", sorted(trace.tables.gpu["stream"].unique().to_list()))
    top = trace.report("source").rows.filter(pl.col("attributed")).head(3)
    print(f"       {title}: top lines", top.select("short_name", "total_ns", "share").rows())
    for warning in trace.meta.warnings:
        print("       warning:", warning)
    return failures


def main() -> None:
    options = documented_parser(__doc__)
    folder_argument(options, "for the traces; a temporary one without it")
    options.add_argument("--train", action="store_true", help="only train, in this process")
    given = options.parse_args()
    if given.train:
        train(given.folder)
        return
    failures = 0
    with tempfile.TemporaryDirectory() as temporary:
        root = given.folder or Path(temporary)
        for title, flags in FLAGS.items():
            folder = root / title.replace(" ", "_")
            environment = os.environ | {"XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            command = [sys.executable, __file__, "--train", str(folder)]
            subprocess.run(command, env=environment, check=True)
            failures += compare(title, folder)
    print(f"{failures} differences")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
