"""How well thence divides the time of an XLA fusion among the source lines inside it.

Each JAX program here becomes one fusion of several lines. For each line there is a variant of the program in which
that line does its work twice: the line repeats its operations (work "arithmetic"), or it reads a second array of the
same size (work "bytes"). How much longer the fusion takes is what the line costs; thence's share of the line in the
unchanged program is the estimate. Recording and checking are apart, because the recording machine needs jax alone::

    python benchmarks/gpu_fusion_lines.py record FOLDER --only lines --seconds 85    # on a GPU
    python benchmarks/gpu_fusion_lines.py record FOLDER --only opcodes --seconds 40  # on a GPU
    python benchmarks/gpu_fusion_lines.py check FOLDER                               # anywhere, with thence

``record`` compiles a few programs at a time, all their variants at once in threads, and writes one profile of
jax.profiler for them: the variants take turns, ROUNDS times. Programs for which no time is left, or that do not
compile in time, are left out. The groups of programs:

    lines      several lines in one fusion: chains of elementwise operations, mixes of transcendental functions,
               reductions, normalizations, optimizers, epilogues of matrix products, random numbers
    opcodes    one operation many times, and twice as often: what each opcode costs

``check`` prints for each program whether it was one fusion, whether the repeated operations are in it, the time of
the fusion, and for each line the true and the estimated share; then the error by kind of program, and for each
opcode its cost in multiply-adds. If twice the arithmetic of every line hardly makes a fusion longer, memory limits it,
and shares of arithmetic mean nothing: then only the variants that read more count.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import statistics
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from command_line import documented_parser

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


ROUNDS, WARM_UP = 12, 2
MEMORY_BOUND = 0.25
"""A fusion is limited by memory if doubling each line's arithmetic adds less than this share of its time in total."""
ROWS, COLUMNS, INNER = 2048, 4096, 256
FULL, HALF, ROW, COLUMN = "float32", "bfloat16", "row", "column"
"""Inputs: ROWS x COLUMNS numbers of a type, or one row or one column of float32. Matrix products are over INNER."""

UNARY = {
    "multiply_add": "{0} * 0.999 + 0.001",
    "multiply": "{0} * {0}",
    "add": "{0} + y",
    "select": "jnp.where({0} < 0.3, y, {0} * 1.1)",
    "divide": "y / (1.0 + {0})",
    "sqrt": "lax.sqrt(1.0 + {0})",
    "rsqrt": "lax.rsqrt(1.0 + {0})",
    "exponential": "lax.exp(-{0})",
    "expm1": "lax.expm1(-{0})",
    "log": "lax.log(2.0 + {0})",
    "log1p": "lax.log1p({0} * {0})",
    "tanh": "lax.tanh({0})",
    "sine": "lax.sin({0})",
    "cosine": "lax.cos({0})",
    "tan": "lax.tan({0})",
    "logistic": "lax.logistic({0})",
    "erf": "lax.erf({0})",
    "power": "lax.pow(0.5 + 0.5 * {0}, y)",
    "cbrt": "lax.cbrt(1.0 + {0})",
    "atan2": "lax.atan2({0}, 1.0 + y)",
    "remainder": "lax.rem(1.0 + {0}, y)",
    "floor": "lax.floor({0} * 1.7) * 0.5 + y",
    "maximum": "lax.max({0} * 0.99, y)",
    "integers": "({0} ^ ({0} << 5)) + jnp.uint32(12345)",
}
"""Operations that can be repeated without XLA folding them; {0} is the value so far, y an array."""
REPEATED = {"multiply_add": 128, "multiply": 128, "add": 128, "select": 64, "floor": 64, "maximum": 64, "integers": 64}
"""How often an operation is repeated to find what it costs; others `REPEATED_OTHERS` times."""
REPEATED_OTHERS = 16


def chain(name: str, count: int, value: str = "a") -> str:
    """One line that applies an operation to a value again and again."""
    return "; ".join([f"{value} = {UNARY[name].format(value)}"] * count)


