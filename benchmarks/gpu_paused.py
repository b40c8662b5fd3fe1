"""What a step costs while it is recorded, while the recording is paused, and without a recording.

    python benchmarks/gpu_paused.py        # on a GPU with torch, two minutes

A decode of 12 tokens by a small Transformer whose layers are launched one by one, the same as one CUDA graph for each
token, and a training step, each in a process of its own. Blocks of steps in four states, in random order: no recording;
recorded; paused, with CUPTI detached; paused, with CUPTI attached (as where it cannot be detached). In a pause, modules
and lines are not followed. Prints for each
state the median time of a step, and the median of the differences from the block without a recording next to it, with
a 95 % interval; and for how long `pause` and `resume` take. At the end, whether the recording is complete: the kernels
of all recorded blocks are counted.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from command_line import documented_parser

if TYPE_CHECKING:
    from collections.abc import Callable

STATES = ("none", "recorded", "detached", "attached")
ROUNDS, BLOCK_SECONDS = 40, 0.12
PROGRAMS = ("decode", "graphs", "training")


def program(name: str) -> Callable[[], None]:
    """Returns a function that makes one step and waits for it."""
    import torch

    layers = [torch.nn.TransformerEncoderLayer(512, 8, 1024, batch_first=True, dropout=0.0) for _ in range(6)]
    model = torch.nn.Sequential(*layers).cuda()
    if name == "training":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        x = torch.randn(8, 64, 512, device="cuda")

        def train() -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()

        return train
    model.eval().requires_grad_(requires_grad=False)
    token = torch.randn(1, 8, 512, device="cuda")
    if name == "graphs":
        model(token)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(token)

    def decode() -> None:
        for _ in range(12):
            if name == "graphs":
                graph.replay()
            else:
                model(token)
        torch.cuda.synchronize()

    return decode


def child(name: str, out: Path) -> dict[str, Any]:
    """Alternates the states and returns times in ms."""
    import thence
    from thence.capture.recorder.recorder import Recorder

    step = program(name)
    for _ in range(30):
        step()
    begin = time.perf_counter()
    for _ in range(20):
        step()
    count = max(3, round(BLOCK_SECONDS / ((time.perf_counter() - begin) / 20)))
    recorder = Recorder
    why = recorder.why_attached
    times: dict[str, list[float]] = {state: [] for state in STATES}
    took: dict[str, list[float]] = {"pause": [], "resume": []}
    recorded_steps = detachments = 0
    states = list(STATES)
    for number in range(ROUNDS):
        random.Random(number).shuffle(states)
        for state in states:
            recording = None
            if state != "none":
                recorder.why_attached = why if state == "detached" else lambda _self: "the script wants it"  # type: ignore[method-assign]
                recording = thence.record(out / f"{state}{number}", thence.RecordOptions(baseline=False))
                recording.start()
                step()
                if state != "recorded":
                    before = time.perf_counter()
                    recording.pause()
                    took["pause"] += [1e3 * (time.perf_counter() - before)] * (state == "detached")
                    detachments += not recording._recorder.attached  # noqa: SLF001
            step()
            step()
            before = time.perf_counter()
            for _ in range(count):
                step()
            times[state].append(1e3 * (time.perf_counter() - before) / count)
            if recording is not None:
                if state != "recorded":
                    before = time.perf_counter()
                    recording.resume(sys._getframe())  # noqa: SLF001
                    took["resume"] += [1e3 * (time.perf_counter() - before)] * (state == "detached")
                    step()
                recording.stop()
                recorded_steps += count + 3 if state == "recorded" else 2
    kernels = sum(json.loads(path.read_text())["counts"].get("kernels", 0) for path in out.rglob("recording.json"))
    return {
        "times": times, "took": took, "kernels": kernels, "recorded_steps": recorded_steps,
        "detachments": detachments, "steps_in_a_block": count,
    }  # fmt: skip


def main() -> None:
    if len(sys.argv) == 3:
        print(json.dumps(child(sys.argv[1], Path(sys.argv[2]))))
        return
    documented_parser(__doc__).parse_args()
    for name in PROGRAMS:
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, __file__, name, folder],
                capture_output=True, text=True, check=False, env={**os.environ},
            )  # fmt: skip
        if done.returncode:
            print(f"{name}: exit code {done.returncode}\n{done.stderr[-1500:]}")
            continue
        report(name, json.loads(done.stdout.splitlines()[-1]))


def report(name: str, found: dict[str, Any]) -> None:
    """Prints a line for each state."""
    plain = found["times"]["none"]
    print(
        f"{name}: {ROUNDS} rounds, {found['steps_in_a_block']} steps a block; "
        f"{found['detachments']} of {ROUNDS} pauses detached; {found['kernels']:,} kernels in "
        f"{found['recorded_steps']:,} recorded steps ({found['kernels'] / found['recorded_steps']:g} a step)"
    )
    for state in STATES:
        times = found["times"][state]
        differences = sorted(a / b - 1 for a, b in zip(times, plain, strict=True))
        low, high = differences[len(differences) // 2 - 6], differences[len(differences) // 2 + 6]
        print(
            f"  {state:9} {statistics.median(times):8.3f} ms a step, {100 * statistics.median(differences):+6.1f} % "
            f"({100 * low:+.1f} to {100 * high:+.1f})"
        )
    for what, times in found["took"].items():
        print(f"  {what} took {statistics.median(times):.1f} ms, at most {max(times):.1f}")


if __name__ == "__main__":
    main()
