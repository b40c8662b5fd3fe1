"""Whether recordings state the step that the program has without them: programs alone and recorded in alternation.

    python benchmarks/gpu_plain_step.py record OUT [--seconds 75]    # on a GPU with torch; so long for each program
    python benchmarks/gpu_plain_step.py check OUT                    # anywhere, with thence's requirements

Programs: training of a GPT-2 (transformers), limited by the host, and of a larger one, limited by the GPU; of a ResNet
(Lightning); a training step whose forward and backward are CUDA graphs, which are never detached and so have no plain
step; decoding with a static cache (transformers), a compiled training step, and a training loop that waits for its data
loader. Each run is a process of its own, forked from one that has imported the packages. The program itself
records a CUDA event at the end of each step, in all runs alike; its step is the median of the times between them, from
step 30 on. In turns it runs alone, recorded, and once under torch.profiler (not with --pairs-only).

``record`` writes OUT/results.json, and for each program OUT/NAME.tar.gz, its first recording without host ranges.
``check`` prints for each pair of runs the median that the program measured alone, the interval that thence states
of the recorded run, whether the one is inside of the other, and what recording and torch.profiler add to a step;
and for each program the verdict of the recording beside the share of the GPU's idle time in the step that the program
has alone.
Processes differ from each other: the spread of the medians of runs alone is printed beside.
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

    Step = Callable[[], None]

PROGRAMS = ("gpt2", "large", "resnet", "graphs", "decode", "compiled", "loader")
DEVICE = "cuda"
STEPS = 220
FIRST = 30
PROFILED_STEPS = 30
MIN_ROUNDS = 2


def steps_of(name: str) -> Iterator[None]:
    """Runs a program; yields at the end of each step."""
    import torch

    torch.manual_seed(0)
    torch.cuda.init()
    yield from globals()[f"run_{name}"](torch)


def gpt2_model(torch: Any, **more: Any) -> Any:
    """A GPT-2 of transformers with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=12, n_embd=768, n_head=12, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **more)
    return GPT2LMHeadModel(config).to(DEVICE, torch.bfloat16)


def trained(model: Any, optimizer: Any, ids: Any) -> Iterator[None]:
    """Steps of training on the same words."""
    while True:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def run_gpt2(torch: Any) -> Iterator[None]:
    """Training, launched one by one."""
    model = gpt2_model(torch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, 50000, (8, 256), device=DEVICE)
    yield from trained(model, optimizer, ids)


def run_large(torch: Any) -> Iterator[None]:
    """The same with so many tokens that the GPU is the limit."""
    model = gpt2_model(torch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, 50000, (16, 512), device=DEVICE)
    yield from trained(model, optimizer, ids)


def run_resnet(torch: Any) -> Iterator[None]:
    """A ResNet of torchvision in a loop of Lightning; in a plain loop without Lightning."""
    import torchvision

    model = torchvision.models.resnet18().to(DEVICE)
    x = torch.randn(32, 3, 160, 160)
    y = torch.randint(0, 1000, (32,))
    try:
        import pytorch_lightning as lightning
    except ImportError:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        x, y = x.to(DEVICE), y.to(DEVICE)
        while True:
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield

    class Training(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _number: int) -> Any:
            return torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    class Steps(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, *_: Any) -> None:
            CLOCK.tick()

    batches = [(x, y)] * (STEPS + 2)
    loader = torch.utils.data.DataLoader(batches, batch_size=None, pin_memory=DEVICE == "cuda")  # type: ignore[arg-type]
    lightning.Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[Steps()], accelerator="gpu" if DEVICE == "cuda" else "cpu", devices=1,
    ).fit(Training(), loader)  # fmt: skip


