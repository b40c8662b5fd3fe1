"""Whether `thence roofline` counts and rates the work of programs on a GPU as closed forms and data sheets say.

    python tests/gpu/roofline.py record OUT [NAME ...]   # on a GPU with torch, transformers and jax
    python tests/gpu/roofline.py check OUT               # anywhere, with thence's requirements

Programs, each in a process of its own: cuBLAS products of 8192^3 and copies of 1 GiB (limits), training steps of a
Llama with odd sizes, grouped heads and causal attention (eager, with checkpoints, compiled, captured in a CUDA graph
and replayed, the last two recorded by `thence record`), products that are recorded with samples of the clock beside
nvidia-smi and after the peaks of the machine were measured (clocked), training of a GPT-2 of transformers (hf),
decoding with a static cache in CUDA graphs (decode), and a training step of JAX with scans, checkpoints and command
buffers (jax).

``record`` writes traces, recordings and labels into OUT. ``check`` prints for each program the share of its GPU time
with FLOP or bytes, the rates, and the FLOP of the Llama and of the JAX step beside their closed forms; what is out of
its limits is WRONG, and the exit code is 1 then.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import thence
from support import captured as captured_graph
from support import documented_parser
from thence.capture.cuda.nvml import ClockSamples
from thence.model.formats import MEASURED_PEAKS_FILE
from thence.timing.measured_peaks import measure_into

if TYPE_CHECKING:
    from collections.abc import Callable

    from thence.analysis.roofline import Roofline

LAYERS, HIDDEN, HEADS, KV_HEADS, INNER, WORDS, BATCH, LENGTH = 3, 1040, 10, 2, 2824, 4099, 3, 391
WIDTH = HIDDEN // HEADS
STEPS = 3
PRODUCT, GIBIBYTE = 8192, 1 << 30
REPEATS = 12
CLOCKED_STEPS = 200
TIMEOUT_S = 150


def llama(torch: Any, *, checkpoints: bool = False) -> Any:
    """A Llama with grouped heads, without any package but torch."""
    functional = torch.nn.functional
    linear = lambda a, b: torch.nn.Linear(a, b, bias=False)  # noqa: E731

    class Attention(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.q, self.o = linear(HIDDEN, HIDDEN), linear(HIDDEN, HIDDEN)
            self.k, self.v = linear(HIDDEN, KV_HEADS * WIDTH), linear(HIDDEN, KV_HEADS * WIDTH)

        def forward(self, x: Any) -> Any:
            q, k, v = (p(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for p in (self.q, self.k, self.v))
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return self.o(y.transpose(1, 2).flatten(2))

    class Mlp(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = linear(HIDDEN, INNER), linear(HIDDEN, INNER), linear(INNER, HIDDEN)

        def forward(self, x: Any) -> Any:
            return self.down(functional.silu(self.gate(x)) * self.up(x))

    class Block(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.attention = torch.nn.RMSNorm(HIDDEN), Attention()
            self.norm2, self.mlp = torch.nn.RMSNorm(HIDDEN), Mlp()

        def forward(self, x: Any) -> Any:
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))

    class Llama(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(WORDS, HIDDEN)
            self.layers = torch.nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm, self.head = torch.nn.RMSNorm(HIDDEN), linear(HIDDEN, WORDS)

        def forward(self, words: Any) -> Any:
            x = self.embed(words)
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if checkpoints else layer(x)
            return self.head(self.norm(x))

    return Llama()


def llama_flop(*, recomputed: int = 0) -> dict[str, float]:
    """FLOP of a training step by the closed form: each weight of a product three times, attention 1 + 2.5.

    Args:
        recomputed: how often the layers run once more, for checkpoints: all of them but the last product, whose result
            no gradient needs.
    """
    tokens, pairs = BATCH * LENGTH, LENGTH * (LENGTH + 1) // 2
    projections = 2 * tokens * HIDDEN * (2 * HIDDEN + 2 * KV_HEADS * WIDTH)
    scores = 4 * BATCH * HEADS * pairs * WIDTH
    product = 2 * tokens * HIDDEN * INNER
    return {
        "attention": LAYERS * ((recomputed + 3) * projections + (recomputed + 3.5) * scores),
        "mlp": LAYERS * (2 * recomputed + 9) * product,
        "head": 3 * 2 * tokens * HIDDEN * WORDS,
    }


class Training:
    """Training steps of the Llama in bfloat16."""

    def __init__(self, *, checkpoints: bool = False, compiled: str | None = None) -> None:
        import torch

        torch.manual_seed(0)
        model = llama(torch, checkpoints=checkpoints).to("cuda", torch.bfloat16)
        self.called = model if compiled is None else torch.compile(model, mode=compiled)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)
        self.words = torch.randint(0, WORDS, (BATCH, LENGTH), device="cuda")
        self.torch = torch

    def __call__(self) -> None:
        logits = self.called(self.words)
        loss = self.torch.nn.functional.cross_entropy(logits.view(-1, WORDS).float(), self.words.view(-1))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def traced(path: Path, step: Callable[[], Any], *, steps: int = STEPS, stacks: bool = False) -> None:
    """Some steps under torch.profiler, with shapes."""
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule

    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
        schedule=schedule(wait=0, warmup=1, active=steps),
        record_shapes=True,
        with_stack=stacks,
        on_trace_ready=lambda done: done.export_chrome_trace(f"{path}.json.gz"),
    ) as profiler:
        for _ in range(steps + 1):
            step()
            torch.cuda.synchronize()
            profiler.step()


def limits(out: Path) -> None:
    """Products and copies that are as fast as the machine allows."""
    import torch

    a, b = (torch.randn(PRODUCT, PRODUCT, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(GIBIBYTE, dtype=torch.uint8, device="cuda")
    target, numbers = torch.empty_like(source), source.view(torch.bfloat16)
    eighth = torch.randn(PRODUCT, PRODUCT, device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    wide = torch.randn(4096, 4096, device="cuda")
    torch.backends.cuda.matmul.allow_tf32 = True
    for _ in range(20):
        a @ b  # the clock rises

    def step() -> None:
        for _ in range(REPEATS // STEPS):
            a @ b
            target.copy_(source)
            numbers.add_(1)
            torch.mm(wide, wide)
            torch._scaled_mm(eighth, eighth.t(), one, one, out_dtype=torch.bfloat16)

    traced(out / "limits", step)


def eager(out: Path) -> None:
    """The Llama launched one by one, with stacks, so that modules are known."""
    step = Training()
    for _ in range(3):
        step()
    traced(out / "eager", step, stacks=True)


def checkpoints(out: Path) -> None:
    """The Llama with each layer in a checkpoint."""
    step = Training(checkpoints=True)
    for _ in range(3):
        step()
    traced(out / "checkpoints", step, stacks=True)


def compiled(out: Path) -> None:
    """The Llama compiled by Inductor."""
    step = Training(compiled="default")
    for _ in range(4):
        step()
    traced(out / "compiled", step)


def captured(out: Path) -> None:
    """A step in a CUDA graph: an eager trace of it, a trace of its replays, and the labels of its capture."""
    step = Training()
    with thence.mark("warm-up"):  # captures are watched from now on
        for _ in range(3):
            step()
    traced(out / "captured_eager", step, steps=1)
    began = time.perf_counter()
    graph = captured_graph(step.torch, step)
    print(f"captured in {time.perf_counter() - began:.2f} s", flush=True)
    traced(out / "captured", graph.replay)
    thence.save_labels(out / "saved_capture.json")


def recorded(out: Path) -> None:
    """The same capture and its replays, recorded."""
    step = Training()
    step()
    with thence.record(out / "recorded", thence.RecordOptions(own=(str(Path(__file__)),))) as recording:
        graph = captured_graph(step.torch, step)
        for _ in range(STEPS):
            graph.replay()
            recording.step()
        step.torch.cuda.synchronize()


def recorded_compiled(out: Path) -> None:
    """The Llama compiled into CUDA graphs (reduce-overhead), recorded."""
    step = Training(compiled="reduce-overhead")
    with thence.record(out / "recorded_compiled", thence.RecordOptions(own=(str(Path(__file__)),))) as recording:
        for _ in range(8):
            step.torch.compiler.cudagraph_mark_step_begin()
            step()
            recording.step()
        step.torch.cuda.synchronize()


def clocked(out: Path) -> None:
    """Products in a CUDA graph, recorded, for some seconds; and what a sample of the clock costs."""
    import torch

    folder = out / "clocked"
    folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    measure_into(folder / MEASURED_PEAKS_FILE)
    print(f"peaks measured in {time.perf_counter() - began:.1f} s", flush=True)
    a, b = (torch.randn(PRODUCT, PRODUCT, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    a @ b
    query = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "-lms", "200"]
    with (out / "clocked_smi.txt").open("w") as file, thence.record(folder) as recording:
        graph = captured_graph(torch, lambda: [a @ b for _ in range(REPEATS)])
        graph.replay()
        torch.cuda.synchronize()
        beside = subprocess.Popen(query, stdout=file)
        for _ in range(CLOCKED_STEPS):
            graph.replay()
            torch.cuda.synchronize()
            recording.step()
        beside.terminate()
        beside.wait()
    samples = ClockSamples()
    samples.look()
    costs = []
    for _ in range(50):
        samples.due = 0.0
        began = time.perf_counter()
        samples.look()
        costs.append(time.perf_counter() - began)
    (out / "clocked_cost.txt").write_text(f"{1e6 * statistics.median(costs):.1f} {1e6 * max(costs):.1f}\n")


def hf(out: Path) -> None:
    """Training of a GPT-2 of transformers."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=6, n_embd=768, n_head=12)
    model = GPT2LMHeadModel(config).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, 50000, (16, 512), device="cuda")

    def step() -> None:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    traced(out / "hf", step)


