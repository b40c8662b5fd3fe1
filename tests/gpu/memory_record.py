"""What recording PyTorch's memory costs a training step, and whether the recording's peak is PyTorch's own.

    python tests/gpu/memory_record.py record OUT   # on a GPU with torch; thence's src on PYTHONPATH
    python tests/gpu/memory_record.py check OUT    # anywhere, with thence's requirements

A GPT is trained inside `thence.record`, in alternating blocks of steps with and without the allocator's history and
CUPTI's records of memory, as `thence record --with memory` keeps them. The cost is the median of the paired differences
with its 95 % interval; so is the CPU time of the thread that launches. Then the same training is recorded with
``RecordOptions(memory=True)``, from before the model is made, and once more by a program that keeps a history of its
own, which has to be as it was. At last FSDP2 is recorded on two GPUs, or on one, with memory that a library asks of
CUDA itself, and a program of JAX. ``check`` compares the peaks of the recordings with
``torch.cuda.max_memory_allocated``, to the byte, and looks for what was planted outside, and for JAX's pool.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from support import documented_parser

BLOCKS, STEPS = 300, 5
WARM_UP = 20
PROGRAMS = ("cost", "recorded", "own", "job", "jax")
PLANTED_BYTES = 12_345_678
TIMEOUT_S = 200


def measure_cost(out: Path) -> dict[str, Any]:
    """Seconds of blocks of steps, in pairs: without and with the history."""
    import torch

    import thence
    from memory_peaks import Training
    from thence.capture.cuda.layouts import MEMORY2
    from thence.capture.torch.memory_history import MAX_ENTRIES

    history = torch.cuda.memory._record_memory_history
    step = Training()
    blocks: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
    with thence.record(out / "cost_recording", thence.RecordOptions(baseline=False)) as recording:
        cupti = recording._recorder._cupti
        for _ in range(WARM_UP):
            step()
        for number in range(BLOCKS):
            order = ("without", "with") if number % 2 else ("with", "without")
            for way in order:
                if way == "with":
                    history(enabled="all", context=None, stacks="python", max_entries=MAX_ENTRIES)
                    cupti.enable(MEMORY2)
                else:
                    history(enabled=None)
                    cupti.disable(MEMORY2)
                step()  # the first step after a switch does not count
                torch.cuda.synchronize()
                began, cpu = time.perf_counter(), time.thread_time()
                for _ in range(STEPS):
                    step()
                launched = time.thread_time() - cpu
                torch.cuda.synchronize()
                blocks[way].append((time.perf_counter() - began, launched))
        history(enabled=None)
    return {"steps": STEPS, "blocks": blocks}


def record_training(out: Path) -> dict[str, Any]:
    """The training recorded with its memory from before the model is made; what PyTorch says of it."""
    import torch

    import thence
    from memory_peaks import Training

    torch.cuda.init()
    with thence.record(out / "recorded_recording", thence.RecordOptions(memory=True)):
        step = Training()
        for _ in range(30):
            step()
        torch.cuda.synchronize()
        began = time.perf_counter()
    written = time.perf_counter() - began
    kept = torch._C._cuda_isHistoryEnabled()
    return _said(torch) | {"seconds_to_end": written, "kept": kept}


def keep_own_history(out: Path) -> dict[str, Any]:
    """A program with a history of its own, recorded with its memory."""
    import torch

    import thence
    from memory_peaks import Training

    memory = torch.cuda.memory
    memory._record_memory_history(max_entries=5000, stacks="python")
    original = memory._record_memory_history
    with thence.record(out / "own_recording", thence.RecordOptions(memory=True)):
        step = Training()
        for _ in range(3):
            step()
    trace = memory._snapshot()["device_traces"][0]
    return _said(torch) | {
        "kept": torch._C._cuda_isHistoryEnabled(),
        "same_function": memory._record_memory_history is original,
        "entries": len(trace),
        "with_frames": sum(bool(entry.get("frames")) for entry in trace),
    }


def record_job(out: Path) -> dict[str, Any]:
    """FSDP2 with NCCL on two GPUs, or one; each rank recorded with its memory from before NCCL begins."""
    import torch

    ranks = min(2, torch.cuda.device_count())
    torch.multiprocessing.spawn(_rank, (str(out), ranks), nprocs=ranks)
    return {"ranks": [json.loads((out / f"job_rank{rank}").read_text()) for rank in range(ranks)]}


def record_jax(out: Path) -> dict[str, Any]:
    """A program of JAX recorded with its memory: JAX asks CUDA for its pool."""
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = ".1"
    import jax
    import jax.numpy as jnp

    import thence

    with thence.record(out / "jax_recording", thence.RecordOptions(memory=True)):
        step = jax.jit(lambda x: jnp.tanh(x @ x) + jnp.fft.fft(x).real)
        x = jnp.ones((1024, 1024))
        for _ in range(20):
            x = jax.block_until_ready(step(x))
        time.sleep(0.6)
    return {"pool": jax.devices()[0].memory_stats()["pool_bytes"]}


def plant(runtime: Any) -> None:
    """Memory of CUDA's own, as a library asks for it."""
    if runtime.cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(PLANTED_BYTES)):
        raise MemoryError


