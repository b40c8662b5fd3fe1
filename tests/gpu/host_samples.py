"""Host samples on a GPU: whether planted pauses are named with their time, and what sampling costs.

    python tests/gpu/host_samples.py record OUT      # on a GPU with torch and Python 3.12, two minutes
    python tests/gpu/host_samples.py cost OUT        # there, two minutes
    python tests/gpu/host_samples.py check OUT       # anywhere, with thence's requirements

record: programs with a training step of a small network that pause for some 6 ms a step in a function and a module of
random name, each in a process of its own: in Python, in C that holds the GIL, in C that released it, waiting for a
lock, asleep, in a hook of a backward pass, in a consumer that waits for a loader's thread; and a control without a
pause. They are recorded by `thence.record`, without any annotation. Each program measures its pauses itself.

cost: steps of two programs in alternating blocks, with samples and without, within one recording: the paired difference
of a block's time and of the CPU time of the thread that launches, with its 95 % interval. Prints sizes of recordings.

check: for each recording the first row of idle time that the host caused, and the idle time in the planted function
beside the truth.
"""

from __future__ import annotations

import json
import random
import statistics
import string
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support import documented_parser

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS, WARM_UP = 120, 10
PAIRS, BLOCK_SECONDS = 64, 0.35
QUANTILE = 1.96
HOST = {"python", "host", "lock", "sleep", "loader", "sync", "operator", "gc", "compile"}
"""Causes of idle time that are work or waiting of the host."""
PROGRAM = """
import hashlib, os, queue, threading, time
import torch

paused = []
layers = [torch.nn.Linear(512, 512) for _ in range(24)]
model = torch.nn.Sequential(*layers).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.randn(64, 512, device="cuda")


def prepare():
    pass


def pause():
    begin = time.perf_counter_ns()
    NAME()
    paused.append(time.perf_counter_ns() - begin)


def step(pausing=True):
    y = model(x).sum()
    prepare()
    y.backward()
    optimizer.step()
    optimizer.zero_grad()
    if pausing:
        pause()


def main(steps, pausing=True):
    for _ in range(steps):
        step(pausing)
    torch.cuda.synchronize()
"""
PAUSES = {
    "python": """
        def NAME():
            end = time.perf_counter() + 0.006
            x = 0
            while time.perf_counter() < end:
                x = (x * 7 + 3) % 1001
    """,
    "c": """
        FIRST, SECOND = pow(7, 20000), pow(3, 40000)
        def NAME():
            end = time.perf_counter() + 0.006
            while time.perf_counter() < end:
                FIRST * SECOND
    """,
    "c_without_gil": """
        DATA = os.urandom(1 << 20)
        def NAME():
            end = time.perf_counter() + 0.006
            while time.perf_counter() < end:
                hashlib.sha256(DATA)
    """,
    "lock": """
        LOCK, GO, HELD = threading.Lock(), threading.Semaphore(0), threading.Semaphore(0)
        def hold():
            while GO.acquire():
                with LOCK:
                    HELD.release()
                    time.sleep(0.006)
        threading.Thread(target=hold, daemon=True).start()
        def NAME():
            GO.release()
            HELD.acquire()
            with LOCK:
                pass
    """,
    "sleep": """
        def NAME():
            time.sleep(0.006)
    """,
    "hook": """
        def NAME(gradient):
            begin = time.perf_counter_ns()
            end = time.perf_counter() + 0.006
            while time.perf_counter() < end:
                pass
            paused.append(time.perf_counter_ns() - begin)
        layers[12].weight.register_hook(NAME)
        def pause():
            pass
    """,
    "loader": """
        BATCHES, WANTED = queue.Queue(), threading.Semaphore(0)
        def make():
            while WANTED.acquire():
                time.sleep(0.006)
                BATCHES.put(1)
        threading.Thread(target=make, daemon=True).start()
        def NAME():
            WANTED.release()
            return BATCHES.get()
    """,
    "none": """
        def NAME():
            pass
    """,
}
"""Definitions of a function NAME that pauses, by kind."""
CAUSES = {
    "python": "python", "c": "host", "c_without_gil": "host", "lock": "lock", "sleep": "sleep", "hook": "python",
    "loader": "lock",
}  # fmt: skip
CHILD = """
import importlib, json, sys
sys.path.insert(0, {folder!r})
module = importlib.import_module({module!r})
module.main({warm_up}, pausing=False)
module.paused.clear()
import thence
with thence.record({out!r}) as recording:
    module.main({steps})
print(json.dumps({{"pauses": module.paused}}))
"""


def random_name() -> str:
    """Nine letters."""
    return "".join(random.SystemRandom().choices(string.ascii_lowercase, k=9))


