"""What a recording of few steps of many costs a program: between windows, by windows, after it.

    python benchmarks/gpu_always.py OUT [--seconds 60] [--part PART] [--program PROGRAM]      # on a GPU with torch
    python benchmarks/gpu_always.py OUT --part check                                          # anywhere, with thence

The programs of `gpu_paused.py` without CUDA graphs: a decode of 12 tokens whose layers are launched one by one, and a
training step. Hosts of GPUs get faster and slower by 10 to 30 % within seconds, so what is compared lies as close
together as it can; each measurement has a process of its own, and its mean has a 95 % interval:

whole      all that the defaults of `--always` cost, as one thing: pairs of blocks of two steps, in one
           of which the recording goes on, and in the other one stands still. Blocks with windows are longer. The times
           of all blocks go into OUT
blocks     blocks of steps without a recording and far from the windows of one, which begins and ends with its block:
           for programs beside which CUPTI stays attached (CUDA graphs, JAX)
windows    a window every 25 steps: by how much its steps, and the seven after it, are longer than the others, beside
           what the recording itself measures; what of it attaches and detaches CUPTI; memory of the process
residue    six processes in turn that launch a kernel 500 times, before and after three of them were recorded and CUPTI
           was detached: by how much their times change more than those of the others is what CUPTI leaves behind
estimates  windows of eleven steps that count, into OUT. ``check`` then says of how many parts the share of all other
           steps lies in the interval that the first ones of the windows, as windows of one step have, give. Both are of
           the same seconds: a minute later, a host may be a fifth slower
"""

from __future__ import annotations

import functools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from command_line import documented_parser
from gpu_paused import program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

PROGRAMS = ("decode", "training", "lightning")
OTHERS = ("graphs", "jax")
PARTS = {"whole": 1.0, "windows": 0.27, "residue": 0.3, "estimates": 0.1, "blocks": 0.5}
"""The parts, and the share of the seconds that each takes for a program."""
BLOCK_STEPS = 2
FIRST, COUNTED = 14, 30
"""Steps of a block of `blocks`: those that may belong to the window, and those that are timed."""
EVERY, NEAR, AHEAD = 25, 10, 7
"""Steps from one window to the next, those of them that belong to the window or follow it, and those that it is
compared with before it."""
FIRST_STEPS = 220
"""Steps of `whole` in which the first windows set the distance of the others."""
LAUNCHES, PROCESSES = 500, 6
_FAR = 10_000_000


def _t95(values: Sequence[float]) -> float:
    """Student's t of the 95 % interval of the mean of so many values."""
    import numpy as np

    from thence.analysis.student_t import quantile

    return float(quantile(0.05, np.array(len(values) - 1.0)))


def timed(step: Callable[[], None], count: int, after: Callable[[], object] | None = None) -> list[float]:
    """Ms of each of so many steps, with what is called after each."""
    times, clock = [], time.perf_counter
    begin = clock()
    for _ in range(count):
        step()
        if after is not None:
            after()
        end = clock()
        times.append(1e3 * (end - begin))
        begin = end
    return times


def started(out: Path, every: int, steps: int = 1) -> Any:
    """A recording whose windows of so many steps that count are so many steps apart, whatever they cost."""
    import thence

    sampling = thence.Sampling(every=every, steps=steps, ring=1000, slow_steps=False, budget=0)
    recording = thence.record(out, thence.RecordOptions(sampling=sampling))
    recording.start()
    return recording


def stopped(recording: Any) -> dict[str, Any]:
    """Ends a recording; what it says of its sampling."""
    recording.stop()
    about: dict[str, Any] = json.loads((recording.folder / "recording.json").read_text())
    return {**about["sampling"], "detachments": about["detachments"], "warnings": about["warnings"]}


