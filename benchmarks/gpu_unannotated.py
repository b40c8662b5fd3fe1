"""Programs that nobody annotated, on a GPU: what knowing modules and lines costs, and whether they are right.

    python benchmarks/gpu_unannotated.py OUT [cost] [truth] [programs] [--repetitions N]

cost: a training step and a decode of 12 tokens of a Llama of Hugging Face, interleaved: plain, recorded in several
ways, plain again ...; medians with quartiles, and what is added beside what torch.profiler adds.
truth: the same steps recorded, and under torch.profiler with modules and stacks, into OUT: `check` compares them
kernel by kernel where Polars is installed.
programs: recordings of the programs of unannotated_programs.py, in OUT.
check: of OUT, without a GPU: shares of GPU time with a module, a line, a phase; kernels whose module differs.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["TEARDOWN_CUPTI"] = "1"  # torch.profiler gives CUPTI back when a profile ends

import thence

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

HERE = Path(__file__).parent
SETTLING, TIMED = 5, 3
KERNELS = {"launches": False, "nvtx": False, "collectives": False, "modules": False, "lines": False}
OWN = ("transformers",)
WAYS: dict[str, dict[str, Any]] = {
    "kernels": KERNELS,
    "kernels, modules": KERNELS | {"modules": True},
    "kernels, modules, lines": KERNELS | {"modules": True, "lines": True, "own": OWN},
    "modules, lines by events": KERNELS | {"modules": True, "lines": True, "own": OWN},
    "launches": KERNELS | {"launches": True},
}
EVENTS = {"modules, lines by events": "events"}
"""Ways in which every line is followed by an event, as where the stack cannot be read: THENCE_LINES."""
PROFILERS: dict[str, dict[str, Any]] = {
    "torch.profiler": {},
    "torch.profiler, stacks": {"with_stack": True},
}
TARGETS = {
    "kernels, modules": ("torch.profiler", {"training": 0.25, "decode": 0.4}),
    "kernels, modules, lines": ("torch.profiler, stacks", {"training": 0.35, "decode": 0.5}),
}


class Llama:
    """The model, and what is measured of it."""

    def __init__(self) -> None:
        import torch

        sys.path.insert(0, str(HERE))
        import unannotated_programs as programs

        self.model = programs.llama()
        self.ids = programs.tokens()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def training(self) -> None:
        self.model(input_ids=self.ids, labels=self.ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def decode(self) -> None:
        import torch

        with torch.no_grad():
            self.model.generate(
                self.ids, max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0
            )


def profiler(**options: Any) -> AbstractContextManager[Any]:
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], **options)


def timed(function: Callable[[], None], times: int) -> float:
    """Ms of one call."""
    import torch

    begin = time.perf_counter()
    for _ in range(times):
        function()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / times * 1e3


def ways(scratch: Path) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    def recorded(
        way: str, options: dict[str, Any], number: list[int]
    ) -> AbstractContextManager[Any]:
        number[0] += 1
        os.environ["THENCE_LINES"] = EVENTS.get(way, "")
        return thence.record(scratch / str(number[0]), thence.RecordOptions(**options))

    number = [0]
    found: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        name: (lambda name=name, options=options: recorded(name, options, number))
        for name, options in WAYS.items()
    }
    found |= {
        name: (lambda options=options: profiler(**options)) for name, options in PROFILERS.items()
    }
    return found


def cost(out: Path, repetitions: int) -> None:
    """Print what each way adds, in per cent of the plain run."""
    llama = Llama()
    for name, function, times in (("training", llama.training, TIMED), ("decode", llama.decode, 1)):
        added: dict[str, list[float]] = {}
        plain = []
        timed(function, SETTLING)
        before = timed(function, times)
        for _ in range(repetitions):
            for way, make in ways(out / "scratch").items():
                gc.collect()
                with make():
                    timed(function, SETTLING if name == "training" else 2)
                    during = timed(function, times)
                timed(function, 1)
                after = timed(function, times)
                added.setdefault(way, []).append(during / ((before + after) / 2) - 1)
                plain.append(after)
                before = after
        report(name, plain, added)
    subprocess.run(["rm", "-rf", str(out / "scratch")], check=True)


def report(name: str, plain: list[float], added: dict[str, list[float]]) -> None:
    print(f"{name}: plain {statistics.median(plain):.2f} ms, n = {len(plain) // len(added)}")
    medians = {way: statistics.median(values) for way, values in added.items()}
    for way, values in added.items():
        low, _, high = statistics.quantiles(values, n=4)
        print(f"  {way:28} +{medians[way]:.1%} ({low:.1%} {high:.1%})", flush=True)
    for way, (other, targets) in TARGETS.items():
        ratio = medians[way] / medians[other]
        print(f"  {way} / {other}: {ratio:.2f} (at most {targets[name]})")


def truth(out: Path) -> None:
    """The same work, once recorded and once under torch.profiler."""
    import torch

    llama = Llama()
    for name, function in (("training", llama.training), ("decode", llama.decode)):
        for _ in range(3):
            function()
        torch.cuda.synchronize()
        options = thence.RecordOptions(own=OWN, collectives=False)
        with thence.record(out / f"truth_{name}", options):
            for _ in range(2):
                function()
            torch.cuda.synchronize()
        with profiler(with_stack=True, with_modules=True, record_shapes=False) as found:
            for _ in range(2):
                function()
            torch.cuda.synchronize()
        found.export_chrome_trace(str(out / f"truth_{name}.json.gz"))
        print(f"truth of {name}: written", flush=True)


def programs(out: Path) -> None:
    """Record every program; those whose packages are missing say so."""
    from thence.launcher.launch import run

    names = subprocess.run(
        [sys.executable, "-c", "import unannotated_programs as p; print(*p.PROGRAMS)"],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    for name in names:
        directory = out / name
        directory.mkdir(parents=True)
        own = OWN if name.startswith("llama") else ()
        script = str(HERE / "unannotated_programs.py")
        command = [sys.executable, script, name]
        if name == "fsdp2":
            import torch

            if torch.cuda.device_count() < 2:
                print("fsdp2: needs two GPUs")
                continue
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nproc-per-node=2",
                *command[1:],
            ]
        outcome = run(command, directory, thence.RecordOptions(own=own))
        print(f"{name}: exit code {outcome.code}, {outcome.seconds:.0f} s", flush=True)


def check(out: Path) -> None:
    """What is known of the GPU time, and kernels whose module torch.profiler gives differently."""
    import polars as pl

    kinds = ("module", "source", "phase", "step")
    for directory in sorted(
        path for path in out.iterdir() if path.is_dir() and any(path.iterdir())
    ):
        trace = thence.open(directory)
        places = trace.places
        total = trace.gpu["duration"].sum()
        known = {
            kind: trace.gpu.filter(places[kind].is_not_null())["duration"].sum() / total
            for kind in kinds
        }
        shares = ", ".join(f"{kind} {share:.1%}" for kind, share in known.items())
        print(f"{directory.name}: {trace.gpu.height} activities; {shares}")
        other = out / f"{directory.name}.json.gz"
        if other.exists():
            a, b = (modules_in_order(thence.open(path)) for path in (directory, other))
            print(f"  torch.profiler: {a.height} and {b.height} kernels")
            if a.height == b.height:
                both = pl.concat([a, b.rename(lambda name: f"{name}_torch")], how="horizontal")
                differ = both.filter(pl.col("module").ne_missing(pl.col("module_torch")))
                print(f"  {differ.height} differ")
                print(
                    differ.group_by("module", "module_torch")
                    .len()
                    .sort("len", descending=True)
                    .head(20)
                )


def modules_in_order(trace: thence.Trace) -> Any:
    """Name and module of every kernel, in the order in which one stream ran them."""
    rows = trace.gpu.with_columns(module=trace.places["module"].cast(str)).sort("start")
    return rows.filter(rows["kind"] == "kernel").select("name", "module")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("what", nargs="*", default=["cost", "truth", "programs"])
    parser.add_argument("--repetitions", type=int, default=15)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for what in given.what:
        if what == "cost":
            cost(given.out, given.repetitions)
        else:
            {"truth": truth, "programs": programs, "check": check}[what](given.out)


if __name__ == "__main__":
    main()