@dataclass(frozen=True)
class Line:
    """A line of a program.

    Attributes:
        text: of it.
        twice: the same line with twice the arithmetic; empty: there is no such variant.
        more: the same line with another array to read; empty: there is no such variant.
        name: for people.
    """

    text: str
    twice: str = ""
    more: str = ""
    name: str = ""

    @classmethod
    def of(cls, operation: str, count: int, value: str = "a") -> Line:
        """A line that repeats an operation."""
        return cls(chain(operation, count, value), chain(operation, 2 * count, value), name=f"{operation} x {count}")


@dataclass(frozen=True)
class Program:
    """A function of arrays.

    Attributes:
        name: a Python identifier.
        inputs: its arguments, in order, with their type.
        lines: of its body.
        result: the expression that it returns.
        kind: of program, by which errors are summed up.
        results: number of float32 arrays that it returns.
    """

    name: str
    inputs: dict[str, str]
    lines: list[Line]
    result: str = "a"
    kind: str = "elementwise"
    results: int = 1

    def variants(self) -> Iterator[tuple[str, list[str]]]:
        """The unchanged program, and one variant for each line and kind of work: name and lines."""
        texts = [line.text for line in self.lines]
        yield f"{self.name}__base", texts
        for number, line in enumerate(self.lines):
            for work, text in (("arithmetic", line.twice), ("bytes", line.more)):
                if text:
                    changed = [*texts[:number], text, *texts[number + 1 :]]
                    yield f"{self.name}__{number}_{work}", changed


BROADCAST = "a = 0.5 * (x[:, None] + y[None, :]); y = y[None, :]"
"""A value that costs no reading, for fusions whose arithmetic is their cost."""
BITS = f"{BROADCAST}; a = lax.bitcast_convert_type(a, jnp.uint32)"
OUTER = {"x": COLUMN, "y": ROW}


SIZES = {FULL: 4 * ROWS * COLUMNS, HALF: 2 * ROWS * COLUMNS, ROW: 4 * COLUMNS, COLUMN: 4 * ROWS}
"""Bytes of an input."""


def mixed(name: str, *parts: tuple[str, int]) -> Program:
    """Chains of operations, one a line, on a value that costs no reading."""
    return Program(name, OUTER, [Line(BROADCAST), *(Line.of(*part) for part in parts)])