class Switched:
    """Called after each step: has a recording go on and stand still in turn, in pairs of blocks of steps.

    While it stands still, nothing of it runs in the program: `step()` is not called, and the recorder's thread neither
    looks nor writes; what it has to write waits for the next block. A block in which a window begins lasts until `NEAR`
    steps after that; the other block of its pair has as many steps.

    Attributes:
        pairs: of each pair, steps and ms with the recording, steps and ms without, and whether a window was in it.
    """

    def __init__(self, recording: Any, seconds: float) -> None:
        self._recording, self._until = recording, time.monotonic() + seconds
        self._recorder = recorder = recording._recorder  # noqa: SLF001 - what is switched has no other name
        self._looks = recorder._looks  # noqa: SLF001
        self._gate = threading.Event()
        recorder._looks = self._look  # noqa: SLF001
        self._order = random.Random(0)
        self._to_come: list[bool] = []
        self._pair: dict[bool, tuple[int, float]] = {}
        self._near = False
        self.pairs: list[tuple[int, float, int, float, bool]] = []
        self._on = False
        self._spent = time.monotonic(), recorder.cpu_ns, recording._steps.own_ns  # noqa: SLF001
        self._next()

    @property
    def over(self) -> bool:
        """Whether the time is over and the last pair complete."""
        return time.monotonic() > self._until and not self._pair

    def __call__(self) -> None:
        """A step has ended."""
        if self._on:
            self._recording.step()
        self._left -= 1
        if self._left > 0 or (self._on and self._in_window()):
            return
        self._pair[self._on] = self._size - self._left, 1e3 * (time.perf_counter() - self._began)
        self._next()

    def _next(self) -> None:
        """Begin a block."""
        if not self._to_come:
            if self._pair:
                self.pairs.append((*self._pair[True], *self._pair[False], self._near))
            self._pair = {}
            self._to_come = self._order.sample([False, True], 2)
            plan = self._recording._steps.plan  # noqa: SLF001
            ahead = plan._next - plan.number  # noqa: SLF001
            self._near = ahead <= AHEAD + BLOCK_STEPS
            self._size = ahead + NEAR if self._near else BLOCK_STEPS
        self._on, self._left = self._to_come.pop(), self._size
        if self._on:
            steps = self._recording._steps  # noqa: SLF001
            if steps._border is not None:  # noqa: SLF001 - else the other block would be in the time of a step
                steps._border = steps._border._replace(  # noqa: SLF001
                    time=time.time_ns(), moment=time.monotonic_ns()
                )
            self._gate.set()
        else:
            self._gate.clear()
        self._began = time.perf_counter()

    def _in_window(self) -> bool:
        plan = self._recording._steps.plan  # noqa: SLF001
        inside = plan.number - plan._begin < NEAR  # noqa: SLF001
        self._near = self._near or inside
        return inside

    def _look(self) -> None:
        if self._gate.is_set():
            self._looks()
        elif self._recorder.parts.holds_activities or self._recorder._due < time.monotonic() + 0.3:  # noqa: SLF001
            self._gate.wait()

    def end(self) -> str:
        """Let the recording go on; what it took by its own clock."""
        self._gate.set()
        began, cpu, own = self._spent
        steps = sum(pair[0] for pair in self.pairs)
        half = (time.monotonic() - began) / 2
        return (
            f"by its own clock: {(self._recorder.cpu_ns - cpu) / 1e7 / half:.3f} % of the time in the recorder's "
            f"thread, {(self._recording._steps.own_ns - own) / steps / 1e3:.1f} us in each step()"  # noqa: SLF001
        )


def whole(name: str, out: Path, seconds: float) -> None:
    """All that `--always` costs, by pairs of blocks."""
    globals()[f"drive_{name}"](
        lambda: Always(out / f"recording_{name}", seconds), lambda after: whole_report(name, out, after)
    )


class Always:
    """Called after each step: a recording of the defaults of `--always`, at first all the time, then in `Switched`."""

    def __init__(self, out: Path, seconds: float) -> None:
        import thence

        self.recording = thence.record(out, thence.RecordOptions(sampling=thence.Sampling()))
        self.recording.start()
        self._seconds, self._steps = seconds, 0
        self.switched: Switched | None = None

    @property
    def over(self) -> bool:
        """As that of `Switched`."""
        return self.switched is not None and self.switched.over

    def __call__(self) -> None:
        """A step has ended."""
        if self.switched is not None:
            self.switched()
            return
        self.recording.step()
        self._steps += 1
        if self._steps == FIRST_STEPS:
            self.switched = Switched(self.recording, self._seconds)


