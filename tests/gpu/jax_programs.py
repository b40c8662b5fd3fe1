"""JAX programs of many kinds, recorded with command buffers and without: the same kernels under the same HLO op?

    python tests/gpu/jax_programs.py record DIR [PROGRAM ...]   # on NVIDIA GPUs, with jax
    python tests/gpu/jax_programs.py check DIR [PROGRAM ...]    # anywhere: reads the recordings
    python tests/gpu/jax_programs.py try [PROGRAM ...]          # only runs them, on whatever JAX finds

`record` runs each program under ``thence record`` twice, in processes of their own with one compilation cache: as XLA
does by default, and with ``--xla_gpu_enable_command_buffer=``, where each kernel is launched by itself inside XLA's
range of its thunk, and no graph has to be taken apart. `late` begins to record itself after its graphs exist.
A program whose packages are missing, or that needs more GPUs, is skipped with the reason.

`check` compares, for each HLO op, kernels, grids, blocks and how often each ran (`jax_comparison.py`). An op that
has another kernel, or one more often, than without command buffers is wrong, and none may lack any: a recording that
was cut short does. At least 97 % of a program's time shall have an op.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from jax_comparison import ENOUGH, compare
from support import documented_parser

STEPS, WARM_UP = 20, 3
NO_BUFFERS = "--xla_gpu_enable_command_buffer="
FLAGS = {"while_in_graph": "--xla_gpu_enable_command_buffer=+WHILE"}
"""Flags that a program runs with, where it has command buffers."""
SKIPPED = 3


class Skipped(Exception):
    """Why a program cannot run here."""


# The programs: each does its own warm-up and STEPS steps.


def repeated(step: Any, state: Any, *arguments: Any, count: int = STEPS) -> Any:
    """Runs a step on its own result."""
    import jax

    for _ in range(WARM_UP + count):
        state = step(state, *arguments)
    return jax.block_until_ready(state)


def nuts() -> None:
    """NUTS of numpyro on a logistic regression: loops and branches, whose rounds depend on the data."""
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import MCMC, NUTS

    x = jax.random.normal(jax.random.key(0), (500, 8))
    y = (x.sum(1) > 0).astype(jnp.float32)

    def regression(x, y):
        weights = numpyro.sample("weights", dist.Normal(jnp.zeros(8), 1).to_event(1))
        numpyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=y)

    chain = MCMC(NUTS(regression), num_warmup=50, num_samples=50, progress_bar=False)
    chain.run(jax.random.key(1), x, y)
    jax.block_until_ready(chain.get_samples())


def ode() -> None:
    """A solve by diffrax: an adaptive solver, whose steps are rejected or accepted by a branch in a loop."""
    import diffrax
    import jax
    import jax.numpy as jnp

    matrix = jax.random.normal(jax.random.key(0), (64, 64)) * 0.1

    @jax.jit
    def solve(y):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda _t, y, _args: jnp.tanh(matrix @ y)),
            diffrax.Tsit5(), t0=0.0, t1=2.0, dt0=0.05, y0=y,
            stepsize_controller=diffrax.PIDController(rtol=1e-4, atol=1e-6),
        )  # fmt: skip
        return solution.ys[-1] * 0.1

    repeated(solve, jnp.ones((64, 32)))


def rnn() -> None:
    """A recurrent network by scan over its inputs, differentiated, with optax."""
    import jax
    import jax.numpy as jnp
    import optax

    weights = {
        name: jax.random.normal(jax.random.key(i), shape) * 0.1
        for i, (name, shape) in enumerate({"x": (32, 128), "h": (128, 128), "o": (128, 32)}.items())
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    inputs = jax.random.normal(jax.random.key(9), (50, 16, 32))

    def loss(w):
        def cell(h, x):
            h = jnp.tanh(x @ w["x"] + h @ w["h"])
            return h, h @ w["o"]

        return jnp.square(jax.lax.scan(cell, jnp.zeros((16, 128)), inputs)[1] - inputs).mean()

    @jax.jit
    def step(state):
        w, memory = state
        updates, memory = optimizer.update(jax.grad(loss)(w), memory, w)
        return optax.apply_updates(w, updates), memory

    repeated(step, (weights, optimizer.init(weights)))


def transformer() -> None:
    """A flax transformer, its blocks rematerialised and with dropout, trained with optax."""
    import flax.linen as nn
    import jax
    import optax

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x) -> Any:
            y = nn.LayerNorm()(x)
            y = nn.MultiHeadDotProductAttention(4, dropout_rate=0.1, deterministic=False)(y, y)
            x = x + nn.Dropout(0.1, deterministic=False)(y)
            return x + nn.Dense(128)(nn.gelu(nn.Dense(512)(nn.LayerNorm()(x))))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens) -> Any:
            x = nn.Embed(512, 128)(tokens)
            for number in range(3):
                x = nn.remat(Block)(name=f"block{number}")(x)
            return nn.Dense(512)(x)

    model, optimizer = Model(), optax.adamw(1e-3)
    tokens = jax.random.randint(jax.random.key(0), (8, 64), 0, 512)
    keys = {"params": jax.random.key(1), "dropout": jax.random.key(2)}
    params = model.init(keys, tokens)

    def loss(params, key):
        logits = model.apply(params, tokens, rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    @jax.jit
    def step(state):
        params, memory, key = state
        key, used = jax.random.split(key)
        updates, memory = optimizer.update(jax.grad(loss)(params, used), memory, params)
        return optax.apply_updates(params, updates), memory, key

    repeated(step, (params, optimizer.init(params), jax.random.key(3)))


def pallas() -> None:
    """A Pallas kernel through Triton in the middle of a step: its name is not that of its HLO op."""
    import inspect

    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    def doubled(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2 + 1

    shape = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    options: dict[str, Any] = {"name": "doubled_and_one"}
    if jax.default_backend() == "cpu":
        options["interpret"] = True
    elif "backend" in inspect.signature(pl.pallas_call).parameters:
        options["backend"] = "triton"
    spec = pl.BlockSpec((64, 64), lambda i, j: (i, j))
    kernel = pl.pallas_call(doubled, out_shape=shape, grid=(4, 4), in_specs=[spec], out_specs=spec, **options)

    @jax.jit
    def step(x):
        y = jnp.tanh(x @ x * 1e-3)
        return jnp.sin(kernel(y)) @ y * 1e-2

    repeated(step, jnp.ones((256, 256)))


def ffi() -> None:
    """Factorisations, which jaxlib's own FFI calls do, inside a step."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def step(x):
        y = jnp.tanh(x @ x.T) + 300 * jnp.eye(256)
        lower = jnp.linalg.cholesky(y)
        _, _, permutation = jax.lax.linalg.lu(y)
        return jnp.sin(lower[permutation]) @ y * 1e-3

    repeated(step, jnp.ones((256, 256)))


