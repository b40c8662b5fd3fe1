"""Programs that nobody annotated, on a GPU: what knowing modules and lines costs, and whether they are right.

    python tests/gpu/unannotated.py OUT [cost] [truth] [programs] [--repetitions N] [--seconds S]
        [--of training|decode]

cost: a training step and a decode of 12 tokens of a Llama of Hugging Face, interleaved: plain, recorded in several
ways, plain again ...; what each adds beside what torch.profiler adds. A way is timed after it has settled, for as
long that a round of writing lies within: a program that is recorded runs for many steps. The medians of all its calls
and of all plain calls are compared. The pace of a shared machine changes by half from second to second, which is more
than what is looked for: so between calls the same host work without PyTorch is timed, and calls are also compared in
units of the median of the two times before and the two after them. How much calls of one way differ, with and without
that, is printed. What the first calls take is printed apart, as is CPU time, that of thence's thread included.
truth: the same steps recorded, and under torch.profiler with modules and stacks, into OUT: `check` compares them
kernel by kernel where Polars is installed.
programs: recordings of the programs of unannotated_programs.py, in OUT.
check: of OUT, without a GPU: shares of GPU time with a module, a line, a phase; kernels whose module differs.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from support import documented_parser, end, judge

os.environ["TEARDOWN_CUPTI"] = "1"  # torch.profiler gives CUPTI back when a profile ends

import thence

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

HERE = Path(__file__).parent
SETTLING, TIMED = 0.6, 1.0
"""Seconds of a recording before it is timed, and that are timed."""
SHORT = 0.2, 0.4
"""The same of profilers, which keep all records until they end, and of plain calls."""
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
PROFILERS: dict[str, dict[str, Any]] = {"torch.profiler": {}, "torch.profiler, stacks": {"with_stack": True}}
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
            self.model.generate(self.ids, max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0)


def profiler(**options: Any) -> AbstractContextManager[Any]:
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], **options)


PLAIN = "plain"
RARE, EVERY = (*EVENTS, "launches"), 3
"""Ways that nobody is held to: they have their turn every third time."""


class Took(NamedTuple):
    """What calls took."""

    wall: list[float]
    """Ms of each call, the device's work included."""
    paced: list[float]
    """The same, divided by the time of the same host work around it."""
    cpu: float
    """Ms of CPU time of one call, of all threads of the process."""


HOST_WORK = {f"row {number}": [number, str(number), {"half": number / 2}] for number in range(400)}
"""What `pace` writes as JSON: many small objects, as PyTorch's own work on the host has them."""


def pace() -> float:
    """Ms that a fixed piece of host work takes now, in which nothing is called that a recording follows."""
    begin = time.perf_counter()
    json.dumps(HOST_WORK)
    return (time.perf_counter() - begin) * 1e3


def timed(function: Callable[[], None], seconds: float) -> Took:
    """Calls it for so long, once at least, and waits for the device each time."""
    import torch

    torch.cuda.synchronize()
    begin, walls, cpus, paces = time.perf_counter(), [], [], [pace()]
    while not walls or time.perf_counter() - begin < seconds:
        cpu, last = time.process_time(), time.perf_counter()
        function()
        torch.cuda.synchronize()
        walls.append((time.perf_counter() - last) * 1e3)
        cpus.append((time.process_time() - cpu) * 1e3)
        paces.append(pace())
    paced = [wall / statistics.median(paces[max(0, number - 1) : number + 3]) for number, wall in enumerate(walls)]
    return Took(walls, paced, statistics.mean(cpus))


def ways(scratch: Path) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    def recorded(way: str, options: dict[str, Any], number: list[int]) -> AbstractContextManager[Any]:
        number[0] += 1
        os.environ["THENCE_LINES"] = EVENTS.get(way, "")
        return thence.record(scratch / str(number[0]), thence.RecordOptions(**options))

    number = [0]
    found: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        name: (lambda name=name, options=options: recorded(name, options, number)) for name, options in WAYS.items()
    }
    found |= {name: (lambda options=options: profiler(**options)) for name, options in PROFILERS.items()}
    return found


def cost(out: Path, repetitions: int, seconds: float, workload: str | None) -> None:
    """Print what each way adds, in per cent of the plain run."""
    llama = Llama()
    for name, function in (("training", llama.training), ("decode", llama.decode)):
        if workload in {None, name}:
            Cost(name, function, out / "scratch").measure(repetitions, seconds)
    subprocess.run(["rm", "-rf", str(out / "scratch")], check=True)