def run_graphs(torch: Any) -> Iterator[None]:
    """Forward and backward as CUDA graphs, the optimizer launched one by one."""
    layers = [torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.GELU()) for _ in range(16)]
    model = torch.nn.Sequential(*layers).to(DEVICE)
    x = torch.randn(512, 1024, device=DEVICE)
    model = torch.cuda.make_graphed_callables(model, (x,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    while True:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def run_decode(torch: Any) -> Iterator[None]:
    """Decoding, a token a step, with a static cache."""
    from transformers import StaticCache

    model = gpt2_model(torch).eval()
    cache = StaticCache(config=model.config, max_cache_len=STEPS + 8)
    token = torch.randint(0, 50000, (4, 1), device=DEVICE)
    with torch.no_grad():
        for number in range(STEPS + 1):
            place = torch.tensor([number], device=DEVICE)
            out = model(input_ids=token, past_key_values=cache, cache_position=place)
            token = out.logits[:, -1:].argmax(-1)
            yield


def run_compiled(torch: Any) -> Iterator[None]:
    """A training step compiled by Inductor."""
    layers = [
        torch.nn.Sequential(torch.nn.LayerNorm(1024), torch.nn.Linear(1024, 1024), torch.nn.GELU()) for _ in range(12)
    ]
    model = torch.compile(torch.nn.Sequential(*layers).to(DEVICE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(4096, 1024, device=DEVICE)
    while True:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


class Slow:
    """A data set whose items take 1 ms."""

    def __len__(self) -> int:
        return 64 * (STEPS + 10)

    def __getitem__(self, number: int) -> Any:
        import torch

        time.sleep(0.001)
        return torch.full((256,), float(number % 7))


def run_loader(torch: Any) -> Iterator[None]:
    """A loop that waits for its data loader."""
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8))).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loader = torch.utils.data.DataLoader(Slow(), batch_size=16, num_workers=2, pin_memory=True)  # type: ignore[arg-type, var-annotated]
    for batch in loader:
        model(batch.to(DEVICE, non_blocking=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


class Enough(Exception):
    """Ends a program after `STEPS` steps."""


class Clock:
    """A CUDA event at the end of each step."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.last = STEPS
        self.then: dict[int, Callable[[], None]] = {}

    def tick(self) -> None:
        """A step has ended."""
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.events.append((event, time.perf_counter_ns()))
        self.then.get(len(self.events), lambda: None)()
        if len(self.events) > self.last:
            raise Enough

    def durations(self) -> tuple[list[float], float]:
        """Milliseconds of each step by the events, from step `FIRST` on; and of a step on the host, on the average."""
        import torch

        torch.cuda.synchronize()
        kept = self.events[FIRST:]
        times = [a.elapsed_time(b) for (a, _), (b, _) in itertools.pairwise(kept)]
        return times, (kept[-1][1] - kept[0][1]) / 1e6 / (len(kept) - 1)


CLOCK = Clock()


def run(name: str, way: str, folder: Path) -> dict[str, Any]:
    """One run of a program in this process: alone, recorded or profiled."""
    import torch

    recording = profiler = None
    torch.cuda.init()
    if way == "recorded":
        import thence

        recording = thence.record(folder, thence.RecordOptions(own=(str(Path(__file__)),)))
        recording.start()
    if way == "profiled":
        from torch.profiler import ProfilerActivity, profile

        CLOCK.last = FIRST + 3 * PROFILED_STEPS
        profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        CLOCK.then[FIRST + PROFILED_STEPS] = profiler.start
    try:
        for _ in steps_of(name):
            CLOCK.tick()
    except Enough:
        pass
    times, host = CLOCK.durations()
    found: dict[str, Any] = {"steps_ms": times, "host_ms": host}
    if recording is not None:
        recording.stop()
        found |= recorded_facts(folder)
    if profiler is not None:
        profiler.stop()
        found |= profiled_facts(profiler, times)
    return found


def profiled_facts(profiler: Any, times: list[float]) -> dict[str, Any]:
    """What profiling adds to a step, and the time in which anything ran on the GPU, a step."""
    import numpy as np

    plain, profiled = times[: PROFILED_STEPS - 2], times[PROFILED_STEPS + 5 :]
    spans = [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in profiler.profiler.kineto_results.events()
        if str(event.device_type()).endswith("CUDA")
        and event.name() != "Context Sync"
        and not event.is_user_annotation()
    ]
    busy = busy_ns(*np.array(spans).T) if spans else 0
    steps = len(times) - PROFILED_STEPS + 1
    return {"profiler_added": statistics.median(profiled) / statistics.median(plain) - 1, "busy_ms": busy / 1e6 / steps}


def busy_ns(start: Any, end: Any) -> float:
    """Length of the union of intervals."""
    import numpy as np

    order = np.argsort(start)
    start, end = start[order], np.maximum.accumulate(end[order])
    return float((end - np.maximum(start, np.append(start[0], end[:-1]))).clip(0).sum())


def recorded_facts(folder: Path) -> dict[str, Any]:
    """The steps that the recorder measured, and the time in which anything ran in a recorded one."""
    import numpy as np

    from thence.model.column_file import decode

    (process,) = (path for path in folder.iterdir() if path.is_dir())
    about = json.loads((process / "recording.json").read_text())

    def table(name: str, *columns: str) -> list[Any]:
        parts = [decode(path.read_bytes()) for path in sorted(process.glob(f"{name}-*"))]
        return [np.concatenate([np.asarray(part[c]) for part in parts] or [[]]) for c in columns]

    steps = table("steps", "number", "start", "duration", "recorded", "counted")
    start, end = table("kernels", "start", "end")
    for name in ("copies", "sets"):
        more = table(name, "start", "end")
        start, end = np.concatenate([start, more[0]]), np.concatenate([end, more[1]])
    whole = [
        (begin, begin + duration)
        for _, begin, duration, recorded, counted in zip(*steps, strict=True)
        if recorded and counted
    ]
    inside = [(start >= a) & (start < b) for a, b in whole]
    busy = [busy_ns(start[mask], end[mask]) for mask in inside if mask.any()]
    return {
        "steps": [column.tolist() for column in steps],
        "busy_ms": statistics.median(busy) / 1e6 if busy else None,
        "plain_steps": about["plain_steps"],
        "detachments": about["detachments"],
        "warnings": about["warnings"],
        "kernels": about["counts"].get("kernels", 0),
    }


def forked(name: str, way: str, folder: Path) -> dict[str, Any]:
    """One run in a child process."""
    result = folder.with_suffix(".json")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            result.write_text(json.dumps(run(name, way, folder)))
            code = 0
        except BaseException:  # noqa: BLE001 - the parent reports it
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    if status or not result.exists():
        return {"error": f"{name} {way} ended with {os.waitstatus_to_exitcode(status)}"}
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def record(out: Path, seconds: float, names: list[str], *, profiles: bool) -> None:
    """Runs the programs, and writes what they measured."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no processes that outlive a run
    import_packages()
    results: dict[str, Any] = {}
    for name in names:
        until = time.monotonic() + seconds
        runs: list[dict[str, Any]] = []
        with tempfile.TemporaryDirectory() as scratch:
            profiled = forked(name, "profiled", Path(scratch, "profiled")) if profiles else {"error": "not profiled"}
            while len(runs) < MIN_ROUNDS or time.monotonic() < until:
                began = time.monotonic()
                ways = ("alone", "recorded") if len(runs) % 2 else ("recorded", "alone")
                pair = {way: forked(name, way, Path(scratch, f"{way}{len(runs)}")) for way in ways}
                runs.append(pair)
                if len(runs) == 1:
                    pack(Path(scratch, "recorded0"), out / f"{name}.tar.gz")
                took = time.monotonic() - began
                if len(runs) >= MIN_ROUNDS and time.monotonic() + took > until:
                    break
                if any("error" in one for one in pair.values()) and len(runs) >= MIN_ROUNDS:
                    break
        results[name] = {"profiled": profiled, "runs": runs}
        (out / "results.json").write_text(json.dumps(results))
        summary(name, results[name])


def import_packages() -> None:
    """Imports once what every child needs; nothing here uses the GPU."""
    names = (
        *("torch", "transformers.models.gpt2.modeling_gpt2", "torchvision", "pytorch_lightning"),
        "thence.capture.session.record",
    )
    for name in names:
        try:
            __import__(name)
        except ImportError as error:
            print(f"{name}: {error}")


def pack(folder: Path, to: Path) -> None:
    """A recording as an archive."""
    if folder.is_dir():
        with tarfile.open(to, "w:gz", compresslevel=6) as archive:
            archive.add(folder, arcname=folder.name)


def summary(name: str, result: dict[str, Any]) -> None:
    """Prints a line for each pair, without thence's analysis."""
    for number, pair in enumerate(result["runs"]):
        alone, recorded = pair["alone"], pair["recorded"]
        if "error" in alone or "error" in recorded:
            print(f"{name} {number}: {alone.get('error', '')} {recorded.get('error', '')}", flush=True)
            continue
        steps = list(zip(*recorded["steps"], strict=True))
        plain = [row[2] / 1e6 for row in steps if row[4] and not row[3]]
        kept = [row[2] / 1e6 for row in steps if row[4] and row[3]]
        said = [f"{statistics.median(values):.3f}" if values else "none" for values in (plain, kept)]
        print(
            f"{name} {number}: alone {statistics.median(alone['steps_ms']):.3f} ms (host {alone['host_ms']:.3f}); "
            f"recorded run: plain {said[0]} ({len(plain)}), recorded {said[1]} ({len(kept)}), busy "
            f"{recorded['busy_ms']}, {recorded['detachments']} detachments, {recorded['plain_steps']}",
            flush=True,
        )
    if "error" not in result["profiled"]:
        print(f"{name}: torch.profiler adds {100 * result['profiled']['profiler_added']:.1f} %", flush=True)


def check(out: Path) -> None:
    """Prints what thence says of the runs, beside what the programs measured."""
    import polars as pl

    from thence.analysis.steps.plain_step import plain_step
    from thence.model.tables import STEP_TIMES

    inside = total = 0
    for name, result in json.loads((out / "results.json").read_text()).items():
        medians = []
        for number, pair in enumerate(result["runs"]):
            if "error" in pair["alone"] or "error" in pair["recorded"]:
                print(f"{name} {number}: failed")
                continue
            median = statistics.median(pair["alone"]["steps_ms"])
            medians.append(median)
            columns = ("number", "start", "duration", "recorded", "counted")
            frame = pl.DataFrame(dict(zip(columns, pair["recorded"]["steps"], strict=True)))
            times = frame.with_columns(pl.col("recorded", "counted").cast(pl.Boolean), rank=0)
            found = plain_step(STEP_TIMES.frame(times.to_dict()))
            total += 1
            if found is None:
                print(f"{name} {number}: no plain step: {pair['recorded']['plain_steps']}")
                continue
            found = found.beside_other_processes(1e6 * pair["recorded"]["busy_ms"])
            within = found.plain.low_ns <= 1e6 * median <= found.plain.high_ns
            inside += within
            print(f"{name} {number}: alone {median:.3f} ms, {found.text}: {'inside' if within else 'OUTSIDE'}")
        if medians:
            compare_verdicts(out, name, result, medians)
    print(f"the stated interval holds the median of the run alone in {inside} of {total} pairs")


def compare_verdicts(out: Path, name: str, result: dict[str, Any], medians: list[float]) -> None:
    """Prints the verdict of the recording beside the idle share by the program's own step and its kernels."""
    import thence
    from thence.model.thresholds import VERDICT_IDLE_SHARE

    spread = max(medians) / min(medians) - 1
    typical = statistics.median(medians)
    profiled = result["profiled"]
    print(f"{name}: runs alone differ by {100 * spread:.1f} %", end="")
    if "error" not in profiled:
        idle = max(1 - profiled["busy_ms"] / typical, 0.0)
        of_kernels = "GPU-bound" if idle < VERDICT_IDLE_SHARE else "not GPU-bound"
        print(
            f"; torch.profiler adds {100 * profiled['profiler_added']:.1f} %; by the step alone and the profiler's "
            f"kernels ({profiled['busy_ms']:.3f} ms) the GPU is idle for {100 * idle:.1f} %: {of_kernels}",
            end="",
        )
    archive = out / f"{name}.tar.gz"
    if archive.exists():
        with tempfile.TemporaryDirectory() as scratch, tarfile.open(archive) as content:
            content.extractall(scratch, filter="data")
            headline = thence.open(Path(scratch, "recorded0")).headline
            print(f"; the recording says: {headline.verdict.text}", end="")
    print()


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("what", choices=("record", "check"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=75.0, help="time for each program")
    parser.add_argument("--only", help="names of programs, with commas between")
    parser.add_argument("--pairs-only", action="store_true", help="no run under torch.profiler")
    given = parser.parse_args()
    names = given.only.split(",") if given.only else list(PROGRAMS)
    given.out.mkdir(parents=True, exist_ok=True)
    if given.what == "record":
        record(given.out, given.seconds, names, profiles=not given.pairs_only)
    else:
        check(given.out)


if __name__ == "__main__":
    main()