def ffi_in_graph() -> None:
    """A foreign function that may be captured: its two kernels become a graph inside XLA's graph."""
    import jax
    import jax.numpy as jnp

    target = "waits_twice"
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(_capturable()), platform="CUDA")
    shape = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    waits = jax.ffi.ffi_call(target, shape, input_output_aliases={0: 0})

    @jax.jit
    def step(x):
        y = jnp.sin(waits(jnp.sin(x @ x) * 1e-2) @ x)
        return jnp.tanh(waits(jnp.tanh(y @ x)) @ x) * 1e-2

    repeated(step, jnp.ones((256, 256)))


@functools.cache
def _capturable() -> Any:
    """A handler for XLA that launches two kernels, and says that they may be captured into a CUDA graph."""
    import jax

    from thence.capture.cuda.cuda_events import load_driver
    from thence.timing import xla_ffi
    from thence.timing.spin_kernel import HeadStart

    if jax.default_backend() != "gpu":
        raise Skipped("needs an NVIDIA GPU")
    driver, context = load_driver(), ctypes.c_void_p()
    kernel = HeadStart(driver)
    # The context of XLA; what is captured must not load a module.
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    driver.cuCtxPushCurrent_v2(context)
    kernel.hold(0, 0)
    driver.cuCtxPopCurrent_v2(ctypes.byref(context))

    def twice(stream: int) -> None:
        kernel.hold(stream, 2_000)
        kernel.hold(stream, 4_000)

    launches = xla_ffi.handler(twice)

    @xla_ffi.Handler
    def capturable(frame: Any) -> int | None:
        answer = launches(frame)
        extension = frame.contents.extension
        if extension and extension.contents.type == xla_ffi.METADATA:
            extension.contents.metadata.contents.traits = 1  # COMMAND_BUFFER_COMPATIBLE
        return answer

    return capturable


