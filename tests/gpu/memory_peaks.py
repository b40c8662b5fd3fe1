"""Whether `thence memory` accounts for the memory of programs on a GPU as PyTorch's and XLA's own figures do.

    python tests/gpu/memory_peaks.py record OUT [NAME ...] [--together 6]   # on a GPU with torch and jax
    python tests/gpu/memory_peaks.py check OUT                              # anywhere, with thence's requirements

Programs, each in a process of its own: training steps of a GPT recorded from before the model is made (whole), after
it (eager), without stacks (plain), with every block in a checkpoint (checkpoints), compiled (compiled), captured in a
CUDA graph and replayed (captured); a leak of a known line and size (leak); an allocation that fails (oom);
fragmentation of known sizes (fragments); FSDP2 on two GPUs, or on one (fsdp); many small steps with a large memory
history (large); a training step of JAX (jax); three programs without and with one module in a checkpoint
(recompute_gpt, recompute_mlp, recompute_conv).

``record`` writes into OUT for each program a trace of torch.profiler with memory events (``.json.gz``) or an xplane,
PyTorch's memory snapshot (``.pickle.gz``), and what PyTorch or XLA itself says (``.truth.json``). ``check`` prints a
table that compares `thence memory` with the latter; what differs is WRONG, and the exit code is 1 then.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from support import documented_parser, warm_up

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS, HIDDEN, HEADS, WORDS, BATCH, LENGTH = 3, 512, 8, 4099, 8, 257
STEPS, LARGE_STEPS = 2, 400
LEAKED_FLOATS = 777_777
FRAGMENT_BYTES, FRAGMENTS = 24 << 20, 8
TIMED_STEPS = 30
TIMEOUT_S = 150
HISTORY = 200_000


def gpt(torch: Any, checkpoints: tuple[int, ...]) -> Any:  # noqa: C901 - a model is made of classes
    """A GPT in bfloat16, without any package but torch.

    Args:
        torch: the module.
        checkpoints: blocks that are recomputed in the backward pass.
    """
    functional = torch.nn.functional

    class Attention(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = torch.nn.Linear(HIDDEN, 3 * HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x: Any) -> Any:
            q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(y.transpose(1, 2).flatten(2))

    class Mlp(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(HIDDEN, 4 * HIDDEN), torch.nn.Linear(4 * HIDDEN, HIDDEN)

        def forward(self, x: Any) -> Any:
            return self.down(functional.gelu(self.up(x)))

    class Block(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.attention = torch.nn.LayerNorm(HIDDEN), Attention()
            self.norm2, self.mlp = torch.nn.LayerNorm(HIDDEN), Mlp()

        def forward(self, x: Any) -> Any:
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))

    class Gpt(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(WORDS, HIDDEN)
            self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm, self.head = torch.nn.LayerNorm(HIDDEN), torch.nn.Linear(HIDDEN, WORDS, bias=False)
            self.held: dict[str, int] = {}

        def allocated(self) -> int:
            return 0 if torch.compiler.is_compiling() else torch.cuda.memory_allocated()

        def forward(self, words: Any) -> Any:
            x = self.embed(words)
            for number, block in enumerate(self.blocks):
                before = self.allocated()
                if number in checkpoints:
                    x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
                else:
                    x = block(x)
                if not torch.compiler.is_compiling():
                    self.held[str(number)] = self.allocated() - before
            if not torch.compiler.is_compiling():
                with torch.profiler.record_function("after the blocks"):
                    pass
            return self.head(self.norm(x))

    return Gpt().to("cuda", torch.bfloat16)


class Training:
    """Training steps of the GPT in bfloat16 with AdamW."""

    def __init__(self, *, checkpoints: tuple[int, ...] = (), compiled: bool = False) -> None:
        import torch
        import torch.utils.checkpoint

        torch.manual_seed(0)
        self.torch = torch
        self.model = gpt(torch, checkpoints)
        self.called = torch.compile(self.model) if compiled else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True, capturable=True)
        self.words = torch.randint(0, WORDS, (BATCH, LENGTH), device="cuda")

    def __call__(self) -> None:
        logits = self.called(self.words)
        loss = self.torch.nn.functional.cross_entropy(logits.view(-1, WORDS).float(), self.words.view(-1))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Recorded:
    """A part of a program under torch.profiler, and with PyTorch's memory history; writes what PyTorch itself says.

    Args:
        path: of the files, without an ending.
        stacks: whether Python frames and modules are recorded.
        history: whether the memory history is kept and written.
    """

    def __init__(self, path: Path, *, stacks: bool = True, history: bool = True) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        self.torch, self.path, self.history = torch, path, history
        self.facts: dict[str, Any] = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
        self.profiler = profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
            record_shapes=True,
            profile_memory=True,
            with_stack=stacks,
            with_modules=stacks,
        )

    def __enter__(self) -> Self:
        cuda = self.torch.cuda
        cuda.synchronize()
        if self.history:
            cuda.memory._record_memory_history(max_entries=HISTORY)
        self.profiler.start()
        cuda.reset_peak_memory_stats()
        self.facts["allocated_at_begin"] = cuda.memory_allocated()
        self.facts["reserved_at_begin"] = cuda.memory_reserved()
        return self

    def step(self) -> None:
        """Marks the end of a step."""
        self.torch.cuda.synchronize()
        self.facts.setdefault("allocated_after_steps", []).append(self.torch.cuda.memory_allocated())
        self.profiler.step()

    def __exit__(self, *_: object) -> None:
        cuda = self.torch.cuda
        cuda.synchronize()
        free, total = cuda.mem_get_info()
        self.facts |= {
            "max_memory_allocated": cuda.max_memory_allocated(),
            "max_memory_reserved": cuda.max_memory_reserved(),
            "allocated_at_end": cuda.memory_allocated(),
            "reserved_at_end": cuda.memory_reserved(),
            "device_used": total - free,
            "memory_stats": dict(cuda.memory_stats()),
        }
        self.profiler.stop()
        if self.history:
            pickle = Path(f"{self.path}.pickle")
            cuda.memory._dump_snapshot(str(pickle))
            cuda.memory._record_memory_history(enabled=None)
            compress(pickle)
        self.profiler.export_chrome_trace(f"{self.path}.json.gz")
        write_truth(self.path, self.facts)


def compress(path: Path) -> None:
    """Replaces a file by its compressed form."""
    with path.open("rb") as source, gzip.open(f"{path}.gz", "wb", compresslevel=6) as target:
        shutil.copyfileobj(source, target)
    path.unlink()


def write_truth(path: Path, facts: dict[str, Any]) -> None:
    """Writes what the framework itself says."""
    Path(f"{path}.truth.json").write_text(json.dumps(facts, indent=1))


def line_of(mark: str) -> int:
    """The line of this file that ends with a comment."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))