def line_programs() -> list[Program]:
    more = {f"m{n}": FULL for n in range(4)}
    return [
        mixed("mix_sine_exp", ("sine", 8), ("exponential", 24), ("multiply_add", 96)),
        mixed("mix_tanh_log", ("tanh", 12), ("log1p", 12), ("divide", 16), ("multiply", 96)),
        mixed("mix_erf", ("erf", 12), ("logistic", 12), ("select", 48), ("rsqrt", 16)),
        mixed("mix_power", ("power", 6), ("cosine", 8), ("add", 96), ("sqrt", 16)),
        mixed("mix_equal_counts", ("tanh", 10), ("multiply", 10), ("divide", 10), ("add", 10)),
        mixed("mix_small", ("exponential", 3), ("tanh", 2), ("multiply_add", 6), ("log", 2)),
        Program(
            "mix_with_reads",
            {"x": FULL, "y": FULL},
            [Line("a = x + y"), Line.of("sine", 6), Line.of("exponential", 12), Line.of("divide", 8)],
        ),
        Program(
            "reduction",
            {"x": FULL, "y": ROW},
            [
                Line("a = x + 0.5"),
                Line.of("exponential", 8),
                Line.of("multiply_add", 32),
                Line("s = jnp.sum(a, axis=-1)", name="sum"),
            ],
            "s",
            "reduction",
        ),
        Program(
            "reduction_small",
            {"x": FULL, "y": ROW},
            [
                Line("a = jnp.square(x)", "a = jnp.square(jnp.square(x))", name="square"),
                Line.of("tanh", 2),
                Line("s = jnp.sum(a, axis=-1)", name="sum"),
            ],
            "s",
            "reduction",
        ),
        Program(
            "column_reduction",
            {"x": FULL, "y": FULL},
            [
                Line("a = x * y"),
                Line.of("log1p", 8),
                Line.of("multiply_add", 64),
                Line("s = jnp.sum(a, axis=0)", name="sum"),
            ],
            "s",
            "reduction",
        ),
        Program(
            "softmax",
            {"x": FULL},
            [
                Line("m = jnp.max(x, axis=-1, keepdims=True)", name="max"),
                Line("e = jnp.exp(x - m)", "e = jnp.exp(x - m); e = jnp.exp(-e)", name="exp"),
                Line("s = jnp.sum(e, axis=-1, keepdims=True)", name="sum"),
                Line("a = e / s", "a = e / s; a = a / (1.0 + s)", name="divide"),
            ],
            "a",
            "normalization",
        ),
        Program(
            "rms_norm",
            {"x": FULL, "w": ROW, **more},
            [
                Line(
                    "v = jnp.mean(jnp.square(x), axis=-1, keepdims=True)",
                    "v = jnp.mean(jnp.square(x * x + 0.1), axis=-1, keepdims=True)",
                    name="mean",
                ),
                Line(
                    "r = x * lax.rsqrt(v + 1e-6)",
                    "r = x * lax.rsqrt(v + 1e-6); r = r * lax.rsqrt(r * r + 1.0)",
                    "r = x * lax.rsqrt(v + 1e-6) + m0",
                    name="scale by rsqrt",
                ),
                Line("a = r * w", "a = r * w; a = a * w", "a = r * w + m1", name="weight"),
            ],
            "a",
            "normalization",
        ),
        Program(
            "gelu",
            {"x": FULL, **more},
            [
                Line("u = x * x * x", "u = x * x * x; u = u * u * u", name="cube"),
                Line(
                    "t = lax.tanh(0.79788 * (x + 0.044715 * u))",
                    "t = lax.tanh(lax.tanh(0.79788 * (x + 0.044715 * u)))",
                    "t = lax.tanh(0.79788 * (x + 0.044715 * u + m0))",
                    name="tanh",
                ),
                Line(
                    "a = 0.5 * x * (1.0 + t)",
                    "a = 0.5 * x * (1.0 + t); a = 0.5 * a * (1.0 + t)",
                    "a = 0.5 * x * (1.0 + t) + m1",
                    name="product",
                ),
            ],
            "a",
            "limited by memory",
        ),
        Program(
            "sum_of_arrays",
            {"x": FULL, "y": HALF, "w": ROW, **more, "h0": HALF, "w0": ROW},
            [
                Line("a = x * 2.0", more="a = x * 2.0 + m0", name="float32 array"),
                Line("a = a + y", more="a = a + y + h0", name="bfloat16 array"),
                Line("a = a * w", more="a = a * w + w0", name="row"),
                Line("a = lax.tanh(a)", "a = lax.tanh(lax.tanh(a))", name="tanh"),
            ],
            "a",
            "limited by memory",
        ),
        Program(
            "adam",
            {"p": FULL, "m": FULL, "v": FULL, "g": FULL, **more},
            [
                Line("m = 0.9 * m + 0.1 * g", more="m = 0.9 * m + 0.1 * (g + m0)", name="moment"),
                Line(
                    "v = 0.99 * v + 0.01 * g * g",
                    more="v = 0.99 * v + 0.01 * g * g * m1",
                    name="second moment",
                ),
                Line(
                    "p = p - 0.001 * m / (jnp.sqrt(v) + 1e-8)",
                    "p = p - 0.001 * m / (jnp.sqrt(v) + 1e-8); p = p - 0.001 * m / (jnp.sqrt(p * p + v) + 1e-8)",
                    "p = p - 0.001 * m / (jnp.sqrt(v) + 1e-8) * m2",
                    name="parameter",
                ),
            ],
            "(p, m, v)",
            "limited by memory",
            3,
        ),
        Program(
            "dropout",
            {"x": FULL, "y": ROW},
            [
                Line(
                    "k = jax.random.bernoulli(jax.random.key(1), 0.9, x.shape)",
                    "k = jax.random.bernoulli(jax.random.key(1), 0.9, x.shape)"
                    " ^ jax.random.bernoulli(jax.random.key(2), 0.9, x.shape)",
                    name="random bits",
                ),
                Line("a = jnp.where(k, x / 0.9, 0.0)", name="where"),
                Line.of("exponential", 12),
                Line.of("multiply_add", 64),
            ],
            "a",
            "random numbers",
        ),
        Program(
            "epilogue_float32",
            {"x": "matrix", "w": "weights", "y": ROW, "x2": "matrix2", "w2": "weights2"},
            [
                Line("a = x @ w", "a = x2 @ w2", name="dot"),
                Line("a = a + y", name="bias"),
                Line.of("erf", 8),
                Line.of("multiply_add", 64),
            ],
            "a",
            "epilogue",
        ),
        Program(
            "epilogue_bfloat16",
            {"x": "matrix16", "w": "weights16", "y": ROW, "x2": "matrix2_16", "w2": "weights2_16"},
            [
                Line(
                    "a = lax.dot(x, w, preferred_element_type=jnp.float32)",
                    "a = lax.dot(x2, w2, preferred_element_type=jnp.float32)",
                    name="dot",
                ),
                Line("a = a + y", name="bias"),
                Line.of("tanh", 4),
                Line.of("multiply_add", 32),
            ],
            "a.astype(jnp.bfloat16)",
            "epilogue",
        ),
    ]  # fmt: skip