def whole_report(name: str, out: Path, after: Any) -> None:
    """Prints what a recording costs."""
    recording, pairs = after.recording, after.switched.pairs
    attached = recording._recorder.attached  # noqa: SLF001
    spent = after.switched.end()
    about = stopped(recording)
    (out / f"whole_{name}.json").write_text(json.dumps({"pairs": pairs, "about": about}))
    print(f"  attached {attached}; {about['detachments']} detachments, {about['warnings']}\n  {spent}")
    print(whole_of(pairs, about))


def whole_of(pairs: list[tuple[int, float, int, float, bool]], about: dict[str, Any]) -> str:
    """The loss: that of pairs without a window, and what pairs with one took more, of all the time."""
    losses = [100 * math.log(on / n * m / off) for n, on, m, off, near in pairs if not near]
    more = [on - off * n / m for n, on, m, off, near in pairs if near]
    plain = sum(off * n / m for n, _, m, off, _ in pairs)
    middle, half = trimmed_mean(losses)
    share = sum(off * n / m for n, _, m, off, near in pairs if not near) / plain
    of_windows = 100 * sum(more) / plain
    spread = statistics.stdev(more) if len(more) > 1 else math.nan
    half_windows = _t95(more) * 100 * spread * math.sqrt(len(more)) / plain
    loss, error = share * middle + of_windows, math.hypot(share * half, half_windows)
    usual = statistics.mean(off / m for _, _, m, off, _ in pairs)
    return (
        f"  {usual:.2f} ms a step, {len(losses)} pairs of blocks without a window, {len(more)} with one, which is "
        f"{about['interval']} steps from the next: loss {loss:+.2f} % ({loss - error:+.2f} to {loss + error:+.2f})\n"
        f"  between windows {middle:+.2f} % ({middle - half:+.2f} to {middle + half:+.2f}), of all pairs "
        f"{interval(losses)}; by windows {of_windows:+.2f} %\n"
        f"  a window costs {interval(more) if len(more) > 1 else more} ms, "
        f"stated {(about['window_cost_ns'] or 0) / 1e6:.1f} ms"
    )


class Blocks:
    """Called after each step: begins and ends recordings, and notes what blocks of steps take.

    Attributes:
        times: ms a step of the blocks without (False) and with a recording.
        attached: whether CUPTI was attached far from the windows, of each recording.
    """

    def __init__(self, out: Path, seconds: float) -> None:
        self._out, self._until = out, time.monotonic() + seconds
        self._order = random.Random(0)
        self._to_come = [False]
        self._recording: Any = None
        self._number, self._began = 0, 0.0
        self.times: dict[bool, list[float]] = {False: [], True: []}
        self.attached: list[bool] = []

    @property
    def over(self) -> bool:
        """Whether the time is over and the last pair complete."""
        return time.monotonic() > self._until and len(self.times[False]) == len(self.times[True]) + 1 > 3

    def __call__(self) -> None:
        """A step has ended."""
        now = time.perf_counter()
        if self._number == FIRST:
            self._began = now
        elif self._number == FIRST + COUNTED:
            self._ended(1e3 * (now - self._began) / COUNTED)
            return
        self._number += 1
        if self._recording is not None:
            self._recording.step()

    def _ended(self, ms: float) -> None:
        self.times[self._recording is not None].append(ms)
        if self._recording is not None:
            self.attached.append(self._recording._recorder.attached)  # noqa: SLF001
            self._recording.stop()
            self._recording = None
        if not self._to_come:
            self._to_come = self._order.sample([False, True], 2)
        if self._to_come.pop():
            self._recording = started(self._out / f"block{len(self.attached)}", _FAR)
        self._number = 0


def blocks(name: str, out: Path, seconds: float) -> None:
    """Alternating blocks of steps."""
    globals()[f"drive_{name}"](lambda: Blocks(out, seconds), lambda after: block_report(name, out, after))


