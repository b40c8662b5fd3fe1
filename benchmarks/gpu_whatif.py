"""What-if predictions against counterfactual runs: the changed program is run, too.

The list of pairs below was fixed before any run. Each program is a step with a loader, six blocks of attention, mlp and
a side stream that both wait for each other through events, an optimizer, and item() at the end or not; a change
makes one of its parts shorter, longer, or none. Programs: limited by the device (gpu), mixed, limited by the host,
overlapped, and a training step of a small GPT-2 of Hugging Face's transformers (of torch.nn, where they are not
installed; under FSDP2 with two processes), forward to optimizer; with two processes (``torchrun --nproc_per_node 2``)
also a late rank and exposed communication. Recording and checking are apart, because the recording machine needs
torch alone::

    python benchmarks/gpu_whatif.py record FOLDER                       # on one GPU, about two minutes
    torchrun --nproc_per_node 2 benchmarks/gpu_whatif.py record FOLDER   # on two
    python benchmarks/gpu_whatif.py check FOLDER

``check`` prints every pair: predicted and measured change of the profiled step, the error as a share of the step, the
error beyond the spread of the repeats, and whether the interval covers what was measured. Then the median and worst
error, the coverage, and how many were refused.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

STEPS, REPEATS = 10, 3
PARTS = ("load", "attention", "mlp", "side", "python", "item", "late")
PROGRAMS: dict[str, dict[str, float]] = {
    "gpu": {
        "load": 500,
        "attention": 200,
        "mlp": 300,
        "side": 350,
        "python": 10,
        "item": 1,
        "late": 0,
    },
    "mixed": {
        "load": 1500,
        "attention": 90,
        "mlp": 60,
        "side": 180,
        "python": 40,
        "item": 0,
        "late": 0,
    },
    "host": {
        "load": 2000,
        "attention": 20,
        "mlp": 20,
        "side": 15,
        "python": 60,
        "item": 1,
        "late": 0,
    },
    "overlap": {
        "load": 200,
        "attention": 250,
        "mlp": 400,
        "side": 380,
        "python": 5,
        "item": 0,
        "late": 0,
    },
}
PROGRAMS_OF_TWO: dict[str, dict[str, float]] = {
    "late": {
        "load": 300,
        "attention": 60,
        "mlp": 80,
        "side": 100,
        "python": 5,
        "item": 1,
        "late": 900,
    },
    "exposed": {
        "load": 300,
        "attention": 60,
        "mlp": 30,
        "side": 250,
        "python": 5,
        "item": 1,
        "late": 0,
    },
}
CHANGES: tuple[tuple[str, float, str, str], ...] = (
    ("attention", 0.0, "free", "label:^attention$"),
    ("attention", 0.5, "scale", "label:^attention$=0.5"),
    ("mlp", 0.0, "free", "label:^mlp$"),
    ("mlp", 2.0, "scale", "label:^mlp$=2"),
    ("side", 0.0, "free", "label:^side$"),
    ("side", 2.0, "scale", "label:^side$=2"),
    ("load", 0.0, "free", "cause:loader"),
    ("item", 0.0, "no-wait", "item"),
    ("none", 1.0, "scale", "label:^attention$=1"),
)
"""Part of the program, what is left of it, and the change asked of thence. none: nothing is changed."""
CHANGES_OF_TWO: tuple[tuple[str, float, str, str], ...] = (
    ("late", 0.0, "on-time", "rank:1"),
    ("load", 0.0, "free", "cause:loader"),
    ("attention", 0.0, "free", "label:^attention$"),
    ("none", 1.0, "scale", "label:^attention$=1"),
)

MODEL = {"load": 3000.0, "item": 1.0}
MODEL_CHANGES: tuple[tuple[str, float, str, str], ...] = (
    ("load", 0.0, "free", "cause:loader"),
    ("load", 0.5, "scale", "cause:loader=0.5"),
    ("item", 0.0, "no-wait", "item"),
    ("none", 1.0, "scale", "cause:loader=1"),
)
MODEL_CHANGES_OF_TWO = (MODEL_CHANGES[0], MODEL_CHANGES[-1])


class Program:
    """The step, on this process's GPU."""

    def __init__(self) -> None:
        import torch

        self.rank, self.world = (
            int(os.environ.get("RANK", "0")),
            int(os.environ.get("WORLD_SIZE", "1")),
        )
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if self.world > 1 and not torch.distributed.is_initialized():
            torch.distributed.init_process_group("nccl")
        self.torch = torch
        self.x = torch.randn(512, 512, device="cuda")
        self.weight = self.x / 50
        self.side = torch.cuda.Stream()
        self.moved = torch.ones(1 << 20, device="cuda")
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(10**6)  # noqa: SLF001 - there is no public one
        begin.record()
        torch.cuda._sleep(10**8)  # noqa: SLF001
        end.record()
        torch.cuda.synchronize()
        self.cycles = 10**8 / begin.elapsed_time(end) / 1e3

    def spin(self, us: float) -> None:
        """Keeps a stream busy."""
        self.torch.cuda._sleep(max(1, int(us * self.cycles)))  # noqa: SLF001

    def step(self, times: dict[str, float], number: int) -> None:
        """One step."""
        torch = self.torch
        from torch.profiler import record_function as named

        main = torch.cuda.current_stream()
        with named(f"ProfilerStep#{number}"):
            with named("load"):
                busy(times["load"])
            if self.rank == 1 and times["late"]:
                with named("late"):
                    busy(times["late"])
            y = self.x
            for _ in range(6):
                with named("attention"):
                    y = y * 1.0 + 1
                    self.spin(times["attention"])
                ready, done = torch.cuda.Event(), torch.cuda.Event()
                ready.record()
                with torch.cuda.stream(self.side):
                    self.side.wait_event(ready)
                    with named("side"):
                        self.spin(times["side"])
                    done.record()
                with named("mlp"):
                    y = y @ self.weight
                    self.spin(times["mlp"])
                    with named("host_part"):
                        busy(times["python"])
                main.wait_event(done)
                if self.world > 1:
                    torch.distributed.all_reduce(self.moved)
            with named("optimizer"):
                for _ in range(10):
                    y = y.add(1)
            if times["item"]:
                y[0, 0].item()

    def run(self, times: dict[str, float]) -> float:
        """Microseconds of a step."""
        self.torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        for number in range(STEPS):
            self.step(times, number)
        self.torch.cuda.synchronize()
        return (time.perf_counter_ns() - begin) / STEPS / 1000

    def profiled(self, times: dict[str, float], path: Path | None = None) -> float:
        """The same under torch.profiler, with waits for events."""
        from torch.profiler import ProfilerActivity, profile

        config = self.torch._C._profiler._ExperimentalConfig  # noqa: SLF001 - there is no public one
        settings = config(enable_cuda_sync_events=True)
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with profile(activities=activities, experimental_config=settings) as profiler:
            took = self.run(times)
        if path is not None:
            profiler.export_chrome_trace(str(path))
        return took