def opcode_programs() -> list[Program]:
    counts = {name: REPEATED.get(name, REPEATED_OTHERS) for name in UNARY}
    return [
        Program(
            f"op_{name}", OUTER, [Line(BITS if name == "integers" else BROADCAST), Line.of(name, count)], kind="opcode"
        )
        for name, count in counts.items()
    ]


GROUPS = {"lines": line_programs, "opcodes": opcode_programs}
PROGRAMS_PER_PROFILE = {"lines": 3, "opcodes": 6}
COMPILED_AT_ONCE = 12
RESERVE = 4.0
"""Seconds kept for measuring what was compiled last, and for writing it."""
FIRST_LINE = 5
"""Number of the first line of a program's body in its file; see `source`."""


def source(program: Program, lines: list[str], name: str) -> str:
    """The file of a variant: the same lines have the same numbers in all variants of a program."""
    body = "\n".join(f"    {line}" for line in lines)
    return (
        "import jax\nimport jax.numpy as jnp\nfrom jax import lax\n"
        f"def {name}({', '.join(program.inputs)}):\n{body}\n    return {program.result}\n"
    )


def arrays(program: Program) -> list[Any]:
    """Its arguments: numbers from 0.1 to 0.9, so that no operation leaves its fast path."""
    import jax
    import jax.numpy as jnp

    shapes = {
        FULL: ((ROWS, COLUMNS), jnp.float32),
        HALF: ((ROWS, COLUMNS), jnp.bfloat16),
        ROW: ((COLUMNS,), jnp.float32),
        COLUMN: ((ROWS,), jnp.float32),
        "matrix": ((ROWS, INNER), jnp.float32),
        "weights": ((INNER, COLUMNS), jnp.float32),
        "matrix2": ((ROWS, 2 * INNER), jnp.float32),
        "weights2": ((2 * INNER, COLUMNS), jnp.float32),
        "matrix16": ((ROWS, INNER), jnp.bfloat16),
        "weights16": ((INNER, COLUMNS), jnp.bfloat16),
        "matrix2_16": ((ROWS, 2 * INNER), jnp.bfloat16),
        "weights2_16": ((2 * INNER, COLUMNS), jnp.bfloat16),
    }
    keys = jax.random.split(jax.random.key(0), len(program.inputs))
    return [
        jax.random.uniform(key, shape, jnp.float32, 0.1, 0.9).astype(kind)
        for key, (shape, kind) in zip(keys, (shapes[what] for what in program.inputs.values()), strict=True)
    ]