def block_report(name: str, out: Path, after: Blocks) -> None:
    """Prints what blocks took."""
    pairs = list(zip(after.times[True], after.times[False][1:], strict=True))  # the first one is before all pairs
    losses = [100 * math.log(on / off) for on, off in pairs]
    (out / f"blocks_{name}.json").write_text(json.dumps({"ms": pairs}))
    print(
        f"  {statistics.median(off for _, off in pairs):.3f} ms a step, {len(pairs)} pairs of blocks: "
        f"{interval(losses)} %; attached {sum(after.attached)} of {len(after.attached)}"
    )


def drive_program(name: str, begun: Callable[[], Any], report: Callable[[Any], None]) -> None:
    """One of the programs of `gpu_paused.py`."""
    step = program(name)
    timed(step, 100)
    after = begun()
    while not after.over:
        step()
        after()
    report(after)


drive_decode, drive_training, drive_graphs = (
    functools.partial(drive_program, name) for name in ("decode", "training", "graphs")
)


def drive_jax(begun: Callable[[], Any], report: Callable[[Any], None]) -> None:
    """A training step of JAX, which many small kernels make."""
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0), 25)
    weights = [jax.random.normal(key, (256, 256)) / 16 for key in keys[1:]]
    x = jax.random.normal(keys[0], (64, 256))

    def loss(weights: Any) -> Any:
        y = x
        for weight in weights:
            y = y + jnp.tanh(y @ weight)
        return (y * y).mean()

    @jax.jit
    def train(weights: Any) -> Any:
        return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, jax.grad(loss)(weights))

    for _ in range(300):
        weights = jax.block_until_ready(train(weights))
    after = begun()
    while not after.over:
        for _ in range(10):
            weights = train(weights)
        jax.block_until_ready(weights)
        after()
    report(after)


