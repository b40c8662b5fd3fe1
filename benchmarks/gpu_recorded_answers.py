"""Whether each verb answers from a recording what it answers from a torch.profiler trace of the same program.

    python benchmarks/gpu_recorded_answers.py record OUT [--seconds 300]   # on a GPU with torch and transformers
    python benchmarks/gpu_recorded_answers.py check OUT                    # anywhere, with thence's requirements

Programs, none annotated: training of a GPT-2 of transformers with 4 layers (training), the same with 6 ms of Python
a step in the function `augment` (paused), with larger batches (wider), and with batches so small that the host is the
limit (small). Each runs alone, recorded, under torch.profiler, and once under torch.profiler with stacks, in turns,
each run in a process of its own, forked from one that has imported the packages. Every run records a CUDA event at
the end of each step; its own step is the median of the times between them.

``record`` writes OUT/NAME.tar and OUT/results.json.
``check`` prints for each program what the verbs say of both sources, beside the program alone: steps (duration, work),
report (kernels and GPU time a step, verdict, time of each phase), idle (by cause), check, whatif (kernels in half of
their time; without `augment`), flame (its sum) and convert (the trace read again). Then diff of training with others.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tarfile
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from command_line import documented_parser

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import thence

BATCHES = {"training": (8, 256), "paused": (8, 256), "wider": (12, 256), "small": (1, 32)}
"""Of each program: sequences and tokens."""
PAUSE_SECONDS = 0.006
WARM_UP, STEPS, PROFILED, STACKED = 20, 110, 12, 3
"""Steps: before those that count, of a run, and under torch.profiler without stacks and with them."""
WAYS = ("alone", "recorded", "profiled")
MIN_ROUNDS, MOST_KEPT = 2, 3
"""Rounds, and those of which recordings and traces are kept."""
VERBS = ("steps", "report", "idle", "check", "whatif", "flame", "convert")


def augment() -> int:
    """The planted pause: Python for `PAUSE_SECONDS`."""
    end, x = time.perf_counter() + PAUSE_SECONDS, 0
    while time.perf_counter() < end:
        x = (x * 7 + 3) % 1001
    return x


def steps_of(name: str) -> Iterator[None]:
    """Runs a program; yields at the end of each step."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=4, n_embd=768, n_head=12, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = GPT2LMHeadModel(config).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, 50000, BATCHES[name], device="cuda")
    while True:
        if name == "paused":
            augment()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def run(name: str, way: str, to: Path) -> dict[str, Any]:
    """One run of a program in this process."""
    import torch

    count = {"alone": STEPS, "recorded": STEPS, "profiled": WARM_UP + PROFILED, "stacked": WARM_UP + STACKED}[way]
    recording = profiler = None
    torch.cuda.init()
    if way == "recorded":
        import thence

        recording = thence.record(to, thence.RecordOptions(own=(str(Path(__file__)),)))
        recording.start()
    if way in {"profiled", "stacked"}:
        from torch.profiler import ProfilerActivity, profile, schedule

        profiler = profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
            schedule=schedule(wait=WARM_UP - 3, warmup=3, active=count - WARM_UP),
            on_trace_ready=lambda done: done.export_chrome_trace(f"{to}.json.gz"),
            with_stack=way == "stacked",
        )
        profiler.start()
    events = []
    program = steps_of(name)
    for _ in range(count):
        next(program)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        events.append(event)
        if profiler is not None:
            profiler.step()
    torch.cuda.synchronize()
    if recording is not None:
        recording.stop()
    if profiler is not None:
        profiler.stop()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(events[WARM_UP - 1 :])]
    return {"step_ms": statistics.median(times)}


def forked(name: str, way: str, to: Path) -> dict[str, Any]:
    """One run in a child process."""
    result = to.with_name(f"{to.name}.result")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            result.write_text(json.dumps(run(name, way, to)))
            code = 0
        except BaseException:  # noqa: BLE001 - the parent reports it
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    if status or not result.exists():
        return {"error": f"{name} {way} ended with {os.waitstatus_to_exitcode(status)}"}
    found: dict[str, Any] = json.loads(result.read_text())
    result.unlink()
    return found