class Model(Program):
    """A training step of a small language model."""

    def __init__(self) -> None:
        super().__init__()
        torch = self.torch
        torch.manual_seed(0)
        self.tokens = torch.randint(0, 1000, (4, 256), device="cuda")
        try:
            from transformers import GPT2Config, GPT2LMHeadModel

            config = GPT2Config(vocab_size=1000, n_positions=256, n_embd=512, n_layer=6, n_head=8)
            self.model = GPT2LMHeadModel(config).cuda()
            self.blocks = list(self.model.transformer.h)
            self.loss = lambda: self.model(self.tokens, labels=self.tokens).loss
        except ImportError:
            layers = [
                torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True) for _ in range(6)
            ]
            self.model = torch.nn.Sequential(
                torch.nn.Embedding(1000, 512), *layers, torch.nn.Linear(512, 1000)
            ).cuda()
            self.blocks = list(self.model)[1:-1]
            entropy = torch.nn.functional.cross_entropy
            self.loss = lambda: entropy(
                self.model(self.tokens).flatten(0, 1), self.tokens.flatten()
            )
        if self.world > 1:
            from torch.distributed.fsdp import fully_shard

            for block in self.blocks:
                fully_shard(block)
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self, times: dict[str, float], number: int) -> None:
        """One step."""
        from torch.profiler import record_function as named

        with named(f"ProfilerStep#{number}"):
            with named("load"):
                busy(times["load"])
            loss = self.loss()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if times["item"]:
                loss.item()