def donated() -> None:
    """A step whose argument is given up, so that buffers move and graphs are updated."""
    import jax
    import jax.numpy as jnp

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state):
        x, total, _ = state
        y = jnp.sin(x @ x) * 0.1
        for _ in range(4):
            y = jnp.tanh(y @ x) + y
        return y * 0.1, total + y.sum(), jnp.cumsum(y, 0)

    repeated(step, (jnp.ones((256, 256)), jnp.zeros(()), jnp.zeros((256, 256))))


def evicted() -> None:
    """Two functions in turn, the second compiled late: XLA gives up the graphs of the first and makes them anew."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def first(x):
        for _ in range(4):
            x = jnp.sin(x @ x) * 0.1
        return x

    @jax.jit
    def second(x):
        for _ in range(6):
            x = jnp.tanh(x @ x.T) * 0.1
        return jnp.sort(x, 0)

    x = repeated(first, jnp.ones((256, 256)), count=5)
    for _ in range(STEPS):
        x = first(second(x))
    jax.block_until_ready(x)


def two_devices() -> None:
    """shard_map over two GPUs, with an all-reduce in a scan: collectives divide command buffers."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    if len(jax.devices()) < 2:
        raise Skipped(f"needs two GPUs; there is {len(jax.devices())}")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("d",))
    spec = jax.sharding.PartitionSpec("d")

    def body(x):
        def turn(c, _):
            y = jnp.tanh(c @ c) @ c
            y = jax.lax.psum(y, "d")
            return jax.nn.softmax(y, -1) @ c * 0.1, y.sum(0)

        carried, sums = jax.lax.scan(turn, x, None, length=10)
        return carried + sums.sum()

    step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    x = jax.device_put(jnp.ones((256, 128)), jax.sharding.NamedSharding(mesh, spec))
    repeated(step, x)


