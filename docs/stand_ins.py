"""Files for the names that commands of the documentation use: ``trace.json.gz``, ``traces/`` and others.

A reader has a trace of their own for these; here recordings of tests/data stand in. Pages whose output is shown name
files of tests/data themselves.
"""

from __future__ import annotations

import gzip
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"
EAGER = ROOT / "src" / "thence" / "data" / "torch_eager_stack_rank0.json.gz"
JOB = tuple(DATA / "torch" / "waits" / f"group_rank{rank}.json.gz" for rank in range(4))
"""Four ranks, of which little was kept, so that they are read quickly."""
GRAPHS = DATA / "torch" / "graphs"
INSIDE = DATA / "inside"
XLA = DATA / "jax" / "jax_single_nocb.xplane.pb.gz"
STREAMS = DATA / "jax" / "streams_moved.xplane.pb"
NSIGHT = DATA / "nsight"

FILES = {
    "trace.json.gz": EAGER,
    "memory.json.gz": DATA / "torch" / "memory" / "conv_training.json.gz",
    "rank0.json.gz": JOB[0],
    "rank1.json.gz": JOB[1],
    "server.json.gz": EAGER,
    "profile.xplane.pb": STREAMS,
    "host.xplane.pb": STREAMS,
    "profile_dir/host.xplane.pb": STREAMS,
    "logs/host.2026_01_02_09_00_00.pt.trace.json.gz": EAGER,
    "run.sqlite.gz": NSIGHT / "jax_train.sqlite.gz",
    "rank0.zip": NSIGHT / "jax_train.sqlite.gz",  # read by its content, whatever it is called
    "rank1.zip": NSIGHT / "jax_train.sqlite.gz",
    "replay.json.gz": GRAPHS / "block_replay.json.gz",
    "labels.json": GRAPHS / "block_labels.json",
    "eager.json.gz": GRAPHS / "block_eager.json.gz",
    "captures/layer0.json.gz": GRAPHS / "block_eager.json.gz",
    "gemm.npz": INSIDE / "merge" / "cupy-0.npz",
    "k.npz": INSIDE / "merge" / "cupy-0.npz",
    "recording/trace.json.gz": INSIDE / "merge" / "trace.json.gz",
    "profiles/a.npz": INSIDE / "gpu_cupy.npz",
    "profiles/b.npz": INSIDE / "gpu_triton.npz",
    "history.jsonl": DATA / "history" / "slower.jsonl",
    "mosaic.npy": INSIDE / "mosaic.npy",
    "mosaic.json": INSIDE / "mosaic.json",
}
CLONE = ("tests/data", "src/thence/data", "examples")
TREES = {
    "run": DATA / "recording" / "two_ranks",
    "sampled": DATA / "stalls" / "triton",
    "run1/0": DATA / "recording" / "two_ranks",
    "jax_run": DATA / "jax" / "recording",
    "DUMP_DIR": NSIGHT / "hlo_dump",
}
BEFORE = ("a1", "a2", "a3", "A", "before.json", "main_runs/1.json", "main_runs/2.json", "main_runs/3.json")
AFTER = ("b1", "b2", "b3", "B", "after.json", "new1", "new2", "new3", "new1.json", "new2.json")


def clone(folder: Path) -> None:
    """Puts what a clone of the repository holds, and commands with shown output read, into a folder."""
    for name in CLONE:
        shutil.copytree(ROOT / name, folder / name)


def stage(folder: Path) -> None:
    """Puts every file that a command without shown output may name into a folder."""
    clone(folder)
    for name, tree in TREES.items():
        shutil.copytree(tree, folder / name)
    for name, file in FILES.items():
        _copy(file, folder / name)
    for file in JOB:
        _copy(file, folder / "traces" / file.name)
    shutil.copy(folder / "run.sqlite.gz", folder / "run.sqlite")
    _runs(folder)


def _copy(file: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, target)


def _runs(folder: Path) -> None:
    """Runs of a small program on both sides of a change that makes its attention slower by a tenth."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from dataclasses import replace

    from diff_runs import STEP, trace_file

    slower = tuple(replace(w, us=1.1 * w.us) if w.label == "forward/attention" else w for w in STEP)
    for seed, name in enumerate((*BEFORE, *AFTER)):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        trace_file(path, seed, slower if name in AFTER else STEP)
    trace_file(folder / "trace.json", len(BEFORE + AFTER), steps=8)
    for name in ("before.json", "after.json"):
        (folder / f"{name}.gz").write_bytes(gzip.compress((folder / name).read_bytes()))