def decode(out: Path) -> None:
    """Decoding with a static cache: a token is a CUDA graph, recorded."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, StaticCache

    config = GPT2Config(n_layer=6, n_embd=1024, n_head=16)
    model = GPT2LMHeadModel(config).to("cuda", torch.bfloat16).eval()
    cache = StaticCache(config=config, max_cache_len=1024)
    token = torch.randint(0, 50000, (32, 1), device="cuda")
    place = torch.tensor([500], device="cuda")

    def step() -> None:
        out = model(input_ids=token, past_key_values=cache, cache_position=place)
        token.copy_(out.logits[:, -1:].argmax(-1))

    with torch.no_grad(), thence.record(out / "decode", thence.RecordOptions(own=(str(Path(__file__)),))) as recording:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(20):
            graph.replay()
            recording.step()
        torch.cuda.synchronize()


J_LAYERS, J_HIDDEN, J_INNER, J_WORDS, J_BATCH, J_LENGTH, J_HEADS = 4, 768, 3080, 5003, 4, 384, 6


def jax_step(out: Path) -> None:
    """A training step of JAX: layers in a scan, each in jax.checkpoint; recorded, and profiled."""
    with thence.record(out / "jax"):
        import jax
        import jax.numpy as jnp
        import numpy as np

        def norm(x: Any) -> Any:
            return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

        @jax.checkpoint
        def layer(x: Any, p: Any) -> Any:
            q, k, v = jnp.moveaxis((norm(x) @ p["qkv"]).reshape(*x.shape[:2], 3, J_HEADS, -1), 2, 0)
            s = jnp.einsum("bqhd,bkhd->bhqk", q, k)
            s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -1e9)
            y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s), v).reshape(x.shape)
            x = x + y @ p["out"]
            return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]

        def loss(params: Any, tokens: Any) -> Any:
            x = params["embed"][tokens]
            x, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), x, params["layers"])
            logits = jax.nn.log_softmax((norm(x) @ params["head"]).astype(jnp.float32))
            return -jnp.take_along_axis(logits, tokens[..., None], -1).mean()

        @jax.jit
        def train_step(params: Any, tokens: Any) -> Any:
            value, gradient = jax.value_and_grad(loss)(params, tokens)
            return jax.tree.map(lambda p, g: p - 0.01 * g.astype(p.dtype), params, gradient), value

        random = np.random.default_rng(0)

        def weights(*shape: int) -> Any:
            return jnp.asarray(random.standard_normal(shape) / np.sqrt(shape[-2]), jnp.bfloat16)

        params = {
            "embed": weights(J_WORDS, J_HIDDEN),
            "head": weights(J_HIDDEN, J_WORDS),
            "layers": {
                "qkv": weights(J_LAYERS, J_HIDDEN, 3 * J_HIDDEN),
                "out": weights(J_LAYERS, J_HIDDEN, J_HIDDEN),
                "up": weights(J_LAYERS, J_HIDDEN, J_INNER),
                "down": weights(J_LAYERS, J_INNER, J_HIDDEN),
            },
        }
        tokens = jnp.asarray(random.integers(0, J_WORDS, (J_BATCH, J_LENGTH)))
        for _ in range(8):
            params, value = train_step(params, tokens)
        jax.block_until_ready(value)
    with jax.profiler.trace(out / "jax_profile"):
        for _ in range(4):
            params, value = train_step(params, tokens)
        jax.block_until_ready(value)


def jax_flop() -> float:
    """FLOP of the JAX step: forward, recomputed forward and two gradients of each layer, and the head thrice.

    The last product of a layer is not computed again, because no gradient needs its result.
    """
    tokens = J_BATCH * J_LENGTH
    product = 2 * tokens * J_HIDDEN * J_INNER
    layer = 2 * tokens * J_HIDDEN * 4 * J_HIDDEN + 2 * product + 4 * J_BATCH * J_LENGTH**2 * J_HIDDEN
    return J_LAYERS * (4 * layer - product) + 3 * 2 * tokens * J_HIDDEN * J_WORDS


PROGRAMS: dict[str, Callable[[Path], None]] = {
    "limits": limits,
    "eager": eager,
    "checkpoints": checkpoints,
    "compiled": compiled,
    "captured": captured,
    "recorded": recorded,
    "recorded_compiled": recorded_compiled,
    "clocked": clocked,
    "hf": hf,
    "decode": decode,
    "jax": jax_step,
}


def record(out: Path, names: list[str]) -> None:
    """Each program in a process of its own."""
    out.mkdir(parents=True, exist_ok=True)
    for name in names or PROGRAMS:
        began = time.perf_counter()
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        try:
            done = subprocess.run(
                [sys.executable, __file__, "run", out, name], check=False, timeout=TIMEOUT_S, env=environment
            )
            code: int | str = done.returncode
        except subprocess.TimeoutExpired:
            code = "timeout"
        print(f"{name}: exit {code}, {time.perf_counter() - began:.0f} s", flush=True)


class Verdicts:
    """What was compared."""

    def __init__(self) -> None:
        self.wrong = 0

    def judge(self, right: object, text: str) -> None:
        """Prints a comparison, as right or WRONG."""
        self.wrong += not right
        print(f"  {'right' if right else 'WRONG'}: {text}")


MODULES = {"attention": "(?i)attention", "mlp": "(?i)mlp", "head": r"^head$|Linear_21$|^Llama$"}
"""Names of modules in traces and recordings. Products of the head that Inductor padded have no module of their own."""
SHOWN_ALONE = ("recorded", "recorded_compiled")
"""Programs part of which is launched one by one, without shapes."""


def _of_steps(trace: thence.Trace) -> tuple[thence.Trace, int]:
    """The part of a trace that its steps are, and how many."""
    if trace.selection.program:
        return trace, trace.tables.gpu["program"].drop_nulls().n_unique()
    part = trace.typical
    return part, max(part.tables.places["step_row"].drop_nulls().n_unique(), 1)


def _stated(name: str, found: Roofline, verdicts: Verdicts) -> None:
    totals = found.totals
    share = (totals["flop_modelled_ns"] + totals["bytes_only_ns"]) / max(totals["total_ns"], 1)
    print(f"{name}: {found.about()[0]}")
    verdicts.judge(share >= 0.95 or name in SHOWN_ALONE, f"{share:.1%} of the time with FLOP or bytes (at least 95 %)")
    for row in found.reasons.iter_rows(named=True):
        print(f"    {row['code']}: {row['total_ns'] / 1e3:,.0f} us")


def _flop(trace: thence.Trace, expected: float, verdicts: Verdicts, what: str) -> None:
    part, steps = _of_steps(trace)
    found = (part.roofline("kernel").totals["flop"] or 0) / steps  # None: of no kernel, as of a recording that was cut
    verdicts.judge(
        abs(found / expected - 1) <= 0.01, f"{what}: {found / 1e9:,.2f} of {expected / 1e9:,.2f} GFLOP a step"
    )


def _modules(trace: thence.Trace, expected: dict[str, float], verdicts: Verdicts) -> None:
    part, steps = _of_steps(trace)
    rows = part.roofline("module").rows
    for name, flop in expected.items():
        of_module = rows.filter(rows["name"].cast(str).str.contains(MODULES[name]))
        found = float(of_module["flop"].sum()) / steps
        verdicts.judge(abs(found / flop - 1) <= 0.01, f"module {name}: {found / 1e9:,.2f} of {flop / 1e9:,.2f} GFLOP")


def _limits(trace: thence.Trace, verdicts: Verdicts) -> None:
    rows = {str(row["name"]): row for row in trace.roofline("kernel").rows.iter_rows(named=True)}
    peaks = trace.roofline("kernel").peaks[0][2]
    for kernel, row in rows.items():
        print(
            f"    {kernel[:60]:60} {row['tflops'] or 0:8.1f} TFLOP/s {row['gbps'] or 0:8.1f} GB/s "
            f"{row['peak_share'] or 0:6.1%}"
        )
    product = max(row["tflops"] or 0 for name, row in rows.items() if "_tst_" in name) / peaks.tflops["bfloat16"]
    verdicts.judge(0.7 <= product <= 0.9, f"a product of bfloat16 at {product:.1%} of the peak (70 to 90 %)")
    copy = max(row["gbps"] or 0 for name, row in rows.items() if "DtoD" in name) / (peaks.gbps or 1)
    verdicts.judge(0.85 <= copy <= 0.95, f"a copy at {copy:.1%} of the bandwidth (85 to 95 %)")


def _clocked(trace: thence.Trace, out: Path, verdicts: Verdicts) -> None:
    """The clock beside that of nvidia-smi, and the product's shares of the data sheet and of what is attainable."""
    median, most = (float(text) for text in (out / "clocked_cost.txt").read_text().split())
    verdicts.judge(median <= 200, f"a sample of the clock takes {median:.0f} us, at most {most:.0f} us")
    (device,) = trace.meta.devices
    seen = statistics.median(map(float, (out / "clocked_smi.txt").read_text().split()))
    clock = device.clock_mhz or 0
    verdicts.judge(abs(clock / seen - 1) <= 0.05, f"SM clock {clock:.0f} MHz, {seen:.0f} MHz by nvidia-smi")
    found = trace.roofline("kernel")
    row = found.rows.filter(found.rows["flop"].is_not_null()).sort("total_ns").row(-1, named=True)
    # The peaks were measured in bursts of 50 ms; in seconds, the power limit lowers the clock.
    verdicts.judge(
        0.8 <= row["attainable_share"] <= 1.02 and 0.6 <= row["peak_share"] <= 1,
        f"{row['tflops']:.0f} TFLOP/s: {row['peak_share']:.1%} of the roofline, "
        f"{row['attainable_share']:.1%} of what is attainable",
    )
    for text in found.remarks():
        print(f"    {text}")