def busy(us: float) -> None:
    """Keeps the thread busy."""
    until = time.perf_counter_ns() + int(us * 1000)
    while time.perf_counter_ns() < until:
        pass


def _pairs(
    program: Program,
    what: tuple[str, dict[str, float], Any],
    folder: Path,
    results: list[dict[str, Any]],
) -> None:
    """Runs one program with and without each of its changes."""
    name, times, changes = what
    program.run(times)
    program.profiled(times)
    suffix = f"_rank{program.rank}" if program.world > 1 else ""
    program.profiled(times, folder / f"{name}{suffix}.json.gz")
    base = [program.profiled(times) for _ in range(REPEATS)]
    for part, left, action, text in changes:
        if part != "none" and not times[part]:
            continue
        changed = times | ({} if part == "none" else {part: times[part] * left})
        after = [program.profiled(changed) for _ in range(REPEATS)]
        pair = {"program": name, "part": part, "left": left, "action": action, "text": text}
        results.append(pair | {"base": base, "after": after})
        if program.rank == 0:
            print(
                name,
                part,
                left,
                [round(us) for us in base],
                [round(us) for us in after],
                flush=True,
            )


def record(folder: Path) -> None:
    """Runs every program with and without every change, and writes a trace of each program."""
    folder.mkdir(parents=True, exist_ok=True)
    two = int(os.environ.get("WORLD_SIZE", "1")) > 1
    results: list[dict[str, Any]] = []
    programs, changes = (PROGRAMS_OF_TWO, CHANGES_OF_TWO) if two else (PROGRAMS, CHANGES)
    program = Program()
    for name, times in programs.items():
        _pairs(program, (name, times, changes), folder, results)
    program = Model()
    _pairs(
        program, ("model", MODEL, MODEL_CHANGES_OF_TWO if two else MODEL_CHANGES), folder, results
    )
    if program.rank == 0:
        (folder / ("runs_of_two.json" if two else "runs.json")).write_text(json.dumps(results))
    if two:
        program.torch.distributed.destroy_process_group()


def check(folder: Path) -> None:
    """Predicts every change from the trace of its program, and compares."""
    import thence
    from thence.errors import ThenceError

    errors, beyond, covered, refused, spread = [], [], [], 0, 0.0
    runs = [run for name in ("runs.json", "runs_of_two.json") if (folder / name).is_file()
            for run in json.loads((folder / name).read_text())]  # fmt: skip
    columns = ("predicted", "measured", "error", "beyond", "spread", "interval")
    print(f"{'program':8} {'change':28}" + "".join(f"{name:>10}" for name in columns))
    for run in runs:
        several = sorted(folder.glob(f"{run['program']}_rank*.json.gz"))
        trace = thence.open(several or folder / f"{run['program']}.json.gz")
        title = f"{run['action']} {run['text']}"
        base, after = statistics.median(run["base"]), statistics.median(run["after"])
        measured = (base - after) / base
        spread = max((max(us) - min(us)) / base for us in (run["base"], run["after"]))
        try:
            rows = trace.what_if(**{run["action"].replace("-", "_"): [run["text"]]}).rows
        except ThenceError as error:
            print(f"{run['program']:8} {title:28} refused: {error}")
            refused += 1
            continue
        row = rows.row(0, named=True)
        if row["gain_share"] is None:
            print(f"{run['program']:8} {title:28} {row['verdict']}")
            refused += 1
            continue
        error = row["gain_share"] - measured
        errors.append(abs(error))
        beyond.append(max(0.0, abs(error) - spread))
        covered.append(row["low_share"] <= measured <= row["high_share"])
        shares = (row["gain_share"], measured, error, beyond[-1], spread)
        print(
            f"{run['program']:8} {title:28}" + "".join(f"{100 * share:+9.1f}%" for share in shares),
            " covers" if covered[-1] else " misses",
        )
    if errors:
        shown = [
            f"{100 * of(values):.1f} %"
            for values in (errors, beyond)
            for of in (statistics.median, max)
        ]
        print(
            f"{len(runs)} pairs, {refused} refused; error of the step: median {shown[0]}, worst {shown[1]}; beyond the "
            f"repeats' spread: median {shown[2]}, worst {shown[3]}; intervals cover "
            f"{100 * sum(covered) / len(covered):.0f} %"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("record", "check"))
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    {"record": record, "check": check}[given.what](given.folder)