def bytes_of(folder: Path) -> int:
    """Size of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def record(out: Path) -> None:
    """Records all programs, and measures the cost."""
    facts = {}
    for kind in PAUSES:
        folder = out / kind
        module, function = write_program(kind, folder)
        names = {"folder": str(folder), "module": module, "out": str(folder / "recording")}
        body = CHILD.format(**names, warm_up=WARM_UP, steps=STEPS)
        done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{kind}: {done.stderr[-2000:]}")
        said = json.loads(done.stdout.splitlines()[-1])
        facts[kind] = {"function": function, "module": module, "pauses_ns": said["pauses"]}
        size = bytes_of(folder / "recording")
        samples = sum(path.stat().st_size for path in folder.rglob("samples-*"))
        print(
            f"{kind:14} {STEPS} steps, {sum(said['pauses']) / 1e6:8.2f} ms of pauses, recording "
            f"{size / 1e3:,.0f} kB, of it samples {samples / 1e3:,.0f} kB",
            flush=True,
        )
    (out / "facts.json").write_text(json.dumps(facts))


def write_program(kind: str, folder: Path) -> tuple[str, str]:
    """Writes a module of random name, and returns its name and that of the function that pauses."""
    folder.mkdir(parents=True)
    module, function = random_name(), random_name()
    source = (PROGRAM + textwrap.dedent(PAUSES[kind])).replace("NAME", function)
    (folder / f"{module}.py").write_text(source)
    return module, function


def cost(out: Path) -> None:
    """Steps with samples and without in alternating blocks of one recording."""
    module, _ = write_program("none", out / "cost program")
    path = out / "cost program" / f"{module}.py"
    sys.path.insert(0, str(path.parent))
    namespace: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    import thence

    def launching() -> None:
        namespace["step"](pausing=False)

    def pausing() -> None:
        namespace["step"](pausing=False)
        end = time.perf_counter() + 0.003
        while time.perf_counter() < end:
            pass

    with thence.record(out / "cost") as recording:
        recorder = recording._recorder
        if recorder is None or recorder.samples is None:
            sys.exit("samples are not taken here: see recording.json")
        native = recorder.samples._native
        recording.noted._samples = None
        native.end_samples()
        for name, step in (("launches only", launching), ("3 ms of Python a step", pausing)):
            report(name, step, native)
    print(f"recording of the cost: {bytes_of(out / 'cost') / 1e6:,.1f} MB")


def report(name: str, step: Callable[[], None], native: Any) -> None:
    """Prints the paired difference of blocks with samples and without."""
    import torch

    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    steps = max(2, round(BLOCK_SECONDS / ((time.perf_counter() - begin) / WARM_UP)))
    walls, cpus = [], []
    for pair in range(PAIRS):
        of: dict[bool, tuple[float, float]] = {}
        for samples in (True, False) if pair % 2 else (False, True):
            if samples:
                native.begin_samples()
            else:
                native.end_samples()
            step()
            torch.cuda.synchronize()
            wall, cpu = time.perf_counter(), time.thread_time()
            for _ in range(steps):
                step()
            torch.cuda.synchronize()
            of[samples] = time.perf_counter() - wall, time.thread_time() - cpu
            native.end_samples()
            native.take_samples()
        walls.append(of[True][0] / of[False][0] - 1)
        cpus.append(of[True][1] / of[False][1] - 1)
    said = []
    for what, values in (("time", walls), ("CPU time of the launching thread", cpus)):
        half = QUANTILE * statistics.stdev(values) / len(values) ** 0.5
        said.append(
            f"{what} {100 * statistics.mean(values):+.2f} % +- {100 * half:.2f} (median "
            f"{100 * statistics.median(values):+.2f} %)"
        )
    print(f"{name}: {PAIRS} pairs of blocks of {steps} steps, with samples: {'; '.join(said)}", flush=True)


def check(out: Path) -> None:
    """Compares the recordings with the truth."""
    import thence

    facts = json.loads((out / "facts.json").read_text())
    right = 0
    for kind, fact in facts.items():
        trace = thence.open(out / kind / "recording")
        trace.self_check()
        document = trace.idle().to_json()
        rows = [
            {"cause": cause["cause"], **row}
            for cause in document["causes"]
            if cause["cause"] in HOST
            for row in cause["rows"]
        ]
        rows.sort(key=lambda row: -row["total_ns"])
        named = [row for row in rows if (row["name"] or "").endswith(f" {fact['function']}")]
        total, truth = sum(row["total_ns"] for row in named), sum(fact["pauses_ns"])
        first = rows[0] if rows else {"cause": None, "name": None, "total_ns": 0}
        near = truth and abs(first["total_ns"] / truth - 1) < 0.1
        good = (not named) if kind == "none" else bool(named) and first is named[0] and near
        right += good
        print(
            f"{kind:14} {'right' if good else 'WRONG'}: planted {truth / 1e6:.2f} ms in {fact['function']}; first row "
            f"{first['cause']} {first['name']} {first['total_ns'] / 1e6:.2f} ms (expected {CAUSES.get(kind)}); all "
            f"rows of the function {total / 1e6:.2f} ms; idle {document['idle_ns'] / 1e6:.2f} ms"
        )
    print(f"{right} of {len(facts)} right")
    sys.exit(right < len(facts))


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("what", choices=("record", "cost", "check"))
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    {"record": record, "cost": cost, "check": check}[given.what](given.out.absolute())


if __name__ == "__main__":
    main()