def while_in_graph() -> None:
    """A loop and a branch in it, with XLA asked to put loops into graphs, too."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def step(x):
        def turn(state):
            number, y = state
            y = jax.lax.cond(number % 3 == 0, lambda y: jnp.sin(y @ y), lambda y: jnp.cos(y) + y, y)
            return number + 1, y * 0.1

        _, y = jax.lax.while_loop(lambda state: state[0] < 8, turn, (0, jnp.tanh(x @ x)))
        return y @ x * 1e-2

    repeated(step, jnp.ones((128, 128)))


def late(out: str | None = None) -> None:
    """Steps recorded after the graphs were created, when it is too late for XLA's ranges around commands.

    XLA's ranges can be had only if the recording begins before JAX looks for GPUs; a schedule leaves out the first
    steps.
    """
    recording = None
    if out is not None:
        import thence

        recording = thence.record(out, schedule=thence.Schedule(skip=WARM_UP, active=STEPS))
        recording.start()
    import jax
    import jax.numpy as jnp

    @jax.jit
    def step(x):
        y = jax.lax.cond(x.sum() > 0, lambda y: jnp.cumsum(jnp.tanh(y), 0), lambda y: y * 2, x @ x)
        for _ in range(4):
            y = jnp.sin(y @ x) * 0.1
        return jnp.sort(y, 0)

    x = jnp.ones((256, 256))
    for _ in range(WARM_UP + STEPS):
        x = jax.block_until_ready(step(x))
        if recording is not None:
            recording.step()
    if recording is not None:
        recording.stop()


PROGRAMS = {
    function.__name__: function
    for function in (
        nuts, ode, rnn, transformer, pallas, ffi, ffi_in_graph, donated, evicted, two_devices, while_in_graph, late
    )
}  # fmt: skip


# The recording.


def run_here(name: str, out: str | None) -> int:
    """Runs a program in this process."""
    try:
        PROGRAMS[name]() if name != "late" else late(out)
    except (Skipped, ImportError) as why:
        print(f"SKIPPED {name}: {why}")
        return SKIPPED
    import jax

    print(f"ran {name} on {len(jax.devices())} x {jax.devices()[0].device_kind}, jax {jax.__version__}")
    return 0


def record(folder: Path, names: list[str]) -> int:
    """Records programs with command buffers and without; returns how many failed."""
    failed = 0
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        for way in ("on", "off"):
            out = folder / f"{name}_{way}"
            shutil.rmtree(out, ignore_errors=True)
            command = [sys.executable, str(Path(__file__).resolve()), "run", name]
            if name == "late":
                command.append(str(out))
            else:
                command = [sys.executable, "-m", "thence", "record", "-o", str(out), "--", *command]
            flags = NO_BUFFERS if way == "off" else FLAGS.get(name, "")
            env = {
                **os.environ,
                "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
                "XLA_PYTHON_CLIENT_MEM_FRACTION": ".3",
                "JAX_COMPILATION_CACHE_DIR": str(folder / f"cache_{name}"),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            }
            done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)
            said = [line for line in done.stdout.splitlines() if line.startswith(("SKIPPED", "ran "))]
            print(f"{name} {way}: exit {done.returncode}", *said)
            if any(line.startswith("SKIPPED") for line in said):
                break
            if done.returncode:
                failed += 1
                print(done.stderr[-1500:])
    return failed


# The comparison.


def check(folder: Path, names: list[str]) -> int:
    """Compares all programs that were recorded both ways."""
    wrong, lacking, too_little, missing = 0, 0, [], []
    for name in names:
        if not all((folder / f"{name}_{way}").exists() for way in ("on", "off")):
            missing.append(name)
            continue
        of_program, short, enough = compare(folder, name)
        wrong += of_program
        lacking += short
        too_little += [] if enough else [name]
    print(
        f"{wrong} HLO ops wrong, {lacking} lack some; below {ENOUGH:.0%}: {too_little or 'none'}; not recorded: "
        f"{missing or 'none'}"
    )
    return int(wrong + lacking > 0 or bool(too_little))


def main(arguments: list[str]) -> int:
    """The command line; see the module."""
    options = documented_parser(__doc__)
    options.add_argument("verb", choices=("record", "check", "try", "run"))
    options.add_argument("rest", nargs="*", metavar="ARGUMENT", help="DIR of record and check, then names of programs")
    given = options.parse_args(arguments)
    verb, rest = given.verb, given.rest
    if verb != "try" and not rest:
        options.error(f"{verb} needs an argument")
    if verb == "run":
        return run_here(rest[0], rest[1] if len(rest) > 1 else None)
    if verb == "try":
        codes = [run_here(name, None) for name in rest or PROGRAMS]
        return int(any(code not in (0, SKIPPED) for code in codes))
    folder, names = Path(rest[0]), rest[1:] or list(PROGRAMS)
    return record(folder, names) if verb == "record" else check(folder, names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