def _captured(trace: thence.Trace, out: Path, verdicts: Verdicts) -> thence.Trace:
    """The replays with the labels of their capture."""
    alone = trace.roofline("kernel").totals
    verdicts.judge(alone["flop_modelled_ns"] == 0, "without labels no FLOP is known")
    by_eager = trace.label(eager=thence.open(out / "captured_eager.json.gz"))
    _flop(by_eager, sum(llama_flop().values()), verdicts, "captured, by its eager run")
    return trace.label(out / "saved_capture.json")


def check(out: Path, names: list[str]) -> int:
    """Compares; returns the exit code."""
    verdicts = Verdicts()
    for name in names or PROGRAMS:
        found = [path for path in (out / f"{name}.json.gz", out / name) if path.exists()]
        if not found:
            verdicts.judge(right=False, text=f"{name} is missing")
            continue
        trace = thence.open(found[0])
        if name == "jax":
            trace = trace.select(program="jit_train_step", warm_up="first-compiled")
        if name == "captured":
            trace = _captured(trace, out, verdicts)
        _stated(name, _of_steps(trace)[0].roofline("kernel"), verdicts)
        if name == "limits":
            _limits(trace, verdicts)
        if name == "clocked":
            _clocked(trace, out, verdicts)
        if name in EXPECTED:
            _flop(trace, EXPECTED[name](), verdicts, name)
        if name in ("eager", "recorded", "recorded_compiled"):
            _modules(trace, llama_flop(), verdicts)
    print(f"{verdicts.wrong} wrong")
    return 1 if verdicts.wrong else 0


EXPECTED: dict[str, Callable[[], float]] = {
    **dict.fromkeys(
        ("eager", "compiled", "captured", "recorded", "recorded_compiled"), lambda: sum(llama_flop().values())
    ),
    "checkpoints": lambda: sum(llama_flop(recomputed=1).values()),
    "jax": jax_flop,
}


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("what", choices=("record", "check", "run"))
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", choices=[*PROGRAMS, []], default=[])
    given = parser.parse_args()
    if given.what == "record":
        record(given.out, given.names)
    elif given.what == "run":
        PROGRAMS[given.names[0]](given.out)
    else:
        sys.exit(check(given.out, given.names))


if __name__ == "__main__":
    main()