class Cost:
    """What each way adds to a workload.

    Args:
        name: of the workload.
        function: one call of it.
        scratch: recordings go here.
    """

    def __init__(self, name: str, function: Callable[[], None], scratch: Path) -> None:
        self._name = name
        self._function = function
        self._scratch = scratch
        self._took: dict[str, list[Took]] = {PLAIN: []}
        self._beginning: dict[str, list[float]] = {}

    def measure(self, repetitions: int, seconds: float) -> None:
        """Interleaved, so often, once at least; no way has its turn after so many seconds. Prints."""
        end = time.monotonic() + seconds
        timed(self._function, SETTLING)
        for turn in range(repetitions):
            for way, make in ways(self._scratch).items():
                if turn and (time.monotonic() > end or (way in RARE and turn % EVERY)):
                    continue
                settling, window = SHORT if way in PROFILERS else (SETTLING, TIMED)
                gc.collect()
                with make():
                    first = timed(self._function, settling).wall
                    self._took.setdefault(way, []).append(timed(self._function, window))
                self._beginning.setdefault(way, []).extend(first)
                timed(self._function, 0)
                self._took[PLAIN].append(timed(self._function, SHORT[1]))
        self._report()

    def _report(self) -> None:
        wall, spread = self._middle(PLAIN, "wall")
        paced, paced_spread = self._middle(PLAIN, "paced")
        plain_cpu = statistics.median(took.cpu for took in self._took[PLAIN])
        print(
            f"{self._name}: plain {wall:.2f} ms, CPU {plain_cpu:.2f} ms; quartiles differ by {spread:.0%} of it, "
            f"by pace {paced_spread:.0%}"
        )
        added = {}
        for way in self._beginning:
            by_wall = self._middle(way, "wall")[0] / wall - 1
            by_pace, way_spread = self._middle(way, "paced")
            added[way] = by_wall, by_pace / paced - 1
            cpu = statistics.median(took.cpu for took in self._took[way]) / plain_cpu - 1
            beginning = statistics.median(self._beginning[way]) / wall - 1
            rounds = len(self._took[way])
            calls = sum(len(took.wall) for took in self._took[way])
            print(
                f"  {way:28} {by_wall:+.1%}, by pace {added[way][1]:+.1%} (quartiles {way_spread:.0%}), "
                f"CPU {cpu:+.1%}, at the beginning {beginning:+.1%}, n = {rounds} rounds, {calls} calls",
                flush=True,
            )
        for way, (other, targets) in TARGETS.items():
            by_wall, by_pace = (a / b for a, b in zip(added[way], added[other], strict=True))
            print(f"  {way} / {other}: {by_wall:.2f}, by pace {by_pace:.2f} (at most {targets[self._name]})")

    def _middle(self, way: str, what: str) -> tuple[float, float]:
        """The median of all calls, in ms or by pace, and the distance of their quartiles as a share of it."""
        low, middle, high = statistics.quantiles(
            (value for took in self._took[way] for value in getattr(took, what)), n=4
        )
        return middle, (high - low) / middle


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
    from thence.capture.launcher.launch import run

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
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *command[1:]]
        outcome = run(command, directory, thence.RecordOptions(own=own))
        print(f"{name}: exit code {outcome.code}, {outcome.seconds:.0f} s", flush=True)


def check(out: Path) -> None:
    """What is known of the GPU time, and kernels whose module torch.profiler gives differently."""
    import polars as pl

    for directory in sorted(path for path in out.iterdir() if path.is_dir() and any(path.rglob("recording.json"))):
        trace = thence.open(directory)
        print(f"{directory.name}: {coverage(trace)}")
        other = out / f"{directory.name}.json.gz"
        if other.exists():
            a, b = (modules_in_order(thence.open(path)) for path in (directory, other))
            print(f"  torch.profiler: {a.height} and {b.height} kernels")
            if a.height == b.height:
                both = pl.concat([a, b.rename(lambda name: f"{name}_torch")], how="horizontal")
                agree(both)


def coverage(trace: thence.Trace) -> str:
    """Of the GPU time inside steps: the share that has a line or function, and that has a module or another part.

    Of all GPU time for a program without steps.
    """
    import polars as pl

    rows = trace.tables.gpu.with_columns(trace.tables.places["module", "source", "phase", "step"])
    inside = rows.filter(pl.col("step").is_not_null())
    where = "in steps"
    if not inside.height:
        inside, where = rows, "of a program without steps"
    part = pl.col("phase").cast(pl.String).is_in(["optimizer", "gradient", "input", "forward", "backward", "recompute"])
    kinds = {
        "a line or function": pl.col("source").is_not_null(),
        "a module": pl.col("module").is_not_null(),
        "a module, or is of loss, gradient, optimizer or copies": pl.col("module").is_not_null()
        | part.fill_null(value=False)
        | (pl.col("kind") == "memcpy"),
    }
    total = max(1, inside["duration"].sum())
    shares = {name: inside.filter(known)["duration"].sum() / total for name, known in kinds.items()}
    text = ", ".join(f"{share:.2%} has {name}" for name, share in shares.items())
    return f"{inside.height} of {trace.tables.gpu.height} activities {where}; of their time {text}"


def agree(both: Any) -> None:
    """Whether the two sides' names of modules, which differ in kind, are of the same modules: each for one other.

    torch.profiler says ``LlamaModel_0/LlamaDecoderLayer_1/LlamaMLP_1``, a recording ``model.layers.1.mlp``.
    """
    pairs = both.group_by("module", "module_torch").len().sort("len", descending=True)
    ours = pairs.unique("module", keep="first", maintain_order=True)
    matched = ours.unique("module_torch", keep="first", maintain_order=True)
    wrong = pairs.join(matched, on=["module", "module_torch"], how="anti", nulls_equal=True, maintain_order="left")
    text = f"{matched.height} modules; of another one than torch.profiler's: {wrong['len'].sum()} kernels"
    judge(not wrong.height, text)
    if wrong.height:
        print(wrong.head(20))


def modules_in_order(trace: thence.Trace) -> Any:
    """Name and module of every kernel, in the order in which one stream ran them."""
    rows = trace.tables.gpu.with_columns(module=trace.tables.places["module"].cast(str)).sort("start")
    return rows.filter(rows["kind"] == "kernel").select("name", "module")


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("what", nargs="*", default=["cost", "truth", "programs"])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=300.0, help="that the cost of a workload is measured")
    parser.add_argument("--of", choices=("training", "decode"), help="the workload whose cost is measured, not both")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for what in given.what:
        if what == "cost":
            cost(given.out, given.repetitions, given.seconds, given.of)
        else:
            {"truth": truth, "programs": programs, "check": check}[what](given.out)
    if "check" in given.what:
        end()


if __name__ == "__main__":
    main()
