"""A recording of JAX programs with command buffers on: is every kernel's HLO op known, and is it right?

    python tests/gpu/record_jax.py [DIR]

A training step and a chain of products of different shapes (all by cuBLAS) run in processes of their own.
What the recording says of each kernel is compared with two others that do not know of graph nodes:

- XLA's list of thunks of the same process (a dump, without a compilation cache): the i-th kernel of an
  execution to start must be the i-th thunk that launches one, since all run on one stream;
- jax.profiler with command buffers off, which names the HLO op of every kernel. A compilation cache makes
  XLA choose the same kernels, so every HLO op must have run the same ones, by name, grid and block,
  equally often. (With command buffers on, a profile that begins after the first executions names only
  ``command_buffer_1``.)

The training step is also recorded from within the program: from before JAX is imported, where everything
must be known as well, and after the warm-up, when it is too late for XLA's ranges, which must be said.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path

from support import documented_parser, end, judge

STEPS = 20
PROGRAMS = {"train": "train_step", "products": "chain"}
"""The programs, and the function in each that is compared."""
PRODUCTS = "--xla_gpu_enable_triton_gemm=false"


# The programs that are recorded.


def train() -> tuple[object, object]:
    """A training step of a small transformer, and its arguments."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    width, heads, layers, length, words, batch = 512, 8, 4, 256, 8192, 8

    def norm(x):
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

    def attention(p, x):
        q, k, v = jnp.moveaxis((x @ p["qkv"]).reshape(*x.shape[:2], 3, heads, width // heads), 2, 0)
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(width // heads)
        s = jnp.where(jnp.tril(jnp.ones((length, length), bool)), s, -1e9)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s), v).reshape(x.shape) @ p["out"]

    def loss(params, tokens):
        x = params["emb"][tokens[:, :-1]]
        for i, p in enumerate(params["blocks"]):
            with jax.named_scope(f"block{i}"):
                with jax.named_scope("attention"):
                    x = x + attention(p, norm(x))
                with jax.named_scope("mlp"):
                    x = x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]
        logits = jax.nn.log_softmax((norm(x) @ params["head"]).astype(jnp.float32))
        return -jnp.take_along_axis(logits, tokens[:, 1:, None], -1).mean()

    @jax.jit
    def train_step(params, tokens):
        value, gradient = jax.value_and_grad(loss)(params, tokens)
        new = jax.tree.map(lambda p, g: p - 0.01 * g.astype(p.dtype), params, gradient)
        return new, tokens, value

    random = np.random.default_rng(0)

    def weights(*shape):
        return jnp.asarray(random.standard_normal(shape) / np.sqrt(shape[0]), jnp.bfloat16)

    params = {
        "emb": weights(words, width),
        "head": weights(width, words),
        "blocks": [
            {
                "qkv": weights(width, 3 * width),
                "out": weights(width, width),
                "up": weights(width, 4 * width),
                "down": weights(4 * width, width),
            }
            for _ in range(layers)
        ],
    }
    tokens = jnp.asarray(random.integers(0, words, (batch, length + 1)))
    return train_step, (params, tokens)


def products() -> tuple[object, object]:
    """Products of different shapes one after the other, with a little work between them."""
    import jax
    import jax.numpy as jnp

    sizes = (256, 1024, 512, 2048, 128, 4096, 768, 384, 3072, 640, 256)

    @jax.jit
    def chain(x, weights):
        for i, w in enumerate(weights):
            with jax.named_scope(f"product{i}"):
                x = jnp.tanh(x @ w)
        return x, weights

    x = jnp.ones((512, sizes[0]), jnp.bfloat16)
    weights = [jnp.ones(s, jnp.bfloat16) for s in pairwise(sizes)]
    return chain, (x, weights)


def program(name: str, steps: int, way: str, out: str) -> None:
    """Run one of the programs, some ways recording itself; print the time of a step."""
    import thence

    with thence.record(out) if way == "in-code" else nullcontext():
        import jax

        function, arguments = {"train": train, "products": products}[name]()
        for _ in range(3):
            arguments = function(*arguments)[:2]
        jax.block_until_ready(arguments)
        around: AbstractContextManager[object] = nullcontext()
        if way == "profiled":
            around = jax.profiler.trace(out)
        elif way == "in-code-late":
            around = thence.record(out)
        with around:
            began = time.perf_counter()
            for _ in range(steps):
                arguments = function(*arguments)[:2]
            jax.block_until_ready(arguments)
            seconds = time.perf_counter() - began
    print(f"{seconds / steps * 1e6:.1f}")


# The comparison.