def steps_of(path: Path, training: Callable[[], Training], *, before: int = 2, stacks: bool = True) -> None:
    """Records some training steps, after some others."""
    step = training()
    for _ in range(before):
        step()
    with Recorded(path, stacks=stacks) as recorded:
        for _ in range(STEPS):
            step()
            recorded.step()
        recorded.facts["held_by_blocks"] = step.model.held


def whole(out: Path) -> None:
    """From before the model is made."""
    import torch

    torch.cuda.init()
    with Recorded(out / "whole") as recorded:
        step = Training()
        recorded.facts["parameters"] = torch.cuda.memory_allocated()
        for _ in range(STEPS + 1):
            step()
            recorded.step()


def eager(out: Path) -> None:
    """Launched one by one."""
    steps_of(out / "eager", Training)


def plain(out: Path) -> None:
    """Without stacks, as many users record."""
    steps_of(out / "plain", Training, stacks=False)


def checkpoints(out: Path) -> None:
    """Every block is recomputed."""
    steps_of(out / "checkpoints", lambda: Training(checkpoints=tuple(range(LAYERS))))


def compiled(out: Path) -> None:
    """Compiled by Inductor."""
    steps_of(out / "compiled", lambda: Training(compiled=True), before=3)


def captured(out: Path) -> None:
    """Captured in a CUDA graph, whose private pool stays, and replayed."""
    import torch

    step = Training()
    warm_up(torch, step)
    with Recorded(out / "captured") as recorded:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        recorded.step()
        for _ in range(STEPS):
            graph.replay()
            recorded.step()