def drive_lightning(begun: Callable[[], Any], report: Callable[[Any], None]) -> None:
    """Training by Lightning, with two workers that load."""
    import lightning
    import torch

    class Numbers(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 10_000_000

        def __getitem__(self, index: int) -> Any:
            return torch.full((64, 512), float(index % 7))

    class Model(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            layers = [torch.nn.TransformerEncoderLayer(512, 8, 1024, batch_first=True, dropout=0.0) for _ in range(6)]
            self.layers = torch.nn.Sequential(*layers)

        def training_step(self, batch: Any, _number: int) -> Any:
            return self.layers(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    class Watch(lightning.Callback):  # type: ignore[misc]
        after: Any = None

        def on_train_batch_end(self, trainer: Any, _model: Any, _outputs: Any, _batch: Any, number: int) -> None:
            torch.cuda.synchronize()
            if number == 100:
                self.after = begun()
            if self.after is not None:
                self.after()
                trainer.should_stop = self.after.over

    watch = Watch()
    trainer = lightning.Trainer(
        max_epochs=1, callbacks=[watch], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="gpu", devices=1,
    )  # fmt: skip
    trainer.fit(Model(), torch.utils.data.DataLoader(Numbers(), batch_size=8, num_workers=2))
    assert watch.after is not None
    report(watch.after)


def windows(name: str, out: Path, seconds: float) -> None:
    """Windows one after the other."""
    step = program(name)
    timed(step, 100)
    before = resident()
    recording = started(out, EVERY)
    spent: dict[str, list[float]] = {}
    recorder = recording._recorder  # noqa: SLF001
    for owner, names in (
        (recording, ("pause", "resume")),
        (recorder, ("_attach", "_enable", "_flush", "_detach")),
        (recorder._counting, ("attach", "detach")),  # noqa: SLF001
        (recorder._cupti, ("subscribe",)),  # noqa: SLF001
    ):
        for function in names:
            setattr(
                owner,
                function,
                clocked(getattr(owner, function), spent.setdefault(f"{function} of {owner.__class__.__name__}", [])),
            )
    timed(step, 2 * EVERY, recording.step)
    times: list[float] = []
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        times += timed(step, EVERY, recording.step)
    after = resident()
    about = stopped(recording)
    # Step 0 of each row is the one before the window: `step()` is called after it.
    rows = [times[i : i + EVERY] for i in range(EVERY - 1, len(times) - EVERY, EVERY)]
    plain = [statistics.median(row[NEAR:]) for row in rows]
    costs = [sum(row[:NEAR]) - NEAR * usual for row, usual in zip(rows, plain, strict=True)]
    usual = statistics.median(plain)
    middle = [statistics.median(row[k] for row in rows) - usual for k in range(NEAR)]
    stated, of_step = about["window_cost_ns"] or 0, about["plain_step_ns"] or 1
    apart = math.ceil(100 * stated / of_step)
    means = [statistics.mean(row[k] for row in rows) - usual for k in range(NEAR)]
    print(
        f"  {usual:.2f} ms a step, {len(rows)} windows; one costs {interval(costs)} ms\n"
        f"  stated {stated / 1e6:.1f} ms, so that 1 % needs a window each {apart} steps; one costs "
        f"{100 * statistics.mean(costs) / (apart * usual):.2f} % of these\n"
        f"  ms above the others of its steps: medians {rounded(middle)}, means {rounded(means)}\n"
        f"  ms, median and most: { {what: rounded((statistics.median(t), max(t))) for what, t in spent.items()} }\n"
        f"  {about['detachments']} detachments, {before:.0f} and {after:.0f} MB, {about['warnings']}"
    )


def rounded(values: Iterable[float]) -> list[float]:
    """With two digits."""
    return [round(value, 2) for value in values]


def clocked(function: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
    """The function, which notes how many ms it takes."""

    def clocked_function(*given: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*given, **named)
        finally:
            into.append(1e3 * (time.perf_counter() - begin))

    return clocked_function


def resident() -> float:
    """MB of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def estimates(name: str, out: Path, seconds: float) -> None:
    """A recording of several steps in each window."""
    step = program(name)
    timed(step, 100)
    recording = started(out / f"{name}_windows", EVERY, 11)
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        timed(step, EVERY, recording.step)
    print(f"  {stopped(recording)['windows']} windows: see OUT")


def check(out: Path) -> int:
    """Compares what `estimates` recorded; the number of recordings in which more than one part is outside."""
    wrong = 0
    for folder in sorted(out.glob("*_windows")):
        inside = shares_inside(folder)
        missed = [
            f"{name} {share:.2%}, not in {low:.2%} to {high:.2%}" for name, share, low, high, ok in inside if not ok
        ]
        wrong += len(missed) > 1
        print(f"{folder.name}: {len(inside) - len(missed)} of {len(inside)} parts inside; {missed}")
    return wrong


def shares_inside(folder: Path) -> list[tuple[str, float, float, float, bool]]:
    """Of busy time and ten modules: name, share in most steps, its interval by the first ones, whether it fits."""
    import numpy as np
    import polars as pl

    import thence
    from thence.watch.estimates import share_intervals

    trace = thence.open(folder)
    steps = trace.steps().frame.sort("host_start").with_columns(after=pl.col("number") - pl.col("number").shift(1))
    steps = steps.with_columns(window=(pl.col("after").fill_null(2) > 1).cum_sum())
    steps = steps.with_columns(place=pl.int_range(pl.len()).over("window")).filter(pl.col("place") > 0)
    times = trace.activities.group_by("step_row", pl.col("module").cast(pl.String)).agg(pl.col("duration").sum())
    names = (
        times.drop_nulls().group_by("module").agg(pl.col("duration").sum()).sort("duration", descending=True)["module"]
    )
    parts = [steps["busy_ns"].to_numpy()]
    for name in names.head(10):
        of_module = times.filter(pl.col("module") == name).select(
            pl.col("step_row").cast(steps["row"].dtype), module="duration"
        )
        joined = steps.join(of_module, left_on="row", right_on="step_row", how="left", maintain_order="left")
        parts.append(joined["module"].fill_null(0).to_numpy())
    table, whole = np.stack(parts, axis=1).astype(float), steps["duration"].to_numpy().astype(float)
    first = (steps["place"] == 1).to_numpy()
    bounds = share_intervals(table[first], whole[first])
    assert bounds is not None
    shares = table[~first].sum(axis=0) / whole[~first].sum()
    rows = zip(["busy", *names.head(10)], shares, *bounds, strict=True)
    return [(name, share, low, high, bool(low <= share <= high)) for name, share, low, high in rows]


def serve(out: Path) -> None:
    """Makes a block for each line of its input; ``record``: is recorded, and CUPTI detached, first."""
    import torch

    x = torch.zeros(16, device="cuda")

    def step() -> None:
        for _ in range(LAUNCHES):
            x.add_(1)
        torch.cuda.synchronize()

    timed(step, 50)
    for line in sys.stdin:
        if line.strip() == "record":
            recording = started(out, _FAR)
            timed(step, 16, recording.step)
            recording.stop()
            timed(step, 50)
        timed(step, 1)
        print(json.dumps(timed(step, 3)), flush=True)


def residue(_name: str, out: Path, seconds: float) -> None:
    """Blocks of processes in turn, before and after half of them were recorded; all on one core, which they share."""
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    command = [sys.executable, __file__, str(out), "--part", "serve"]
    children = [subprocess.Popen(command, stdin=-1, stdout=-1, text=True) for _ in range(PROCESSES)]
    logs: dict[str, list[list[float]]] = {"before": [], "after": []}
    for child in children:
        asked(child, "block")
    for when, rounds in logs.items():
        for child in children[1::2] if when == "after" else ():
            asked(child, "record")
        began, order = time.monotonic(), list(range(PROCESSES))
        while time.monotonic() - began < seconds / 2:
            random.Random(len(rounds)).shuffle(order)
            took = {which: min(asked(children[which], "block")) for which in order}
            middle = statistics.mean(math.log(took[which]) for which in order)
            rounds.append([100 * (math.log(took[which]) - middle) for which in range(PROCESSES)])
    for child in children:
        child.communicate(timeout=20)
    usual = {when: [statistics.median(column) for column in zip(*rounds, strict=True)] for when, rounds in logs.items()}
    change = [after - before for before, after in zip(usual["before"], usual["after"], strict=True)]
    print(
        f"  change in %, recorded {rounded(change[1::2])}, others {rounded(change[::2])}: "
        f"{statistics.mean(change[1::2]) - statistics.mean(change[::2]):+.2f}; "
        f"{len(logs['before'])} and {len(logs['after'])} rounds"
    )


def asked(child: subprocess.Popen[str], what: str) -> list[float]:
    """The answer of a process to a line."""
    assert child.stdin is not None
    assert child.stdout is not None
    print(what, file=child.stdin, flush=True)
    answer: list[float] = json.loads(child.stdout.readline())
    return answer


def trimmed_mean(values: list[float]) -> tuple[float, float]:
    """Mean without the tenth of the values at each end, and half of its 95 % interval: rare long steps are the host's.

    Its error follows from the values with those at each end replaced by the nearest others (Yuen 1974).
    """
    values, cut = sorted(values), len(values) // 10
    inner = values[cut : len(values) - cut]
    held = [inner[0]] * cut + inner + [inner[-1]] * cut
    return statistics.mean(inner), _t95(inner) * statistics.stdev(held) * math.sqrt(len(values)) / len(inner)


def interval(values: Iterable[float]) -> str:
    """Mean of values with its 95 % interval, and their median."""
    values = list(values)
    mean, half = statistics.mean(values), _t95(values) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:+.2f} ({mean - half:+.2f} to {mean + half:+.2f}; median {statistics.median(values):+.2f})"


def main() -> int:
    """Reads the options."""
    parser = documented_parser(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--program", choices=PROGRAMS + OTHERS)
    parser.add_argument("--part", choices=(*PARTS, "serve", "check"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.part == "serve":
        with tempfile.TemporaryDirectory() as folder:
            serve(Path(folder))
        return 0
    if given.part == "check":
        return check(given.out)
    if given.part and given.program:
        with tempfile.TemporaryDirectory() as folder:
            out = given.out if given.part in ("whole", "blocks", "estimates") else Path(folder)
            globals()[given.part](given.program, out, given.seconds * PARTS[given.part])
        return 0
    for part in [given.part] if given.part else PARTS:
        programs = OTHERS if part == "blocks" else PROGRAMS[: {"residue": 1, "whole": 3}.get(part, 2)]
        for name in [given.program] if given.program else programs:
            print(f"{name}, {part}:", flush=True)
            command = [sys.executable, __file__, str(given.out), "--program", name, "--part", part]
            subprocess.run([*command, "--seconds", str(given.seconds)], check=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
