"""Real runs of one training step for `diff_noise.py`: the same program again and again, and changed in one way.

    python benchmarks/gpu_diff.py record OUT [--runs 40] [--seconds 225] [--only VARIANT]...

Every run is a process of its own that traces 30 steps with torch.profiler, after 8 that it does not trace; a run
of a variant stands between runs of the unchanged program, so that what drifts with time drifts for all. Traces,
OUT/VARIANT/NN.json.gz, are gzipped while the next run goes on; some 40 MB for all. Needs torch alone;
recorded_by_thence also NumPy.

    base                  nothing is changed: what two sides of these differ in is noise
    planted               the work under the label "forward/planted" is 3 % more
    compiled              torch.compile
    attention             another backend of scaled_dot_product_attention
    precision             float32 matrix products without TF32
    item                  loss.item() after every step
    recorded_by_thence    the same program, recorded by `thence.record`: does it cost more than torch.profiler?

It ends, with what it has, when the seconds are over; the variants come early, the last of the base runs late.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from command_line import documented_parser

if __name__ == "__main__":
    OPTIONS = documented_parser(__doc__)
    VERB = OPTIONS.add_subparsers(required=True).add_parser("record")
    VERB.add_argument("out", type=Path)
    VERB.add_argument("--runs", type=int, default=40, help="of the unchanged program")
    VERB.add_argument("--seconds", type=float, default=225)
    VERB.add_argument("--only", action="append", default=[], metavar="VARIANT")
    GIVEN = OPTIONS.parse_args()

import torch
import torch.nn.functional as F  # noqa: N812 - as PyTorch's own documentation names it
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile, record_function, schedule

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS, UNTRACED = 30, 8
LAYERS, WIDTH, HEADS, TOKENS, BATCH = 2, 1024, 16, 1024, 16
PLANTED_ELEMENTS, PLANTED = 100_000_000, 1.03
RUNS = {"planted": 10, "compiled": 3, "attention": 3, "precision": 3, "item": 3, "recorded_by_thence": 5}
"""How often each variant is run."""


class Block(nn.Module):
    """A layer of a transformer, with labels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with record_function("attention"):
            q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, HEADS, -1).unbind(2)
            heads = (part.transpose(1, 2).to(torch.bfloat16) for part in (q, k, v))
            mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(2).to(x.dtype))
        with record_function("mlp"):
            return x + self.down(F.gelu(self.up(self.norm2(x))))


class Program:
    """The training step of one variant."""

    def __init__(self, variant: str) -> None:
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("highest" if variant == "precision" else "high")
        self.variant = variant
        self.model: Any = nn.Sequential(*(Block() for _ in range(LAYERS))).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.inputs = torch.randn(BATCH, TOKENS, WIDTH).pin_memory()
        # More numbers to write to take longer, in one kernel. They are there in every variant: a larger allocation
        # moves all others in memory, which changes the times of other kernels.
        most = torch.ones(int(PLANTED_ELEMENTS * PLANTED), device="cuda")
        self.numbers = most if variant == "planted" else most[:PLANTED_ELEMENTS]
        if variant == "compiled":
            self.model = torch.compile(self.model)
        self.backend = SDPBackend.EFFICIENT_ATTENTION if variant == "attention" else SDPBackend.FLASH_ATTENTION

    def step(self) -> None:
        x = self.inputs.to("cuda", non_blocking=True)
        with record_function("forward"):
            with sdpa_kernel(self.backend):
                loss = self.model(x).square().mean()
            with record_function("planted"):
                self.numbers.add_(1)
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.variant == "item":
            with record_function("log"):
                loss.item()


def traced(program: Program, target: Path) -> None:
    """The steps under torch.profiler, as one gzipped trace."""
    raw = target.with_suffix("")
    wanted = schedule(wait=UNTRACED - 2, warmup=2, active=STEPS, repeat=1)
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
        schedule=wanted,
        on_trace_ready=lambda done: done.export_chrome_trace(str(raw)),
    ) as profiler:
        for _ in range(UNTRACED + STEPS):
            program.step()
            profiler.step()
        torch.cuda.synchronize()


def compress(raw: Path) -> None:
    """A trace in less space: without the arrows from launches to kernels, which say what the correlation ids say."""
    trace = json.loads(raw.read_bytes())
    trace["traceEvents"] = [event for event in trace["traceEvents"] if event.get("cat") != "ac2g"]
    packed = gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), 9)
    raw.with_suffix(".json.gz").write_bytes(packed)
    raw.unlink()


def recorded(program: Program, target: Path) -> None:
    """The steps under thence's own recorder."""
    import thence

    for _ in range(UNTRACED):
        program.step()
    torch.cuda.synchronize()
    with thence.record(target) as recording:
        for _ in range(STEPS):
            program.step()
            recording.step()


def run(variant: str, target: Path) -> None:
    program = Program(variant)
    if variant == "recorded_by_thence":
        recorded(program, target)
    else:
        traced(program, target)


def begun(work: Callable[[], None]) -> int:
    """The id of a fork that does the work: torch is loaded already, CUDA is not."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001 - a process of its own: what went wrong is told, and it ends
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return child


def succeeded(child: int) -> bool:
    """Whether a fork did its work; waits for it."""
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


def order(runs: int) -> list[tuple[str, int]]:
    """Which run comes when: one of a variant after every base run until there are no more."""
    waiting = [(variant, n) for n in range(max(RUNS.values())) for variant in RUNS if n < RUNS[variant]]
    result = []
    for number in range(runs):
        result.append(("base", number))
        result += waiting[:1]
        del waiting[:1]
    return [*result, *waiting]


def record(out: Path, runs: int, seconds: float, only: tuple[str, ...]) -> None:
    begin = time.monotonic()
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(out / "inductor"))
    failed: set[str] = set()
    log, packing = [], []
    for variant, number in order(runs):
        if variant in failed or (only and variant not in only):
            continue
        if time.monotonic() - begin > seconds:
            print(f"the {seconds:.0f} seconds are over: {variant} {number} and what follows is left out")
            break
        ending = "" if variant == "recorded_by_thence" else ".json.gz"
        target = out / variant / f"{number:02}{ending}"
        if target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        if not succeeded(begun(lambda v=variant, t=target: run(v, t))):  # type: ignore[misc]
            failed.add(variant)
            print(f"{variant} {number}: FAILED, no more runs of it")
            continue
        if ending:  # beside the next run, which has the GPU to itself
            packing.append(begun(lambda t=target: compress(t.with_suffix(""))))  # type: ignore[misc]
        log.append({"variant": variant, "number": number, "seconds": time.monotonic() - began})
        print(f"{variant} {number}: {log[-1]['seconds']:.1f} s", flush=True)
    unpacked = sum(not succeeded(child) for child in packing)
    if unpacked:
        print(f"{unpacked} traces could not be compressed")
    shutil.rmtree(out / "inductor", ignore_errors=True)
    (out / "runs.json").write_text(json.dumps({"torch": torch.__version__, "runs": log}, indent=1))
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    print(f"{len(log)} runs in {time.monotonic() - begin:.0f} s, {size / 1e6:.1f} MB")


def main() -> None:
    unknown = {*GIVEN.only} - {"base", *RUNS}
    if unknown:
        OPTIONS.error(f"--only: no variant {', '.join(sorted(unknown))}; see above for the names")
    record(GIVEN.out, GIVEN.runs, GIVEN.seconds, tuple(GIVEN.only))


if __name__ == "__main__":
    main()