def leak(out: Path) -> None:
    """Each step keeps one tensor more."""
    import torch

    step, kept = Training(), []

    def remember() -> None:
        kept.append(torch.empty(LEAKED_FLOATS, device="cuda"))  # leak

    for _ in range(2):
        step()
    with Recorded(out / "leak") as recorded:
        before = torch.cuda.memory_allocated()
        for _ in range(5):
            step()
            remember()
            recorded.step()
        leaked = torch.cuda.memory_allocated() - before
        recorded.facts |= {"line": line_of("leak"), "leaked_per_step": leaked // 5, "leaked": leaked}


def oom(out: Path) -> None:
    """An allocation that does not fit, which the program survives."""
    import torch

    step = Training()
    for _ in range(2):
        step()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(2 * torch.cuda.memory_reserved() / total)

    def ask() -> None:
        asked = 1_234_567_890
        try:
            torch.empty(asked, dtype=torch.uint8, device="cuda")  # does not fit
        except torch.OutOfMemoryError as error:
            recorded.facts |= {"asked": asked, "line": line_of("does not fit"), "message": str(error)}
            recorded.facts["free_at_failure"] = torch.cuda.mem_get_info()[0]

    with Recorded(out / "oom") as recorded:
        step()
        ask()
        recorded.step()


def fragments(out: Path) -> None:
    """Free memory in blocks that are too small for what is asked next."""
    import torch

    with Recorded(out / "fragments") as recorded:
        whole_block = torch.empty(FRAGMENTS * FRAGMENT_BYTES, dtype=torch.uint8, device="cuda")
        del whole_block
        blocks = [torch.empty(FRAGMENT_BYTES, dtype=torch.uint8, device="cuda") for _ in range(FRAGMENTS)]
        del blocks[::2]
        stats = torch.cuda.memory_stats()
        recorded.facts["inactive_split"] = stats["inactive_split_bytes.all.current"]
        recorded.facts["largest_inactive"] = FRAGMENT_BYTES
        recorded.step()
        larger = torch.empty(2 * FRAGMENT_BYTES, dtype=torch.uint8, device="cuda")  # does not fit between
        recorded.facts |= {
            "reserved_with_larger": torch.cuda.memory_reserved(),
            "allocated_with_larger": torch.cuda.memory_allocated(),
        }
        recorded.step()
        del larger


def large(out: Path) -> None:
    """A long memory history, for readers of snapshots."""
    import torch

    step = Training()
    step()
    cuda = torch.cuda
    cuda.memory._record_memory_history(max_entries=HISTORY)
    cuda.reset_peak_memory_stats()
    for _ in range(LARGE_STEPS):
        step()
    cuda.synchronize()
    pickle = out / "large.pickle"
    cuda.memory._dump_snapshot(str(pickle))
    facts = {
        "max_memory_allocated": cuda.max_memory_allocated(),
        "allocated_at_end": cuda.memory_allocated(),
        "reserved_at_end": cuda.memory_reserved(),
        "memory_stats": dict(cuda.memory_stats()),
        "bytes": pickle.stat().st_size,
    }
    compress(pickle)
    write_truth(out / "large", facts)


def fsdp(out: Path) -> None:
    """FSDP2 on two GPUs, or on one."""
    import torch

    ranks = min(2, torch.cuda.device_count())
    torch.multiprocessing.spawn(fsdp_rank, (str(out), ranks), nprocs=ranks)


def sharded_training() -> Training:
    """The training of this process's rank with FSDP2."""
    import torch
    from torch.distributed.fsdp import fully_shard

    step = Training()
    for block in step.model.blocks:
        fully_shard(block)
    fully_shard(step.model)
    step.optimizer = torch.optim.AdamW(step.model.parameters(), lr=1e-4)
    return step


def fsdp_rank(rank: int, out: str, ranks: int) -> None:
    """One of the processes; rank 1 holds one tensor more."""
    import torch

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577", "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
    step = sharded_training()
    kept = []
    for _ in range(2):
        step()
    with Recorded(Path(out) / f"fsdp_rank{rank}") as recorded:
        for _ in range(STEPS):
            if rank:
                kept.append(torch.empty(LEAKED_FLOATS, device="cuda"))  # only on rank 1
            step()
            recorded.step()
        recorded.facts["line"] = line_of("only on rank 1")
    torch.distributed.destroy_process_group()


# ---- Three programs with one module that is recomputed or not


def recompute_gpt(out: Path) -> None:
    """The second block of the GPT."""
    compared(out / "recompute_gpt", "blocks.1", lambda again: Training(checkpoints=(1,) if again else ()))


class _Sequence:
    """Training steps of modules in a row, of which one may be recomputed."""

    def __init__(self, torch: Any, modules: list[Any], inputs: Any, recomputed: int | None) -> None:
        import torch.utils.checkpoint

        torch.manual_seed(0)

        class Model(torch.nn.Module):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.parts = torch.nn.ModuleList(modules)

            def forward(self, x: Any) -> Any:
                for number, part in enumerate(self.parts):
                    if number == recomputed:
                        x = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False)
                    else:
                        x = part(x)
                return x

        self.model = Model().cuda()
        self.inputs = inputs
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def __call__(self) -> None:
        self.model(self.inputs).float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def recompute_mlp(out: Path) -> None:
    """The wide part of a perceptron."""
    import torch

    def part(inner: int) -> Any:
        nn = torch.nn
        layers = [nn.LayerNorm(1024), nn.Linear(1024, inner), nn.GELU(), nn.Dropout(0.1), nn.Linear(inner, 1024)]
        return nn.Sequential(*layers)

    def make(again: bool) -> _Sequence:
        inputs = torch.randn(4096, 1024, device="cuda")
        return _Sequence(torch, [part(2048), part(8192), part(2048)], inputs, 1 if again else None)

    compared(out / "recompute_mlp", "parts.1", make)