def record(out: Path, seconds: float) -> None:
    """Runs all programs in turns until the time is over, and keeps what they wrote."""
    for module in ("torch", "transformers.models.gpt2.modeling_gpt2", "thence.capture.session.record"):
        __import__(module)  # once, before the forks
    until = time.monotonic() + seconds
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in BATCHES}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name in BATCHES:
            forked(name, "stacked", folder / f"{name}-stacked")
        began = time.monotonic()
        for number in itertools.count():
            took = (time.monotonic() - began) / max(number, 1)
            if number >= MIN_ROUNDS and time.monotonic() + took > until:
                break
            for name in BATCHES:
                ways = WAYS[number % 3 :] + WAYS[: number % 3]
                results[name].append({way: forked(name, way, folder / f"{name}-{way}-{number}") for way in ways})
                print(f"{name} {number}: {results[name][-1]}", flush=True)
            (out / "results.json").write_text(json.dumps(results))
        for name in BATCHES:
            with tarfile.open(out / f"{name}.tar.xz", "w:xz", preset=1) as archive:
                kept = [f"{name}-{way}-{number}*" for way in WAYS[1:] for number in range(MOST_KEPT)]
                for path in sorted(path for pattern in (f"{name}-stacked*", *kept) for path in folder.glob(pattern)):
                    archive.add(path, arcname=path.name)


class Answers:
    """What the verbs say of one trace.

    Args:
        trace: the trace.
        scratch: for what `convert` writes.
        asks_augment: whether its function `augment` is known and asked for.
    """

    def __init__(self, trace: thence.Trace, scratch: Path, *, asks_augment: bool) -> None:
        self._trace = trace
        self._scratch = scratch
        self._asks_augment = asks_augment

    def every(self) -> dict[str, float | str]:
        """Every answer by its name; times in ms a step."""
        found: dict[str, float | str] = {}
        parts = (self._steps, self._report, self._idle, self._check, self._whatif, self._flame, self._convert)
        for part in parts:
            try:
                found |= part()
            except Exception as error:  # noqa: BLE001 - a refusal is an answer
                found[part.__name__[1:]] = f"{type(error).__name__}: {error}"
        return found

    def _steps(self) -> dict[str, float | str]:
        table = self._trace.steps()
        spread = table.spread.row(0, named=True)
        rows = table.frame.filter(table.frame["left_out"].is_null())
        plain = table.plain.plain.median_ns / 1e6 if table.plain else "none"
        return {
            "steps: typical": spread["steps"],
            "steps: a step": spread["median_ns"] / 1e6,
            "steps: a plain step": plain,
            "steps: busy": float(rows["busy_ns"].median()) / 1e6,  # type: ignore[arg-type]
            "steps: idle": float(rows["idle_ns"].median()) / 1e6,  # type: ignore[arg-type]
        }

    @property
    def _count(self) -> int:
        """Number of typical steps."""
        return int(self._trace.steps().spread["steps"][0])

    def _report(self) -> dict[str, float | str]:
        summary = self._trace.typical.report()
        phases = self._trace.typical.report("phase").rows
        of_phases = {
            f"report: {name}": ns / 1e6 / self._count
            for name, ns in phases.select("name", "total_ns").sort("name").rows()
        }
        return {
            "report: kernels": summary.counts["kernel"] / self._count,
            "report: GPU time": summary.sum_ns / 1e6 / self._count,
            **of_phases,
            "report: verdict": self._trace.headline.verdict.text,
        }

    def _idle(self) -> dict[str, float | str]:
        found = self._trace.typical.idle().to_json()
        causes = {f"idle: {one['cause']}": one["total_ns"] / 1e6 / self._count for one in found["causes"]}
        rows = [(row["total_ns"], one["cause"], row["name"]) for one in found["causes"] for row in one["rows"]]
        _, cause, name = max(rows, default=(0, "", ""))
        return {"idle: all": found["idle_ns"] / 1e6 / self._count, **causes, "idle: first row": f"{cause} {name}"}

    def _check(self) -> dict[str, float | str]:
        soundness = self._trace.check()
        return {"check: sound": str(soundness.sound)}

    def _whatif(self) -> dict[str, float | str]:
        free = ["source:augment"] if self._asks_augment else []
        rows = self._trace.whatif(free=free, scale=["kernel:.=0.5"]).rows
        found: dict[str, float | str] = {}
        for row in rows.iter_rows(named=True):
            said = f"whatif: {row['change']} {row['part']}".rstrip()
            step = row["before_ns"] / 1e6
            found[said] = row["gain_ns"] / 1e6
            found[f"{said}, interval"] = f"{row['low_share'] * step:.3f} to {row['high_share'] * step:.3f}"
        return found

    def _flame(self) -> dict[str, float | str]:
        nodes = self._trace.typical.flame("source", split="phase", idle="exclude").nodes
        return {"flame: sum": float(nodes["self_ns"].sum()) / 1e6 / self._count}

    def _convert(self) -> dict[str, float | str]:
        import thence

        to = self._scratch / "converted.json.gz"
        self._trace.convert(to)
        again, before = thence.open(to).report(), self._trace.report()
        same = (again.counts, again.sum_ns, again.busy_ns) == (before.counts, before.sum_ns, before.busy_ns)
        return {"convert: read again": "the same" if same else f"{again.sum_ns} instead of {before.sum_ns} ns"}