def _rank(rank: int, out: str, ranks: int) -> None:
    import torch

    import thence
    from memory_peaks import sharded_training

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29578", "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    torch.cuda.set_device(rank)
    torch.cuda.init()
    loaded = Path("/proc/self/maps").read_text().splitlines()
    runtime = ctypes.CDLL(next(line.split()[-1] for line in loaded if "libcudart" in line))
    with thence.record(Path(out) / "job_recording", thence.RecordOptions(memory=True, baseline=False)):
        torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
        step = sharded_training()
        plant(runtime)
        for _ in range(20):
            step()
        torch.cuda.synchronize()
        time.sleep(0.6)  # the driver is asked four times a second
    (Path(out) / f"job_rank{rank}").write_text(json.dumps(_said(torch)))
    torch.distributed.destroy_process_group()


def _said(torch: Any) -> dict[str, Any]:
    stats = torch.cuda.memory_stats()
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "max_memory_allocated": torch.cuda.max_memory_allocated(),
        "memory_allocated": torch.cuda.memory_allocated(),
        "memory_reserved": stats["reserved_bytes.all.current"],
    }


def record(out: Path) -> None:
    """Runs each program in a process of its own."""
    out.mkdir(parents=True, exist_ok=True)
    for name in PROGRAMS:
        began = time.perf_counter()
        command = [sys.executable, __file__, "program", str(out), name]
        run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        (out / f"{name}.log").write_text(run.stdout + run.stderr)
        print(f"{name}: {'ok' if run.returncode == 0 else 'FAILED'}, {time.perf_counter() - began:.0f} s", flush=True)


def check(out: Path) -> int:
    """Prints the cost and compares the recordings with what PyTorch said; returns how many things are wrong."""
    cost = json.loads((out / "cost.json").read_text())
    for column, what in enumerate(("step", "CPU time of its launching thread")):
        without, with_ = ([block[column] for block in cost["blocks"][way]] for way in ("without", "with"))
        shares = [after / before - 1 for before, after in zip(without, with_, strict=True)]
        low, high = _interval(shares)
        milliseconds = sorted(without)[len(without) // 2] / cost["steps"] * 1e3
        print(f"{what}: {milliseconds:.2f} ms, with memory {_median(shares):+.1%} [{low:+.1%}, {high:+.1%}]")
    return _check_recording(out, "recorded") + _check_recording(out, "own") + _check_job(out) + _check_jax(out)


def _check_recording(out: Path, name: str) -> int:
    import polars as pl

    import thence

    said = json.loads((out / f"{name}.json").read_text())
    trace = thence.open(out / f"{name}_recording")
    totals = trace.tables.memory_totals.filter(pl.col("device") == 0)
    found = totals["allocated"].max(), totals["allocated"][-1], totals["reserved"][-1]
    expected = said["max_memory_allocated"], said["memory_allocated"], said["memory_reserved"]
    right = found == expected
    print(f"{name}: peak, allocated and reserved {'are those of PyTorch' if right else f'WRONG: {found}, {expected}'}")
    print(f"  { ({key: said[key] for key in said if key not in ('torch', 'device')}) }")
    for kind in ("module", "source", "phase", "step"):
        answer = trace.memory(by=kind)
        rows = answer.rows
        placed = rows.filter(pl.col("name").is_not_null())["bytes"].sum()
        print(f"  by {kind}: {placed / max(1, rows['bytes'].sum()):.1%} of the bytes at the peak have one")
    return int(not right)


def _check_job(out: Path) -> int:
    import polars as pl

    import thence

    ranks = json.loads((out / "job.json").read_text())["ranks"]
    trace = thence.open(out / "job_recording")
    answer = trace.memory("source")
    print(answer)
    found = answer.allocators.sort("rank")["peak_bytes"].to_list()
    said = [rank["max_memory_allocated"] for rank in ranks]
    planted = answer.outside.filter(pl.col("name").str.contains("plant"))["bytes"].to_list()
    right = found == said and planted == [PLANTED_BYTES] * len(ranks)
    print(f"job: peaks {found}, said {said}; planted outside {planted}: {'right' if right else 'WRONG'}")
    for row in answer.allocators.iter_rows(named=True):
        print(
            f"  { ({name: row[name] for name in ('rank', 'reserved_bytes', 'outside_bytes', 'outside_rest_bytes')}) }"
        )
    return int(not right)


def _check_jax(out: Path) -> int:
    import thence

    said = json.loads((out / "jax.json").read_text())["pool"]
    trace = thence.open(out / "jax_recording")
    print(trace.memory("source"))
    right = said in trace.tables.memory["bytes"].to_list()
    print(f"jax: its pool of {said:,} bytes {'was' if right else 'WRONG: was not'} asked of CUDA")
    return int(not right)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _interval(values: list[float]) -> tuple[float, float]:
    dice = random.Random(0)
    medians = sorted(_median(dice.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[1949]


def main() -> None:
    """Reads the options."""
    parser = documented_parser(__doc__)
    parser.add_argument("part", choices=("record", "check", "program"))
    parser.add_argument("out", type=Path)
    parser.add_argument("program", nargs="?", choices=PROGRAMS)
    options = parser.parse_args()
    if options.part == "record":
        record(options.out)
    elif options.part == "check":
        sys.exit(check(options.out))
    else:
        run = {
            "cost": measure_cost,
            "recorded": record_training,
            "own": keep_own_history,
            "job": record_job,
            "jax": record_jax,
        }[options.program]
        (options.out / f"{options.program}.json").write_text(json.dumps(run(options.out)))


if __name__ == "__main__":
    main()