def recompute_conv(out: Path) -> None:
    """The first stage of a convolutional network."""
    import torch

    def stage(before: int, after: int) -> Any:
        nn = torch.nn
        layers = [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.Conv2d(after, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*layers)

    def make(again: bool) -> _Sequence:
        inputs = torch.randn(32, 3, 128, 128, device="cuda")
        return _Sequence(torch, [stage(3, 32), stage(32, 64), stage(64, 128)], inputs, 1 if again else None)

    compared(out / "recompute_conv", "parts.1", make)


def compared(path: Path, module: str, make: Callable[[bool], Any]) -> None:
    """Peak and time of a step without and with a module in a checkpoint, and a trace of the former."""
    import torch

    cuda = torch.cuda
    facts: dict[str, Any] = {"module": module}
    for again in (False, True):
        step = make(again)
        for _ in range(5):
            step()
        cuda.synchronize()
        cuda.reset_peak_memory_stats()
        began = cuda.memory_allocated()
        step()
        cuda.synchronize()
        name = "recomputed" if again else "plain"
        facts[name] = {"peak": cuda.max_memory_allocated(), "before": began}
        times = []
        for _ in range(TIMED_STEPS):
            events = [cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            step()
            events[1].record()
            cuda.synchronize()
            times.append(events[0].elapsed_time(events[1]))
        facts[name]["step_ms"] = sorted(times)[len(times) // 2]
        if not again:
            with Recorded(path, history=False) as recorded:
                for _ in range(STEPS):
                    step()
                    recorded.step()
        del step
        torch.cuda.empty_cache()
    recorded.facts |= facts
    write_truth(path, recorded.facts)


# ---- JAX


def jax(out: Path) -> None:  # noqa: C901 - a program of functions
    """A training step of JAX, with what XLA says of the compiled program."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".5")
    import jax
    import jax.numpy as jnp

    def block(weights: Any, x: Any) -> Any:
        with jax.named_scope("attention"):
            q, k, v = jnp.moveaxis((x @ weights["qkv"]).reshape(*x.shape[:2], 3, HEADS, -1), 2, 0)
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)  # the scores
            x += jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape) @ weights["out"]
        with jax.named_scope("mlp"):
            return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"]

    def loss(weights: Any, words: Any) -> Any:
        x = weights["embed"][words]
        for layer in range(LAYERS):
            with jax.named_scope(f"block{layer}"):
                x = block(weights[f"block{layer}"], x)
        logits = jax.nn.log_softmax((x @ weights["head"]).astype(jnp.float32))
        return -jnp.take_along_axis(logits, words[..., None], -1).mean()

    @jax.jit
    def train_step(weights: Any, words: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(weights, words)
        return jax.tree.map(lambda w, g: w - 0.01 * g.astype(w.dtype), weights, gradient), value

    keys = iter(jax.random.split(jax.random.key(0), 64))

    def weight(*shape: int) -> Any:
        return (jax.random.normal(next(keys), shape) / shape[0] ** 0.5).astype(jnp.bfloat16)

    sizes = {
        "qkv": (HIDDEN, 3 * HIDDEN),
        "out": (HIDDEN,) * 2,
        "up": (HIDDEN, 4 * HIDDEN),
        "down": (4 * HIDDEN, HIDDEN),
    }
    weights = {f"block{i}": {name: weight(*shape) for name, shape in sizes.items()} for i in range(LAYERS)}
    weights |= {"embed": weight(WORDS, HIDDEN), "head": weight(HIDDEN, WORDS)}
    words = jax.random.randint(next(keys), (BATCH, LENGTH - 1), 0, WORDS)
    compiled_step = train_step.lower(weights, words).compile()
    analysis = compiled_step.memory_analysis()
    facts: dict[str, Any] = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    for name in dir(analysis):
        value = getattr(analysis, name)
        if isinstance(value, int) and not name.startswith("_"):
            facts[name] = value
        if isinstance(value, bytes) and value:
            Path(out / f"jax.{name}.pb.gz").write_bytes(gzip.compress(value))
    for _ in range(2):
        weights, value = train_step(weights, words)
    jax.block_until_ready(value)
    facts["before"] = jax.devices()[0].memory_stats()
    folder = out / "jax_profile"
    jax.profiler.start_trace(str(folder))
    for number in range(3):
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            weights, value = train_step(weights, words)
            jax.block_until_ready(value)
    jax.profiler.stop_trace()
    facts["after"] = jax.devices()[0].memory_stats()
    for found in folder.rglob("*.xplane.pb"):
        Path(out / "jax.xplane.pb.gz").write_bytes(gzip.compress(found.read_bytes()))
    shutil.rmtree(folder)
    facts["line"] = line_of("the scores")
    write_truth(out / "jax", facts)


PROGRAMS: dict[str, Callable[[Path], None]] = {
    function.__name__: function
    for function in (
        whole, eager, plain, checkpoints, compiled, captured, leak, oom, fragments, large, fsdp, jax, recompute_gpt,
        recompute_mlp, recompute_conv,
    )
}  # fmt: skip


def record(out: Path, names: list[str], together: int) -> None:
    """Runs each program in a process of its own, some at a time; what fails is reported, and the others run."""
    out.mkdir(parents=True, exist_ok=True)

    def run(name: str) -> None:
        began = time.monotonic()
        command = [sys.executable, __file__, "one", str(out), name]
        with (out / f"{name}.log").open("w") as log:
            try:
                code = subprocess.run(command, timeout=TIMEOUT_S, stdout=log, stderr=log, check=False).returncode
            except subprocess.TimeoutExpired:
                code = -1
        print(f"{name}: {'ok' if code == 0 else f'FAILED ({code})'}, {time.monotonic() - began:.0f} s", flush=True)

    with ThreadPoolExecutor(together) as pool:
        list(pool.map(run, names or [name for name in PROGRAMS if name != "large"]))


def main() -> int:
    """See the module."""
    parser = documented_parser(__doc__)
    parser.add_argument("action", choices=("record", "one", "check"))
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all but large")
    parser.add_argument("--together", type=int, default=1, help="programs that run at the same time")
    arguments = parser.parse_args()
    if arguments.action == "check":
        from memory_checks import check

        return check(arguments.out)
    if arguments.action == "one":
        PROGRAMS[arguments.names[0]](arguments.out)
        return 0
    record(arguments.out, arguments.names, arguments.together)
    return 0


if __name__ == "__main__":
    sys.exit(main())