def child(directory: Path, name: str, way: str, steps: int = STEPS) -> float:
    """Run a program in a process of its own, plain, recorded or profiled: us per step."""
    here = str(Path(__file__).resolve())
    out = directory / f"{way}-{name}"
    command = [sys.executable, here, "--program", name, str(steps), way, str(out)]
    shutil.rmtree(out, ignore_errors=True)
    if way.startswith("recorded"):
        command = [sys.executable, "-m", "thence", "record", "-o", str(out), "--", *command]
    flags = [os.environ.get("XLA_FLAGS", ""), PRODUCTS if name == "products" else ""]
    if way == "recorded-dumped":
        flags.append(f"--xla_dump_to={directory}/dump --xla_dump_hlo_as_proto")
    if way == "profiled":
        flags.append("--xla_gpu_enable_command_buffer=")
    env = {**os.environ, "XLA_FLAGS": " ".join(filter(None, flags)), "XLA_PYTHON_CLIENT_MEM_FRACTION": ".3"}
    if way != "recorded-dumped":
        env |= {
            "JAX_COMPILATION_CACHE_DIR": str(directory / f"cache-{name}"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=150, check=False)
    said = [line for line in done.stderr.splitlines() if "thence" in line]
    print(f"{way} {name}: exit {done.returncode}, {done.stdout.strip()} us per step", *said[-3:])
    if done.returncode:
        print(done.stderr[-1500:])
    found = re.search(r"[\d.]+", done.stdout)
    return float(found[0]) if found else float("nan")


def ran(path: str, name: str) -> tuple[pl.DataFrame, int]:
    """Kernels of a program with the HLO op and source line of each, and how often the program ran."""
    trace = thence.open(path)
    programs = trace.tables.programs.with_row_index("number").filter(pl.col("name").cast(pl.String) == f"jit_{name}")
    kernels = trace.activities.with_columns(trace.tables.gpu["program"].alias("row")).filter(
        pl.col("row").is_in(programs["number"].cast(pl.Int32).implode())
    )
    return kernels.with_columns(pl.col("name", "kind", "hlo", "source").cast(pl.String)), len(programs)


def coverage(path: Path, name: str) -> None:
    """How much of the program's time has an HLO op and a source line, and what else was recorded."""
    activities, executions = ran(str(path), name)
    total = activities["duration"].sum()
    in_graph = activities.filter(pl.col("graph").is_not_null())["duration"].sum()
    known = {
        kind: activities.filter(pl.col(kind).is_not_null())["duration"].sum() / total for kind in ("hlo", "source")
    }
    judge(
        known["hlo"] == 1,
        f"{path.name}: {executions} executions, {total / executions / 1e3:.1f} us each, "
        f"{in_graph / total:.2%} of it in CUDA graphs; HLO op {known['hlo']:.4%}, source {known['source']:.4%}",
    )
    lacking = activities.filter(pl.col("source").is_null())
    for rows in lacking.group_by("source_rule").agg(pl.col("duration").sum()).rows():
        print("   no source line:", rows[0], f"{rows[1] / total:.4%}")
    print("   rules:", dict(activities.group_by("hlo_rule").len().rows()))
    print("   warnings:", thence.open(str(path)).meta.warnings)


def by_op(activities: pl.DataFrame, executions: int) -> dict[str, Counter]:
    """HLO op to its kernels (name, grid, block) and how often each ran in one execution.

    What XLA copies with a kernel of the driver when it runs op by op is a copy node in a graph.
    """
    found: dict[str, Counter] = {}
    keys = ["hlo", "kind", "name", "grid", "block"]
    for hlo, kind, kernel, grid, block, runs in activities.group_by(keys).len().iter_rows():
        copied = kind == "memcpy" or kernel.startswith("memcpy")
        key = (kernel, tuple(grid or ()), tuple(block or ()))
        key = ("copy",) if copied else ("memset",) if kind == "memset" else key
        found.setdefault(hlo, Counter())[key] += runs / executions
    return found


def thunk_order(recorded: Path, dump: Path, name: str) -> None:
    """Whether the i-th kernel of each execution to start has the instruction of thunk i."""
    files = sorted(dump.glob(f"module_*.jit_{name}.thunk_metadata.pb"))
    if len(files) != 1:
        judge(False, f"{len(files)} lists of thunks in {dump}: nothing to compare with")
        print("   ", sorted(path.name for path in dump.glob("*"))[:40])
        return
    thunks = [first(thunk) for thunk in every(files[0].read_bytes(), 1)]
    told = [(first(thunk[1]), thunk[2]) for thunk in thunks]
    numbered = [(info[3], info[1].decode()) for info, kind in told if 3 in info and kind != b"kCopy"]
    wanted = [name for _, name in sorted(numbered)]
    kernels = ran(str(recorded), name)[0].filter(pl.col("kind") == "kernel").sort("start")
    same = total = 0
    for found in kernels.group_by("correlation").agg("hlo")["hlo"].to_list():
        same += sum(one == other for one, other in zip(found, wanted, strict=False))
        total += max(len(found), len(wanted))
    judge(same == total > 0, f"the i-th kernel to start has the instruction of thunk i: {same:,} of {total:,}")


def agreement(recorded: Path, profiled: Path, name: str) -> None:
    """Every HLO op ran the same kernels in both, equally often."""
    (xplane,) = profiled.glob("**/*.xplane.pb")
    ours, theirs = ran(str(recorded), name), ran(str(xplane), name)
    one, other = by_op(*ours), by_op(*theirs)
    same = [hlo for hlo in other if one.get(hlo) == other[hlo]]
    calls = [k for hlo in same for k in one[hlo] if re.search("nvjet|cublas|memset", k[0])]
    judge(
        len(same) == len(other) == len(one),
        f"{recorded.name}: {len(other)} HLO ops under jax.profiler, {len(one)} in the recording; kernels, grids, "
        f"blocks and counts equal for {len(same)}, among them {len(calls)} library kernels ({len(set(calls))} "
        "different ones)",
    )
    for hlo in (one.keys() | other.keys()) - set(same):
        print("   differs:", hlo, one.get(hlo), other.get(hlo))
    totals = [
        part.filter(pl.col("hlo").is_in(same)).group_by("hlo").agg(pl.col("duration").sum() / n)
        for part, n in (ours, theirs)
    ]
    both = totals[0].join(totals[1], on="hlo")
    large = both.filter(pl.col("duration_right") > 5_000).select(ratio=pl.col("duration") / pl.col("duration_right"))[
        "ratio"
    ]
    print(
        "   time of all ops, recorded / profiled: "
        f"{both['duration'].sum() / both['duration_right'].sum():.4f}; of each of {len(large)} ops over 5 us: "
        f"{large.min()} to {large.max()}, median {large.median()}"
    )


def overhead(directory: Path, repetitions: int = 2) -> None:
    """Time of a step plain and recorded, interleaved."""
    times: dict[str, list[float]] = {}
    for _ in range(repetitions):
        for way in ("plain", "recorded-again"):
            times.setdefault(way, []).append(child(directory, "train", way, 300))
    for way, found in times.items():
        print(f"   {way}: median {statistics.median(found):.1f} us per step of {found}")


def shown(*arguments: str) -> None:
    """The head of what a verb prints."""
    done = subprocess.run([sys.executable, "-m", "thence", *arguments], capture_output=True, text=True, check=False)
    print(f"--- thence {' '.join(arguments)}: exit {done.returncode}")
    print(*(done.stdout + done.stderr).splitlines()[:14], sep="\n")


def main() -> None:
    """Everything."""
    directory = GIVEN.directory or Path(tempfile.mkdtemp(prefix="thence-jax-"))
    directory.mkdir(parents=True, exist_ok=True)
    for name in PROGRAMS:
        for way in ("recorded-dumped", "recorded", "profiled", "recorded-cached"):
            child(directory, name, way)
    for way in ("in-code", "in-code-late"):
        child(directory, "train", way)
    overhead(directory)
    for verb in (
        ("programs",),
        ("compile",),
        ("report", "--by", "source"),
        ("flame", "-o", str(directory / "flame.html")),
    ):
        shown(verb[0], str(directory / "recorded-train"), *verb[1:])
    for name, function in PROGRAMS.items():
        print(f"=== {name}")
        for way in ("recorded-dumped", "recorded", "recorded-cached"):
            coverage(directory / f"{way}-{name}", function)
        thunk_order(directory / f"recorded-dumped-{name}", directory / "dump", function)
        for way in ("recorded", "recorded-cached"):
            agreement(directory / f"{way}-{name}", directory / f"profiled-{name}", function)
    print("=== recorded from within the program: from before JAX was imported, and after the warm-up")
    coverage(directory / "in-code-train", PROGRAMS["train"])
    late = thence.open(str(directory / "in-code-late-train"))
    print("late:", late.activities.height, "activities;", late.tables.programs.height, "programs;", late.meta.warnings)
    judge(bool(late.meta.warnings), "what is not known of a recording that began after the warm-up is said")
    end()


if __name__ == "__main__":
    OPTIONS = documented_parser(__doc__)
    OPTIONS.add_argument("directory", type=Path, nargs="?", metavar="DIR", help="for the recordings")
    OPTIONS.add_argument("--program", nargs="+", metavar="PART", help="only run: name, number of steps, folders")
    GIVEN = OPTIONS.parse_args()
    if GIVEN.program:
        program(GIVEN.program[0], int(GIVEN.program[1]), *GIVEN.program[2:4])
    else:
        sys.path.append(str(Path(__file__).parents[1] / "support"))
        import polars as pl

        import thence
        from protowire import every, first

        main()