def check(out: Path) -> None:
    """Prints what the verbs say of both sources."""
    import thence

    results = json.loads((out / "results.json").read_text())
    alone = {name: statistics.median(one["alone"]["step_ms"] for one in runs) for name, runs in results.items()}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name, runs in results.items():
            with tarfile.open(out / f"{name}.tar.xz") as archive:
                archive.extractall(folder, filter="data")
            times = {
                way: statistics.median(one[way]["step_ms"] for one in runs if "step_ms" in one[way]) for way in WAYS
            }
            print(f"\n{name}: its own step, ms: " + ", ".join(f"{way} {ms:.3f}" for way, ms in times.items()))
            if name == "paused":
                print(f"without the pause it gains {alone['paused'] - alone['training']:.3f} ms")
            kept = {
                "recorded": sorted(folder.glob(f"{name}-recorded-*")),
                "profiled": sorted(folder.glob(f"{name}-profiled-*.json.gz")),
                "with stacks": [folder / f"{name}-stacked.json.gz"],
            }
            said = {
                source: [
                    Answers(
                        thence.open(path, own=(Path(__file__).name,)),
                        folder,
                        asks_augment=name == "paused" and source != "profiled",
                    ).every()
                    for path in paths
                    if path.exists()
                ]
                for source, paths in kept.items()
            }
            table(said)
        compare(folder, alone)


def table(said: dict[str, list[dict[str, float | str]]]) -> None:
    """Prints a row for each answer: the medians over the runs of each source, or the first text."""
    keys = dict.fromkeys(key for runs in said.values() for answers in runs for key in answers)
    print(f"{'':44}" + "".join(f"{source:>14}" for source in said))
    for key in sorted(keys, key=lambda key: VERBS.index(key.split(":")[0])):
        cells = []
        for runs in said.values():
            values = [answers[key] for answers in runs if key in answers]
            numbers = [value for value in values if isinstance(value, (int, float))]
            cells.append(f"{statistics.median(numbers):.3f}" if numbers else str(values[0]) if values else "-")
        if all(len(cell) < 14 for cell in cells):
            print(f"{key:44}" + "".join(f"{cell:>14}" for cell in cells))
        else:
            print(f"{key}:\n" + "\n".join(f"    {source}: {cell}" for source, cell in zip(said, cells, strict=True)))


def compare(folder: Path, alone: dict[str, float]) -> None:
    """Prints what diff says of each pair of programs, from both sources, beside their steps alone."""
    import thence
    from thence.analysis.diff.answer import compare as compare_runs

    def samples(name: str, way: str) -> list[Any]:
        return [thence.open(path).sample() for path in sorted(folder.glob(f"{name}-{way}-*"))]

    print()
    for name in ("paused", "wider", "small"):
        truth = alone[name] - alone["training"]
        print(f"diff of training with {name}: alone {truth:+.3f} ms a step")
        for way in ("recorded", "profiled"):
            try:
                total = compare_runs(samples("training", way), samples(name, way)).total.to_json()
            except Exception as error:  # noqa: BLE001 - a refusal is an answer
                print(f"    {way}: {error}")
                continue
            change = total["after_ns"] - total["before_ns"]
            print(
                f"    {way}: {change / 1e6:+.3f} ms ({total['low_ns'] / 1e6:+.3f} to {total['high_ns'] / 1e6:+.3f}): "
                f"{total['verdict']}"
            )


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("what", choices=("record", "check"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=300.0, help="time for all runs, about")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    verbs: dict[str, Callable[[], None]] = {
        "record": lambda: record(given.out, given.seconds), "check": lambda: check(given.out)
    }  # fmt: skip
    verbs[given.what]()


if __name__ == "__main__":
    main()