def prepared(program: Program, folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The variants of a program, each with what compiles it and gives what runs it."""
    import jax

    folder.mkdir(parents=True, exist_ok=True)
    inputs = arrays(program)
    for name, lines in program.variants():
        path = folder / f"{name}.py"
        path.write_text(source(program, lines, name))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        # Unused arguments are kept, so that all variants have the same arrays in memory.
        lowered = jax.jit(getattr(module, name), keep_unused=True).lower(*inputs)
        yield name, lambda lowered=lowered: partial(lowered.compile(), *inputs)


def record(out: Path, seconds: float, groups: list[str]) -> None:
    begin = time.monotonic()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    print("jax", jax.__version__, jax.devices()[0].device_kind)
    described = out / "about.json"
    about = json.loads(described.read_text()) if described.exists() else {}
    about |= {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    pool = ThreadPoolExecutor(COMPILED_AT_ONCE)
    for group in groups:
        programs = GROUPS[group]()
        size = PROGRAMS_PER_PROFILE[group]
        for batch, first in enumerate(range(0, len(programs), size)):
            left = seconds - RESERVE - (time.monotonic() - begin)
            if left < 0:
                names = ", ".join(program.name for program in programs[first:])
                print(f"no time is left for {names}")
                break
            runs = compiled(pool, programs[first : first + size], out / "programs", left)
            if not runs:
                continue
            began = time.monotonic()
            for run in [*runs.values()] * WARM_UP:
                jax.block_until_ready(run())
            jax.profiler.start_trace(str(out / group / f"{batch:02}"), profiler_options=options)
            for _ in range(ROUNDS):
                for run in runs.values():
                    jax.block_until_ready(run())
            jax.profiler.stop_trace()
            print(f"{len(runs)} variants measured in {time.monotonic() - began:.1f} s", flush=True)
            about[group] = sorted({*about.get(group, []), *runs})
            described.write_text(json.dumps(about))
    print(f"{time.monotonic() - begin:.0f} s", flush=True)
    # A thread that still compiles must not hold up the end.
    os._exit(0)


def compiled(
    pool: ThreadPoolExecutor, programs: list[Program], folder: Path, seconds: float
) -> dict[str, Callable[[], Any]]:
    """What runs the variants of programs, by name; programs that do not compile in this time are left out."""
    begin = time.monotonic()
    waiting = {}
    for program in programs:
        try:
            waiting[program.name] = {name: pool.submit(build) for name, build in prepared(program, folder)}
        except Exception:  # noqa: BLE001 - one program that cannot be lowered stops no other
            traceback.print_exc()
    runs: dict[str, Callable[[], Any]] = {}
    for program_name, variants in waiting.items():
        try:
            runs |= {
                name: future.result(max(0.0, seconds - (time.monotonic() - begin))) for name, future in variants.items()
            }
            print(f"{program_name}: compiled after {time.monotonic() - begin:.1f} s", flush=True)
        except TimeoutError:
            print(f"{program_name}: did not compile in {seconds:.0f} s, left out")
            for future in variants.values():
                future.cancel()
        except Exception:  # noqa: BLE001 - one program that does not compile stops no other
            traceback.print_exc()
            print(f"{program_name}: FAILED, left out")
    return runs


@dataclass(frozen=True)
class Variant:
    """What thence read of one variant.

    Attributes:
        ns: median time of an execution's fusions.
        kernels: number of fusions in an execution.
        instructions: HLO instructions that compute inside the kernels, by line of the program; -1: of no line.
        shares: thence's share of the time, by line of the program.
        fusions: names of the fusions.
    """

    ns: float
    kernels: float
    instructions: dict[int, int]
    shares: dict[int, float]
    fusions: list[str]


def read(folder: Path) -> dict[str, Variant]:
    """The variants in a profile."""
    import polars as pl

    import thence

    trace = thence.open(folder).tables
    programs = trace.programs.select(
        pl.int_range(pl.len(), dtype=pl.Int32).alias("program"),
        pl.col("name").cast(pl.String).alias("variant"),
        pl.col("hlo").alias("module"),
    )
    kernels = (
        trace.tables.gpu.select("program", "duration", hlo=trace.tables.places["hlo"].cast(pl.String))
        .with_row_index("gpu")
        .filter(trace.tables.places["opcode"].cast(pl.String) == "fusion")
        .join(programs, on="program")
    )
    claims = trace.shares.select("gpu", "weight", place=pl.col("place").cast(pl.String))
    result = {}
    for (variant, number), rows in kernels.group_by("variant", "module"):
        by_execution = rows.group_by("program").agg(pl.col("duration").sum(), count=pl.len())
        weighed = rows.join(claims, on="gpu").with_columns(
            line=pl.col("place").map_elements(line_number, pl.Int64, skip_nulls=False),
            share=pl.col("weight") * pl.col("duration") / rows["duration"].sum(),
        )
        result[str(variant)] = Variant(
            float(by_execution["duration"].median() or 0),  # type: ignore[arg-type]
            float(by_execution["count"].mean() or 0),  # type: ignore[arg-type]
            instructions_by_line(trace.hlo[int(str(number))]),
            dict(weighed.group_by("line").agg(pl.col("share").sum()).iter_rows()),
            sorted(rows["hlo"].unique().drop_nulls()),
        )
    return result


def line_number(place: str | None) -> int:
    """The number of a line in a program's body, -1 for a place outside."""
    if place is None or "__" not in place:
        return -1
    return int(place.rpartition(":")[2].split()[0]) - FIRST_LINE


def instructions_by_line(module: Any) -> dict[int, int]:
    """Number of HLO instructions inside fusions by line of the program."""
    from thence.attribution.xla.origins import origins
    from thence.model.own_code import OwnCode

    inner = ~module.instructions["top_level"]
    moving = module.instructions["opcode"].is_in(
        ["parameter", "constant", "broadcast", "bitcast", "tuple", "get-tuple-element", "reshape"]
    )
    places = origins(module, OwnCode()).filter(inner & ~moving)["source"]
    result: dict[int, int] = {}
    for place, count in places.value_counts(name="n").iter_rows():
        number = line_number(place)
        result[number] = result.get(number, 0) + count
    return result


def check(folder: Path) -> None:
    about = json.loads((folder / "about.json").read_text())
    print("jax", about["jax"], about["device"])
    errors: dict[str, list[float]] = {}
    memory: dict[str, list[float]] = {}
    for group in (group for group in GROUPS if group in about):
        found: dict[str, Variant] = {}
        for profile in sorted((folder / group).iterdir()):
            found |= read(profile)
        if group == "opcodes":
            print_opcodes(found)
            continue
        for program in GROUPS[group]():
            print_program(program, found, errors, memory)
    for title, kinds in (
        ("limited by arithmetic: error of a line's share", errors),
        ("limited by memory: error of the time of more bytes, if it is in proportion", memory),
    ):
        print(f"\n{title}, percentage points (median, largest, lines)")
        for kind, values in [*kinds.items(), ("all", [v for vs in kinds.values() for v in vs])]:
            if values:
                middle, worst = statistics.median(values), max(values)
                print(f"  {kind:20} {100 * middle:6.1f} {100 * worst:6.1f} {len(values):4}")


def print_program(
    program: Program, found: dict[str, Variant], errors: dict[str, list[float]], memory: dict[str, list[float]]
) -> None:
    """Prints a program's lines, and adds the errors of their shares to those of its kind."""
    base = found.get(f"jit_{program.name}__base")
    if base is None:
        print(f"\n{program.name}: was not recorded")
        return
    print(f"\n{program.name}: {base.ns / 1000:.1f} us, {base.kernels:.0f} fusions: {', '.join(base.fusions)}")
    truth: dict[str, dict[int, float]] = {"arithmetic": {}, "bytes": {}}
    for number, line in enumerate(program.lines):
        for work, values in truth.items():
            variant = found.get(f"jit_{program.name}__{number}_{work}")
            if variant is None:
                continue
            values[number] = (variant.ns - base.ns) / base.ns
            repeated = variant.instructions.get(number, 0), base.instructions.get(number, 0)
            print(
                f"  {line.name or line.text[:40]:28} {work:10} +{100 * values[number]:5.1f} % of the time,"
                f" estimated {100 * base.shares.get(number, 0.0):5.1f} %; HLO instructions"
                f" {repeated[1]} -> {repeated[0]}{'' if variant.kernels == base.kernels else '; NOT THE SAME KERNELS'}"
            )
    added = sum(truth["arithmetic"].values())
    bound = added < MEMORY_BOUND
    print(
        f"  twice the arithmetic of every line: +{100 * added:.1f} %"
        f" ({'limited by memory' if bound else 'limited by arithmetic'});"
        f" estimated without a line: {100 * base.shares.get(-1, 0.0):.1f} %"
    )
    if bound:
        moved = array_bytes(program)
        for number, value in truth["bytes"].items():
            more = SIZES[added_type(program, number)] / moved
            print(f"  {program.lines[number].name}: +{100 * more:.1f} % of the bytes, +{100 * value:.1f} % of the time")
            memory.setdefault(program.kind, []).append(abs(more - value))
        return
    kept = errors.setdefault(program.kind, [])
    estimated = {number: base.shares.get(number, 0.0) for number in truth["arithmetic"]}
    # Shares among the lines that were doubled: what the others cost is not known.
    whole, total = sum(estimated.values()), sum(truth["arithmetic"].values())
    for number, value in truth["arithmetic"].items():
        if whole > 0 and total > 0:
            kept.append(abs(estimated[number] / whole - value / total))


def array_bytes(program: Program) -> int:
    """The bytes that the unchanged program reads and writes, if it reads each of its arrays once."""
    text = " ".join(line.text for line in program.lines)
    read = [kind for name, kind in program.inputs.items() if re.search(rf"\b{name}\b", text)]
    return sum(SIZES[kind] for kind in read) + program.results * SIZES[FULL]


def added_type(program: Program, number: int) -> str:
    """The type of the array that the variant of a line reads, and the unchanged program does not."""
    line = program.lines[number]
    return next(
        kind
        for name, kind in program.inputs.items()
        if re.search(rf"\b{name}\b", line.more) and not re.search(rf"\b{name}\b", line.text)
    )


def print_opcodes(found: dict[str, Variant]) -> None:
    """Prints what each opcode costs, compared with a multiply-add."""
    cost = {}
    for name in UNARY:
        base = found.get(f"jit_op_{name}__base")
        twice = found.get(f"jit_op_{name}__1_arithmetic")
        if base is None or twice is None or (base.kernels, twice.kernels) != (1, 1):
            print(f"{name}: not one kernel")
            continue
        count = REPEATED.get(name, REPEATED_OTHERS)
        cost[name] = (twice.ns - base.ns) / count
        print(
            f"  {name:14} {base.ns / 1000:7.1f} us x {count}, {twice.ns / 1000:7.1f} us x {2 * count};"
            f" HLO instructions {base.instructions.get(1)} -> {twice.instructions.get(1)}"
        )
    unit = cost.get("multiply_add")
    if unit:
        print("\ncost in multiply-adds: " + ", ".join(f"{k} {v / unit:.1f}" for k, v in cost.items()))


def main() -> None:
    options = documented_parser(__doc__)
    verbs = options.add_subparsers(required=True, dest="verb")
    recording = verbs.add_parser("record")
    recording.add_argument("folder", type=Path)
    recording.add_argument("--seconds", type=float, default=130)
    recording.add_argument("--only", choices=[*GROUPS], action="append")
    verbs.add_parser("check").add_argument("folder", type=Path)
    given = options.parse_args()
    if given.verb == "record":
        record(given.folder, given.seconds, given.only or [*GROUPS])
    else:
        check(given.folder)


if __name__ == "__main__":
    main()
